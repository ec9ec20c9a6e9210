"""Full attention: every query sees every earlier token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from longchat_cli.attention.buffer import Buffer
from longchat_cli.attention.layer import Layer, Method, Rows, Seen, seen_by
from longchat_cli.attention.rope import Rope


@dataclass(frozen=True)
class Full(Method):
    """Every token stays visible: the oracle within the trained window."""

    summary = "full attention, exact within the model's trained window"
    keeps = "every token"
    forgets = "nothing; beyond the trained window answers break down"
    cost = "memory and step time grow with length; reading costs length squared"
    dense_prompts = True
    exact_rows = True

    def layer(self, index: int, layers: int, rope: Rope | None) -> Layer:
        return FullLayer(self, rope)


class FullLayer(Layer):
    alike = True

    def __init__(self, method: Any, rope: Rope | None) -> None:
        super().__init__(method, rope)
        self.kv = self.buffer()

    def expect(self, end: int) -> None:
        self.kv.expect(end)

    def joins(self, new: Rows) -> list[Buffer]:
        return [self.kv]

    def sees(self, new: Rows) -> list[Seen]:
        return [seen_by(new, self.kv)]

    def rewind(self, seen: int) -> None:
        self.kv.drop_after(seen)
        self.seen = seen
