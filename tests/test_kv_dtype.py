"""Keys and values in few bits: how far packing is off, and every method on packed entries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from longchat_cli import state
from longchat_cli.attention import METHODS, method_class
from longchat_cli.attention.layer import Cache
from longchat_cli.attention.rope import Rope, default_frequencies
from longchat_cli.errors import UsageError
from longchat_cli.kernels import packed
from longchat_cli.kernels.packed import RUN, pack

pytestmark = pytest.mark.usefixtures("one_thread")
KINDS = ("int8", "fp8", "int4")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def numbers(dtype: torch.dtype, tokens: int = 3 * RUN, seed: int = 0) -> Tensor:
    """[3, tokens, 10] with one constant, one all-zero, one large and one offset channel."""
    x = torch.randn(3, tokens, 10, generator=torch.Generator().manual_seed(seed))
    x[..., 1], x[..., 2] = 0.7, 0.0
    x[..., 3] *= 300
    x[..., 4] += 20
    return x.to(dtype)


def bound(x: Tensor, kind: str, dim: int, dtype: torch.dtype) -> Tensor:
    """The most that rounding to the nearest code may be off, for numbers x sharing a scale along `dim`.

    A scale is rounded to `dtype`: outermost codes lie up to limit * 2^-mantissa / 2 codes from the numbers.
    """
    unit = torch.finfo(dtype).eps / 2
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    largest = torch.maximum(-low, high)
    spread = {"int8": largest / 127, "int4": (high - low) / 15, "fp8": largest * 32 / 448}[kind]
    return spread / 2 + unit * (2 * largest + (high - low)) + torch.finfo(dtype).tiny


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("per_channel", [True, False])
def test_packing_rounds_to_the_nearest_code(kind, dtype, per_channel):
    x = numbers(dtype)
    found = pack(x, kind, per_channel).dense()
    assert (found.dtype, found.shape) == (dtype, x.shape)
    groups, got = (y.double().unflatten(1, (-1, RUN)) if per_channel else y.double() for y in (x, found))
    dim = 2 if per_channel else -1
    assert bool(((got - groups).abs() <= bound(groups, kind, dim, dtype)).all())


@pytest.mark.parametrize("kind", KINDS)
def test_large_channels_and_runs_do_not_blur_others(kind):
    """Per channel and run, numbers of different magnitude keep their own precision; zeros stay zeros."""
    x = numbers(torch.float32)
    loud = x.clone()
    loud[..., 3] *= 1e6
    loud[:, :RUN, 0] = 1e6
    a, b = (pack(y, kind, per_channel=True).dense() for y in (x, loud))
    assert torch.equal(a[..., 4:], b[..., 4:]) and torch.equal(a[:, RUN:, 0], b[:, RUN:, 0])
    assert not a[..., 2].any()
    assert torch.allclose(a[..., 1], torch.tensor(0.7), rtol=2**-20 if kind == "int4" else 1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), "max", "tiny"])
@pytest.mark.parametrize("per_channel", [True, False])
def test_extreme_numbers_stay_numbers(kind, dtype, value, per_channel):
    """An infinity becomes half of the dtype's range; nothing becomes NaN, other heads keep their values."""
    x = numbers(dtype)
    extreme = {"max": torch.finfo(dtype).max, "tiny": torch.finfo(dtype).smallest_normal}.get(value, value)
    x[0, 5, 6] = extreme
    x[1, :, 7] = extreme
    found = pack(x, kind, per_channel).dense()
    assert bool(found.isfinite().all())
    if value != "tiny":
        half = torch.finfo(dtype).max / 2 * (1 if extreme > 0 else -1)
        assert float(found[0, 5, 6]) == pytest.approx(half, rel=0.01)
    assert torch.equal(found[2], pack(numbers(dtype), kind, per_channel).dense()[2])


