"""Finding by the model's own attention: keys of retrieval heads are the index a question's queries search.

A document is read in independent windows; the keys of the chosen heads are kept unrotated in int8, no values.
A question's queries meet every key at one fixed distance; each question token and head takes a softmax over
the whole document, and the maximum over tokens and the heads of a KV group, summed over heads, scores a key.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from longchat_cli.attention.full import FullLayer
from longchat_cli.attention.layer import Cache, Method, Step
from longchat_cli.attention.rope import Rope
from longchat_cli.config import cache_dir, private
from longchat_cli.errors import StorageError
from longchat_cli.kernels import Span
from longchat_cli.models.files import read_json, write_json
from longchat_cli.pages import Store, digest
from longchat_cli.prose import prose
from longchat_cli.recall.passages import split_sentences
from longchat_cli.state import writer

WINDOW = 1024
"""Tokens of one reading window."""
LEAD = 64
"""Tokens read again ahead of each window: they take the attention sink and give context."""
VERSION = 1
"""Of how windows are read, and of what is kept of them."""
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
        return TapLayer(self, rope)


class TapLayer(FullLayer):
    def __init__(self, method: Tap, rope: Rope | None) -> None:
        super().__init__(method, rope)
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

    `heads` are the query heads that search; `rows` says which row of `keys` each of them reads; `reused`
    tokens were not read again.
    """

    def __init__(
        self, heads: Sequence[Head], rows: Sequence[int], keys: Tensor, scales: Tensor, reused: int = 0
    ) -> None:
        self.heads, self.rows, self.keys, self.scales = list(heads), list(rows), keys, scales
        self.reused = reused

    @property
    def bytes(self) -> int:
        return self.keys.nbytes + self.scales.nbytes

    def score_tokens(self, queries: Tensor) -> Tensor:
        """queries [heads, rows, dim], scaled -> scores float32 [tokens], at most one per KV head."""
        per_key = torch.zeros(len(self.keys), self.keys.shape[1])
        for query, row in zip(queries, self.rows, strict=True):
            per_key[row] = torch.maximum(per_key[row], self.attention(query, row))
        return per_key.sum(dim=0)

    def attention(self, query: Tensor, row: int) -> Tensor:
        """One head's softmax over the document, the maximum over query rows [rows, dim]: float32 [tokens]."""
        logits = (query @ self.keys[row].float().t()) * self.scales[row]
        return logits.softmax(dim=-1).amax(dim=0)


