"""The attention of few queries as probabilities, for methods that weigh rows or sum along diagonals."""

from __future__ import annotations

import torch
from torch import Tensor

from longchat_cli.attention.layer import Step


def probabilities(queries: Tensor, keys: Tensor, new: Step) -> Tensor:
    """Causal attention of the queries [heads, n, dim] of the last n keys [KV heads, keys, dim].

    Float32 [KV heads, query heads of each, n, keys]; scale, softcap and learned sinks are those of `new`.
    """
    groups, count, rows = *keys.shape[:2], queries.shape[1]
    grouped = queries.reshape(groups, -1, queries.shape[-1])
    logits = (grouped @ keys.transpose(1, 2)).float().mul_(new.scale).view(groups, -1, rows, count)
    if new.softcap is not None:
        logits = new.softcap * torch.tanh(logits / new.softcap)
    future = torch.ones(rows, rows, dtype=torch.bool, device=keys.device).triu(1)
    logits[..., count - rows :].masked_fill_(future, -torch.inf)
    if new.sinks is None:
        return logits.softmax(-1)
    learned = new.sinks.float().view(groups, -1, 1, 1).expand(*logits.shape[:3], 1)
    return torch.cat([logits, learned], dim=-1).softmax(-1)[..., :-1]
