"""The native library: attention and products under every set of instructions of this CPU, and its threads."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from spans import normal, random_span, rotation
from torch import Tensor
from torch.nn import functional as F

from longchat_cli.kernels import Observe, Span, native, packed, reference, sdpa
from longchat_cli.models import tiles

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(native.missing() is not None, reason=f"no native library: {native.missing()}"),
]
BF16 = torch.bfloat16
ISAS = ["avx512", "avx2", "neon", "portable"]


def available() -> list[str]:
    """The instructions that this CPU has of those the library is built for."""
    if native.missing() is not None:
        return ISAS[-1:]
    before = native.isa()
    found = [name for name in ISAS if native.use(name)]
    assert native.use(before)
    return found


@pytest.fixture(params=available())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = native.isa()
    assert native.use(request.param)
    yield request.param
    assert native.use(before)


def test_unknown_instructions_are_refused():
    assert not native.use("sse9")
    assert native.isa() in ISAS


# --- attention


def compared(
    q: Tensor,
    spans: list[Span],
    scale: float = 0.25,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    attend: Callable[..., Any] = native.attend,
) -> Tensor:
    """Attend, compare output and scores with the float32 reference on the same numbers; the output."""
    assert native.accepts(q, spans, softcap, sinks) is None
    found, scores = attend(q, spans, scale, softcap, sinks)
    # Turned queries are bfloat16 again before anybody multiplies them.
    wide = [
        Span(s.k.float(), s.v.float(), s.start, s.stop, None, s.observe, s.index)  # type: ignore[union-attr]
        for s in spans
    ]
    turned = [(q if s.turn is None else s.turn.apply(q)).float() for s in spans]
    wanted, wanted_scores = attended(turned, wide, scale, softcap, sinks)
    assert found.dtype == BF16 and found.shape == q.shape
    assert not found.isnan().any()
    assert (found.float() - wanted).abs().max() <= 2e-2 * max(1.0, float(wanted.abs().max()))
    for a, b in zip(scores, wanted_scores, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert a.shape == b.shape and not a.isnan().any()
            assert (a - b).abs().max() <= 4e-3 * max(1, q.shape[1])
    return found


def attended(
    queries: list[Tensor], spans: list[Span], scale: float, softcap: float | None, sinks: Tensor | None
) -> tuple[Tensor, list[Tensor | None]]:
    """`reference.attend` where each span has queries of its own: one dense softmax over all keys."""
    heads, rows, _ = queries[0].shape
    logits, values = [], []
    for q, span in zip(queries, spans, strict=True):
        assert isinstance(span.k, Tensor) and isinstance(span.v, Tensor)
        share = heads // len(span.k)
        raw = torch.einsum("hrd,hkd->hrk", q, span.k.repeat_interleave(share, 0)) * scale
        if softcap:
            raw = softcap * torch.tanh(raw / softcap)
        logits.append(raw.masked_fill(~seen(span, rows).repeat_interleave(share, 0), -torch.inf))
        values.append(span.v.repeat_interleave(share, 0))
    every = torch.cat(logits, -1)
    most = every.amax(-1, keepdim=True).clamp(min=-1e30)
    if sinks is not None:
        most = torch.maximum(most, sinks.float()[:, None, None])
    weights = (every - most).exp()
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + (sinks.float()[:, None, None] - most).exp()
    weights = weights / total.clamp(min=1e-30)
    parts = weights.split([span.k.shape[1] for span in spans], dim=-1)
    out = sum(torch.bmm(w, v) for w, v in zip(parts, values, strict=True))
    groups = min(len(span.k) for span in spans)
    return out, [_observed(w, s.observe, groups) for w, s in zip(parts, spans, strict=True)]  # type: ignore[return-value]


def seen(span: Span, rows: int) -> Tensor:
    """bool [groups, rows, keys]: what each row of each group may see."""
    groups, keys = span.k.shape[:2]
    start, stop = (torch.as_tensor(bound).expand(rows)[:, None] for bound in span.limits())
    place = torch.arange(keys)
    mask = ((place >= start) & (place < stop)).expand(groups, rows, keys)
    if span.index is None:
        return mask
    listed = torch.zeros(groups, rows, keys, dtype=torch.bool)
    for group in range(groups):
        for row in range(rows):
            run = span.index[group, row // 64]
            listed[group, row, run[run >= 0]] = True
    return mask & listed


def _observed(weights: Tensor, observe: Observe | None, groups: int) -> Tensor | None:
    if observe is None:
        return None
    rows = weights[:, -1] if observe.rows == "last" else weights.sum(1)
    shared = rows.view(groups, -1, rows.shape[-1])
    return {"max": shared.amax(1), "mean": shared.mean(1), "sum": shared.sum(1)}[observe.heads]


@pytest.mark.parametrize("rows", [*range(1, 9), 70])
def test_random_spans(isa, rows):
    rng = random.Random(rows)
    served = 0
    for trial in range(40):
        share, groups = rng.choice([1, 2, 3, 5, 8]), rng.choice([1, 2, 8]) if rows < 9 else 2
        heads, dim = share * groups, rng.choice([64, 80, 96, 128, 256])
        spans = [
            random_span(rng, heads, groups, rows, dim, 100 * trial + i, BF16)
            for i in range(rng.randint(1, 3))
        ]
        if all(span.k.shape[0] == heads for span in spans):
            spans.append(Span(normal(groups, 3, dim, dtype=BF16), normal(groups, 3, dim, dtype=BF16)))
        q = normal(heads, rows, dim, seed=trial, dtype=BF16)
        if native.accepts(q, spans, None, None) is not None:
            continue  # packed keys
        served += 1
        sinks = normal(heads, seed=trial) * 3 if rng.random() < 0.3 else None
        compared(q, spans, dim**-0.5, rng.choice([None, 5.0]), sinks)
    assert served > 15


@pytest.mark.parametrize("keys", [1, 63, 100, 255, 256, 257, 600])
@pytest.mark.parametrize("dim", [16, 64, 80, 96, 128, 256, 512])
def test_sizes(isa, keys, dim):
    heads, groups = 9, 3
    k, v = (normal(groups, keys, dim, seed=i, dtype=BF16) for i in (1, 2))
    for rows in (1, 4):
        stop = torch.arange(keys - rows + 1, keys + 1)
        span = Span(k, v, 0, stop, observe=Observe("sum", "mean"))
        compared(normal(heads, rows, dim, dtype=BF16), [span], dim**-0.5)


def test_inputs_with_gaps(isa):
    """Views of larger tensors, as buffers and interleaved products give them."""
    q = normal(3, 6, 64, dtype=BF16).transpose(0, 1)
    k = normal(2, 200, 64, seed=1, dtype=BF16)[:, 20:120]
    v = normal(100, 2, 128, seed=2, dtype=BF16).transpose(0, 1)[..., 64:]
    index = torch.randperm(100).expand(2, 2, 100)[..., ::3]
    assert not q.is_contiguous() and not index.is_contiguous()
    compared(q, [Span(k, v), Span(k, v, 7, torch.tensor([20, 100, 3]), rotation(3, 32, False))])
    compared(q, [Span(k, v, index=index[:, :1])])
    compared(q.transpose(-1, -2).contiguous().transpose(-1, -2), [Span(k, v)])


def test_rows_that_see_nothing_give_zeros_and_score_nothing(isa):
    k, v = normal(2, 300, 64, dtype=BF16), normal(2, 300, 64, seed=1, dtype=BF16)
    for heads in ("max", "mean", "sum"):
        nothing = Span(k, v, 0, torch.tensor([0, 300, 0]), observe=Observe("sum", heads))
        found = compared(normal(4, 3, 64, dtype=BF16), [nothing])
        assert not found[:, [0, 2]].any() and found[:, 1].any()
    last = Span(k, v, 5, 5, observe=Observe("last", "max"))
    out, scores = native.attend(normal(4, 1, 64, dtype=BF16), [last], 0.25)
    assert not out.any() and not scores[0].any()
    sunk, _ = native.attend(normal(4, 1, 64, dtype=BF16), [last], 0.25, None, torch.ones(4))
    assert not sunk.any()
    empty = Span(k, v, index=torch.full((2, 1, 4), -1))
    assert not native.attend(normal(4, 1, 64, dtype=BF16), [empty], 0.25)[0].any()


def test_what_is_not_visible_is_not_read(isa):
    k, v = normal(1, 520, 64, dtype=BF16), normal(1, 520, 64, seed=1, dtype=BF16)
    q = normal(3, 2, 64, seed=2, dtype=BF16)
    start, stop = torch.tensor([3, 250]), torch.tensor([400, 513])
    before, scores = native.attend(q, [Span(k, v, start, stop, observe=Observe("sum", "sum"))], 0.25)
    for x in (k, v):
        x[:, :3], x[:, 513:] = torch.nan, torch.nan
    after, again = native.attend(q, [Span(k, v, start, stop, observe=Observe("sum", "sum"))], 0.25)
    assert torch.equal(before, after)
    assert torch.equal(scores[0], again[0])


@pytest.mark.parametrize("threads", [2, 3, 64, 100])
def test_neither_rows_nor_threads_change_a_row(isa, threads):
    k, v = normal(2, 700, 64, dtype=BF16), normal(2, 700, 64, seed=1, dtype=BF16)
    q = normal(6, 8, 64, seed=2, dtype=BF16)
    stop = torch.arange(693, 701)
    alone = [native.attend(q[:, r : r + 1], [Span(k, v, 0, int(stop[r]))], 0.125)[0] for r in range(8)]
    torch.set_num_threads(threads)
    try:
        together, _ = native.attend(q, [Span(k, v, 0, stop)], 0.125)
    finally:
        torch.set_num_threads(1)
    assert torch.equal(torch.cat(alone, 1), together)


def test_every_output_is_written(isa, monkeypatch):
    """Memory as it comes from the allocator holds NaN here."""
    fresh, fresh_like = torch.empty, torch.empty_like
    monkeypatch.setattr(torch, "empty", lambda *a, **o: fresh(*a, **o).fill_(torch.nan))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **o: fresh_like(*a, **o).fill_(torch.nan))
    k = normal(2, 300, 80, dtype=BF16)
    for rows in (1, 5):
        spans = [
            Span(k, k, 290, 300, observe=Observe("last", "max")),
            Span(k, k, 0, 1, observe=Observe("sum", "sum")),
        ]
        out, scores = native.attend(normal(4, rows, 80, dtype=BF16), spans, 0.1)
        assert not any(x.isnan().any() for x in (out, *scores))


K = torch.zeros(2, 64, 16, dtype=BF16)


@pytest.mark.parametrize(
    ("q", "spans", "why"),
    [
        (torch.zeros(4, 1, 16), [Span(K, K)], "dtype torch.float32"),
        (torch.zeros(4, 1, 24, dtype=BF16), [Span(K, K)], "width 24"),
        (torch.zeros(4, 1, 1024, dtype=BF16), [Span(K, K)], "width 1024"),
        (torch.zeros(4, 0, 16, dtype=BF16), [Span(K, K)], "no rows"),
        (torch.zeros(4, 1, 16, dtype=BF16), [Span(K, K)] * 7, "7 spans"),
        (torch.zeros(4, 1, 16, dtype=BF16), [Span(packed.pack(K, "int8", True), K)], "few bits"),
        (torch.zeros(4, 1, 16, dtype=BF16), [Span(K.float(), K)], "unlike"),
        (torch.zeros(4, 1, 16, dtype=BF16), [Span(K, K.mT.contiguous().mT)], "gaps"),
        (torch.zeros(4, 1, 16, dtype=BF16), [Span(K, K)], None),
    ],
)
def test_declines_what_it_does_not_serve(q, spans, why):
    reason = native.accepts(q, spans, None, None)
    assert reason is None if why is None else why in reason


tile_instructions = pytest.mark.skipif(
    native.missing() is not None or not native.loaded().longchat_attends_many(),
    reason="this CPU has no tile instructions (AMX)",
)


@tile_instructions
@pytest.mark.parametrize("rows", [9, 31, 32, 33, 63, 64, 100, 200])
def test_many_rows_by_tile_instructions(rows):
    rng = random.Random(rows)
    served = 0
    for trial in range(16):
        share, groups = rng.choice([1, 2, 3, 5]), rng.choice([1, 2, 3])
        heads, dim = share * groups, rng.choice([16, 64, 80, 96, 128, 256, 512])
        spans = [
            replace(
                random_span(rng, heads, groups, rows, dim, 100 * trial + i, BF16), index=None, observe=None
            )
            for i in range(rng.randint(1, 3))
        ]
        q = normal(heads, rows, dim, seed=trial, dtype=BF16)
        cap, sinks = rng.choice([None, 20.0]), rng.choice([None, normal(heads, seed=trial)])
        if native.accepts_many(q, spans, cap, sinks) is None:
            compared(q, spans, dim**-0.5, cap, sinks, native.attend_many)
            served += 1
    assert served > 4


@tile_instructions
@pytest.mark.parametrize("keys", [1, 127, 128, 129, 1000])
def test_causal_prompts_by_tile_instructions(keys):
    """The last rows of a text, a window and sinks: what reading a prompt asks for; threads change nothing."""
    rows = 70
    q = normal(6, rows, 64, dtype=BF16)
    k, v = (normal(2, max(keys, rows), 64, seed=i, dtype=BF16) for i in (1, 2))
    stop = torch.arange(k.shape[1] - rows, k.shape[1]) + 1
    first = [x[:, :4] for x in (k, v)]
    spans = [
        Span(*first, 0, (stop - 60).clamp(0, 4), rotation(rows, 32, False)),
        Span(k, v, (stop - 60).clamp(min=0), stop),
    ]
    one = compared(q, spans, attend=native.attend_many)
    compared(q, [Span(k, v, 0, stop)], attend=native.attend_many)
    torch.set_num_threads(3)
    assert torch.equal(native.attend_many(q, spans, 0.25)[0], one)


@tile_instructions
def test_rows_that_see_nothing_by_tile_instructions():
    q, k, v = (normal(2, 40, 64, seed=i, dtype=BF16) for i in range(3))
    stop = torch.arange(40) - 10
    found = compared(q, [Span(k, v, 0, stop.clamp(min=0))], attend=native.attend_many)
    assert not found[:, :11].any() and found[:, 12:].any()


def test_gather_is_that_of_torch():
    for dtype in (BF16, torch.float32, torch.uint8, torch.float8_e4m3fn):
        x = normal(3, 50, 24).to(dtype)[:, 5:40]
        index = torch.randint(0, 35, (3, 600), generator=torch.Generator().manual_seed(0))
        to = torch.full((3, 700, 24), 7.0).to(dtype)
        native.gather(x, index, to[:, 20:620])
        assert torch.equal(to[:, 20:620].float(), packed.rows_at(x, index).float())
        assert (to[:, :20].float() == 7).all() and (to[:, 620:].float() == 7).all()
        native.gather(x, index[:, :0], to[:, :0])


@pytest.mark.parametrize("threads", [1, 3])
def test_ranking_is_that_of_a_stable_sort(threads):
    torch.set_num_threads(threads)
    try:
        for trial in range(200):
            rng = random.Random(trial)
            n, width = rng.randint(1, 400), rng.randint(1, 12)
            count, x = rng.randint(1, n + 2), normal(3, n, seed=trial).abs() ** 8
            x = x if trial % 3 else (x * 10).round()  # ties
            x = x if width > 1 or trial % 2 else -x
            padded = F.pad(x, ((width - 1) // 2, width // 2))
            pooled = padded.unfold(-1, width, 1).amax(-1)
            wanted = pooled.sort(dim=-1, descending=True, stable=True).indices[:, :count]
            assert torch.equal(native.ranked(x, count, width), wanted)
    finally:
        torch.set_num_threads(1)


def test_memory_in_large_pages_is_given_back():
    """Blocks do not overlap, and what is given back is taken again."""
    like, rng, held = torch.empty(0, dtype=torch.int32), random.Random(0), {}
    for number in range(400):
        if held and rng.random() < 0.5:
            key = rng.choice([*held])
            assert (held[key] == key).all()
            del held[key]
        shape = (rng.randint(1, 4), rng.choice([1, 5000, 30_000, 400_000]), 3)
        held[number] = native.empty(like, *shape).fill_(number)
        assert held[number].shape == shape
    assert all((x == number).all() for number, x in held.items())
    view = native.empty(like, 100_000).fill_(3)[10:20]
    held.clear()
    gc.collect()
    assert (view == 3).all()  # a view holds the block
    assert (native.empty(like, 200_000).fill_(4) == 4).all() and (view == 3).all()


def test_memory_that_was_written_before_is_taken_first():
    """A new page costs the system more than anything that is done in it."""
    like = torch.empty(0, dtype=torch.int32)
    held = [native.empty(like, 1_000_000) for _ in range(20)]  # more than a slab: two begin
    known = {x.data_ptr() for x in held}
    assert len(known) == 20
    held = held[::2]
    again = [native.empty(like, 1_000_000) for _ in range(10)]
    assert {x.data_ptr() for x in again} <= known
    assert len(held) == 10


def test_many_rows_are_left_to_torch():
    q = torch.zeros(4, native.ROWS + 1, 16, dtype=BF16)
    assert native.accepts_few(q, [Span(K, K)], None, None) == "many rows"
    assert sdpa.accepts(q, [Span(K, K)], None, None) is None
    assert native.accepts_few(q[:, 1:], [Span(K, K)], None, None) is None


# --- products

QUANTIZED = [Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0]
SIZE = {Type.Q4_K: 144, Type.Q5_K: 176, Type.Q6_K: 210}


def blocks(
    kind: Type, rows: int, cols: int, seed: int = 0, *, size: float = 1.0, values: np.ndarray | None = None
) -> np.ndarray:
    """Stored rows uint8 [rows, bytes]: noise or `values` quantized where gguf can, else any bytes.

    Of any bytes, weights are up to about `size`.
    """
    rng = np.random.default_rng(seed)
    if kind in QUANTIZED:
        given = rng.normal(size=(rows, cols)) if values is None else values
        return gguf.quants.quantize(given.astype(np.float32), kind)
    made = rng.integers(0, 256, (rows, cols // 256, SIZE[kind]), dtype=np.uint8)
    # A number is multiplied by a scale below 64 (of Q6_K 128) and a code below 16 to 32.
    factor, least = {Type.Q4_K: (1e-3, 8), Type.Q5_K: (5e-4, 16), Type.Q6_K: (2e-4, 0)}[kind]
    numbers = rng.uniform(0.2, 1, (rows, cols // 256, 2)) * size * factor * np.array([1, least])
    halves = numbers.astype(np.float16).view(np.uint8)
    if kind == Type.Q6_K:
        made[..., 208:] = halves[..., :2]
    else:
        made[..., :4] = halves
    return made.reshape(rows, -1)


def product(linear: native.Linear, x: Tensor, y: Tensor | None = None, rest: int | None = None) -> Tensor:
    """y [rows, out] of the library, into memory full of NaN if none is given."""
    if y is None:
        y = torch.full((len(x), linear.rows), torch.nan)
    head = native.Head(linear, rest)
    native.loaded().longchat_logits(
        ctypes.byref(head), None, 0.0, x.data_ptr(), y.data_ptr(), len(x), torch.get_num_threads()
    )
    return y


def tiled(form: tiles.Form, codes: np.ndarray) -> native.Linear:
    fields = (form.rows, form.cols, form.bits, form.group, form.offset)
    linear = native.Linear(codes.ctypes.data, *fields)
    linear.kept = codes  # only a pointer leads to it
    return linear


def error(found: Tensor, x: Tensor, weights: np.ndarray) -> float:
    """Of a product, relative to the size that rounding works on: sqrt(sum of (x w)^2) of each result."""
    wide, w = x.double(), torch.from_numpy(np.ascontiguousarray(weights)).double()
    size = ((wide**2) @ (w**2).t()).sqrt()
    return float(((found.double() - wide @ w.t()).abs() / size).max())


@pytest.mark.parametrize("kind", tiles._READ)
def test_codes_mean_what_the_reference_decodes(kind):
    rows = blocks(kind, 40, 512)
    found, wanted = tiles.decode(rows, kind), gguf.quants.dequantize(rows, kind)
    wide = (
        x.astype(np.float32).repeat(found.group, axis=1)
        for x in (found.scales, found.scales if found.minima is None else found.minima)
    )
    scale, least = wide
    values = scale * found.codes + (least if found.minima is not None else -found.offset * scale)
    # Products of two stored numbers are rounded to float16 once more: half a unit in the last of 11 bits.
    allowed = 2.0**-11 * (np.abs(scale * found.codes) + np.abs(least) * max(1, found.offset)) + 1e-5
    assert (np.abs(values - wanted) <= allowed).all()
    assert found.codes.max() < 2**found.bits
    if kind in QUANTIZED:
        assert np.allclose(values, wanted, atol=1e-6)


@pytest.mark.parametrize("kind", tiles._READ)
def test_products(isa, kind):
    """Two int8 numbers for an activation lose up to 1/64516 of its group's largest."""
    narrow = 32 if kind in QUANTIZED else 256
    for rows, cols in ((1, narrow), (16, 256), (33, 3 * narrow), (50, 1024)):
        stored = blocks(kind, rows, cols, seed=rows)
        codes = tiles.decode(stored, kind)
        weights = gguf.quants.dequantize(stored, kind)
        linear = tiled(*tiles.pack([codes]))
        for count in (1, 2, 3, 4, 5, 8):
            x = normal(count, cols, seed=count)
            found = product(linear, x)
            assert not found.isnan().any()
            assert error(found, x, weights) <= 2e-3
            alone = torch.cat([product(linear, x[row : row + 1]) for row in range(count)])
            assert torch.equal(found, alone)
    torch.set_num_threads(5)
    try:
        assert torch.equal(product(linear, x), alone)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q6_K])
