"""The local engine: what it streams, what its state holds, and that the two agree whatever happens."""

from __future__ import annotations

import dataclasses
import itertools
import math
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longchat_cli.attention import METHODS, method_class
from longchat_cli.attention.layer import Cache
from longchat_cli.engine import EngineInfo, Piece
from longchat_cli.errors import BadInput, LongchatError, MissingInput, UsageError
from longchat_cli.local import LocalEngine, choose, with_method
from longchat_cli.models.lean import LeanDecoder
from longchat_cli.prompt import Message
from longchat_cli.sampling import Sampling
from longchat_cli.tokens import Tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL: dict[str, dict[str, Any]] = {
    "window": {"window": 24},
    "sink": {"sinks": 4, "window": 24},
    "cca": {"group": 4, "local": 16},
    "infllm": {"init": 4, "local": 16, "block": 8, "topk": 2},
    "recycled": {"fraction": 4, "stride": 5},
    "truncate": {"budget": 24},
    "recompute": {"window": 24, "stride": 3},
    "sink++": {"sinks": 4, "window": 24, "stride": 5},
    "lm-infinite": {"sinks": 4, "window": 24},
    "snapkv": {"budget": 24, "window": 8},
    "pyramidkv": {"budget": 24, "window": 8},
    "h2o": {"budget": 24},
    "tova": {"budget": 24},
}
TEXT = "The river ran past the old mill, and the miller counted 42 sacks of grain before the rain came down. "


