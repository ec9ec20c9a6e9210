# ruff: noqa: N803 (constants of a Triton kernel are capitals)
"""What the Triton kernels share: tile sizes, loads, logits. Imported only where triton is installed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton import language as tl

LOG2E = math.log2(math.e)


@dataclass(frozen=True)
class Tiles:
    """Rows (of all heads that share the tile) and keys of a tile, warps and pipeline stages of a block."""

    rows: int
    keys: int
    warps: int
    stages: int


def tiles(dim: int, capability: int) -> Tiles:
    """Tile sizes of attention over keys and values of `dim` channels of two bytes.

    Queries stay in shared memory or registers, beside `stages` tiles of keys and of values. Warp-group
    products (from sm_90 on) read keys from shared memory and want tiles of 64; before, a warp holds a whole
    tile of keys in registers, next to its float32 accumulator.
    """
    width = padded(dim)
    if width <= 64:
        return Tiles(128, 64, 8, 3)
    if width <= 128:
        return Tiles(128, 64, 8, 2) if capability >= 90 else Tiles(128, 32, 8, 3)
    # Two stages of 32 keys would take 100 KiB of shared memory on sm_90.
    return Tiles(64, 16, 8, 3) if capability >= 90 else Tiles(64, 32, 8, 2)


def capability(device: torch.device) -> int:
    """Compute capability of a GPU: 80 is sm_80, an A100's; also taken for the interpreter."""
    if device.type != "cuda":
        return 80
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def padded(dim: int) -> int:
    """Tensor cores want powers of two; 80 and 96 channels are loaded as 128 with a mask."""
    return max(16, triton.next_power_of_2(dim))


@dataclass(frozen=True)
class Setup:
    """How logits are made of products, and the compute capability that tiles are for."""

    scale: float
    softcap: float | None
    capability: int


def constants(q: Tensor, tile: Tiles, setup: Setup) -> dict[str, Any]:
    """Arguments of every kernel over q [heads, rows, dim]; `factor` and `cap` are for `logits`."""
    softcap = setup.softcap
    return {
        "factor": LOG2E * (setup.scale if softcap is None else 2 * setup.scale / softcap),
        "cap": LOG2E * (softcap or 0.0),
        "DIM": q.shape[2],
        "BLOCK_D": padded(q.shape[2]),
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.keys,
        "SOFTCAP": softcap is not None,
    }


def dense_rows(x: Tensor) -> Tensor:
    """Kernels take any strides but the last, which is 1."""
    return x if x.stride(-1) == 1 else x.contiguous()


@triton.jit
def logits(products, bend, SOFTCAP: tl.constexpr):
    """Base-2 logits: scaled, or bounded by cap * tanh, which exp2 gives exactly at both ends."""
    factor, cap = bend
    if SOFTCAP:
        return cap - 2 * cap / (tl.exp2(products * factor) + 1)
    return products * factor


@triton.jit
def load_rows(base, at, real, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """[n, BLOCK_D]: rows of DIM channels at offsets `at` [n], zeros where not `real` (None: all are)."""
    channel = tl.arange(0, BLOCK_D)[None, :]
    where = base + at[:, None] + channel
    # A mask that is always true still costs: each case has the least it needs.
    if real is None:
        if DIM == BLOCK_D:  # noqa: SIM108 (Triton takes no return from one branch)
            x = tl.load(where)
        else:
            x = tl.load(where, mask=channel < DIM, other=0.0)
    elif DIM == BLOCK_D:
        x = tl.load(where, mask=real[:, None], other=0.0)
    else:
        x = tl.load(where, mask=real[:, None] & (channel < DIM), other=0.0)
    return x


@triton.jit
def store_rows(base, at, real, x, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store x [n, BLOCK_D] as rows of DIM channels at element offsets `at` [n], where `real`."""
    channel = tl.arange(0, BLOCK_D)[None, :]
    where = base + at[:, None] + channel
    tl.store(where, x.to(base.dtype.element_ty), mask=real[:, None] & (channel < DIM))


@triton.jit
def rows_seeing(bounds, rows, low, high, CHUNK: tl.constexpr):
    """First and past-the-last of the rows that see any key of low..high; bounds [2, rows]: start, stop."""
    first, last = rows, rows * 0
    for base in range(0, rows, CHUNK):
        row = base + tl.arange(0, CHUNK)
        start = tl.load(bounds + row, mask=row < rows, other=0)
        stop = tl.load(bounds + rows + row, mask=row < rows, other=0)
        seen = tl.maximum(start, low) < tl.minimum(stop, high)
        first = tl.minimum(first, tl.min(tl.where(seen, row, rows)))
        last = tl.maximum(last, tl.max(tl.where(seen, row + 1, 0)))
    return first, last
