"""PyramidInfer (Yang et al., ACL Findings 2024): the deeper a layer, the fewer of a prompt's tokens reach it.

Follows the authors' code: a layer keeps all that reaches it, and passes on the recent tokens and the context
that these look at. The lean forward drops the other rows between layers. On the transformers path every row
is computed, and deeper layers hide the keys of dropped ones: the same answer without the saving of compute.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from longchat_cli.attention.buffer import Buffer
from longchat_cli.attention.layer import Layer, Method, Rows, Seen, Step, at_most, option
from longchat_cli.attention.probabilities import probabilities
from longchat_cli.attention.rope import Rope
from longchat_cli.kernels import Bound, Span
from longchat_cli.kernels.packed import dense

WEIGHT = 1.2
"""The weight of the last query against 1 for the first recent one."""
TILE = 64
"""Recent queries whose probabilities are held at once."""


@dataclass(frozen=True)
class PyramidInfer(Method):
    """PyramidInfer section 3 with the public defaults; each prompt is pruned once, by its own tokens.

    Layer i of n passes on the share decay + (ratio - decay) (1 + cos(pi i / n)) / 2 of the context it got.
    """

    summary = "PyramidInfer: a prompt's tokens drop out layer by layer while it is read"
    keeps = "in each layer the tokens that reach it; all generated"
    forgets = "for deeper layers what the end of the prompt does not look at, for good"
    cost = "reading and memory shrink with depth; prompts are read in one call"
    whole = True
    ratio: float = option(1.0, "share of the context that the first layer passes on", low=0.0, high=1.0)
    decay: float = option(
        0.9, "the share that the last layer would pass on; it falls by cosine", low=0.0, high=1.0
    )
    recent: float = option(
        0.2, "share of the prompt, at its end, that chooses and always stays", low=0.0, high=1.0
    )
    sinks: int = option(4, "first tokens that always stay", low=0)
    least: int = option(64, "a layer that would pass on no more context than this drops none", low=0)

    @classmethod
    def at_budget(cls, tokens: int, length: int) -> dict[str, Any]:
        """On average over some 30 layers: a quarter for recent tokens, the rest falls by one share each."""
        recent = tokens / length / 4
        share = max(1 - (1 - recent) / (30 * 3 * recent), 0.0)
        return {"ratio": share, "decay": share, "recent": recent}

    def layer(self, index: int, layers: int, rope: Rope | None) -> PyramidInferLayer:
        falls = (1 + math.cos(math.pi * index / layers)) / 2
        return PyramidInferLayer(self, rope, self.decay + (self.ratio - self.decay) * falls)

    def link(self, layers: Sequence[Layer]) -> None:
        for before, layer in itertools.pairwise(layers):
            layer.before = before  # type: ignore[attr-defined]
        layers[-1].deepest = True  # type: ignore[attr-defined]


class PyramidInferLayer(Layer):
    # What is passed on lives within one call of the model.
    fixed = Layer.fixed | {"share", "before", "deepest", "passed", "onward"}

    def __init__(self, method: PyramidInfer, rope: Rope | None, share: float) -> None:
        super().__init__(method, rope)
        self.share = share
        self.kv = self.buffer()
        self.before: PyramidInferLayer | None = None
        self.deepest = False
        self.passed: Tensor | None = None  # rows of the call that reach the next layer; None: all

    def attend(self, q: Tensor, *rest: Any, **extra: Any) -> Tensor:
        out = super().attend(q, *rest, **extra)
        if self.before is not None:
            self.seen = self.before.seen  # dropped rows have been read, too
        return out

    def foreseen(self, new: Rows) -> bool:
        return True  # what is decoded stays in every layer

    def joins(self, new: Rows) -> list[Buffer]:
        return [self.kv]

    def sees(self, new: Rows) -> list[Seen]:
        """Of tokens decoded: everything, by how many there are, since positions have gaps."""
        end = self.kv.end
        return [Seen(self.kv, self.kv.first, end if new.rows == 1 else torch.arange(end - new.rows, end) + 1)]

    def spans(self, new: Step) -> list[Span]:
        if new.decoding:
            return super().spans(new)
        reached = None
        if self.before is not None:
            reached, self.before.passed, self.before.onward = self.before.passed, None, None
        some = new
        if reached is not None and len(reached) < new.rows:
            some = replace(new, q=new.q[:, reached], k=new.k[:, reached], v=new.v[:, reached])
        self.kv.append(some.k, some.v)
        if not self.deepest:
            self._pass_on(some, reached)
        stop: Bound = self.kv.end
        if new.rows > 1:
            rows = torch.arange(new.rows, device=new.k.device)
            before = (
                rows + 1 if reached is None or some is new else torch.searchsorted(reached, rows, right=True)
            )
            stop = before + (self.kv.end - some.rows)
        return [Span(k, v, 0, at_most(stop - first, k.shape[1])) for k, v, first in self.kv.parts()]

    def visible(self) -> int:
        return len(self.kv)

    def _pass_on(self, new: Step, reached: Tensor | None) -> None:
        """Choose which of the rows that reached this layer go deeper."""
        rows = torch.arange(new.rows, device=new.k.device) if reached is None else reached
        call = new.rows if self.before is None else self.before.seen - new.first
        recent = 1 + int(call * self.method.recent)
        context = max(new.rows - recent, 0)
        count = int(context * self.share)
        self.passed, self.onward = reached, None
        if count >= context or count <= self.method.least:
            return
        scores = self._scores(new, recent)
        scores[rows[:context] + new.first < self.method.sinks] = torch.inf
        chosen = scores.topk(count).indices.sort().values
        self.onward = torch.cat([chosen, torch.arange(context, new.rows, device=rows.device)])
        self.passed = rows[self.onward]

    def _scores(self, new: Step, recent: int) -> Tensor:
        """What the last `recent` of the new rows look at among those before them: [rows - recent]."""
        keys = torch.cat([dense(k) for k, _, _ in self.kv.parts()], dim=1)
        weight = torch.linspace(1, WEIGHT, recent, device=keys.device)
        at = slice(keys.shape[1] - new.rows, keys.shape[1] - recent)
        scores = keys.new_zeros(at.stop - at.start, dtype=torch.float32)
        for first in range(0, recent, TILE):
            part = weight[first : first + TILE]
            queries = new.q[:, new.rows - recent + first :][:, : len(part)]
            seen = probabilities(queries, keys[:, : at.stop + first + len(part)], new)
            scores += (part @ seen[..., at]).sum((0, 1))
        return scores
