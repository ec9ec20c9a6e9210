"""What every task is made of: texts with questions whose answers are known."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from longchat_cli.evaluation.haystack import Count, cut, load_text
from longchat_cli.prose import prose


@dataclass(frozen=True)
class Query:
    """A question, its accepted answers (all of them wanted with `every`), the planted text that holds them,
    and where (0 start, 1 end)."""

    question: str
    references: tuple[str, ...]
    evidence: str
    depth: float
    every: bool = False


@dataclass(frozen=True)
class Case:
    """One document and what is asked about it; `length` is the length asked for, in tokens."""

    document: str
    queries: tuple[Query, ...]
    length: int


@dataclass
class Setting:
    """What a task generates from: `n` questions at each length, all randomness from `rng`."""

    length: int
    n: int
    count: Count
    rng: random.Random
    data: tuple[Path, ...] = ()
    per_text: int | None = None

    def haystack(self, tokens: int) -> str:
        """Up to `tokens` tokens of the book in `data`, or of generated prose."""
        book = load_text(self.data)
        if book is None:
            book = prose(tokens * 6 + 2000, self.rng)
        return cut(book, tokens, self.count, self.rng)

    def groups(self, per_text: int) -> list[int]:
        """`n` questions shared out over texts: the number for each text."""
        each = self.per_text or per_text
        return [min(each, self.n - done) for done in range(0, self.n, each)]


Generator = Callable[[Setting], Iterator[Case]]