@pytest.fixture(scope="module")
def path(tiny_model: Callable[..., Path]) -> Path:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def decoder(path: Path) -> LeanDecoder:
    return LeanDecoder.from_dir(path, dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer(path: Path) -> Tokenizer:
    return endless(Tokenizer.from_dir(path))


def endless(tokenizer: Tokenizer) -> Tokenizer:
    """A random model ends its answer at random: only the tests of endings want that."""
    tokenizer.eos_ids = frozenset()
    return tokenizer


def info(method: str) -> EngineInfo:
    return EngineInfo("tiny", 512, method, "cpu", "float32", "f" * 64, frozenset({"save", "snapshot"}))


def make(decoder: Any, tokenizer: Tokenizer, method: str = "full", chunk: int = 512) -> LocalEngine:
    kind = method_class(method)
    built = kind.build(SMALL.get(method) or kind.at_budget(24, 100))
    return LocalEngine(decoder, tokenizer, built, info(method), chunk)


@pytest.fixture
def engine(decoder, tokenizer) -> LocalEngine:
    return make(decoder, tokenizer)


def prompt_of(engine: LocalEngine) -> list[int]:
    return engine.render([Message.of("user", TEXT * 2)]).ids


def agrees(engine: LocalEngine) -> None:
    """The state is exactly what reading `engine.ids` afresh gives (for methods that do not mind chunks)."""
    assert engine.cache.seen == len(engine.ids)
    fresh = make(engine.decoder, engine.tokenizer, engine.info.method)
    fresh.prefill(list(engine.ids))
    assert engine.logits is not None and fresh.logits is not None
    assert (engine.logits - fresh.logits).abs().max() <= 1e-4


def answer(pieces: Sequence[Piece]) -> tuple[str, list[int]]:
    return "".join(p.text for p in pieces), [id for p in pieces for id in p.ids]


# --- streaming


@pytest.mark.parametrize("method", ["full", "window", "sink", "lm-infinite", "recompute", "cca"])
def test_state_agrees_with_what_was_streamed(decoder, tokenizer, method):
    engine = make(decoder, tokenizer, method, chunk=17)
    prompt = prompt_of(engine)
    assert engine.prefill(prompt) == len(prompt)
    pieces = list(engine.generate(Sampling(max_tokens=12)))
    text, ids = answer(pieces)
    assert [p.stop for p in pieces] == [None] * 12 + ["length"]
    assert list(engine.ids) == prompt + ids
    assert text == tokenizer.decode(ids)
    agrees(engine)
    turn = engine.render_turn(Message.of("user", "And then?")).ids
    engine.prefill(turn)
    more = list(engine.generate(Sampling(max_tokens=5)))
    assert list(engine.ids) == prompt + ids + turn + answer(more)[1]
    agrees(engine)


def test_greedy_is_the_most_likely_token_each_time(engine):
    engine.prefill(prompt_of(engine))
    for piece in engine.generate(Sampling(max_tokens=6)):
        if piece.ids:
            before = make(engine.decoder, engine.tokenizer)
            before.prefill(list(engine.ids[:-1]))
            logprobs = before.logits.log_softmax(-1)
            assert int(logprobs.argmax()) == piece.ids[0]
            assert piece.logprob == pytest.approx(float(logprobs.max()), abs=1e-4)


@pytest.mark.parametrize("after", [0, 1, 3, 7])
def test_cancel_at_any_token(engine, after):
    prompt = prompt_of(engine)
    engine.prefill(prompt)
    pieces: list[Piece] = []
    for piece in engine.generate(Sampling(max_tokens=50), cancel=lambda: len(pieces) >= after):
        pieces.append(piece)
    assert pieces[-1].stop == "cancelled"
    ids = answer(pieces)[1]
    assert len(ids) == after
    assert list(engine.ids) == prompt + ids
    agrees(engine)


@pytest.mark.parametrize("after", [1, 4])
def test_a_listener_that_leaves(engine, after):
    prompt = prompt_of(engine)
    engine.prefill(prompt)
    stream = engine.generate(Sampling(max_tokens=50))
    ids = [id for _ in range(after) for id in next(stream).ids]
    stream.close()
    assert list(engine.ids) == prompt + ids
    agrees(engine)


def test_prefill_reports_and_can_be_cancelled_between_chunks(decoder, tokenizer):
    engine = make(decoder, tokenizer, chunk=10)
    ids = prompt_of(engine)[:35]
    seen: list[tuple[int, int]] = []
    assert engine.prefill(ids, progress=lambda done, total: seen.append((done, total))) == 35
    assert seen == [(10, 35), (20, 35), (30, 35), (35, 35)]
    engine.reset()
    assert engine.prefill(ids, cancel=lambda: engine.cache.seen >= 20) == 20
    assert list(engine.ids) == ids[:20]
    agrees(engine)
    assert engine.prefill(ids[20:]) == 15
    agrees(engine)
    assert engine.prefill([]) == 0


def test_a_method_may_want_smaller_chunks(decoder, tokenizer):
    sizes = []

    class Watched:
        def __getattr__(self, name):
            return getattr(decoder, name)

        def forward(self, ids, cache, logits=1):
            sizes.append(len(ids))
            return decoder.forward(ids, cache, logits)

    method = method_class("infllm").build(SMALL["infllm"])
    engine = LocalEngine(Watched(), tokenizer, method, info("infllm"), chunk=2000)
    engine.prefill([5] * 700)
    assert sizes == [512, 188]


# --- failures inside a forward


class Failing:
    """The decoder, but its `at`-th forward fails inside layer 1, after layer 0 has taken the tokens."""

    def __init__(self, decoder: LeanDecoder, at: int, error: BaseException) -> None:
        self.decoder, self.at, self.error = decoder, at, error

    def __getattr__(self, name: str) -> Any:
        return getattr(self.decoder, name)

    def forward(self, ids: Tensor, cache: Cache, logits: int = 1) -> Tensor:
        self.at -= 1
        if self.at != 0:
            return self.decoder.forward(ids, cache, logits)

        def broken(*args: Any) -> Tensor:
            raise self.error

        layer = cache.own()[1]
        layer.attend = broken  # type: ignore[method-assign]
        try:
            return self.decoder.forward(ids, cache, logits)
        finally:
            del layer.attend


@pytest.mark.parametrize(
    "error", [RuntimeError("out of memory"), KeyboardInterrupt()], ids=["error", "ctrl-c"]
)
@pytest.mark.parametrize("method", METHODS)
def test_a_failing_forward_leaves_the_state_as_it_was(decoder, tokenizer, method, error):
    broken, plain = (make(Failing(decoder, at, error), tokenizer, method, chunk=40) for at in (2, 0))
    ids = [7 + i % 90 for i in range(70)]
    broken.prefill(ids[:40])  # some methods read whatever comes in one call
    with pytest.raises(type(error)):
        broken.prefill(ids[40:])
    assert (broken.cache.seen, list(broken.ids)) == (40, ids[:40])
    broken.prefill(ids[40:])
    plain.prefill(ids[:40])
    plain.prefill(ids[40:])
    assert torch.equal(broken.logits, plain.logits)

    wanted = answer(list(plain.generate(Sampling(max_tokens=8))))[1]
    broken.decoder.at = 4
    got: list[int] = []
    with pytest.raises(type(error)):
        for piece in broken.generate(Sampling(max_tokens=8)):
            got += piece.ids
    assert got == wanted[:3]
    assert list(broken.ids) == ids + got
    got += answer(list(broken.generate(Sampling(max_tokens=5))))[1]
    assert got == wanted


# --- endings, on a decoder that says what it is told


class Scripted:
    """Writes the given tokens whatever it reads; its state is a count."""

    window, device, dtype = 512, torch.device("cpu"), torch.float32

    def __init__(self, script: Sequence[int], vocabulary: int, prompt: int = 1) -> None:
        self.script, self.vocab_size, self.prompt = list(script), vocabulary, prompt

    def new_cache(self, method: Any) -> Cache:
        return Cache(method, [])

    def forward(self, ids: Tensor, cache: Cache, logits: int = 1) -> Tensor:
        cache.position += len(ids)
        out = torch.zeros(1, self.vocab_size)
        out[0, self.script[(cache.seen - self.prompt) % len(self.script)]] = 9.0
        return out


def scripted(path: Path, text: str, **sampling: Any) -> tuple[LocalEngine, list[Piece]]:
    tokenizer = Tokenizer.from_dir(path)
    ids = tokenizer.encode_control(text)
    engine = make(Scripted(ids, tokenizer.vocab_size), tokenizer)
    engine.prefill([5])
    return engine, list(
        engine.generate(Sampling(max_tokens=sampling.pop("max_tokens", len(ids)), **sampling))
    )


def test_eos_is_neither_printed_nor_read(path):
    engine, pieces = scripted(path, "The end.<|im_end|>More", max_tokens=99)
    text, ids = answer(pieces)
    assert (text, pieces[-1].stop) == ("The end.", "eos")
    assert list(engine.ids) == [5, *ids]


@pytest.mark.parametrize("stops", [("\nUser:",), ("zzz", "User"), ("\n",), ("User:", "\nUser:", "r:")])
def test_stop_strings_over_token_borders(path, stops):
    engine, pieces = scripted(path, "Well, no.\nUser: and more", stop=stops, max_tokens=99)
    text, ids = answer(pieces)
    whole = "Well, no.\nUser: and more"
    ends = [(whole.index(s) + len(s), whole.index(s)) for s in stops if s in whole]
    assert text == whole[: min(ends)[1]]
    assert pieces[-1].stop == "stop"
    assert all(p.stop is None for p in pieces[:-1])
    assert list(engine.ids) == [5, *ids], "the tokens of the stop string are in the state"


def test_text_held_back_for_a_stop_string_is_given_at_the_end(path):
    _, pieces = scripted(path, "Well, no.\nUs", stop=("\nUser:",))
    assert answer(pieces)[0] == "Well, no.\nUs"
    _, pieces = scripted(path, "Well, no.\nUs<|im_end|>", stop=("\nUser:",))
    assert (answer(pieces)[0], pieces[-1].stop) == ("Well, no.\nUs", "eos")


def test_characters_come_whole(path):
    text = "naïve 漢字 👩‍👩‍👧 ok"
    _, pieces = scripted(path, text)
    assert answer(pieces)[0] == text
    assert all("\ufffd" not in p.text for p in pieces)
    assert sum(not p.text for p in pieces) > 5, "bytes of a character wait for each other"


def test_a_character_cut_by_the_length_is_left_out(path):
    ids = Tokenizer.from_dir(path).encode("漢")
    assert len(ids) > 1
    _, pieces = scripted(path, "漢", max_tokens=len(ids) - 1)
    assert answer(pieces)[0] == ""
    assert pieces[-1].stop == "length"


def test_generating_needs_a_prompt(engine):
    with pytest.raises((AssertionError, LongchatError), match="prompt"):
        next(engine.generate(Sampling()))


def test_room_for_a_prompt_is_made_once(engine):
    """Copying what was read at every call took a sixth of a long prompt's time."""
    engine.chunk, memories = 16, []

    def look(done, total):
        memories.append(engine.cache.layers[0].kv.memory)

    engine.prefill(list(range(1, 11)) * 50, look)
    assert len(memories) > 20 and all(memory is memories[0] for memory in memories)


# --- choosing a token


LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, -2.0, 5.0, 4.5])  # order: 5, 6, 0, 1, 2, 3, 4


