"""Pooling and page kernels, interpreted, against float32 torch, and that against loops over tokens."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from interpreted import interpreted, needs_triton
from torch import Tensor

from longchat_cli.kernels import pooling

CASES = list(itertools.product(["attention", "mean", "max"], [False, True]))
CLOSE = {torch.float32: 2e-6, torch.float16: 2e-3}


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# --- the references


@pytest.mark.parametrize(("kind", "per_head"), CASES)
def test_pooling_by_hand(kind, per_head):
    heads, owners, n, group, left_out, scale = 4, 2, 3, 5, 3, 0.4
    q, k, v = normal(heads, n, 8), normal(owners, n * group, 8, seed=1), normal(owners, n * group, 8, seed=2)
    found_k, found_v = pooling.pool(q, k, v, group, left_out, scale, kind, per_head)
    each = heads if per_head and kind != "max" else owners
    assert found_k.shape == found_v.shape == (each, n, 8)
    for found, x in ((found_k, k), (found_v, v)):
        for owner, core in itertools.product(range(each), range(n)):
            tokens = [t for t in range(core * group, core * group + group) if t >= left_out]
            mine = x[owner * owners // each, tokens]
            if kind == "max":
                wanted = torch.stack([max(column) for column in mine.T])
            else:
                members = [owner] if per_head else [owner * 2, owner * 2 + 1]
                weights = torch.zeros(len(tokens))
                for head in members:
                    logits = [math.exp(scale * float(q[head, core] @ k[head // 2, t])) for t in tokens]
                    logits = logits if kind == "attention" else [1.0] * len(tokens)
                    weights += torch.tensor(logits) / sum(logits) / len(members)
                wanted = weights @ mine
            torch.testing.assert_close(found[owner, core], wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("heads", ["max", "mean"])
def test_page_scores_bound_every_key(heads):
    k, q = normal(2, 60, 16), normal(6, 1, 16, seed=1)
    low, high = pooling.page_bounds(k, 15)
    scores = pooling.page_scores(q, low, high, heads)
    assert scores.shape == (2, 4)
    best = torch.stack([q[3 * g : 3 * g + 3, 0] @ k[g].T for g in range(2)])  # [2, 3, 60]
    best = best.amax(1) if heads == "max" else best.mean(1)
    assert (best.unflatten(1, (4, 15)).amax(-1) <= scores + 1e-5).all()
    corners = torch.where(q > 0, high.repeat_interleave(3, 0), low.repeat_interleave(3, 0))
    wanted = (q * corners).sum(-1).view(2, 3, 4)
    wanted = wanted.amax(1) if heads == "max" else wanted.mean(1)
    torch.testing.assert_close(scores, wanted, atol=1e-5, rtol=1e-5)


# --- what runs in the interpreter


def pools(kind: str, per_head: bool, shape: tuple[int, int, int, int, int], dtype: torch.dtype) -> None:
    from longchat_cli.kernels import triton_pool

    owners, share, cores, group, dim = shape
    q = normal(cores, owners * share, dim, dtype=dtype).transpose(0, 1)
    k = normal(owners, 2 * cores * group, dim, seed=1, dtype=dtype)[:, ::2]
    v = normal(owners, dim, cores * group, seed=2, dtype=dtype).mT
    for left_out in (0, group - 1):
        arguments = (q, k, v, group, left_out, 0.2, kind, per_head)
        found, wanted = triton_pool.pool(*arguments), pooling.pool_reference(*arguments)
        torch.testing.assert_close(found, wanted, atol=CLOSE[dtype], rtol=CLOSE[dtype])


def pages(owners: int, share: int, count: int, page: int, dim: int, dtype: torch.dtype) -> None:
    from longchat_cli.kernels import triton_pool

    k = normal(count * page + 5, owners, dim, dtype=dtype).transpose(0, 1)[:, 3:-2]
    low, high = triton_pool.page_bounds(k, page)
    assert all(map(torch.equal, (low, high), pooling.page_bounds_reference(k, page)))
    q = normal(owners * share, 3, dim, seed=1, dtype=dtype)[:, 1:2]
    for heads in ("max", "mean"):
        found = triton_pool.page_scores(q, low, high, heads)
        wanted = pooling.page_scores_reference(q, low, high, heads)
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-5)


# --- the tests


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("kind", "per_head"), CASES)
def test_pool(kind, per_head, dtype):
    interpreted(pools, kind, per_head, (2, 3, 3, 5, 24), dtype)


@needs_triton
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_head_dimensions(dim):
    interpreted(pools, "attention", False, (1, 2, 2, 16, dim), torch.float32)
    interpreted(pages, 1, 2, 3, 16, dim, torch.float32)


@needs_triton
@pytest.mark.parametrize(("count", "page"), [(1, 1), (1, 63), (40, 3), (17, 16)])
def test_pages(count, page):
    interpreted(pages, 2, 3, count, page, 16, torch.float16)


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("share", range(1, 9))
def test_every_number_of_query_heads(share):
    for (kind, per_head), (cores, group) in itertools.product(CASES, [(1, 1), (7, 63), (2, 100)]):
        interpreted(pools, kind, per_head, (2, share, cores, group, 16), torch.float32)
        interpreted(pages, 2, share, cores, group, 16, torch.float32)


@needs_triton
def test_large_groups_are_left_to_torch():
    from longchat_cli.kernels import triton_pool

    assert triton_pool.fits(128, 128) and triton_pool.fits(63, 256)
    assert not triton_pool.fits(129, 128)
