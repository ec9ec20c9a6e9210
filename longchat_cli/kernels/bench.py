"""`python -m longchat_cli.kernels.bench`: every kernel against the reference, its floor and full attention.

On a machine with a GPU it checks each kernel in bfloat16, times it by replaying a CUDA graph, and prints how
near it comes to the floor: the larger of bytes / BANDWIDTH and FLOPs / ARITHMETIC of the work that the spans
ask for, whatever the kernel really moves.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from longchat_cli import kernels
from longchat_cli.errors import CannotCreate, LongchatError, Unavailable
from longchat_cli.kernels import Span, reference
from longchat_cli.kernels.bench_cases import CASES, POOLS, Shape
from longchat_cli.kernels.roofline import ARITHMETIC, BANDWIDTH, floor, work
from longchat_cli.kernels.span import INDEX_ROWS
from longchat_cli.terminal_text import table

TOLERANCE = 2e-2
"""Largest error in parts of the largest output: bfloat16 keeps eight bits of every probability."""
COLD = 256 * 2**20
"""Bytes of inputs that a graph runs through, so that none is found in the L2 cache (50 MB)."""

Attend = Callable[..., tuple[Tensor, list[Tensor | None]]]


def error(attend: Attend, q: Tensor, spans: Sequence[Span], scale: float) -> float:
    """Largest difference from the float32 reference over the first and the last rows, in parts of the largest
    number expected; scores too, where one row is asked for. NaN where the kernel gives NaN."""
    out, scores = attend(q, spans, scale)
    last = (q.shape[1] - 1) // INDEX_ROWS * INDEX_ROWS
    worst = []
    for low in sorted({0, last}):
        rows = slice(low, low + INDEX_ROWS)
        seen = [_of_rows(span, rows) for span in spans]
        wanted, wanted_scores = reference.attend(q[:, rows].float(), seen, scale)
        worst.append(_difference(out[:, rows], wanted))
        if q.shape[1] == 1:
            pairs = zip(scores, wanted_scores, strict=True)
            worst += [_difference(a, b) for a, b in pairs if a is not None and b is not None]
    return float(torch.stack(worst).max())


def _difference(found: Tensor, wanted: Tensor) -> Tensor:
    return (found.float() - wanted.float()).abs().max() / wanted.float().abs().max()


def _of_rows(span: Span, rows: slice) -> Span:
    """What `rows` (one run) see of a span."""
    start, stop = (bound[rows] if isinstance(bound, Tensor) else bound for bound in span.limits())
    turn, index, run = span.turn, span.index, rows.start // INDEX_ROWS
    if turn is not None:
        turn = replace(turn, cos=turn.cos[rows], sin=turn.sin[rows])
    if index is not None:
        index = index[:, run : run + 1]
    return replace(span, start=start, stop=stop, turn=turn, index=index)


def full_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> dict[str, Callable[[], Any]]:
    """What a model would do without a method: flash-attn and torch over all keys."""
    found: dict[str, Callable[[], Any]] = {}
    if q.is_cuda and find_spec("flash_attn") is not None:
        from flash_attn import flash_attn_func

        rows_first = [x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)]
        found["flash-attn"] = partial(flash_attn_func, *rows_first, softmax_scale=scale, causal=True)
    query, key, value = (x.unsqueeze(0) for x in (q, k, v))
    sdpa = partial(F.scaled_dot_product_attention, scale=scale, enable_gqa=True)
    found["SDPA"] = partial(sdpa, query, key, value, is_causal=q.shape[1] > 1)
    return found


def _full(shape: Shape, q: Tensor, n: int) -> tuple[float, str]:
    """Seconds of the fastest full attention of q over n tokens, and its name."""
    copies = _copies(shape, 2 * shape.groups * n * shape.dim * q.element_size())
    problems = [full_attention(q, *shape.keys(n), shape.scale) for _ in range(copies)]
    return min((seconds([each[name] for each in problems], shape.device), name) for name in problems[0])


def _copies(shape: Shape, moved: int) -> int:
    """Inputs to go through, so that a GPU finds none in its cache."""
    return min(max(COLD // moved, 1), 100) if shape.device == "cuda" else 1


def seconds(calls: Sequence[Callable[[], Any]], device: str) -> float:
    """Seconds that one of `calls` takes, on average over all of them."""
    if device != "cuda":
        start = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - start) / len(calls)
    return _replayed(calls) / len(calls)


def _replayed(calls: Sequence[Callable[[], Any]]) -> float:
    """Seconds that a graph of all calls takes on the GPU; replays last about a tenth of a second."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles, and warms allocators up, before anything is captured
        calls[0]()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    once = _elapsed(graph, 1)
    return _elapsed(graph, min(max(int(0.1 / max(once, 1e-6)), 1), 100))


