"""A sentence encoder (all-MiniLM-L6-v2; Reimers & Gurevych, EMNLP 2019) finds what is said in other words.

A question is compared with every sentence, so a fact is found wherever it stands.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from longchat_cli.errors import BadInput, MissingInput

MAX_TOKENS = 128
"""Wordpieces of a sentence that are read, as the encoder was trained."""
BATCH_TOKENS = 1024
"""Of one batch with its padding at most: few, since sentences come by the page and their lengths differ."""
STEP = 16
"""Sentences are padded to a multiple of it, and a batch to a power of 2 of them: what oneDNN compiles for a
shape it keeps, 1.4 MB. 158 turns of a chat had 183 shapes, and have 23."""


class Encoder:
    """The encoder in `directory` (config.json, tokenizer.json, model.safetensors), loaded at once.

    Raises MissingInput when a file is not there and BadInput when one is damaged.
    """

    def __init__(self, directory: Path, device: str = "cpu") -> None:
        directory = Path(directory)
        for name in ("config.json", "tokenizer.json", "model.safetensors"):
            if not (directory / name).is_file():
                raise MissingInput(f"no sentence encoder in {directory}", f"{name} is missing")
        try:
            self._tokenizer = _tokenizer(directory / "tokenizer.json")
            self._model = _model(directory, device)
        except Exception as error:  # each library raises its own kind
            raise BadInput(f"cannot load the sentence encoder in {directory}", str(error)) from error
        self.width = self._model.width
        self._directory = directory

    @cached_property
    def identity(self) -> str:
        """Names what decides the vectors: the files and the number format."""
        from longchat_cli.models import load

        return f"{load.fingerprint(self._directory)} {self._model.dtype}"

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Unit vectors of `texts`, float32 [len(texts), width]."""
        ids = [encoding.ids for encoding in self._tokenizer.encode_batch(list(texts))]
        lengths = np.array([len(i) for i in ids])
        vectors = np.zeros((len(ids), self.width), dtype=np.float32)
        for batch in _batches(lengths):
            vectors[batch] = self._forward([ids[i] for i in batch])
        return vectors

    def _forward(self, ids: list[list[int]]) -> np.ndarray:
        import torch

        lengths = torch.ones(_power(len(ids)), dtype=torch.long)  # of rows that nobody asks for, too
        lengths[: len(ids)] = torch.tensor([len(i) for i in ids])
        padded = torch.zeros(len(lengths), _padded(int(lengths.max())), dtype=torch.long)
        for row, sentence in zip(padded, ids, strict=False):
            row[: len(sentence)] = torch.tensor(sentence)
        mask = torch.arange(padded.shape[1]) < lengths[:, None]
        hidden, mask = self._model(padded, mask).float(), mask.to(self._model.device)
        mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return torch.nn.functional.normalize(mean[: len(ids)], dim=-1).cpu().numpy()


class Semantic:
    """Scores sentences by meaning: `vectors` float32 [sentences, width]."""

    def __init__(self, encoder: Encoder, vectors: np.ndarray) -> None:
        self.encoder, self.vectors = encoder, vectors

    def score(self, question: str) -> np.ndarray:
        """Cosine of each sentence with the question, float32 [sentences]."""
        return self.vectors @ self.encoder.encode([question])[0]


def _batches(lengths: np.ndarray) -> list[np.ndarray]:
    """Sentences of nearly one length together, BATCH_TOKENS with padding at most."""
    order = np.argsort(lengths, kind="stable")[::-1]
    batches = []
    start = 0
    while start < len(order):
        most = max(BATCH_TOKENS // _padded(int(lengths[order[start]])), 1)
        rows = _power(most + 1) // 2
        batches.append(order[start : start + rows])
        start += rows
    return batches


def _padded(length: int) -> int:
    """What `length` wordpieces are padded to."""
    return -(-length // STEP) * STEP


def _power(rows: int) -> int:
    """The power of 2 that is not less than `rows`."""
    return 1 << (rows - 1).bit_length()


def _tokenizer(path: Path) -> Any:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_padding()
    tokenizer.enable_truncation(MAX_TOKENS)
    return tokenizer


def _model(directory: Path, device: str) -> Any:
    from longchat_cli.recall.bert import Bert

    return Bert(directory, _dtype(device), device)


def _dtype(device: str) -> Any:
    """bf16 where the processor multiplies it (measured 30,000 tokens/s against 10,000 in fp32), else fp32."""
    import torch

    native = device != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if native else torch.float32