def test_logits_near_the_largest_have_all_bits(isa, kind):
    stored = blocks(kind, 1000, 512)
    weights = torch.from_numpy(gguf.quants.dequantize(stored, kind)).double()
    x = normal(8, 512)
    x *= 6 / (x.double() @ weights.t()).std(-1, keepdim=True).float()
    exact = x.double() @ weights.t()
    upper, rest = tiles.split(tiles.decode(stored, kind))
    linear = tiled(*tiles.pack([upper]))
    rough, found = product(linear, x), product(linear, x, rest=rest.ctypes.data)
    near = rough >= rough.max(-1, keepdim=True).values - 12
    assert 0 < near.sum() < near.numel() / 4
    size = ((x.double() ** 2) @ (weights**2).t()).sqrt()
    assert float(((found - exact).abs() / size)[near].max()) <= 2e-3
    assert torch.equal(found[~near], rough[~near])
    assert float((rough - exact).abs().max()) > 0.5 > float((rough - exact).mean().abs())
    assert torch.equal(found.argmax(-1), exact.argmax(-1))
    alone = torch.cat([product(linear, x[row : row + 1], rest=rest.ctypes.data) for row in range(8)])
    assert torch.equal(found, alone)
    torch.set_num_threads(3)
    try:
        assert torch.equal(product(linear, x, rest=rest.ctypes.data), alone)
    finally:
        torch.set_num_threads(1)