def drawn(sampling: Sampling, recent: Sequence[int] = (), count: int = 400) -> list[int]:
    generator = torch.Generator().manual_seed(1)
    return [choose(LOGITS, sampling, recent, generator)[0] for _ in range(count)]


def test_temperature_zero_is_greedy_whatever_else_is_set():
    for sampling in (Sampling(), Sampling(top_k=3, top_p=0.2, min_p=0.5), Sampling(seed=4)):
        assert choose(LOGITS, sampling, []) == (5, pytest.approx(float(LOGITS.log_softmax(-1)[5])))


@pytest.mark.parametrize("k", [1, 2, 4, 7, 100])
def test_top_k(k):
    assert set(drawn(Sampling(temperature=3.0, top_k=k), count=1500)) == {5, 6, 0, 1, 2, 3, 4} & set(
        [5, 6, 0, 1, 2, 3, 4][:k]
    )


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    probabilities = LOGITS.softmax(-1)
    ordered = probabilities.sort(descending=True).values.cumsum(0)
    for size in (1, 2, 3, 5):
        just_reached = float(ordered[size - 1]) - 1e-4
        kept = set(drawn(Sampling(temperature=1.0, top_p=just_reached), count=3000))
        assert kept <= set([5, 6, 0, 1, 2, 3, 4][:size])
        assert len(kept) >= min(size, 3)
    assert set(drawn(Sampling(temperature=1.0, top_p=1e-9))) == {5}


