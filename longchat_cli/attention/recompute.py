"""Sliding window with re-computation: the quality oracle of streaming (StreamingLLM, ICLR 2024, figure 1c).

Each token is predicted from a fresh reading of the tokens before it, as if the text began there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longchat_cli.attention.full import Full
from longchat_cli.attention.layer import Cache, Run, option
from longchat_cli.errors import UsageError


@dataclass(frozen=True)
class Recompute(Full):
    """A reading serves `stride` tokens: it begins at a multiple of it, at most `window` tokens back."""

    summary = "sliding window read anew for every token: slow, the quality oracle of streaming"
    keeps = "the last --window tokens, as text"
    forgets = "everything older, completely"
    cost = "a reading of --window tokens for every --stride tokens; memory of one such reading"
    unlimited = True
    whole = True
    dense_prompts = False
    exact_rows = False  # the text, from which it begins anew, is not rewound
    window: int = option(1024, "tokens that a reading sees at most", low=1, budget=1)
    stride: int = option(1, "tokens that a reading serves; 1 as published", low=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stride > self.window:
            raise UsageError(f"--stride is {self.stride}", f"it must be at most --window, {self.window}")

    def forward(self, run: Run, ids: Tensor, cache: Cache, logits: int) -> Tensor:
        first, end = cache.seen, cache.seen + len(ids)
        begin = first - len(cache.text)
        text = torch.cat([cache.text, ids.cpu()])
        out, at = [], max(end - max(logits, 1), first)
        while at < end:
            start = self._start(at)
            stop = at + 1
            while stop < end and self._start(stop) == start:
                stop += 1
            # Tokens of a reading in progress are read on; what only older readings see is left unread.
            if start != cache.skipped:
                cache.restart(start)
            out.append(run(text[cache.seen - begin : stop - begin], cache, stop - at))
            at = stop
        cache.text = text[-self.window :].clone()
        return torch.cat(out)[-logits:] if logits else out[0][:0]

    def _start(self, position: int) -> int:
        """Where the reading that serves `position` begins."""
        return max(-(-(position + 1 - self.window) // self.stride), 0) * self.stride
