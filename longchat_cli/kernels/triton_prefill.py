# ruff: noqa: N803 (constants of a Triton kernel are capitals)
"""Attention of many rows over several spans in one pass: a flash-attention forward in Triton (Dao, 2023).

A program takes a tile of rows, of one head or of the stacked query heads of a KV head, and walks over the
keys of every span that any of its rows sees, in one running softmax; tiles that all rows see are not masked.
`probabilities` recomputes what a span's observer asked for from the log-sum-exp, reduced over rows and heads
as it goes: nothing of rows x keys is ever stored. Gradients are in `triton_backward`.

Roofline on an H200 (790 TFLOP/s in bfloat16, 4.3 TB/s), 32 heads of 128 channels, 8 KV heads; a pair of row
and key costs 4 d FLOPs a head, everything is read and written once:

    spans                                         rows     keys a row   TFLOP   ms      GB     ms
    causal                                        32,768   16,384       8.8     11.1    0.67   0.16
    4 sinks + window of 4,096                     32,768   3,844        2.1     2.6     0.67   0.16
    CCA: cores of 16, local 1,024                 32,768   2,050        1.1     1.4     0.68   0.16
    InfLLM: 128 + 16 blocks of 128 + 4,096        512      6,272        0.053   0.067   0.034  0.008
    vertical-slash, 7,096 listed (MInference)     32,768   6,328        3.4     4.3     0.67   0.16

So arithmetic alone counts, and skipped keys are saved time. Why it can come near: of what a program does not
skip, just the ends of a range are wasted (on average half a tile of keys and half a tile of rows an end: 2 %
of a window of 4,096); products run on tensor cores from tiles in shared memory, filled by asynchronous copies
while the tile before is multiplied; exp2 takes one special-function step in 4 d FLOPs, half of what they give
at d = 128. What keeps it away: a tile of keys serves 128 rows, which asks the L2 cache for 6.2 TB/s at full
speed, and a program does not multiply while it exponentiates: flash-attention 2, built alike, uses 35 % of
an H100 (Shah et al., 2024). Not yet timed on a GPU.

Imported only where triton is installed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor
from triton import language as tl

from longchat_cli.kernels import triton_backward
from longchat_cli.kernels.aot import TARGETS, Configuration
from longchat_cli.kernels.launch import Launch, learning, unusable
from longchat_cli.kernels.packed import dense
from longchat_cli.kernels.span import INDEX_ROWS, Observe, Span
from longchat_cli.kernels.triton_tiles import (
    LOG2E,
    Setup,
    Tiles,
    capability,
    constants,
    dense_rows,
    load_rows,
    logits,
    rows_seeing,
    store_rows,
    tiles,
)

MOST_SPANS = 4
MOST_STACKED = 16
"""Query heads that may share a tile of rows."""
RUN = tl.constexpr(INDEX_ROWS)


def accepts(q: Tensor, spans: Sequence[Span], softcap: float | None, sinks: Tensor | None) -> str | None:
    """None when this kernel can serve, else why not. Packed keys and values are unpacked beforehand."""
    if reason := unusable(q):
        return reason
    if q.dtype == torch.float32 and q.is_cuda:
        return "float32: tensor cores would round it"
    if q.shape[1] < 2:
        return "one row"
    keys_and_values = [x for span in spans for x in (span.k, span.v)]
    if any(x.dtype != q.dtype for x in keys_and_values):
        return "queries and keys of different dtype"
    if not 1 <= len(spans) <= MOST_SPANS:
        return f"{len(spans)} spans"
    if q.shape[2] > 256 or any(span.k.shape[-1] != span.v.shape[-1] for span in spans):
        return "wide heads, or keys and values of different width"
    listed = any(span.index is not None for span in spans)
    return "listed keys have no gradients" if listed and learning(q, sinks, *keys_and_values) else None


def attend(
    q: Tensor,
    spans: Sequence[Span],
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, list[Tensor | None]]:
    """As `reference.attend` for what `accepts` lets through. Differentiable in q, sinks and plain k and v;
    scores are not."""
    parts = [_part(q, span) for span in spans]
    tensors = [x for part in parts for x in (part.q, part.k, part.v)]
    setup = Setup(scale, softcap, capability(q.device))
    out, lse = _Attention.apply(parts, setup, sinks, *tensors)
    groups = min(part.k.shape[0] for part in parts)
    with torch.no_grad():
        scores = [
            None if span.observe is None else _scores(part, span.observe, lse, groups, setup)
            for part, span in zip(parts, spans, strict=True)
        ]
    return out, scores


def _scores(part: Part, observe: Observe, lse: Tensor, groups: int, setup: Setup) -> Tensor:
    """The probabilities asked for, [groups, keys] float32."""
    found, launch = _observe(part, observe, lse, setup)
    launch.run()
    # A span may have keys per query head: the heads of a KV head meet here.
    grouped = found.view(groups, -1, found.shape[1])
    if observe.heads == "max":
        return grouped.amax(1)
    return grouped.sum(1) / (part.q.shape[0] // groups if observe.heads == "mean" else 1)


@dataclass(frozen=True)
class Part:
    """A span as the kernels take it: its queries [heads, rows, dim], its keys and values [groups, keys, dim],
    `bounds` int32 [2, rows] (start and stop, within the keys), `index` as the span's, `used` int32
    [groups, runs]: how many entries of each list come before its trailing fillers."""

    q: Tensor
    k: Tensor
    v: Tensor
    bounds: Tensor
    index: Tensor | None = None
    used: Tensor | None = None

    def arguments(self) -> tuple[Any, ...]:
        """In the order that `_start` and `_lists` unpack them."""
        share = self.q.shape[0] // self.k.shape[0]
        strides = [stride for x in (self.q, self.k, self.v) for stride in x.stride()[:2]]
        lists = [] if self.index is None else [self.index, self.used, *self.index.shape[1:]]
        return self.q, self.k, self.v, self.bounds, share, *strides, *lists


def _part(q: Tensor, span: Span) -> Part:
    query = q if span.turn is None else span.turn.apply(q)
    k, v = dense(span.k), dense(span.v)
    bounds = torch.empty(2, q.shape[1], dtype=torch.int32, device=q.device)
    bounds[0], bounds[1] = span.limits()
    bounds.clamp_(0, k.shape[1])
    index = used = None
    if span.index is not None:
        index = span.index.contiguous()
        places = torch.arange(1, index.shape[2] + 1, device=q.device)
        used = (places * (index >= 0)).amax(-1).int()
    return Part(dense_rows(query), dense_rows(k), dense_rows(v), bounds, index, used)


class _Attention(torch.autograd.Function):
    """Output [heads, rows, dim], and base-2 log-sum-exp float32 [heads, rows] (+inf: the row sees no key)."""

    @staticmethod
    def forward(ctx, parts, setup, sinks, *tensors):
        out, lse, launch = _forward(parts, setup, sinks)
        launch.run()
        ctx.save_for_backward(out, lse, sinks, *tensors)
        ctx.setup, ctx.bounds = setup, [part.bounds for part in parts]
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, grad, _):
        out, lse, sinks, *tensors = ctx.saved_tensors
        delta = (grad.float() * out.float()).sum(-1)
        found = []
        for i, bounds in enumerate(ctx.bounds):
            q, k, v = tensors[3 * i : 3 * i + 3]
            gradients, launches = triton_backward.gradients(q, k, v, bounds, grad, lse, delta, ctx.setup)
            for launch in launches:
                launch.run()
            found += gradients
        sink_grad = None
        if sinks is not None:
            weights = torch.exp2(sinks.float()[:, None] * LOG2E - lse)
            sink_grad = -(weights * delta).sum(-1).to(sinks.dtype)
        return None, None, sink_grad, *found


# --- launchers


def _forward(parts: Sequence[Part], setup: Setup, sinks: Tensor | None) -> tuple[Tensor, Tensor, Launch]:
    """Room for output and log-sum-exp, and the call that fills it."""
    q = parts[0].q
    heads, rows, dim = q.shape
    stacked, pack = _packing(parts)
    tile = tiles(dim, setup.capability)
    if any(part.index is not None for part in parts):
        tile = replace(tile, rows=min(tile.rows, INDEX_ROWS * pack))
    out = torch.empty(heads, rows, dim, dtype=q.dtype, device=q.device)
    lse = torch.empty(heads, rows, dtype=torch.float32, device=q.device)
    arguments = {
        "plain": _by_field([part for part in parts if part.index is None]),
        "listed": _by_field([part for part in parts if part.index is not None]),
        "sinks": None if sinks is None else sinks.float() * LOG2E,
        "out": out,
        "lse": lse,
        "rows": rows,
        "stacked": stacked,
        "PACK": pack,
        **constants(q, tile, setup),
    }
    grid = (triton.cdiv(rows, tile.rows // pack), heads // stacked)
    return out, lse, Launch(attention, grid, arguments, tile.warps, tile.stages)


def _by_field(parts: Sequence[Part]) -> tuple[tuple[Any, ...], ...] | None:
    return tuple(zip(*(part.arguments() for part in parts), strict=True)) or None


def _packing(parts: Sequence[Part]) -> tuple[int, int]:
    """(query heads that share a tile of rows and so its keys, the power of two they are padded to).

    The heads of a KV head are stacked where padding is free, or where rows are too few to fill a tile: a tile
    of fewer rows has fewer keys that only some of them see, and lists are gathered once for all heads.
    """
    heads, rows, _ = parts[0].q.shape
    shares = {heads // part.k.shape[0] for part in parts}
    share = shares.pop()
    pack = triton.next_power_of_2(share)
    if shares or (pack != share and (rows > 32 or pack > MOST_STACKED)):
        return 1, 1
    return min(share, MOST_STACKED), min(pack, MOST_STACKED)


def _observe(part: Part, observe: Observe, lse: Tensor, setup: Setup) -> tuple[Tensor, Launch]:
    """Room for probabilities float32 [groups of the span, keys], and the call that recomputes them there, a
    tile at a time, from the log-sum-exp."""
    q, bounds = part.q, part.bounds
    if observe.rows == "last":
        q, bounds, lse = q[:, -1:], bounds[:, -1:].contiguous(), lse[:, -1:].contiguous()
    groups, keys, dim = part.k.shape
    share = q.shape[0] // groups
    pack = triton.next_power_of_2(share)
    # Here keys stay and rows stream by.
    tile = Tiles(max(64, pack), 64 if dim <= 128 else 32, 4, 2)
    found = torch.empty(groups, keys, dtype=torch.float32, device=q.device)
    arguments = {
        "q": q,
        "k": part.k,
        "bounds": bounds,
        "lse": lse,
        "found": found,
        "rows": q.shape[1],
        "keys": keys,
        "share": share,
        "q_head": q.stride(0),
        "q_row": q.stride(1),
        "k_group": part.k.stride(0),
        "k_row": part.k.stride(1),
        "LARGEST": observe.heads == "max",
        "PACK": pack,
        **constants(q, tile, setup),
    }
    return found, Launch(
        probabilities, (triton.cdiv(keys, tile.keys), groups), arguments, tile.warps, tile.stages
    )


# --- kernels


@triton.jit
def attention(
    plain,  # `Part.arguments` of the spans without and with lists, a tuple of spans for each; or None
    listed,
    sinks,  # base 2, float32, or None
    out,
    lse,
    rows,
    stacked,
    factor,
    cap,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PACK: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """A program serves BLOCK_M slots: BLOCK_M / PACK rows of `stacked` heads (out of PACK)."""
    slot = tl.arange(0, BLOCK_M)
    # Last rows see most keys where attention is causal: they start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    row = tile * (BLOCK_M // PACK) + slot // PACK
    first_head = tl.program_id(1) * stacked
    real = (row < rows) & (slot % PACK < stacked)
    # Slots without a row or a head repeat the last one: they change no extent.
    row = tl.minimum(row, rows - 1)
    head = first_head + tl.minimum(slot % PACK, stacked - 1)
    total = tl.zeros([BLOCK_M], tl.float32)
    largest = total - float("inf")
    if sinks is not None:
        largest = tl.load(sinks + head)
        total += 1
    soft = (tl.zeros([BLOCK_M, BLOCK_D], tl.float32), largest, total)
    slots = (row, head, first_head, real, rows)
    bend = (factor, cap)
    if plain is not None:
        # Not unrolled: a span more takes neither registers nor time to compile.
        for i in range(len(plain[0])):
            soft = _ranges(_pick(plain, i), soft, slots, bend, DIM, BLOCK_D, BLOCK_N, SOFTCAP)
    if listed is not None:
        for i in range(len(listed[0])):
            soft = _lists(_pick(listed, i), soft, slots, bend, DIM, BLOCK_D, BLOCK_N, SOFTCAP)
    mix, largest, total = soft
    divisor = tl.where(total > 0, total, 1)
    mix = mix / divisor[:, None]
    place = head.to(tl.int64) * rows + row
    store_rows(out, place * DIM, real, mix, DIM, BLOCK_D)
    # With +inf every probability of a row without keys comes out as zero.
    tl.store(lse + place, tl.where(total > 0, largest + tl.log2(divisor), float("inf")), mask=real)


@triton.jit
def _pick(fields, i):
    """The i-th span's: each field is a tuple over spans."""
    return [_choose(field, i) for field in fields]


