"""What an answer can show for itself: sentences verified in the documents, and the text it rested on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from longchat_cli.citations import Checker, Range
from longchat_cli.documents import Document, Location
from longchat_cli.prompt import Prompt, Region
from longchat_cli.recall.passages import split_sentences
from longchat_cli.terminal_text import Sanitizer

MOST = 3
"""Passages an answer is said to rest on."""
LEAST = 0.1
"""Share of the attention to documents from which a passage is named."""
EXCERPT = 60


class Sources:
    """Looks answers up in documents; they are indexed at the first one."""

    def __init__(self, documents: Sequence[Document]) -> None:
        self._documents = documents
        self._checker: Checker | None = None

    def citations(self, answer: str, read: Sequence[Range] = ()) -> list[dict[str, Any]]:
        """One entry per sentence, as `Citation.as_json`; of equal places one in `read` is taken."""
        self._checker = self._checker or Checker(self._documents)
        found = self._checker.check(answer, read)
        return [citation.as_json(answer, self._documents) for citation in found]

    def rested(
        self, prompt: Prompt, paid: Sequence[float], read: Sequence[Range] = ()
    ) -> list[dict[str, Any]]:
        """What of the documents the answer looked at: each passage in `read`, or else the leading sentences.

        `paid` is the attention each token of `prompt` got. It counts squared: the few tokens an answer is
        taken from outweigh the background of long passages. Shares add up to 1 over all that was read.
        """
        tokens = list(
            _tokens(prompt, paid, {d.name: n for n, d in reversed(list(enumerate(self._documents)))})
        )
        total = sum(weight for _, _, weight in tokens)
        if not total:
            return []
        weighed: list[tuple[float, Range]] = []
        for number in sorted({number for number, _, _ in tokens}):
            offsets, weights = np.array([t[1:] for t in tokens if t[0] == number]).T
            ranges = self._ranges(number, read)
            firsts = [begin for _, begin, _ in ranges]
            index = np.searchsorted(firsts, offsets, side="right") - 1
            sums = np.bincount(np.maximum(index, 0), weights, len(ranges))
            weighed += zip((sums / total).tolist(), ranges, strict=True)
        best = sorted(weighed, key=lambda pair: -pair[0])
        if not read:
            best = [pair for pair in best[:MOST] if pair[0] >= LEAST] or best[:1]
        return [self._describe(share, *place) for share, place in best]

    def _ranges(self, number: int, read: Sequence[Range]) -> list[Range]:
        if read:
            return sorted(place for place in read if place[0] == number)
        bounds, _ = split_sentences(self._documents[number].text)
        return [(number, begin, end) for begin, end in bounds.tolist()]

    def _describe(self, share: float, number: int, begin: int, end: int) -> dict[str, Any]:
        return {**self.quote(number, begin, end), "share": round(share, 4)}

    def quote(self, number: int, begin: int, end: int) -> dict[str, Any]:
        """The characters [begin, end) of document `number` and where they stand, as plain values."""
        document = self._documents[number]
        where = asdict(document.locate(begin, end))
        return {**where, "begin": begin, "end": end, "text": document.text[begin:end]}


def tokens_read(prompt: Prompt) -> int:
    """Tokens of documents in a prompt; a place that is said again counts once."""
    regions: list[Region] = []
    for region in prompt.regions:
        if region.source is not None and not any(_within(region, other) for other in regions):
            regions.append(region)
    return sum(region.stop - region.start for region in regions)


def _within(region: Region, other: Region) -> bool:
    return region.source == other.source and other.begin <= region.begin and region.end <= other.end


def _tokens(
    prompt: Prompt, paid: Sequence[float], numbers: Mapping[str, int]
) -> Iterator[tuple[int, int, float]]:
    """Document, character and squared attention of each token that comes from a document."""
    for region in prompt.regions:
        if region.source is not None and region.source in numbers:
            for index in range(region.start, min(region.stop, len(paid))):
                yield numbers[region.source], prompt.offsets[index], paid[index] ** 2


def place(found: Mapping[str, Any]) -> str:
    """`book.txt:120-131` or `paper.pdf, page 3` for a passage, quote or mention."""
    where = Location(*(found[name] for name in ("source", "line", "end_line", "place")))
    return Sanitizer().feed(str(where))


def footnotes(citations: Sequence[Mapping[str, Any]], rested: Sequence[Mapping[str, Any]]) -> str:
    """Short lines for a terminal: each sentence with its verdict and place, and what the answer rested on."""
    lines = []
    for number, citation in enumerate(citations, 1):
        where = f"{place(citation['quote'])}  " if citation["quote"] else ""
        sentence = " ".join(citation["sentence"].split())
        cut = f"{sentence[:EXCERPT].rstrip()}…" if len(sentence) > EXCERPT else sentence
        lines.append(f"[{number}] {citation['verdict']}  {where}{cut}")
    if rested:
        lines.append("read  " + ", ".join(f"{place(part)} ({part['share']:.0%})" for part in rested))
    return "\n".join(lines)
