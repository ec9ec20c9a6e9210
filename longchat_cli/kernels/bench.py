"""`python -m longchat_cli.kernels.bench`: every kernel against the reference, its floor and full attention.

On a machine with a GPU it checks each kernel in bfloat16, times it by replaying a CUDA graph, and prints how
near it comes to the floor: the larger of bytes / BANDWIDTH and FLOPs / ARITHMETIC of the work that the spans
ask for, whatever the kernel really moves.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from longchat_cli import kernels
from longchat_cli.errors import CannotCreate, LongchatError, Unavailable
from longchat_cli.kernels import Observe, Rotation, Span, pooling, reference
from longchat_cli.kernels.packed import RUN, Packed, pack
from longchat_cli.kernels.span import INDEX_ROWS
from longchat_cli.terminal_text import table

BANDWIDTH = 4.3e12
"""Bytes a second that an H200 copies, measured."""
ARITHMETIC = 790e12
"""FLOPs a second of its bfloat16 products, measured."""
TOLERANCE = 2e-2
"""Largest error in parts of the largest output: bfloat16 keeps eight bits of every probability."""
COLD = 256 * 2**20
"""Bytes of inputs that a graph runs through, so that none is found in the L2 cache (50 MB)."""

SINKS, WINDOW = 4, 1020
GROUP, LOCAL = 16, 1024
VERTICAL, SLASH = 1000, 1024


@dataclass(frozen=True)
class Shape:
    """A model's attention, and where and how precisely it runs."""

    heads: int = 32
    groups: int = 8
    dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"

    def normal(self, heads: int, tokens: int) -> Tensor:
        """Random [heads, tokens, dim]."""
        return torch.randn(heads, tokens, self.dim, dtype=self.dtype, device=self.device)

    def queries(self, rows: int) -> Tensor:
        return self.normal(self.heads, rows)

    def keys(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Keys and values."""
        return self.normal(self.groups, tokens), self.normal(self.groups, tokens)

    def arange(self, *limits: int) -> Tensor:
        return torch.arange(*limits, device=self.device)

    @property
    def scale(self) -> float:
        return self.dim**-0.5


Problem = tuple[Tensor, list[Span]]
"""Queries [heads, rows, dim] and what they see."""


def causal(shape: Shape, n: int) -> Problem:
    return shape.queries(n), [Span(*shape.keys(n), 0, shape.arange(1, n + 1))]


def sink_window(shape: Shape, n: int) -> Problem:
    k, v = shape.keys(n)
    position = shape.arange(n)
    left = (position + 1 - WINDOW).clamp(min=0)
    head = Span(k[:, :SINKS], v[:, :SINKS], 0, left.clamp(max=SINKS), _turn(shape, n))
    return shape.queries(n), [head, Span(k, v, left, position + 1)]


def cores_local(shape: Shape, n: int) -> Problem:
    position = shape.arange(n)
    pooled = ((position + 1 - LOCAL) // GROUP).clamp(min=0)
    raw = Span(*shape.keys(n), pooled * GROUP, position + 1)
    return shape.queries(n), [raw, Span(*shape.keys(max(n // GROUP, 1)), 0, pooled)]


def vertical_slash(shape: Shape, n: int) -> Problem:
    """Evenly spread columns and the nearest diagonals, no key twice, fillers last."""
    last = (shape.arange(0, n, INDEX_ROWS) + INDEX_ROWS - 1).clamp(max=n - 1).view(-1, 1)
    near = last - shape.arange(SLASH)
    columns = shape.arange(0, n, max(n // VERTICAL, 1))
    columns = torch.where(columns < near[:, -1:], columns, -1)
    index = torch.cat([near.clamp(min=-1), columns], dim=1).expand(shape.groups, -1, -1).contiguous()
    return shape.queries(n), [Span(*shape.keys(n), 0, shape.arange(1, n + 1), index=index)]


def decode(shape: Shape, n: int, observe: Observe | None = None) -> Problem:
    return shape.queries(1), [Span(*shape.keys(n), observe=observe)]


def decode_packed(shape: Shape, n: int, kind: str) -> Problem:
    """All whole runs in few bits, the rest as it is."""
    k, v = shape.keys(n)
    whole = n // RUN * RUN
    packed = Span(pack(k[:, :whole], kind, True), pack(v[:, :whole], kind, False))
    spans = [packed, Span(k[:, whole:], v[:, whole:])]
    return shape.queries(1), [span for span in spans if span.k.shape[1]]


def decode_sink(shape: Shape, n: int) -> Problem:
    head = Span(*shape.keys(SINKS), turn=_turn(shape, 1))
    return shape.queries(1), [head, Span(*shape.keys(min(n, WINDOW)))]


def decode_gathered(shape: Shape, n: int) -> Problem:
    """One key in eight, as Recycled attends between refreshes."""
    index = torch.rand(shape.groups, 1, n, device=shape.device).topk(max(n // 8, 1)).indices
    return shape.queries(1), [Span(*shape.keys(n), index=index.sort().values)]


def _turn(shape: Shape, rows: int) -> Rotation:
    angles = torch.rand(rows, shape.dim // 2, device=shape.device) * math.tau
    return Rotation(angles.cos(), angles.sin())


CASES: dict[str, Callable[[Shape, int], Problem]] = {
    "prefill, full": causal,
    "prefill, sinks + window": sink_window,
    "prefill, cores + local": cores_local,
    "prefill, vertical-slash": vertical_slash,
    "decode, full": decode,
    "decode, full, scores": partial(decode, observe=Observe("last", "max")),
    "decode, full, int8": partial(decode_packed, kind="int8"),
    "decode, full, int4": partial(decode_packed, kind="int4"),
    "decode, sinks + window": decode_sink,
    "decode, gathered 1/8": decode_gathered,
}


Inputs = tuple[Any, ...]
Pooling = tuple[Callable[..., Any], Callable[..., Any], Callable[[Shape, int], Inputs]]
"""A function of `kernels.pooling`, its reference, and their inputs."""


def _to_cores(shape: Shape, n: int) -> Inputs:
    cores = max(n // GROUP, 1)
    return (shape.queries(cores), *shape.keys(cores * GROUP), GROUP, SINKS, shape.scale, "attention", False)


def _to_bounds(shape: Shape, n: int) -> Inputs:
    return shape.normal(shape.groups, max(n // GROUP, 1) * GROUP), GROUP


def _to_scores(shape: Shape, n: int) -> Inputs:
    low, high = (x.sort().values for x in shape.keys(max(n // GROUP, 1)))
    return shape.queries(1), low, high, "max"


POOLS: dict[str, Pooling] = {
    "pooling, cores": (pooling.pool, pooling.pool_reference, _to_cores),
    "pooling, page bounds": (pooling.page_bounds, pooling.page_bounds_reference, _to_bounds),
    "pooling, page scores": (pooling.page_scores, pooling.page_scores_reference, _to_scores),
}


def work(q: Tensor, spans: Sequence[Span]) -> tuple[int, int]:
    """(bytes, FLOPs) that cannot be avoided: queries, output and every visible key once; two products.

    The keys of a list count for all rows of its run.
    """
    heads, rows, dim = q.shape
    moved, flops = 2 * q.numel() * q.element_size(), 0
    for span in spans:
        seen, distinct = _pairs(span, rows), _distinct(span)
        groups, keys, width = span.v.shape
        moved += distinct * _bytes(span) // (groups * keys)
        flops += 2 * seen * (dim + width) * heads // groups
        moved += 0 if span.index is None else span.index.numel() * span.index.element_size()
    return moved, flops


def _pairs(span: Span, rows: int) -> int:
    """Visible pairs of row and key, over all KV groups."""
    if span.index is not None:
        listed = (span.index >= 0).sum(dim=(0, 2))
        return int(listed.repeat_interleave(INDEX_ROWS)[:rows].sum())
    start, stop = span.limits()
    counts = torch.as_tensor(stop - start).clamp(min=0).expand(rows)
    return int(counts.sum()) * span.k.shape[0]


def _distinct(span: Span) -> int:
    """Keys that any row sees, over all KV groups."""
    if span.index is not None:
        return sum(int((lists.unique() >= 0).sum()) for lists in span.index)
    start, stop = (torch.as_tensor(bound) for bound in span.limits())
    return max(int(stop.max() - start.min()), 0) * span.k.shape[0]


def _bytes(span: Span) -> int:
    """Bytes of all keys and values."""
    tensors = [x for kv in (span.k, span.v) for x in (kv.tensors() if isinstance(kv, Packed) else [kv])]
    return sum(x.numel() * x.element_size() for x in tensors)


def floor(moved: int, flops: int) -> float:
    """Seconds below which an H200 cannot do it."""
    return max(moved / BANDWIDTH, flops / ARITHMETIC)


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
    for kernel in kernels.KERNELS:
        if kernel.name == "reference" or kernel.accepts(q, spans, None, None) is not None:
            continue
        row: dict[str, Any] = {"case": name, "tokens": n, "kernel": kernel.name}
        row |= {"error": error(kernel.attend, q, spans, shape.scale), "floor": floor(moved, flops)}
        calls = [partial(kernel.attend, *problem, shape.scale) for problem in problems]
        rows.append(row | {"seconds": seconds(calls, shape.device), "full": full, "full_by": by})
    return rows


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
