"""The matrix method x architecture: what must hold for every method on every model that transformers builds.

A new method joins by its line in the registry. Where an invariant is not defined, `UNDEFINED` says why.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

import pytest
import tiny
import torch
from small import SMALL
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from longchat_cli import state
from longchat_cli.attention import METHODS, method_class
from longchat_cli.attention.hf import HFDecoder, Slot, transformers_cache
from longchat_cli.attention.layer import Cache, Method
from longchat_cli.attention.rope import default_frequencies
from longchat_cli.errors import LongchatError, UsageError

pytestmark = pytest.mark.usefixtures("one_thread")
LENGTH = 44
TOLERANCE = 1e-4

WIDE: dict[str, dict[str, Any]] = {"recycled": {"keep": 4096, "stride": 5}}
"""Options under which it is within; methods not named have default budgets far above LENGTH."""

BOUNDED: dict[str, int] = {"window": 9, "sink": 12, "lm-infinite": 12, "recompute": 9}
"""Methods of flat memory and step time: the most tokens that a query sees under `SMALL`."""

HELD: dict[str, tuple[float, float]] = {"cca": (0.2, 0.5), "truncate": (0.0, 0.1), "pyramidinfer": (0.7, 0.9)}
"""Bytes held of a long text, at least and at most, as a share of full attention's; the others hold all."""

CHUNKS, DECODE, GENERATE = "chunks", "decode", "generate"
UNDEFINED: dict[tuple[str, str], str] = {
    ("infllm", CHUNKS): "the queries of a chunk choose blocks together, so the chunks are part of the result",
    ("infllm", DECODE): "a decoded token chooses its blocks alone, a prompt's chunk together",
    ("sink++", DECODE): "decoding sees sinks and window between refreshes, reading sees everything",
    ("recycled", DECODE): "decoding sees the small cache between refreshes, reading sees everything",
    ("truncate", CHUNKS): "a call's rows share the text that its last row reads",
    ("truncate", DECODE): "what is decoded comes on top of the budget, what is read within",
    ("snapkv", DECODE): "decoding evicts, reading does not",
    ("pyramidkv", DECODE): "decoding evicts, reading does not",
    ("h2o", DECODE): "decoding evicts, reading does not",
    ("tova", DECODE): "decoding evicts, reading does not",
    ("keydiff", DECODE): "decoding evicts, reading does not",
    ("quest", DECODE): "decoding reads the pages it chooses, reading sees everything",
    ("pyramidinfer", CHUNKS): "each call prunes its own rows by its own last queries",
    ("pyramidinfer", DECODE): "decoding appends, reading prunes",
    ("truncate", GENERATE): "generate calls the model itself, the method's reading is around it",
    ("recompute", GENERATE): "generate calls the model itself, the method's reading is around it",
}


def small(name: str) -> Method:
    """The method under a budget below LENGTH; methods not named as they scale themselves."""
    kind = method_class(name)
    if name in SMALL:
        return kind.build(SMALL[name])
    return kind.build(kind.at_budget(12, LENGTH))


@functools.cache
def decoder(architecture: str) -> HFDecoder:
    return HFDecoder(tiny.fresh(architecture))


def unfit(name: str, architecture: str) -> bool:
    """Whether the method must refuse the model: it moves keys, and they are not rotations of one another."""
    return method_class(name).needs_rope and "no" in tiny.ARCHITECTURES[architecture].rope


EVERYWHERE = {"full", "sink", "window"}
"""By default these run on every architecture, all methods on `TELLING` ones; with `-m slow` the rest."""

TELLING = {"llama", "glm4", "gemma2", "gpt-oss", "lfm2"}
"""Half and interleaved partial rotations, softcap, learned sinks, sliding and convolution layers."""

DEEP = {"llama", "gemma2", "lfm2"}
"""By default what concerns a method's state is checked for every method on these, for `full` on all."""

