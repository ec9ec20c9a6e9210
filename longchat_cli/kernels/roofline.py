"""What a call of a kernel cannot avoid, in bytes, FLOPs and seconds of an H200."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longchat_cli.kernels.packed import Packed
from longchat_cli.kernels.span import INDEX_ROWS, Span

BANDWIDTH = 4.3e12
"""Bytes a second that an H200 copies, measured."""
ARITHMETIC = 790e12
"""FLOPs a second of its bfloat16 products, measured."""


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
