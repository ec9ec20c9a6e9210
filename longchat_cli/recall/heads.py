"""Finding by the model's own attention: keys of retrieval heads as an index, a question's queries as the search.

A document is read in independent windows; the keys of the chosen heads are kept unrotated in int8, no values.
A question's queries meet every key at one fixed distance; each question token and head takes a softmax over
the whole document, and the maximum over tokens and the heads of a KV group, summed over heads, scores a key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from longchat_cli.attention.full import FullLayer
from longchat_cli.attention.layer import Cache, Method, Step
from longchat_cli.attention.rope import Rope
from longchat_cli.kernels import Span

WINDOW = 1024
"""Tokens of one reading window."""
LEAD = 64
"""Tokens before a window that are read again as its lead-in: they take the attention sink and give context."""
DISTANCE = 64
"""Positions between a question's queries and every key."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True, order=True)
class Head:
    """A query head: its layer and its index in the layer."""

    layer: int
    head: int


class Reader(Protocol):
    """A decoder that can be read up to some depth; both decoders of the package can."""

    layers: int

    def new_cache(self, method: Method) -> Cache: ...

    def read(self, ids: Tensor, cache: Cache, depth: int) -> Any: ...


@dataclass(frozen=True)
class Tap(Method):
    """Full attention that leaves the queries of its last call to be looked at."""

    summary = keeps = forgets = cost = ""
    needs_rope = True

    def layer(self, index: int, layers: int, rope: Rope | None) -> TapLayer:
        return TapLayer(rope)


class TapLayer(FullLayer):
    def __init__(self, rope: Rope | None) -> None:
        super().__init__(rope)
        self.queries: Tensor | None = None
        self.scale = 1.0

    def spans(self, new: Step) -> list[Span]:
        self.queries, self.scale = new.q, new.scale
        return super().spans(new)

    def unrotated_keys(self) -> Tensor:
        """[KV heads, tokens, dim], as if every token stood at position 0."""
        return self._at(self.kv.k, torch.zeros(len(self.kv)))

    def queries_at(self, position: int) -> Tensor:
        """[heads, rows, dim], every query as if it stood at `position`."""
        assert self.queries is not None
        return self._at(self.queries, torch.full((self.queries.shape[1],), float(position)))

    def _at(self, x: Tensor, positions: Tensor) -> Tensor:
        if self.rope is None:
            return x
        return self.rope.rotation(positions - torch.arange(x.shape[1])).apply(x)


class KeyIndex:
    """int8 keys of some heads over a document: `keys` [KV heads chosen, tokens, dim], `scales` [.., tokens].

    `heads` are the query heads that search; `rows` says which row of `keys` each of them reads.
    """

    def __init__(self, heads: Sequence[Head], rows: Sequence[int], keys: Tensor, scales: Tensor) -> None:
        self.heads, self.rows, self.keys, self.scales = list(heads), list(rows), keys, scales

    @property
    def bytes(self) -> int:
        return self.keys.nbytes + self.scales.nbytes

    def score_tokens(self, queries: Tensor) -> Tensor:
        """queries [heads, rows, dim], scaled -> scores float32 [tokens], at most one per KV head."""
        per_key = torch.zeros(len(self.keys), self.keys.shape[1])
        for query, row in zip(queries, self.rows, strict=True):
            logits = (query @ self.keys[row].to(query.dtype).t()).float() * self.scales[row]
            per_key[row] = torch.maximum(per_key[row], logits.softmax(dim=-1).amax(dim=0))
        return per_key.sum(dim=0)


def read_keys(
    decoder: Reader, ids: Sequence[int], heads: Sequence[Head], group: int, progress: Progress | None = None
) -> KeyIndex:
    """Read token `ids` in windows of `WINDOW` and keep the keys that `heads` need.

    `group` is the number of query heads per KV head.
    """
    wanted = sorted({(head.layer, head.head // group) for head in heads})
    rows = [wanted.index((head.layer, head.head // group)) for head in heads]
    depth = max(head.layer for head in heads) + 1
    keys, scales = [], []
    for start in range(0, len(ids), WINDOW):
        cache = decoder.new_cache(Tap())
        lead = ids[max(start - LEAD, 0) : start] or ids[:LEAD]
        decoder.read(torch.tensor([*lead, *ids[start : start + WINDOW]]), cache, depth)
        found = torch.stack([_tap(cache, layer).unrotated_keys()[kv, len(lead) :] for layer, kv in wanted])
        found = found.float()
        scale = found.abs().amax(dim=-1).clamp(min=1e-8) / 127
        keys.append((found / scale.unsqueeze(-1)).round().to(torch.int8))
        scales.append(scale)
        if progress:
            progress(min(start + WINDOW, len(ids)), len(ids))
    return KeyIndex(heads, rows, torch.cat(keys, dim=1), torch.cat(scales, dim=1))


def search_queries(decoder: Reader, ids: Sequence[int], heads: Sequence[Head]) -> Tensor:
    """The scaled queries of question `ids` at the fixed distance: [heads, rows, dim]."""
    cache = decoder.new_cache(Tap())
    decoder.read(torch.tensor(ids), cache, max(head.layer for head in heads) + 1)
    taps = {head.layer: _tap(cache, head.layer) for head in heads}
    queries = {layer: tap.queries_at(DISTANCE).float() * tap.scale for layer, tap in taps.items()}
    return torch.stack([queries[head.layer][head.head] for head in heads])


def _tap(cache: Cache, layer: int) -> TapLayer:
    tap = cache.layers[layer]
    assert isinstance(tap, TapLayer)
    return tap


def all_heads(layers: int, heads: int, first_layer: int = 0) -> list[Head]:
    """Every query head from `first_layer` on."""
    return [Head(layer, head) for layer in range(first_layer, layers) for head in range(heads)]


def block_scores(tokens: Tensor, firsts: np.ndarray) -> np.ndarray:
    """Sum token scores over blocks that begin at token `firsts`: float32 [blocks]."""
    sums = np.add.reduceat(tokens.numpy(), firsts) if len(firsts) else np.zeros(0)
    return sums.astype(np.float32)
