"""The finder: which passages of long texts does a question need?

Words (BM25), meaning (a sentence encoder) and attention (retrieval heads of the decoder) each score every
sentence; a block is as good as its best sentence. `fused` adds them on absolute scales, so that a sure hit of
one is not dragged down by another's noise, as it is when ranks are added. In source code the definition of a
name that is asked about comes first. Where no place stands out, the model that will read has a word in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, Protocol, get_args

import numpy as np

from longchat_cli.errors import UsageError
from longchat_cli.pages import Store
from longchat_cli.recall.definitions import Definitions, definition_range
from longchat_cli.recall.kept import (
    NOTHING,
    OffsetTokenizer,
    Progress,
    Source,
    joined,
    outlines,
    sentence_vectors,
)
from longchat_cli.recall.passages import Outline, Passage, ReadingPlan, around, choose
from longchat_cli.recall.semantic import Encoder, Semantic

Find = Literal["fused", "lexical", "semantic", "attention"]

LEXICAL_WEIGHT = 0.5
"""Fused = cosine + 0.5 x lexical^2. Squared, since many shared words are evidence and a few are chance:
measured on 16k- and 64k-token books, it ranks keys and numbers as surely as 0.2 x lexical does and costs
questions in other words nothing."""

LIKELIHOOD_WEIGHT = 0.2
"""Fused adds 0.2 x the question's mean log-probability behind each of the best CANDIDATES, by the model."""
CANDIDATES = 8
"""Places that the model weighs, about 45 tokens each."""
SURE = 0.1
"""A best place that scores so much more than the second is not weighed: that saves the time, and it is right
more often than not."""

STANDS_OUT = 2.0
"""A sentence is about the question where it scores so many standard deviations above the mean of all."""
LONGEST_PASSAGE = 192
"""Tokens that a passage grows to, margins apart. Of 100 natural questions 89 have their answer in a passage
grown like this, of 107 tokens on average; 84 in one with 75 tokens around its block, twice as long."""


class HeadsIndex(Protocol):
    """Keys of the decoder's retrieval heads over the documents, `reused` tokens of which were kept."""

    reused: int

    def scores(self, question_ids: Sequence[int]) -> np.ndarray:
        """How much the heads attend to each token of the documents, 0 to 1, float32 [tokens]."""


class Judge(Protocol):
    """The model that will read; `recall.likelihood.Likelihood`."""

    def score(self, question: str, sentences: Sequence[str]) -> np.ndarray:
        """Mean log-probability of the question's tokens behind each sentence, float32 [sentences]."""


class Scorer(Protocol):
    """One way to see how near each sentence is to a question."""

    def score(self, question: str) -> np.ndarray:
        """Higher is nearer, 0 to about 1, float32 [sentences]."""


