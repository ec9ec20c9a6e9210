"""CCA's cores and Quest's page bounds and scores on a GPU (Triton): each number is read once.

A program owns one group of one KV head, or a run of pages, and holds it in registers; there is no dot, since
each query meets `group` keys only.

Roofline, in bytes moved for n tokens, G KV heads of d channels, b bytes a number:

    cores     2 n G d b (1 + 1 / group)     131,072 tokens, 8 x 128, bfloat16, group 16:  570 MB, 133 us
    bounds      n G d b (1 + 2 / page)      the same, page 16:                            302 MB,  70 us
    scores  2 n / page G d b                the same:                                      34 MB,   8 us

at an H200's 4.3 TB/s; a step of decoding forms one core or page at most and is all latency. With r query
heads a KV head, cores take (2 r + 4) / (2 b) FLOPs a byte in float32: 3 for r = 4, where the turning point of
its 60 TFLOP/s outside the tensor cores is 14. Why it can come near: a program asks for all of its keys and
values (8 KiB for 16 x 128) at once and up to 16 of them share an SM, 128 KiB in flight where latency x
bandwidth asks for 23 KiB.
"""

# Triton's constants are written in capitals, and it compiles what follows a return.
# ruff: noqa: N803

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from longchat_cli.kernels.aot import Configuration
from longchat_cli.kernels.launch import Launch

LARGEST = 16384
"""Numbers of a group, padded to powers of two, that eight warps hold in registers twice."""

PAGES = 16
"""Pages scored by a program."""


def fits(group: int, dim: int) -> bool:
    """Whether the kernels take groups or pages of so many tokens."""
    return triton.next_power_of_2(group) * triton.next_power_of_2(dim) <= LARGEST


