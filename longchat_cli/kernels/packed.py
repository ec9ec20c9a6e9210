"""Keys and values in few bits: keys scaled per channel and run of tokens, values per token (KIVI, 2024)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

RUN = 64
"""Tokens that share a scale per channel of the keys."""


@dataclass(frozen=True)
class Packed:
    """`data` [heads, tokens, dim] int8 or float8_e4m3fn, or uint8 [heads, tokens, dim / 2]: two 4-bit codes a
    byte, the even channel low. Its value is data * scale (+ zero, for 4 bits), with scale and zero of dtype
    `dtype`: [heads, ceil(tokens / RUN), dim] where scaled per channel, [heads, tokens, 1] per token.
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
        return self.scale.shape[2] > 1 or self.shape[2] == 1

    def tensors(self) -> list[Tensor]:
        return [x for x in (self.data, self.scale, self.zero) if x is not None]

    def dense(self) -> Tensor:
        """[heads, tokens, dim] in `dtype`."""
        codes = self.data
        if codes.dtype == torch.uint8:
            codes = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
        value = codes.float() * self._spread(self.scale)
        if self.zero is not None:
            value = value + self._spread(self.zero)
        return value.to(self.dtype)

    def _spread(self, x: Tensor) -> Tensor:
        """A scale or zero for each token, float32."""
        tokens = self.shape[1]
        return (x.repeat_interleave(RUN, dim=1)[:, :tokens] if self.per_channel else x).float()


Keys = Tensor | Packed


def dense(x: Keys) -> Tensor:
    """Keys or values [heads, tokens, dim] as a plain tensor."""
    return x.dense() if isinstance(x, Packed) else x


LIMITS = {"int8": 127.0, "fp8": 448.0, "int4": 15.0}


def pack(x: Tensor, kind: str, per_channel: bool) -> Packed:
    """Pack x [heads, tokens, dim] as int8, fp8 (e4m3) or int4; per channel `tokens` is a multiple of RUN."""
    heads, tokens, dim = x.shape
    runs = x.float().unflatten(1, (-1, RUN)) if per_channel else x.float()
    axis = 2
    limit = LIMITS[kind]
    if kind == "int4":
        low, high = runs.amin(axis, keepdim=True), runs.amax(axis, keepdim=True)
        scale, zero = ((high - low) / limit).to(x.dtype), low.to(x.dtype)
        codes = (runs - zero.float()) / scale.float().clamp(min=1e-12)
        codes = codes.round().clamp(0, limit).to(torch.uint8).view(heads, tokens, dim)
        data = codes[..., ::2] | codes[..., 1::2] << 4
        return Packed(data, _flat(scale, per_channel), _flat(zero, per_channel), x.dtype)
    scale = (runs.abs().amax(axis, keepdim=True) / limit).to(x.dtype)
    scaled = runs / scale.float().clamp(min=1e-12)
    whole = scaled.round().clamp(-limit, limit).to(torch.int8) if kind == "int8" else _fp8(scaled, limit)
    return Packed(whole.view(heads, tokens, dim), _flat(scale, per_channel), None, x.dtype)


def _fp8(x: Tensor, limit: float) -> Tensor:
    return x.clamp(-limit, limit).to(torch.float8_e4m3fn)


def _flat(x: Tensor, per_channel: bool) -> Tensor:
    return x.squeeze(2) if per_channel else x
