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

VERSION = 1
"""Of how sentences are cut into runs, and of what is kept of them."""
LEAST, MEAN, MOST = 16, 64, 128
"""Sentences of a run."""

Progress = Callable[[int, int], None]


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
        key = digest(encoder.identity, VERSION, *map(_bytes, texts[run])) if store else ""
        known = _load(store, key) if store else None
        if known is not None and known.shape == vectors[run].shape:
            vectors[run] = known
            reused += size
        else:
            made = encoder.encode(texts[run]).astype(np.float16)
            vectors[run] = made
            if store:
                store.put(key, _save({"vectors": made}))
        done += size
        if progress:
            progress(done, total)
    if store:
        store.touch()
    return vectors, reused


def _load(store: Store, key: str) -> np.ndarray | None:
    page = store.open(key, "np")
    return None if page is None else page.get_tensor("vectors")


def _save(tensors: dict[str, np.ndarray]) -> Callable[[str, dict[str, str]], None]:
    return lambda name, metadata: save_file(tensors, name, metadata)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