def test_min_p_is_relative_to_the_best():
    # 6 has exp(-0.5) = 0.61 of the best, 0 has exp(-3) = 0.05.
    assert set(drawn(Sampling(temperature=1.0, min_p=0.7))) == {5}
    assert set(drawn(Sampling(temperature=1.0, min_p=0.5))) == {5, 6}
    assert set(drawn(Sampling(temperature=1.0, min_p=0.04), count=3000)) == {5, 6, 0}


def test_temperature_flattens():
    cold, hot = (drawn(Sampling(temperature=t), count=3000).count(5) / 3000 for t in (0.2, 10.0))
    assert cold == pytest.approx(float((LOGITS / 0.2).softmax(-1)[5]), abs=0.04)
    assert hot == pytest.approx(float((LOGITS / 10).softmax(-1)[5]), abs=0.04)


@pytest.mark.parametrize("spread", [0.3, 2.0, 6.0])
@pytest.mark.parametrize(
    "options",
    [{"top_p": 0.9}, {"top_p": 0.3, "top_k": 50}, {"min_p": 0.1, "top_p": 0.95}, {"top_k": 7}, {}],
    ids=str,
)
def test_what_is_kept_of_a_large_vocabulary_is_what_sorting_all_of_it_keeps(spread, options):
    logits = torch.randn(5000, generator=torch.Generator().manual_seed(3)) * spread
    sampling = Sampling(temperature=0.8, **options)
    ordered, order = (logits.double() / 0.8).softmax(-1).sort(descending=True)
    stays = torch.ones(5000, dtype=torch.bool)
    if sampling.top_k:
        stays[sampling.top_k :] = False
    stays &= ordered >= sampling.min_p * ordered[0]
    left = ordered * stays / (ordered * stays).sum()
    stays &= left.cumsum(0) - left < sampling.top_p
    generator, counts = torch.Generator().manual_seed(2), torch.zeros(5000)
    for _ in range(2000):
        counts[choose(logits, sampling, [], generator)[0]] += 1
    wanted = torch.zeros(5000)
    wanted[order[stays]] = (ordered[stays] / ordered[stays].sum()).float()
    assert not counts[wanted == 0].any()
    # Of the 20 likeliest no frequency is further off than five of its standard deviations.
    for token in order[:20].tolist():
        p = float(wanted[token])
        assert abs(float(counts[token]) - 2000 * p) <= 5 * (2000 * p * (1 - p)) ** 0.5 + 1e-6


@pytest.mark.parametrize("temperature", [5e-324, 1e-40])
def test_a_tiny_temperature_is_the_likeliest_token(temperature: float) -> None:
    assert set(drawn(Sampling(temperature=temperature), count=20)) == {5}


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits():
    assert choose(LOGITS, Sampling(repetition_penalty=1.5), [5, 5, 5])[0] == 6
    assert choose(LOGITS, Sampling(repetition_penalty=0.5), [6])[0] == 6
    logits = torch.tensor([-1.0, -1.1])
    assert choose(logits, Sampling(repetition_penalty=1.2), [0])[0] == 1
    assert choose(logits, Sampling(repetition_penalty=1.0), [0])[0] == 0
    token, logprob = choose(LOGITS, Sampling(repetition_penalty=1.5), [5])
    assert logprob == pytest.approx(float(LOGITS.log_softmax(-1)[token])), "the model's own, unpenalised"
    assert torch.equal(LOGITS, torch.tensor([2.0, 1.0, 0.0, -1.0, -2.0, 5.0, 4.5])), "logits are not touched"


