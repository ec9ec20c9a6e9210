"""Shared by methods that read prompts with full attention and then keep few entries: the eviction.

Every KV head keeps entries of its own, in text order, at the positions they had. What was evicted is freed
and never returns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longchat_cli.attention.full import FullLayer
from longchat_cli.attention.layer import Method, Rows, Seen, Step, option, seen_by
from longchat_cli.attention.rope import Rope
from longchat_cli.attention.select import best
from longchat_cli.kernels import Observe, Span


@dataclass(frozen=True)
class Evicting(Method):
    """The budget of methods that evict."""

    dense_prompts = True
    budget: int = option(1024, "entries kept per KV head", low=1, budget=1)


class EvictingLayer(FullLayer):
    """Keeps a prompt whole until the first token is decoded after it, then `budget` entries by `weigh`.

    The last `newest` entries always stay. `weigh` may use `queries`, the last `window` ones of the prompt.
    """

    fixed = FullLayer.fixed | {"budget", "newest", "window"}
    newest = window = 0

    def __init__(self, method: Any, rope: Rope | None) -> None:
        super().__init__(method, rope)
        self.budget = method.budget
        self.queries: Tensor | None = None  # [heads, up to window, dim]
        self.prompt = False  # a prompt was read since the last eviction

    def spans(self, new: Step) -> list[Span]:
        if not new.decoding:
            self._remember(new.q)
        elif self.prompt:
            self.prompt = False
            if len(self.kv) > self.budget:
                self.evict(self.weigh(new))
        return super().spans(new)

    def foreseen(self, new: Rows) -> bool:
        """All but the eviction after a prompt."""
        return not self.prompt

    def sees(self, new: Rows) -> list[Seen]:
        return [seen_by(new, self.kv, observe=self.watch(new))]

    def watch(self, new: Rows) -> Observe | None:
        """The probabilities that `observe` wants of this step."""
        return None

    def weigh(self, new: Step) -> Tensor:
        """A score for every entry, [KV heads, entries]."""
        raise NotImplementedError

    def evict(self, scores: Tensor) -> None:
        """Keep the recent entries and those with the highest scores, within the budget."""
        if len(self.kv) > self.budget:
            self.keep(best(scores, self.budget, self.newest))

    def keep(self, index: Tensor) -> None:
        """Keep the entries at index int64 [KV heads, n] and free the others."""
        self.kv = self.kv.take(index)

    def visible(self) -> int:
        return len(self.kv)

    def _remember(self, queries: Tensor) -> None:
        if self.window:
            earlier = [self.queries] if self.prompt and self.queries is not None else []
            # Cloned: a view would hold the queries of the whole prompt.
            self.queries = torch.cat([*earlier, queries], dim=1)[:, -self.window :].clone()
        self.prompt = True
