"""Attention over spans by torch's fused CPU kernel: each range's output and log-sum-exp, then one merge.

The kernel reads grouped keys through a stride of zero, so nothing is repeated to query heads, and a span is
cut into the keys that every row sees (no mask) and its ragged ends (a mask of at most rows x rows).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from longchat_cli.kernels.reference import reduce_scores, visible
from longchat_cli.kernels.span import Bound, Span

NEVER = float("-inf")


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
    queries = [q if span.turn is None else span.turn.apply(q) for span in spans]
    parts = [
        _range(query, span, low, high, scale)
        for query, span in zip(queries, spans, strict=True)
        for low, high in _cuts(span, q.shape[1])
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


def _range(q: Tensor, span: Span, low: int, high: int, scale: float) -> tuple[Tensor, Tensor]:
    """Output [heads, rows, dim] and log-sum-exp [heads, rows] over keys low..high of one span."""
    heads, rows, dim = q.shape
    groups = span.k.shape[0]
    shape = (groups, heads // groups, high - low, dim)
    k, v = (_dense_rows(x[:, low:high]).unsqueeze(1).expand(shape) for x in (span.k, span.v))
    mask = _mask(span, rows, low, high, q.device)
    bias = None if mask is None else torch.zeros(mask.shape, dtype=q.dtype).masked_fill_(~mask, NEVER)
    grouped = _dense_rows(q).reshape(groups, heads // groups, rows, dim)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        grouped, k, v, 0.0, False, attn_mask=bias, scale=scale
    )
    lse = lse.reshape(heads, rows)
    if mask is not None:
        # A row that sees none of these keys comes back with log-sum-exp 0.
        lse = lse.masked_fill(~mask.any(dim=-1).view(1, -1), NEVER)
    return out.reshape(heads, rows, dim), lse


def _dense_rows(x: Tensor) -> Tensor:
    """The kernel takes any strides but the last, which it believes to be 1."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _mask(span: Span, rows: int, low: int, high: int, device: torch.device) -> Tensor | None:
    start, stop = span.limits()
    if _extent(start)[1] <= low and _extent(stop)[0] >= high:
        return None
    mask = visible(start - low, stop - low, high - low, device)
    return mask.expand(rows, high - low)[None, None]


def _merge(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
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


def _scores(q: Tensor, span: Span, total: Tensor, scale: float, spans: Sequence[Span]) -> Tensor:
    assert span.observe is not None
    heads, rows, dim = q.shape
    start, stop = span.limits()
    if span.observe.rows == "last":
        q, total = q[:, -1:], total[:, -1:]
        start, stop = (b if isinstance(b, int) else b[-1:] for b in (start, stop))
    groups = span.k.shape[0]
    grouped = q.reshape(groups, -1, dim)
    logits = (grouped @ span.k.transpose(1, 2)).float() * scale
    probabilities = torch.exp(logits.view(heads, q.shape[1], -1) - total.unsqueeze(-1))
    seen = visible(start, stop, span.k.shape[1], q.device)
    probabilities = probabilities.masked_fill(~seen, 0.0)
    return reduce_scores(probabilities, min(s.k.shape[0] for s in spans), span.observe)
