"""Exact positions on the transformers path: rotary angles in float64.

A rotary module multiplies position and frequency in float32; at position 5,000,000 its angles are off by up
to 0.3 rad. A forward hook (torch's own interface) computes cos and sin again from float64 angles, in the
layout the module itself uses, which is found by comparing with its output at small positions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from longchat_cli.attention.rope import cos_sin

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "halves": lambda x: torch.cat((x, x), dim=-1),
    "pairs": lambda x: x.repeat_interleave(2, dim=-1),
    "once": lambda x: x,
}
"""How modules spread a value per plane over the channels of a head."""

NAME = "inv_freq"


def make_exact(model: nn.Module) -> list[str]:
    """Hook every rotary module of `model`; returns the names of those left alone because no layout fits."""
    left = []
    for name, module in model.named_modules():
        kinds = [
            buffer.removesuffix(NAME).removesuffix("_")
            for buffer, _ in module.named_buffers(recurse=False)
            if buffer.endswith(NAME) and not buffer.endswith(f"original_{NAME}")
        ]
        if not kinds:
            continue
        layout = next((x for x in LAYOUTS.values() if all(_fits(module, x, kind) for kind in kinds)), None)
        if layout is None:
            left.append(name)
        else:
            module.register_forward_hook(_hook(layout), with_kwargs=True)
    return left


def _hook(layout: Callable[[Tensor], Tensor]) -> Callable[..., tuple[Tensor, ...]]:
    def hook(module: nn.Module, args: Any, kwargs: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(x.to(output[0].dtype) for x in _exact(module, layout, *args, **kwargs))

    return hook


def _exact(
    module: nn.Module,
    layout: Callable[[Tensor], Tensor],
    x: Tensor,
    position_ids: Tensor,
    layer_type: str | None = None,
) -> list[Tensor]:
    """cos and sin, float32 [1, rows, channels], for a call of the module with these arguments."""
    prefix = f"{layer_type}_" if layer_type else ""
    # Models of images and text have an axis of positions more; within a text its rows agree.
    positions = position_ids[0] if position_ids.dim() == 3 else position_ids
    scaling = getattr(module, f"{prefix}attention_scaling", 1.0)
    return [layout(part * scaling) for part in cos_sin(positions, getattr(module, prefix + NAME))]


def _fits(module: nn.Module, layout: Callable[[Tensor], Tensor], kind: str) -> bool:
    """Whether the module's own output at small positions is ours, for layers of type `kind`."""
    device = getattr(module, f"{kind}_{NAME}" if kind else NAME).device
    call = torch.zeros(1, 1, 1, device=device), torch.arange(4, device=device).unsqueeze(0)
    try:
        own = module(*call, *[kind] * bool(kind))
        ours = _exact(module, layout, *call, kind or None)
        return all(
            a.shape == b.shape and torch.allclose(a, b, atol=1e-5) for a, b in zip(own, ours, strict=True)
        )
    except (TypeError, ValueError, AttributeError, RuntimeError):  # not called with a state and positions
        return False
