"""Where a layer keeps keys and values: buffers that grow at the end and forget from the front."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from longchat_cli.kernels.packed import Keys

GRANULE = 64


def _capacity(tokens: int) -> int:
    """Room for `tokens` and an eighth more, in granules: a bounded method settles on one size."""
    return -(-(tokens + max(256, tokens // 8)) // GRANULE) * GRANULE


class KVBuffer:
    """Keys and values [heads, tokens, dim] of consecutive tokens: append at the end, drop from the front.

    `first` and `end` are absolute indices of the live tokens. A copy shares the storage until one of the two
    would write where another copy still looks; making room always allocates anew.
    """

    def __init__(self, first: int = 0) -> None:
        self.first = self.end = first
        self._k: Tensor | None = None
        self._v: Tensor | None = None
        self._offset = 0
        self._sharing: weakref.WeakSet[KVBuffer] = weakref.WeakSet([self])

    def __len__(self) -> int:
        return self.end - self.first

    @property
    def k(self) -> Tensor:
        assert self._k is not None
        return self._k[:, self._offset : self._offset + len(self)]

    @property
    def v(self) -> Tensor:
        assert self._v is not None
        return self._v[:, self._offset : self._offset + len(self)]

    def append(self, k: Tensor, v: Tensor) -> None:
        live, new = len(self), k.shape[1]
        behind = self._offset + live
        if self._k is None or behind + new > self._k.shape[1] or self._looked_at(behind):
            self._move(_capacity(live + new), k, v)
        assert self._k is not None and self._v is not None
        at = slice(self._offset + live, self._offset + live + new)
        self._k[:, at], self._v[:, at] = k, v
        self.end += new

    def drop_before(self, index: int) -> None:
        """Forget tokens before the absolute `index`; storage beyond what decoding needs is given back."""
        dropped = min(max(index - self.first, 0), len(self))
        self.first += dropped
        self._offset += dropped
        usual = _capacity(len(self) + 1)
        if self._k is not None and self._v is not None and self._k.shape[1] > usual + GRANULE:
            self._move(usual, self._k, self._v)

    def fill(self, count: int, k: Tensor, v: Tensor) -> None:
        """Append of k, v what is missing to the first `count` tokens."""
        missing = min(count - len(self), k.shape[1])
        if missing > 0:
            self.append(k[:, :missing], v[:, :missing])

    def take(self, index: Tensor) -> KVBuffer:
        """A buffer of the entries at index int64 [heads, n] from the front, up to the same end."""
        taken = KVBuffer(self.end - index.shape[1])
        taken.append(*(torch.take_along_dim(x, index.unsqueeze(-1), dim=1) for x in (self.k, self.v)))
        return taken

    def parts(self) -> list[tuple[Keys, Keys, int]]:
        """What is kept as (keys, values, absolute index of the first), in order."""
        return [(self.k, self.v, self.first)] if len(self) else []

    def tensors(self) -> list[Tensor]:
        return [x for x in (self._k, self._v) if x is not None]

    def copy(self) -> KVBuffer:
        other = KVBuffer.__new__(KVBuffer)  # copy.copy takes twice as long, per layer and token
        vars(other).update(vars(self))
        self._sharing.add(other)
        return other

    def _looked_at(self, at: int) -> bool:
        """Whether another buffer on this storage holds tokens from `at` on: a mark of another branch."""
        return any(other._offset + len(other) > at for other in self._sharing if other is not self)

    def _move(self, capacity: int, k: Tensor, v: Tensor) -> None:
        live = len(self)
        moved_k = k.new_empty(k.shape[0], capacity, k.shape[2])
        moved_v = v.new_empty(v.shape[0], capacity, v.shape[2])
        if self._k is not None and live:
            moved_k[:, :live], moved_v[:, :live] = self.k, self.v
        self._k, self._v, self._offset = moved_k, moved_v, 0
        self._sharing.discard(self)
        self._sharing = weakref.WeakSet([self])
