"""Decoding on a GPU: few query rows over the keys of all spans, split over programs (split-K, in Triton).

One launch of `_split` serves every span: a program takes a KV group of one span and a share of its keys,
stacks the group's query heads into the rows of one `tl.dot` (padded to 16), so that a key is read once for
all of them, and leaves its output and log-sum-exp in scratch. `_reduce` merges all shares into one softmax.
For an observed span `_split` stores logits too, which `_scores` turns into probabilities: no key is read
twice. Codes of packed keys and values meet the tensor cores as they are: a run's scale is folded into the
query, a token's scale into its probability. Logits are in base 2 throughout.

Roofline. A step over n keys in G groups of d channels (values likewise) for H heads moves

    bytes = 2 n G d b + 8 S H (d + 1)      b bytes a number; S shares of float32, written and read again
    FLOPs = 4 n H d                        16 G / H times as many with the rows padded to 16

or H / G FLOPs a byte in bfloat16, at most 16 padded, against 184 where an H200 (4.3 TB/s copied, 790 TFLOP/s
in bfloat16) turns from memory to arithmetic: bytes alone count.

    n        G x d    H    MB      floor     beside
    1,024    3 x 64   9    0.8     0.2 us    scratch + 9 %; the latency of two launches, about 5 us, rules
    8,192    8 x 128  32   33.6    7.8 us    scratch + 3 %; about as much as the launches
    131,072  8 x 128  32   536.9   125 us    scratch + 0.2 %; int8 and fp8 62 us, int4 32 us

Observing a span adds 8 H bytes a key: 6 % for 8 x 128 and 32 heads. Why it can come near: the shares fill
every SM with two programs whatever n and G are, each with two tiles of 32 KiB (128 channels) in flight by
asynchronous copies, where latency (0.7 us) x bandwidth asks for 23 KiB an SM; reads are whole rows; nothing
waits for the host, so that a captured graph holds a step.
"""

# Triton's constants are written in capitals, and it compiles what follows a return.
# ruff: noqa: N803, N806, RET505

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from longchat_cli.kernels import triton_tiles
from longchat_cli.kernels.aot import Configuration
from longchat_cli.kernels.launch import TYPES, Launch, learning, processors, unusable
from longchat_cli.kernels.packed import RUN, Keys, Packed, pack
from longchat_cli.kernels.span import Bound, Observe, Rotation, Span

ROWS = 16
"""Most query rows of a call; more are a prompt's."""

EXACT = 2**24
"""Most keys of a span: their numbers reach the kernels as float32."""

STACK = tl.constexpr(16)
"""Rows of a dot: the least that tensor cores take."""

LOG2E = tl.constexpr(triton_tiles.LOG2E)


@triton.jit
def _bound(number, bounds, row, step):
    """A bound for each of `row`, int32: loaded from `bounds`, or the same number for all."""
    if bounds is None:
        return tl.zeros_like(row) + number
    else:
        return tl.load(bounds + row * step).to(tl.int32)


