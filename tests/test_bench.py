"""The kernel benchmark's logic, on CPU with the sdpa kernel: work, floors, checks, tables."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from longchat_cli import kernels
from longchat_cli.kernels import Observe, Span, bench, bench_cases, reference, roofline

pytestmark = pytest.mark.usefixtures("one_thread")
SMALL = bench_cases.Shape(heads=4, groups=2, dim=16, dtype=torch.float32, device="cpu")
SIZES = [1, 63, 64, 100, 1100]


@pytest.mark.parametrize("name", bench_cases.CASES)
def test_every_case_is_measured_and_right(name):
    for n in SIZES:
        rows = bench.measure(name, SMALL, n)
        assert [row["kernel"] for row in rows] == ["sdpa"]
        (row,) = rows
        assert row["error"] < 1e-4 and bench.right(row), row
        assert min(row["seconds"], row["full"], row["floor"]) > 0
        assert row["full_by"] == "SDPA"


@pytest.mark.parametrize("name", bench_cases.POOLS)
def test_pooling_is_measured(name, monkeypatch):
    function, *others = bench_cases.POOLS[name]
    for n in SIZES:
        (row,) = bench.measure_pooling(name, SMALL, n)
        assert bench.right(row) and min(row["seconds"], row["full"], row["floor"]) > 0

    def wrong(*inputs):
        first, *rest = bench._outputs(function(*inputs))
        return (first * 1.1, *rest)

    monkeypatch.setitem(bench_cases.POOLS, name, (wrong, *others))
    assert not bench.right(bench.measure_pooling(name, SMALL, 100)[0])


def test_floor_of_cores():
    """Keys, values and a query a core are read once, a sixteenth of the keys and values written."""
    shape = bench_cases.Shape(heads=4, groups=2, dim=16, dtype=torch.bfloat16, device="cpu")
    (row,) = bench.measure_pooling("pooling, cores", shape, 1600)
    keys, cores = 2 * 2 * 1600 * 16 * 2, 2 * 2 * 100 * 16 * 2
    assert row["floor"] == pytest.approx((keys + cores + 4 * 100 * 16 * 2) / 4.3e12)


def seen(span: Span, rows: int) -> torch.Tensor:
    """Visible pairs [groups, rows, keys], row by row."""
    start, stop = span.limits()
    groups, keys = span.k.shape[:2]
    found = torch.zeros(groups, rows, keys, dtype=torch.bool)
    for row in range(rows):
        low, high = (int(bound[row]) if isinstance(bound, torch.Tensor) else bound for bound in (start, stop))
        found[:, row, low : max(low, high)] = True
        if span.index is not None:
            for group in range(groups):
                listed = set(span.index[group, row // 64].tolist())
                found[group, row, [key for key in range(keys) if key not in listed]] = False
    return found


@pytest.mark.parametrize("name", [name for name in bench_cases.CASES if "vertical" not in name])
@pytest.mark.parametrize("n", [100, 1100])
def test_work_is_what_is_visible(name, n):
    q, spans = bench_cases.CASES[name](SMALL, n)
    pairs = keys = 0
    for span in spans:
        visible = seen(span, q.shape[1])
        pairs += int(visible.sum()) * q.shape[0] // span.k.shape[0]
        if not isinstance(span.k, kernels.packed.Packed):
            keys += int(visible.any(dim=1).sum())
    moved, flops = roofline.work(q, spans)
    assert flops == 4 * pairs * SMALL.dim
    if "int" not in name:
        lists = sum(8 * span.index.numel() for span in spans if span.index is not None)
        assert moved == 4 * (2 * q.numel() + 2 * keys * SMALL.dim) + lists


def test_work_of_packed_keys_counts_their_bytes():
    q, (packed, rest) = bench_cases.decode_packed(SMALL, 1100, "int8")
    plain = roofline.work(q, [rest])[0]
    scales = 2 * (17 * 16 + 1088) * 4  # float32: per channel and run of the keys, per token of the values
    assert roofline.work(q, [packed, rest])[0] - plain == 2 * 2 * 1088 * 16 + scales


def test_vertical_slash_lists_no_key_twice_and_none_of_the_future():
    _, (span,) = bench_cases.vertical_slash(SMALL, 2500)
    for run, listed in enumerate(span.index[0].tolist()):
        real = [key for key in listed if key >= 0]
        assert listed[: len(real)] == real, "fillers come last"
        assert len(set(real)) == len(real)
        last = min(64 * run + 63, 2499)
        assert set(range(max(last - 1023, 0), last + 1)) <= set(real)
        assert max(real) == last
    _, flops = roofline.work(SMALL.queries(2500), [span])
    full = roofline.work(SMALL.queries(2500), [replace(span, index=None)])[1]
    assert flops < 1.1 * full


def test_floors_of_an_h200():
    """131,072 keys of 8 x 128 in bfloat16 are 537 MB; causal prefill of as many is 141 TFLOP."""
    shape = bench_cases.Shape(device="meta")
    k = torch.empty(8, 131_072, 128, dtype=torch.bfloat16, device="meta")
    moved, flops = roofline.work(shape.queries(1), [Span(k, k)])
    assert moved == 2 * 8 * 131_072 * 128 * 2 + 2 * 32 * 128 * 2
    assert roofline.floor(moved, flops) == pytest.approx(124.9e-6, rel=1e-3)
    moved, flops = roofline.work(shape.queries(131_072), [Span(k, k, 0, torch.arange(1, 131_073))])
    assert roofline.floor(moved, flops) == pytest.approx(4 * 32 * 128 * 131_072 * 131_073 / 2 / 790e12)


@pytest.mark.parametrize("rows", [1, 100, 200])
def test_wrong_kernels_are_found(rows):
    q, keys = SMALL.queries(rows), SMALL.keys(200)
    stop = torch.arange(201 - rows, 201)
    spans = [Span(*keys, 0, stop, observe=Observe() if rows == 1 else None)]

    def wrong_in(row: int, factor: float):
        def attend(*inputs):
            out, scores = reference.attend(*inputs)
            out[:, row] *= factor
            return out, scores

        return bench.error(attend, q, spans, 0.25)

    def wrong_scores(*inputs):
        out, scores = reference.attend(*inputs)
        return out, [x if x is None else x * 1.1 for x in scores]

    assert bench.error(reference.attend, q, spans, 0.25) < 1e-5
    for row in (0, rows - 1):
        assert wrong_in(row, 1.5) > bench.TOLERANCE
        assert not bench.right({"error": wrong_in(row, float("nan"))})
    assert (bench.error(wrong_scores, q, spans, 0.25) > bench.TOLERANCE) == (rows == 1)


def test_page():
    row = {"case": "decode, full", "tokens": 4096, "kernel": "triton", "error": 1e-3, "full_by": "flash-attn"}
    times = {"seconds": 10e-6, "floor": 8e-6, "full": 25e-6}
    lines = bench.show([row | times, row | times | {"error": float("nan")}]).splitlines()
    cells = [cell.strip() for cell in lines[2].strip("|").split("|")]
    assert cells[:5] == ["decode, full", "4,096", "triton", "1.0e-03", "10.0"]
    assert cells[5:] == ["8.0", "80%", "25.0", "flash-attn", "2.5x"]
    assert "WRONG" in lines[3]
    page = bench.page([row | times], bench_cases.Shape(), "NVIDIA H200")
    assert "NVIDIA H200" in page and "bfloat16" in page and lines[0].split("|")[1].strip() in page


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is at hand")
def test_without_a_gpu_it_says_so(capsys):
    assert bench.main([]) == 69
    assert capsys.readouterr().err == "longchat: error: nothing to measure on: torch finds no CUDA device\n"
