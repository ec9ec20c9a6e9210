"""Spans as any method could return them, for tests of kernels."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from longchat_cli.kernels import Observe, Rotation, Span, packed
from longchat_cli.kernels.span import INDEX_ROWS

SIZES = [1, 2, 7, 63, 64, 100]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rotation(rows: int, planes: int, interleaved: bool, seed: int = 0) -> Rotation:
    angles = normal(rows, planes, seed=seed) * 3
    return Rotation(angles.cos(), angles.sin(), interleaved)


def random_index(groups: int, rows: int, keys: int, seed: int) -> Tensor:
    """A list of distinct keys in any order for each run of rows, filled up with -1 anywhere."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(groups, -(-rows // INDEX_ROWS), keys, generator=generator).argsort(-1)
    filler = torch.rand(order.shape, generator=generator) < 0.3
    return order.masked_fill(filler, -1)[..., : max(1, keys // 2)]


def random_span(
    rng: random.Random,
    heads: int,
    groups: int,
    rows: int,
    dim: int,
    seed: int,
    dtype: torch.dtype = torch.float32,
) -> Span:
    """Any span a method could return: bounds of any kind, per head, packed, listed, turned, observed."""
    keys = rng.choice(SIZES)
    count = heads if rng.random() < 0.2 else groups
    k, v = (normal(count, keys, dim, seed=seed + i, dtype=dtype) for i in (0, 1))
    held: tuple[packed.Keys, packed.Keys] = k, v
    if rng.random() < 0.2:
        kind = rng.choice(list(packed.LIMITS))
        held = packed.pack(k, kind, per_channel=keys % packed.RUN == 0), packed.pack(v, kind, False)
    if rng.random() < 0.5:
        start, stop = rng.randint(0, keys), rng.choice([None, rng.randint(0, keys)])
    else:
        generator = torch.Generator().manual_seed(seed)
        width = rng.choice([3, keys, 1])
        stop = torch.randint(0, keys + 1, (rows,), generator=generator).sort().values
        start = (stop - width).clamp(min=0)
        if rng.random() < 0.3:  # no order between rows
            shuffle = torch.randperm(rows, generator=generator)
            start, stop = start[shuffle], stop[shuffle]
    turn = (
        rotation(rows, rng.choice([dim // 2, dim // 4]), rng.random() < 0.5, seed)
        if rng.random() < 0.3
        else None
    )
    if rng.random() < 0.3:
        return Span(*held, start, stop, turn, index=random_index(count, rows, keys, seed))
    observe = None
    if rng.random() < 0.5:
        observe = Observe(rng.choice(["last", "sum"]), rng.choice(["max", "mean", "sum"]))
    return Span(*held, start, stop, turn, observe)


def check(q: Tensor, span: Span) -> None:
    """That a span keeps the rules that kernels rely on, for queries [heads, rows, dim]."""
    rows, (groups, keys, dim) = q.shape[1], span.k.shape
    assert tuple(span.v.shape[:2]) == (groups, keys) and keys > 0
    assert q.shape[0] % groups == 0 and q.shape[2] == dim
    for bound in span.limits():
        if isinstance(bound, Tensor):
            assert bound.dtype == torch.int64 and bound.shape in ((rows,), (1,))
    assert (torch.as_tensor(span.limits()[1]) <= keys).all()
    if span.turn is not None:
        assert span.turn.cos.shape == span.turn.sin.shape and len(span.turn.cos) in (1, rows)
    if span.index is not None:
        assert span.observe is None and span.index.dtype == torch.int64
        assert span.index.shape[:2] == (groups, -(-rows // INDEX_ROWS))
        for listed in span.index.flatten(0, 1).tolist():
            real = [key for key in listed if key != -1]
            assert len(set(real)) == len(real) and all(0 <= key < keys for key in real)