def test_the_repetition_penalty_looks_at_what_the_model_wrote(engine, monkeypatch):
    """Neither at the prompt nor at its template, so that both can be quoted and ended; at earlier answers."""
    seen = []

    def looking(logits, sampling, recent, generator, begun):
        seen.append(list(recent))
        return choose(logits, sampling, recent, generator, begun)

    monkeypatch.setattr("longchat_cli.local.choose", looking)
    engine.prefill([5, 6, 7] * 100)
    sampling = Sampling(max_tokens=6, repetition_penalty=1.3)
    written = answer(list(engine.generate(sampling, said=[[8], [9]])))[1]
    assert seen[0] == [8, 9] and seen[-1] == [8, 9, *written[: len(seen) - 1]]
    seen.clear()
    list(engine.generate(sampling, said=[range(200), range(200, 400)]))
    assert seen[0] == list(range(400 - 256, 400)), "it is flat in time"


def test_start_penalty():
    assert choose(LOGITS, Sampling(start_penalty=0.4), [], None, [5])[0] == 5
    token, logprob = choose(LOGITS, Sampling(start_penalty=0.4), [], None, [5, 3, 5])
    assert (token, logprob) == (6, pytest.approx(float(LOGITS.log_softmax(-1)[6])))
    assert choose(LOGITS, Sampling(), [], None, [5, 5])[0] == 5, "off"


def test_answers_do_not_begin_as_the_last_ones_did(engine):
    """Token for token at the same place, in the first three and of the last sixteen answers."""
    prompt = prompt_of(engine)

    def begin(said, penalty=30.0):
        engine.reset()
        engine.prefill(prompt)
        return answer(list(engine.generate(Sampling(max_tokens=5, start_penalty=penalty), said=said)))[1]

    plain = begin([])
    assert begin([plain], 0.0) == plain
    other = begin([plain])
    assert all(a != b for a, b in zip(plain[:3], other[:3], strict=True))
    assert begin([[*other[:3], *plain]]) == plain, "further on it may be said"
    assert begin([plain, *[[]] * 16]) == plain, "it is long ago"


def test_seeds(engine):
    prompt = prompt_of(engine)

    def sample(seed: int | None) -> list[int]:
        engine.reset()
        engine.prefill(prompt)
        return answer(list(engine.generate(Sampling(temperature=2.0, seed=seed, max_tokens=12))))[1]

    assert sample(1) == sample(1)
    assert len({tuple(sample(seed)) for seed in range(4)}) > 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": math.nan},
        {"top_p": 0},
        {"top_p": 1.1},
        {"top_k": -1},
        {"min_p": 1.0},
        {"repetition_penalty": 0.0},
        {"max_tokens": 0},
    ],
)
def test_sampling_options_out_of_range(wrong):
    with pytest.raises(UsageError):
        Sampling(**wrong)


# --- marks, saving, coverage


@pytest.mark.parametrize("method", METHODS)
def test_marks_in_any_order(decoder, tokenizer, method):
    """Two marks on different branches, each restored after the other: ids, logits and answers come back."""
    engine = make(decoder, tokenizer, method, chunk=16)
    engine.prefill([9 + i % 80 for i in range(50)])
    root = engine.snapshot()
    branches = []
    for token in (11, 222):
        engine.restore(root)
        engine.prefill([token] * 20)
        mark, ids = engine.snapshot(), list(engine.ids)
        branches.append((mark, ids, answer(list(engine.generate(Sampling(max_tokens=7))))[1]))
    assert branches[0][2] != branches[1][2]
    for index in (0, 1, 1, 0):
        mark, ids, wanted = branches[index]
        engine.restore(mark)
        assert list(engine.ids) == ids
        assert answer(list(engine.generate(Sampling(max_tokens=7))))[1] == wanted
    engine.restore(root)
    assert len(engine.ids) == engine.cache.seen == 50


