"""Shared by methods that choose keys by attention: what queries look at, pooled, ranked."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from longchat_cli import kernels
from longchat_cli.attention.buffer import Buffer
from longchat_cli.attention.layer import Step, joined
from longchat_cli.kernels import Observe, Span


def observed(kv: Buffer, queries: Tensor, new: Step, observe: Observe) -> Tensor:
    """The probabilities [KV heads, entries] that queries [heads, n, dim] of the last n entries give."""
    stop = torch.arange(kv.end - queries.shape[1] + 1, kv.end + 1, device=queries.device)
    spans = [
        Span(k, v, 0, (stop - first).clamp(max=k.shape[1]), observe=observe) for k, v, first in kv.parts()
    ]
    return joined(kernels.attend(queries, spans, new.scale, new.softcap, new.sinks)[1])


def pooled(weights: Tensor, width: int, kind: str = "max") -> Tensor:
    """Weights [KV heads, entries] >= 0, each the max or mean of `width` neighbours, zeros beyond the ends.

    A width that reaches every entry from each of them is cut to the least such: the order stays the same.
    """
    width = min(width, 2 * weights.shape[-1] - 1)
    padded = F.pad(weights, ((width - 1) // 2, width // 2))
    return F.max_pool1d(padded, width, stride=1) if kind == "max" else F.avg_pool1d(padded, width, stride=1)


def ranked(scores: Tensor) -> Tensor:
    """Indices int64 [KV heads, entries], the highest score first."""
    # Pooling makes neighbours tie: a stable sort takes the earlier one, on every device.
    return scores.sort(dim=-1, descending=True, stable=True).indices


def best(scores: Tensor, budget: int, recent: int) -> Tensor:
    """The last `recent` entries and those with the highest scores: ascending int64 [KV heads, budget]."""
    older = scores.shape[-1] - min(recent, budget)
    if scores.shape[-1] == budget + 1 and older:  # one to drop, at every decoding step: no need to sort
        worst = scores[:, :older].argmin(-1, keepdim=True)
        place = torch.arange(budget, device=scores.device)
        return place + (place >= worst)
    last = torch.arange(older, scores.shape[-1], device=scores.device).expand(scores.shape[0], -1)
    others = ranked(scores[:, :older])[:, : budget - last.shape[1]]
    return torch.cat([others, last], dim=-1).sort(dim=-1).values
