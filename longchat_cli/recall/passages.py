"""Texts cut into sentences and blocks, and found blocks grown into passages worth reading.

Every offset is a character of the document's text, so whatever is found can be cited.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal

import numpy as np

BLOCK_TOKENS = 64
LONGEST = 400
"""Characters of the longest sentence; longer ones are cut (about 100 tokens, within the encoder's 128)."""
ASKS = ("?", "？", "؟")

_STOP = re.compile(r"[.!?…]+['\"”’»)\]]*|[。！？｡]+[」』”’）】》]*")
_WIDE = "。！？｡"
_WORD = re.compile(r"[\w.]*$")
_CUTS = (re.compile(r"[;:]\s|[；：]"), re.compile(r"[,)]\s|[，、]|—"), re.compile(r"\s"))
ABBREVIATION = re.compile(
    "mr|mrs|ms|messrs|mme|mlle|dr|prof|st|sr|jr|rev|hon|gen|col|capt|cpt|lt|maj|sgt|adm|gov|sen|rep|pres|"
    "vs|viz|etc|cf|al|ca|fig|figs|nos|vol|vols|ch|chap|sec|pp|ed|eds|op|cit|approx|dept|est|inc|ltd|corp|bros|"
    "mt|ft|jan|feb|mar|apr|jun|jul|aug|sep|sept|oct|nov|dec|e[.]g|i[.]e|a[.]m|p[.]m|[a-hj-z]|[a-z]([.][a-z])+"
)


@dataclass(frozen=True)
class Outline:
    """One text with its sentences and blocks.

    `sentences` int64 [S, 2] holds begin and end; `blocks` int64 [B + 1] the first sentence of each block,
    closed by S; `tokens` int64 [n] where each token of the model's tokenizer begins, ascending.
    """

    name: str
    text: str
    sentences: np.ndarray
    blocks: np.ndarray
    tokens: np.ndarray

    @classmethod
    def of(cls, name: str, text: str, tokens: Sequence[int], block_tokens: int = BLOCK_TOKENS) -> Outline:
        """Cut `text`, whose tokens begin at the characters `tokens`, into blocks of about `block_tokens`."""
        sentences, paragraphs = split_sentences(text)
        starts = np.asarray(tokens, dtype=np.int64)
        sizes = np.diff(_first_tokens(sentences, starts), append=len(starts))
        return cls(name, text, sentences, _pack(sizes, paragraphs, block_tokens), starts)

    def first_tokens(self) -> np.ndarray:
        """Index of each sentence's first token, int64 [S]; the space before a sentence is its own."""
        return _first_tokens(self.sentences, self.tokens)

    def sizes(self) -> np.ndarray:
        """Tokens of each sentence, int64 [S]."""
        return np.diff(self.first_tokens(), append=len(self.tokens))

    def count(self, begin: int, end: int) -> int:
        """Tokens that reach into the characters [begin, end)."""
        low, high = self._tokens_in(begin, end)
        return high - low

    def block_range(self, block: int) -> tuple[int, int]:
        """Begin and end of a block."""
        first, after = self.blocks[block : block + 2]
        return int(self.sentences[first, 0]), int(self.sentences[after - 1, 1])

    def grow(self, begin: int, end: int, margin: int) -> tuple[int, int]:
        """Add whole sentences on both sides, as near to `margin` tokens each as their ends allow."""
        low, high = self._tokens_in(begin, end)
        firsts = self.first_tokens()
        # A sentence is taken when more than half of it lies within the margin.
        middles = (firsts + np.append(firsts[1:], len(self.tokens))) / 2
        taken = self.sentences[(middles > low - margin) & (middles < high + margin)]
        return (min(begin, int(taken[0, 0])), max(end, int(taken[-1, 1]))) if len(taken) else (begin, end)

    def trim(self, begin: int, end: int, focus: int, budget: int) -> tuple[int, int]:
        """Cut [begin, end) to `budget` tokens, a quarter of them before the character `focus`."""
        low, high = self._tokens_in(begin, end)
        if high - low <= budget:
            return begin, end
        middle = int(np.searchsorted(self.tokens, focus, side="right")) - 1
        low = min(max(low, middle - budget // 4), high - budget)
        stop = int(self.tokens[low + budget]) if low + budget < len(self.tokens) else end
        return max(begin, int(self.tokens[low])), min(stop, end)

    def _tokens_in(self, begin: int, end: int) -> tuple[int, int]:
        low = int(np.searchsorted(self.tokens, begin, side="right")) - 1
        return max(low, 0), int(np.searchsorted(self.tokens, end))


@dataclass(frozen=True)
class Passage:
    """Characters [begin, end) of document number `document`, called `source`.

    `focus` is the sentence in it that answers the question best; `parts` the scores behind `score`. A
    `whole` one, a definition with its body, needs no text around it.
    """

    document: int
    source: str
    begin: int
    end: int
    score: float
    focus: tuple[int, int]
    parts: dict[str, float] = field(default_factory=dict)
    whole: bool = False


@dataclass(frozen=True)
class ReadingPlan:
    """How a model reads best: the number of passages, their margin in tokens on each side, their order.

    The default suits the smallest models, which answer best from the first passage alone and are led away by
    what is not about the question.
    """

    passages: int = 1
    margin: int = 0
    order: Literal["document", "best first", "best last"] = "document"


def choose(
    ranked: Sequence[Passage], outlines: Sequence[Outline], plan: ReadingPlan, budget: int
) -> list[Passage]:
    """The passages to read, grown, merged where they touch, in the plan's order, `budget` tokens at most.

    `ranked` comes best first. The best passage is always there, cut around its focus if it must be.
    """
    taken: list[Passage] = []
    for passage in ranked[: plan.passages]:
        outline = outlines[passage.document]
        begin, end = outline.grow(passage.begin, passage.end, 0 if passage.whole else plan.margin)
        if not taken:
            begin, end = outline.trim(begin, end, passage.focus[0], budget)
        wider = merge([*taken, replace(passage, begin=begin, end=end)])
        if taken and sum(outlines[p.document].count(p.begin, p.end) for p in wider) > budget:
            break
        taken = wider
    if plan.order == "document":
        return sorted(taken, key=lambda p: (p.document, p.begin))
    return taken if plan.order == "best first" else taken[::-1]


def around(scores: np.ndarray, focus: int, sizes: np.ndarray, level: float, most: int) -> tuple[int, int]:
    """[first, after) of the sentences about `focus`: those that score `level`, a single lower one between.

    `scores` and `sizes` (tokens) are of all sentences in order; `most` tokens at most, but for the focus.
    """
    first, after = focus, focus + 1
    for step in (-1, 1):
        while True:
            edge = first if step < 0 else after - 1
            near = [edge + step, edge + 2 * step]
            good = [i for i in near if 0 <= i < len(scores) and scores[i] >= level]
            if not good:
                break
            wider = (good[0], after) if step < 0 else (first, good[0] + 1)
            if sizes[slice(*wider)].sum() > most:
                break
            first, after = wider
    return first, after


def merge(passages: Sequence[Passage]) -> list[Passage]:
    """Join passages that overlap or touch; the better one's score stays. Best first."""
    merged: list[Passage] = []
    for passage in sorted(passages, key=lambda p: (p.document, p.begin)):
        last = merged[-1] if merged else None
        if last and last.document == passage.document and passage.begin <= last.end:
            best = max(last, passage, key=lambda p: p.score)
            merged[-1] = replace(best, begin=last.begin, end=max(last.end, passage.end))
        else:
            merged.append(passage)
    return sorted(merged, key=lambda p: -p.score)


def split_sentences(text: str) -> tuple[np.ndarray, np.ndarray]:
    """Begin and end of each sentence, int64 [S, 2], and the paragraph it is in, int64 [S].

    Line ends inside wrapped prose are spaces; in code, lists, verse and logs each line stands alone.
    Linear in the text's length, whatever it holds.
    """
    bounds: list[tuple[int, int]] = []
    paragraphs: list[int] = []
    for number, lines in enumerate(_paragraphs(text)):
        for begin, end in _unwrap(text, lines):
            pieces = [p for s in _split(text, begin, end) for p in _cut(text, *s)]
            bounds += pieces
            paragraphs += [number] * len(pieces)
    return np.array(bounds, dtype=np.int64).reshape(-1, 2), np.array(paragraphs, dtype=np.int64)


def asks(sentence: str) -> bool:
    """Whether it is a question, in quotation marks or brackets or not."""
    return sentence.rstrip("\"'”’»)").endswith(ASKS)


def with_neighbours(text: str, within: tuple[int, int], focus: tuple[int, int]) -> tuple[int, int]:
    """The sentence `focus` and the ones before and behind it, all in the range `within` of `text`."""
    bounds, _ = split_sentences(text[slice(*within)])
    begins, ends = (bounds + within[0]).T
    before, behind = begins[begins < focus[0]], ends[ends > focus[1]]
    return int(before[-1]) if len(before) else focus[0], int(behind[0]) if len(behind) else focus[1]


def _paragraphs(text: str) -> Iterator[list[tuple[int, int]]]:
    """Runs of lines without a blank line between, each line stripped of white space."""
    lines: list[tuple[int, int]] = []
    start = 0
    while start < len(text):
        stop = text.find("\n", start)
        stop = len(text) if stop < 0 else stop
        line = _strip(text, start, stop)
        if line:
            lines.append(line)
        elif lines:
            yield lines
            lines = []
        start = stop + 1
    if lines:
        yield lines


def _unwrap(text: str, lines: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Join the lines of wrapped prose: a line is wrapped if the next one's first word had no room on it."""
    width = max(end - begin for begin, end in lines)
    full = [end - begin + 1 + _first_word(text, *after) > width for (begin, end), after in pairwise(lines)]
    prose = width >= 40 and sum(full) > 0.6 * len(full)
    start = lines[0][0]
    for ((_, end), (begin, _)), wrapped in zip(pairwise(lines), full, strict=True):
        if not (prose and wrapped):
            yield start, end
            start = begin
    yield start, lines[-1][1]


def _first_word(text: str, begin: int, end: int) -> int:
    space = text.find(" ", begin, end)
    return (end if space < 0 else space) - begin


def _split(text: str, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Sentences of one run of prose."""
    start = begin
    for stop in _STOP.finditer(text, begin, end):
        if stop.end() < end and _ends(text, start, stop):
            yield start, stop.end()
            start = _skip_space(text, stop.end(), end)
    if start < end:
        yield start, end


def _ends(text: str, start: int, stop: re.Match[str]) -> bool:
    """Whether the full stop, question mark or the like `stop` ends the sentence begun at `start`."""
    if stop[0][0] in _WIDE:
        return True
    after = stop.end()
    if not text[after].isspace():
        return False
    following = text[after : after + 40].lstrip().lstrip("\"'“‘«([*_-—")
    if following[:1].islower():
        return False
    if stop[0] != ".":
        return True
    word = _WORD.search(text[max(start, stop.start() - 20) : stop.start()])
    before = word[0].casefold() if word else ""
    return not ABBREVIATION.fullmatch(before)


def _cut(text: str, begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Cut what is longer than LONGEST at the last clause, comma or space of its later half, or anywhere."""
    while end - begin > LONGEST:
        low, high = begin + LONGEST // 2, begin + LONGEST
        cuts = (max((c.end() for c in cut.finditer(text, low, high)), default=0) for cut in _CUTS)
        stop = next((c for c in cuts if c), high)
        yield _strip(text, begin, stop) or (begin, stop)
        begin = _skip_space(text, stop, end)
    if begin < end:
        yield begin, end


def _strip(text: str, begin: int, end: int) -> tuple[int, int] | None:
    """The range without white space at its ends; None if nothing is left."""
    line = text[begin:end]
    left = len(line) - len(line.lstrip())
    right = len(line.rstrip())
    return (begin + left, begin + right) if left < right else None


def _skip_space(text: str, begin: int, end: int) -> int:
    while begin < end and text[begin].isspace():
        begin += 1
    return begin


def _first_tokens(sentences: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.searchsorted(tokens, sentences[:-1, 1])])[: len(sentences)]


def _pack(sizes: np.ndarray, paragraphs: np.ndarray, limit: int) -> np.ndarray:
    """First sentences of blocks: whole sentences up to `limit` tokens, closed early at a paragraph's end.

    Early is from half full; a sentence longer than `limit` is a block of its own.
    """
    firsts: list[int] = []
    held = 0
    for i, size in enumerate(sizes.tolist()):
        turn = i > 0 and paragraphs[i] != paragraphs[i - 1]
        if not firsts or held + size > limit or (turn and 2 * held >= limit):
            firsts.append(i)
            held = 0
        held += size
    return np.array([*firsts, len(sizes)], dtype=np.int64)
