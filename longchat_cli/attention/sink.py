"""Attention sinks (StreamingLLM, Xiao et al., ICLR 2024): the first few tokens and the last W.

A kept token's position is its place in the cache. Keys stay as the model rotated them; since rotation is
relative, turning the *query* for the sink keys to its own place in the cache is the same as moving the sinks.

Ours: with `evict` "turns" a whole turn of a chat goes at once, so that what is visible begins with a turn;
with "subjects" all turns go when one begins a new subject. Turns can be pinned: they stay behind the sinks.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longchat_cli.attention.buffer import KVBuffer
from longchat_cli.attention.layer import (
    LARGEST,
    Method,
    Rows,
    Seen,
    Step,
    at_least,
    at_most,
    each_row,
    option,
)
from longchat_cli.attention.rope import Rope
from longchat_cli.attention.window import WindowLayer
from longchat_cli.kernels import Bound, Span

EVICT = ("tokens", "turns", "subjects")


@dataclass(frozen=True)
class Sink(Method):
    """StreamingLLM section 3.2; public defaults 4 + 1020."""

    summary = "attention sinks (StreamingLLM): endless text at flat cost"
    keeps = "the first --sinks tokens and the last --window"
    forgets = "everything between; it does not extend the context: a book answers about its end only"
    cost = "flat memory and step time"
    unlimited = True
    needs_rope = True
    sinks: int = option(4, "first tokens that stay", low=0)
    window: int = option(1020, "recent tokens that stay", low=1, budget=1)
    evict: str = option(
        "tokens",
        "what goes at a time: tokens, as published, whole turns, or subjects of a chat",
        choices=EVICT,
    )

    def layer(self, index: int, layers: int, rope: Rope | None) -> SinkLayer:
        return SinkLayer(self, rope)


class SinkLayer(WindowLayer):
    """`turns` are positions where turns begin, as far as they may still be visible; `pins` hold what was read
    of pinned turns, which end at `stops`. What is before `subject` is out of sight from there on."""

    alike = True

    def __init__(self, method: Sink, rope: Rope | None) -> None:
        super().__init__(method, rope)
        self.sinks = method.sinks
        self.head = KVBuffer()
        self.pins: list[KVBuffer] = []
        self.stops: tuple[int, ...] = ()
        self.turns: tuple[int, ...] = ()
        self.subject = 0

    def foreseen(self, new: Rows) -> bool:
        return len(self.head) >= self.sinks and not self.pins and type(self).spans is SinkLayer.spans

    def spans(self, new: Step) -> list[Span]:
        if len(self.head) < self.sinks:
            self.head.fill(self.sinks, self.kept(new), new.v)
        return super().spans(new)

    def sees(self, new: Rows) -> list[Seen]:
        recent = super().sees(new)
        self._fill_pins()
        if isinstance(new.end, int) and new.end <= self.window and not self.subject:
            return recent
        left = self.left(new)
        shown: list[Seen] = []
        before: Any = 0  # of the tokens that stay, those that a row sees earlier
        place = self._place(new, left)
        for held in self._held():
            outside = at_most(at_least(left - held.first, 0), len(held))
            apparent = self.apparent(new, held.first + place - before)
            shown.append(Seen(held, held.first, held.first + outside, self.turn(new, apparent)))
            before = before + outside
        return [*shown, *recent]

    def kept(self, new: Step) -> Tensor:
        """The new keys as the first tokens keep them."""
        return new.k

    def apparent(self, new: Rows, place: Bound) -> Bound:
        """Where the new queries seem to stand for the tokens that stay: at their own `place` in the cache."""
        return place

    def left_at(self, position: Any) -> Any:
        gone = super().left_at(position)
        if self.subject:
            gone = self._hidden(position, gone)
        return self._whole(gone) if self.method.evict == "turns" and self.turns else gone

    def visible(self) -> int:
        left = self.recent()
        stay = sum(min(max(left - held.first, 0), len(held)) for held in self._held())
        return min(self.seen, stay + self.seen + 1 - left)

    def begin_turn(self, position: int, forget: bool = False) -> None:
        if forget and self.method.evict == "subjects":
            self.subject = position
        near = (turn for turn in self.turns if turn > self.seen - self.window)
        self.turns = (*near, position)

    def pin(self, start: int, stop: int) -> bool:
        start = max(start, self.sinks)
        if start >= stop or any(held.first == start for held in self.pins):
            return True
        if start < self.kv.first:
            return False
        order = sorted([*zip(self.pins, self.stops, strict=True), (KVBuffer(start), stop)], key=_first)
        self.pins, self.stops = [held for held, _ in order], tuple(stop for _, stop in order)
        self._fill_pins()
        return True

    def unpin(self, start: int) -> None:
        start = max(start, self.sinks)
        order = [pair for pair in zip(self.pins, self.stops, strict=True) if pair[0].first != start]
        self.pins, self.stops = [held for held, _ in order], tuple(stop for _, stop in order)

    def pinned(self) -> int:
        return sum(stop - held.first for held, stop in zip(self.pins, self.stops, strict=True))

    def _held(self) -> list[KVBuffer]:
        """What stays, in order."""
        return [held for held in (self.head, *self.pins) if len(held)]

    def _fill_pins(self) -> None:
        """Keep of pinned turns what was read since, before it can leave the window."""
        for held, stop in zip(self.pins, self.stops, strict=True):
            if held.end < (end := min(stop, self.kv.end)):
                held.append(*self.kv.between(held.end, end))

    def _place(self, new: Rows, left: Bound) -> Any:
        """The rows' place in the cache, when tokens before `left` are gone but for those that stay."""
        outside = (at_most(at_least(left - held.first, 0), len(held)) for held in self._held())
        return each_row(new, lambda p: p - left) + sum(outside)

    def _hidden(self, position: Any, gone: Any) -> Any:
        """The first token visible at `position`, where without subjects it is `gone`. The row ahead of the
        subject, which foretells its first token, sees itself alone behind what stays."""
        if isinstance(position, int):
            return max(gone, min(position, self.subject)) if position >= self.subject - 1 else gone
        left = torch.maximum(gone, position.clamp(max=self.subject))
        return torch.where(position >= self.subject - 1, left, gone)

    def _whole(self, gone: Any) -> Any:
        """The first turn that begins at or after `gone`, an index or int64 [rows]. A turn of which less than
        half a window would be left behind goes token by token, and so does one that is longer than that."""
        most = self.window // 2
        if isinstance(gone, int):
            index = bisect_left(self.turns, gone)
            begun = self.turns[index] if index < len(self.turns) else LARGEST
            return begun if gone > 0 and begun <= gone + most else gone
        turns = torch.tensor([*self.turns, LARGEST], device=gone.device)
        next_ones = turns[torch.searchsorted(turns, gone)]
        return torch.where((gone > 0) & (next_ones <= gone + most), next_ones, gone)


def _first(pair: tuple[KVBuffer, int]) -> int:
    return pair[0].first