@triton.jit
def _group(x, token, kept, token_step, dim_step, DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Tokens [n, BLOCK_D] as float32, zeros where not `kept`."""
    d = tl.arange(0, BLOCK_D)
    at = x + token.to(tl.int64)[:, None] * token_step + d[None, :] * dim_step
    return tl.load(at, mask=kept[:, None] & (d < DIM)[None, :], other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["cores", "left_out"])
def _pool(
    q, k, v, out_k, out_v, cores, left_out, scale,
    q_head, q_row, q_dim, k_head, k_token, k_dim, v_head, v_token, v_dim,
    SHARE: tl.constexpr, KIND: tl.constexpr, PER_HEAD: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_G: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One core of a KV head, or of each of its SHARE query heads: out [owners, cores, DIM]."""
    core, owner = tl.program_id(0), tl.program_id(1).to(tl.int64)
    place, d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    token = core * GROUP + place
    kept = (place < GROUP) & (token >= left_out)
    keys = _group(k + owner * k_head, token, kept, k_token, k_dim, DIM, BLOCK_D)
    values = _group(v + owner * v_head, token, kept, v_token, v_dim, DIM, BLOCK_D)
    if KIND == "max":
        hidden = tl.where(kept, 0.0, float("-inf"))[:, None]
        at = (owner * cores + core) * DIM + d
        tl.store(out_k + at, tl.max(keys + hidden, 0).to(out_k.dtype.element_ty), mask=d < DIM)
        tl.store(out_v + at, tl.max(values + hidden, 0).to(out_v.dtype.element_ty), mask=d < DIM)
    else:
        mean = tl.zeros([BLOCK_G], tl.float32)
        for head in tl.static_range(SHARE):
            logit = tl.zeros([BLOCK_G], tl.float32)
            if KIND == "attention":
                at = q + (owner * SHARE + head) * q_head + core.to(tl.int64) * q_row
                query = tl.load(at + d * q_dim, mask=d < DIM, other=0.0).to(tl.float32)
                logit += tl.sum(keys * query[None, :], 1) * scale
            logit = tl.where(kept, logit, float("-inf"))
            chance = tl.exp(logit - tl.max(logit, 0))
            chance = chance / tl.sum(chance, 0)
            if PER_HEAD:
                at = ((owner * SHARE + head) * cores + core) * DIM + d
                tl.store(out_k + at, _mix(chance, keys).to(out_k.dtype.element_ty), mask=d < DIM)
                tl.store(out_v + at, _mix(chance, values).to(out_v.dtype.element_ty), mask=d < DIM)
            mean += chance / SHARE
        if not PER_HEAD:
            at = (owner * cores + core) * DIM + d
            tl.store(out_k + at, _mix(mean, keys).to(out_k.dtype.element_ty), mask=d < DIM)
            tl.store(out_v + at, _mix(mean, values).to(out_v.dtype.element_ty), mask=d < DIM)


@triton.jit
def _mix(chance, numbers):
    return tl.sum(chance[:, None] * numbers, 0)


@triton.jit(do_not_specialize=["pages"])
def _bounds(
    k, low, high, pages, k_head, k_token, k_dim,
    PAGE: tl.constexpr, BLOCK_P: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One page of one KV head: low and high [KV heads, pages, DIM]."""
    page, owner = tl.program_id(0), tl.program_id(1).to(tl.int64)
    place, d = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_D)
    # The places past the page's end repeat its last key.
    token = page * PAGE + tl.minimum(place, PAGE - 1)
    keys = _group(k + owner * k_head, token, place >= 0, k_token, k_dim, DIM, BLOCK_D)
    at = (owner * pages + page) * DIM + d
    tl.store(low + at, tl.min(keys, 0).to(low.dtype.element_ty), mask=d < DIM)
    tl.store(high + at, tl.max(keys, 0).to(high.dtype.element_ty), mask=d < DIM)


@triton.jit(do_not_specialize=["pages"])
def _page_scores(
    q, low, high, out, pages, q_head, q_dim, low_head, low_page, low_dim, high_head, high_page, high_dim,
    SHARE: tl.constexpr, HIGHEST: tl.constexpr, BLOCK_P: tl.constexpr,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A run of pages of one KV head: out [KV heads, pages]."""
    owner, d = tl.program_id(1).to(tl.int64), tl.arange(0, BLOCK_D)
    page = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    least = _group(low + owner * low_head, page, page < pages, low_page, low_dim, DIM, BLOCK_D)
    most = _group(high + owner * high_head, page, page < pages, high_page, high_dim, DIM, BLOCK_D)
    found = tl.full([BLOCK_P], float("-inf") if HIGHEST else 0.0, tl.float32)
    for head in tl.static_range(SHARE):
        at = q + (owner * SHARE + head) * q_head + d * q_dim
        query = tl.load(at, mask=d < DIM, other=0.0).to(tl.float32)[None, :]
        score = tl.sum(tl.maximum(query * least, query * most), 1)
        found = tl.maximum(found, score) if HIGHEST else found + score / SHARE
    tl.store(out + owner * pages + page, found, mask=page < pages)


def pool(
    q: Tensor, k: Tensor, v: Tensor, group: int, left_out: int, scale: float, kind: str, per_head: bool
) -> tuple[Tensor, Tensor]:
    """As `pooling.pool`, for groups that fit."""
    out_k, out_v, launch = _pool_plan(q, k, v, group, left_out, scale, kind, per_head)
    _run(launch, k)
    return out_k, out_v


def page_bounds(k: Tensor, page: int) -> tuple[Tensor, Tensor]:
    """As `pooling.page_bounds`, for pages that fit."""
    low, high, launch = _bounds_plan(k, page)
    _run(launch, k)
    return low, high


def page_scores(q: Tensor, low: Tensor, high: Tensor, heads: str) -> Tensor:
    """As `pooling.page_scores`."""
    out, launch = _scores_plan(q, low, high, heads)
    _run(launch, q)
    return out


def _run(launch: Launch, like: Tensor) -> None:
    with torch.cuda.device_of(like):
        launch.run()


def _pool_plan(
    q: Tensor, k: Tensor, v: Tensor, group: int, left_out: int, scale: float, kind: str, per_head: bool
) -> tuple[Tensor, Tensor, Launch]:
    owners, cores, dim = k.shape[0], k.shape[1] // group, k.shape[2]
    each = len(q) if per_head and kind != "max" else owners
    out_k, out_v = k.new_empty(each, cores, dim), v.new_empty(each, cores, dim)
    arguments = {"q": q, "k": k, "v": v, "out_k": out_k, "out_v": out_v, "cores": cores, "scale": scale}
    arguments |= _strides("q", q, "row") | _strides("k", k, "token") | _strides("v", v, "token")
    arguments |= {"left_out": left_out, "SHARE": len(q) // owners, "KIND": kind, "PER_HEAD": per_head}
    block = triton.next_power_of_2(group)
    arguments |= {"GROUP": group, "BLOCK_G": block}
    return out_k, out_v, _launch(_pool, (cores, owners), arguments, dim, block)


def _bounds_plan(k: Tensor, page: int) -> tuple[Tensor, Tensor, Launch]:
    owners, pages, dim = k.shape[0], k.shape[1] // page, k.shape[2]
    low, high = k.new_empty(owners, pages, dim), k.new_empty(owners, pages, dim)
    block = triton.next_power_of_2(page)
    arguments = {"k": k, "low": low, "high": high, "pages": pages, "PAGE": page, "BLOCK_P": block}
    arguments |= _strides("k", k, "token")
    return low, high, _launch(_bounds, (pages, owners), arguments, dim, block)


def _scores_plan(q: Tensor, low: Tensor, high: Tensor, heads: str) -> tuple[Tensor, Launch]:
    owners, pages, dim = low.shape
    out = low.new_empty(owners, pages, dtype=torch.float32)
    arguments = {"q": q, "low": low, "high": high, "out": out, "pages": pages}
    arguments |= {"q_head": q.stride(0), "q_dim": q.stride(2)}
    arguments |= _strides("low", low, "page") | _strides("high", high, "page")
    arguments |= {"SHARE": len(q) // owners, "HIGHEST": heads == "max", "BLOCK_P": PAGES}
    return out, _launch(_page_scores, (triton.cdiv(pages, PAGES), owners), arguments, dim, PAGES)


def _strides(name: str, x: Tensor, place: str) -> dict[str, Any]:
    return dict(zip((f"{name}_head", f"{name}_{place}", f"{name}_dim"), x.stride(), strict=True))


def _launch(kernel: Any, grid: tuple[int, int], arguments: dict[str, Any], dim: int, tokens: int) -> Launch:
    """With 32 to 64 numbers of each tile a thread."""
    width = triton.next_power_of_2(dim)
    warps = min(max(tokens * width // 1024, 1), 8)
    return Launch(kernel, grid, arguments | {"DIM": dim, "BLOCK_D": width}, warps, 1)


def configurations() -> Iterator[Configuration]:
    """What the launchers can ask Triton for: each head dimension, kind and a large group."""

    def meta(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    def cores(dim: int, group: int, kind: str, per_head: bool) -> Launch:
        k = meta(8, 64 * group, dim)
        return _pool_plan(meta(32, 64, dim), k, k, group, 4, 0.1, kind, per_head)[2]

    for dim in (64, 80, 96, 128, 256):
        quick = dim == 128
        yield cores(dim, 16, "attention", False).configuration(f"pool-{dim}", False, quick)
        bounds = _bounds_plan(meta(8, 1024, dim), 16)[2]
        yield bounds.configuration(f"page-bounds-{dim}", False, quick)
        for heads in ("max", "mean"):
            scores = _scores_plan(meta(32, 1, dim), meta(8, 64, dim), meta(8, 64, dim), heads)[1]
            yield scores.configuration(f"page-scores-{heads}-{dim}", False, quick and heads == "max")
    for kind, per_head, group in (("mean", False, 16), ("max", False, 16), ("attention", True, 16)):
        owner = "head" if per_head else "kv"
        yield cores(128, group, kind, per_head).configuration(f"pool-{kind}-{owner}-128", False)
    yield cores(128, 128, "attention", False).configuration("pool-128-group-128", False)
    yield _bounds_plan(meta(8, 1024, 128), 128)[2].configuration("page-bounds-128-page-128", False)