def test_eight_bit_floats_are_those_of_torch():
    """Every code: the bits taken apart by hand against torch's own conversion."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[codes & 127 != 127].view(1, 1, -1)  # without the two NaN
    data = codes.view(torch.float8_e4m3fn)
    for dtype in DTYPES:
        scale = torch.full((1, 1, 1), 0.25, dtype=dtype)
        assert torch.equal(packed.Packed(data, scale, None, dtype).dense(), (data.float() * 0.25).to(dtype))


def test_common_grids_widen_only_where_they_must():
    x = numbers(torch.bfloat16)
    for kind in KINDS:
        grid = packed.common_grid(x, kind)
        again = packed.common_grid(x, kind, grid)
        assert all(torch.equal(a, b) for a, b in zip(again, grid, strict=True))
        more = x.clone()
        more[1, 7, 5] = 9.0
        wider = packed.common_grid(more, kind, grid)
        changed = (wider[0] != grid[0]).nonzero().tolist()
        assert changed == [[1, 0, 5]]


# --- methods

OPTIONS: dict[str, dict[str, Any]] = {
    "window": {"window": 150},
    "truncate": {"budget": 250},
    "recompute": {"window": 220, "stride": 3},
    "sink": {"sinks": 3, "window": 150},
    "sink++": {"sinks": 3, "window": 150, "stride": 4},
    "lm-infinite": {"sinks": 3, "window": 150},
    "cca": {"group": 2, "local": 150, "sinks": 3},
    "infllm": {"init": 3, "local": 80, "block": 16, "topk": 3, "representatives": 2},
    "recycled": {"fraction": 2, "stride": 5},
    "snapkv": {"budget": 200},
    "pyramidkv": {"budget": 200},
    "h2o": {"budget": 200},
    "tova": {"budget": 200},
    "quest": {"budget": 160, "dense": 0},
}
LENGTH, PROMPT = 340, 290


def cache_of(name: str, kind: str, layers: int = 1, **options: Any) -> Cache:
    cls = method_class(name)
    budget = OPTIONS.get(name) or cls.at_budget(200, LENGTH)
    method = cls.build({**budget, **options, "kv_dtype": kind})
    rope = Rope(default_frequencies(16, 100.0))
    return Cache(method, [method.layer(index, layers, rope) for index in range(layers)])


def streams(length: int = LENGTH, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Queries that prefer few keys, so that who chooses by attention chooses alike under small changes."""
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(heads, length, 16, generator=generator) for heads in (4, 2, 2))
    return (q * 2).to(dtype), (k * 2).to(dtype), v.to(dtype)


def read(cache: Cache, source: tuple[Tensor, ...], chunks: list[int], decode: int = 0) -> Tensor:
    """Feed each layer after what it has seen: chunks of a prompt, then single decoding steps."""
    layer, outs = cache.own()[0], []
    for size, decoding in [(n, False) for n in chunks] + [(1, True)] * decode:
        q, k, v = (x[:, layer.seen : layer.seen + size] for x in source)
        outs.append(layer.attend(q, k, v, 0.25, decoding))
    return torch.cat(outs, dim=1)


def off(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


ALIKE = {"bf16": 0.01, "int8": 0.015, "fp8": 0.06, "int4": 0.15}
"""Relative error of outputs in the norm, for methods that see the same tokens whatever the precision."""
CHOOSING = {"recycled", "h2o", "tova", "snapkv", "pyramidkv", "quest", "infllm"}
"""Methods that choose by attention: a near tie may fall the other way."""


@pytest.mark.parametrize("kind", ALIKE)
@pytest.mark.parametrize("name", METHODS)
def test_every_method_in_every_precision(name, kind):
    """Packed keys and values change little: far less than one token more or less in sight would."""
    source = streams()
    chunks = [100, 150, PROMPT - 250]
    outs = [read(cache_of(name, k), source, chunks, LENGTH - PROMPT) for k in ("auto", kind)]
    assert outs[0].dtype == outs[1].dtype == torch.float32
    assert 0 < off(outs[1], outs[0]) < ALIKE[kind] * (6 if name in CHOOSING else 1)


@pytest.mark.parametrize("kind", KINDS)
def test_cores_of_a_long_text_in_few_bits(kind):
    """A whole run of cores is packed, and rows see more cores than that run has."""
    source, options = streams(), {"group": 2, "local": 20}
    outs = [read(cache_of("cca", k, **options), source, [270, 40], 30) for k in ("auto", kind)]
    assert 0 < off(outs[1], outs[0]) < ALIKE[kind]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["full", "sink", "cca", "h2o", "infllm", "recycled"])
def test_short_texts_are_exact(name, kind):
    """Nothing is packed before RUN tokens follow it: bit for bit the outputs of `auto`."""
    source = streams(2 * RUN)
    for chunks, decode in (([2 * RUN], 0), ([50, 30], 48)):
        outs = [read(cache_of(name, k), source, chunks, decode) for k in ("auto", kind)]
        assert torch.equal(*outs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["full", "window", "sink", "sink++"])
