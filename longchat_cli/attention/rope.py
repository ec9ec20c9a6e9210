"""Rotary position embedding as data: frequencies and pairing, and rotations by exact angles.

Angles are computed in float64: in float32 they are off by 0.02 rad at position 1e6.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from longchat_cli.kernels import Rotation

AHEAD = 32
"""Rotations of one row that are made at once: decoding asks for one after the other."""


@dataclass(frozen=True)
class Rope:
    """`frequencies`: float64 [planes], radians per position. Channels past 2 x planes are not rotated."""

    frequencies: Tensor
    interleaved: bool = False
    _known: dict[int, Rotation] = field(default_factory=dict, init=False, compare=False, repr=False)

    def to(self, device: torch.device) -> Rope:
        return replace(self, frequencies=self.frequencies.to(device))

    def rotation(self, positions: Tensor) -> Rotation:
        """Rotation by positions [rows] (float64 or int64; may be negative)."""
        return Rotation(*cos_sin(positions, self.frequencies), self.interleaved)

    def shift(self, distance: int) -> Rotation:
        """Rotation of one row by `distance`: all layers of a step ask for one, the next step for the next."""
        if distance not in self._known:
            if len(self._known) >= 4 * AHEAD:
                self._known.clear()
            first = distance - distance % AHEAD
            some = torch.arange(first, first + AHEAD, device=self.frequencies.device)
            cos, sin = cos_sin(some, self.frequencies)
            for place, row in enumerate(zip(cos.split(1), sin.split(1), strict=True), first):
                self._known[place] = Rotation(*row, self.interleaved)
        return self._known[distance]

    def unrotate(self, k: Tensor, positions: Tensor) -> Tensor:
        """Take the rotation at positions [rows] out of k [heads, rows, dim]."""
        return self.rotation(-positions).apply(k)


def cos_sin(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of positions [...] x frequencies [planes], float32 [..., planes], from float64 angles."""
    angles = positions.double().unsqueeze(-1) * frequencies.to(positions.device).double()
    return angles.cos().float(), angles.sin().float()


def default_frequencies(dim: int, base: float) -> Tensor:
    """base ** (-2i / dim), float64 [dim / 2] (RoFormer, section 3.2.2)."""
    return base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)


def fits(rope: Rope | None, at_zero: Tensor, at_p: Tensor, position: int, tolerance: float) -> bool:
    """Whether rotating keys `at_zero` [heads, 1, dim] by `position` gives `at_p`."""
    expected = at_zero
    if rope is not None:
        expected = rope.rotation(torch.tensor([position])).apply(at_zero.float())
    scale = at_zero.float().abs().max().clamp(min=1e-6)
    return bool((expected.float() - at_p.float()).abs().max() <= tolerance * scale)


def probe(keys_at: Callable[[int], list[Tensor | None]], candidates: list[Rope]) -> list[Rope | None | str]:
    """Find each layer's rotation from the model itself instead of its config.

    `keys_at(p)` runs one token at position p and returns every layer's key [heads, 1, dim] as cached
    (attention over one token returns its value, so every layer's input is the same at any p).
    A layer that matches no candidate comes back as the reason, a string; NoPE layers as None.
    """
    zero, near, far = keys_at(0), keys_at(1), keys_at(57)
    found: list[Rope | None | str] = []
    for at_zero, at_near, at_far in zip(zero, near, far, strict=True):
        if at_zero is None or at_near is None or at_far is None:
            found.append("keeps its own cache")
            continue
        tolerance = 2e-2 if at_zero.dtype != torch.float32 else 1e-4
        options: list[Rope | None] = [None, *candidates]
        matching = [
            rope
            for rope in options
            if _narrow_enough(rope, at_zero)
            and fits(rope, at_zero, at_near, 1, tolerance)
            and fits(rope, at_zero, at_far, 57, tolerance)
        ]
        found.append(matching[0] if matching else "keys are not a plain rotation of one another")
    return found


def _narrow_enough(rope: Rope | None, key: Tensor) -> bool:
    return rope is None or 2 * rope.frequencies.shape[0] <= key.shape[-1]