def test_extreme_codes(isa):
    """The smallest and largest code against activations of either sign: no sum leaves its integer."""
    for bits, group, offset in (
        (4, 32, 8),
        (4, 32, 7.5),
        (5, 32, 16),
        (8, 32, 128),
        (8, 16, 32),
        (8, 16, -1),
        (4, 32, -1),
    ):
        for code in (0, 1, 2**bits - 1):
            codes = np.full((17, 96), code, np.uint8)
            scales = np.ones((17, 96 // group), np.float16)
            minima = None if offset >= 0 else scales * -3
            made = tiles.Codes(bits, group, codes, scales, minima, max(offset, 0))
            weight = code - offset if offset >= 0 else code - 3
            for x in (torch.ones(1, 96), -torch.ones(1, 96), torch.ones(1, 96) * torch.tensor([1, -1] * 48)):
                found = product(tiled(*tiles.pack([made])), x)
                assert torch.allclose(found, x.sum() * weight + torch.zeros(1, 17), atol=1e-2), (bits, code)


def test_activations_of_any_size(isa):
    stored = blocks(Type.Q4_0, 20, 96)
    weights = gguf.quants.dequantize(stored, Type.Q4_0)
    linear = tiled(*tiles.pack([tiles.decode(stored, Type.Q4_0)]))
    x = normal(4, 96)
    for size in (1e30, 1e-20):
        assert error(product(linear, x * size), x * size, weights) <= 2e-3
    for size in (0.0, 1e-38, 1e-44):
        assert product(linear, x * size).abs().max() <= 1e-28
    x[:, :32] *= 1e6  # groups of their own scale
    assert error(product(linear, x), x, weights) <= 2e-3


def test_parts_below_one_another(isa):
    """The rows of several tensors of one type are one run of tiles, in an order of their own."""
    stored = [blocks(Type.Q4_1, rows, 64, seed=rows) for rows in (24, 8, 5)]
    parts = [tiles.decode(part, Type.Q4_1) for part in stored]
    order = np.random.default_rng(0).permutation(24)
    parts[0] = parts[0].take(order)
    weights = np.concatenate([gguf.quants.dequantize(part, Type.Q4_1) for part in stored])
    weights[:24] = weights[:24][order]
    x = normal(3, 64)
    assert error(product(tiled(*tiles.pack(parts)), x), x, weights) <= 2e-3


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (16, 32), (37, 100), (50, 333)])
def test_bfloat16_weights(isa, rows, cols):
    weights = normal(rows, cols, dtype=BF16)
    linear = native.Linear(weights.data_ptr(), rows, cols, 16, 32, 0)
    for count in (1, 3, 7):
        x = normal(count, cols, seed=count)
        assert error(product(linear, x), x, weights.float().numpy()) <= 1e-5


