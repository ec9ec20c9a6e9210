"""The CPU library of `csrc/`, through ctypes: decoding in few bits and attention of a few rows over spans.

It is built when longchat is installed, if there is a C++ compiler; without it torch serves. The structures
below are those of csrc/native.h, where every field is explained.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.machinery
import math
import struct
import weakref
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longchat_cli.errors import OutOfMemory
from longchat_cli.kernels.packed import Packed, rows_at
from longchat_cli.kernels.span import Bound, Span

ABI = 10
"""Of native.h: a library built from another version of it is not used."""
ROWS = 8
"""Up to this many query rows the library is faster than torch's kernel."""
WIDEST, MOST_SPANS = 512, 6
TILE = 16
"""Rows of weights that lie interleaved."""
LEAST = 1 << 15
"""Bytes from which memory is worth a place among large pages."""
PHASES = ("inputs", "products", "rotation", "attention", "waiting", "last product")
"""What the library spends a step on, as it counts it."""
REDUCE = {"max": 1, "mean": 2, "sum": 3}
"""How heads' probabilities become one: LongchatSpan's `observe`."""


class Linear(ctypes.Structure):
    """LongchatLinear."""

    _fields_ = (
        [("codes", c_void_p)]
        + [(name, c_int32) for name in ("rows", "cols", "bits", "group")]
        + [("offset", c_float)]
    )


class Head(ctypes.Structure):
    """LongchatHead."""

    _fields_ = [("upper", Linear), ("rest", c_void_p)]


class Block(ctypes.Structure):
    """LongchatBlock."""

    _fields_ = [
        (name, c_void_p)
        for name in (
            "attention_norm",
            "mlp_norm",
            "q_norm",
            "k_norm",
            "after_attention",
            "after_mlp",
            "qkv_bias",
            "o_bias",
        )
    ] + [("qkv", Linear * 3), ("o", Linear * 1), ("gate_up", Linear * 2), ("down", Linear * 1)]


class Model(ctypes.Structure):
    """LongchatModel."""

    _fields_ = [
        (name, c_int32) for name in ("heads", "kv_heads", "dim", "width", "hidden", "gelu", "threads")
    ] + [("eps", c_float)]


class Seen(ctypes.Structure):
    """LongchatSpan."""

    _fields_ = [
        *((name, c_void_p) for name in ("k", "v")),
        *((name, c_int64) for name in ("k_head", "k_key", "v_head", "v_key")),
        *((name, c_void_p) for name in ("cos", "sin", "start", "stop", "index")),
        *((name, c_int64) for name in ("listed", "index_group", "index_run")),
        *((name, c_int32) for name in ("groups", "planes", "interleaved")),
        *((name, c_int32) for name in ("observe", "observe_rows", "observe_groups")),
        ("keys", c_int64),
        ("observed", c_void_p),
    ]


class _Attention(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("spans", "q")),
        *((name, c_int64) for name in ("q_head", "q_row")),
        *((name, c_void_p) for name in ("sinks", "out")),
        *((name, c_int64) for name in ("out_head", "out_row")),
        *((name, c_int32) for name in ("n_spans", "heads", "rows", "dim", "threads")),
        *((name, c_float) for name in ("scale", "softcap")),
    ]


class Layer(ctypes.Structure):
    """LongchatLayer."""

    _fields_ = [
        ("spans", c_void_p),
        ("k", c_int64 * 2),  # pointers
        ("v", c_int64 * 2),
        ("k_head", c_int64 * 2),
        ("v_head", c_int64 * 2),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("n_spans", c_int32),
        ("planes", c_int32),
    ]


class Step(ctypes.Structure):
    """LongchatStep."""

    _fields_ = [
        *(
            (name, c_void_p)
            for name in ("model", "blocks", "layers", "norm", "head", "x", "q", "logits", "spent")
        ),
        *((name, c_int32) for name in ("n_layers", "rows")),
        ("scale", c_float),
    ]


