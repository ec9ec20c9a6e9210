"""PDF: the text layer page by page, and what pages have none."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from io import BytesIO
from itertools import groupby

from pypdf import PageObject, PdfReader
from pypdf.errors import DependencyError

from longchat_cli.documents.builder import Builder
from longchat_cli.documents.document import Cut, Document, Skip
from longchat_cli.documents.names import brief
from longchat_cli.documents.text import clean
from longchat_cli.errors import BadInput

_HEADS = "running heads"
_PICTURES = "without text (pictures?)"
_SHARING = 3
"""Pages that must share a first or last line before it counts as a running head."""


def parse(name: str, data: bytes) -> Document:
    """A PDF's bytes to a Document placed by page, counted from 1. Raises BadInput.

    Pages that are damaged or are pictures only are `missing`; empty ones are not.
    """
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # it logs each flaw that it works around
    texts: dict[int, str] = {}
    lost: dict[str, list[int]] = {}
    for number, page in enumerate(_pages(name, data), 1):
        text, reason = _text(page)
        if text.strip():
            texts[number] = text
        elif reason:
            lost.setdefault(reason, []).append(number)
    missing = tuple(Skip(name, f"{_numbered(numbers)} {reason}") for reason, numbers in lost.items())
    if not texts:
        why = missing[0].reason if missing else "no page has text"
        do = "recognise its text first, with ocrmypdf for example" if _PICTURES in lost else ""
        raise BadInput(f"{name} holds no text", why, do)
    builder, cuts = Builder(), []
    heads = _running_heads(list(texts.values()))
    for number, text in texts.items():
        builder.separate("\n\n")
        first, last = _edges(text)
        for row, line in enumerate(text.split("\n"), 1):
            before = builder.length
            builder.verbatim(line, row, f"page {number}")
            if row in (first, last) and _pattern(line) in heads:
                end = builder.length
                # With the line break that parts it from the rest of the page.
                cuts.append(
                    Cut(before, end, _HEADS) if row == last else Cut(end - len(line), end + 1, _HEADS)
                )
            builder.separate("\n")
    return Document(name, builder.text, "pdf", marks=tuple(builder.marks), cuts=tuple(cuts), missing=missing)


def _pages(name: str, data: bytes) -> Iterator[PageObject]:
    try:
        reader = PdfReader(BytesIO(data))
        if reader.is_encrypted and not reader.decrypt(""):
            raise BadInput(f"{name} cannot be read", "protected by a password")
        yield from reader.pages
    except BadInput:
        raise
    except DependencyError as error:
        raise BadInput(f"{name} cannot be read", "encrypted in a way that is not supported") from error
    except Exception as error:  # a damaged file can raise anything in the parser
        raise BadInput(f"{name} cannot be read", f"damaged ({brief(error)})") from error


def _text(page: PageObject) -> tuple[str, str]:
    """(text, why there is none)."""
    try:
        text = clean(page.extract_text())[0]
        contents = page.get_contents()
        drawn = contents is not None and contents.get_data().strip()
        return text, _PICTURES if drawn else ""
    except Exception:  # as in _pages; the other pages can still be read
        return "", "damaged"


def _running_heads(texts: Sequence[str]) -> set[str]:
    """Patterns of lines that a quarter of the pages, three at least, begin or end with."""
    counts = Counter(
        pattern
        for text in texts
        for pattern in {_pattern(text.split("\n")[row - 1]) for row in _edges(text)}
        if pattern
    )
    return {pattern for pattern, count in counts.items() if count >= max(_SHARING, len(texts) / 4)}


def _edges(text: str) -> tuple[int, int]:
    """Numbers of the first and last line that are not blank."""
    rows = [row for row, line in enumerate(text.split("\n"), 1) if line.strip()]
    return rows[0], rows[-1]


def _pattern(line: str) -> str:
    """The line with any page number in it as one sign."""
    return re.sub(r"\d+", "#", line.strip())


def _numbered(numbers: Iterable[int]) -> str:
    """[3, 4, 5, 9] -> 'pages 3-5, 9'."""
    runs = [
        [number for _, number in group]
        for _, group in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    ]
    shown = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"page {shown}" if shown.isdigit() else f"pages {shown}"