# --- threads and processes


class Work:
    """A product and an attention call; torch itself must not compute in a forked child."""

    def __init__(self) -> None:
        self.linear = tiled(*tiles.pack([tiles.decode(blocks(Type.Q8_0, 600, 256), Type.Q8_0)]))
        self.x, self.y = normal(2, 256), torch.zeros(2, 600)
        self.k, self.q = normal(2, 900, 64, dtype=BF16), normal(4, 2, 64, seed=1, dtype=BF16)

    def __call__(self) -> tuple[list[float], list[float]]:
        product(self.linear, self.x, self.y)
        out, _ = native.attend(self.q, [Span(self.k, self.k)], 0.125)
        return self.y.flatten().tolist(), out.flatten().tolist()


def test_many_threads_call_at_once():
    wanted = Work()()
    found: list[bool] = []

    def call() -> None:
        work = Work()
        torch.set_num_threads(3)  # each caller says how many work for it
        found.extend(work() == wanted for _ in range(5))

    callers = [threading.Thread(target=call) for _ in range(6)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
    torch.set_num_threads(1)
    assert found == [True] * 30


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_decodes():
    """The child has none of its parent's threads; it starts its own."""
    work = Work()
    torch.set_num_threads(3)
    try:
        wanted = work()
        child = os.fork()
        if child == 0:
            os._exit(work() != wanted)
        assert os.waitpid(child, 0)[1] == 0
        assert work() == wanted
    finally:
        torch.set_num_threads(1)


def test_agrees_with_torch_on_one_plain_span(isa):
    q, k, v = (normal(n, 1 if n == 6 else 500, 64, seed=n, dtype=BF16) for n in (6, 2, 3))
    v = v[:2]
    ours, theirs = native.attend(q, [Span(k, v)], 0.125)[0], sdpa.attend(q, [Span(k, v)], 0.125)[0]
    exact = reference.attend(q.float(), [Span(k.float(), v.float())], 0.125)[0]
    assert (ours.float() - exact).abs().max() <= 1e-2 and (theirs.float() - exact).abs().max() <= 1e-2