_POINTER, _COUNT, _STRIDE = c_void_p, c_int32, c_int64
_ARGUMENTS: dict[str, list[Any]] = {
    "logits": [_POINTER, _POINTER, c_float, _POINTER, _POINTER, _COUNT, _COUNT],
    "enter": [*[_POINTER] * 3, _COUNT, _POINTER, _POINTER, _COUNT, *[_POINTER] * 3],
    "leave": [*[_POINTER] * 3, _COUNT, _POINTER, _STRIDE, _STRIDE],
    "enter_many": [*[_POINTER] * 3, _COUNT, _POINTER, _POINTER, _COUNT, *[_POINTER] * 3],
    "leave_many": [*[_POINTER] * 3, _COUNT, _POINTER, _STRIDE, _STRIDE],
    "attend": [_POINTER],
    "step": [_POINTER],
    "attend_many": [_POINTER],
    "gather": [_POINTER, _STRIDE, _STRIDE, _POINTER, _POINTER, _STRIDE, _COUNT, _STRIDE, _STRIDE, _COUNT],
    "rank": [_POINTER, _COUNT, _STRIDE, _STRIDE, _STRIDE, _POINTER, _COUNT],
    "add_norm": [*[_POINTER] * 5, _COUNT, _COUNT, c_float, _COUNT],
    "rotate": [*[_POINTER] * 4, _COUNT, _POINTER, _POINTER, _COUNT, *[_POINTER] * 3],
    "gated": [*[_POINTER] * 3, _STRIDE, _COUNT, _POINTER],
    "give": [_POINTER, _STRIDE],
}


_NEEDLESS = {"gather", "add_norm", "gated", "give"}
"""Of these, what needs no memory."""


