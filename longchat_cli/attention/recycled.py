"""Recycled Attention / RefreshKV (Xu et al., ACL 2025): few keys at most steps, all keys at a refresh.

The full cache never loses a token. After a full step the keys its query weighed most (maximum over the query
heads of a KV group, max-pooled along positions) form a small cache that the following steps attend to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from longchat_cli.attention.buffer import Buffer, KVBuffer
from longchat_cli.attention.layer import Method, Rows, Seen, Step, joined, option
from longchat_cli.attention.refresh import RefreshLayer
from longchat_cli.attention.rope import Rope
from longchat_cli.attention.select import observed, ranked
from longchat_cli.kernels import Observe, Span

OBSERVE = Observe(rows="last", heads="max")


@dataclass(frozen=True)
class Recycled(Method):
    """RefreshKV section 3. `tau` 0 is the fixed schedule, above 0 the dynamic one (cosine of queries)."""

    summary = "Recycled Attention: decode over the keys that mattered last, refreshed by full attention"
    keeps = "every token, and a small cache of 1 / --fraction of them"
    forgets = "nothing; between refreshes a step sees only the small cache"
    cost = "reading as full; most steps attend to 1 / --fraction of the keys; memory 1 + 1 / fraction of full"
    dense_prompts = True
    fraction: int = option(8, "the small cache holds 1 / this of the tokens", low=1)
    keep: int = option(0, "tokens in the small cache; 0: by --fraction", low=0, budget=1)
    stride: int = option(3, "full attention every this many steps (S); published: 5 or 10", low=1)
    tau: float = option(
        0.0, "keep partial steps while queries stay this similar; 0: fixed schedule", low=0.0, high=1.0
    )
    pool: int = option(7, "width of the max-pooling over positions", low=1)

    def layer(self, index: int, layers: int, rope: Rope | None) -> RecycledLayer:
        return RecycledLayer(self, rope)


class RecycledLayer(RefreshLayer):
    watch = OBSERVE

    def __init__(self, method: Recycled, rope: Rope | None) -> None:
        super().__init__(method, rope)
        self.small: KVBuffer | None = None
        self.count = 0  # entries the small cache keeps

    def spans(self, new: Step) -> list[Span]:
        if not new.decoding:
            self.small = None
        return super().spans(new)

    def foreseen(self, new: Rows) -> bool:
        return self.small is not None and self.method.tau == 0

    def joins(self, new: Rows) -> list[Buffer]:
        joined = super().joins(new)
        if not self.steps:
            return joined
        assert self.small is not None
        # Entries ascend in score, so what earlier steps pushed out is at the front.
        self.small.drop_before(self.small.end - self.count)
        return [*joined, self.small]

    def prepare(self, new: Step) -> None:
        """The first step after a prompt chooses by the prompt's last query."""
        if self.small is None:
            assert self.query is not None
            self._choose(observed(self.kv, self.query.unsqueeze(1), new, OBSERVE))

    def due(self, new: Rows) -> bool:
        """The dynamic schedule keeps partial steps while the query stays like that of the last full step."""
        if self.method.tau == 0:
            return True
        assert isinstance(new, Step) and self.query is not None
        similarity = F.cosine_similarity(new.q[:, -1].float().mean(0), self.query.float().mean(0), dim=0)
        return not similarity > self.method.tau

    def part(self, new: Rows) -> list[Seen]:
        assert self.small is not None
        return [Seen(self.small, self.small.first, self.small.end)]

    def observe(self, scores: Sequence[Tensor | None], new: Step) -> None:
        self.query = new.q[:, -1].clone()
        self._choose(joined(scores))

    def _choose(self, weights: Tensor) -> None:
        """Fill the small cache with the highest weights [KV heads, keys], in ascending order."""
        self.count = self.method.keep or max(weights.shape[-1] // self.method.fraction, 1)
        top = ranked(weights, self.count, self.method.pool).flip(-1)
        self.small = self.kv.gather(top)
