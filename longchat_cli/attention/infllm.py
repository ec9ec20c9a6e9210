"""InfLLM (Xiao et al., NeurIPS 2024): a local window, and the blocks of older text that match the queries.

As published: a block is represented by its keys with the highest accumulated local attention, a chunk of
queries chooses blocks together, and everything outside the window is attended at one fixed distance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longchat_cli.attention.buffer import KVBuffer
from longchat_cli.attention.layer import (
    Layer,
    Method,
    Step,
    at_least,
    at_most,
    causal,
    each_row,
    joined,
    option,
)
from longchat_cli.attention.rope import Rope
from longchat_cli.kernels import Bound, Observe, Rotation, Span

ACCUMULATE = Observe(rows="sum", heads="sum")


@dataclass(frozen=True)
class InfLLM(Method):
    """InfLLM section 3; the published defaults, to be scaled to the model's window."""

    summary = "InfLLM: blocks of older text fetched by representative keys, as published"
    keeps = "every token, in blocks in host memory; --init and --local tokens near, exact"
    forgets = "nothing, but sees only the --topk blocks it picks; small models pick badly"
    cost = "step time flat but for block scoring; memory as full, in host memory"
    unlimited = True
    needs_rope = True
    chunk = 512
    init: int = option(128, "first tokens always visible", low=0, budget=1 / 49)
    local: int = option(4096, "recent tokens always visible", low=1, budget=32 / 49)
    block: int = option(128, "tokens per block", low=1, budget=1 / 49)
    topk: int = option(16, "blocks fetched per chunk", low=1)
    representatives: int = option(4, "keys that stand for a block", low=1)

    def layer(self, index: int, layers: int, rope: Rope | None) -> InfLLMLayer:
        return InfLLMLayer(self, rope)


class InfLLMLayer(Layer):
    def __init__(self, method: InfLLM, rope: Rope | None) -> None:
        super().__init__(method, rope)
        self.near = KVBuffer()  # the window and what waits to fill a block, rotated
        self.head = KVBuffer()  # the first tokens, unrotated
        self.weight: Tensor | None = None  # accumulated attention of the near tokens, [KV heads, tokens]
        self.far = self.buffer(method.init)  # blocks that left the window, unrotated, in host memory
        self.marks: list[Tensor] = []  # each block's representatives, [KV heads, representatives, dim]

    def spans(self, new: Step) -> list[Span]:
        self._freeze(new)
        self._append(new)
        left: Bound = each_row(new, lambda p: at_least(p + 1 - self.method.local, 0))
        spans = causal(self.near, new, left, ACCUMULATE)
        if new.end <= self.method.local:
            return spans
        turn = self.turn(new, each_row(new, lambda p: at_most(p, self.method.local)))
        spans.append(self._waiting(left, turn))
        if len(self.head):
            spans.append(Span(self.head.k, self.head.v, 0, at_most(left, len(self.head)), turn))
        if self.marks:
            spans.append(Span(*self._fetch(new.q if turn is None else turn.apply(new.q)), turn=turn))
        return spans

    def observe(self, scores: Sequence[Tensor | None], new: Step) -> None:
        assert self.weight is not None
        self.weight = self.weight + joined(scores)

    def visible(self) -> int:
        blocks = min(len(self.marks), self.method.topk) * self.method.block
        return min(self.seen, len(self.head) + blocks + len(self.near))

    @property
    def _frozen(self) -> int:
        """Tokens in the head or in blocks, once they have left the window."""
        return self.far.end

    def _append(self, new: Step) -> None:
        if len(self.head) < self.method.init:
            self.head.fill(self.method.init, self.unrotated(new.k, new.first), new.v)
        self.near.append(new.k, new.v)
        fresh = new.k.new_zeros(new.k.shape[0], new.rows, dtype=torch.float32)
        self.weight = fresh if self.weight is None else torch.cat([self.weight, fresh], dim=1)

    def _freeze(self, new: Step) -> None:
        """Move whole blocks that the next query's window has left out of the near tokens."""
        left = new.first + 1 - self.method.local
        while self._frozen + self.method.block <= left:
            assert self.weight is not None
            at = slice(self._frozen - self.near.first, self._frozen - self.near.first + self.method.block)
            keys = self.unrotated(self.near.k[:, at], self._frozen)
            count = min(self.method.representatives, self.method.block)
            top = self.weight[:, at].topk(count, dim=-1).indices
            self.marks = [*self.marks, torch.take_along_dim(keys, top.unsqueeze(-1), dim=1)]
            self.far.append(keys.cpu(), self.near.v[:, at].cpu())
        keep = min(self._frozen, max(left, 0))
        if self.weight is not None and keep > self.near.first:
            self.weight = self.weight[:, keep - self.near.first :]
            self.near.drop_before(keep)

    def _waiting(self, left: Bound, turn: Rotation | None) -> Span:
        """Tokens that have left a row's window but fill no block yet."""
        start = max(self._frozen, self.near.first)
        stop = max(int(torch.as_tensor(left).max()), start)
        at = slice(start - self.near.first, stop - self.near.first)
        keys = self.unrotated(self.near.k[:, at], start)
        return Span(keys, self.near.v[:, at], 0, at_least(left - start, 0), turn)

    def _fetch(self, queries: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the best blocks, in text order, for queries [heads, rows, dim] at distance."""
        marks = torch.stack(self.marks, dim=1).float()  # [KV heads, blocks, representatives, dim]
        mean = queries.float().mean(1).reshape(marks.shape[0], -1, marks.shape[-1]).sum(1)
        scores = torch.einsum("hd,hbrd->b", mean, marks)
        best = scores.topk(min(self.method.topk, len(self.marks))).indices.sort().values.cpu()
        tokens = (best.unsqueeze(1) * self.method.block + torch.arange(self.method.block)).flatten()
        chosen = self.far.gather(tokens.expand(marks.shape[0], -1))
        return chosen.k.to(queries.device), chosen.v.to(queries.device)
