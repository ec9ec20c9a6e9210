"""Sliding-window attention: the last W tokens and nothing else; the baseline that collapses without sinks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from longchat_cli.attention.buffer import Buffer
from longchat_cli.attention.layer import (
    Layer,
    Method,
    Rows,
    Seen,
    at_least,
    each_row,
    option,
    seen_by,
)
from longchat_cli.attention.rope import Rope
from longchat_cli.kernels import Bound


@dataclass(frozen=True)
class Window(Method):
    """Each query sees itself and the W - 1 tokens before it."""

    summary = "sliding window without sinks: a baseline that collapses once the first tokens are gone"
    keeps = "the last --window tokens"
    forgets = "everything older, first tokens included"
    cost = "flat memory and step time"
    unlimited = True
    window: int = option(1024, "tokens that stay visible, the query's own included", low=1, budget=1)

    def layer(self, index: int, layers: int, rope: Rope | None) -> Layer:
        return WindowLayer(self, rope)


class WindowLayer(Layer):
    alike = True

    def __init__(self, method: Any, rope: Rope | None) -> None:
        super().__init__(method, rope)
        self.window = method.window
        self.kv = self.buffer()

    def joins(self, new: Rows) -> list[Buffer]:
        self.kv.drop_before(new.first + 1 - self.window)
        return [self.kv]

    def sees(self, new: Rows) -> list[Seen]:
        return [seen_by(new, self.kv, self.left(new))]

    def left(self, new: Rows) -> Bound:
        """How many tokens have left each row's window: the absolute index of the first one visible."""
        return each_row(new, self.left_at)

    def left_at(self, position: Any) -> Any:
        """The same for a row at `position`, a number or int64 [rows]."""
        return at_least(position + 1 - self.window, 0)

    def recent(self) -> int:
        return self.left_at(self.seen)

    def visible(self) -> int:
        return min(self.seen, self.window)
