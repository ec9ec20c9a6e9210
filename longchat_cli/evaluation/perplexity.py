"""Perplexity of a text by position."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Forward = Callable[[Sequence[int]], Any]
"""Reads the next n token ids into its state and returns their logits, a tensor of shape [n, vocabulary]."""


def losses(forward: Forward, ids: Sequence[int], chunk: int = 512) -> Iterator[list[float]]:
    """-ln p of each of `ids[1:]` given all before it, a list for each chunk; float32 softmax."""
    from torch import tensor
    from torch.nn.functional import cross_entropy

    for begin in range(0, len(ids) - 1, chunk):
        stop = min(begin + chunk, len(ids) - 1)
        logits = forward(ids[begin:stop])
        targets = tensor(list(ids[begin + 1 : stop + 1]), device=logits.device)
        yield cross_entropy(logits.float(), targets, reduction="none").tolist()


def by_position(values: Sequence[float], width: int) -> list[dict[str, float]]:
    """Perplexity of each `width` tokens: begin, end (target positions, 1 is the second token), perplexity."""
    return [
        {
            "begin": begin + 1,
            "end": begin + len(part),
            "perplexity": math.exp(math.fsum(part) / len(part)),
        }
        for begin in range(0, len(values), width)
        if (part := values[begin : begin + width])
    ]
