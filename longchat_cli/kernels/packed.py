"""Keys and values in few bits: keys scaled per channel and run of tokens, values per token.

After KIVI (Liu et al., ICML 2024): keys have channels of large magnitude, values do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

RUN = 64
"""Tokens that share a scale per channel of the keys."""

Grid = tuple[Tensor, ...]
"""Scale, and for 4 bits zero, in the dtype of the numbers."""

LIMITS = {"int8": 127.0, "fp8": 448.0, "int4": 15.0}
"""Each kind's largest code."""


@dataclass(frozen=True)
class Packed:
    """`data` [heads, tokens, dim] int8 or float8_e4m3fn, or uint8 [heads, tokens, dim / 2]: two 4-bit codes a
    byte, the even channel low. Its value is data * scale (+ zero, for 4 bits), with scale and zero of dtype
    `dtype`: [heads, tokens / RUN, dim] where scaled per channel, [heads, tokens, 1] per token.
    """

    data: Tensor
    scale: Tensor
    zero: Tensor | None
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, int, int]:
        """[heads, tokens, dim], as the dense tensor's."""
        heads, tokens, width = self.data.shape
        return heads, tokens, width * (2 if self.data.dtype == torch.uint8 else 1)

    @property
    def per_channel(self) -> bool:
        return self.scale.shape[1] != self.data.shape[1]

    @property
    def grid(self) -> Grid:
        return (self.scale,) if self.zero is None else (self.scale, self.zero)

    def tensors(self) -> list[Tensor]:
        return [self.data, *self.grid]

    def dense(self) -> Tensor:
        """[heads, tokens, dim] in `dtype`."""
        if not self.per_channel:
            return _decode(self.data, *self.grid)
        runs = self.data.unflatten(1, (-1, RUN))
        return _decode(runs, *(x.unsqueeze(2) for x in self.grid)).flatten(1, 2)

    def take(self, index: Tensor) -> Tensor:
        """The tokens at index int64 [heads, n], dense [heads, n, dim]."""
        place = index // RUN if self.per_channel else index
        return _decode(rows_at(self.data, index), *(rows_at(x, place) for x in self.grid))

    def by_run(self) -> list[Tensor]:
        """Its tensors [heads, runs, ...]; `tokens` is a multiple of RUN."""
        runs = self.data.shape[1] // RUN
        return [x if x.shape[1] == runs else x.unflatten(1, (runs, RUN)) for x in self.tensors()]

    @classmethod
    def of_runs(cls, tensors: Sequence[Tensor]) -> Packed:
        """What `by_run` took apart, without a copy."""
        return cls._of(*(x.flatten(1, 2) if x.dim() == 4 else x for x in tensors))

    @classmethod
    def _of(cls, data: Tensor, scale: Tensor, zero: Tensor | None = None) -> Packed:
        return cls(data, scale, zero, scale.dtype)


Keys = Tensor | Packed


def dense(x: Keys) -> Tensor:
    """Keys or values [heads, tokens, dim] as a plain tensor."""
    return x.dense() if isinstance(x, Packed) else x


def pack(x: Tensor, kind: str, per_channel: bool, grid: Grid = ()) -> Packed:
    """Pack x [heads, tokens, dim] as int8, fp8 (e4m3) or int4; per channel `tokens` is a multiple of RUN.

    A `grid` [heads, 1, dim] serves every run. Numbers beyond half the range of x's dtype, infinities among
    them, are packed as its half.
    """
    numbers = _finite(x.unflatten(1, (-1, RUN)) if per_channel else x)
    if not grid:
        low, high = numbers.aminmax(dim=2, keepdim=True)
        grid = _grid(low, high, kind, x.dtype)
    else:
        grid = tuple(g.unsqueeze(1).expand(-1, numbers.shape[1], -1, -1) for g in grid)
    data = _encode(numbers, kind, *grid)
    if per_channel:
        data, grid = data.flatten(1, 2), tuple(g.squeeze(2) for g in grid)
    return Packed._of(data, *grid)


WIDER = 0.01
"""Share of a grid's width that a number may lie beyond it: rounding to bfloat16 carries less."""


def common_grid(x: Tensor, kind: str, grid: Grid = ()) -> Grid:
    """One grid [heads, 1, dim] for all of x [heads, tokens, dim]: `grid` wherever it is wide enough."""
    low, high = _finite(x).aminmax(dim=1, keepdim=True)
    if not grid:
        return _grid(low, high, kind, x.dtype)
    bottom, top = (code * grid[0].float() + sum(grid[1:]) for code in _codes(kind))
    slack = WIDER * (top - bottom)
    narrow = (low < bottom - slack) | (high > top + slack)
    wider = _grid(torch.minimum(low, bottom), torch.maximum(high, top), kind, x.dtype)
    return tuple(torch.where(narrow, new, old) for new, old in zip(wider, grid, strict=True))


def _codes(kind: str) -> tuple[float, float]:
    """The least and the largest code."""
    return (0.0 if kind == "int4" else -LIMITS[kind]), LIMITS[kind]


def _finite(x: Tensor) -> Tensor:
    half = torch.finfo(x.dtype).max / 2
    return x.float().clamp(-half, half)


def _grid(low: Tensor, high: Tensor, kind: str, dtype: torch.dtype) -> Grid:
    """The finest grid from low to high, float32."""
    if kind == "int4":
        return ((high - low) / LIMITS[kind]).to(dtype), low.to(dtype)
    return ((torch.maximum(-low, high) / LIMITS[kind]).to(dtype),)


def _encode(x: Tensor, kind: str, scale: Tensor, zero: Tensor | None = None) -> Tensor:
    """Codes of x float32 [..., dim], as `Packed.data` holds them."""
    x = (x if zero is None else x - zero.float()) / scale.float().clamp(min=1e-30)
    x = x.clamp(*_codes(kind))
    if kind == "fp8":
        return x.to(torch.float8_e4m3fn)
    if kind == "int8":
        return x.round().to(torch.int8)
    codes = x.round().to(torch.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4


def _decode(data: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
    """What codes stand for, in the dtype of `scale`."""
    if zero is not None:
        codes = scale.new_empty(*data.shape, 2)
        codes[..., 0], codes[..., 1] = data & 15, data >> 4
        return codes.flatten(-2).mul_(scale).add_(zero)
    if data.dtype == torch.int8:
        return data * scale
    if data.is_cuda:
        return data.to(scale.dtype).mul_(scale)
    # Shifted, the bits of e4m3 are a bfloat16 of 2^-120 of its value: a third of torch's own time.
    bits = data.view(torch.int8).to(torch.int16).bitwise_left_shift_(4).bitwise_and_(-0x7810)
    return bits.view(torch.bfloat16).mul_(2.0**120).to(scale.dtype).mul_(scale)


def rows_at(x: Tensor, index: Tensor) -> Tensor:
    """x [heads, n, dim] at index int64 [heads, m]."""
    # Indexing is not defined for 8-bit floats.
    bits = x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x
    # A head at a time: take_along_dim is twenty times slower on CPUs.
    taken = [rows.index_select(0, places) for rows, places in zip(bits, index, strict=True)]
    return torch.stack(taken).view(x.dtype)
