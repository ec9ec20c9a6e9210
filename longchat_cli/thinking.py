"""Models that think before they answer: their thoughts told from the answer, and cut short.

What begins and ends thoughts are tokens of the model's own, so that no text can pass for them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from longchat_cli.engine import Piece

BEGIN, END = "<think>", "</think>"


@dataclass(frozen=True)
class Thinking:
    """How a model thinks, in token ids: what stands around its thoughts, what ends those that are too long
    (`closing`) and stands for none at all (`skipping`).

    `opened`: the end of a prompt that begins thoughts already. `dropped`: the template leaves the thoughts of
    earlier answers out.
    """

    begin: int
    end: int
    closing: tuple[int, ...]
    skipping: tuple[int, ...]
    opened: tuple[int, ...]
    dropped: bool


class Thoughts:
    """Tells thoughts from the answer, piece by piece. `count`: tokens of thoughts so far."""

    def __init__(self, thinking: Thinking) -> None:
        self._thinking = thinking
        self.inside = bool(thinking.opened)
        self.count = 0
        self._answered = False

    def feed(self, piece: Piece) -> Iterator[Piece]:
        """The same in thoughts (`Piece.thought`) and answer; the tokens around thoughts count as theirs."""
        if self.inside and self._thinking.end in piece.ids:
            thought, _, rest = piece.text.partition(END)
            yield replace(piece, text=thought, stop=None, thought=True)
            self.close()
            yield from self.feed(replace(piece, text=rest, ids=()))
        elif self.inside:
            self.count += len(piece.ids)
            yield replace(piece, thought=True)
        elif not self._answered and self._thinking.begin in piece.ids:
            self.inside = True
            yield replace(piece, text=piece.text.partition(BEGIN)[2], thought=True)
        else:
            text = piece.text if self._answered else piece.text.lstrip("\n")
            self._answered = self._answered or bool(text.strip())
            yield replace(piece, text=text)

    def close(self) -> None:
        """The answer begins."""
        self.inside = False
