"""Prompt lookup: the answer of plain decoding to the last bit, and a state without a trace of guesses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from longchat_cli.attention import METHODS, method_class
from longchat_cli.engine import EngineInfo, Piece
from longchat_cli.kernels import native
from longchat_cli.local import LocalEngine
from longchat_cli.models.lean import LeanDecoder
from longchat_cli.models.lookup import Lookup
from longchat_cli.models.native import NativeProducts
from longchat_cli.sampling import Sampling
from longchat_cli.tokens import Tokenizer

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(native.missing() is not None, reason=f"native library: {native.missing()}"),
]
GREEDY = Sampling(temperature=0.0, max_tokens=80)
SAMPLED = Sampling(temperature=0.01, top_p=0.9, seed=3, max_tokens=80)


@pytest.fixture(scope="module")
def parts(tiny_model: Callable[..., Path]) -> Iterator[tuple[LeanDecoder, Tokenizer]]:
    path = tiny_model("llama")
    decoder = LeanDecoder.from_dir(path, dtype=torch.bfloat16)
    decoder.products = NativeProducts(decoder, None)
    tokenizer = Tokenizer.from_dir(path)
    tokenizer.eos_ids = frozenset()  # an answer must be long enough to repeat
    yield decoder, tokenizer


def engine(parts: Any, method: str = "full", plain: bool = False, **options: Any) -> LocalEngine:
    info = EngineInfo("tiny", 512, method, "cpu", "bfloat16", "tiny")
    made = LocalEngine(*parts, method_class(method).build(options), info)
    if plain:
        made.stepper = None
    return made


def prompt(count: int = 120) -> list[int]:
    """Text that says everything twice."""
    once = torch.randint(20, 200, (count // 2,), generator=torch.Generator().manual_seed(1)).tolist()
    return once + once


def answer(made: LocalEngine, sampling: Sampling) -> list[Piece]:
    made.prefill(prompt())
    return list(made.generate(sampling))


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_answer_is_that_of_plain_decoding(parts: Any, sampling: Sampling) -> None:
    plain, fast = engine(parts, plain=True), engine(parts)
    assert answer(fast, sampling) == answer(plain, sampling)
    assert isinstance(fast.stepper, Lookup)
    assert fast.stepper.steps, "nothing was read ahead: the test shows nothing"
    assert fast.stepper.read or sampling is SAMPLED, "greedy, a tiny model repeats itself: guesses come true"
    assert fast.ids == plain.ids
    assert fast.logits is not None and plain.logits is not None
    assert torch.equal(fast.logits, plain.logits)


@pytest.mark.parametrize("method", METHODS)
def test_no_method_answers_otherwise(parts: Any, method: str) -> None:
    """Twice from one engine, as a chat does; with restarts in the middle of the answer."""
    options = {"recompute": {"window": 60, "stride": 16}, "truncate": {"budget": 60}}
    plain, fast = (engine(parts, method, plain=plain, **options.get(method, {})) for plain in (True, False))
    for _ in range(2):
        assert answer(fast, GREEDY) == answer(plain, GREEDY)
    assert fast.coverage() == plain.coverage()
    assert isinstance(fast.stepper, Lookup) == method_class(method).exact_rows


def test_whoever_stops_listening_leaves_no_trace(parts: Any) -> None:
    """At every length of the answer the state is that of plain decoding, whatever was read ahead."""
    plain, fast = engine(parts, plain=True), engine(parts)
    plain.prefill(prompt())
    fast.prefill(prompt())
    ahead = 0
    for one, other in zip(fast.generate(GREEDY), plain.generate(GREEDY), strict=True):
        assert one == other
        assert isinstance(fast.stepper, Lookup)
        ahead = max(ahead, len(fast.stepper.ahead))
        if len(fast.ids) % 7 == 0:
            assert fast.coverage() == plain.coverage()  # takes back what was not chosen
            assert not fast.stepper.ahead
            assert all(
                torch.equal(mine.kv.k, its.kv.k) and torch.equal(mine.kv.v, its.kv.v)
                for mine, its in zip(fast.cache.own(), plain.cache.own(), strict=True)
            )
    assert ahead


def test_marks_taken_amid_guesses(parts: Any) -> None:
    fast = engine(parts)
    fast.prefill(prompt())
    steps = fast.generate(GREEDY)
    for _ in range(10):
        next(steps)
    mark = fast.snapshot()
    first = [piece.ids for piece in fast.generate(GREEDY)]
    fast.restore(mark)
    assert [piece.ids for piece in fast.generate(GREEDY)] == first


def test_wrong_guesses_are_given_up(parts: Any) -> None:
    fast = engine(parts)
    fast.prefill(prompt())
    lookup = fast.stepper
    assert isinstance(lookup, Lookup)
    for token in prompt()[:60] * 2:  # fed, not chosen: guesses of what followed come true
        fast.feed([token], decoding=True)
    right = lookup.steps
    generator = torch.Generator().manual_seed(2)
    for _ in range(40):
        place = int(torch.randint(3, 60, (1,), generator=generator))
        for token in [*prompt()[place - 3 : place], 7]:  # a known beginning, another end
            fast.feed([token], decoding=True)
    assert lookup.steps - right < 40, "reading ahead in vain was not given up"


@pytest.mark.parametrize(
    ("method", "options"), [("sink", {}), ("recycled", {}), ("full", {"kv_dtype": "int8"}), ("h2o", {})]
)
def test_it_does_not_serve_where_rows_are_not_alike(parts: Any, method: str, options: dict[str, Any]) -> None:
    assert engine(parts, method, **options).stepper is None


def test_it_does_not_serve_on_torchs_products(tiny_model: Callable[..., Path]) -> None:
    path = tiny_model("llama")
    decoder = LeanDecoder.from_dir(path, dtype=torch.bfloat16)
    assert engine((decoder, Tokenizer.from_dir(path))).stepper is None
