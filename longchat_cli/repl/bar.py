"""What the model sees, in one bar: readable without colour, by its letters alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """A part of what was said: `tokens`, a `note` for its line, its letter in the bar and its colour."""

    name: str
    tokens: int
    letter: str
    colour: str
    note: str = ""


def bar(parts: Sequence[Part], width: int, coloured: bool = False) -> str:
    """`[##ssvvvvvv......]`: `width` cells shared out by tokens; whatever is there at all has a cell."""
    cells = zip(parts, shares([part.tokens for part in parts], width), strict=True)
    return "[" + "".join(_cells(part, count, coloured) for part, count in cells) + "]"


def legend(parts: Sequence[Part], coloured: bool = False) -> str:
    """A line for each part."""
    lines = []
    for part in parts:
        letter = _cells(part, 1, coloured)
        lines.append(f" {letter}  {part.name:<9} {part.tokens:>11,} tokens  {part.note}".rstrip())
    return "\n".join(lines)


def gauge(share: float, width: int = 10) -> str:
    """`[####------]`."""
    filled = round(min(max(share, 0.0), 1.0) * width)
    return "[" + "#" * filled + "-" * (width - filled) + "]"


def shares(counts: Sequence[int], width: int) -> list[int]:
    """`width` in parts like `counts` (largest remainders), none of what is not zero below 1."""
    total = sum(counts)
    if not total or width < sum(count > 0 for count in counts):
        return [0] * len(counts)
    exact = [count * width / total for count in counts]
    cells = [max(int(share), share > 0) for share in exact]
    order = sorted(range(len(counts)), key=lambda i: cells[i] - exact[i])
    for i in order[: max(width - sum(cells), 0)]:
        cells[i] += 1
    while sum(cells) > width:  # what was lifted to 1
        cells[cells.index(max(cells))] -= 1
    return cells


def _cells(part: Part, count: int, coloured: bool) -> str:
    text = part.letter * count
    return f"\x1b[{part.colour}m{text}\x1b[0m" if coloured and text else text
