"""Recycled Attention / RefreshKV (Xu et al., ACL 2025): few keys at most steps, all keys at a refresh.

The full cache never loses a token. After a full step the keys its query weighed most (maximum over the query
heads of a KV group, max-pooled along positions) form a small cache that the following steps attend to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from longchat_cli import kernels
from longchat_cli.attention.full import FullLayer
from longchat_cli.attention.layer import KVBuffer, Method, Step, causal, option
from longchat_cli.attention.rope import Rope
from longchat_cli.kernels import Observe, Span

OBSERVE = Observe(rows="last", heads="max")


@dataclass(frozen=True)
class Recycled(Method):
    """RefreshKV section 3. `tau` 0 is the fixed schedule, above 0 the dynamic one (cosine of queries)."""

    summary = "Recycled Attention: decode over the keys that mattered last, refreshed by full attention"
    keeps = "every token, and a small cache of 1 / --fraction of them"
    forgets = "nothing; between refreshes a step sees only the small cache"
    cost = "reading as full; most steps attend to 1 / --fraction of the keys; memory 1 + 1 / fraction of full"
    fraction: int = option(8, "the small cache holds 1 / this of the tokens", low=1)
    keep: int = option(0, "tokens in the small cache; 0: by --fraction", low=0)
    stride: int = option(3, "full attention every this many steps (S); published: 5 or 10", low=1)
    tau: float = option(0.0, "keep partial steps while queries stay this similar; 0: fixed schedule", low=0.0)
    pool: int = option(7, "width of the max-pooling over positions", low=1)

    def layer(self, index: int, layers: int, rope: Rope | None) -> RecycledLayer:
        return RecycledLayer(rope, self)


class RecycledLayer(FullLayer):
    def __init__(self, rope: Rope | None, method: Recycled) -> None:
        super().__init__(rope)
        self.method = method
        self.small: KVBuffer | None = None
        self.query: Tensor | None = None  # [heads, dim] of the last full step
        self.count = 0  # entries the small cache keeps
        self.steps = 0  # partial steps since the last full one

    def spans(self, new: Step) -> list[Span]:
        if not new.decoding or self.query is None:
            self.small, self.query, self.steps = None, new.q[:, -1], 0
            return super().spans(new)
        if self.small is None:  # the first step after a prompt: choose by the prompt's last query
            self._choose(self._weights(self.query, new))
        self.kv.append(new.k, new.v)
        self.steps += 1
        if self._refresh_due(new.q[:, -1]):
            self.query, self.steps = new.q[:, -1], 0
            return [causal(self.kv, new, observe=OBSERVE)]
        assert self.small is not None
        # Entries ascend in score, so what earlier steps pushed out is at the front.
        self.small.drop_before(self.small.end - self.count)
        self.small.append(new.k, new.v)
        return [Span(self.small.k, self.small.v)]

    def observe(self, scores: Sequence[Tensor | None], new: Step) -> None:
        assert scores[0] is not None
        self._choose(scores[0])

    def _refresh_due(self, query: Tensor) -> bool:
        if self.steps % self.method.stride:
            return False
        assert self.query is not None
        similarity = F.cosine_similarity(query.float().mean(0), self.query.float().mean(0), dim=0)
        return not (self.method.tau > 0 and similarity > self.method.tau)

    def _weights(self, query: Tensor, new: Step) -> Tensor:
        """Attention of query [heads, dim] over the full cache, reduced to [KV heads, keys]."""
        everything = Span(self.kv.k, self.kv.v, observe=OBSERVE)
        _, scores = kernels.attend(query.unsqueeze(1), [everything], new.scale, new.softcap, new.sinks)
        assert scores[0] is not None
        return scores[0]

    def _choose(self, weights: Tensor) -> None:
        """Fill the small cache with the highest weights [KV heads, keys], in ascending order."""
        keys, width = weights.shape[-1], self.method.pool
        self.count = self.method.keep or max(keys // self.method.fraction, 1)
        pooled = F.max_pool1d(F.pad(weights, ((width - 1) // 2, width // 2)), width, stride=1)
        # Pooling makes neighbours tie: a stable sort takes the earlier one, on every device.
        top = pooled.sort(dim=-1, descending=True, stable=True).indices[:, : self.count].flip(-1)
        index = top.unsqueeze(-1).expand(-1, -1, self.kv.k.shape[-1])
        self.small = KVBuffer()
        self.small.append(torch.gather(self.kv.k, 1, index), torch.gather(self.kv.v, 1, index))
