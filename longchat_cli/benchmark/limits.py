"""What this machine can do at best, and the least that a model and a method ask of it.

A decoded token must read the weights in the form that serves and the visible keys and values; a prompt must
be multiplied by every weight and every visible key. Both limits are measured, not looked up.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from mmap import PAGESIZE
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longchat_cli import kernels
from longchat_cli.kernels.roofline import work

TRIES = 8
"""The best of so many short measurements is what the machine can do."""
SHAPES = ((512, 2048, 2048), (1024, 2048, 2048))
"""Matrix products tried: a chunk of a prompt, and two."""


@dataclass
class Asked:
    """What attention calls asked for: bytes of queries, outputs and visible keys and values, and FLOPs."""

    bytes: int = 0
    flops: int = 0


@contextlib.contextmanager
def counting() -> Iterator[Asked]:
    """Counts the attention calls of the body; they cost more time than usual."""
    asked, attend = Asked(), kernels.attend

    def counted(q: Tensor, spans: Any, *rest: Any) -> Any:
        moved, flops = work(q, spans)
        asked.bytes += moved
        asked.flops += flops
        return attend(q, spans, *rest)

    kernels.attend = counted  # type: ignore[assignment]
    try:
        yield asked
    finally:
        kernels.attend = attend


def matrices(decoder: Any) -> list[tuple[int, int]]:
    """(bytes read for one token, weights) of every matrix that a token is multiplied by, the head last."""
    if hasattr(decoder, "blocks"):
        # The native library's form of a product serves before torch's packed one, that before the dense one.
        tiles = getattr(getattr(decoder, "products", None), "tiles", None)
        products = [
            (f"layers.{index}.{name}", getattr(block, name))
            for index, block in enumerate(decoder.blocks)
            for name in ("qkv", "o", "gate_up", "down")
        ]
        inner = [
            (_bytes(_tiled(tiles, name) or x.packed or x.weights), _count(x.weights)) for name, x in products
        ]
        return [*inner, (_bytes(_tiled(tiles, "head") or [decoder.head]), decoder.head.numel())]
    head = decoder.model.get_output_embeddings().weight
    looked_up = decoder.model.get_input_embeddings().weight
    others = (x for x in decoder.model.parameters() if x.dim() > 1 and x is not head and x is not looked_up)
    return [*map(_of, others), _of(head)]


def _tiled(tiles: Any, product: str) -> list[Tensor]:
    """A product's tensors in the native library's form; none where it has none."""
    named = {} if tiles is None else tiles.tensors
    return [tensor for name, tensor in named.items() if name.startswith(f"{product}.")]


def _of(tensor: Tensor) -> tuple[int, int]:
    return _bytes([tensor]), _count([tensor])


def _bytes(tensors: Any) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def _count(tensors: Any) -> int:
    return sum(x.numel() for x in tensors)


def kept(decoder: Any) -> int:
    """Bytes of all weights that a decoder keeps in memory, in every form it keeps them in.

    Of a memory-mapped form only what was read is in memory.
    """
    storages = {
        x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in _tensors(vars(decoder), set())
    }
    return sum(present(address, size) for address, size in storages.items())


def present(address: int, size: int) -> int:
    """How many of `size` bytes at an address are in memory; all where no one says (pagemap(5))."""
    first, last = address // PAGESIZE, (address + size - 1) // PAGESIZE
    try:
        with Path("/proc/self/pagemap").open("rb") as table:
            table.seek(first * 8)
            pages = np.frombuffer(table.read((last - first + 1) * 8), np.uint64)
    except OSError:
        return size
    return min(int((pages >> 63).sum()) * PAGESIZE, size)


def _tensors(value: Any, visited: set[int]) -> Iterator[Tensor]:
    """Every tensor that can be reached through containers and objects of this package or torch.nn."""
    if id(value) in visited:
        return
    visited.add(id(value))
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in list(value.values()):
            yield from _tensors(item, visited)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item, visited)
    elif isinstance(value, torch.nn.Module):
        for tensor in (*value.parameters(), *value.buffers()):
            yield from _tensors(tensor, visited)
    elif type(value).__module__.startswith("longchat_cli."):
        yield from _tensors(vars(value) if hasattr(value, "__dict__") else {}, visited)


def reading(size: int, threads: int) -> float:
    """Bytes a second at which `threads` read a block of `size` bytes again and again.

    A block that fits a cache is read from there, as a small model's weights are.
    """
    block = torch.ones(max(size, 1), dtype=torch.uint8)
    share = block.numel() // threads
    # memchr looks for a byte that is not there: a read that the C library vectorises, without Python's lock.
    library = ctypes.CDLL(None) if os.name == "posix" else ctypes.cdll.msvcrt
    search = library.memchr
    search.argtypes, search.restype = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t), ctypes.c_void_p
    with ThreadPoolExecutor(threads) as pool:
        starts = [block.data_ptr() + index * share for index in range(threads)]
        return (
            share * threads / _fastest(lambda: list(pool.map(lambda start: search(start, 0, share), starts)))
        )


def multiplying(dtype: torch.dtype) -> float:
    """FLOPs a second of torch's matrix products, with the threads torch has."""
    rates = []
    for rows, inner, columns in SHAPES:
        a, b = torch.ones(rows, inner, dtype=dtype), torch.ones(columns, inner, dtype=dtype)
        rates.append(2 * rows * inner * columns / _fastest(lambda a=a, b=b: a @ b.t()))  # type: ignore[misc]
    return max(rates)


def _fastest(call: Callable[[], Any]) -> float:
    times = []
    for _ in range(TRIES):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return min(times)