ALIASES = {
    name
    for first, name in itertools.combinations(METHODS, 2)
    if type(small(first).layer(0, 1, None)) is type(small(name).layer(0, 1, None))
}
"""Methods with another one's layer, such as `recall`, which reads with full attention."""


def cell_id(architecture: str, name: str) -> str:
    """Ids with an x are what the summary of a run counts."""
    return f"{architecture} x {name}"


def cells_where(invariant: str = "", deep: bool = False) -> Any:
    """A cell for each method and architecture it serves; skipped where `UNDEFINED` has a reason."""
    cells = []
    for architecture, name in itertools.product(tiny.ARCHITECTURES, METHODS):
        if unfit(name, architecture):
            continue  # see `test_methods_that_move_keys_refuse_models_without_a_rotation`
        everywhere = {"full"} if deep else EVERYWHERE
        rare = architecture not in (DEEP if deep else TELLING) and name not in everywhere
        rare = rare or (name in ALIASES and architecture != "llama")
        marks = [pytest.mark.slow] * rare
        if reason := UNDEFINED.get((name, invariant)):
            marks.append(pytest.mark.skip(reason=f"{name}: {reason}"))
        cells.append(pytest.param(architecture, name, id=cell_id(architecture, name), marks=marks))
    return pytest.mark.parametrize(("architecture", "name"), cells)


def read(model: HFDecoder, cache: Cache, ids: Tensor, sizes: Sequence[int], decode: bool = False) -> Tensor:
    """Logits [sum(sizes), vocab] of the next ids, read in calls of these sizes."""
    cache.decoding = decode
    out = [model.forward(part, cache, len(part)) for part in ids[: sum(sizes)].split(list(sizes))]
    return torch.cat(out)


def worst(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).abs().max())


@cells_where()
def test_within_the_budget_it_is_the_stock_model(architecture, name):
    """Invariant 1, reading and decoding."""
    model, ids = decoder(architecture), tiny.tokens(LENGTH)
    wanted = tiny.stock_logits(architecture, ids)
    cache = model.new_cache(method_class(name).build(WIDE.get(name, {})))
    found = [read(model, cache, ids, [LENGTH - 6]), read(model, cache, ids[-6:], [1] * 6, decode=True)]
    assert worst(torch.cat(found), wanted) <= TOLERANCE
    assert cache.seen == LENGTH
    assert cache.visible() == LENGTH


@pytest.mark.parametrize(("architecture", "dropped"), [("gemma2", "softcap"), ("gpt-oss", "sinks")])
def test_the_matrix_sees_what_shapes_the_logits(monkeypatch, architecture, dropped):
    """Without softcap or learned sinks in our own layers the first invariant would fail, by far."""
    attend = Slot.attend
    monkeypatch.setattr(
        Slot, "attend", lambda slot, *qkv, **extra: attend(slot, *qkv, **{**extra, dropped: None})
    )
    model, ids = decoder(architecture), tiny.tokens(LENGTH)
    found = read(model, model.new_cache(small("full")), ids, [LENGTH])
    assert worst(found, tiny.stock_logits(architecture, ids)) > 100 * TOLERANCE


def test_the_matrix_sees_the_temperature_of_queries():
    ids = tiny.tokens(LENGTH)
    options = tiny.ARCHITECTURES["ministral3"].options["rope_parameters"] | {"llama_4_scaling_beta": 0.0}
    with torch.no_grad():
        plain = tiny.build("Ministral3", rope_parameters=options)(input_ids=ids[None]).logits[0]
    wanted = tiny.stock_logits("ministral3", ids)
    assert worst(plain[:16], wanted[:16]) <= TOLERANCE
    assert worst(plain[16:], wanted[16:]) > 100 * TOLERANCE


@cells_where(CHUNKS)
def test_chunks_do_not_matter(architecture, name):
    """Invariant 2, beyond the budget."""
    model, ids = decoder(architecture), tiny.tokens(LENGTH)
    whole = read(model, model.new_cache(small(name)), ids, [LENGTH])
    for size in (1, 7, 64) if architecture == "llama" else (11,):
        sizes = [min(size, LENGTH - first) for first in range(0, LENGTH, size)]
        assert worst(read(model, model.new_cache(small(name)), ids, sizes), whole) <= TOLERANCE


