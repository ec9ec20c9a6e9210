"""Scoring: is the reference contained in the answer, and how sure is a share of n."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Protocol


def normalise(text: str) -> str:
    """Lower case words without accents, articles and punctuation; digits grouped by commas are joined."""
    text = unicodedata.normalize("NFKD", re.sub(r"(?<=\d),(?=\d{3})", "", text.casefold()))
    text = "".join(c for c in text if not unicodedata.combining(c))
    words = re.sub(r"[^\w\s]|_", " ", re.sub(r"['’]", "", text)).split()
    return " ".join(word for word in words if word not in {"a", "an", "the"})


def contains(answer: str, references: Sequence[str]) -> bool:
    """One of the references occurs in the answer as whole words, after `normalise`."""
    padded = f" {normalise(answer)} "
    return any(f" {normalise(reference)} " in padded for reference in references)


def grade(answer: str, references: Sequence[str], every: bool = False) -> float:
    """Whether the answer has one of the references; with `every`, the share of them that it has."""
    found = [contains(answer, [reference]) for reference in references]
    return sum(found) / len(found) if every else any(found)


class Planted(Protocol):
    """A planted text with the answers in it; `evaluation.cases.Query`."""

    @property
    def evidence(self) -> str: ...
    @property
    def references(self) -> Sequence[str]: ...


def rank(passages: Sequence[str], planted: Planted) -> int | None:
    """The place (1 is the best) of the first passage that holds an answer within the planted text."""
    return _first(contains(passage, planted.references) and reaches(passage, planted) for passage in passages)


def reached(passages: Sequence[str], planted: Planted) -> int | None:
    """The place of the first passage that holds any of the planted text."""
    return _first(reaches(passage, planted) for passage in passages)


def reaches(passage: str, planted: Planted) -> bool:
    """Six successive words of the planted text (all of a shorter one) stand in the passage."""
    words, where = normalise(planted.evidence).split(), normalise(passage)
    size = min(len(words), 6)
    return any(" ".join(words[i : i + size]) in where for i in range(len(words) - size + 1))


def _first(good: Iterable[bool]) -> int | None:
    return next((place for place, right in enumerate(good, 1) if right), None)


def interval(correct: float, n: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval of a share `correct / n` (95 % by default); (0, 1) for n = 0."""
    if n == 0:
        return 0.0, 1.0
    share, scale = correct / n, 1 + z * z / n
    middle = (share + z * z / (2 * n)) / scale
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / scale
    return max(middle - half, 0.0), min(middle + half, 1.0)