@functools.cache
def load() -> ctypes.CDLL | str:
    """The library, or why there is none."""
    folder = Path(__file__).parent
    files = [folder / f"_native{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES]
    built = next((file for file in files if file.exists()), None)
    if built is None:
        return "it was not built: install a C++ compiler and longchat again"
    try:
        if not _complete(built):
            return f"{built.name} is cut short: install longchat again"
        library = ctypes.CDLL(str(built))
        abi = library.longchat_abi()
    except (OSError, AttributeError, struct.error) as error:
        return f"{built.name} cannot be loaded: {error}"
    if abi != ABI:
        return f"{built.name} belongs to another version: install longchat again"
    library.longchat_isa.restype = ctypes.c_char_p
    for name, arguments in _ARGUMENTS.items():
        function = getattr(library, f"longchat_{name}")
        function.argtypes, function.restype = arguments, None
        if name not in _NEEDLESS:
            function.restype, function.errcheck = c_int32, _enough
    library.longchat_take.argtypes, library.longchat_take.restype = [c_int64], c_void_p
    return library


def _complete(file: Path) -> bool:
    """Whether all that an ELF file's header wants in memory is in it: else loading it may end the process."""
    content = file.read_bytes()
    if content[:6] != b"\x7fELF\x02\x01":  # 64 bits, little-endian
        return True
    at, size, count = (*struct.unpack_from("<Q", content, 32), *struct.unpack_from("<HH", content, 54))
    if at + size * count > len(content):
        return False
    segments = (struct.unpack_from("<II4Q", content, at + index * size) for index in range(count))
    return all(start + held <= len(content) for _, _, start, _, _, held in segments)


def _enough(result: int, function: Any, arguments: Any) -> None:
    if not result:
        raise OutOfMemory("there is not enough memory", "the native library could not allocate its scratch")


def missing() -> str | None:
    """None when the library can serve on this machine, else why not."""
    found = load()
    return found if isinstance(found, str) else None


def loaded() -> Any:
    """The library. Raises RuntimeError where `missing` says why."""
    found = load()
    if isinstance(found, str):
        raise RuntimeError(found)
    return found


def isa() -> str:
    """The instructions that serve: avx512, avx2, neon or portable."""
    return loaded().longchat_isa().decode()


def stamp() -> tuple[int, int]:
    """What changes when the library is built anew: size and time of its file."""
    about = Path(loaded()._name).stat()
    return about.st_size, about.st_mtime_ns


def empty(like: Tensor, *shape: int) -> Tensor:
    """As `like.new_empty`, on a CPU in large pages where there are such: they are read twice as fast."""
    size = math.prod(shape) * like.element_size()
    if like.device.type != "cpu" or size < LEAST or missing():
        return like.new_empty(shape)
    library = loaded()
    block = library.longchat_take(size)
    if block is None:
        return like.new_empty(shape)
    memory = (ctypes.c_char * size).from_address(block)
    made = torch.frombuffer(memory, dtype=like.dtype).view(shape)
    weakref.finalize(memory, library.longchat_give, block, size).atexit = False
    return made


def use(name: str) -> bool:
    """Serve by other instructions of this CPU; False when it has none of that name."""
    return bool(loaded().longchat_use(name.encode()))


def accepts(q: Tensor, spans: Sequence[Span], softcap: float | None, sinks: Tensor | None) -> str | None:
    """None when the library serves these inputs, else why not."""
    if q.device.type != "cpu":
        return "not on CPU"
    if q.dtype != torch.bfloat16:
        return f"dtype {q.dtype}"
    if not q.shape[1]:
        return "no rows"
    dim = q.shape[-1]
    if dim % 16 or dim > WIDEST:
        return f"heads of width {dim}"
    if len(spans) > MOST_SPANS:
        return f"{len(spans)} spans"
    for span in spans:
        if isinstance(span.k, Packed) or isinstance(span.v, Packed):
            return "keys and values in few bits"
        if span.k.dtype != q.dtype or span.v.dtype != q.dtype or span.v.shape[-1] != dim:
            return "keys and values unlike the queries"
        if span.k.stride(-1) != 1 or span.v.stride(-1) != 1:
            return "keys or values with gaps"
    return missing()


def has_tiles() -> bool:
    """Whether the library serves, and this CPU has tile instructions that it knows."""
    return missing() is None and bool(loaded().longchat_attends_many())


def accepts_few(q: Tensor, spans: Sequence[Span], softcap: float | None, sinks: Tensor | None) -> str | None:
    """As `accepts`, where the library is the faster one."""
    return "many rows" if q.shape[1] > ROWS else accepts(q, spans, softcap, sinks)


def accepts_many(q: Tensor, spans: Sequence[Span], softcap: float | None, sinks: Tensor | None) -> str | None:
    """As `accepts`, where the library has tile instructions for many rows."""
    if q.shape[1] <= ROWS:
        return "few rows"
    if any(span.index is not None or span.observe is not None for span in spans):
        return "listed keys, or probabilities asked for"
    if reason := accepts(q, spans, softcap, sinks):
        return reason
    return None if has_tiles() else "no tile instructions"


def attend(
    q: Tensor,
    spans: Sequence[Span],
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, list[Tensor | None]]:
    """As `reference.attend`, in bfloat16 with float32 sums; no row's result depends on those beside it.

    Bytes: every visible key and value once for each KV head, whatever the number of heads that share it.
    """
    return _attend("attend", q, spans, scale, softcap, sinks)


def attend_many(
    q: Tensor,
    spans: Sequence[Span],
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, list[Tensor | None]]:
    """As `reference.attend`, in bfloat16 with float32 sums, 32 rows at a time (FlashAttention)."""
    return _attend("attend_many", q, spans, scale, softcap, sinks)


def _attend(
    name: str,
    q: Tensor,
    spans: Sequence[Span],
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> tuple[Tensor, list[Tensor | None]]:
    heads, rows, dim = q.shape
    if q.stride(2) != 1:
        q = q.contiguous()
    out = q.new_empty(heads, rows, dim)
    groups = min((span.k.shape[0] for span in spans), default=heads)
    # What only a pointer leads to must live until the call returns.
    kept: list[Any] = [out, None if sinks is None else sinks.float().contiguous()]
    scores = [
        None if span.observe is None else q.new_empty(groups, span.k.shape[1], dtype=torch.float32)
        for span in spans
    ]
    described = (Seen * len(spans))(
        *(_describe(span, score, rows, kept) for span, score in zip(spans, scores, strict=True))
    )
    call = _Attention(
        ctypes.addressof(described),
        q.data_ptr(),
        q.stride(0),
        q.stride(1),
        None if kept[1] is None else kept[1].data_ptr(),
        out.data_ptr(),
        rows * dim,
        dim,
        len(spans),
        heads,
        rows,
        dim,
        torch.get_num_threads(),
        scale,
        softcap or 0.0,
    )
    getattr(loaded(), f"longchat_{name}")(ctypes.byref(call))
    return out, scores


def _describe(span: Span, score: Tensor | None, rows: int, kept: list[Any]) -> Seen:
    k, v, observe = span.k, span.v, span.observe
    assert isinstance(k, Tensor) and isinstance(v, Tensor)
    start, stop = (_bounds(bound, rows) for bound in span.limits())
    kept += (start, stop)
    made = Seen(
        k=k.data_ptr(),
        v=v.data_ptr(),
        k_head=k.stride(0),
        k_key=k.stride(1),
        v_head=v.stride(0),
        v_key=v.stride(1),
        start=_address(start),
        stop=_address(stop),
        groups=k.shape[0],
        keys=k.shape[1],
    )
    if span.turn is not None:
        cos, sin = (x.expand(rows, -1).contiguous() for x in (span.turn.cos, span.turn.sin))
        made.cos, made.sin, made.planes = cos.data_ptr(), sin.data_ptr(), cos.shape[1]
        made.interleaved = span.turn.interleaved
        kept += (cos, sin)
    if span.index is not None:
        index = span.index.long().contiguous()
        made.index, made.listed = index.data_ptr(), index.shape[2]
        made.index_group, made.index_run = index.stride(0), index.stride(1)
        kept.append(index)
    if observe is not None and score is not None:
        made.observe, made.observe_rows = REDUCE[observe.heads], observe.rows == "sum"
        made.observe_groups, made.observed = score.shape[0], score.data_ptr()
    return made


def gather(x: Tensor, index: Tensor, to: Tensor) -> None:
    """to [heads, m, dim] = x [heads, n, dim] at index int64 [heads, m], each in 0..n-1."""
    rows = (*x.stride()[1:], *to.stride()[1:])
    if x.device.type != "cpu" or x.dtype != to.dtype or rows[1:] != (1, x.shape[2], 1) or missing():
        to.copy_(rows_at(x, index))
        return
    index, size = index.contiguous(), x.element_size()
    loaded().longchat_gather(
        x.data_ptr(),
        x.stride(0) * size,
        x.stride(1) * size,
        index.data_ptr(),
        to.data_ptr(),
        to.stride(0) * size,
        *index.shape,
        x.shape[2] * size,
        torch.get_num_threads(),
    )


def ranked(scores: Tensor, count: int, width: int = 1) -> Tensor | None:
    """Indices int64 [heads, count] of the highest scores float32 [heads, n], each as the largest of `width`
    neighbours, the highest first and of equal ones the earlier; None where the library does not serve."""
    count = min(count, scores.shape[1])
    if scores.device.type != "cpu" or scores.dtype != torch.float32 or not count or missing():
        return None
    scores = scores.contiguous()
    index = torch.empty(len(scores), count, dtype=torch.int64)
    loaded().longchat_rank(
        scores.data_ptr(), *scores.shape, width, count, index.data_ptr(), torch.get_num_threads()
    )
    return index


def _bounds(bound: Bound, rows: int) -> Any:
    """A bound of each row, as int64 in memory."""
    if isinstance(bound, int):
        return (c_int64 * rows)(*[bound] * rows)
    return bound.expand(rows).contiguous()


def _address(bounds: Any) -> int:
    return bounds.data_ptr() if isinstance(bounds, Tensor) else ctypes.addressof(bounds)