@cells_where(DECODE)
def test_decoding_equals_reading(architecture, name):
    """Invariants 3 and 8: turns of reading and decoding, appended, equal one read of everything."""
    model, ids = decoder(architecture), tiny.tokens(LENGTH)
    whole = read(model, model.new_cache(small(name)), ids, [LENGTH])
    cache = model.new_cache(small(name))
    turns = [(15, False), (3, True), (14, False), (4, True), (8, False)]
    found, first = [], 0
    for count, decode in turns:
        sizes = [1] * count if decode else [count]
        found.append(read(model, cache, ids[first:], sizes, decode))
        first += count
    assert first == LENGTH
    assert worst(torch.cat(found), whole) <= TOLERANCE


@cells_where(deep=True)
def test_marks_leave_no_trace(architecture, name):
    """Invariant 5: rolled back tokens change nothing, from marks before and after evictions, repeatedly."""
    model, ids = decoder(architecture), tiny.tokens(LENGTH)
    other = tiny.tokens(LENGTH, seed=1)

    def start() -> Cache:
        cache = model.new_cache(small(name))
        read(model, cache, ids, [14])
        return cache

    def go_on(cache: Cache, first: int, source: Tensor, count: int) -> Tensor:
        return read(model, cache, source[first:], [1] * count, decode=True)

    plain = start()
    wanted = go_on(plain, 14, ids, 10)
    cache = start()
    early = cache.snapshot()
    go_on(cache, 14, ids, 6)
    late = cache.snapshot()
    for mark, first in ((early, 14), (late, 20), (early, 14)):
        cache.restore(mark)
        assert cache.seen == first
        go_on(cache, first, other, 3)
        cache.restore(mark)
        count = 4 if mark is late else 7
        assert torch.equal(go_on(cache, first, ids, count), wanted[first - 14 : first - 14 + count])


@cells_where(deep=True)
def test_saved_states_go_on_identically(architecture, name, tmp_path):
    """Invariant 5 through a file, layers that the model keeps itself included."""
    model, ids = decoder(architecture), tiny.tokens(LENGTH)
    cache = model.new_cache(small(name))
    read(model, cache, ids, [20])
    read(model, cache, ids[20:], [1] * 8, decode=True)
    path = tmp_path / "state"
    state.save(path, cache, {"model": architecture}, {"more": torch.arange(3)})
    visible = cache.visible()
    wanted = read(model, cache, ids[28:], [1] * 7, decode=True)
    again = model.new_cache(small(name))
    about, extra = state.load(path, again, {"model": architecture})
    assert about == {"model": architecture}
    assert extra["more"].tolist() == [0, 1, 2]
    assert (again.seen, again.visible()) == (28, visible)
    assert torch.equal(read(model, again, ids[28:], [1] * 7, decode=True), wanted)


