"""Texts to hide facts in: books without their licence, or generated prose; cut to a length in tokens."""

from __future__ import annotations

import gzip
import json
import random
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from longchat_cli.documents.encoding import Undecodable, decode
from longchat_cli.errors import BadInput, MissingInput, UsageError

Count = Callable[[str], int]
"""Tokens of a text by the model's tokenizer."""

_END = re.compile(r"(?<!\bMr)(?<!\bMrs)(?<!\bDr)(?<!\bSt)[.!?][\"'”’)]*\s+(?=[\"'“‘(]*[A-Z])")
_START_MARK = re.compile(r"\*\*\* ?START OF TH(?:IS|E) PROJECT GUTENBERG.*\n")
_END_MARK = re.compile(r"\*\*\* ?END OF TH(?:IS|E) PROJECT GUTENBERG")


def sentence_ends(text: str) -> list[int]:
    """Offsets right behind a sentence and its white space, where another sentence can be put in."""
    return [match.end() for match in _END.finditer(text)]


def strip_gutenberg(text: str) -> str:
    """A Project Gutenberg book without its licence header and footer; other text as it is."""
    start, end = _START_MARK.search(text), _END_MARK.search(text)
    return text[start.end() if start else 0 : end.start() if end else len(text)].strip() + "\n"


def cut(text: str, tokens: int, count: Count, rng: random.Random) -> str:
    """A random stretch of whole sentences of `text`, the longest of at most `tokens` from where it begins.

    Raises UsageError when the text is more than a tenth too short, or `tokens` is not positive.
    """
    if tokens < 1:
        raise UsageError("the length leaves no room for a text", "", "ask for longer texts or fewer facts")
    ends = [0, *sentence_ends(text), len(text)]
    sample = text[:100_000]
    size = int(tokens * len(sample) / max(count(sample), 1))
    random_start = ends[bisect_left(ends, rng.randint(0, max(len(text) - size * 5 // 4, 0)))]
    for begin in (random_start, 0):
        low, high = bisect_right(ends, begin), bisect_left(ends, begin + 2 * size)
        stop = ends[
            bisect_right(ends, tokens, low, max(low, high), key=lambda end: count(text[begin:end])) - 1
        ]
        if stop < len(text) or count(text[begin:]) >= 0.9 * tokens:
            return text[begin:stop]
    raise UsageError(f"the text has fewer than {tokens:,} tokens", "", "name a longer one with --data")


def plant(text: str, sentences: Sequence[str], rng: random.Random) -> tuple[str, list[float]]:
    """Put each sentence between two sentences of `text` at its own random depth.

    Returns the new text and each sentence's depth, 0 (start) to 1 (end), in the order of `sentences`.
    Raises UsageError when there are fewer places than sentences.
    """
    gaps = [0, *sentence_ends(text)]
    if len(gaps) < len(sentences):
        raise UsageError(f"the text is too short for {len(sentences)} facts", "", "ask for longer texts")
    places = rng.sample(gaps, len(sentences))
    order = sorted(range(len(sentences)), key=lambda index: places[index])
    parts, done = [], 0
    for index in order:
        parts += [text[done : places[index]], sentences[index], " "]
        done = places[index]
    return "".join([*parts, text[done:]]), [place / max(len(text), 1) for place in places]


def load_text(paths: Sequence[Path]) -> str | None:
    """The first text file among `paths` (folders are searched), without Gutenberg's licence; None without.

    Raises BadInput for one that holds no text.
    """
    for file in _files(paths, (".txt",)):
        try:
            text = decode(file.read_bytes()).text
        except Undecodable as error:
            raise BadInput(f"{file} is no text", str(error)) from error
        return strip_gutenberg(text.replace("\r\n", "\n"))
    return None


def load_records(paths: Sequence[Path], field: str) -> list[dict[str, Any]]:
    """The records that hold `field` in the .jsonl and .jsonl.gz files among `paths`. Raises BadInput."""
    records = []
    for file in _files(paths, (".jsonl", ".jsonl.gz")):
        data = file.read_bytes()
        try:
            lines = (gzip.decompress(data) if file.suffix == ".gz" else data).decode().splitlines()
            records += [record for record in map(json.loads, lines) if field in record]
        except (OSError, ValueError, EOFError, TypeError) as error:
            raise BadInput(f"{file} is not a file of JSON lines", str(error)) from error
    return records


def _files(paths: Sequence[Path], endings: tuple[str, ...]) -> Iterator[Path]:
    for path in paths:
        if not path.exists():
            raise MissingInput(f"{path} does not exist")
        inside = sorted(path.rglob("*")) if path.is_dir() else [path]
        yield from (file for file in inside if file.name.endswith(endings))
