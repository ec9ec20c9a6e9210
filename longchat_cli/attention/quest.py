"""Quest (Tang et al., ICML 2024): everything is kept, a step reads the pages that can matter to its query."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longchat_cli.attention.buffer import KVBuffer
from longchat_cli.attention.full import FullLayer
from longchat_cli.attention.layer import Method, Step, option
from longchat_cli.attention.rope import Rope
from longchat_cli.kernels import Span
from longchat_cli.kernels.pooling import page_bounds, page_scores

LEAST = 3
"""Pages read under the smallest budget."""


@dataclass(frozen=True)
class Quest(Method):
    """Quest section 3; pages are chosen per KV head, in decoding alone.

    The paper has no grouped queries. On the default model the mean of a group's scores reads better than the
    maximum: perplexity 40.1 against 42.2 of 120 tokens after 5,800 of a book, --budget 512 (all keys: 37.1).
    Its bounds over 16 keys are loose: of 4 needles in 6,000 tokens --budget 768 finds none, --page 4 half
    (3 by the maximum), and pages chosen by the attention itself would do.
    """

    summary = "Quest: each step reads the pages of keys that its query can match"
    keeps = "every token, and the bounds of every --page keys"
    forgets = "nothing; a step misses what stands on pages it does not choose"
    cost = "reading as full; a step looks at 2 / --page of the keys and reads --budget; memory 1 + 1 / page"
    dense_prompts = True
    budget: int = option(1024, "tokens read per step, in whole pages", low=1, budget=1)
    page: int = option(16, "tokens per page", low=1)
    dense: int = option(2, "first layers that always read everything", low=0)
    heads: str = option("mean", "how a KV head's query heads join", choices=("mean", "max"))

    def layer(self, index: int, layers: int, rope: Rope | None) -> FullLayer:
        return FullLayer(self, rope) if index < self.dense else QuestLayer(self, rope)


class QuestLayer(FullLayer):
    def __init__(self, method: Quest, rope: Rope | None) -> None:
        super().__init__(method, rope)
        self.bounds = KVBuffer()  # least and greatest of every channel over each full page
        self.rest: Tensor | None = None  # keys of the unfinished page

    def spans(self, new: Step) -> list[Span]:
        spans = super().spans(new)
        self._bound(new.k)
        count = max(LEAST, self.method.budget // self.method.page)
        if not new.decoding or new.rows > 1 or len(self.bounds) <= count:
            return spans
        scores = page_scores(new.q, self.bounds.k, self.bounds.v, self.method.heads)
        index = self._tokens(scores.topk(count).indices, new)
        return [Span(k, v, index=_within(index - first, k.shape[1])) for k, v, first in self.kv.parts()]

    def _bound(self, k: Tensor) -> None:
        """Bounds of the pages that the new keys finish."""
        k = k if self.rest is None else torch.cat([self.rest, k], dim=1)
        whole = k.shape[1] // self.method.page * self.method.page
        if whole:
            self.bounds.append(*page_bounds(k[:, :whole], self.method.page))
        self.rest = k[:, whole:].clone()

    def _tokens(self, pages: Tensor, new: Step) -> Tensor:
        """Tokens of pages [KV heads, n] and of the unfinished page, in order: int64 [KV heads, 1, tokens]."""
        page = torch.arange(self.method.page, device=pages.device)
        chosen = (pages.sort().values.unsqueeze(-1) * self.method.page + page).flatten(1)
        last = torch.arange(len(self.bounds) * self.method.page, new.end, device=pages.device)
        return torch.cat([chosen, last.expand(len(pages), -1)], dim=1).unsqueeze(1)


def _within(index: Tensor, keys: int) -> Tensor:
    """An index into one part of the buffer: -1 for tokens of other parts."""
    return torch.where((index >= 0) & (index < keys), index, -1)
