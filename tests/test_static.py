"""The decode step of fixed shapes against the ordinary one, across ring wraps, breaks and mode changes."""

from __future__ import annotations

import pytest
import tiny
import torch

from longchat_cli.attention import METHODS, method_class
from longchat_cli.attention.hf import HFDecoder
from longchat_cli.errors import UsageError
from longchat_cli.models import static
from longchat_cli.models.lean import LeanDecoder
from longchat_cli.models.static import StaticStep

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
    from longchat_cli import state

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


def test_nothing_is_read_back_from_the_position(decoder, monkeypatch):
    """What a captured step may not do: look at a tensor's numbers, or choose shapes by the position."""
    method, ids = method_class("sink").build({"sinks": 3, "window": 9}), tiny.tokens(60)
    cache, step = read(decoder, method, ids[:20]), StaticStep(decoder, method)
    stepped(step, cache, ids[20:22])
    spans = []
    attend = static.FixedLayer.attend.__globals__["kernels"].attend

    def watched(q, given, *others):
        spans.append([(span.k.data_ptr(), span.k.shape, type(span.start), type(span.stop)) for span in given])
        return attend(q, given, *others)

    monkeypatch.setattr(static.FixedLayer.attend.__globals__["kernels"], "attend", watched)
    for token in ids[22:]:
        step.feed(int(token), cache)
    layers = len(step.layers)
    assert all(spans[i] == spans[i % layers] for i in range(len(spans)))


@pytest.mark.parametrize("name", [name for name in METHODS if name not in BOUNDED])
def test_other_methods_say_why_not(decoder, name):
    with pytest.raises(UsageError, match="no fixed shape"):
        StaticStep(decoder, method_class(name).build({}))


def test_other_models_and_packed_keys_say_why_not(decoder):
    with pytest.raises(UsageError, match="transformers"):
        StaticStep(HFDecoder(tiny.build("Llama")), method_class("sink").build({}))
    with pytest.raises(UsageError, match="few bits"):
        StaticStep(decoder, method_class("sink").build({"kv_dtype": "int8"}))


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