def read_keys(
    decoder: Reader,
    ids: Sequence[int],
    heads: Sequence[Head],
    group: int,
    progress: Progress | None = None,
    store: Store | None = None,
    identity: str = "",
) -> KeyIndex:
    """Read token `ids` in windows of `WINDOW` and keep the keys that `heads` need.

    `group` is the number of query heads per KV head. A window in `store` is not read again; `identity` names
    what beside heads and tokens decides its keys.
    """
    wanted = sorted({(head.layer, head.head // group) for head in heads})
    rows = [wanted.index((head.layer, head.head // group)) for head in heads]
    keys, scales, reused = [], [], 0
    for start in range(0, len(ids), WINDOW):
        lead = ids[max(start - LEAD, 0) : start] or ids[:LEAD]
        window = ids[start : start + WINDOW]
        name = digest(identity, VERSION, wanted, list(lead), list(window)) if store else ""
        page = store.open(name, "pt") if store else None
        if page is not None:
            found = {part: page.get_tensor(part).clone() for part in ("keys", "scales")}
            reused += len(window)
        else:
            found = _read_window(decoder, lead, window, wanted)
            if store:
                store.put(name, writer(found))
        keys.append(found["keys"])
        scales.append(found["scales"])
        if progress:
            progress(start + len(window), len(ids))
    if store:
        store.touch()
    return KeyIndex(heads, rows, torch.cat(keys, dim=1), torch.cat(scales, dim=1), reused)


def _read_window(
    decoder: Reader, lead: Sequence[int], ids: Sequence[int], wanted: Sequence[tuple[int, int]]
) -> dict[str, Tensor]:
    """int8 keys and their scales of the KV heads `wanted` over `ids`, read behind `lead`."""
    cache = decoder.new_cache(Tap())
    decoder.read(torch.tensor([*lead, *ids]), cache, max(layer for layer, _ in wanted) + 1)
    found = torch.stack([_tap(cache, layer).unrotated_keys()[kv, len(lead) :] for layer, kv in wanted])
    found = found.float()
    scales = found.abs().amax(dim=-1).clamp(min=1e-8) / 127
    return {"keys": (found / scales.unsqueeze(-1)).round().to(torch.int8), "scales": scales}


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


def all_heads(decoder: Reader) -> list[Head]:
    """Every query head of every layer with full attention, found by running one token."""
    cache = decoder.new_cache(Tap())
    decoder.read(torch.tensor([0]), cache, decoder.layers)
    taps = [(index, tap) for index, tap in enumerate(cache.layers) if isinstance(tap, TapLayer)]
    return [
        Head(index, head)
        for index, tap in taps
        if tap.queries is not None
        for head in range(tap.queries.shape[0])
    ]


def group_size(decoder: Reader) -> int:
    """Query heads per KV head."""
    cache = decoder.new_cache(Tap())
    decoder.read(torch.tensor([0]), cache, decoder.layers)
    tap = next(layer for layer in cache.layers if isinstance(layer, TapLayer))
    assert tap.queries is not None
    return tap.queries.shape[0] // tap.kv.k.shape[0]


class AttentionIndex:
    """A document's key index with the decoder that searches it: `scores` is what the finder asks for."""

    def __init__(self, decoder: Reader, keys: KeyIndex) -> None:
        self.decoder, self.keys, self.reused = decoder, keys, keys.reused

    @classmethod
    def read(
        cls,
        decoder: Reader,
        ids: Sequence[int],
        heads: Sequence[Head],
        progress: Progress | None = None,
        store: Store | None = None,
        identity: str = "",
    ) -> AttentionIndex:
        """Read a document's token `ids` once, as `read_keys` does."""
        return cls(decoder, read_keys(decoder, ids, heads, group_size(decoder), progress, store, identity))

    def scores(self, question_ids: Sequence[int]) -> np.ndarray:
        """How much the question looks at each token, 0 to 1: the mean over KV heads, float32 [tokens]."""
        queries = search_queries(self.decoder, question_ids, self.keys.heads)
        return (self.keys.score_tokens(queries) / len(self.keys.keys)).numpy()


Encode = Callable[[str], Sequence[int]]


def calibrate(decoder: Reader, encode: Encode, prose: Sequence[str], count: int = 16) -> list[Head]:
    """The `count` query heads that find planted facts best: a self-test on generated needles.

    `prose` are sentences to hide them in, about 2,000 tokens. A head's mark is the mean over needles of
    1 / (1 + tokens it prefers to the needle's).
    """
    needles = [
        f"One of the special magic numbers for {key} is: {number}." for key, number in SELF_TEST.items()
    ]
    every = max(len(prose) // (len(needles) + 1), 1)
    ids: list[int] = []
    ranges: list[tuple[int, int]] = []
    for index, sentence in enumerate(prose):
        ids += encode(sentence + " ")
        if index % every == every - 1 and len(ranges) < len(needles):
            begin = len(ids)
            ids += encode(needles[len(ranges)] + " ")
            ranges.append((begin, len(ids)))
    heads = all_heads(decoder)
    keys = read_keys(decoder, ids, heads, group_size(decoder))
    marks = np.zeros(len(heads))
    for key, (begin, end) in zip(SELF_TEST, ranges, strict=False):
        queries = search_queries(decoder, encode(f"What is the special magic number for {key}?"), heads)
        for number, (query, row) in enumerate(zip(queries, keys.rows, strict=True)):
            scores = keys.attention(query, row)
            marks[number] += 1 / (1 + int((scores > scores[begin:end].max()).sum()))
    best = np.argsort(-marks, kind="stable")[:count]
    return sorted(heads[i] for i in best)


def retrieval_heads(decoder: Reader, encode: Encode, fingerprint: str) -> list[Head]:
    """The heads `calibrate` finds for a model, remembered in the cache directory by its `fingerprint`."""
    file = private(cache_dir() / "heads") / f"{fingerprint}.json"
    with contextlib.suppress(ValueError, TypeError):
        return [Head(layer, head) for layer, head in read_json(file)]
    text = prose(8_000, random.Random(0))
    bounds, _ = split_sentences(text)
    heads = calibrate(decoder, encode, [text[begin:end] for begin, end in bounds.tolist()])
    with contextlib.suppress(StorageError):  # a full disk costs the next run a few seconds
        write_json(file, [[head.layer, head.head] for head in heads])
    return heads


SELF_TEST = {"harbour": 7301246, "violin": 2958104, "pepper": 8140957, "glacier": 4672093, "lantern": 9035718}