def test_decoding_does_not_depend_on_the_prompts_chunks(name, kind):
    """Once decoding, what is packed depends on the position alone; the prompt's rows saw at least as much."""
    source = streams()
    tails = []
    for chunks in ([PROMPT], [64] * 4 + [34], [7] * 41 + [3]):
        out = read(cache_of(name, kind), source, chunks, LENGTH - PROMPT)
        assert off(out[:, :PROMPT], read(cache_of(name, "auto"), source, [PROMPT])) < ALIKE[kind]
        tails.append(out[:, PROMPT:])
    assert all(torch.allclose(tail, tails[0], atol=2e-5) for tail in tails)


@pytest.mark.parametrize("kind", ["bf16", *KINDS])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_outputs_keep_the_models_dtype(kind, dtype):
    for name in ("full", "sink", "cca", "recycled"):
        cache = cache_of(name, kind)
        out = read(cache, streams(200, dtype), [150], 50)
        assert out.dtype == dtype
        assert bool(out.isfinite().all())


EACH = [(name, ("int8", "fp8", "int4", "bf16")[i % 4]) for i, name in enumerate(METHODS)]


@pytest.mark.parametrize(("name", "kind"), EACH)
def test_snapshots_leave_no_trace(name, kind):
    """Marks before and after packing and evictions, restored in any order: as if nothing had been."""
    source, other = streams(), tuple(x.flip(1) for x in streams())
    plain = cache_of(name, kind)
    read(plain, source, [180])
    wanted = read(plain, source, [], 90)
    cache = cache_of(name, kind)
    read(cache, source, [180])
    early = cache.snapshot()
    read(cache, source, [], 50)
    late = cache.snapshot()
    for mark, start in ((early, 0), (late, 50), (early, 0)):
        cache.restore(mark)
        read(cache, other, [], 75)
        cache.restore(mark)
        assert torch.equal(read(cache, source, [], 90 - start), wanted[:, start:])


@pytest.mark.parametrize(("name", "kind"), EACH)
def test_saved_states_go_on_bit_for_bit(name, kind, tmp_path):
    source = streams()
    cache, again = cache_of(name, kind, 2), cache_of(name, kind, 2)
    for layer in cache.own():
        for size, decoding in ((150, False), (100, False), (1, True), (1, True)):
            at = slice(layer.seen, layer.seen + size)
            layer.attend(*(x[:, at] for x in source), 0.25, decoding)
    state.save(tmp_path / "s", cache, {}, {})
    state.load(tmp_path / "s", again, {})
    assert again.bytes() <= 1.2 * cache.bytes() + 2**16
    assert torch.equal(read(again, source, [], 88), read(cache, source, [], 88))


def test_bytes_are_those_of_the_packed_form():
    """2,048 tokens of a bfloat16 model with heads of 64: what the storages take, scales and room included."""
    held = {}
    for kind in ("auto", *KINDS):
        cache = cache_of("full", kind)
        layer = cache.own()[0]
        x = torch.randn(3, 2049, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
        for at in range(0, 2048, 512):
            layer.attend(*(x[:, at : at + 512],) * 3, 0.125, False)
        layer.attend(*(x[:, 2048:],) * 3, 0.125, True)
        held[kind] = cache.bytes()
    assert held["auto"] >= 2 * 3 * 2049 * 64 * 2
    assert held["int8"] <= 0.56 * held["auto"]
    assert held["fp8"] <= 0.56 * held["auto"]
    assert held["int4"] <= 0.32 * held["auto"]


@pytest.mark.parametrize("kind", KINDS)
def test_evicted_entries_free_packed_memory(kind):
    for name in ("snapkv", "h2o", "tova"):
        caches = [cache_of(name, k, budget=200) for k in ("auto", kind)]
        for cache in caches:
            read(cache, streams(700), [640], 60)
        assert caches[1].bytes() < 0.8 * caches[0].bytes()


def test_odd_heads_are_refused_for_four_bits():
    x = torch.zeros(1, 1, 7)
    with pytest.raises(UsageError, match="odd"):
        cache_of("full", "int4").own()[0].attend(x, x, x, 1.0, False)
    with pytest.raises(UsageError, match="choose from"):
        cache_of("full", "int2")
