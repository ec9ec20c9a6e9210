"""What the benchmark measures: attention and pooling as methods ask for them, over random keys."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from longchat_cli.kernels import Observe, Rotation, Span, pooling
from longchat_cli.kernels.packed import RUN, pack
from longchat_cli.kernels.span import INDEX_ROWS

SINKS, WINDOW = 4, 1020
GROUP, LOCAL = 16, 1024
VERTICAL, SLASH = 1000, 1024


@dataclass(frozen=True)
class Shape:
    """A model's attention, and where and how precisely it runs."""

    heads: int = 32
    groups: int = 8
    dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"

    def normal(self, heads: int, tokens: int) -> Tensor:
        """Random [heads, tokens, dim]."""
        return torch.randn(heads, tokens, self.dim, dtype=self.dtype, device=self.device)

    def queries(self, rows: int) -> Tensor:
        return self.normal(self.heads, rows)

    def keys(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Keys and values."""
        return self.normal(self.groups, tokens), self.normal(self.groups, tokens)

    def arange(self, *limits: int) -> Tensor:
        return torch.arange(*limits, device=self.device)

    @property
    def scale(self) -> float:
        return self.dim**-0.5


Problem = tuple[Tensor, list[Span]]
"""Queries [heads, rows, dim] and what they see."""


def causal(shape: Shape, n: int) -> Problem:
    return shape.queries(n), [Span(*shape.keys(n), 0, shape.arange(1, n + 1))]


def sink_window(shape: Shape, n: int) -> Problem:
    k, v = shape.keys(n)
    position = shape.arange(n)
    left = (position + 1 - WINDOW).clamp(min=0)
    head = Span(k[:, :SINKS], v[:, :SINKS], 0, left.clamp(max=SINKS), _turn(shape, n))
    return shape.queries(n), [head, Span(k, v, left, position + 1)]


def cores_local(shape: Shape, n: int) -> Problem:
    position = shape.arange(n)
    pooled = ((position + 1 - LOCAL) // GROUP).clamp(min=0)
    raw = Span(*shape.keys(n), pooled * GROUP, position + 1)
    return shape.queries(n), [raw, Span(*shape.keys(max(n // GROUP, 1)), 0, pooled)]


def vertical_slash(shape: Shape, n: int) -> Problem:
    """Evenly spread columns and the nearest diagonals, no key twice, fillers last."""
    last = (shape.arange(0, n, INDEX_ROWS) + INDEX_ROWS - 1).clamp(max=n - 1).view(-1, 1)
    near = last - shape.arange(SLASH)
    columns = shape.arange(0, n, max(n // VERTICAL, 1))
    columns = torch.where(columns < near[:, -1:], columns, -1)
    index = torch.cat([near.clamp(min=-1), columns], dim=1).expand(shape.groups, -1, -1).contiguous()
    return shape.queries(n), [Span(*shape.keys(n), 0, shape.arange(1, n + 1), index=index)]


def decode(shape: Shape, n: int, observe: Observe | None = None) -> Problem:
    return shape.queries(1), [Span(*shape.keys(n), observe=observe)]


def decode_packed(shape: Shape, n: int, kind: str) -> Problem:
    """All whole runs in few bits, the rest as it is."""
    k, v = shape.keys(n)
    whole = n // RUN * RUN
    packed = Span(pack(k[:, :whole], kind, True), pack(v[:, :whole], kind, False))
    spans = [packed, Span(k[:, whole:], v[:, whole:])]
    return shape.queries(1), [span for span in spans if span.k.shape[1]]


def decode_sink(shape: Shape, n: int) -> Problem:
    head = Span(*shape.keys(SINKS), turn=_turn(shape, 1))
    return shape.queries(1), [head, Span(*shape.keys(min(n, WINDOW)))]


def decode_gathered(shape: Shape, n: int) -> Problem:
    """One key in eight, as Recycled attends between refreshes."""
    index = torch.rand(shape.groups, 1, n, device=shape.device).topk(max(n // 8, 1)).indices
    return shape.queries(1), [Span(*shape.keys(n), index=index.sort().values)]


def _turn(shape: Shape, rows: int) -> Rotation:
    angles = torch.rand(rows, shape.dim // 2, device=shape.device) * math.tau
    return Rotation(angles.cos(), angles.sin())


CASES: dict[str, Callable[[Shape, int], Problem]] = {
    "prefill, full": causal,
    "prefill, sinks + window": sink_window,
    "prefill, cores + local": cores_local,
    "prefill, vertical-slash": vertical_slash,
    "decode, full": decode,
    "decode, full, scores": partial(decode, observe=Observe("last", "max")),
    "decode, full, int8": partial(decode_packed, kind="int8"),
    "decode, full, int4": partial(decode_packed, kind="int4"),
    "decode, sinks + window": decode_sink,
    "decode, gathered 1/8": decode_gathered,
}


Inputs = tuple[Any, ...]
Pooling = tuple[Callable[..., Any], Callable[..., Any], Callable[[Shape, int], Inputs]]
"""A function of `kernels.pooling`, its reference, and their inputs."""


def _to_cores(shape: Shape, n: int) -> Inputs:
    cores = max(n // GROUP, 1)
    return (shape.queries(cores), *shape.keys(cores * GROUP), GROUP, SINKS, shape.scale, "attention", False)


def _to_bounds(shape: Shape, n: int) -> Inputs:
    return shape.normal(shape.groups, max(n // GROUP, 1) * GROUP), GROUP


def _to_scores(shape: Shape, n: int) -> Inputs:
    low, high = (x.sort().values for x in shape.keys(max(n // GROUP, 1)))
    return shape.queries(1), low, high, "max"


POOLS: dict[str, Pooling] = {
    "pooling, cores": (pooling.pool, pooling.pool_reference, _to_cores),
    "pooling, page bounds": (pooling.page_bounds, pooling.page_bounds_reference, _to_bounds),
    "pooling, page scores": (pooling.page_scores, pooling.page_scores_reference, _to_scores),
}
