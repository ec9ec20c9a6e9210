# ruff: noqa: N803 (constants of a Triton kernel are capitals)
"""Gradients of attention over one span (Dao, 2023, algorithm 2), for fine-tuning on pooled contexts (CCA).

Probabilities are recomputed from the log-sum-exp of the whole softmax, so each span stands for itself. One
kernel owns rows and walks over keys, the other owns keys and walks over the rows of all their query heads: no
atomic additions, and the same result each time.

Roofline. Seven products a pair of row and key (three in one kernel, four in the other) to the forward's two:
14 d FLOPs a query head. CCA with g = 16, s = 1024 over 32,768 tokens, 32 heads of 128: 2,050 keys a row,
3.9 TFLOP, 4.9 ms on an H200 (790 TFLOP/s in bfloat16), where full attention would take 39 ms; 1.2 GB read
and written at least, 0.3 ms (4.3 TB/s).

Imported only where triton is installed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import language as tl

from longchat_cli.kernels.launch import Launch
from longchat_cli.kernels.triton_tiles import (
    Setup,
    Tiles,
    constants,
    dense_rows,
    load_rows,
    logits,
    padded,
    rows_seeing,
    store_rows,
)


def tiles(dim: int) -> tuple[Tiles, Tiles]:
    """Tile sizes of `query_gradient` and of `key_gradients`, which has two float32 accumulators."""
    width = padded(dim)
    if width <= 64:
        return Tiles(64, 64, 8, 2), Tiles(64, 64, 8, 2)
    if width <= 128:
        return Tiles(64, 64, 8, 2), Tiles(32, 64, 8, 2)
    return Tiles(32, 32, 8, 2), Tiles(16, 32, 8, 2)


class Inputs(NamedTuple):
    """What both kernels take, as `gradients` does; `share`: query heads of a KV head; strides in elements."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    bounds: Tensor
    lse: Tensor
    delta: Tensor
    rows: int
    keys: int
    share: int
    scale: float
    q_head: int
    q_row: int
    k_group: int
    k_row: int
    v_group: int
    v_row: int
    grad_head: int
    grad_row: int


def gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor,
    grad: Tensor,
    lse: Tensor,
    delta: Tensor,
    setup: Setup,
) -> tuple[list[Tensor], list[Launch]]:
    """Room for the gradients of q [heads, rows, dim], k and v [groups, keys, dim] of one span of the
    softmax, and the calls that fill it.

    bounds: int32 [2, rows]; grad: of the output, as q; lse: base-2 log-sum-exp of the whole softmax and
    delta: sum of grad x output over channels, float32 [heads, rows].
    """
    heads, rows, dim = q.shape
    groups, keys, _ = k.shape
    by_rows, by_keys = tiles(dim)
    grad = dense_rows(grad)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    strides = [stride for x in (q, k, v, grad) for stride in x.stride()[:2]]
    sizes = (rows, keys, heads // groups)
    inputs = Inputs(q, k, v, grad, bounds, lse, delta, *sizes, setup.scale, *strides)

    def launch(kernel: Any, tile: Tiles, grid: tuple[int, int], **room: Tensor) -> Launch:
        arguments = {"inputs": inputs, **constants(q, tile, setup), **room}
        return Launch(kernel, grid, arguments, tile.warps, tile.stages)

    return [dq, dk, dv], [
        launch(query_gradient, by_rows, (triton.cdiv(rows, by_rows.rows), heads), dq=dq),
        launch(key_gradients, by_keys, (triton.cdiv(keys, by_keys.keys), groups), dk=dk, dv=dv),
    ]


@triton.jit
def query_gradient(
    inputs,
    dq,
    factor,
    cap,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """A program owns BLOCK_M rows of a head and walks over the keys that any of them sees."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    head = tl.program_id(1).to(tl.int64)
    group = head // inputs.share
    k, v = inputs.k + group * inputs.k_group, inputs.v + group * inputs.v_group
    query, upstream, start, stop, level, mean = _rows(inputs, row, head, DIM, BLOCK_D)
    # Rows past the end see nothing.
    low = tl.min(tl.where(start < stop, start, inputs.keys))
    high = tl.max(stop)
    found = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for first in range(low, high, BLOCK_N):
        key = first + tl.arange(0, BLOCK_N)
        each = load_rows(k, key.to(tl.int64) * inputs.k_row, key < high, DIM, BLOCK_D)
        values = load_rows(v, key.to(tl.int64) * inputs.v_row, key < high, DIM, BLOCK_D)
        products = tl.dot(query, tl.trans(each))
        seen = (key[None, :] >= start[:, None]) & (key[None, :] < stop[:, None])
        weight, logit = _weights(products, level[:, None], seen, (factor, cap), SOFTCAP)
        pull = tl.dot(upstream, tl.trans(values)) - mean[:, None]
        push = _through_softmax(weight, pull, logit, (factor, cap), SOFTCAP)
        found = tl.dot(push.to(each.dtype), each, found)
    place = (head * inputs.rows + row) * DIM
    store_rows(dq, place, row < inputs.rows, found * inputs.scale, DIM, BLOCK_D)


@triton.jit
def key_gradients(
    inputs,
    dk,
    dv,
    factor,
    cap,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """A program owns BLOCK_N keys of a group and walks over the rows of all its heads that see any of them:
    no atomic additions."""
    low = tl.program_id(0) * BLOCK_N
    group = tl.program_id(1).to(tl.int64)
    key = low + tl.arange(0, BLOCK_N)
    k, v = inputs.k + group * inputs.k_group, inputs.v + group * inputs.v_group
    real = key < inputs.keys
    each = load_rows(k, key.to(tl.int64) * inputs.k_row, real, DIM, BLOCK_D)
    values = load_rows(v, key.to(tl.int64) * inputs.v_row, real, DIM, BLOCK_D)
    first, last = rows_seeing(inputs.bounds, inputs.rows, low, low + BLOCK_N, 256)
    found_k = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    found_v = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    steps = tl.cdiv(tl.maximum(last - first, 0), BLOCK_M)
    # One loop over heads and rows: the pipeline does not run dry between heads.
    for step in range(steps * inputs.share):
        head = group * inputs.share + step // steps
        row = first + step % steps * BLOCK_M + tl.arange(0, BLOCK_M)
        query, upstream, start, stop, level, mean = _rows(inputs, row, head, DIM, BLOCK_D)
        products = tl.dot(each, tl.trans(query))
        seen = (key[:, None] >= start[None, :]) & (key[:, None] < stop[None, :])
        weight, logit = _weights(products, level[None, :], seen, (factor, cap), SOFTCAP)
        found_v = tl.dot(weight.to(upstream.dtype), upstream, found_v)
        pull = tl.dot(values, tl.trans(upstream)) - mean[None, :]
        push = _through_softmax(weight, pull, logit, (factor, cap), SOFTCAP)
        found_k = tl.dot(push.to(query.dtype), query, found_k)
    place = (group * inputs.keys + key) * DIM
    store_rows(dk, place, real, found_k * inputs.scale, DIM, BLOCK_D)
    store_rows(dv, place, real, found_v, DIM, BLOCK_D)


@triton.jit
def _rows(inputs, row, head, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """What the rows bring: query, gradient of the output, start, stop, log-sum-exp, delta."""
    real = row < inputs.rows
    wide = row.to(tl.int64)
    query = load_rows(inputs.q, head * inputs.q_head + wide * inputs.q_row, real, DIM, BLOCK_D)
    upstream = load_rows(inputs.grad, head * inputs.grad_head + wide * inputs.grad_row, real, DIM, BLOCK_D)
    start = tl.load(inputs.bounds + row, mask=real, other=0)
    stop = tl.load(inputs.bounds + inputs.rows + row, mask=real, other=0)
    level = tl.load(inputs.lse + head * inputs.rows + row, mask=real, other=float("inf"))
    mean = tl.load(inputs.delta + head * inputs.rows + row, mask=real, other=0.0)
    return query, upstream, start, stop, level, mean


@triton.jit
def _weights(products, level, seen, bend, SOFTCAP: tl.constexpr):
    """Probabilities, and the logits they come from."""
    logit = logits(products, bend, SOFTCAP)
    return tl.where(seen, tl.exp2(logit - level), 0.0), logit


@triton.jit
def _through_softmax(weight, pull, logit, bend, SOFTCAP: tl.constexpr):
    """Gradient of the products (but for the scale) from that of the probabilities less its mean, `pull`."""
    found = weight * pull
    if SOFTCAP:
        bent = logit / bend[1]
        found *= 1 - bent * bent
    return found
