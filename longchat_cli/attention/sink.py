"""Attention sinks (StreamingLLM, Xiao et al., ICLR 2024): the first few tokens and the last W.

A kept token's position is its place in the cache. Keys stay as the model rotated them; since rotation is
relative, turning the *query* for the sink keys to its own place in the cache is the same as moving the sinks.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from longchat_cli.attention.buffer import KVBuffer
from longchat_cli.attention.layer import Method, Step, at_most, each_row, option
from longchat_cli.attention.rope import Rope
from longchat_cli.attention.window import WindowLayer
from longchat_cli.kernels import Bound, Span


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

    def layer(self, index: int, layers: int, rope: Rope | None) -> SinkLayer:
        return SinkLayer(self, rope)


class SinkLayer(WindowLayer):
    def __init__(self, method: Sink, rope: Rope | None) -> None:
        super().__init__(method, rope)
        self.sinks = method.sinks
        self.head = KVBuffer()

    def spans(self, new: Step) -> list[Span]:
        recent = super().spans(new)
        if len(self.head) < self.sinks:
            self.head.fill(self.sinks, self.kept(new), new.v)
        if not len(self.head) or (isinstance(new.end, int) and new.end <= self.window):
            return recent
        outside = at_most(self.left(new), len(self.head))
        return [Span(self.head.k, self.head.v, 0, outside, self.turn(new, self.apparent(new))), *recent]

    def kept(self, new: Step) -> Tensor:
        """The new keys as the first tokens keep them."""
        return new.k

    def apparent(self, new: Step) -> Bound:
        """Where the new queries seem to stand for the first tokens: at their own place in the cache."""
        # It is the true position until tokens between sinks and window are gone.
        return each_row(new, lambda p: at_most(p, self.sinks + self.window - 1))

    def visible(self) -> int:
        return min(self.seen, self.sinks + self.window)
