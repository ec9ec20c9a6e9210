"""Core Context Aware Attention (CCA-Attention, ICML 2025): far groups pooled to one core, near tokens raw.

Follows the authors' code: pooling works on rotated keys, the last token of a group weighs it, and cores and
window share one softmax. Untuned models need the attention sink kept raw (`sinks`, ours); 0 is as published.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from longchat_cli.attention.buffer import Buffer, KVBuffer
from longchat_cli.attention.layer import (
    Layer,
    Method,
    Rows,
    Seen,
    Step,
    at_least,
    at_most,
    each_row,
    option,
    seen_by,
)
from longchat_cli.attention.rope import Rope
from longchat_cli.kernels import Bound, Span
from longchat_cli.kernels.pooling import pool


@dataclass(frozen=True)
class CCA(Method):
    """CCA-Attention section 3; published defaults g = 16, s = 1024."""

    summary = "CCA-Attention: older text pooled into one core per --group tokens"
    keeps = "the first --sinks and last --local tokens raw, one weighted core for each older group"
    forgets = (
        "detail of older text; fine-tuning on pooled contexts (about 1 B tokens as published) restores much"
    )
    cost = "memory and step time 1 / --group of full plus --local; reading the same share of length squared"
    group: int = option(16, "tokens per core (g)", low=1)
    local: int = option(1024, "recent tokens kept raw (s); the window breathes up to s + g - 1", low=1)
    sinks: int = option(4, "first tokens kept raw and left out of their core; 0: as published", low=0)
    cores: str = option(
        "kv", "cores per KV head (ours, smaller) or per query head (as published)", choices=("kv", "head")
    )
    pool: str = option(
        "attention", "how a group becomes a core; max is per KV head", choices=("attention", "mean", "max")
    )

    @classmethod
    def at_budget(cls, tokens: int, length: int) -> dict[str, Any]:
        """Half of the budget for cores, half for raw tokens."""
        return {"group": max(2 * length // tokens, 1), "local": max(tokens // 2, 1)}

    def layer(self, index: int, layers: int, rope: Rope | None) -> CCALayer:
        return CCALayer(self, rope)


class CCALayer(Layer):
    alike = True

    def __init__(self, method: CCA, rope: Rope | None) -> None:
        super().__init__(method, rope)
        self.head, self.raw = KVBuffer(), self.buffer()
        # Groups made of sinks alone have no core.
        self.cores = self.buffer(method.sinks // method.group)

    def joins(self, new: Rows) -> list[Buffer]:
        self.raw.drop_before(self._pooled(new.first) * self.method.group)
        return [self.raw]

    def sees(self, new: Rows) -> list[Seen]:
        pooled: Bound = each_row(new, self._pooled)
        outside = pooled * self.method.group
        seen = [seen_by(new, self.raw, outside)]
        if len(self.cores):
            seen.append(Seen(self.cores, self.cores.first, at_least(pooled, self.cores.first)))
        if len(self.head):
            seen.append(Seen(self.head, self.head.first, at_most(outside, len(self.head))))
        return seen

    def foreseen(self, new: Rows) -> bool:
        """Where no group ends: the query that weighs it must be known."""
        return len(self.head) == self.method.sinks and not self._ending(new)

    def spans(self, new: Step) -> list[Span]:
        for buffer in self.joins(new):
            buffer.append(new.k, new.v)
        self.head.fill(self.method.sinks, new.k, new.v)
        self._form_cores(new)
        return [span for seen in self.sees(new) for span in seen.spans()]

    def visible(self) -> int:
        return self.seen

    def _pooled(self, position: Any) -> Any:
        """Groups that a query at `position` sees as cores: floor((t - s) / g) for t = position + 1."""
        return at_least((position + 1 - self.method.local) // self.method.group, 0)

    def _ending(self, new: Rows) -> range:
        """The groups whose last token is among the new ones."""
        return range(max(new.first // self.method.group, self.cores.end), new.end // self.method.group)

    def _form_cores(self, new: Step) -> None:
        """Pool every group that ends; its query is at hand now only."""
        ending, g = self._ending(new), self.method.group
        if not ending:
            return
        low, high = ending.start, ending.stop
        k, v = self.raw.between(low * g, high * g)
        queries = new.q[:, low * g + g - 1 - new.first :: g][:, : high - low]
        left_out = max(self.method.sinks - low * g, 0)
        per_head = self.method.cores == "head"
        self.cores.append(*pool(queries, k, v, g, left_out, new.scale, self.method.pool, per_head))
