"""What reading gives: documents whose every character has a place in a file, and what was skipped."""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple


@dataclass(frozen=True)
class Location:
    """Where a passage stands: lines `line` to `end_line` (1-based, inclusive) of `source`.

    `place` names the part of a file that has no lines of its own to show ("page 3", a chapter's title,
    "cell 2", "page 3 to page 4"); lines then count within the place they are in.
    """

    source: str
    line: int
    end_line: int
    place: str = ""

    def __str__(self) -> str:
        if self.place:
            return f"{self.source}, {self.place}"
        return f"{self.source}:{self.line}" + (f"-{self.end_line}" if self.end_line > self.line else "")


class Mark(NamedTuple):
    """From character `begin` of a text on, line `line` of `place` is read; each `\\n` adds one."""

    begin: int
    place: str
    line: int


class Cut(NamedTuple):
    """Characters [begin, end) of a text are boilerplate of the kind `what`."""

    begin: int
    end: int
    what: str


@dataclass(frozen=True)
class Skip:
    """A file, folder or part of a file that was left out, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Document:
    """One readable text.

    `text` has only `\\n` as line end and no control characters but tab; its first `header` characters are
    not in the file (the path that heads each file of a folder). `notes` say what was changed while reading,
    `missing` what could not be read. `marks` (by `begin`, the first at 0) and `cuts` count characters behind
    the header; without marks the text's lines are the file's.
    """

    name: str
    text: str
    encoding: str = "utf-8"
    notes: tuple[str, ...] = ()
    header: int = 0
    marks: tuple[Mark, ...] = (Mark(0, "", 1),)
    cuts: tuple[Cut, ...] = ()
    missing: tuple[Skip, ...] = ()

    def locate(self, begin: int, end: int) -> Location:
        """Where `text[begin:end]` stands in the file; out-of-range offsets are clamped."""
        first, line = self._spot(begin)
        last, end_line = self._spot(max(begin, end - 1))
        return Location(self.name, line, end_line, first if first == last else f"{first} to {last}")

    def headed(self) -> Document:
        """The same document with its name above the text, as the files of a folder have it."""
        header = f"File: {self.name}\n\n"
        return replace(self, text=header + self.text, header=len(header))

    def _spot(self, offset: int) -> tuple[str, int]:
        offset = min(max(offset, self.header), len(self.text))
        mark = self.marks[bisect_right(self._begins, offset - self.header) - 1]
        return mark.place, mark.line + self._row(offset) - self._row(mark.begin + self.header)

    def _row(self, offset: int) -> int:
        return bisect_right(self._line_starts, offset)

    @cached_property
    def _begins(self) -> list[int]:
        return [mark.begin for mark in self.marks]

    @cached_property
    def _line_starts(self) -> list[int]:
        return [self.header, *(match.end() for match in re.compile("\n").finditer(self.text, self.header))]


@dataclass(frozen=True)
class Collection:
    """All that `read` found, in reading order.

    `ignored` counts entries left out by ignore files, --include and --exclude.
    """

    documents: list[Document]
    skips: list[Skip]
    ignored: int = 0

    def add(self, result: Document | Skip) -> None:
        """Append a document with what is missing in it, or a skip."""
        if isinstance(result, Document):
            self.documents.append(result)
            self.skips.extend(result.missing)
        else:
            self.skips.append(result)
