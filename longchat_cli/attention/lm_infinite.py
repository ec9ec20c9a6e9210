"""LM-Infinite (Han et al., NAACL 2024): a Lambda-shaped mask, with distances that never exceed the window."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from longchat_cli.attention.layer import Rows, Step, option
from longchat_cli.attention.rope import Rope
from longchat_cli.attention.sink import Sink, SinkLayer
from longchat_cli.kernels import Bound


@dataclass(frozen=True)
class LMInfinite(Sink):
    """LM-Infinite section 3: as attention sinks, but every first token seems exactly `window` away."""

    summary = "LM-Infinite: first and recent tokens, the first ones at one fixed distance"
    sinks: int = option(10, "first tokens that stay (10 to 100 as published)", low=0)

    def layer(self, index: int, layers: int, rope: Rope | None) -> LMInfiniteLayer:
        return LMInfiniteLayer(self, rope)


class LMInfiniteLayer(SinkLayer):
    def kept(self, new: Step) -> Tensor:
        return self.unrotated(new.k, new.first)

    def apparent(self, new: Rows, place: Bound) -> Bound:
        return self.window

    def pin(self, start: int, stop: int) -> bool:
        return False