@triton.jit
def _tile(base, place, key, dim, kept, WIDTH: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr):
    """Numbers or bare codes [keys, BLOCK] at `place`, zero where not `kept` or past WIDTH."""
    if KIND == "int4":
        d = tl.arange(0, BLOCK // 2)
        at = base + place[:, None] * key + d[None, :] * dim
        pairs = tl.load(at, mask=kept[:, None] & (d < WIDTH // 2)[None, :], other=0)
        return tl.interleave(pairs & 15, pairs >> 4)
    else:
        d = tl.arange(0, BLOCK)
        at = base + place[:, None] * key + d[None, :] * dim
        numbers = tl.load(at, mask=kept[:, None] & (d < WIDTH)[None, :], other=0)
        if KIND == "fp8":
            # The bits of e4m3 are a float16 of 1/256 the value; `_unit` puts that right.
            bits = numbers.to(tl.uint16)
            numbers = (((bits & 128) << 8) | ((bits & 127) << 7)).to(tl.float16, bitcast=True)
        return numbers


@triton.jit
def _unit(scale, KIND: tl.constexpr):
    """What a code of one stands for, float32."""
    if KIND == "fp8":
        return scale.to(tl.float32) * 256.0
    else:
        return scale.to(tl.float32)


@triton.jit
def _products(
    query, k, scales, zeros, place, kept, run, k_key, k_dim, scale_run, scale_dim,
    LISTED: tl.constexpr, KIND: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """Queries times keys, float32 [STACK, keys]; unlisted keys are all of one `run` of the scales."""
    tile = _tile(k, place, k_key, k_dim, kept, DIM, BLOCK_D, KIND)
    d = tl.arange(0, BLOCK_D)
    if KIND == "":
        product = tl.dot(query, tl.trans(tile), input_precision="tf32x3")
    elif LISTED:
        at = (place // RUN)[:, None] * scale_run + d[None, :] * scale_dim
        there = kept[:, None] & (d < DIM)[None, :]
        number = tile.to(tl.float32) * _unit(tl.load(scales + at, mask=there, other=0.0), KIND)
        if zeros is not None:
            number += tl.load(zeros + at, mask=there, other=0.0).to(tl.float32)
        product = tl.dot(query, tl.trans(number.to(query.dtype)), input_precision="tf32x3")
    else:
        at = run * scale_run + d * scale_dim
        unit = _unit(tl.load(scales + at, mask=d < DIM, other=0.0), KIND)
        scaled = (query.to(tl.float32) * unit[None, :]).to(query.dtype)
        product = tl.dot(scaled, tl.trans(tile.to(query.dtype)), input_precision="tf32x3")
        if zeros is not None:
            zero = tl.load(zeros + at, mask=d < DIM, other=0.0).to(tl.float32)
            product += tl.sum(query.to(tl.float32) * zero[None, :], 1)[:, None]
    return product


@triton.jit
def _mixture(
    chance, v, scales, zeros, place, kept, v_key, v_dim, scale_key, dtype: tl.constexpr,
    KIND: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Values weighted by `chance` [STACK, keys], float32 [STACK, BLOCK_V]."""
    tile = _tile(v, place, v_key, v_dim, kept, VALUE_DIM, BLOCK_V, KIND)
    if KIND == "":
        mixture = tl.dot(chance.to(dtype), tile, input_precision="tf32x3")
    else:
        unit = _unit(tl.load(scales + place * scale_key, mask=kept, other=0.0), KIND)
        mixture = tl.dot((chance * unit[None, :]).to(dtype), tile.to(dtype), input_precision="tf32x3")
        if zeros is not None:
            zero = tl.load(zeros + place * scale_key, mask=kept, other=0.0).to(tl.float32)
            mixture += tl.sum(chance * zero[None, :], 1)[:, None]
    return mixture


@triton.jit
def _query(
    q, cos, sin, row, kept, q_dim, turn_row, d,
    DIM: tl.constexpr, PLANES: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """The stacked queries [STACK, d] in their own type, turned where the span turns them."""
    kept = kept[:, None] & (d < DIM)[None, :]
    query = tl.load(q[:, None] + d[None, :] * q_dim, mask=kept, other=0.0)
    if cos is not None:
        if PAIRED:
            plane, second = d // 2, d % 2 == 1
            other = tl.where(second, d - 1, d + 1)
        else:
            plane, second = d % PLANES, d >= PLANES
            other = tl.where(second, d - PLANES, d + PLANES)
        turned = kept & (d < 2 * PLANES)[None, :]
        at = row[:, None] * turn_row + plane[None, :]
        c, s = tl.load(cos + at, mask=turned, other=1.0), tl.load(sin + at, mask=turned, other=0.0)
        mate = tl.load(q[:, None] + other[None, :] * q_dim, mask=turned, other=0.0).to(tl.float32)
        mate = tl.where(second[None, :], mate, -mate)
        query = (query.to(tl.float32) * c + mate * s).to(query.dtype)
    return query


@triton.jit
def _split(
    q, spans, numbers, out, lse, scale, softcap, q_head, q_row, q_dim,
    KINDS: tl.constexpr, HEADS: tl.constexpr, QUERIES: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """A program works for one of `spans` (tuples of `_span`, with `numbers` and `KINDS` beside)."""
    program = tl.program_id(0)
    for i in tl.static_range(len(spans)):
        first = tl.cast(numbers[i][0], tl.int32)
        if (program >= first) & (program < first + tl.cast(numbers[i][1], tl.int32)):
            _share(
                program - first, q, spans[i], numbers[i], KINDS[i], out, lse, scale, softcap,
                q_head, q_row, q_dim, HEADS, QUERIES, DIM, BLOCK_D, VALUE_DIM, BLOCK_V, BLOCK, RUN,
            )  # fmt: skip


@triton.jit
def _share(
    program, q, span, number, KIND: tl.constexpr, out, lse, scale, softcap, q_head, q_row, q_dim,
    HEADS: tl.constexpr, QUERIES: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """One share of a span's keys for one KV group: out [shares, HEADS x QUERIES, VALUE_DIM] and lse."""
    k, v, k_scale, k_zero, v_scale, v_zero, index, starts, stops, cos, sin, logits = span[:12]
    k_head, k_key, k_dim, v_head, v_key, v_dim = span[12:18]
    k_scale_head, k_scale_run, k_scale_dim, v_scale_head, v_scale_key = span[18:23]
    index_head, index_key, starts_row, stops_row, turn_row = span[23:]
    K_KIND: tl.constexpr = KIND[0]
    V_KIND: tl.constexpr = KIND[1]
    GROUP: tl.constexpr = KIND[2]  # query heads for each of the span's
    shares, first_share = tl.cast(number[2], tl.int32), tl.cast(number[3], tl.int32)
    start, stop = tl.cast(number[4], tl.int32), tl.cast(number[5], tl.int32)
    keys, listed = tl.cast(number[6], tl.int32), tl.cast(number[7], tl.int32)

    stacks: tl.constexpr = (GROUP * QUERIES + STACK - 1) // STACK
    share = program % shares
    group = program // shares // stacks
    member = program // shares % stacks * STACK + tl.arange(0, STACK)  # head within the group x row
    real = member < GROUP * QUERIES
    row = tl.where(real, member % QUERIES, 0)
    head = group * GROUP + member // QUERIES
    d = tl.arange(0, BLOCK_D)
    source = q + head.to(tl.int64) * q_head + row * q_row
    query = _query(source, cos, sin, row, real, q_dim, turn_row, d, DIM, KIND[3], KIND[4])

    low = tl.maximum(_bound(start, starts, row, starts_row), 0)
    high = tl.minimum(_bound(stop, stops, row, stops_row), keys)
    first, last = tl.min(low), tl.max(high)
    if index is None:
        # Blocks lie on multiples of BLOCK, so that each is in one run of the scales.
        begin, end = first // BLOCK, tl.cdiv(last, BLOCK)
    else:
        begin, end = 0, tl.cdiv(listed, BLOCK)
    width = tl.cdiv(tl.maximum(end - begin, 0), shares)
    begin += share * width
    end = tl.minimum(begin + width, end)

    group = group.to(tl.int64)
    k += group * k_head
    v += group * v_head
    if K_KIND != "":
        k_scale += group * k_scale_head
        if k_zero is not None:
            k_zero += group * k_scale_head
    if V_KIND != "":
        v_scale += group * v_scale_head
        if v_zero is not None:
            v_zero += group * v_scale_head
    peak = tl.full([STACK], float("-inf"), tl.float32)
    weight = tl.zeros([STACK], tl.float32)
    total = tl.zeros([STACK, BLOCK_V], tl.float32)
    for block in range(begin, end):
        j = block * BLOCK + tl.arange(0, BLOCK)
        if index is None:
            place = j.to(tl.int64)
        else:
            place = tl.load(index + group * index_head + j * index_key, mask=j < listed, other=-1)
        kept = (place >= first) & (place < last)
        product = scale * _products(
            query, k, k_scale, k_zero, place, kept, block * BLOCK // RUN, k_key, k_dim, k_scale_run,
            k_scale_dim, index is not None, K_KIND, DIM, BLOCK_D, RUN,
        )  # fmt: skip
        if softcap is not None:
            product = softcap * (1 - 2 / (1 + tl.exp2(product * (2 * LOG2E / softcap))))
        seen = (place[None, :] >= low[:, None]) & (place[None, :] < high[:, None])
        product = tl.where(seen, product * LOG2E, float("-inf"))
        if logits is not None:
            at = (group * GROUP * QUERIES + member) * keys
            tl.store(logits + at[:, None] + j[None, :], product, mask=real[:, None] & (j < keys)[None, :])
        higher = tl.maximum(peak, tl.max(product, 1))
        level = tl.where(higher == float("-inf"), 0.0, higher)
        faded = tl.exp2(peak - level)
        chance = tl.exp2(product - level[:, None])
        weight = weight * faded + tl.sum(chance, 1)
        peak = higher
        total = total * faded[:, None] + _mixture(
            chance, v, v_scale, v_zero, place, kept, v_key, v_dim, v_scale_key,
            query.dtype, V_KIND, VALUE_DIM, BLOCK_V,
        )  # fmt: skip

    some = tl.where(weight > 0, weight, 1.0)
    at = (first_share + share) * (HEADS * QUERIES) + group * GROUP * QUERIES + member
    tl.store(lse + at, tl.where(weight > 0, peak + tl.log2(some), float("-inf")), mask=real)
    d = tl.arange(0, BLOCK_V)
    kept = real[:, None] & (d < VALUE_DIM)[None, :]
    tl.store(out + at[:, None] * VALUE_DIM + d[None, :], total / some[:, None], mask=kept)


@triton.jit(do_not_specialize=["shares"])
def _reduce(
    parts, lses, sinks, out, lse, shares, out_head, out_row,
    COUNT: tl.constexpr, QUERIES: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One head's row (of COUNT): merge its shares, and the learned sink, by their log-sum-exp."""
    member = tl.program_id(0)
    d = tl.arange(0, BLOCK_V)
    peak, weight = float("-inf"), 0.0
    if sinks is not None:
        peak, weight = tl.load(sinks + member // QUERIES).to(tl.float32) * LOG2E, 1.0
    total = tl.zeros([BLOCK_V], tl.float32)
    for first in range(0, shares, BLOCK):
        share = first + tl.arange(0, BLOCK)
        at = share.to(tl.int64) * COUNT + member
        part = tl.load(lses + at, mask=share < shares, other=float("-inf"))
        higher = tl.maximum(peak, tl.max(part))
        level = tl.where(higher == float("-inf"), 0.0, higher)
        faded, chance = tl.exp2(peak - level), tl.exp2(part - level)
        kept = (share < shares)[:, None] & (d < VALUE_DIM)[None, :]
        tile = tl.load(parts + at[:, None] * VALUE_DIM + d[None, :], mask=kept, other=0.0)
        weight = weight * faded + tl.sum(chance)
        total = total * faded + tl.sum(chance[:, None] * tile, 0)
        peak = higher
    some = tl.where(weight > 0, weight, 1.0)
    tl.store(lse + member, peak + tl.log2(some))
    at = out + (member // QUERIES) * out_head + (member % QUERIES) * out_row
    tl.store(at + d, (total / some).to(out.dtype.element_ty), mask=d < VALUE_DIM)


@triton.jit(do_not_specialize=["start", "stop", "keys"])
def _scores(
    logits, lse, start, stop, keys, starts, stops, out, starts_row, stops_row,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, FIRST: tl.constexpr, HIGHEST: tl.constexpr,
    PART: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Probabilities [keys] of a group: rows from FIRST on summed, heads by maximum or as PART of the sum."""
    group = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    found = tl.zeros([BLOCK], tl.float32)
    for head in range(GROUP):
        chance = tl.zeros([BLOCK], tl.float32)
        for row in range(FIRST, QUERIES):
            each = tl.zeros([BLOCK], tl.int32) + row
            # Logits outside a row's range may never have been written.
            seen = (j >= _bound(start, starts, each, starts_row)) & (j < _bound(stop, stops, each, stops_row))
            at = (group * GROUP + head) * QUERIES + row
            logit = tl.load(logits + at * keys + j, mask=seen & (j < keys), other=float("-inf"))
            chance += tl.where(seen, tl.exp2(logit - tl.load(lse + at)), 0.0)
        found = tl.maximum(found, chance) if HIGHEST else found + chance * PART
    tl.store(out + group * keys + j, found, mask=j < keys)


def accepts(q: Tensor, spans: Sequence[Span], softcap: float | None, sinks: Tensor | None) -> str | None:
    """None when this kernel can serve, else why not: few rows, keys and values as methods keep them."""
    if reason := unusable(q):
        return reason
    if q.shape[1] > ROWS:
        return f"{q.shape[1]} query rows"
    if learning(q, sinks, *(x for span in spans for x in (span.k, span.v))):
        return "gradients"
    return next((reason for span in spans if (reason := _refusal(q, span))), None)


def _refusal(q: Tensor, span: Span) -> str | None:
    if span.index is not None and (span.observe is not None or len(span.index) != span.k.shape[0]):
        return "listed keys observed, or not listed for each group"
    if span.k.shape[1] > EXACT:
        return f"{span.k.shape[1]} keys"
    if span.v.shape[2] > 256 or not 16 <= span.k.shape[2] <= 256:
        return f"keys of {span.k.shape[2]} and values of {span.v.shape[2]} channels"
    for numbers, per_channel in ((span.k, True), (span.v, False)):
        if numbers.dtype != q.dtype:
            return f"{numbers.dtype} beside queries of {q.dtype}"
        if not isinstance(numbers, Packed):
            continue
        if numbers.per_channel != per_channel:
            return "keys not scaled per channel, or values not per token"
        if numbers.zero is not None and numbers.zero.stride() != numbers.scale.stride():
            return "scales and zeros laid out differently"
    return None


def attend(
    q: Tensor,
    spans: Sequence[Span],
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, list[Tensor | None]]:
    """As `reference.attend` for up to ROWS rows. Nothing waits for the device; grids depend on shapes and on
    bounds that are numbers, so that with bounds as tensors a CUDA graph can hold the call."""
    out, scores, launches = _plan(q, spans, scale, softcap, sinks)
    with torch.cuda.device_of(q):
        for launch in launches:
            launch.run()
    return out, scores


def _plan(
    q: Tensor, spans: Sequence[Span], scale: float, softcap: float | None, sinks: Tensor | None
) -> tuple[Tensor, list[Tensor | None], list[Launch]]:
    """The tensors that `launches` will fill."""
    heads, rows, dim = q.shape
    groups, width = min(span.k.shape[0] for span in spans), spans[0].v.shape[2]
    block = _tile_keys(q, spans)
    shares = [_shares(span, block, q.device) for span in spans]
    parts, lses = scratch(q, sum(shares), heads * rows, width), scratch(q, sum(shares), heads * rows)
    out, lse = q.new_empty(heads, rows, width), scratch(q, heads * rows)
    scores: list[Tensor | None] = [
        None if span.observe is None else scratch(q, groups, span.k.shape[1]) for span in spans
    ]
    logits = [None if found is None else scratch(q, heads * rows, found.shape[1]) for found in scores]
    shape = {"QUERIES": rows, "VALUE_DIM": width, "BLOCK_V": _block(width)}
    split = _span_arguments(q, spans, shares, logits) | _strides(("q_head", "q_row", "q_dim"), q) | shape
    split |= {"q": q, "out": parts, "lse": lses, "scale": scale, "softcap": softcap, "HEADS": heads}
    split |= {"DIM": dim, "BLOCK_D": _block(dim), "BLOCK": block, "RUN": RUN}
    merge = shape | {"parts": parts, "lses": lses, "sinks": sinks, "out": out, "lse": lse, "BLOCK": 32}
    merge |= {"shares": sum(shares), "COUNT": heads * rows}
    merge |= _strides(("out_head", "out_row"), out[..., 0])
    programs = int(sum(number[1] for number in split["numbers"]))
    launches = [
        Launch(_split, (programs,), split, *_tuning(q, spans, block)),
        Launch(_reduce, (heads * rows,), merge),
    ]
    for span, logit, found in zip(spans, logits, scores, strict=True):
        if logit is not None and found is not None:
            launches.append(_score(q, span, logit, lse, found))
    return out, scores, launches


def scratch(q: Tensor, *shape: int) -> Tensor:
    """Float32 memory that holds anything until a kernel has written it."""
    return q.new_empty(shape, dtype=torch.float32)


def _block(width: int) -> int:
    return max(triton.next_power_of_2(width), STACK.value)


def _packed(span: Span) -> bool:
    return isinstance(span.k, Packed) or isinstance(span.v, Packed)


def _tile_keys(q: Tensor, spans: Sequence[Span]) -> int:
    """Keys of a tile: up to 16 KiB and in one run of the scales; half for listed codes, with a scale each."""
    most = 32 if any(_packed(span) and span.index is not None for span in spans) else 64
    width = max(_block(q.shape[2]), _block(spans[0].v.shape[2]))
    return min(most, 16384 // (width * q.element_size()))


def _tuning(q: Tensor, spans: Sequence[Span], block: int) -> tuple[int, int]:
    """Warps and pipeline stages; codes on their way to a dot, and float32, want eight warps' registers."""
    tiles = block * (_block(q.shape[2]) + _block(spans[0].v.shape[2])) * q.element_size()
    return 8 if any(map(_packed, spans)) or q.element_size() == 4 else 4, 3 if tiles <= 32 * 1024 else 2


def _shares(span: Span, block: int, device: torch.device) -> int:
    """Programs per KV group: enough for two on every processor, none of them without a tile."""
    start, stop = span.limits()
    if span.index is not None:
        tiles = triton.cdiv(span.index.shape[2], block)
    else:
        end = span.k.shape[1] if isinstance(stop, Tensor) else min(stop, span.k.shape[1])
        tiles = triton.cdiv(end, block) - (0 if isinstance(start, Tensor) else max(start, 0) // block)
    per_group = max(2 * processors(device) // span.k.shape[0], 1)
    return triton.cdiv(tiles, triton.cdiv(tiles, per_group)) if tiles > 0 else 0


def _span_arguments(
    q: Tensor, spans: Sequence[Span], shares: Sequence[int], logits: Sequence[Tensor | None]
) -> dict[str, Any]:
    """`spans`, `numbers` and `KINDS` of `_split`.

    Numbers that change between steps go as floats (exact to EXACT): for integers Triton compiles anew
    when one turns into 1 or a multiple of 16.
    """
    tuples, numbers, kinds = [], [], []
    program = 0
    for i, span in enumerate(spans):
        group = q.shape[0] // span.k.shape[0]
        programs = span.k.shape[0] * shares[i] * triton.cdiv(group * q.shape[1], STACK.value)
        start, stop = (0 if isinstance(bound, Tensor) else bound for bound in span.limits())
        listed = 0 if span.index is None else span.index.shape[2]
        found = (program, programs, shares[i], sum(shares[:i]), start, stop, span.k.shape[1], listed)
        numbers.append(tuple(float(number) for number in found))
        tuples.append(_span(span, logits[i]))
        turn = span.turn
        planes = (0, False) if turn is None else (turn.cos.shape[1], turn.interleaved)
        kinds.append((_kind(span.k), _kind(span.v), group, *planes))
        program += programs
    return {"spans": tuple(tuples), "numbers": tuple(numbers), "KINDS": tuple(kinds)}


def _span(span: Span, logits: Tensor | None) -> tuple[Any, ...]:
    """A span as `_share` takes it: 12 tensors, then their strides."""
    k, v = _tensors(span.k), _tensors(span.v)
    index = None if span.index is None else span.index[:, 0]  # the few rows of a step share the first list
    (starts, starts_row), (stops, stops_row) = (_rows(bound) for bound in span.limits())
    (cos, turn_row), (sin, _) = (None, 0), (None, 0)
    if span.turn is not None:
        cos, sin = span.turn.cos.contiguous(), span.turn.sin.contiguous()
        turn_row = 0 if len(cos) == 1 else cos.stride(0)
    strides = [*k[0].stride(), *v[0].stride()]
    strides += [0, 0, 0] if k[1] is None else k[1].stride()
    strides += [0, 0] if v[1] is None else v[1].stride()[:2]
    strides += [0, 0] if index is None else index.stride()
    tensors = (k[0], v[0], *k[1:], *v[1:], index, starts, stops, cos, sin, logits)
    return *tensors, *strides, starts_row, stops_row, turn_row


PACKED = {torch.int8: "int8", torch.float8_e4m3fn: "fp8", torch.uint8: "int4"}


def _kind(x: Keys) -> str:
    return PACKED[x.data.dtype] if isinstance(x, Packed) else ""


def _tensors(x: Keys) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Numbers or codes, scale, zero."""
    if not isinstance(x, Packed):
        return x, None, None
    return x.data.view(torch.uint8) if _kind(x) == "fp8" else x.data, x.scale, x.zero


def _rows(bound: Bound) -> tuple[Tensor | None, int]:
    """A bound for each row and its stride, 0 where one serves all; None for a number."""
    if not isinstance(bound, Tensor):
        return None, 0
    flat = bound.reshape(-1)
    return flat, 0 if len(flat) == 1 else flat.stride(0)


def _strides(names: Sequence[str], x: Tensor) -> dict[str, int]:
    return dict(zip(names, x.stride(), strict=True))


def _score(q: Tensor, span: Span, logits: Tensor, lse: Tensor, out: Tensor) -> Launch:
    """The launch that turns a span's logits into the probabilities it asked for."""
    assert span.observe is not None
    group, rows, keys = q.shape[0] // len(out), q.shape[1], out.shape[1]
    arguments: dict[str, Any] = {"logits": logits, "lse": lse, "out": out, "keys": keys, "BLOCK": 256}
    for name, bound in zip(("start", "stop"), span.limits(), strict=True):
        arguments[name] = 0 if isinstance(bound, Tensor) else bound
        arguments[name + "s"], arguments[name + "s_row"] = _rows(bound)
    arguments |= {"GROUP": group, "QUERIES": rows, "FIRST": rows - 1 if span.observe.rows == "last" else 0}
    arguments |= {"HIGHEST": span.observe.heads == "max"}
    arguments |= {"PART": 1 / group if span.observe.heads == "mean" else 1.0}
    return Launch(_scores, (len(out), triton.cdiv(keys, 256)), arguments)


def configurations() -> Iterator[Configuration]:
    """What `attend` can ask Triton for: each head dimension dense, packed and listed, and each extra once."""
    for dim in (64, 80, 96, 128, 256):
        for kind in ("", *PACKED.values()):
            name = "-".join(["bf16", str(dim), *filter(None, [kind])])
            yield from _described(name, _example(dim, kind), quick=dim == 128 and not kind)
            yield from _described(
                name + "-listed", _example(dim, kind, index=_meta(8, 1, 1024, dtype=torch.int64))
            )
    for dtype in (torch.float16, torch.float32):
        for dim in (64, 128, 256):
            yield from _described(f"{TYPES[dtype][1:]}-{dim}", _example(dim, dtype=dtype))
    angles, loaded = _meta(1, 16, dtype=torch.float32), _meta(1, dtype=torch.int64)
    plain, observed = _example(128), _example(128, observe=Observe("last", "max"))
    turned = _example(128, turn=Rotation(angles, angles))
    paired = _example(128, turn=Rotation(angles, angles, True))
    cores = Span(_meta(32, 256, 128), _meta(32, 256, 128), stop=loaded)
    yield from _described("bf16-128-scores", observed, quick=True)
    yield from _described("bf16-128-sinks", plain, turned)
    yield from _described("bf16-128-far", plain, paired, paired, plain)
    yield from _described("bf16-128-cores", plain, cores, turned)
    yield from _described("bf16-128-recent", _example(128, "int8"), plain)
    yield from _described("bf16-128-bounds", _example(128, stop=loaded), softcap=50.0, sinks=_meta(32))
    rows = _meta(4, dtype=torch.int64)
    yield from _described(
        "bf16-128-rows", replace(observed, stop=rows, observe=Observe("sum", "mean")), rows=4
    )


def _meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _example(dim: int, kind: str = "", dtype: torch.dtype = torch.bfloat16, **of_span: Any) -> Span:
    """4,096 keys in 8 groups, without memory."""
    k = v = _meta(8, 4096, dim, dtype=dtype)
    return Span(pack(k, kind, True), pack(v, kind, False), **of_span) if kind else Span(k, v, **of_span)


def _described(
    name: str,
    *spans: Span,
    rows: int = 1,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    quick: bool = False,
) -> Iterator[Configuration]:
    """The kernels that a call with 32 heads launches; merging depends on few of its properties."""
    q = _meta(32, rows, spans[0].k.shape[2], dtype=spans[0].k.dtype)
    for launch in _plan(q, spans, 0.1, softcap, sinks)[2]:
        split = launch.kernel is _split
        if split or "listed" not in name:
            kernel = launch.kernel.__name__.strip("_")
            yield launch.configuration(f"decode-{kernel}-{name}", dot=split, quick=quick)
