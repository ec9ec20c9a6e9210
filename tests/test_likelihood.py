"""The model's word in finding: the question's likelihood behind a sentence, and what that changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from longchat_cli.models.lean import LeanDecoder
from longchat_cli.recall.find import CANDIDATES, LIKELIHOOD_WEIGHT, Finder
from longchat_cli.recall.likelihood import LONGEST, Likelihood
from longchat_cli.tokens import Tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")

SENTENCES = ["The cook hates garlic.", "It rained.", "A ship, a sail, and all the sea between them. " * 4]
QUESTION = "Which herb does the chef hate?"


class Watched:
    """A decoder that notes what it reads."""

    def __init__(self, decoder: LeanDecoder) -> None:
        self.new_cache = decoder.new_cache
        self.read: list[list[int]] = []
        self._forward = decoder.forward

    def forward(self, ids: torch.Tensor, cache: object, logits: int = 1) -> torch.Tensor:
        self.read.append(ids.tolist())
        return self._forward(ids, cache, logits)


@pytest.fixture(scope="module")
def path(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llama")


@pytest.fixture
def decoder(path: Path) -> Watched:
    return Watched(LeanDecoder.from_dir(path, dtype=torch.float32))


def test_it_is_what_stock_transformers_says(path: Path, decoder: Watched) -> None:
    tokenizer = Tokenizer.from_dir(path)
    found = Likelihood(decoder, tokenizer).score(QUESTION, SENTENCES)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for sentence, likely in zip(SENTENCES, found, strict=True):
        told = tokenizer.encode(f"Text: {sentence}\nQuestion about the text:")
        told = [tokenizer.bos_id, *told] if tokenizer.add_bos else told
        asked = tokenizer.encode(f" {QUESTION}")
        ids = torch.tensor([told + asked])
        labels = torch.tensor([[-100] * len(told) + asked])
        with torch.no_grad():
            assert likely == pytest.approx(-float(model(ids, labels=labels).loss), abs=1e-4)
    assert found.dtype == np.float32 and len(set(found.tolist())) == len(SENTENCES)


def test_a_model_that_begins_with_a_mark_gets_it(path: Path, decoder: Watched) -> None:
    tokenizer = Tokenizer.from_dir(path)
    tokenizer.bos_id = 1
    for add_bos, first in ((False, tokenizer.encode("Text:")[0]), (True, 1)):
        tokenizer.add_bos = add_bos
        decoder.read.clear()
        Likelihood(decoder, tokenizer).score(QUESTION, SENTENCES[:1])
        assert decoder.read[0][0] == first


def test_of_a_long_question_the_end_is_looked_at(path: Path, decoder: Watched) -> None:
    tokenizer = Tokenizer.from_dir(path)
    likelihood = Likelihood(decoder, tokenizer)
    long, longer = (likelihood.score("So much rain, " * n + QUESTION, SENTENCES[1:2]) for n in (99, 999))
    told = len(tokenizer.encode("Text: It rained.\nQuestion about the text:")) + tokenizer.add_bos
    assert long == longer and sum(map(len, decoder.read)) == 2 * (told + LONGEST - 1)


@dataclass(frozen=True)
class Doc:
    name: str
    text: str


class Words:
    """A token is a character, which is all the finder has to know."""

    def encode(self, text: str) -> list[int]:
        return [*map(ord, text)]

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[int]]:
        return self.encode(text), [*range(len(text))]


class Fond:
    """A judge fond of one word, which counts what it is shown."""

    def __init__(self, word: str) -> None:
        self.word = word
        self.shown: list[str] = []

    def score(self, question: str, sentences: Sequence[str]) -> np.ndarray:
        self.shown += sentences
        return np.array([-2.0 if self.word in s else -5.0 for s in sentences], dtype=np.float32)


def text(number: int) -> str:
    return f"The lamp number {number} was lit by the keeper of the {number}th house that night, they say."


LAMPS = Doc("lamps", "\n\n".join(map(text, range(40))))


def test_among_places_that_are_close_the_judge_decides() -> None:
    plain, judged = Finder([LAMPS], Words()), Finder([LAMPS], Words(), judge=(judge := Fond("7th")))
    before, after = plain.rank("Which lamp?", 40), judged.rank("Which lamp?", 40)
    assert len(judge.shown) == CANDIDATES
    assert "7th" in LAMPS.text[slice(*after[0].focus)] and after[0].focus != before[0].focus
    gain = 3 * LIKELIHOOD_WEIGHT
    assert after[0].parts["likelihood"] == pytest.approx(gain)
    assert after[0].score == pytest.approx(before[7].score + gain)
    rest = [p.focus for p in after if "7th" not in LAMPS.text[slice(*p.focus)]]
    assert rest == [p.focus for p in before if p.focus in rest]  # in their order
    (best, *_), (read, *_) = judged.passages("Which lamp?", 3), after
    assert best.focus == read.focus and best.score == read.score


def test_a_place_that_stands_out_is_not_put_to_the_test() -> None:
    sure = Doc("sure", LAMPS.text + "\n\nThe zebra Quagga-17 slept.")
    finder = Finder([sure], Words(), judge=(judge := Fond("7th")))
    assert "zebra" in sure.text[slice(*finder.rank("zebra Quagga-17", 1)[0].focus)]
    assert finder.rank("Which lamp?", 1, "lexical")[0].parts.keys() == {"lexical"}
    code = Doc(
        "code.py",
        "\n\n\n".join(f"class Lamp{n}:\n    def shine(self):\n        return {n}" for n in range(9)),
    )
    assert (
        Finder([code], Words(), judge=judge)
        .rank("What does the method shine return?", 1)[0]
        .parts["definitions"]
    )
    assert Finder([Doc("one", "A lamp.")], Words(), judge=judge).rank("lamp", 3)
    assert not judge.shown
