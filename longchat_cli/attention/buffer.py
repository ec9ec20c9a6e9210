"""Where a layer keeps keys and values: buffers that grow at the end and forget from the front.

`KVBuffer` keeps them as they come, `PackedBuffer` all but the most recent ones in few bits.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from longchat_cli.errors import UsageError
from longchat_cli.kernels import native
from longchat_cli.kernels.packed import RUN, Grid, Keys, Packed, common_grid, dense, pack, rows_at


class Storage:
    """Tensors [heads, n, ...] that share n: append at the end, drop from the front.

    `first` and `end` are absolute indices of what is live. A copy shares the memory until one of the two
    would write where another copy still looks; making room always allocates anew.
    """

    granule: ClassVar[int] = 1  # capacities are multiples of it

    def __init__(self, first: int = 0) -> None:
        self.first = self.end = first
        self._tensors: tuple[Tensor, ...] = ()
        self._offset = self._expected = 0
        self._sharing: weakref.WeakSet[Storage] = weakref.WeakSet([self])
        self.memory = [0]  # shared with copies on the same memory: how far that was ever written
        self._origin = object()  # shared with copies: their common entries are the same

    def __len__(self) -> int:
        return self.end - self.first

    def live(self) -> list[Tensor]:
        return [x[:, self._offset : self._offset + len(self)] for x in self._tensors]

    def room(self, count: int) -> int:
        """The capacity made for `count` entries, before it is rounded up to granules."""
        return count + 1 + count // 16

    def append(self, *new: Tensor) -> None:
        more = new[0].shape[1]
        behind = self.reserve(more, new)
        for x, added in zip(self._tensors, new, strict=True):
            x.narrow(1, behind, more).copy_(added)

    def expect(self, end: int) -> None:
        """Entries up to the absolute index `end` are about to come: room for all is made once."""
        self._expected = end

    def reserve(self, more: int, like: Sequence[Tensor] = ()) -> int:
        """Count in `more` entries at the end, which are written later; their place in the memory.

        `like`: tensors of the shape of entries, where there may be none yet.
        """
        live = self.end - self.first
        behind = self._offset + live
        if not self._tensors or behind + more > self._tensors[0].shape[1] or self._looked_at(behind):
            self._move(self._capacity(live + more), like or self._tensors)
            behind = live
        self.memory[0] = behind + more
        self.end += more
        return behind

    def drop_before(self, index: int) -> None:
        """Forget what stands before the absolute `index`; memory beyond what decoding needs is given back."""
        dropped = min(max(index - self.first, 0), len(self))
        self.first += dropped
        self._offset += dropped
        usual = self._capacity(len(self) + 1)
        if self._tensors and self._tensors[0].shape[1] > usual + self.granule:
            self._move(usual, self._tensors)

    def drop_after(self, index: int) -> None:
        """Forget what stands at the absolute `index` and behind."""
        self.end = max(min(self.end, index), self.first)

    def tensors(self) -> list[Tensor]:
        return list(self._tensors)

    @property
    def offset(self) -> int:
        """Where in the memory the first live entry is."""
        return self._offset

    def copy(self) -> Self:
        other = type(self).__new__(type(self))  # copy.copy takes twice as long, per layer and token
        vars(other).update(vars(self))
        self._sharing.add(other)
        return other

    def extends(self, earlier: Storage) -> bool:
        """Whether this is what `earlier`, a mark of it, held and what came behind since, if anything."""
        return self._origin is earlier._origin and self.first == earlier.first and self.end >= earlier.end

    def state(self) -> dict[str, Any]:
        """What `of` makes an equal one of."""
        return {"first": self.first, "tensors": self.live()}

    @classmethod
    def of(cls, first: int, tensors: Sequence[Tensor], **more: Any) -> Self:
        made = cls(first, **more)
        if tensors:
            Storage.append(made, *tensors)
        return made

    def _capacity(self, count: int) -> int:
        count = max(count, self._expected - self.first)
        return -(-self.room(count) // self.granule) * self.granule

    def _looked_at(self, at: int) -> bool:
        """Whether another one on this memory holds entries from `at` on: a mark of another branch."""
        return at < self.memory[0] and any(
            other._offset + len(other) > at for other in self._sharing if other is not self
        )

    def _move(self, capacity: int, like: Sequence[Tensor]) -> None:
        moved = tuple(native.empty(x, x.shape[0], capacity, *x.shape[2:]) for x in like)
        for x, live in zip(moved, self.live(), strict=False):
            x[:, : len(self)] = live
        self._tensors, self._offset, self.memory = moved, 0, [len(self)]
        self._sharing.discard(self)
        self._sharing = weakref.WeakSet([self])


class Buffer:
    """Keys and values [heads, tokens, dim] of consecutive tokens, `first` to `end` in absolute indices."""

    first: int
    end: int

    def __len__(self) -> int:
        return self.end - self.first

    def append(self, *new: Tensor) -> None:
        """Take the next tokens' keys and values [heads, n, dim]."""
        raise NotImplementedError

    def expect(self, end: int) -> None:
        """Tokens up to the absolute index `end` are about to come."""

    def drop_before(self, index: int) -> None:
        """Forget tokens before the absolute `index`."""
        raise NotImplementedError

    def drop_after(self, index: int) -> None:
        """Forget tokens from the absolute `index` on."""
        raise NotImplementedError

    def parts(self) -> list[tuple[Keys, Keys, int]]:
        """What is kept as (keys, values, absolute index of the first), in order.

        The first part may begin before `first`, with tokens that were dropped from a run still in use.
        """
        raise NotImplementedError

    def gather(self, index: Tensor) -> KVBuffer:
        """A plain buffer of the entries at index int64 [heads, n] from the front, up to the same end."""
        raise NotImplementedError

    def take(self, index: Tensor) -> Buffer:
        """As `gather`, in a buffer like this one."""
        raise NotImplementedError

    def tensors(self) -> list[Tensor]:
        """The memory held."""
        raise NotImplementedError

    def copy(self) -> Self:
        """A mark in O(1)."""
        raise NotImplementedError

    @property
    def k(self) -> Tensor:
        return self.between(self.first, self.end)[0]

    @property
    def v(self) -> Tensor:
        return self.between(self.first, self.end)[1]

    def between(self, low: int, high: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the tokens at absolute indices low to high, unpacked."""
        found = [
            [dense(x)[:, max(low - at, 0) : high - at] for x in (k, v)]
            for k, v, at in self.parts()
            if at < high and low < at + k.shape[1]
        ]
        k, v = (x[0] if len(x) == 1 else torch.cat(x, dim=1) for x in zip(*found, strict=True))
        return k, v

    def fill(self, count: int, k: Tensor, v: Tensor) -> None:
        """Append of k, v what is missing to the first `count` tokens."""
        missing = min(count - len(self), k.shape[1])
        if missing > 0:
            self.append(k[:, :missing], v[:, :missing])


class KVBuffer(Storage, Buffer):
    """Keys and values as they come, or kept as `stored` and read in the dtype they came in."""

    granule = 64

    def __init__(
        self, first: int = 0, stored: torch.dtype | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(first)
        self.stored, self.dtype = stored, dtype

    @property
    def k(self) -> Tensor:
        return self._read(0)

    @property
    def v(self) -> Tensor:
        return self._read(1)

    def room(self, count: int) -> int:
        """An eighth more: a bounded method settles on one size."""
        return count + max(self.granule, count // 8)

    def append(self, *new: Tensor) -> None:
        self.dtype = new[0].dtype
        super().append(*(new if self.stored is None else (x.to(self.stored) for x in new)))

    def parts(self) -> list[tuple[Keys, Keys, int]]:
        return [(self.k, self.v, self.first)] if len(self) else []

    def gather(self, index: Tensor) -> KVBuffer:
        kept = self.live()
        taken = KVBuffer(self.end - index.shape[1], self.stored, self.dtype)
        taken.reserve(index.shape[1], kept)
        for x, to in zip(kept, taken.live(), strict=True):
            native.gather(x, index, to)
        return taken

    def take(self, index: Tensor) -> KVBuffer:
        return self.gather(index)

    def state(self) -> dict[str, Any]:
        return {**super().state(), "stored": self.stored, "dtype": self.dtype}

    def _read(self, which: int) -> Tensor:
        x = self._tensors[which].narrow(1, self._offset, self.end - self.first)
        return x if self.stored is None else x.to(self.dtype)


class Recent(KVBuffer):
    """The last tokens of a packed buffer: no more room than they need."""

    granule = RUN

    def room(self, count: int) -> int:
        return count


class PackedBuffer(Buffer):
    """Keys and values in few bits (KIVI, Liu et al., ICML 2024): keys per channel, values per token.

    What one call appends is exact, and so are at least RUN tokens before it: whole runs of RUN tokens further
    back are packed when the next call comes. So what is packed depends on nothing but where that call begins,
    and no query sees fewer exact keys than in decoding token by token.
    """

    def __init__(self, kind: str, first: int = 0) -> None:
        self.kind, self.first = kind, first
        self._start = first  # where the runs are counted from
        self._runs = Storage()  # each tensor of the packed keys, then values, a run an entry
        self._recent: KVBuffer = Recent(first)
        self._grid: Grid = ()  # of keys that were taken: on one grid they are not rounded again

    @property
    def end(self) -> int:  # type: ignore[override]
        return self._recent.end

    def append(self, *new: Tensor) -> None:
        if self.kind == "int4" and any(x.shape[2] % 2 for x in new):
            raise UsageError("--kv-dtype int4 cannot serve this model", "its heads have an odd width")
        self._pack()
        self._recent.append(*new)

    def drop_before(self, index: int) -> None:
        """Whole runs are freed; of the first one in use `first` says where it begins to count."""
        self.first = max(self.first, min(index, self.end))
        whole = (self.first - self._start) // RUN
        if whole > self._runs.end:
            self._recent.drop_before(self._start + whole * RUN)
            self._runs = Storage(whole)
        self._runs.drop_before(whole)

    def parts(self) -> list[tuple[Keys, Keys, int]]:
        older = [(*self._packed(), self._start + self._runs.first * RUN)] if len(self._runs) else []
        return [*older, *self._recent.parts()]

    def gather(self, index: Tensor) -> KVBuffer:
        older = len(self._runs) * RUN
        index = index + (self.first - self.parts()[0][2])
        if not older:
            return self._recent.gather(index)
        is_old, at = (index < older).unsqueeze(-1), (index - older).clamp(min=0)
        pairs = zip(self._packed(), (self._recent.k, self._recent.v), strict=True)
        taken = KVBuffer(self.end - index.shape[1])
        # Where an entry is not old, the last old one stands in.
        taken.append(
            *(
                torch.where(is_old, old.take(index.clamp(max=older - 1)), rows_at(new, at))
                for old, new in pairs
            )
        )
        return taken

    def take(self, index: Tensor) -> PackedBuffer:
        """Keys that are packed again share one grid per channel, so that taking over and over rounds once."""
        chosen = self.gather(index)
        taken = PackedBuffer(self.kind, chosen.first)
        taken._grid = common_grid(chosen.k, self.kind, self._grid)
        taken._recent.append(chosen.k, chosen.v)
        taken._pack()
        return taken

    def state(self) -> dict[str, Any]:
        """What `of` makes an equal one of."""
        return dict(vars(self))

    @classmethod
    def of(cls, kind: str, _grid: Sequence[Tensor], **more: Any) -> Self:
        """Raises TypeError where `more` is not what `state` gave."""
        made = cls(kind)
        found, wanted = more | {"kind": kind, "_grid": tuple(_grid)}, vars(made)
        if {name: type(x) for name, x in found.items()} != {name: type(x) for name, x in wanted.items()}:
            raise TypeError("not the state of a packed buffer")
        vars(made).update(found)
        return made

    def tensors(self) -> list[Tensor]:
        return [*self._runs.tensors(), *self._recent.tensors(), *self._grid]

    def copy(self) -> Self:
        other = type(self).__new__(type(self))
        vars(other).update(vars(self))
        other._runs, other._recent = self._runs.copy(), self._recent.copy()
        return other

    def _pack(self) -> None:
        """Pack the whole runs that RUN or more tokens follow."""
        count = len(self._recent) // RUN - 1
        if count <= 0:
            return
        k, v = (x[:, : count * RUN] for x in (self._recent.k, self._recent.v))
        packed = pack(k, self.kind, per_channel=True, grid=self._grid), pack(v, self.kind, per_channel=False)
        self._runs.append(*(x for part in packed for x in part.by_run()))
        self._recent.drop_before(self._recent.first + count * RUN)

    def _packed(self) -> tuple[Packed, Packed]:
        tensors = self._runs.live()
        half = len(tensors) // 2
        return Packed.of_runs(tensors[:half]), Packed.of_runs(tensors[half:])
