"""Shared by methods that keep everything and look at all of it every few steps: the schedule.

After RefreshKV (Xu et al., ACL 2025), section 3: of `stride` steps the last sees all of the cache, the others
see part of it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from longchat_cli.attention.buffer import Buffer
from longchat_cli.attention.full import FullLayer
from longchat_cli.attention.layer import Rows, Seen, Step, seen_by
from longchat_cli.attention.rope import Rope
from longchat_cli.kernels import Observe, Span


class RefreshLayer(FullLayer):
    """Prompts and every `method.stride`-th decoding step see the whole cache, other steps see `part`."""

    watch: Observe | None = None  # what a full decoding step asks for

    def __init__(self, method: Any, rope: Rope | None) -> None:
        super().__init__(method, rope)
        self.query: Tensor | None = None  # [heads, dim], of the last full step that was looked at
        self.steps = 0  # since the last full one

    def spans(self, new: Step) -> list[Span]:
        if not new.decoding or self.query is None:
            # Cloned: a view would hold the queries of the whole prompt.
            self.query, self.steps = new.q[:, -1].clone(), 0
            self.kv.append(new.k, new.v)
            return seen_by(new, self.kv).spans()
        self.prepare(new)
        return super().spans(new)

    def foreseen(self, new: Rows) -> bool:
        return self.query is not None and type(self).spans is RefreshLayer.spans

    def joins(self, new: Rows) -> list[Buffer]:
        self.steps += 1
        if self.steps % self.method.stride == 0 and self.due(new):
            self.steps = 0
        return super().joins(new)

    def sees(self, new: Rows) -> list[Seen]:
        return self.part(new) if self.steps else [seen_by(new, self.kv, observe=self.watch)]

    def prepare(self, new: Step) -> None:
        """Called before a decoding step's token joins the cache."""

    def due(self, new: Rows) -> bool:
        """Whether a step at which the schedule allows it sees everything."""
        return True

    def part(self, new: Rows) -> list[Seen]:
        """What a partial step sees; the new token is in the cache already."""
        raise NotImplementedError
