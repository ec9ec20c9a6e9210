"""How likely a sentence makes the question, by the model that will answer it (query likelihood).

Sachan et al., Improving Passage Retrieval with Zero-Shot Question Generation, EMNLP 2022: passages z found
for the question q are ranked by `log p(q | z) = 1/|q| sum over t of log p(q_t | q_<t, z)`. A language model
knows that a blacksmith shoes horses where a small sentence encoder does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from longchat_cli.attention.full import Full
from longchat_cli.attention.layer import Cache, Method
from longchat_cli.kernels.native import ROWS

LONGEST = 64
"""Tokens of a question that are looked at, its last ones: every sentence costs as many."""


class Decoder(Protocol):
    """What is needed of a model; both decoders of the package have it."""

    def new_cache(self, method: Method) -> Cache: ...

    def forward(self, ids: Tensor, cache: Cache, logits: int = 1) -> Tensor: ...


class Likelihood:
    """Weighs sentences by what a `decoder` says of the question behind each, read afresh."""

    def __init__(self, decoder: Decoder, tokenizer: Any) -> None:
        self._decoder, self._encode = decoder, tokenizer.encode
        self._start = [tokenizer.bos_id] if tokenizer.add_bos else []

    def score(self, question: str, sentences: Sequence[str]) -> np.ndarray:
        """Mean log-probability of the question's tokens behind each sentence, float32 [sentences]."""
        asked = self._encode(f" {question}")[-LONGEST:]
        return np.array([self._mean(sentence, asked) for sentence in sentences], dtype=np.float32)

    def _mean(self, sentence: str, asked: list[int]) -> float:
        told = [*self._start, *self._encode(f"Text: {sentence}\nQuestion about the text:")]
        cache = self._decoder.new_cache(Full())
        logits = [self._decoder.forward(torch.tensor(told), cache)]
        cache.decoding = True  # a few rows at once: there the logits of each cost least
        for begin in range(0, len(asked) - 1, ROWS):
            part = torch.tensor(asked[:-1][begin : begin + ROWS])
            logits.append(self._decoder.forward(part, cache, logits=len(part)))
        likely = torch.cat(logits).log_softmax(dim=-1).cpu()
        return float(likely.gather(1, torch.tensor(asked)[:, None]).mean())
