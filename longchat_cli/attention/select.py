"""Shared by methods that choose keys by attention: what queries look at, pooled, ranked."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from longchat_cli import kernels
from longchat_cli.attention.buffer import Buffer
from longchat_cli.attention.layer import Step, joined
from longchat_cli.kernels import Observe, Span, native


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
    return _largest(padded, width) if kind == "max" else F.avg_pool1d(padded, width, stride=1)


def _largest(x: Tensor, width: int) -> Tensor:
    """The maximum of every `width` neighbours; torch's max_pool1d takes six times as long on CPUs."""
    done = 1
    while done < width:
        step = min(done, width - done)
        x = torch.maximum(x[..., : x.shape[-1] - step], x[..., step:])
        done += step
    return x


def ranked(scores: Tensor, count: int, width: int = 1) -> Tensor:
    """Indices int64 [KV heads, count] of the highest scores, the highest first; as if `pooled` by `width`."""
    if (found := native.ranked(scores, count, min(width, 2 * scores.shape[-1] - 1))) is not None:
        return found
    scores = pooled(scores, width) if width > 1 else scores
    # Pooling makes neighbours tie: the earlier one is taken, on every device.
    if not 0 < 3 * count <= scores.shape[-1]:
        return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    last = scores.topk(count, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    above, equal = scores > last, scores == last
    taken = above | (equal & (equal.cumsum(-1) <= count - above.sum(-1, keepdim=True)))
    places = taken.nonzero()[:, 1].view(len(scores), count)
    order = scores.gather(-1, places).sort(dim=-1, descending=True, stable=True).indices
    return places.gather(-1, order)


def best(scores: Tensor, budget: int, recent: int) -> Tensor:
    """The last `recent` entries and those with the highest scores: ascending int64 [KV heads, budget]."""
    older = scores.shape[-1] - min(recent, budget)
    if scores.shape[-1] == budget + 1 and older:  # one to drop, at every decoding step: no need to sort
        worst = scores[:, :older].argmin(-1, keepdim=True)
        place = torch.arange(budget, device=scores.device)
        return place + (place >= worst)
    last = torch.arange(older, scores.shape[-1], device=scores.device).expand(scores.shape[0], -1)
    others = ranked(scores[:, :older], budget - last.shape[1])
    return torch.cat([others, last], dim=-1).sort(dim=-1).values
