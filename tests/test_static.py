"""The decode step of fixed shapes against the ordinary one, across ring wraps, breaks and mode changes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import tiny
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from longchat_cli import kernels, state
from longchat_cli.attention import METHODS, method_class
from longchat_cli.attention.hf import HFDecoder
from longchat_cli.engine import EngineInfo
from longchat_cli.errors import OutOfMemory, UsageError
from longchat_cli.local import LocalEngine
from longchat_cli.models import static
from longchat_cli.models.lean import LeanDecoder
from longchat_cli.models.static import StaticStep
from longchat_cli.prompt import Message
from longchat_cli.sampling import Sampling
from longchat_cli.tokens import Tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")

BOUNDED = {
    "window": ({"window": 9}, {"window": 1}, {"window": 64}),
    "sink": ({"sinks": 3, "window": 9}, {"sinks": 0, "window": 8}, {"sinks": 4, "window": 1}),
    "lm-infinite": ({"sinks": 5, "window": 7},),
}
CASES = [(method, options) for method, several in BOUNDED.items() for options in several]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    path = tmp_path_factory.mktemp("lean")
    tiny.build("Llama").save_pretrained(path)
    return LeanDecoder.from_dir(path, dtype=torch.float32)


def read(decoder, method, ids):
    """A cache that has read ids as a prompt, ready to decode."""
    cache = decoder.new_cache(method)
    for part in ids.split(16):
        decoder.forward(part, cache)
    cache.decoding = True
    return cache


def decoded(decoder, cache, ids):
    return torch.stack([decoder.forward(token.view(1), cache)[-1] for token in ids])


def stepped(step, cache, ids):
    return torch.stack([step.feed(int(token), cache) for token in ids])


def same(a, b):
    return (a - b).abs().max() <= 1e-4


@pytest.mark.parametrize(("name", "options"), CASES)
def test_equals_the_ordinary_step(decoder, name, options):
    prompt, steps = (21, 300) if options == BOUNDED[name][0] else (5, 80)
    method, ids = method_class(name).build(options), tiny.tokens(prompt + steps)
    plain, cache = (read(decoder, method, ids[:prompt]) for _ in range(2))
    step = StaticStep(decoder, method)
    assert same(stepped(step, cache, ids[prompt:]), decoded(decoder, plain, ids[prompt:]))


@pytest.mark.parametrize(("name", "options"), CASES)
def test_turns_alternate(decoder, name, options):
    """Prompt, answer, prompt, answer: the state goes to the rings and back, and memory does not move."""
    method, ids = method_class(name).build(options), tiny.tokens(120)
    plain, cache = (read(decoder, method, ids[:20]) for _ in range(2))
    step, places = StaticStep(decoder, method), set()
    for low in range(20, 120, 25):
        middle, end = low + 13, low + 25
        assert same(stepped(step, cache, ids[low:middle]), decoded(decoder, plain, ids[low:middle]))
        places.add(tuple(x.data_ptr() for layer in step.layers for x in layer.held()))
        step.settle(cache)
        assert (cache.position, cache.seen, cache.visible()) == (plain.position, plain.seen, plain.visible())
        assert same(*(decoder.forward(ids[middle:end], each, 12) for each in (cache, plain)))
    assert len(places) == 1


@pytest.mark.parametrize(("name", "options"), CASES)
def test_settled_state_is_saved_and_marked(decoder, name, options, tmp_path):
    method, ids = method_class(name).build(options), tiny.tokens(90)
    cache, step = read(decoder, method, ids[:20]), StaticStep(decoder, method)
    stepped(step, cache, ids[20:60])
    step.settle(cache)
    mark = cache.snapshot()
    state.save(tmp_path / "state", cache, {}, {})
    wanted = stepped(step, cache, ids[60:])
    step.settle(cache)
    cache.restore(mark)
    assert torch.equal(stepped(step, cache, ids[60:]), wanted)
    loaded = decoder.new_cache(method)
    state.load(tmp_path / "state", loaded, {})
    loaded.decoding = True
    if options["window"] > 1:
        assert same(stepped(StaticStep(decoder, method), loaded, ids[60:]), wanted)
    else:
        assert same(decoded(decoder, loaded, ids[60:]), wanted)


class Break(Exception):
    pass


@pytest.mark.parametrize(("name", "options"), CASES)
@pytest.mark.parametrize("after", [0, 1])
def test_a_broken_step_leaves_whole_tokens(decoder, name, options, after, monkeypatch):
    """A step that fails in layer `after` is fed again, or settled, as if it had never begun."""
    method, ids = method_class(name).build(options), tiny.tokens(80)
    plain, cache = (read(decoder, method, ids[:20]) for _ in range(2))
    step = StaticStep(decoder, method)
    assert same(stepped(step, cache, ids[20:34]), decoded(decoder, plain, ids[20:34]))
    fixed, attend = step.layers[after], step.layers[after].attend

    def breaks(*inputs):
        attend(*inputs)
        raise Break

    for settle in (False, True):
        monkeypatch.setattr(fixed, "attend", breaks, raising=False)
        with pytest.raises(Break):
            step.feed(7, cache)
        monkeypatch.undo()
        if settle:
            step.settle(cache)
            assert cache.position == plain.position
        token = ids[60 + settle]
        wanted = decoder.forward(token.view(1), plain)[-1]
        assert same(step.feed(int(token), cache), wanted)


def test_waits_for_the_first_tokens(decoder):
    method, ids = method_class("sink").build({"sinks": 6, "window": 8}), tiny.tokens(20)
    cache, step = read(decoder, method, ids[:4]), StaticStep(decoder, method)
    assert step.feed(int(ids[4]), cache) is None
    assert cache.position == 4, "nothing was read"
    decoded(decoder, cache, ids[4:6])
    assert step.feed(int(ids[6]), cache) is not None


class Capture(TorchDispatchMode):
    """Refuses what a CUDA graph refuses: looking at a tensor's numbers, and shapes that hang on them."""

    def __torch_dispatch__(self, function, types, inputs=(), options=None):
        assert function not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return function(*inputs, **(options or {}))


