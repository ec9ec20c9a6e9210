"""Text that is not the document's own: licences, navigation, running heads. Found, and kept or dropped."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise

from longchat_cli.documents.document import Cut, Document, Mark

CHOICES = ("drop", "keep")
_START = re.compile(r"^\*{3} ?START OF (?:THE|THIS) PROJECT GUTENBERG EBOOK[^*]{0,300}\*{3}\s*", re.MULTILINE)
_END = re.compile(
    r"^(?:End of (?:the |this )?Project Gutenberg[^\n]*\s+)?"
    r"\*{3} ?END OF (?:THE|THIS) PROJECT GUTENBERG EBOOK[^*]{0,300}\*{3}.*",
    re.DOTALL | re.MULTILINE,
)
_ABOUT = re.compile(
    r"^(?:Title|Author|Editor|Translator|Illustrator): .*\n(?:[ \t]+\S.*\n)*\n*", re.MULTILINE
)
_NAME = "Project Gutenberg"
_TOP, _HEAD = 1000, 50_000
"""Characters in which its texts name it, and in which the header ends."""


def settle(document: Document, choice: str) -> Document:
    """The document with its boilerplate dropped or kept, and a note that says so.

    A document that is nothing else keeps it.
    """
    cuts = [*document.cuts, *_gutenberg(document.text)]
    if not cuts:
        return document
    dropped = choice == "drop"
    text, marks = _without(document, cuts) if dropped else (document.text, document.marks)
    if not text.strip():
        return replace(document, cuts=())
    note = f"boilerplate {'dropped' if dropped else 'kept'}: {_sums(cuts)}"
    return replace(document, text=text, marks=marks, cuts=(), notes=(*document.notes, note))


def _gutenberg(text: str) -> Iterator[Cut]:
    """Project Gutenberg's header (but not the lines that name title and author) and its licence."""
    if _NAME not in text[:_TOP]:  # a text about it, or a program that looks for its marks
        return
    what = f"{_NAME} licence"
    start = _START.search(text, 0, _HEAD)
    if start:
        kept = [(match.start(), match.end()) for match in _ABOUT.finditer(text, 0, start.start())]
        gaps = pairwise([0, *(edge for span in kept for edge in span), start.end()])
        yield from (Cut(begin, end, what) for begin, end in list(gaps)[::2] if begin < end)
    if end := _END.search(text, start.end() if start else 0):
        yield Cut(end.start(), end.end(), what)


def _sums(cuts: Iterable[Cut]) -> str:
    sums: dict[str, int] = {}
    for cut in cuts:
        sums[cut.what] = sums.get(cut.what, 0) + cut.end - cut.begin
    return ", ".join(f"{what} ({count:,} characters)" for what, count in sums.items())


def _without(document: Document, cuts: Iterable[Cut]) -> tuple[str, tuple[Mark, ...]]:
    """(text, marks) of what is left; cuts may overlap, and no blank lines are left at the text's start."""
    text, marks = document.text, document.marks
    pieces: list[str] = []
    kept: list[Mark] = []
    length, number = 0, 0
    for begin, end in _remaining(cuts, len(text)):
        if not length:
            begin += len(text[begin:end]) - len(text[begin:end].lstrip("\n"))
        if begin == end:
            continue
        where = document.locate(begin, begin + 1)
        kept.append(Mark(length, where.place, where.line))
        while number < len(marks) and marks[number].begin < end:
            mark = marks[number]
            if mark.begin > begin:
                kept.append(mark._replace(begin=length + mark.begin - begin))
            number += 1
        pieces.append(text[begin:end])
        length += end - begin
    return "".join(pieces), tuple(kept)


def _remaining(cuts: Iterable[Cut], length: int) -> Iterator[tuple[int, int]]:
    at = 0
    for cut in sorted(cuts):
        if cut.begin > at:
            yield at, cut.begin
        at = max(at, cut.end)
    yield at, length
