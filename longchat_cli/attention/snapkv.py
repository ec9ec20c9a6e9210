"""SnapKV (Li et al., NeurIPS 2024): after a prompt, the entries that its last queries look at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from longchat_cli.attention.evict import Evicting, EvictingLayer
from longchat_cli.attention.layer import Step, option
from longchat_cli.attention.rope import Rope
from longchat_cli.attention.select import observed, pooled
from longchat_cli.kernels import Observe


@dataclass(frozen=True)
class SnapKV(Evicting):
    """SnapKV section 4; the public defaults. What is generated is added to the budget."""

    summary = "SnapKV: keeps what the end of the prompt looks at"
    keeps = "the last --window tokens of the prompt and what they look at, --budget together; all generated"
    forgets = "the rest of the prompt, for good: a question that comes later finds only what was kept"
    cost = "reading as full; then memory and step time by --budget and what is generated"
    window: int = option(32, "queries at the prompt's end that choose, and stay", low=1)
    pool: int = option(7, "width of the pooling over positions", low=1)
    pooling: str = option("max", "how neighbours share their score", choices=("max", "mean"))
    heads: str = option("mean", "how a KV head's query heads join", choices=("mean", "max"))

    def layer(self, index: int, layers: int, rope: Rope | None) -> SnapKVLayer:
        return SnapKVLayer(self, rope)


class SnapKVLayer(EvictingLayer):
    def __init__(self, method: Any, rope: Rope | None) -> None:
        super().__init__(method, rope)
        self.newest = self.window = min(method.window, method.budget)

    def weigh(self, new: Step) -> Tensor:
        assert self.queries is not None
        observe = Observe("sum", self.method.heads)
        weights = observed(self.kv, self.queries, new, observe)[:, : -self.newest]
        return F.pad(pooled(weights, self.method.pool, self.method.pooling), (0, self.newest))
