"""A whole decoding step in one call of the native library.

It serves where every layer says what its next queries see before they are known (`Layer.foreseen`): the new
keys and values are then written by the library into places reserved in the layers' buffers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int64
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longchat_cli import kernels
from longchat_cli.attention.buffer import Buffer, KVBuffer
from longchat_cli.attention.layer import Cache, Coming, Layer, Seen, Step
from longchat_cli.kernels import Bound, Rotation, native

ENTRY, BOUND = torch.bfloat16.itemsize, ctypes.sizeof(c_int64)
LOOK = native.Seen.keys.offset - native.Seen.cos.offset
"""Bytes of a span that do not say where its keys are."""


def serves(cache: Cache, rows: int) -> Coming | None:
    """The tokens to come, where they can be decoded at once."""
    if not cache.decoding or rows > native.ROWS or cache.position == 0:
        return None
    if kernels.forced() not in (None, "native"):
        return None
    new = Coming(cache.position, rows)
    for layer in cache.layers:
        if layer is None or layer.method.kv_dtype not in ("auto", "bf16"):
            return None
        if layer.seen != new.first or not layer.foreseen(new):
            return None
    return new


class Table:
    """What the library is told of every layer's state, from one step to the next."""

    def __init__(self, layers: int, dim: int) -> None:
        self.layers = (native.Layer * layers)()
        self.rows = [_Row(made, dim) for made in self.layers]

    def fill(self, layers: Sequence[Any], new: Coming, rotations: Sequence[Rotation]) -> None:
        """Let the tokens join every layer's buffers, their keys and values still to be written."""
        leads: dict[int, _Lead] = {}
        for row, layer, rotation in zip(self.rows, layers, rotations, strict=True):
            row.join(layer, new, rotation)
            lead = leads.get(id(layer.method)) if layer.alike else None
            if lead is not None:
                row.follow(layer, lead)
                continue
            seen = layer.sees(new)
            row.see(seen, new.rows)
            if layer.alike:
                leads[id(layer.method)] = _Lead(row, [_name(layer, one.buffer) for one in seen])

    def settle(self, layers: Sequence[Any], new: Coming, q: Tensor, scale: float) -> None:
        """Tell the layers that the tokens, of queries q [layers, heads, rows, dim], were read."""
        for index, (row, layer) in enumerate(zip(self.rows, layers, strict=True)):
            layer.seen = new.end
            if row.scores:
                k, v = row.newest(new.rows)
                layer.observe(row.scores, Step(q[index], k, v, new.first, scale, True))


class _Lead(NamedTuple):
    """A row that speaks for layers alike, and what these call the buffers that are seen."""

    row: _Row
    buffers: list[str]


def _name(layer: Layer, buffer: Buffer) -> str:
    return next(name for name, value in vars(layer).items() if value is buffer)


class _Row:
    """A layer's: its structures point to what is kept here."""

    def __init__(self, made: native.Layer, dim: int) -> None:
        self.made, self.step = made, dim * ENTRY
        self.k, self.v, self.k_head, self.v_head = made.k, made.v, made.k_head, made.v_head
        self.spans = (native.Seen * native.MOST_SPANS)()
        self.bounds = (c_int64 * (2 * native.MOST_SPANS * native.ROWS))()
        self.places = [_Address() for _ in range(2)]
        self.seen = [_Address() for _ in range(native.MOST_SPANS)]
        self.turns: list[Rotation | None] = [None] * native.MOST_SPANS
        self.looks = [ctypes.addressof(span) + native.Seen.cos.offset for span in self.spans]
        self.scores: list[Tensor | None] = []
        made.spans = ctypes.addressof(self.spans)

    def join(self, layer: Layer, new: Coming, rotation: Rotation) -> None:
        made = self.made
        joined = layer.joins(new)
        for place, buffer in enumerate(joined):
            assert isinstance(buffer, KVBuffer)
            at = buffer.reserve(new.rows) * self.step
            known = self.places[place]
            if known.memory is not buffer.memory:
                known.look(buffer)
                self.k_head[place], self.v_head[place] = known.k_head, known.v_head
            self.k[place], self.v[place] = known.k + at, known.v + at
        if len(joined) == 1:
            self.k[1] = self.v[1] = 0
        self.joined = joined[0]
        made.cos, made.sin = rotation.cos.data_ptr(), rotation.sin.data_ptr()
        made.planes = rotation.cos.shape[1]

    def see(self, seen: Sequence[Seen], rows: int) -> None:
        self.made.n_spans, self.scores = len(seen), []
        for place, one in enumerate(seen):
            self._see(place, one, rows)

    def follow(self, layer: Layer, lead: _Lead) -> None:
        """See of one's own buffers what the lead sees of its."""
        self.made.n_spans, self.scores = len(lead.buffers), []
        for place, name in enumerate(lead.buffers):
            self._locate(place, getattr(layer, name))
            self.turns[place] = lead.row.turns[place]
            ctypes.memmove(self.looks[place], lead.row.looks[place], LOOK)

    def newest(self, rows: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the tokens just read."""
        end = self.joined.end
        return self.joined.between(end - rows, end)

    def _see(self, place: int, seen: Seen, rows: int) -> None:
        span, buffer = self.spans[place], seen.buffer
        self._locate(place, buffer)
        start = 2 * place * native.ROWS
        self._bound(start, seen.start, buffer.first, rows)
        self._bound(start + native.ROWS, seen.stop, buffer.first, rows)
        span.start = ctypes.addressof(self.bounds) + start * BOUND
        span.stop = span.start + native.ROWS * BOUND
        if seen.turn is not self.turns[place]:
            self.turns[place] = turn = seen.turn
            span.cos, span.sin = (turn.cos.data_ptr(), turn.sin.data_ptr()) if turn else (None, None)
            span.planes, span.interleaved = (turn.cos.shape[1], turn.interleaved) if turn else (0, False)
        span.observe = 0
        if seen.observe is not None:
            score = torch.empty(span.groups, len(buffer))
            self.scores.append(score)
            span.observe_groups, span.observed = span.groups, score.data_ptr()
            span.observe_rows = seen.observe.rows == "sum"
            span.observe = native.REDUCE[seen.observe.heads]

    def _locate(self, place: int, buffer: Buffer) -> None:
        """Where the keys and values of a span are."""
        assert isinstance(buffer, KVBuffer)
        span, known = self.spans[place], self.seen[place]
        if known.memory is not buffer.memory:
            known.look(buffer)
            span.k_head, span.k_key = known.k_head, self.step // ENTRY
            span.v_head, span.v_key = known.v_head, self.step // ENTRY
            span.groups = known.groups
        at = buffer.offset * self.step
        span.k, span.v, span.keys = known.k + at, known.v + at, len(buffer)

    def _bound(self, at: int, bound: Bound, first: int, rows: int) -> None:
        if isinstance(bound, int):
            for row in range(at, at + rows):
                self.bounds[row] = bound - first
        else:
            self.bounds[at : at + rows] = (bound - first).tolist()


class _Address:
    """Where a buffer's memory is, as long as `memory` is the buffer's."""

    memory: Any = None

    def look(self, buffer: KVBuffer) -> None:
        k, v = buffer.tensors()
        self.memory, self.groups = buffer.memory, k.shape[0]
        self.k, self.v = k.data_ptr(), v.data_ptr()
        self.k_head, self.v_head = k.stride(0), v.stride(0)
