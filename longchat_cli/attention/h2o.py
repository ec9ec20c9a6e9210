"""H2O, heavy hitters (Zhang et al., NeurIPS 2023): entries with the most attention so far, and the last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from longchat_cli.attention.evict import Evicting, EvictingLayer
from longchat_cli.attention.layer import Rows, Step, joined
from longchat_cli.attention.rope import Rope
from longchat_cli.kernels import Observe


@dataclass(frozen=True)
class H2O(Evicting):
    """H2O section 4: half of the budget by accumulated attention, half the most recent."""

    summary = "H2O: keeps what was looked at most so far, and the most recent"
    keeps = "--budget entries: half with the most attention from all queries so far, half the most recent"
    forgets = "the rest, for good"
    cost = "reading as full and scored; then flat memory and step time"
    observes_prompts = True

    def layer(self, index: int, layers: int, rope: Rope | None) -> H2OLayer:
        return H2OLayer(self, rope)


class H2OLayer(EvictingLayer):
    def __init__(self, method: Any, rope: Rope | None) -> None:
        super().__init__(method, rope)
        self.newest = method.budget // 2
        self.mass: Tensor | None = None  # attention each entry has had, [KV heads, entries]

    def watch(self, new: Rows) -> Observe:
        return Observe("sum", "sum")

    def observe(self, scores: Sequence[Tensor | None], new: Step) -> None:
        fresh = joined(scores)
        self.mass = fresh if self.mass is None else F.pad(self.mass, (0, new.rows)) + fresh
        if new.decoding:
            self.evict(self.mass)

    def weigh(self, new: Step) -> Tensor:
        assert self.mass is not None
        return self.mass

    def keep(self, index: Tensor) -> None:
        super().keep(index)
        assert self.mass is not None
        self.mass = self.mass.gather(1, index)