@pytest.mark.parametrize(("name", "options"), CASES)
def test_a_step_can_be_captured(decoder, name, options, monkeypatch):
    """It waits for no number, and calls the kernels alike at every position."""
    method, ids = method_class(name).build(options), tiny.tokens(40)
    cache, step, calls = read(decoder, method, ids[:5]), StaticStep(decoder, method), []
    monkeypatch.setattr(kernels, "_forced", "reference")  # `sdpa` looks at bounds: it never meets a GPU
    attend = kernels.attend

    def watched(q, spans, *others):
        calls.append(
            [(x.k.data_ptr(), x.k.shape, type(x.start), type(x.stop), x.turn is None) for x in spans]
        )
        return attend(q, spans, *others)

    monkeypatch.setattr(kernels, "attend", watched)
    first, *rest = ids[5:].tolist()
    step.feed(first, cache)
    with Capture():
        for token in rest:
            step.feed(token, cache)
    layers = len(step.layers)
    assert len(calls) == 35 * layers
    assert all(calls[i] == calls[i % layers] for i in range(len(calls)))


@pytest.mark.parametrize("name", [name for name in METHODS if name not in BOUNDED])
def test_other_methods_say_why_not(decoder, name):
    with pytest.raises(UsageError, match="no fixed shape"):
        StaticStep(decoder, method_class(name).build({}))


def test_other_models_and_packed_keys_say_why_not(decoder):
    with pytest.raises(UsageError, match="transformers"):
        StaticStep(HFDecoder(tiny.build("Llama")), method_class("sink").build({}))
    with pytest.raises(UsageError, match="--kv-dtype is int8"):
        StaticStep(decoder, method_class("sink").build({"kv_dtype": "int8"}))


def test_rings_that_do_not_fit_say_so(decoder, monkeypatch):
    """They are made whole; without --compile a window fills as the text comes."""
    huge = method_class("sink").build({"window": 2**31 - 1})
    with pytest.raises(OutOfMemory, match=r"2,147,483,647 tokens take [\d.]+ GiB at once"):
        StaticStep(decoder, huge)
    fitting, ids = method_class("window").build({"window": 500}), tiny.tokens(9)
    step = StaticStep(decoder, fitting)
    stepped(step, read(decoder, fitting, ids), ids[:1])
    monkeypatch.setattr(static, "free_bytes", step.bytes)
    StaticStep(decoder, fitting)
    monkeypatch.setattr(static, "free_bytes", lambda: step.bytes() - 1)
    with pytest.raises(OutOfMemory):
        StaticStep(decoder, fitting)


