"""Full attention: every query sees every earlier token."""

from __future__ import annotations

from dataclasses import dataclass

from longchat_cli.attention.layer import KVBuffer, Layer, Method, Step, causal
from longchat_cli.attention.rope import Rope
from longchat_cli.kernels import Span


@dataclass(frozen=True)
class Full(Method):
    """Every token stays visible: the oracle within the trained window."""

    summary = "full attention, exact within the model's trained window"
    keeps = "every token"
    forgets = "nothing; beyond the trained window answers break down"
    cost = "memory and step time grow with length; reading costs length squared"

    def layer(self, index: int, layers: int, rope: Rope | None) -> Layer:
        return FullLayer(rope)


class FullLayer(Layer):
    def __init__(self, rope: Rope | None) -> None:
        super().__init__(rope)
        self.kv = KVBuffer()

    def spans(self, new: Step) -> list[Span]:
        self.kv.append(new.k, new.v)
        return [causal(self.kv, new)]
