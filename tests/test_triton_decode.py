"""The decode kernels, interpreted, against the dense reference: what any method could ask of a few rows."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from interpreted import interpreted, needs_triton
from torch import Tensor

from longchat_cli.kernels import Observe, Rotation, Span, reference
from longchat_cli.kernels.packed import RUN, pack

pytestmark = needs_triton
DIMS = [16, 24, 64, 80, 96, 128, 256]
SIZES = [1, 63, 64, 100, 200]
KINDS = ["int8", "fp8", "int4"]
TOLERANCE = {torch.float32: 5e-6, torch.float16: 4e-3}


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rotation(rows: int, planes: int, interleaved: bool, seed: int = 0) -> Rotation:
    angles = normal(rows, planes, seed=seed) * 3
    return Rotation(angles.cos(), angles.sin(), interleaved)


def agree(q: Tensor, spans: list[Span], softcap: float | None = None, sinks: Tensor | None = None) -> Tensor:
    """Run the kernels over scratch full of NaN and compare with the reference; returns the output."""
    from longchat_cli.kernels import triton_decode

    triton_decode.scratch = lambda q, *shape: torch.full(shape, float("nan"))
    assert triton_decode.accepts(q, spans, softcap, sinks) is None
    found, found_scores = triton_decode.attend(q, spans, 0.3, softcap, sinks)
    wanted, wanted_scores = reference.attend(q, spans, 0.3, softcap, sinks)
    packed = any(not isinstance(x, Tensor) for span in spans for x in (span.k, span.v))
    close = TOLERANCE[q.dtype] * (4 if packed else 1)
    torch.testing.assert_close(found, wanted, atol=close, rtol=close)
    for a, b in zip(found_scores, wanted_scores, strict=True):
        torch.testing.assert_close(a, b, atol=close * q.shape[1], rtol=close)
    return found


# --- what runs in the interpreter


def one_shape(dim: int, groups: int, per_group: int, keys: int, dtype: torch.dtype) -> None:
    k, v = (normal(groups, keys, dim, seed=i, dtype=dtype) for i in (1, 2))
    agree(normal(groups * per_group, 1, dim, dtype=dtype), [Span(k, v, observe=Observe())])


def nothing_visible(rows: int) -> None:
    k, v, q = normal(2, 70, 16), normal(2, 70, 16, seed=1), normal(4, rows, 16, seed=2)
    none = torch.zeros(rows, dtype=torch.int64)
    observed = Span(k, v, none, none, observe=Observe("sum", "sum"))
    assert not agree(q, [Span(k, v, 0, 0), Span(k, v, 70)]).any()
    assert not agree(q, [observed, Span(k, v, 4, 2), Span(k, v, 0, none)]).any()
    some = Span(k, v, 3, 40)
    assert torch.equal(agree(q, [some, Span(k, v, 0, none)]), agree(q, [some]))
    assert not agree(q, [Span(k, v, 0, 0)], sinks=normal(4)).any()


def poison_outside(start: Any, stop: Any) -> None:
    """What is outside the visible range, or not listed, is not even looked at."""
    q, k, v = normal(4, 1, 16), normal(2, 150, 16, seed=1), normal(2, 150, 16, seed=2)
    index = torch.tensor([[[100, -1, 30, 31]], [[29, 101, 55, -1]]])
    for span in (Span(k, v, start, stop), Span(k, v, start, stop, index=index)):
        wanted = agree(q, [span])
        from longchat_cli.kernels import triton_decode

        dirty_k, dirty_v = k.clone(), v.clone()
        for x in (dirty_k, dirty_v):
            x[:, :30] = x[:, 101:] = float("nan")
        dirty = Span(dirty_k, dirty_v, start, stop, index=span.index)
        assert torch.equal(triton_decode.attend(q, [dirty], 0.3)[0], wanted)


def not_contiguous() -> None:
    q = normal(1, 16, 6).permute(2, 0, 1)
    k, v = normal(100, 2, 16, seed=1).transpose(0, 1), normal(2, 16, 200, seed=2).transpose(1, 2)[:, ::2]
    shared = normal(1, 70, 16, seed=3).expand(2, 70, 16)
    bounds = torch.arange(8)[2::5]
    turn = rotation(3, 8, False)
    turn = Rotation(turn.cos.T.contiguous().T[:1], turn.sin.T.contiguous().T[:1])
    index = torch.arange(600).view(2, 1, 300)[..., 1:9:2] % 90
    agree(q, [Span(k, v, 0, 77, observe=Observe()), Span(shared, shared, bounds[:1], turn=turn)])
    agree(q, [Span(k, v, index=index), Span(k[:, ::2], v[:, 1::2], 5)])


def packed(kind: str, dim: int, dtype: torch.dtype) -> None:
    q = normal(6, 1, dim, dtype=dtype)
    k, v = (pack(normal(2, 3 * RUN, dim, seed=i, dtype=dtype), kind, i == 1) for i in (1, 2))
    plain = normal(2, 20, dim, seed=3, dtype=dtype)
    index = torch.randperm(3 * RUN, generator=torch.Generator().manual_seed(4)).view(2, 1, -1)
    index[:, :, 7::5] = -1
    agree(q, [Span(k, v, 5, 180, observe=Observe("last", "mean")), Span(plain, plain)])
    agree(q, [Span(k, v, 5, 180, index=index), Span(k, plain.repeat(1, 10, 1)[:, : 3 * RUN])])


def turned(planes: int, interleaved: bool) -> None:
    q = normal(6, 1, 64)
    spans = [Span(normal(2, 9, 64, seed=i), normal(2, 9, 64, seed=i + 1)) for i in (1, 3)]
    turns = [rotation(1, planes, interleaved, seed=i) for i in (5, 6)]
    agree(q, [Span(s.k, s.v, turn=turn) for s, turn in zip(spans, turns, strict=True)])


def observed(rows: str, heads: str) -> None:
    """Cores per query head beside keys per KV head: scores are per KV head all the same."""
    spans = [
        Span(
            normal(groups, keys, 16, seed=keys),
            normal(groups, keys, 16),
            1,
            stop,
            observe=Observe(rows, heads),
        )
        for groups, keys, stop in ((2, 100, torch.tensor([40, 100])), (6, 33, None), (2, 64, 30))
    ]
    agree(normal(6, 2, 16), spans, softcap=2.0, sinks=normal(6, seed=1))


def anything(seed: int) -> None:
    """Any call that a method could make."""
    rng = random.Random(seed)
    groups, per_group = rng.choice([1, 2]), rng.randint(1, 8)
    heads, rows, dim = groups * per_group, rng.choice([1, 1, 2]), rng.choice(DIMS[:3])
    dtype = rng.choice([torch.float32, torch.float16])
    spans = [any_span(rng, heads, groups, rows, dim, dtype) for _ in range(rng.randint(1, 4))]
    if all(span.k.shape[0] == heads for span in spans):
        spans.append(Span(*(normal(groups, 3, dim, seed=i, dtype=dtype) for i in (1, 2))))
    sinks = normal(heads, seed=seed) * 3 if rng.random() < 0.3 else None
    agree(normal(heads, rows, dim, seed=seed, dtype=dtype), spans, rng.choice([None, None, 3.0]), sinks)


def any_span(rng: random.Random, heads: int, groups: int, rows: int, dim: int, dtype: torch.dtype) -> Span:
    kind, seed = rng.choice(["", "", *KINDS]), rng.randint(0, 10**6)
    keys = rng.choice([RUN, 3 * RUN]) if kind else rng.choice(SIZES)
    count = heads if rng.random() < 0.2 else groups
    k, v = (normal(count, keys, dim, seed=seed + i, dtype=dtype) for i in (0, 1))
    generator = torch.Generator().manual_seed(seed)
    start: Any = rng.choice([0, rng.randint(0, keys), torch.tensor([rng.randint(0, keys)])])
    stop: Any = rng.choice(
        [None, rng.randint(0, keys), torch.randint(0, keys + 1, (rows,), generator=generator)]
    )
    turn = (
        rotation(rows, rng.choice([dim // 2, dim // 4]), rng.random() < 0.5, seed)
        if rng.random() < 0.3
        else None
    )
    observe, index = None, None
    if rng.random() < 0.4:
        observe = Observe(rng.choice(["last", "sum"]), rng.choice(["max", "mean", "sum"]))
    elif rng.random() < 0.4:
        index = torch.stack([torch.randperm(keys, generator=generator) for _ in range(count)])[:, None]
        index[torch.rand(index.shape, generator=generator) < 0.3] = -1
    if kind:
        k, v = pack(k, kind, True), pack(v, kind, False)
    return Span(k, v, start, stop, turn, observe, index)


def refusals() -> list[str | None]:
    from longchat_cli.kernels.triton_decode import accepts

    q, k = normal(4, 1, 16), normal(2, 64, 16)
    index = torch.zeros(2, 1, 4, dtype=torch.int64)
    tried = [
        (normal(4, 17, 16), Span(k, k)),
        (q.bfloat16(), Span(k.bfloat16(), k.bfloat16())),
        (q, Span(k.half(), k.half())),
        (q, Span(k, k, observe=Observe(), index=index)),
        (q, Span(k, k, index=index[:1])),
        (q, Span(pack(k, "int8", False), k)),
        (q, Span(k, normal(2, 64, 300))),
        (q, Span(k, k.clone().requires_grad_())),
        (q, Span(*2 * [torch.empty(2, 2**24 + 1, 16, device="meta")])),
    ]
    return [accepts(q, [span], None, None) for q, span in tried]


# --- the tests


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("dim", DIMS)
def test_head_dimensions(dim, dtype):
    interpreted(one_shape, dim, 1, 3, 100, dtype)


@pytest.mark.parametrize("per_group", [1, 2, 4, 5, 8, 17])
def test_query_heads_per_group(per_group):
    interpreted(one_shape, 16, 1, per_group, 63, torch.float32)


@pytest.mark.parametrize("keys", [1, 63, 64, 65, 1000])
def test_numbers_of_keys(keys):
    interpreted(one_shape, 16, 1, 2, keys, torch.float32)


@pytest.mark.parametrize("rows", [1, 3])
def test_rows_that_see_nothing_give_zeros(rows):
    interpreted(nothing_visible, rows)


@pytest.mark.parametrize(("start", "stop"), [(30, 101), (torch.tensor([30]), torch.tensor([101]))])
def test_what_is_not_visible_is_not_read(start, stop):
    interpreted(poison_outside, start, stop)


def test_inputs_that_are_not_contiguous():
    interpreted(not_contiguous)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dim", "dtype"), [(80, torch.float32), (16, torch.float16)])
def test_packed(kind, dim, dtype):
    interpreted(packed, kind, dim, dtype)


@pytest.mark.parametrize("planes", [32, 8, 3])
@pytest.mark.parametrize("interleaved", [False, True])
def test_turned_queries(planes, interleaved):
    interpreted(turned, planes, interleaved)


@pytest.mark.parametrize(("rows", "heads"), [("last", "max"), ("sum", "mean"), ("sum", "sum")])
def test_scores(rows, heads):
    interpreted(observed, rows, heads)


@pytest.mark.parametrize("seed", range(16))
def test_anything(seed):
    interpreted(anything, seed)


@pytest.mark.slow
@pytest.mark.parametrize("dozen", range(25))
def test_anything_at_length(dozen):
    for seed in range(12):
        interpreted(anything, 1000 + 12 * dozen + seed)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("dim", DIMS)
def test_every_dimension_and_group(dim, dtype):
    for per_group in range(1, 9):
        for keys in SIZES:
            interpreted(one_shape, dim, 2, per_group, keys, dtype)


def test_refusals():
    expected = [
        "17 query rows",
        "bfloat16",
        "float16 beside",
        "listed",
        "listed",
        "per channel",
        "300 channels",
        "gradients",
        "16777217 keys",
    ]
    for reason, words in zip(interpreted(refusals), expected, strict=True):
        assert words in (reason or "")


# --- compiled kernels, planned without running


def test_planning_needs_no_values():
    """Bounds on the device: nothing is read back, and the grid depends on shapes alone."""
    from longchat_cli.kernels import triton_decode

    meta = torch.empty(8, 1000, 64, device="meta", dtype=torch.float16)
    bound = torch.empty(1, device="meta", dtype=torch.int64)
    spans = [Span(meta, meta, bound, bound, observe=Observe()), Span(meta, meta, 0, bound)]
    _, scores, launches = triton_decode._plan(meta[:, :1], spans, 0.1, None, None)
    assert scores[0].shape == (8, 1000)
    assert [len(launch.grid) for launch in launches] == [1, 1, 2]
    assert launches[0].grid == (2 * 8 * 1,)


def test_configurations_are_what_triton_would_compile():
    """By Triton's own rules, for a call with real tensors."""
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime.jit import native_specialize_impl

    from longchat_cli.kernels import triton_decode

    k = pack(normal(2, 64, 16, dtype=torch.float16), "fp8", True)
    spans = [Span(k, k.dense(), 0, torch.tensor([3])), Span(k.dense(), k.dense(), 1, 16, observe=Observe())]
    _, _, launches = triton_decode._plan(normal(4, 1, 16, dtype=torch.float16), spans, 0.1, 2.0, None)
    for launch in launches:
        described = launch.configuration("", True)
        for parameter in launch.kernel.params:
            value = launch.arguments[parameter.name]
            if parameter.is_constexpr:
                assert described.constants[parameter.name] == value
                continue
            kind, multiple = native_specialize_impl(
                CUDABackend, value, False, not parameter.do_not_specialize, True
            )
            expected = flat(kind, multiple)
            mine = described.signature.get(parameter.name, "constexpr")
            assert flat(mine) == expected, parameter.name


def flat(kind: Any, multiple: Any = None) -> Any:
    """A type with its divisibility, pointers' left out."""
    if isinstance(kind, tuple):
        parts = multiple if isinstance(multiple, tuple) else (None,) * len(kind)
        return tuple(flat(a, b) for a, b in zip(kind, parts, strict=True))
    return kind if kind.startswith("*") or multiple != "D" else f"{kind}:16"
