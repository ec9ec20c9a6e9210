"""Slow checks of streams on the default model: `pytest -m slow tests/test_slow_streams.py`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from longchat_cli.attention import method_class
from longchat_cli.models.lean import LeanDecoder
from longchat_cli.prose import prose
from longchat_cli.tokens import Tokenizer

pytestmark = pytest.mark.slow

SINKS, WINDOW, SCORED = 4, 252, 500


@pytest.fixture(scope="module")
def decoder(default_model_dir: Path) -> LeanDecoder:
    return LeanDecoder.from_dir(default_model_dir, packed=False)


@pytest.fixture(scope="module")
def ids(default_model_dir: Path, pytestconfig: pytest.Config) -> list[int]:
    """A book's tokens (`--book FILE`), else generated prose."""
    book = pytestconfig.getoption("--book")
    text = Path(book).read_text(encoding="utf-8")[60_000:] if book else prose(12_000, random.Random(0))
    return Tokenizer.from_dir(default_model_dir).encode(text[:20_000])[: 3 * WINDOW + SCORED + 1]


def loss_one_by_one(decoder: LeanDecoder, ids: Sequence[int], method: str, **options: int) -> float:
    """Mean loss of the last SCORED tokens, decoded token by token in one state."""
    cache = decoder.new_cache(method_class(method).build(options))
    split = len(ids) - SCORED - 1
    decoder.forward(torch.tensor(ids[:split]), cache)
    cache.decoding = True
    losses = [
        torch.nn.functional.cross_entropy(
            decoder.forward(torch.tensor([ids[i]]), cache), torch.tensor([ids[i + 1]])
        )
        for i in range(split, len(ids) - 1)
    ]
    return float(torch.stack(losses).mean())


def loss_recomputed(decoder: LeanDecoder, ids: Sequence[int]) -> float:
    """The same loss with the window's keys computed anew for each token: StreamingLLM's quality oracle."""
    full, size = method_class("full").build({}), SINKS + WINDOW
    losses = []
    for i in range(len(ids) - SCORED - 1, len(ids) - 1):
        logits = decoder.forward(torch.tensor(ids[i + 1 - size : i + 1]), decoder.new_cache(full))
        losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor([ids[i + 1]])))
    return float(torch.stack(losses).mean())


def test_sink_is_as_good_as_recomputing_and_a_bare_window_is_not(
    decoder: LeanDecoder, ids: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    sink = loss_one_by_one(decoder, ids, "sink", sinks=SINKS, window=WINDOW)
    window = loss_one_by_one(decoder, ids, "window", window=SINKS + WINDOW)
    recomputed = loss_recomputed(decoder, ids)
    sink_ppl, window_ppl, recomputed_ppl = (
        float(torch.tensor(loss).exp()) for loss in (sink, window, recomputed)
    )
    with capsys.disabled():
        print(f"\nperplexity: sink {sink_ppl:.2f}, window {window_ppl:.2f}, recomputed {recomputed_ppl:.2f}")
    assert sink_ppl <= 1.03 * recomputed_ppl
    assert window_ppl >= 1.1 * sink_ppl