class Finder:
    """An index of documents that ranks their blocks for a question.

    What is made of them is kept in `store` and found there, `reused` tokens of it; `identity` names the
    tokenizer, `progress` follows the encoder. A `judge` has a word in `fused`.
    """

    judge: Judge | None = None

    def __init__(
        self,
        documents: Sequence[Source],
        tokenizer: OffsetTokenizer,
        encoder: Encoder | None = None,
        heads: HeadsIndex | None = None,
        store: Store | None = None,
        progress: Progress | None = None,
        identity: str = "",
        judge: Judge | None = None,
    ) -> None:
        self.judge = judge
        self.outlines, lexical = outlines(documents, tokenizer, store, identity)
        counts = [len(outline.sentences) for outline in self.outlines]
        self._firsts = joined([outline.blocks[:-1] for outline in self.outlines], counts)
        self._places = [(d, b) for d, o in enumerate(self.outlines) for b in range(len(o.blocks) - 1)]
        sentences = [o.text[i:j] for o in self.outlines for i, j in o.sentences.tolist()]
        self.scorers: dict[str, Scorer] = {
            "lexical": lexical,
            "definitions": Definitions(sentences),
        }
        self.reused = 0
        if encoder:
            sizes = np.concatenate([NOTHING, *(outline.sizes() for outline in self.outlines)])
            store = store and store.of(int(sizes.sum()), method="recall")
            vectors, self.reused = sentence_vectors(encoder, sentences, sizes, store, progress)
            self.scorers["semantic"] = Semantic(encoder, vectors)
        if heads:
            self.reused = heads.reused
            self.scorers["attention"] = _Attention(heads, tokenizer, self.outlines)

    def rank(self, question: str, k: int = 8, by: Find = "fused") -> list[Passage]:
        """The `k` best blocks, best first. Raises UsageError when `by` needs what is not there."""
        if not len(self._firsts):
            return []
        scores, parts = self._judged(question, by, *self._scores(question, by))
        return [self._passage(block, scores, parts) for block in self._order(scores)[:k]]

    def passages(self, question: str, k: int = 8, by: Find = "fused") -> list[Passage]:
        """The `k` best places, best first: what is about the question around its nearest sentence.

        Raises UsageError as `rank`.
        """
        if not len(self._firsts):
            return []
        scores, parts = self._scores(question, by)
        level = float(scores.mean() + STANDS_OUT * scores.std())
        judged, parts = self._judged(question, by, scores, parts)
        found: list[Passage] = []
        for block in self._order(judged):
            if len(found) == k:
                break
            passage = self._passage(block, judged, parts)
            if not any(_covers(other, passage) for other in found):
                found.append(self._related(block, passage, scores, level))
        return found

    def read(self, question: str, budget: int, plan: ReadingPlan, by: Find = "fused") -> list[Passage]:
        """The passages to read for `question`, `budget` tokens at most, in the plan's order."""
        ranked = [self._whole_definition(passage) for passage in self.passages(question, plan.passages, by)]
        return choose(ranked, self.outlines, plan, budget)

    def _scores(self, question: str, by: Find) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Of every sentence, and what they are made of."""
        parts = {name: self.scorers[name].score(question) for name in self._needed(by)}
        return _fuse(parts) if by == "fused" else parts[by], parts

    def _judged(
        self, question: str, by: Find, scores: np.ndarray, parts: dict[str, np.ndarray]
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """With what the judge adds to the best places where they are close: as far as they beat the worst."""
        blocks = self._order(scores)[:CANDIDATES]
        near = [self._nearest(block, scores) for block in blocks]
        if by != "fused" or not self.judge or len(near) < 2:
            return scores, parts
        if scores[near[0]] - scores[near[1]] > SURE or parts["definitions"][near[0]]:
            return scores, parts
        best = [self._passage(block, scores, {}) for block in blocks]
        likely = self.judge.score(question, [self.outlines[p.document].text[slice(*p.focus)] for p in best])
        gains = np.zeros_like(scores)
        gains[near] = LIKELIHOOD_WEIGHT * (likely - likely.min())
        return scores + gains, {**parts, "likelihood": gains}

    def _order(self, scores: np.ndarray) -> list[int]:
        """Blocks, best first: each is as good as its best sentence."""
        return np.argsort(-np.maximum.reduceat(scores, self._firsts), kind="stable").tolist()

    def _related(self, block: int, passage: Passage, scores: np.ndarray, level: float) -> Passage:
        """The passage as the sentences around its focus that score `level` or more."""
        outline, start = self.outlines[passage.document], self._start(block)
        own = scores[start : start + len(outline.sentences)]
        focus = int(np.searchsorted(outline.sentences[:, 0], passage.focus[0]))
        first, after = around(own, focus, outline.sizes(), level, LONGEST_PASSAGE)
        begin, end = int(outline.sentences[first, 0]), int(outline.sentences[after - 1, 1])
        return replace(passage, begin=begin, end=end)

    def _needed(self, by: Find) -> list[str]:
        if by == "fused":
            eye = next((name for name in ("semantic", "attention") if name in self.scorers), None)
            return [name for name in (eye, "lexical", "definitions") if name in self.scorers]
        if by not in get_args(Find):
            raise UsageError(f"'{by}' is no way to find", "", f"use one of {', '.join(get_args(Find))}")
        if by not in self.scorers:
            missing = "sentence encoder" if by == "semantic" else "index of attention heads"
            raise UsageError(f"cannot find by '{by}'", f"there is no {missing}", "use lexical or fused")
        return [by]

    def _whole_definition(self, passage: Passage) -> Passage:
        """A passage found because it defines what is asked for, as the definition with its body."""
        if not passage.parts.get("definitions"):
            return passage
        begin, end = definition_range(self.outlines[passage.document].text, passage.focus[0])
        return replace(passage, begin=begin, end=end, whole=True)

    def _nearest(self, block: int, scores: np.ndarray) -> int:
        """The best sentence of a block, by its number among all."""
        first = self._firsts[block]
        after = self._firsts[block + 1] if block + 1 < len(self._firsts) else len(scores)
        return int(first + np.argmax(scores[first:after]))

    def _start(self, block: int) -> int:
        """The first sentence of a block's document, by its number among all."""
        number, local = self._places[block]
        return int(self._firsts[block] - self.outlines[number].blocks[local])

    def _passage(self, block: int, scores: np.ndarray, parts: dict[str, np.ndarray]) -> Passage:
        number, local = self._places[block]
        outline, nearest = self.outlines[number], self._nearest(block, scores)
        begin, end = outline.block_range(local)
        focus_begin, focus_end = outline.sentences[nearest - self._start(block)].tolist()
        found = {name: float(part[nearest]) for name, part in parts.items()}
        score = float(scores[nearest])
        return Passage(number, outline.name, begin, end, score, (focus_begin, focus_end), found)


class _Attention:
    """A heads index, token by token, as a scorer of sentences."""

    def __init__(self, heads: HeadsIndex, tokenizer: OffsetTokenizer, outlines: Sequence[Outline]) -> None:
        self._heads, self._tokenizer = heads, tokenizer
        self._firsts = joined([o.first_tokens() for o in outlines], [len(o.tokens) for o in outlines])

    def score(self, question: str) -> np.ndarray:
        return np.maximum.reduceat(self._heads.scores(self._tokenizer.encode(question)), self._firsts)


def _covers(passage: Passage, other: Passage) -> bool:
    """The other's nearest sentence is in the passage."""
    return passage.document == other.document and passage.begin <= other.focus[0] < passage.end


def _fuse(parts: dict[str, np.ndarray]) -> np.ndarray:
    lexical = LEXICAL_WEIGHT * parts["lexical"] ** 2
    return sum((part for name, part in parts.items() if name != "lexical"), lexical)
