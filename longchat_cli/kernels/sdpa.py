"""Attention over spans by torch's fused CPU kernel: each range's output and log-sum-exp, then one merge.

The kernel reads grouped keys through a stride of zero, so nothing is repeated to query heads, and a span is
cut into the keys that every row sees (no mask) and its ragged ends (a mask of at most rows x rows). Packed
keys are unpacked and listed keys gathered first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from longchat_cli.kernels.packed import Packed, dense
from longchat_cli.kernels.reference import reduce_scores, visible
from longchat_cli.kernels.span import INDEX_ROWS, Bound, Span

Part = tuple[Tensor, Tensor]
"""Output [heads, rows, dim] and log-sum-exp [heads, rows] over some of the keys."""

NEVER = float("-inf")


def missing() -> str | None:
    """Why it does not serve on this machine; None when it does."""
    return "a GPU is in use" if torch.cuda.is_available() else None


def accepts(q: Tensor, spans: Sequence[Span], softcap: float | None, sinks: Tensor | None) -> str | None:
    """None when this kernel can serve, else why not."""
    if q.device.type != "cpu":
        return "not on CPU"
    if softcap is not None:
        return "logit softcap"
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"dtype {q.dtype}"
    if any(span.k.shape[-1] != span.v.shape[-1] for span in spans):
        return "keys and values of different width"
    return None


def attend(
    q: Tensor,
    spans: Sequence[Span],
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, list[Tensor | None]]:
    """As `reference.attend`; scores cost a second pass over the keys of the span that asked."""
    spans = [_dense(span) for span in spans]
    queries = [q if span.turn is None else span.turn.apply(q) for span in spans]
    parts = [
        part
        for query, span in zip(queries, spans, strict=True)
        for part in (_parts(query, span, scale) if span.index is None else [_listed(query, span, scale)])
    ]
    if sinks is not None or not parts:
        lse = torch.full((len(q),), NEVER) if sinks is None else sinks.float()
        parts.append((q.new_zeros(*q.shape[:2], spans[0].v.shape[-1]), lse.view(-1, 1).expand(q.shape[:2])))
    out, total = _merge(parts)
    scores = [
        None if span.observe is None else _scores(query, span, total, scale, spans)
        for query, span in zip(queries, spans, strict=True)
    ]
    return out.to(q.dtype), scores


def _cuts(span: Span, rows: int) -> Iterator[tuple[int, int]]:
    """Cut a span's keys into non-empty ranges: ragged front, seen by all rows, ragged back."""
    start, stop = span.limits()
    first, last_start = _extent(start)
    first_stop, last = _extent(stop)
    # With fewer common keys than rows one masked range is cheaper than three calls.
    points = [first, last] if first_stop - last_start < rows else [first, last_start, first_stop, last]
    yield from ((low, high) for low, high in zip(points, points[1:], strict=False) if high > low)


def _extent(bound: Bound) -> tuple[int, int]:
    if isinstance(bound, int):
        return bound, bound
    low, high = torch.aminmax(bound)
    return int(low), int(high)


def _dense(span: Span) -> Span:
    packed = isinstance(span.k, Packed) or isinstance(span.v, Packed)
    return replace(span, k=dense(span.k), v=dense(span.v)) if packed else span


def _parts(q: Tensor, span: Span, scale: float) -> list[Part]:
    """One part for each range that the span is cut into."""
    rows, k, v = q.shape[1], dense(span.k), dense(span.v)
    return [
        _range(q, k[:, low:high], v[:, low:high], _mask(span, rows, low, high), scale)
        for low, high in _cuts(span, rows)
    ]


def _listed(q: Tensor, span: Span, scale: float) -> Part:
    """The one part of an indexed span, a run of rows at a time."""
    assert span.index is not None
    runs = []
    for run, first in enumerate(range(0, q.shape[1], INDEX_ROWS)):
        rows = slice(first, min(first + INDEX_ROWS, q.shape[1]))
        start, stop = (b if isinstance(b, int) else b[rows] for b in span.limits())
        index = span.index[:, run].long()  # [groups, n]
        k, v = (
            torch.stack(
                [x.index_select(0, at) for x, at in zip(dense(kept), index.clamp(min=0), strict=True)]
            )
            for kept in (span.k, span.v)
        )
        # Lists ascend, so what every row sees is at their front and needs no mask.
        common = ((index >= max(_extent(start)[1], 0)) & (index < _extent(stop)[0])).all(0)
        front = int(common.cumprod(0).sum())
        parts = [_range(q[:, rows], k[:, :front], v[:, :front], None, scale)] if front else []
        if front < index.shape[1]:
            place = index[:, front:].unsqueeze(1)
            low, high = (b if isinstance(b, int) else b.view(1, -1, 1) for b in (start, stop))
            seen = ((place >= low) & (place < high) & (place >= 0)).expand(-1, rows.stop - first, -1)
            parts.append(_range(q[:, rows], k[:, front:], v[:, front:], seen, scale))
        runs.append(_merge(parts))
    out, lse = (torch.cat(parts, dim=1) for parts in zip(*runs, strict=True))
    return out, lse