def _elapsed(graph: torch.cuda.CUDAGraph, times: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / times


def measure(name: str, shape: Shape, n: int) -> list[dict[str, Any]]:
    """A row for each kernel that serves case `name` over n tokens, ready for JSON; times in seconds."""
    torch.manual_seed(n)
    q, spans = CASES[name](shape, n)
    moved, flops = work(q, spans)
    problems = [(q, spans), *(CASES[name](shape, n) for _ in range(_copies(shape, moved) - 1))]
    full, by = _full(shape, q, n)
    rows = []
    for kernel in _serving(q, spans):
        row: dict[str, Any] = {"case": name, "tokens": n, "kernel": kernel.name}
        row |= {"error": error(kernel.attend, q, spans, shape.scale), "floor": floor(moved, flops)}
        calls = [partial(kernel.attend, *problem, shape.scale) for problem in problems]
        rows.append(row | {"seconds": seconds(calls, shape.device), "full": full, "full_by": by})
    return rows


def _serving(q: Tensor, spans: Sequence[Span]) -> Iterable[kernels.Kernel]:
    """The kernels that can serve, without the reference; of one name the one that would."""
    able: dict[str, kernels.Kernel] = {}
    for kernel in kernels.KERNELS:
        if kernel.name not in (*able, "reference") and kernel.accepts(q, spans, None, None) is None:
            able[kernel.name] = kernel
    return able.values()


def measure_pooling(name: str, shape: Shape, n: int) -> list[dict[str, Any]]:
    """As `measure`, a row against the same in torch; on a CPU both are."""
    torch.manual_seed(n)
    function, in_torch, make = POOLS[name]
    inputs = make(shape, n)
    found, wanted = (_outputs(each(*inputs)) for each in (function, in_torch))
    read = [x for x in inputs if isinstance(x, Tensor)]
    moved = sum(x.numel() * x.element_size() for x in (*read, *found))
    several = [inputs, *(make(shape, n) for _ in range(_copies(shape, moved) - 1))]
    taken, full = (
        seconds([partial(each, *given) for given in several], shape.device) for each in (function, in_torch)
    )
    kernel = "triton" if shape.device == "cuda" else "torch"
    worst = torch.stack([_difference(a, b) for a, b in zip(found, wanted, strict=True)]).max()
    row = {"case": name, "tokens": n, "kernel": kernel, "error": float(worst), "floor": floor(moved, 0)}
    return [row | {"seconds": taken, "full": full, "full_by": "torch"}]


def _outputs(found: Any) -> tuple[Tensor, ...]:
    return (found,) if isinstance(found, Tensor) else found


def right(row: dict[str, Any]) -> bool:
    """Whether a row's kernel agrees with the reference (NaN does not)."""
    return row["error"] <= TOLERANCE


HEADER = ("case", "tokens", "kernel", "error", "µs", "floor µs", "of floor", "full µs", "by", "speed-up")


def show(rows: Sequence[dict[str, Any]]) -> str:
    """The measurements as a table."""
    return table(HEADER, map(_line, rows))


def _line(row: dict[str, Any]) -> tuple[str, ...]:
    microseconds = [f"{row[name] * 1e6:,.1f}" for name in ("seconds", "floor", "full")]
    error = f"{row['error']:.1e}" + ("" if right(row) else " WRONG")
    share, gain = f"{row['floor'] / row['seconds']:.0%}", f"{row['full'] / row['seconds']:.1f}x"
    taken, least, full = microseconds
    return (
        row["case"],
        f"{row['tokens']:,}",
        row["kernel"],
        error,
        taken,
        least,
        share,
        full,
        row["full_by"],
        gain,
    )


PAGE = """# Attention kernels, measured

`python -m longchat_cli.kernels.bench` on {device}, torch {torch}: {heads} query heads, {groups} KV heads of
{dim} channels, {dtype}. *error*: largest difference from the float32 reference, in parts of the largest
output. *floor*: the larger of bytes / {bandwidth} TB/s and FLOPs / {arithmetic} TFLOP/s that the visible keys
ask for; *of floor*: floor / time. *full*: full attention over all tokens by the faster of flash-attn and
torch's SDPA (of pooling: the same in torch); *speed-up*: full / time.

{table}
"""


def page(rows: Sequence[dict[str, Any]], shape: Shape, device: str) -> str:
    """docs/kernels.md."""
    return PAGE.format(
        device=device,
        torch=torch.__version__,
        heads=shape.heads,
        groups=shape.groups,
        dim=shape.dim,
        dtype=str(shape.dtype).removeprefix("torch."),
        bandwidth=BANDWIDTH / 1e12,
        arithmetic=round(ARITHMETIC / 1e12),
        table=show(rows),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table, and each case on stderr once measured; 1 when a kernel is wrong, 69 without a GPU."""
    parser = argparse.ArgumentParser("python -m longchat_cli.kernels.bench", description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2**i for i in range(12, 18)])
    every = [*CASES, *POOLS]
    parser.add_argument("--case", nargs="+", default=every, choices=every, metavar="CASE")
    parser.add_argument("--heads", type=int, default=Shape.heads)
    parser.add_argument("--groups", type=int, default=Shape.groups)
    parser.add_argument("--dim", type=int, default=Shape.dim)
    parser.add_argument("--write", type=Path, metavar="FILE", help="write a page as well: docs/kernels.md")
    chosen = parser.parse_args(arguments)
    try:
        return _run(chosen)
    except LongchatError as error:
        print(f"longchat: error: {error}", file=sys.stderr)
        return error.exit_code


def _run(chosen: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        raise Unavailable("nothing to measure on", "torch finds no CUDA device")
    shape = Shape(chosen.heads, chosen.groups, chosen.dim)
    rows: list[dict[str, Any]] = []
    for name in chosen.case:
        for n in chosen.tokens:
            rows += (measure if name in CASES else measure_pooling)(name, shape, n)
            print(f"{name}, {n:,} tokens", file=sys.stderr)
    print(show(rows))
    if chosen.write:
        try:
            chosen.write.write_text(page(rows, shape, torch.cuda.get_device_name()), encoding="utf-8")
        except OSError as error:
            raise CannotCreate(f"{chosen.write} cannot be written", error.strerror or "") from error
    return 0 if all(map(right, rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
