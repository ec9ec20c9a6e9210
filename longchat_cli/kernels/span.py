"""What one attention call may see: the vocabulary between methods and kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from longchat_cli.kernels.packed import Keys

Bound = int | Tensor
"""A visible range's end: one number for every query row, or an int64 tensor [rows]."""


@dataclass(frozen=True)
class Rotation:
    """A rotation of query rows in the model's rotary planes: cos and sin, float32 [rows, planes].

    `interleaved` pairs channels (0, 1), (2, 3), ...; otherwise channel i pairs with i + planes.
    Channels past 2 x planes are left as they are (partial rotary).
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = False

    def apply(self, x: Tensor) -> Tensor:
        """Rotate x [heads, rows, dim] in float32; returns x's dtype."""
        planes = self.cos.shape[-1]
        turned = x.float().clone()
        if self.interleaved:
            first, second = slice(0, 2 * planes, 2), slice(1, 2 * planes, 2)
        else:
            first, second = slice(0, planes), slice(planes, 2 * planes)
        a, b = turned[..., first].clone(), turned[..., second].clone()
        turned[..., first] = a * self.cos - b * self.sin
        turned[..., second] = b * self.cos + a * self.sin
        return turned.to(x.dtype)

    def take(self, rows: Tensor) -> Rotation:
        """The rotation of these rows alone, int64 [n]."""
        return Rotation(self.cos[rows], self.sin[rows], self.interleaved)


@dataclass(frozen=True)
class Observe:
    """Ask for attention probabilities per key: over the last query row or summed over all rows,
    reduced over the query heads of each KV group."""

    rows: Literal["last", "sum"] = "last"
    heads: Literal["max", "mean", "sum"] = "max"


INDEX_ROWS = 64
"""Rows that share one list of an indexed span."""


@dataclass(frozen=True)
class Span:
    """A set of keys that every query row sees a contiguous part of, or a listed part of.

    k, v: [groups, keys, dim], plain or packed, groups = KV or query heads. Row i sees keys
    start[i] <= j < stop[i] (`stop`: at most the number of keys, None: all; `start`: any), and with `index`,
    int64 [groups, runs, n], only those listed in index[:, i // INDEX_ROWS]: none twice, filled up with -1,
    and the span cannot be observed.
    `turn` rotates the queries for this span, from their true position to the apparent one.
    All spans of a call share one softmax.
    """

    k: Keys
    v: Keys
    start: Bound = 0
    stop: Bound | None = None
    turn: Rotation | None = None
    observe: Observe | None = None
    index: Tensor | None = None

    def limits(self) -> tuple[Bound, Bound]:
        return self.start, self.k.shape[1] if self.stop is None else self.stop