@pytest.mark.parametrize("method", METHODS)
def test_save_and_load(decoder, tokenizer, method, tmp_path):
    engine = make(decoder, tokenizer, method)
    engine.prefill(prompt_of(engine))
    list(engine.generate(Sampling(max_tokens=4)))
    engine.save(tmp_path / "s")
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o600
    other = make(decoder, tokenizer, method)
    other.prefill([7, 8, 9])
    other.load(tmp_path / "s")
    assert list(other.ids) == list(engine.ids)
    assert other.coverage().seen == engine.coverage().seen
    for chosen in (Sampling(max_tokens=6), Sampling(max_tokens=6, temperature=1.0, seed=3)):
        assert answer(list(other.generate(chosen))) == answer(list(engine.generate(chosen)))


def test_a_failed_load_leaves_the_engine_alone(decoder, tokenizer, tmp_path):
    engine = make(decoder, tokenizer)
    engine.prefill([7, 8, 9])
    engine.save(tmp_path / "s")
    sink = make(decoder, tokenizer, "sink")
    sink.prefill([1, 2, 3, 4])
    before = sink.logits
    with pytest.raises(BadInput, match="method"):
        sink.load(tmp_path / "s")
    with pytest.raises(MissingInput):
        sink.load(tmp_path / "none")
    data = (tmp_path / "s").read_bytes()
    (tmp_path / "s").write_bytes(data[: len(data) // 2])
    with pytest.raises(BadInput, match="damaged"):
        sink.load(tmp_path / "s")
    assert list(sink.ids) == [1, 2, 3, 4]
    assert sink.logits is before
    agrees(sink)


@pytest.mark.parametrize("field", ["fingerprint", "dtype"])
def test_states_of_other_weights_are_refused(decoder, tokenizer, tmp_path, field):
    engine = make(decoder, tokenizer)
    engine.prefill([7, 8, 9])
    engine.save(tmp_path / "s")
    other = LocalEngine(decoder, tokenizer, engine.method, dataclasses.replace(engine.info, **{field: "x"}))
    with pytest.raises(BadInput):
        other.load(tmp_path / "s")


def test_options_belong_to_a_state(decoder, tokenizer, tmp_path):
    engine = make(decoder, tokenizer, "sink")
    engine.prefill([7, 8, 9])
    engine.save(tmp_path / "s")
    wider = with_method(engine, "sink", {"sinks": 4, "window": 25})
    with pytest.raises(BadInput, match="options"):
        wider.load(tmp_path / "s")


def test_coverage_counts(decoder, tokenizer):
    engine = make(decoder, tokenizer, "sink", chunk=16)
    assert engine.coverage() == dataclasses.replace(
        engine.coverage(), seen=0, visible=0, forgotten=0, bytes=0
    )
    engine.prefill([9] * 100)
    covered = engine.coverage()
    assert (covered.seen, covered.visible, covered.forgotten) == (100, 28, 72)
    assert covered.bytes == engine.cache.bytes() > 28 * 3 * 2 * 2 * 16 * 4
    engine.reset()
    assert engine.coverage().seen == 0
    assert not engine.ids


def test_another_method_on_the_same_weights(decoder, tokenizer):
    engine = make(decoder, tokenizer)
    engine.prefill([7, 8, 9])
    other = with_method(engine, "sink", {"window": 30})
    assert (other.info.method, other.decoder) == ("sink", engine.decoder)
    assert not other.ids
    assert engine.info.method == "full"
    with pytest.raises(UsageError, match="--windw"):
        with_method(engine, "sink", {"windw": 3})


def test_counting_never_sees_control_tokens(engine):
    assert engine.count("<|im_end|>") > 1
    assert engine.count("") == 0


@pytest.mark.parametrize(("temperature", "rounds"), [(0, 4), (1, 8)])
@pytest.mark.parametrize("period", [3, 4, 7, 64, 65])
def test_loops_are_ended(engine, monkeypatch, period, temperature, rounds):
    """A phrase of 4 to 64 tokens said four times in a row ends a greedy answer, eight times a sampled one."""
    ends = 6 * rounds if period == 3 else period * rounds if period <= 64 else None
    script = itertools.cycle(range(20, 20 + period))
    monkeypatch.setattr("longchat_cli.local.choose", lambda *_: (next(script), 0.0))
    engine.prefill([5, 6])
    pieces = list(engine.generate(Sampling(max_tokens=600, temperature=temperature)))
    assert (len(engine.ids) - 2, pieces[-1].stop) == ((ends, "loop") if ends else (600, "length"))
