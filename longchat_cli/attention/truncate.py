"""Truncation, the trivial baseline: the first and the last half of the budget, as if nothing was between."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longchat_cli.attention.full import Full
from longchat_cli.attention.layer import Cache, Run, option


@dataclass(frozen=True)
class Truncate(Full):
    """A prompt is cut to `budget` tokens before it is read; what is generated comes on top."""

    summary = "truncation: reads the first and the last half of --budget, nothing between"
    keeps = "--budget tokens of the text, half from its start and half from its end; all generated"
    forgets = "everything between, completely"
    cost = "reading and memory of --budget tokens"
    unlimited = True
    whole = True
    dense_prompts = False
    exact_rows = False  # the text, from which it begins anew, is not rewound
    budget: int = option(1024, "tokens of a prompt that are read", low=2, budget=1)

    def forward(self, run: Run, ids: Tensor, cache: Cache, logits: int) -> Tensor:
        logits = min(logits, len(ids))
        text, seen = torch.cat([cache.text, ids.cpu()]), cache.seen + len(ids)
        if not cache.decoding and seen > self.budget:
            head = self.budget // 2
            # Rows whose logits are wanted are read, however many.
            tail = max(self.budget - head, logits)
            ids = text = torch.cat([text[:head], text[-tail:]]) if len(text) > head + tail else text
            cache.restart(seen - len(text))
        cache.text = text
        return run(ids, cache, logits)
