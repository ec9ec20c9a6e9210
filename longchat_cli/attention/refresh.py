"""Shared by methods that keep everything and look at all of it every few steps: the schedule.

After RefreshKV (Xu et al., ACL 2025), section 3: of `stride` steps the last sees all of the cache, the others
see part of it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from longchat_cli.attention.full import FullLayer
from longchat_cli.attention.layer import Step, causal
from longchat_cli.attention.rope import Rope
from longchat_cli.kernels import Observe, Span


class RefreshLayer(FullLayer):
    """Prompts and every `method.stride`-th decoding step see the whole cache, other steps see `part`."""

    watch: Observe | None = None  # what a full decoding step asks for

    def __init__(self, method: Any, rope: Rope | None) -> None:
        super().__init__(method, rope)
        self.query: Tensor | None = None  # [heads, dim] of the last full step
        self.steps = 0  # since the last full one

    def spans(self, new: Step) -> list[Span]:
        if not new.decoding or self.query is None:
            self._refreshed(new)
            return super().spans(new)
        self.prepare(new)
        self.kv.append(new.k, new.v)
        self.steps += 1
        if self.steps % self.method.stride == 0 and self.due(new):
            self._refreshed(new)
            return causal(self.kv, new, observe=self.watch)
        return self.part(new)

    def prepare(self, new: Step) -> None:
        """Called before a decoding step's token joins the cache."""

    def due(self, new: Step) -> bool:
        """Whether a step at which the schedule allows it sees everything."""
        return True

    def part(self, new: Step) -> list[Span]:
        """What a partial step sees; the new token is in the cache already."""
        raise NotImplementedError

    def _refreshed(self, new: Step) -> None:
        # Cloned: a view would hold the queries of the whole prompt.
        self.query, self.steps = new.q[:, -1].clone(), 0