def _range(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Part:
    """q over all of k, v [groups, keys, dim], or where mask [1 or groups, rows, keys] is true."""
    heads, rows, dim = q.shape
    groups, keys = k.shape[:2]
    shape = (groups, heads // groups, keys, dim)
    k, v = (_dense_rows(x).unsqueeze(1).expand(shape) for x in (k, v))
    bias = None if mask is None else torch.zeros(mask.shape, dtype=q.dtype).masked_fill_(~mask, NEVER)
    grouped = _dense_rows(q).reshape(groups, heads // groups, rows, dim)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        grouped, k, v, 0.0, False, attn_mask=None if bias is None else bias.unsqueeze(1), scale=scale
    )
    lse = lse.reshape(heads, rows)
    if mask is not None:
        # A row that sees none of these keys comes back with log-sum-exp 0.
        empty = ~mask.any(dim=-1)
        lse = lse.masked_fill(empty.repeat_interleave(heads // empty.shape[0], dim=0), NEVER)
    return out.reshape(heads, rows, dim), lse


def _dense_rows(x: Tensor) -> Tensor:
    """The kernel takes any strides but the last, which it believes to be 1."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _mask(span: Span, rows: int, low: int, high: int) -> Tensor | None:
    """Which of keys low..high each row sees, bool [1, rows, keys]; None for all of them."""
    start, stop = span.limits()
    if _extent(start)[1] <= low and _extent(stop)[0] >= high:
        return None
    return visible(start - low, stop - low, high - low, dense(span.k).device).expand(rows, high - low)[None]


def _merge(parts: Sequence[Part]) -> Part:
    """Join partial softmaxes by their log-sum-exp: exactly one softmax over all ranges."""
    if len(parts) == 1:
        return parts[0]
    lses = torch.stack([lse for _, lse in parts])
    total = torch.logsumexp(lses, dim=0)
    weights = torch.exp(lses - total.masked_fill(total == NEVER, 0.0)).unsqueeze(-1)
    out = weights[0] * parts[0][0]
    for weight, (part, _) in zip(weights[1:], parts[1:], strict=True):
        out.addcmul_(weight, part.float())
    return out, total


TILE = 1 << 18
"""Probabilities of a head that are computed at once: they stay in the processor's cache."""


def _scores(q: Tensor, span: Span, total: Tensor, scale: float, spans: Sequence[Span]) -> Tensor:
    """The probabilities that `span` asks for, a tile of keys at a time."""
    assert span.observe is not None
    start, stop = span.limits()
    if span.observe.rows == "last":
        q, total = q[:, -1:], total[:, -1:]
        start, stop = (b if isinstance(b, int) else b[-1:] for b in (start, stop))
    keys, groups = dense(span.k), min(s.k.shape[0] for s in spans)
    grouped, last = q.reshape(keys.shape[0], -1, q.shape[-1]), _extent(stop)[1]
    found, width = torch.zeros(groups, keys.shape[1]), max(TILE // q.shape[1], 1)
    for low in range(min(_extent(start)[0], last), last, width):
        high = min(low + width, last)
        some = keys[:, low:high]
        # For a single row the product is twice as fast in the other order.
        one = q.shape[1] == 1
        part = (some @ grouped.mT).mT if one else grouped @ some.mT
        part = part.reshape(len(q), q.shape[1], -1).float().mul_(scale).sub_(total.unsqueeze(-1)).exp_()
        if _extent(start)[1] > low or _extent(stop)[0] < high:
            seen = visible(start - low, stop - low, high - low, q.device)
            part.masked_fill_(~seen, 0.0)
        found[:, low:high] = reduce_scores(part, groups, span.observe)
    return found
