"""TOVA (Oren et al., EMNLP 2024): the entry that the last query looks at least is dropped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from longchat_cli.attention.evict import Evicting, EvictingLayer
from longchat_cli.attention.layer import Rows, Step, joined, option
from longchat_cli.attention.rope import Rope
from longchat_cli.attention.select import observed
from longchat_cli.kernels import Observe

LAST = Observe("last", "mean")


@dataclass(frozen=True)
class TOVA(Evicting):
    """TOVA section 3: weights of the last query, mean over the layer's heads, choose for all of them."""

    summary = "TOVA: drops what the last query looks at least"
    keeps = "--budget entries that the latest query looks at most"
    forgets = "the rest, for good"
    cost = "reading as full; then flat memory and step time"
    share: str = option("layer", "who chooses together: a layer's heads (published) or a KV head's",
                        choices=("layer", "head"))  # fmt: skip

    def layer(self, index: int, layers: int, rope: Rope | None) -> TOVALayer:
        return TOVALayer(self, rope)


class TOVALayer(EvictingLayer):
    window = 1

    def watch(self, new: Rows) -> Observe | None:
        return LAST if new.decoding else None

    def observe(self, scores: Sequence[Tensor | None], new: Step) -> None:
        self.evict(self._shared(joined(scores)))

    def weigh(self, new: Step) -> Tensor:
        assert self.queries is not None
        return self._shared(observed(self.kv, self.queries, new, LAST))

    def _shared(self, weights: Tensor) -> Tensor:
        layer = self.method.share == "layer"
        return weights.mean(0, keepdim=True).expand_as(weights) if layer else weights