@triton.jit
def _choose(options, i):
    chosen = options[0]
    for j in tl.static_range(1, len(options)):
        chosen = tl.where(i == j, options[j], chosen)
    return chosen


@triton.jit
def _start(span, slots, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Of a span: its queries, group, keys and values of that group, and what the rows see."""
    q, k, v, bounds, share = span[0], span[1], span[2], span[3], span[4]
    q_head, q_row, k_group, k_row, v_group, v_row = span[5], span[6], span[7], span[8], span[9], span[10]
    row, head, first_head, real, rows = slots
    group = (first_head // share).to(tl.int64)
    start = tl.load(bounds + row)
    stop = tl.load(bounds + rows + row)
    query = load_rows(q, head.to(tl.int64) * q_head + row.to(tl.int64) * q_row, real, DIM, BLOCK_D)
    source = (k + group * k_group, v + group * v_group, k_row, v_row)
    return query, group, source, (start, stop, tl.max(stop))


@triton.jit
def _ranges(
    span,
    soft,
    slots,
    bend,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Take the keys of a plain span into the running softmax `soft`."""
    query, group, source, limits = _start(span, slots, DIM, BLOCK_D)
    start, stop, high = limits
    low = tl.min(start)
    common, last = tl.max(start), tl.min(stop)
    for first in range(low, high, BLOCK_N):
        # Between `common` and `last` every row sees every key.
        ragged = (first < common) | (first + BLOCK_N > last)
        soft = _tile(
            query, source, first, tl.arange(0, BLOCK_N), limits, ragged, soft, bend, DIM, BLOCK_D, SOFTCAP
        )
    return soft


@triton.jit
def _lists(
    span,
    soft,
    slots,
    bend,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """Take the listed keys of a span into the running softmax `soft`."""
    index, used, runs, count = span[11], span[12], span[13], span[14]
    query, group, source, limits = _start(span, slots, DIM, BLOCK_D)
    entry = group * runs + tl.min(slots[0]) // RUN
    for first in range(0, tl.load(used + entry), BLOCK_N):
        place = first + tl.arange(0, BLOCK_N)
        key = tl.load(index + entry * count + place, mask=place < count, other=-1)
        soft = _tile(query, source, 0, key, limits, True, soft, bend, DIM, BLOCK_D, SOFTCAP)
    return soft


@triton.jit
def _tile(
    query,
    source,
    first,
    offset,
    limits,
    ragged,
    soft,
    bend,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """One step of the online softmax, over the keys at `first + offset`."""
    k, v, k_row, v_row = source
    start, stop, high = limits
    mix, largest, total = soft
    key = (first + offset).to(tl.int32)
    here = (key >= 0) & (key < high)
    keys = load_rows(k + tl.cast(first, tl.int64) * k_row, offset * k_row, here, DIM, BLOCK_D)
    logit = logits(tl.dot(query, tl.trans(keys)), bend, SOFTCAP)
    if ragged:
        seen = (key[None, :] >= start[:, None]) & (key[None, :] < stop[:, None])
        logit = tl.where(seen, logit, float("-inf"))
    new = tl.maximum(largest, tl.max(logit, 1))
    # A row that has seen nothing yet: -inf minus -inf is not a number.
    level = tl.where(new == float("-inf"), 0.0, new)
    weight = tl.exp2(logit - level[:, None])
    shrink = tl.exp2(largest - level)
    total = total * shrink + tl.sum(weight, 1)
    values = load_rows(v + tl.cast(first, tl.int64) * v_row, offset * v_row, here, DIM, BLOCK_D)
    mix = tl.dot(weight.to(values.dtype), values, mix * shrink[:, None])
    return mix, new, total


@triton.jit
def probabilities(
    q,
    k,
    bounds,
    lse,
    found,
    rows,
    keys,
    share,
    q_head,
    q_row,
    k_group,
    k_row,
    factor,
    cap,
    LARGEST: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PACK: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """A program owns BLOCK_N keys of one group: each probability summed over rows, then over the heads
    (LARGEST: their maximum)."""
    low = tl.program_id(0) * BLOCK_N
    key = low + tl.arange(0, BLOCK_N)
    group = tl.program_id(1).to(tl.int64)
    slot = tl.arange(0, BLOCK_M)
    head = group * share + tl.minimum(slot % PACK, share - 1)
    each = load_rows(k + group * k_group, key.to(tl.int64) * k_row, key < keys, DIM, BLOCK_D)
    first, last = rows_seeing(bounds, rows, low, low + BLOCK_N, 256)
    mass = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for begin in range(first, last, BLOCK_M // PACK):
        row = begin + slot // PACK
        real = (row < rows) & (slot % PACK < share)
        start = tl.load(bounds + row, mask=real, other=0)
        stop = tl.load(bounds + rows + row, mask=real, other=0)
        level = tl.load(lse + head * rows + row, mask=real, other=0.0)
        query = load_rows(q, head * q_head + row.to(tl.int64) * q_row, real, DIM, BLOCK_D)
        products = tl.dot(query, tl.trans(each))
        weight = tl.exp2(logits(products, (factor, cap), SOFTCAP) - level[:, None])
        seen = (key[None, :] >= start[:, None]) & (key[None, :] < stop[:, None])
        mass += tl.where(seen, weight, 0.0)
    by_head = tl.sum(tl.reshape(mass, [BLOCK_M // PACK, PACK, BLOCK_N]), 0)
    result = tl.max(by_head, 0) if LARGEST else tl.sum(by_head, 0)
    tl.store(found + group * keys + key, result, mask=key < keys)


# --- what the launchers can choose


def configurations() -> Iterator[Configuration]:
    """Every kernel for the head widths that models have, over the spans that methods return."""
    for target, dim, softcap in itertools.product(TARGETS, (64, 80, 96, 128, 256), (None, 30.0)):
        case = f"{dim} wide" + (", softcap" if softcap else "")
        quick = dim == 128 and softcap is None
        for made in _configurations(dim, Setup(1.0, softcap, target), case, quick):
            yield replace(made, targets=(target,))


def _configurations(dim: int, setup: Setup, case: str, quick: bool) -> Iterator[Configuration]:
    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device="meta")

    q, sinks = empty(32, 2048, dim), empty(32) if setup.softcap else None
    window = _part(q, Span(empty(8, 4096, dim), empty(8, 4096, dim)))
    cores = _part(q, Span(empty(8, 512, dim), empty(8, 512, dim)))
    index, used = empty(8, 32, 1024, dtype=torch.int64), empty(8, 32, dtype=torch.int32)
    listed = replace(window, index=index, used=used)
    by_one_head = replace(listed, q=empty(24, 2048, dim))
    cases = {"causal": [window], "three spans": [window, cores, cores], "listed": [listed]}
    for name, parts in {**cases, "listed by one head": [by_one_head]}.items():
        out, lse, launch = _forward(parts, setup, sinks)
        yield launch.configuration(f"prefill {name}, {case}", quick=quick and len(parts) == 3)
    for observe in (Observe("sum", "sum"), Observe("last", "max")):
        launch = _observe(window, observe, lse, setup)[1]
        yield launch.configuration(f"scores {observe.rows}, {case}", quick=quick and observe.rows == "sum")
    _, launches = triton_backward.gradients(q, window.k, window.v, window.bounds, out, lse, lse, setup)
    for name, launch in zip(("query gradient", "key gradients"), launches, strict=True):
        yield launch.configuration(f"{name}, {case}", quick=quick)
