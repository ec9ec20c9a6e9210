"""Kernels against the dense reference and against torch: odd sizes, ragged spans, empty rows, scores."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from spans import SIZES, normal, random_span, rotation
from torch import Tensor
from torch.nn import functional as F

from longchat_cli import kernels
from longchat_cli.errors import UsageError
from longchat_cli.kernels import Observe, Rotation, Span, flash, packed, reference, sdpa

pytestmark = pytest.mark.usefixtures("one_thread")
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def both(q: Tensor, spans: list[Span], scale: float = 0.25, sinks: Tensor | None = None) -> Tensor:
    """Run both kernels, compare outputs and scores, return the output."""
    assert sdpa.accepts(q, spans, None, sinks) is None
    found, found_scores = sdpa.attend(q, spans, scale, None, sinks)
    wanted, wanted_scores = reference.attend(q, spans, scale, None, sinks)
    tolerance = TOLERANCE[q.dtype]
    assert found.dtype == wanted.dtype == q.dtype
    assert found.shape == wanted.shape
    assert not found.isnan().any() and not wanted.isnan().any()
    assert (found.float() - wanted.float()).abs().max() <= tolerance
    for a, b, span in zip(found_scores, wanted_scores, spans, strict=True):
        assert (a is None) == (b is None) == (span.observe is None)
        if a is not None and b is not None:
            assert a.dtype == b.dtype == torch.float32
            assert a.shape == b.shape
            assert not a.isnan().any()
            assert (a - b).abs().max() <= tolerance * max(1, q.shape[1])
    return wanted


@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize(("heads", "groups"), [(6, 2), (2, 2), (4, 1)])
def test_random_spans(rows, heads, groups):
    rng = random.Random(rows * heads)
    for trial in range(25):
        dim = rng.choice([8, 16, 24, 64])
        spans = [
            random_span(rng, heads, groups, rows, dim, 100 * trial + i) for i in range(rng.randint(1, 4))
        ]
        if all(span.k.shape[0] == heads for span in spans):
            spans.append(Span(normal(groups, 3, dim), normal(groups, 3, dim)))
        sinks = normal(heads, seed=trial) * 3 if rng.random() < 0.3 else None
        both(normal(heads, rows, dim, seed=trial), spans, sinks=sinks)


@pytest.mark.parametrize("kernel", [sdpa, reference])
def test_listed_keys_by_hand(kernel):
    """70 rows in two runs with lists of their own, per KV head, inside a causal window."""
    q, k, v = normal(4, 70, 16), normal(2, 90, 16, seed=1), normal(2, 90, 16, seed=2)
    index = torch.full((2, 2, 5), -1)
    index[0, 0, :3], index[0, 1] = torch.tensor([40, 0, 7]), torch.tensor([89, 3, 60, 20, 66])
    index[1, 0, 1:], index[1, 1, 2] = torch.tensor([19, 20, 21, 22]), 65
    stop, start = torch.arange(21, 91), torch.arange(70) // 35
    seen = torch.zeros(4, 70, 90, dtype=torch.bool)
    for head, row in itertools.product(range(4), range(70)):
        for key in index[head // 2, row // 64].tolist():
            if start[row] <= key < stop[row]:
                seen[head, row, key] = True
    wanted = F.scaled_dot_product_attention(q, *(x.repeat_interleave(2, 0) for x in (k, v)), seen, scale=0.3)
    found, _ = kernel.attend(q, [Span(k, v, start, stop, index=index)], 0.3)
    assert not found[~seen.any(-1)].any()
    assert torch.allclose(found[seen.any(-1)], wanted[seen.any(-1)], atol=1e-5)
    everything = torch.arange(90).expand(2, 2, 90)
    whole, _ = kernel.attend(q, [Span(k, v, start, stop)], 0.3)
    assert torch.allclose(
        kernel.attend(q, [Span(k, v, start, stop, index=everything)], 0.3)[0], whole, atol=1e-5
    )


@pytest.mark.parametrize("kernel", [sdpa, reference])
@pytest.mark.parametrize(("kind", "step"), [("int8", 1 / 127), ("fp8", 1 / 8), ("int4", 2 / 15)])
def test_packed_keys(kernel, kind, step):
    """Attention over packed keys is that over what they stand for: each value, unpacked here by itself."""
    k, v, q = normal(2, 128, 16), normal(2, 128, 16, seed=1), normal(4, 9, 16, seed=2)
    pk, pv = packed.pack(k, kind, per_channel=True), packed.pack(v, kind, per_channel=False)
    assert pk.shape == pv.shape == (2, 128, 16)
    for x, held in ((k, pk), (v, pv)):
        unpacked = torch.zeros_like(x)
        for head, token, channel in itertools.product(range(2), range(128), range(16)):
            at = (head, token // packed.RUN, channel) if held is pk else (head, token, 0)
            if kind == "int4":
                code = int(held.data[head, token, channel // 2]) >> (4 * (channel % 2)) & 15
                assert held.zero is not None
                unpacked[head, token, channel] = code * held.scale[at] + held.zero[at]
            else:
                unpacked[head, token, channel] = held.data[head, token, channel].float() * held.scale[at]
        assert torch.allclose(held.dense(), unpacked, atol=1e-6)
        assert (unpacked - x).abs().max() <= step * x.abs().max()
    stop = torch.arange(120, 129)
    wanted, _ = reference.attend(q, [Span(pk.dense(), pv.dense(), 3, stop)], 0.25)
    observed = Span(pk, pv, 3, stop, observe=Observe("sum", "mean"))
    assert torch.allclose(kernel.attend(q, [observed], 0.25)[0], wanted, atol=1e-5)
    listed = Span(pk, pv, 3, stop, index=torch.arange(128).expand(2, 1, 128))
    assert torch.allclose(kernel.attend(q, [listed], 0.25)[0], wanted, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 63])
def test_low_precision(dtype, rows):
    spans = [
        Span(
            normal(2, 100, 16, dtype=dtype),
            normal(2, 100, 16, seed=1, dtype=dtype),
            observe=Observe("sum", "mean"),
        ),
        Span(
            normal(2, 63, 16, seed=2, dtype=dtype),
            normal(2, 63, 16, seed=3, dtype=dtype),
            0,
            torch.arange(1, rows + 1),
            turn=rotation(rows, 8, False),
            observe=Observe("last", "max"),
        ),
    ]
    both(normal(6, rows, 16, seed=4, dtype=dtype), spans)


@pytest.mark.parametrize("rows", [1, 5])
def test_rows_that_see_nothing_give_zeros(rows):
    k, v, q = normal(2, 9, 16), normal(2, 9, 16, seed=1), normal(4, rows, 16, seed=2)
    for stop in (0, torch.zeros(rows, dtype=torch.int64)):
        out = both(q, [Span(k, v, 0, stop, observe=Observe("sum", "sum"))])
        assert not out.any()
        assert not both(q, [Span(k, v, 9), Span(k, v, 4, 2)]).any()
    if rows > 1:
        some = torch.tensor([0, 3, 0, 9, 0])
        out = both(q, [Span(k, v, 0, some), Span(k, v, some, some, observe=Observe("last", "max"))])
        assert not out[:, [0, 2, 4]].any()
        assert out[:, [1, 3]].abs().min() > 0


def test_a_masked_key_has_no_influence_at_all():
    """However large: what is outside the visible part has no weight, not a small one."""
    k, v, q = normal(2, 40, 16), normal(2, 40, 16, seed=1), normal(4, 7, 16, seed=2)
    stop = torch.arange(20, 27)
    clean = [kernel.attend(q, [Span(k, v, 3, stop)], 0.25)[0] for kernel in (sdpa, reference)]
    k2, v2 = k.clone(), v.clone()
    k2[:, :3], v2[:, 30:], k2[:, 30:] = 1e30, -1e30, 1e4
    dirty = sdpa.attend(q, [Span(k2, v2, 3, stop)], 0.25)[0]
    assert torch.allclose(dirty, clean[0], atol=1e-6)
    assert torch.allclose(clean[0], clean[1], atol=1e-5)


def test_non_contiguous_inputs():
    q = normal(7, 6, 16).transpose(0, 1)
    k, v = normal(40, 2, 16, seed=1).transpose(0, 1), normal(2, 16, 80, seed=2).transpose(1, 2)[:, ::2]
    expanded = normal(1, 40, 16, seed=3).expand(2, 40, 16)
    stop = torch.arange(34, 41)
    spans = [Span(k, v, 0, stop, observe=Observe("sum", "max")), Span(expanded, expanded[:, :, :16], 5, 30)]
    out = both(q, spans)
    packed = [Span(s.k.contiguous(), s.v.contiguous(), s.start, s.stop) for s in spans]
    assert torch.allclose(out, both(q.contiguous(), packed), atol=1e-6)


@pytest.mark.parametrize(("rows", "heads"), list(itertools.product(["last", "sum"], ["max", "mean", "sum"])))
def test_scores_by_hand(rows, heads):
    """Probabilities of one softmax over all spans and the learned sinks, reduced as asked."""
    q, sinks = normal(6, 5, 16), normal(6, seed=9)
    a, b = normal(2, 8, 16, seed=1), normal(2, 11, 16, seed=2)
    stop = torch.arange(7, 12)
    spans = [Span(a, a, observe=Observe(rows, heads)), Span(b, b, 0, stop, observe=Observe(rows, heads))]
    found = both(q, spans, sinks=sinks)
    _, scores = kernels.attend(q, spans, 0.25, None, sinks)
    logits = torch.cat([q @ x.repeat_interleave(3, 0).mT for x in (a, b)], dim=-1) * 0.25
    logits[..., 8:].masked_fill_(torch.arange(11) >= stop[:, None], -torch.inf)
    joint = torch.cat([logits, sinks.view(6, 1, 1).expand(6, 5, 1)], dim=-1).softmax(-1)[..., :-1]
    picked = joint[:, -1] if rows == "last" else joint.sum(1)
    grouped = picked.view(2, 3, 19)
    wanted = {"max": grouped.amax(1), "mean": grouped.mean(1), "sum": grouped.sum(1)}[heads]
    assert torch.allclose(torch.cat(scores, dim=-1), wanted, atol=1e-5)
    values = torch.cat([a, b], dim=1).repeat_interleave(3, 0)
    assert torch.allclose(found, joint @ values, atol=1e-5)


@pytest.mark.parametrize("kernel", [sdpa, reference])
def test_splitting_keys_over_spans_changes_nothing(kernel):
    q, k, v = normal(6, 33, 16), normal(2, 100, 16, seed=1), normal(2, 100, 16, seed=2)
    stop = torch.arange(68, 101)
    whole, _ = kernel.attend(q, [Span(k, v, 0, stop)], 0.25)
    cuts = [0, 1, 40, 64, 67, 90, 100]
    parts = [Span(k[:, a:b], v[:, a:b], 0, (stop - a).clamp(0, b - a)) for a, b in itertools.pairwise(cuts)]
    assert torch.allclose(kernel.attend(q, parts, 0.25)[0], whole, atol=1e-5)


@pytest.mark.parametrize("kernel", [sdpa, reference])
@pytest.mark.parametrize("rows", [1, 63, 100])
@pytest.mark.parametrize("window", [None, 17])
def test_against_torch(kernel, rows, window):
    q, k, v = normal(6, rows, 32), normal(2, 100, 32, seed=1), normal(2, 100, 32, seed=2)
    stop = torch.arange(101 - rows, 101)
    start = 0 if window is None else (stop - window).clamp(min=0)
    index = torch.arange(100)
    mask = index < stop[:, None]
    if window is not None:
        mask &= index >= (stop[:, None] - window)
    wanted = F.scaled_dot_product_attention(q[None], k[None], v[None], mask, scale=0.3, enable_gqa=True)[0]
    assert torch.allclose(kernel.attend(q, [Span(k, v, start, stop)], 0.3)[0], wanted, atol=1e-5)


def test_softcap_and_wide_values_are_the_references():
    q, k, v = normal(4, 9, 16), normal(2, 20, 16, seed=1), normal(2, 20, 24, seed=2)
    out, _ = kernels.attend(q, [Span(k, v[..., :16])], 1.0, softcap=2.0)
    logits = 2.0 * torch.tanh((q @ k.repeat_interleave(2, 0).mT) / 2.0)
    assert torch.allclose(out, logits.softmax(-1) @ v[..., :16].repeat_interleave(2, 0), atol=1e-5)
    wide, _ = kernels.attend(q, [Span(k, v)], 1.0)
    assert wide.shape == (4, 9, 24)
    assert "softcap" in (sdpa.accepts(q, [Span(k, k)], 2.0, None) or "")
    assert "width" in (sdpa.accepts(q, [Span(k, v)], None, None) or "")
    assert "dtype" in (sdpa.accepts(q.double(), [Span(k, k)], None, None) or "")


def test_rotation_undoes_itself_and_leaves_other_channels():
    x = normal(3, 5, 16)
    for interleaved in (False, True):
        for planes in (2, 4, 8):
            turn = rotation(5, planes, interleaved)
            back = Rotation(turn.cos, -turn.sin, interleaved)
            assert torch.allclose(back.apply(turn.apply(x)), x, atol=1e-5)
            assert torch.equal(turn.apply(x)[..., 2 * planes :], x[..., 2 * planes :])
            assert torch.allclose(turn.apply(x).norm(dim=-1), x.norm(dim=-1), atol=1e-4)
            assert turn.apply(x.bfloat16()).dtype == torch.bfloat16


# --- dispatch


@pytest.fixture
def unforced():
    yield
    kernels.force(None)


def test_dispatch_takes_the_first_that_accepts(unforced):
    q, k = normal(2, 3, 16), normal(2, 5, 16)
    before = kernels.served.copy()
    kernels.attend(q, [Span(k, k)], 1.0)
    kernels.attend(q, [Span(k, k)], 1.0, softcap=1.0)
    gained = kernels.served - before
    assert gained == {"sdpa": 1, "reference": 1}


def test_forced_kernel(unforced):
    q, k = normal(2, 3, 16), normal(2, 5, 16)
    kernels.force("reference")
    before = kernels.served.copy()
    kernels.attend(q, [Span(k, k)], 1.0)
    assert kernels.served - before == {"reference": 1}
    kernels.force("sdpa")
    with pytest.raises(UsageError, match=r"sdpa.*softcap"):
        kernels.attend(q, [Span(k, k)], 1.0, softcap=1.0)
    with pytest.raises(UsageError, match="sdpa, reference"):
        kernels.force("cuda-magic")


def test_report_names_every_kernel():
    rows = kernels.report()
    assert {name for name, _, _ in rows} == set(kernels.names())
    assert all(reason for _, _, reason in rows)


@pytest.mark.parametrize(
    ("rows", "keys", "start", "stop", "plain"),
    [
        (1, 9, 0, 9, True),
        (1, 9, 0, 8, False),
        (1, 9, 1, 9, False),
        (4, 9, 0, torch.arange(6, 10), True),
        (4, 9, 0, torch.arange(5, 9), False),
        (4, 9, torch.zeros(4, dtype=torch.int64), torch.arange(6, 10), False),
        (4, 9, 0, 9, False),
    ],
)
def test_flash_attn_takes_plain_causal_spans_only(rows, keys, start, stop, plain):
    k = torch.zeros(1, keys, 8)
    assert flash.plain_causal(Span(k, k, start, stop), rows) == plain
    reason = flash.accepts(torch.zeros(1, rows, 8), [Span(k, k, start, stop)], None, None)
    assert reason is not None  # not installed, or these tensors are not on a GPU
