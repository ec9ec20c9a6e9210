"""Groups of keys made smaller: CCA's cores, Quest's page bounds and their scores.

Each in dense float32 torch, beside a Triton kernel of the same signature that serves on a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longchat_cli.kernels.launch import learning, unusable


def pool(
    q: Tensor, k: Tensor, v: Tensor, group: int, left_out: int, scale: float, kind: str, per_head: bool
) -> tuple[Tensor, Tensor]:
    """Cores of k and v [KV heads, n x group, dim]: one for every `group` tokens (CCA-Attention, equation 4).

    q [heads, n, dim] are the queries of each group's last token; the first `left_out` tokens take no part (of
    no group all of them). `kind`: "attention" weighs a group's tokens by the softmax of q k^T scale, "mean"
    alike, "max" takes each channel's greatest. Returns k and v [heads if per_head else KV heads, n, dim] in
    their dtype; a KV head's core has its query heads' mean weights. "max" knows KV heads alone.
    """
    if _on_gpu(q, k, v):
        from longchat_cli.kernels import triton_pool

        if triton_pool.fits(group, k.shape[2]):
            return triton_pool.pool(q, k, v, group, left_out, scale, kind, per_head)
    return pool_reference(q, k, v, group, left_out, scale, kind, per_head)


def pool_reference(
    q: Tensor, k: Tensor, v: Tensor, group: int, left_out: int, scale: float, kind: str, per_head: bool
) -> tuple[Tensor, Tensor]:
    """As `pool`."""
    keys, values = (x.float().unflatten(1, (-1, group)) for x in (k, v))
    hidden = (torch.arange(k.shape[1], device=k.device) < left_out).view(-1, group)
    if kind == "max":
        cores = [x.masked_fill(hidden.unsqueeze(-1), -torch.inf).amax(2) for x in (keys, values)]
    else:
        grouped = q.float().unflatten(0, (len(k), -1))  # [KV heads, r, n, dim]
        logits = torch.einsum("hrnd,hngd->hrng", grouped, keys) * scale
        if kind == "mean":
            logits = torch.zeros_like(logits)
        weights = logits.masked_fill(hidden, -torch.inf).softmax(-1)
        if not per_head:
            weights = weights.mean(1, keepdim=True)
        cores = [torch.einsum("hrng,hngd->hrnd", weights, x).flatten(0, 1) for x in (keys, values)]
    return cores[0].to(k.dtype), cores[1].to(v.dtype)


def page_bounds(k: Tensor, page: int) -> tuple[Tensor, Tensor]:
    """Least and greatest of each channel over every `page` keys of k [KV heads, n x page, dim]: two tensors
    [KV heads, n, dim] (Quest, section 3.2)."""
    if _on_gpu(k):
        from longchat_cli.kernels import triton_pool

        if triton_pool.fits(page, k.shape[2]):
            return triton_pool.page_bounds(k, page)
    return page_bounds_reference(k, page)


def page_bounds_reference(k: Tensor, page: int) -> tuple[Tensor, Tensor]:
    """As `page_bounds`."""
    low, high = k.unflatten(1, (-1, page)).aminmax(dim=2)
    return low, high


def page_scores(q: Tensor, low: Tensor, high: Tensor, heads: str) -> Tensor:
    """The most that queries can score on each page, sum_d max(q_d low_d, q_d high_d) (Quest, section 3.2).

    q [heads, 1, dim]; low, high [KV heads, pages, dim]. Returns float32 [KV heads, pages], the "max" or
    "mean" over a KV head's query heads.
    """
    if _on_gpu(q, low, high):
        from longchat_cli.kernels import triton_pool

        return triton_pool.page_scores(q, low, high, heads)
    return page_scores_reference(q, low, high, heads)


def page_scores_reference(q: Tensor, low: Tensor, high: Tensor, heads: str) -> Tensor:
    """As `page_scores`: positive channels take the greatest key, negative ones the least."""
    grouped = q.float().unflatten(0, (len(low), -1)).squeeze(2)
    scores = grouped.clamp(min=0) @ high.float().mT + grouped.clamp(max=0) @ low.float().mT
    return scores.amax(1) if heads == "max" else scores.mean(1)


def _on_gpu(*tensors: Tensor) -> bool:
    """Whether a Triton kernel can serve."""
    return all(x.is_cuda for x in tensors) and not learning(*tensors) and unusable(tensors[0]) is None
