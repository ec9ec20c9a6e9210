"""The prefill kernels, interpreted, against the dense reference: what any method could ask of many rows."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from interpreted import interpreted, needs_triton
from spans import normal, random_index, random_span, rotation
from torch import Tensor

from longchat_cli.kernels import Observe, Span, reference

pytestmark = needs_triton
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}


def agree(q: Tensor, spans: list[Span], softcap: float | None = None, sinks: Tensor | None = None) -> Tensor:
    """Run the kernels into room full of NaN and compare with the reference; returns the output."""
    from longchat_cli.kernels import triton_prefill

    assert triton_prefill.accepts(q, spans, softcap, sinks) is None
    torch.use_deterministic_algorithms(True)  # torch.empty is filled with NaN
    found, found_scores = triton_prefill.attend(q, spans, 0.3, softcap, sinks)
    torch.use_deterministic_algorithms(False)
    wanted, wanted_scores = reference.attend(q, spans, 0.3, softcap, sinks)
    close = TOLERANCE[q.dtype]
    torch.testing.assert_close(found, wanted, atol=close, rtol=close)
    for a, b in zip(found_scores, wanted_scores, strict=True):
        torch.testing.assert_close(a, b, atol=close * q.shape[1], rtol=close)
    return found


def keys_and_values(groups: int, keys: int, dim: int, seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return tuple(normal(groups, keys, dim, seed=seed + i, dtype=dtype) for i in (0, 1))  # type: ignore[return-value]


# --- what runs in the interpreter


def one_shape(dim: int, groups: int, per_group: int, rows: int, dtype: torch.dtype) -> None:
    """Causal attention behind 30 older keys."""
    stop = torch.arange(31, rows + 31)
    span = Span(*keys_and_values(groups, rows + 30, dim, 1, dtype), 0, stop, observe=Observe("sum", "max"))
    agree(normal(groups * per_group, rows, dim, dtype=dtype), [span])


def as_methods_ask(name: str, rows: int, dtype: torch.dtype) -> None:
    """Shapes of the methods' spans: their rows, ranges, rotations and scores."""
    groups, heads, dim, seen = 2, 4, 16, 130
    position = torch.arange(seen, seen + rows)
    recent = keys_and_values(groups, seen + rows, dim, 1, dtype)
    early = keys_and_values(groups, 4, dim, 3, dtype)
    blocks = keys_and_values(groups, 96, dim, 5, dtype)
    pooled = keys_and_values(heads, 40, dim, 7, dtype)
    window = Span(*recent, (position - 70).clamp(min=0), position + 1)
    breathing = Span(*recent, (position - 100) // 8 * 8, position + 1)
    index = random_index(groups, rows, seen + rows, 9)
    spans = {
        "sink": [Span(*early, turn=rotation(rows, 8, False)), window],
        "cca": [Span(*pooled, 0, (position - 100) // 8), breathing, Span(*early)],
        "infllm": [
            Span(*early, turn=rotation(rows, 4, True)),
            Span(*blocks, turn=rotation(rows, 4, True)),
            replace(window, observe=Observe("sum", "sum")),
        ],
        "minference": [Span(*recent, 0, position + 1, index=index)],
        "h2o": [Span(*recent, 0, position + 1, observe=Observe("sum", "mean"))],
        "recycled": [Span(*recent, 0, position + 1, observe=Observe("last", "max"))],
    }[name]
    agree(normal(heads, rows, dim, dtype=dtype), spans)


def nothing_visible() -> None:
    k, v = keys_and_values(2, 70, 16, 1, torch.float32)
    q, none = normal(4, 9, 16), torch.zeros(9, dtype=torch.int64)
    observed = Span(k, v, none, none, observe=Observe("sum", "sum"))
    assert not agree(q, [Span(k, v, 0, 0), Span(k, v, 70)]).any()
    assert not agree(q, [observed, Span(k, v, 4, 2), Span(k, v, index=torch.full((2, 1, 3), -1))]).any()
    assert not agree(q, [Span(k, v, 0, 0)], sinks=normal(4)).any()
    some = torch.tensor([0, 3, 0, 70, 0, 65, 1, 0, 0])
    out = agree(q, [Span(k, v, 0, some), Span(k, v, some, some, observe=Observe("last", "max"))])
    assert not out[:, some == 0].any() and out[:, some > 0].abs().min() > 0


def poison_outside() -> None:
    """What no row sees is not even looked at."""
    from longchat_cli.kernels import triton_prefill

    q, (k, v) = normal(4, 70, 16), keys_and_values(2, 250, 16, 1, torch.float32)
    dirty_k, dirty_v = k.clone(), v.clone()
    for x in (dirty_k, dirty_v):
        x[:, :30] = x[:, 200:] = float("nan")
    start, stop = torch.arange(30, 100), torch.arange(131, 201)
    index = torch.stack([torch.randperm(170) + 30 for _ in range(4)]).view(2, 2, 170)
    for span in (Span(k, v, start, stop), Span(k, v, 0, stop, index=index)):
        wanted = agree(q, [span])
        dirty = replace(span, k=dirty_k, v=dirty_v)
        assert torch.equal(triton_prefill.attend(q, [dirty], 0.3)[0], wanted)


def not_contiguous() -> None:
    q = normal(70, 16, 6).permute(2, 0, 1)
    k, v = normal(100, 2, 16, seed=1).transpose(0, 1), normal(2, 16, 200, seed=2).transpose(1, 2)[:, ::2]
    shared = normal(1, 70, 16, seed=3).expand(2, 70, 16)
    stop = torch.arange(200)[61::2][:70]
    index = torch.stack([torch.randperm(90) for _ in range(8)]).view(2, 4, 90)[:, ::2, ::3]
    observe = Observe("sum", "max")
    agree(q, [Span(k, v, 0, stop, observe=observe), Span(shared, shared, 5, turn=rotation(70, 8, False))])
    agree(q, [Span(k, v, index=index), Span(k[:, ::2], v[:, 1::2], 5, observe=observe)])


def scores(rows: str, heads: str) -> None:
    """Cores per query head beside keys per KV head: scores are per KV head all the same."""
    spans = [
        Span(*keys_and_values(groups, keys, 16, keys, torch.float32), 1, stop, observe=Observe(rows, heads))
        for groups, keys, stop in ((2, 100, torch.arange(10, 80)), (6, 33, None), (2, 64, 30))
    ]
    agree(normal(6, 70, 16), spans, softcap=2.0, sinks=normal(6, seed=1))


def anything(seed: int) -> None:
    """Any call that a method could make."""
    rng = random.Random(seed)
    groups, per_group = rng.choice([1, 2]), rng.randint(1, 8)
    heads, rows, dim = groups * per_group, rng.choice([2, 7, 63, 100]), rng.choice([16, 24, 64, 80])
    dtype = rng.choice([torch.float32, torch.float16])
    spans = [
        random_span(rng, heads, groups, rows, dim, 10 * seed + i, dtype) for i in range(rng.randint(1, 3))
    ]
    if all(span.k.shape[0] == heads for span in spans):
        spans.append(Span(*keys_and_values(groups, 3, dim, 1, dtype)))
    sinks = normal(heads, seed=seed) * 3 if rng.random() < 0.3 else None
    agree(normal(heads, rows, dim, seed=seed, dtype=dtype), spans, rng.choice([None, None, 3.0]), sinks)


def gradients(groups: int, per_group: int, rows: int, dim: int, softcap: float | None) -> None:
    """CCA's spans: cores (per query head where groups is 2), local tokens, and first ones, these turned."""
    from longchat_cli.kernels import triton_prefill

    heads = groups * per_group
    position = torch.arange(rows)
    shapes = [(heads if groups == 2 else groups, 21), (groups, rows), (groups, 4)]
    tensors = [
        x for i, (n, keys) in enumerate(shapes) for x in keys_and_values(n, keys, dim, i, torch.float32)
    ]
    tensors += [normal(heads, rows, dim, seed=8), normal(heads, seed=9)]
    upstream = normal(heads, rows, dim, seed=10)
    bounds: list[Any] = [(0, position // 5), ((position - 40) // 8 * 8, position + 1), (0, 4)]
    turn = rotation(rows, dim // 2, False)
    found, wanted = [], []
    for run, into in ((triton_prefill.attend, found), (plainly, wanted)):
        leaves = [x.clone().requires_grad_() for x in tensors]
        *pairs, q, sinks = leaves
        spans = [Span(pairs[2 * i], pairs[2 * i + 1], *bounds[i]) for i in range(3)]
        spans[2] = replace(spans[2], turn=turn)
        out, _ = run(q, spans, dim**-0.5, softcap, sinks)
        torch.use_deterministic_algorithms(True)
        (out * upstream).sum().backward()
        torch.use_deterministic_algorithms(False)
        into += [x.grad for x in leaves]
    for a, b in zip(found, wanted, strict=True):
        assert b.abs().max() > 1e-3
        torch.testing.assert_close(a, b, atol=2e-5, rtol=2e-5)


def plainly(
    q: Tensor, spans: list[Span], scale: float, softcap: float | None, sinks: Tensor
) -> tuple[Tensor, None]:
    """The same from torch's differentiable operations, with one mask over all keys."""
    heads, rows, dim = q.shape
    logits, values = [], []
    for span in spans:
        assert isinstance(span.k, Tensor) and isinstance(span.v, Tensor)
        x = q
        if span.turn is not None:
            a, b = q.split(dim // 2, dim=-1)
            cos, sin = span.turn.cos, span.turn.sin
            x = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
        k, v = (y.repeat_interleave(heads // y.shape[0], 0) for y in (span.k, span.v))
        products = x @ k.mT * scale
        if softcap is not None:
            products = softcap * torch.tanh(products / softcap)
        key = torch.arange(k.shape[1])
        low, high = (torch.as_tensor(y).expand(rows)[:, None] for y in span.limits())
        logits.append(products.masked_fill((key < low) | (key >= high), -torch.inf))
        values.append(v)
    logits.append(sinks.view(heads, 1, 1).expand(heads, rows, 1))
    weights = torch.cat(logits, -1).softmax(-1)[..., :-1]
    return weights @ torch.cat(values, 1), None


def refusals() -> list[str | None]:
    from longchat_cli.kernels.triton_prefill import accepts

    q, k = normal(4, 9, 16), normal(2, 64, 16)
    index = torch.zeros(2, 1, 4, dtype=torch.int64)
    tried = [
        (q[:, :1], [Span(k, k)]),
        (q.bfloat16(), [Span(k.bfloat16(), k.bfloat16())]),
        (q, [Span(k.half(), k.half())]),
        (q, [Span(k, k)] * 5),
        (q, [Span(k, normal(2, 64, 24))]),
        (q.clone().requires_grad_(), [Span(k, k, index=index)]),
    ]
    return [accepts(q, spans, None, None) for q, spans in tried]


# --- the tests


@pytest.mark.parametrize(("dim", "dtype"), [(64, torch.float16), (80, torch.float32), (96, torch.float16),
                                            (128, torch.float32), (256, torch.float16)], ids=str)  # fmt: skip
def test_head_dimensions(dim, dtype):
    interpreted(one_shape, dim, 1, 3, 63, dtype)


@pytest.mark.parametrize(
    ("per_group", "rows"), [(1, 63), (2, 100), (3, 2), (5, 63), (8, 63), (8, 2), (32, 7)]
)
def test_query_heads_per_group(per_group, rows):
    interpreted(one_shape, 16, 2 if per_group < 8 else 1, per_group, rows, torch.float32)


@pytest.mark.parametrize("name", ["sink", "cca", "infllm", "minference", "h2o", "recycled"])
@pytest.mark.parametrize(("rows", "dtype"), [(100, torch.float32), (63, torch.float16)], ids=str)
def test_spans_of_methods(name, rows, dtype):
    interpreted(as_methods_ask, name, rows, dtype)


def test_rows_that_see_nothing_give_zeros():
    interpreted(nothing_visible)


def test_what_is_not_visible_is_not_read():
    interpreted(poison_outside)


def test_inputs_that_are_not_contiguous():
    interpreted(not_contiguous)


@pytest.mark.parametrize("heads", ["max", "mean", "sum"])
@pytest.mark.parametrize("rows", ["last", "sum"])
def test_scores(rows, heads):
    interpreted(scores, rows, heads)


@pytest.mark.parametrize("seed", range(8))
def test_anything(seed):
    interpreted(anything, seed)


@pytest.mark.parametrize(
    ("groups", "per_group", "rows", "dim", "softcap"),
    [(2, 3, 63, 16, None), (1, 3, 70, 80, None), (2, 2, 100, 16, 2.0), (3, 1, 90, 24, 2.0)],
)
def test_gradients(groups, per_group, rows, dim, softcap):
    interpreted(gradients, groups, per_group, rows, dim, softcap)


@pytest.mark.slow
@pytest.mark.parametrize("hundred", range(2))
def test_anything_at_length(hundred):
    for seed in range(100):
        interpreted(anything, 1000 + 100 * hundred + seed)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_every_dimension_and_group(dim, dtype):
    for per_group in range(1, 9):
        for rows in (2, 63, 100, 200):
            interpreted(one_shape, dim, 1, per_group, rows, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_gradients_of_every_dimension(dim, softcap):
    for groups, per_group, rows in ((1, 1, 9), (2, 4, 100), (1, 8, 63)):
        interpreted(gradients, groups, per_group, rows, dim, softcap)


def test_refusals():
    expected = ["one row", "bfloat16", "different dtype", "5 spans", "width", "no gradients"]
    for reason, words in zip(interpreted(refusals), expected, strict=True):
        assert words in (reason or "")
