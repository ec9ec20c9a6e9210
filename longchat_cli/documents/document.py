"""What reading gives: documents whose every character has a place in a file, and what was skipped."""

from __future__ import annotations

import re
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Location:
    """Lines `line` to `end_line` (1-based, inclusive) of `source`."""

    source: str
    line: int
    end_line: int

    def __str__(self) -> str:
        return f"{self.source}:{self.line}" + (f"-{self.end_line}" if self.end_line > self.line else "")


@dataclass(frozen=True)
class Document:
    """One readable text.

    `text` has only `\\n` as line end and no control characters but tab; its first `header` characters are
    not in the file (the path that heads each file of a folder). `notes` say what was changed while reading.
    """

    name: str
    text: str
    encoding: str = "utf-8"
    notes: tuple[str, ...] = ()
    header: int = 0

    def locate(self, begin: int, end: int) -> Location:
        """The lines of the file that hold `text[begin:end]`; out-of-range offsets are clamped."""
        return Location(self.name, self._line(begin), self._line(max(begin, end - 1)))

    def _line(self, offset: int) -> int:
        return bisect_right(self._line_starts, min(max(offset, self.header), len(self.text)))

    @cached_property
    def _line_starts(self) -> list[int]:
        return [self.header, *(match.end() for match in re.compile("\n").finditer(self.text, self.header))]


@dataclass(frozen=True)
class Skip:
    """A file or folder that was left out, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Collection:
    """All that `read` found, in reading order; `ignored` counts entries left out by .gitignore rules."""

    documents: list[Document]
    skips: list[Skip]
    ignored: int = 0