@pytest.mark.slow
def test_the_default_model(default_model_dir):
    """As `chat --compile` runs it, well past the window; in float32, where the order of keys is no matter."""
    decoder = LeanDecoder.from_dir(default_model_dir, dtype=torch.float32)
    method = method_class("sink").build({"sinks": 4, "window": 60})
    plain, cache = (read(decoder, method, torch.arange(500, 540)) for _ in range(2))
    step, token = StaticStep(decoder, method), 600
    for _ in range(100):
        wanted, found = decoder.forward(torch.tensor([token]), plain)[-1], step.feed(token, cache)
        assert (wanted - found).abs().max() <= 1e-2
        token = int(wanted.argmax())


# --- in the engine


@pytest.fixture(scope="module")
def engine_of(tiny_model):
    path = tiny_model("llama")
    tokenizer = Tokenizer.from_dir(path)
    tokenizer.eos_ids = frozenset()
    decoder = LeanDecoder.from_dir(path, dtype=torch.float32)

    def make(method: str, compiled: bool, options=None) -> LocalEngine:
        about = EngineInfo("tiny", 512, method, "cpu", "float32", "f" * 64, frozenset({"save", "snapshot"}))
        built = method_class(method).build(BOUNDED[method][0] if options is None else options)
        return LocalEngine(decoder, tokenizer, built, about, compile=compiled)

    return make


def converse(engine, path):
    """Turns with everything a session does between and within answers; all ids and coverages."""
    seen, sampling = [], Sampling(max_tokens=30, temperature=0.8, seed=3)
    for text in ("hello there, miller", "and then?", "the river rose"):
        engine.prefill(engine.render_turn(Message.of("user", text)).ids)
        mark = engine.snapshot()
        for count, piece in enumerate(engine.generate(sampling)):
            seen.append(piece.ids)
            if count == 11:  # /context while an answer streams
                seen.append(replace(engine.coverage(), bytes=0))
            if count == 20 and text == "and then?":  # Ctrl-C, /undo, the turn again
                break
        else:
            engine.save(path)
            engine.load(path)
            continue
        engine.restore(mark)
        seen.append([piece.ids for piece in engine.generate(sampling)])
    return seen, engine.ids.tolist()


@pytest.mark.parametrize("method", BOUNDED)
def test_a_session_is_the_same(engine_of, method, tmp_path):
    compiled, plain = engine_of(method, True), engine_of(method, False)
    found, wanted = converse(compiled, tmp_path / "a"), converse(plain, tmp_path / "b")
    assert found == wanted
    assert compiled.stepper.layers[0].held(), "the fixed step served"
    assert compiled.coverage().bytes > plain.coverage().bytes, "what the rings hold is counted"


def test_an_interrupted_answer_agrees_with_its_ids(engine_of, monkeypatch):
    engine = engine_of("sink", True)
    engine.prefill(engine.render([Message.of("user", "hello there")]).ids)
    stream = engine.generate(Sampling(max_tokens=40, temperature=0))
    for _ in range(15):
        next(stream)
    layer = engine.stepper.layers[1]

    def interrupted(*inputs):
        raise KeyboardInterrupt

    monkeypatch.setattr(layer, "attend", interrupted, raising=False)
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    monkeypatch.undo()
    assert engine.cache.seen == len(engine.ids)
    fresh = engine_of("sink", False)
    fresh.prefill(list(engine.ids))
    assert same(engine.logits, fresh.logits)


def test_the_command_line(tiny_model):
    asked = [sys.executable, "-m", "longchat_cli", "chat", "--verbose", "--compile", "--max-tokens", "4"]
    asked += ["--model", str(tiny_model("llama")), "--method"]
    run = partial(subprocess.run, input="hello\nonce more\n", capture_output=True, text=True)
    done = run([*asked, "sink"])
    assert done.returncode == 0, done.stderr
    assert "decoding: a fixed decode step, not captured: no GPU" in done.stderr
    refused = run([*asked, "cca"])
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1 and "no fixed shape" in refused.stderr
