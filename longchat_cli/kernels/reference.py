"""Dense float32 attention over spans: the oracle of every kernel, and what serves when none accepts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longchat_cli.kernels.packed import dense
from longchat_cli.kernels.span import INDEX_ROWS, Bound, Observe, Span


def attend(
    q: Tensor,
    spans: Sequence[Span],
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, list[Tensor | None]]:
    """One softmax over every span.

    q: [heads, rows, dim]; spans: keys and values [groups, keys, dim]; `softcap` bounds logits by
    softcap * tanh(logits / softcap) (Gemma 2); `sinks` [heads] are learned logits without a value (gpt-oss).
    Returns the output [heads, rows, value dim] in q's dtype, and per span the probabilities it asked for,
    float32 [KV heads, keys]. A row that sees nothing returns zeros.
    """
    heads, rows, _ = q.shape
    logits = [_logits(q, span, scale, softcap) for span in spans]
    joint = torch.cat(logits, dim=-1)
    if sinks is not None:
        joint = torch.cat([joint, sinks.float().view(heads, 1, 1).expand(heads, rows, 1)], dim=-1)
    probabilities = torch.softmax(joint, dim=-1).nan_to_num(0.0)
    out = q.new_zeros(heads, rows, spans[0].v.shape[-1], dtype=torch.float32)
    scores: list[Tensor | None] = []
    offset = 0
    for span in spans:
        part = probabilities[..., offset : offset + span.k.shape[1]]
        offset += span.k.shape[1]
        out += part @ _per_head(dense(span.v), heads).float()
        scores.append(None if span.observe is None else reduce_scores(part, _groups(spans), span.observe))
    return out.to(q.dtype), scores


def visible(start: Bound, stop: Bound, keys: int, device: torch.device) -> Tensor:
    """Which keys each row sees: bool [rows or 1, keys]."""
    index = torch.arange(keys, device=device)
    low, high = (b.view(-1, 1) if isinstance(b, Tensor) else b for b in (start, stop))
    return ((index >= low) & (index < high)).view(-1, keys)


def reduce_scores(probabilities: Tensor, groups: int, observe: Observe) -> Tensor:
    """Probabilities [heads, rows, keys] to [groups, keys] as `observe` says."""
    rows = probabilities[:, -1] if observe.rows == "last" else probabilities.sum(dim=1)
    grouped = rows.reshape(groups, -1, rows.shape[-1])
    if observe.heads == "max":
        return grouped.amax(dim=1)
    return grouped.mean(dim=1) if observe.heads == "mean" else grouped.sum(dim=1)


def _logits(q: Tensor, span: Span, scale: float, softcap: float | None) -> Tensor:
    query = span.turn.apply(q) if span.turn is not None else q
    logits = query.float() @ _per_head(dense(span.k), q.shape[0]).float().transpose(1, 2) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    start, stop = span.limits()
    seen = visible(start, stop, span.k.shape[1], q.device)
    if span.index is not None:
        seen = seen & _per_head(listed(span.index, span.k.shape[1], q.shape[1]), q.shape[0])
    return logits.masked_fill(~seen, float("-inf"))


def listed(index: Tensor, keys: int, rows: int) -> Tensor:
    """Which keys an index [groups, runs, n] gives each row: bool [groups, rows, keys]."""
    runs = torch.zeros(*index.shape[:2], keys + 1, dtype=torch.bool, device=index.device)
    # Fillers of -1 land in a column of their own.
    runs.scatter_(2, index.long() % (keys + 1), True)
    return runs[..., :keys].repeat_interleave(INDEX_ROWS, dim=1)[:, :rows]


def _per_head(x: Tensor, heads: int) -> Tensor:
    return x.repeat_interleave(heads // x.shape[0], dim=0)


def _groups(spans: Sequence[Span]) -> int:
    return min(span.k.shape[0] for span in spans)