@cells_where(GENERATE, deep=True)
def test_generate_is_our_loop(architecture, name):
    """Invariant 7: transformers' own greedy generation over our cache."""
    model, prompt = decoder(architecture), tiny.tokens(20)
    out = model.model.generate(
        input_ids=prompt.unsqueeze(0),
        cache=transformers_cache(model.new_cache(small(name))),
        max_new_tokens=10,
        do_sample=False,
    )
    cache = model.new_cache(small(name))
    logits = model.forward(prompt, cache)
    cache.decoding = True
    ours = []
    for _ in range(10):
        ours.append(int(logits[-1].argmax()))
        logits = model.forward(torch.tensor(ours[-1:]), cache)
    assert out[0, 20:].tolist() == ours


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("architecture", ["llama", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_memory_is_counted_and_flat_where_promised(architecture, name):
    """Invariant 6: bytes of the storages held, measured against every tensor reachable from the cache."""
    model = decoder(architecture)
    length = 4000
    cache = model.new_cache(small(name))
    held = []
    for step in range(length // 100):
        model.forward(tiny.tokens(100, seed=step), cache)
        assert cache.bytes() == reachable(cache.layers), "everything held is counted"
        held.append(cache.bytes())
    per_token = 2 * 2 * 8 * 4 * len(cache.own())  # k and v, KV heads, dim, float32
    if name in BOUNDED:
        assert length > 10 * BOUNDED[name]
        assert max(held[20:]) <= max(held[:20])
        assert cache.visible() <= BOUNDED[name]
    else:
        low, high = HELD.get(name, (1.0, math.inf))
        if name == "pyramidinfer" and len(cache.own()) == 1:  # the first layer passes on less, and keeps all
            low, high = 1.0, math.inf
        assert low <= held[-1] / (length * per_token) <= high


def reachable(value: Any) -> int:
    """Bytes of all distinct storages below `value`, except rotations."""
    storages: dict[int, int] = {}

    def walk(item: Any) -> None:
        if isinstance(item, Tensor):
            storages[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
        elif isinstance(item, (list, tuple)):
            for part in item:
                walk(part)
        elif hasattr(item, "__dict__"):
            for key, part in vars(item).items():
                if key != "rope":
                    walk(part)

    walk(value)
    return sum(storages.values())


@pytest.mark.parametrize("name", sorted(BOUNDED.keys() - {"recompute"}))  # a step of it reads a window
def test_work_per_step_is_flat(name):
    """Keys handed to the kernel per step, far beyond the budget: what time is made of, without a clock."""
    model = decoder("llama")
    cache = model.new_cache(small(name))
    cache.decoding = True
    counts = []
    for layer in cache.own():
        spans = layer.spans
        layer.spans = lambda new, spans=spans: counted(spans(new), counts)  # type: ignore[method-assign]
    for token in tiny.tokens(150):
        model.forward(token.view(1), cache)
    assert max(counts[60:]) <= BOUNDED[name]


def counted(spans: list, counts: list[int]) -> list:
    counts.append(sum(int(torch.as_tensor(s.limits()[1])) - int(torch.as_tensor(s.start)) for s in spans))
    return spans


def test_window_is_mistrals_own_sliding_window():
    ids = tiny.tokens(LENGTH)
    sliding = tiny.build("Mistral", sliding_window=9)
    with torch.no_grad():
        wanted = sliding(input_ids=ids.unsqueeze(0), use_cache=False).logits[0]
    model = decoder("mistral")
    found = read(model, model.new_cache(small("window")), ids, [30, 14])
    assert worst(found, wanted) <= TOLERANCE


@pytest.mark.parametrize("name", ["truncate", "recompute"])
def test_generate_refuses_methods_that_read_anew(name):
    with pytest.raises(UsageError, match="generate"):
        transformers_cache(decoder("llama").new_cache(small(name)))


def test_generate_goes_on_from_what_we_read():
    model, prompt = decoder("llama"), tiny.tokens(20)
    for name in ("full", "sink"):
        cache = model.new_cache(small(name))
        model.forward(prompt[:-1], cache)
        out = model.model.generate(
            input_ids=prompt.unsqueeze(0),
            cache=transformers_cache(cache),
            max_new_tokens=5,
            do_sample=False,
        )
        fresh = transformers_cache(model.new_cache(small(name)))
        whole = model.model.generate(
            input_ids=prompt.unsqueeze(0), cache=fresh, max_new_tokens=5, do_sample=False
        )
        assert out.tolist() == whole.tolist()


# --- rotations and refusals


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_probing_finds_every_layers_rotation(architecture):
    found = []
    for rope in decoder(architecture).ropes:
        if isinstance(rope, str):
            found.append("own" if "its own cache" in rope else "no")
        elif rope is None:
            found.append(None)
        else:
            found.append(f"{'interleaved' if rope.interleaved else 'half'} {len(rope.frequencies)}")
    assert tuple(found) == tiny.ARCHITECTURES[architecture].rope


def test_probing_takes_the_right_one_of_two_frequency_sets():
    """Gemma 3's full layers turn at another base than its sliding ones; llama3 scaling is found as it is."""
    model = decoder("gemma3")
    parameters = model.config.rope_parameters
    bases = {kind: parameters[f"{kind}_attention"]["rope_theta"] for kind in ("full", "sliding")}
    assert bases["full"] != bases["sliding"]
    rope = model.ropes[1]
    assert torch.allclose(rope.frequencies, default_frequencies(8, bases["full"]), rtol=1e-5)
    scaled = decoder("llama3-rope").ropes[0].frequencies
    plain = default_frequencies(8, 10_000.0)
    assert torch.allclose(scaled[:1], plain[:1], rtol=1e-5)
    assert torch.allclose(scaled[-1:], plain[-1:] / 4, rtol=1e-5)


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        pytest.param(architecture, name, id=cell_id(architecture, name))
        for architecture, name in itertools.product(tiny.ARCHITECTURES, METHODS)
        if unfit(name, architecture)
    ],
)
def test_methods_that_move_keys_refuse_models_without_a_rotation(architecture, name):
    with pytest.raises(UsageError) as caught:
        decoder(architecture).new_cache(small(name))
    assert re.search("not a plain rotation|at other rates", caught.value.why)


# --- rotations that change with length


@functools.cache
def stretching(kind: str, trained: int = 32) -> tuple[PreTrainedModel, HFDecoder]:
    """A stock model whose rates change past `trained` tokens, and the same as a decoder."""
    config, options = {
        "longrope": ("Phi3", tiny.longrope(4, trained)),
        "dynamic": ("Llama", {"rope_parameters": tiny.DYNAMIC, "max_position_embeddings": trained}),
    }[kind]
    return tiny.build(config, **options), HFDecoder(tiny.build(config, **options))


@torch.no_grad()
def stock_calls(stock: PreTrainedModel, ids: Tensor, sizes: Sequence[int]) -> Tensor:
    """Logits of a stock model that reads ids in calls of these sizes with its own cache."""
    cache = DynamicCache(config=stock.config)
    parts = ids[: sum(sizes)].split(list(sizes))
    return torch.cat([stock(input_ids=part[None], cache=cache).logits[0] for part in parts])


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_within_the_trained_length_rates_are_the_first_ones(kind):
    stock, model = stretching(kind)
    ids = tiny.tokens(32)
    wanted = stock_calls(stock, ids, [32])
    found = read(model, model.new_cache(small("full")), ids, [10, 15, 1, 6])
    assert worst(found, wanted) <= TOLERANCE


@pytest.mark.parametrize("sizes", [[44], [20, 24], [30, 2, 7, 5], [28] + [1] * 16])
def test_a_longrope_text_that_outgrows_its_first_rates_is_read_again(sizes):
    """Every call past the switch has what stock computes for the whole text at once."""
    stock, model = stretching("longrope")
    ids, cache = tiny.tokens(LENGTH), model.new_cache(small("full"))
    for size in sizes:
        cache.decoding = size == 1
        end = cache.seen + size
        found = model.forward(ids[cache.seen : end], cache, size)
        assert worst(found, stock_calls(stock, ids, [end])[-size:]) <= TOLERANCE
        assert cache.seen == cache.visible() == end
    assert not len(cache.text)
    mixed = stock_calls(stock, ids, [20, 24])
    assert worst(mixed, stock_calls(stock, ids, [44])) > 100 * TOLERANCE, "what it would be without"


def test_a_longrope_text_can_outgrow_its_rates_from_a_mark_and_a_file(tmp_path):
    _, model = stretching("longrope")
    ids = tiny.tokens(LENGTH)
    wanted = read(model, model.new_cache(small("window")), ids, [LENGTH])[-14:]
    cache = model.new_cache(small("window"))
    read(model, cache, ids, [30])
    mark = cache.snapshot()
    state.save(tmp_path / "state", cache, {}, {})
    assert worst(read(model, cache, ids[30:], [14]), wanted) <= TOLERANCE
    cache.restore(mark)
    assert worst(read(model, cache, ids[30:], [5, 9]), wanted) <= TOLERANCE
    again = model.new_cache(small("window"))
    state.load(tmp_path / "state", again, {})
    assert worst(read(model, again, ids[30:], [14]), wanted) <= TOLERANCE


@pytest.mark.parametrize("sizes", [[44], [20, 24], [30] + [1] * 14])
def test_dynamic_rates_beyond_the_trained_length_are_those_of_stock_calls(sizes):
    """Every call turns at the rates of the length so far and keys stay as they were: stock's own cache."""
    stock, model = stretching("dynamic")
    ids = tiny.tokens(LENGTH)
    found = read(model, model.new_cache(small("full")), ids, sizes)
    assert worst(found, stock_calls(stock, ids, sizes)) <= TOLERANCE


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "no attention interface: bloom": ("Bloom", {"n_head": 4, "n_layer": 2}),
    "no attention interface: falcon": ("Falcon", {"num_kv_heads": 2, "head_dim": ...}),
    "no attention interface: mpt": ("Mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2}),
    "keys of other layers: gemma3n": (
        "Gemma3nText",
        {
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "layer_types": ["full_attention"] * 4,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": tiny.VOCABULARY,
            "altup_num_inputs": 2,
            "laurel_rank": 4,
            "intermediate_size": [40] * 4,
            "activation_sparsity_pattern": [0.0] * 4,
        },
    ),
    "keys of other layers: gemma4": (
        "Gemma4Text",
        {
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "layer_types": ["full_attention"] * 4,
            "global_head_dim": 8,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": tiny.VOCABULARY,
        },
    ),
    "all layers slide: mistral": ("Mistral", {"sliding_window": 16}),
    "no attention: mamba": ("Mamba", {}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_not_silently_wrong(case):
    config, options = REFUSED[case]
    ids = tiny.tokens(8)
    with pytest.raises(LongchatError) as caught:
        model = HFDecoder(tiny.build(config, **options))
        model.forward(ids, model.new_cache(method_class("full").build({})))
    assert caught.value.exit_code in (2, 65)
    assert caught.value.why


def test_batches_are_refused():
    model = decoder("llama")
    ids = torch.stack([tiny.tokens(5), tiny.tokens(5, seed=1)])
    with pytest.raises(UsageError, match="one sequence"):
        model.model(input_ids=ids, cache=transformers_cache(model.new_cache(small("full"))))


def test_the_pinned_cache_interface():
    """transformers changed its cache four times within 5.x: what we build on, said in one place."""
    import inspect

    from transformers import LlamaForCausalLM
    from transformers.cache_utils import CacheLayerMixin, DynamicCache, DynamicLayer
    from transformers.models.llama import modeling_llama

    source = inspect.getsource(modeling_llama.LlamaAttention.forward)
    assert "kwargs=kwargs" in source, "attention hands its kwargs to the cache"
    assert CacheLayerMixin.__abstractmethods__ <= {
        "lazy_initialization",
        "update",
        "get_mask_sizes",
        "get_seq_length",
        "get_max_length",
    }
    layers = DynamicCache(config=tiny.model("gemma2").config).layers
    assert [type(layer) is DynamicLayer for layer in layers] == [False, True]
    assert "logits_to_keep" in inspect.signature(LlamaForCausalLM.forward).parameters


def test_the_matrix_is_as_large_as_we_say():
    assert len(tiny.ARCHITECTURES) >= 25
    assert set(tiny.ARCHITECTURES) > TELLING > DEEP
    for table in (SMALL, WIDE, BOUNDED, HELD, {name for name, _ in UNDEFINED}):
        assert set(table) <= set(METHODS)
    assert all(UNDEFINED.values()), "a reason for each"
