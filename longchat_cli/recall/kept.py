"""Indexes that are kept: what was computed of a run of sentences or tokens is found again by its content.

Not by what precedes it: a sentence has one vector in any company, so an edit costs the runs it touches, and a
damaged page is made anew alone.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
from safetensors.numpy import save_file

from longchat_cli.pages import Store, digest
from longchat_cli.recall.lexical import Lexical
from longchat_cli.recall.passages import Outline

VERSION = 1
"""Of how texts are cut, and of what is kept of them."""
LEAST, MEAN, MOST = 16, 64, 128
"""Sentences of a run."""

Progress = Callable[[int, int], None]


NOTHING = np.zeros(0, np.int64)


class Source(Protocol):
    """A document: its name and text."""

    @property
    def name(self) -> str: ...
    @property
    def text(self) -> str: ...


class OffsetTokenizer(Protocol):
    """What the finder needs of the model's tokenizer."""

    def encode(self, text: str) -> list[int]: ...
    def encode_with_offsets(self, text: str) -> tuple[list[int], list[int]]: ...


class SentenceEncoder(Protocol):
    """`recall.semantic.Encoder`; `identity` names what decides its vectors."""

    width: int

    @property
    def identity(self) -> str: ...
    def encode(self, texts: Sequence[str]) -> np.ndarray: ...


def runs(texts: Sequence[str]) -> Iterator[slice]:
    """Cut by content: behind one sentence in MEAN, whichever its hash says, so that cuts survive edits."""
    start = 0
    for index, text in enumerate(texts):
        held = index + 1 - start
        if held == MOST or (held >= LEAST and zlib.crc32(_bytes(text)) % MEAN == 0):
            yield slice(start, index + 1)
            start = index + 1
    if start < len(texts):
        yield slice(start, len(texts))


class Run:
    """A page of the vectors of a run of sentences, float16 [sentences, width]."""

    def __init__(self, store: Store, encoder: SentenceEncoder, sentences: Sequence[str]) -> None:
        self._store, self._shape = store, (len(sentences), encoder.width)
        self._key = digest(encoder.identity, VERSION, *map(_bytes, sentences))

    def load(self) -> np.ndarray | None:
        """None where they are not kept."""
        page = self._store.open(self._key, "np")
        vectors = None if page is None else page.get_tensor("vectors")
        return vectors if vectors is not None and vectors.shape == self._shape else None

    def save(self, vectors: np.ndarray) -> None:
        """Keep them."""
        self._store.put(self._key, _save({"vectors": np.ascontiguousarray(vectors)}))


def sentence_vectors(
    encoder: SentenceEncoder,
    texts: Sequence[str],
    sizes: np.ndarray,
    store: Store | None = None,
    progress: Progress | None = None,
) -> tuple[np.ndarray, int]:
    """Unit vectors of the sentences `texts`, float32 [texts, width] of float16 precision.

    `sizes` int64 [texts] are their tokens, in which `progress` and the second value, what was kept from
    earlier, count. A run is encoded alone: its vectors are the same whatever else had to be encoded.
    """
    vectors = np.zeros((len(texts), encoder.width), dtype=np.float32)
    done = reused = 0
    total = int(sizes.sum())
    for run in runs(texts):
        size = int(sizes[run].sum())
        kept = Run(store, encoder, texts[run]) if store else None
        if kept and (known := kept.load()) is not None:
            vectors[run] = known
            reused += size
        else:
            made = encoder.encode(texts[run]).astype(np.float16)
            vectors[run] = made
            if kept:
                kept.save(made)
        done += size
        if progress:
            progress(done, total)
    if store:
        store.touch()
    return vectors, reused


def outlines(
    documents: Sequence[Source], tokenizer: OffsetTokenizer, store: Store | None = None, identity: str = ""
) -> tuple[list[Outline], Lexical]:
    """Sentences and blocks of every document and the index of their words, one page for all of them.

    `identity` names the tokenizer. They are made anew where anything changed: that takes a second for a book.
    """
    texts = [document.text for document in documents]
    key = digest(identity, VERSION, *map(_bytes, texts)) if store else ""
    page = store.open(key, "np") if store else None
    if page is not None:
        arrays = {name: page.get_tensor(name) for name in page.keys()}  # noqa: SIM118
        return _outlines_of(documents, arrays), Lexical.of(arrays)
    made = [Outline.of(d.name, d.text, tokenizer.encode_with_offsets(d.text)[1]) for d in documents]
    counts = [len(outline.sentences) for outline in made]
    firsts = joined([outline.blocks[:-1] for outline in made], counts)
    lexical = Lexical([o.text[i:j] for o in made for i, j in o.sentences.tolist()], firsts)
    if store and (store := store.of(sum(len(outline.tokens) for outline in made), method="recall")):
        store.put(key, _save({**lexical.arrays(), **_arrays_of(made)}))
    return made, lexical


_FIELDS = ("sentences", "blocks", "tokens")


def _arrays_of(made: Sequence[Outline]) -> dict[str, np.ndarray]:
    arrays = {}
    for name in _FIELDS:
        values = [getattr(outline, name) for outline in made]
        arrays[f"outline.{name}"] = np.concatenate([NOTHING, *(x.ravel() for x in values)]).astype(np.int32)
        arrays[f"outline.{name}.counts"] = np.array([x.size for x in values], np.int64)
    return arrays


def _outlines_of(documents: Sequence[Source], arrays: dict[str, np.ndarray]) -> list[Outline]:
    columns = []
    for name in _FIELDS:
        ends = np.cumsum(arrays[f"outline.{name}.counts"])[:-1]
        columns.append(np.split(arrays[f"outline.{name}"].astype(np.int64), ends))
    return [
        Outline(document.name, document.text, sentences.reshape(-1, 2), blocks, tokens)
        for document, sentences, blocks, tokens in zip(documents, *columns, strict=False)
    ]


def joined(indices: Sequence[np.ndarray], sizes: Sequence[int]) -> np.ndarray:
    """Indices into several arrays as indices into their concatenation, int64."""
    starts = np.cumsum([0, *sizes])
    return np.concatenate([NOTHING, *map(np.add, indices, starts)])


def _save(tensors: dict[str, np.ndarray]) -> Callable[[str, dict[str, str]], None]:
    return lambda name, metadata: save_file(tensors, name, metadata)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
