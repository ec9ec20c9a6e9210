"""What an answer's tokens looked at, against the attention that stock transformers reports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from longchat_cli.attention import method_class
from longchat_cli.attribution import attention_paid
from longchat_cli.engine import EngineInfo
from longchat_cli.local import LocalEngine, with_method
from longchat_cli.models.lean import LeanDecoder
from longchat_cli.tokens import Tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT, ANSWER = list(range(3, 40)), [7, 50, 12, 9, 60]


@pytest.fixture(scope="module")
def path(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def engine(path: Path) -> LocalEngine:
    info = EngineInfo("tiny", 512, "full", "cpu", "float32", "0")
    decoder = LeanDecoder.from_dir(path, dtype=torch.float32)
    return LocalEngine(decoder, Tokenizer.from_dir(path), method_class("full").build({}), info)


def test_equals_the_attention_of_stock_transformers(engine: LocalEngine, path: Path) -> None:
    engine.reset()
    engine.prefill(PROMPT)
    mark = engine.snapshot()
    for token in ANSWER:
        engine.feed([token], decoding=True)
    after = engine.logits
    paid = attention_paid(engine, mark, ANSWER)

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        layers = model(torch.tensor([PROMPT + ANSWER]), output_attentions=True).attentions
    groups = model.config.num_key_value_heads
    expected = torch.zeros(len(PROMPT))
    for attention in layers[2 * len(layers) // 3 :]:
        rows = attention[0, :, len(PROMPT) :, : len(PROMPT)].sum(dim=1)
        expected += rows.view(groups, -1, len(PROMPT)).amax(dim=1).sum(dim=0)
    assert torch.allclose(torch.tensor(paid), expected, atol=1e-4)
    assert engine.logits is after
    assert engine.coverage().seen == len(PROMPT) + len(ANSWER)


def test_unknown_where_tokens_are_forgotten_and_without_an_answer(engine: LocalEngine) -> None:
    sink = with_method(engine, "sink", {"sinks": 2, "window": 8})
    sink.prefill(PROMPT)
    assert attention_paid(sink, sink.snapshot(), ANSWER) == []
    engine.reset()
    engine.prefill(PROMPT)
    assert attention_paid(engine, engine.snapshot(), []) == []
