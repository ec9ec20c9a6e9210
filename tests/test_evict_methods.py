"""Methods that evict or read text anew: against float64 references and stock models; what they free."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import weakref
from typing import Any

import oracle
import oracle_evict
import pytest
import tiny
import torch
from oracle_evict import H2O, TOVA, KeyDiff, SnapKV, Text
from test_methods import assert_close, case, layer_of, rope_of, run, splits, tensors  # noqa: F401
from torch import Tensor

from longchat_cli import state
from longchat_cli.attention import method_class
from longchat_cli.attention.full import FullLayer
from longchat_cli.attention.hf import HFDecoder
from longchat_cli.attention.layer import Cache, Layer
from longchat_cli.chat import Conversation
from longchat_cli.engine import EngineInfo
from longchat_cli.errors import UsageError
from longchat_cli.local import LocalEngine
from longchat_cli.models.lean import LeanDecoder
from longchat_cli.sampling import Sampling
from longchat_cli.tokens import Tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")
HALF = oracle.Turn(8)
TOLERANCE = 1e-4

TALK = [(26, 9), (11, 8)]
"""Two turns, (prompt, decoded): every budget below is passed in the first, and again in the second."""

EVICTING: dict[str, tuple[str, dict[str, Any]]] = {
    "snapkv": ("snapkv", {"budget": 12, "window": 4}),
    "snapkv-mean": ("snapkv", {"budget": 12, "window": 3, "pool": 5, "pooling": "mean", "heads": "max"}),
    "snapkv-even-pool": ("snapkv", {"budget": 15, "window": 1, "pool": 4}),
    "snapkv-narrow": ("snapkv", {"budget": 9, "window": 4, "pool": 1}),
    "h2o": ("h2o", {"budget": 12}),
    "h2o-odd": ("h2o", {"budget": 7}),
    "tova": ("tova", {"budget": 12}),
    "tova-head": ("tova", {"budget": 9, "share": "head"}),
    "keydiff": ("keydiff", {"budget": 12}),
}


def rule_of(name: str, options: dict[str, Any]) -> SnapKV | H2O | TOVA | KeyDiff:
    if name == "h2o":
        return H2O(options["budget"])
    if name == "tova":
        return TOVA(options["budget"], options.get("share", "layer"))
    if name == "keydiff":
        return KeyDiff(options["budget"])
    snap = {"window": 32, "pool": 7, "pooling": "max", "heads": "mean"}
    return SnapKV(**{**snap, **{name: value for name, value in options.items() if name != "beta"}})


def length_of(turns: oracle_evict.Turns) -> int:
    return sum(map(sum, turns))


def talk(
    layer: Layer, q: Tensor, k: Tensor, v: Tensor, turns: oracle_evict.Turns, size: int, **extra: Any
) -> tuple[Tensor, list[oracle_evict.Kept]]:
    """Feed rotated rows, prompts in chunks of `size`; outputs, and the positions held after each turn."""
    out, after, first = [], [], layer.seen
    for prompt, decoded in turns:
        sizes = [min(size, prompt - at) for at in range(0, prompt, size)]
        for rows, decoding in [(n, False) for n in sizes] + [(1, True)] * decoded:
            part = (x[:, first : first + rows] for x in (q, k, v))
            out.append(layer.attend(*part, q.shape[-1] ** -0.5, decoding, **extra))
            first += rows
        after.append(held_positions(layer, v))
    return torch.cat(out, dim=1), after


def held_positions(layer: Any, v: Tensor) -> oracle_evict.Kept:
    """Which text positions each KV head holds, found by their values; keys must be those of the same ones."""
    same = (layer.kv.v.unsqueeze(2) == v.unsqueeze(1)).all(-1)
    assert same.sum(-1).eq(1).all()
    return same.int().argmax(-1).tolist()


def rotated(turn: oracle.Turn, *shape: int, seed: int = 0) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Random q, k, v unrotated, and as a model gives them to a layer."""
    q, k, v = tensors(*shape, seed)
    return (q, k, v), (turn(q, range(q.shape[1])).float(), turn(k, range(q.shape[1])).float(), v)


# --- snapkv, h2o, tova, keydiff: the published rules


@pytest.mark.parametrize("name", ["snapkv", "h2o", "tova", "keydiff"])
def test_evicting_equals_the_published_rule(case, name):  # noqa: F811
    """Outputs and kept positions over two turns, however the prompts are chunked."""
    _equals_the_rule(*case, name)


@pytest.mark.parametrize("cell", [cell for cell in EVICTING if "-" in cell])
def test_evicting_by_other_options(cell):
    _equals_the_rule(6, 2, 16, HALF, cell)


def _equals_the_rule(heads: int, groups: int, dim: int, turn: oracle.Turn, cell: str) -> None:
    name, options = EVICTING[cell]
    plain, turned = rotated(turn, heads, groups, dim, length_of(TALK))
    wanted, kept = oracle_evict.converse(Text(*plain, turn, dim**-0.5), TALK, rule_of(name, options))
    for size in (99, 7, 1):
        found, held = talk(layer_of(name, options, turn), *turned, TALK, size)
        assert held == kept
        assert_close(found, wanted)


EDGES: dict[str, tuple[oracle_evict.Turns, dict[str, Any], dict[str, Any]]] = {
    "budget of one": (TALK, {"budget": 1, "window": 4}, {}),
    "budget of two": (TALK, {"budget": 2, "window": 1}, {}),
    "window above the budget": (TALK, {"budget": 5, "window": 9}, {}),
    "window is the budget": (TALK, {"budget": 5, "window": 5}, {}),
    "prompts shorter than the window": ([(8, 22), (5, 6)], {"budget": 24, "window": 20}, {}),
    "prompts of one token": ([(1, 14), (1, 6), (1, 3)], {"budget": 12, "window": 4}, {}),
    "a second prompt above the budget": ([(6, 4), (30, 5)], {"budget": 12, "window": 4}, {}),
    "nothing decoded between prompts": ([(20, 0), (10, 0), (5, 6)], {"budget": 12, "window": 8}, {}),
    "a budget just passed": ([(13, 3)], {"budget": 12, "window": 4}, {}),
    "softcap": (TALK, {"budget": 9, "window": 4, "pool": 3}, {"softcap": 1.5}),
    "learned sinks": (
        TALK,
        {"budget": 9, "window": 4, "pool": 3},
        {"sinks": torch.tensor([9.0, -2.0, 0.0, 1.0, 9.0, -5.0])},
    ),
}


@pytest.mark.parametrize("name", ["snapkv", "h2o", "tova", "keydiff"])
@pytest.mark.parametrize("edge", EDGES)
def test_evicting_at_the_edges(edge, name):
    turns, options, extra = EDGES[edge]
    options = options if name == "snapkv" else {"budget": options["budget"]}
    plain, turned = rotated(HALF, 6, 2, 16, length_of(turns), seed=1)
    text = Text(*plain, HALF, 0.25, **extra)
    wanted, kept = oracle_evict.converse(text, turns, rule_of(name, options))
    for size in (99, 7, 1):
        found, held = talk(layer_of(name, options, HALF), *turned, turns, size, **extra)
        assert held == kept
        assert_close(found, wanted)


@pytest.mark.parametrize("extra", ["softcap", "learned sinks"])
@pytest.mark.parametrize("name", ["snapkv", "h2o", "tova"])
def test_what_shapes_logits_changes_what_stays(name, extra):
    """So the edges above would notice if scores were computed without."""
    turns, options, shaping = EDGES[extra]
    rule = functools.partial(rule_of, name, options if name == "snapkv" else {"budget": 9})
    plain, _ = rotated(HALF, 6, 2, 16, length_of(turns), seed=1)
    with_it, without = (
        oracle_evict.converse(Text(*plain, HALF, 0.25, **more), turns, rule())[1] for more in (shaping, {})
    )
    assert with_it != without


@pytest.mark.parametrize("name", ["snapkv", "pyramidkv", "h2o", "tova", "keydiff"])
@pytest.mark.parametrize("budget", [54, 1024])
def test_within_the_budget_nothing_is_evicted(name, budget):
    (q, k, v), turned = rotated(HALF, 6, 2, 16, 54)
    wanted = oracle.dense(q, k, v, HALF, 0.25, oracle.full_keys(54))
    found, held = talk(layer_of(name, {"budget": budget}, HALF), *turned, TALK, 7)
    assert_close(found, wanted)
    assert held[-1] == [list(range(54))] * 2


def test_every_kv_head_chooses_for_itself():
    """The layer test would pass trivially if heads agreed."""
    plain, turned = rotated(HALF, 6, 2, 16, length_of(TALK))
    for name, options in EVICTING.values():
        _, held = talk(layer_of(name, options, HALF), *turned, TALK, 99)
        assert (held[0][0] == held[0][1]) == (name == "tova" and "share" not in options)


# --- keydiff


def test_keydiff_keeps_the_unlike_whatever_their_lengths():
    """Long and short keys of one direction, and two of others among them, which stay, wherever they are."""
    keys = torch.eye(16)[[0] * 20] * torch.logspace(-3, 3, 20)[:, None]
    keys[[7, 15]] = torch.eye(16)[[3, 5]]
    layer = layer_of("keydiff", {"budget": 2}, oracle.Turn(0))
    rows = torch.stack([keys, keys.flip(0)])
    _, held = talk(layer, rows, rows, torch.randn(2, 20, 16), [(19, 1)], 99)
    assert held == [[[7, 15, 19], [4, 12, 19]]]


# --- pyramidkv


def budgets(layers: int, **options: Any) -> list[int]:
    method = method_class("pyramidkv").build(options)
    cache = Cache(method, [method.layer(i, layers, None) for i in range(layers)])
    return [layer.budget for layer in cache.own()]


@pytest.mark.parametrize("layers", [1, 2, 3, 30, 31])
@pytest.mark.parametrize("beta", [1, 2, 20, 10_000])
@pytest.mark.parametrize(
    ("budget", "window"), [(1024, 32), (65, 64), (64, 64), (12, 32), (1, 1), (1, 32), (40, 4)]
)
def test_pyramid_budgets(layers, beta, budget, window):
    found = budgets(layers, budget=budget, window=window, beta=beta)
    wanted = oracle_evict.pyramid_budgets(layers, budget, window, beta)
    assert all(abs(a - b) <= 0.5 for a, b in zip(found, wanted, strict=True))
    assert abs(sum(found) - layers * budget) <= layers / 2
    assert min(found) >= min(window, budget) >= 1
    assert found == sorted(found, reverse=True)


def test_pyramid_budgets_by_hand():
    """B - w = 1000, beta = 20: 1950 in the first layer, 50 in the last, 1000 in the middle; 32 beside."""
    found = budgets(31, budget=1032, window=32)
    assert (found[0], found[15], found[30]) == (1982, 1032, 82)


def test_pyramid_layers_are_snapkv_at_their_budgets():
    method = method_class("pyramidkv").build({"budget": 14, "window": 4})
    cache = Cache(method, [method.layer(i, 3, rope_of(HALF)) for i in range(3)])
    plain, turned = rotated(HALF, 6, 2, 16, length_of(TALK))
    for layer, budget in zip(cache.own(), (24, 14, 4), strict=True):  # 4 + 19.5, 4 + 10, 4 + 0.5
        rule = rule_of("snapkv", {"budget": budget, "window": 4})
        wanted, kept = oracle_evict.converse(Text(*plain, HALF, 0.25), TALK, rule)
        found, held = talk(layer, *turned, TALK, 99)
        assert held == kept
        assert_close(found, wanted)


@pytest.mark.parametrize("architecture", ["gemma3", "gemma2", "lfm2"])
def test_pyramid_depth_counts_its_own_layers_in_hybrid_models(architecture):
    model = HFDecoder(tiny.fresh(architecture))
    own = model.new_cache(method_class("pyramidkv").build({"budget": 104, "window": 4})).own()
    assert [layer.budget for layer in own] == {1: [104], 2: [199, 9]}[len(own)]


# --- sink++ and lm-infinite


@pytest.mark.parametrize(
    ("sinks", "window", "stride"), [(3, 9, 4), (0, 5, 3), (4, 1, 5), (30, 6, 7), (4, 9, 1), (3, 99, 5)]
)
def test_sink_plus(sinks, window, stride):
    """Whose queries and keys are at their true positions: no rotation to try others with."""
    (q, k, v), turned = rotated(HALF, 6, 2, 16, length_of(TALK))
    keys = oracle_evict.sink_plus_keys(TALK, sinks, window, stride)
    wanted = oracle.dense(q, k, v, HALF, 0.25, keys)
    for size in (99, 7, 1):
        layer = layer_of("sink++", {"sinks": sinks, "window": window, "stride": stride}, HALF)
        found, held = talk(layer, *turned, TALK, size)
        assert_close(found, wanted)
        assert held[-1] == [list(range(54))] * 2


def test_lm_infinite_equals_its_mask_and_distances(case):  # noqa: F811
    _lm_infinite(*case, sinks=4, window=9)


@pytest.mark.parametrize(
    ("sinks", "window"), [(4, 1), (1, 36), (0, 9), (4, 39), (4, 40), (4, 41), (9, 3), (50, 5)]
)
def test_lm_infinite_at_the_edges(sinks, window):
    _lm_infinite(6, 2, 16, HALF, sinks=sinks, window=window)


def _lm_infinite(heads: int, groups: int, dim: int, turn: oracle.Turn, sinks: int, window: int) -> None:
    q, k, v = tensors(heads, groups, dim, 40)
    wanted = oracle.dense(q, k, v, turn, dim**-0.5, oracle_evict.lambda_keys(40, sinks, window))
    for chunks, decode in splits(40, 15):
        layer = layer_of("lm-infinite", {"sinks": sinks, "window": window}, turn)
        assert_close(run(layer, q, k, v, turn, chunks, decode), wanted)
        assert layer.visible() == min(40, sinks + window)


def test_lm_infinite_is_neither_sink_nor_true_distances():
    q, k, v = tensors(6, 2, 16, 40)
    clamped = oracle_evict.lambda_keys(40, 4, 8)
    true = [[(j, j, t) for j, _, _ in keys] for t, keys in enumerate(clamped)]
    mine, *others = (
        oracle.dense(q, k, v, HALF, 0.25, keys) for keys in (clamped, true, oracle.sink_keys(40, 4, 8))
    )
    assert all((mine - other).abs().max() > 0.1 for other in others)


# --- what is freed, and what marks and files hold


def bytes_held(layer: Layer) -> int:
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in layer.held()}.values())


@pytest.mark.parametrize("name", ["snapkv", "pyramidkv", "h2o", "tova", "keydiff"])
def test_eviction_frees_memory(name):
    _, turned = rotated(HALF, 4, 2, 16, 1000)
    layer = layer_of(name, {"budget": 64}, HALF)
    entry = 2 * 2 * 16 * 4  # keys and values of two heads in float32
    talk(layer, *turned, [(900, 0)], 300)
    assert bytes_held(layer) >= 900 * entry
    prompt = weakref.ref(layer.kv.tensors()[0])
    mark = layer.snapshot()
    talk(layer, *turned, [(0, 20)], 300)
    assert bytes_held(layer) <= (64 + 20 + 400) * entry, "the mark's storage is not the layer's"
    assert prompt() is not None
    layer.restore(mark)
    assert len(layer.kv) == 900
    del mark
    talk(layer, *turned, [(0, 40)], 300)
    assert prompt() is None
    assert bytes_held(layer) <= (64 + 40 + 400) * entry
    grows = name in ("snapkv", "pyramidkv", "keydiff")
    assert layer.visible() == 64 + 40 * grows


@pytest.mark.parametrize("name", ["sink++", "recycled", "snapkv", "tova"])
def test_one_query_does_not_hold_the_storage_of_all(name):
    _, turned = rotated(HALF, 4, 2, 16, 600)
    layer = layer_of(name, {}, HALF)
    talk(layer, *turned, [(600, 0)], 600)
    assert (
        bytes_held(layer) <= sum(x.untyped_storage().nbytes() for x in layer.kv.tensors()) + 40 * 4 * 16 * 4
    )


@pytest.mark.parametrize("cell", [*EVICTING, "sink++"])
def test_marks_around_an_eviction_leave_no_trace(cell):
    """Marks in a prompt, before the eviction, after it, and in the next prompt; each restored twice."""
    name, options = EVICTING.get(cell, (cell, {"sinks": 3, "window": 9, "stride": 4}))
    _, turned = rotated(HALF, 6, 2, 16, length_of(TALK))
    _, noise = rotated(HALF, 6, 2, 16, length_of(TALK), seed=7)
    calls = [(13, False), (13, False), *[(1, True)] * 9, (6, False), (5, False), *[(1, True)] * 8]
    first = [0, *itertools.accumulate(rows for rows, _ in calls)]

    def feed(layer: Layer, begin: int, stop: int, source: tuple[Tensor, ...] = turned) -> list[Tensor]:
        return [
            layer.attend(*(x[:, first[i] : first[i + 1]] for x in source), 0.25, calls[i][1])
            for i in range(begin, stop)
        ]

    wanted = feed(layer_of(name, options, HALF), 0, len(calls))
    layer = layer_of(name, options, HALF)
    marks = {}
    for i in range(len(calls)):
        if i in (1, 2, 3, 7, 11, 12, 13, 17):
            marks[i] = layer.snapshot()
        feed(layer, i, i + 1)
    for i in [*marks, *reversed(marks)]:
        layer.restore(marks[i])
        feed(layer, i, min(i + 4, len(calls)), noise)
        layer.restore(marks[i])
        assert all(map(torch.equal, feed(layer, i, len(calls)), wanted[i:]))


# --- through the decoders


@functools.cache
def lean() -> LeanDecoder:
    stock = tiny.model("llama")
    return LeanDecoder(stock.config.to_dict(), dict(stock.state_dict()))


@functools.cache
def hf(architecture: str = "llama") -> HFDecoder:
    return HFDecoder(tiny.fresh(architecture))


DECODERS = {"lean": lean, "transformers": hf}
CELLS = [
    *(EVICTING[name] for name in ("snapkv", "h2o", "tova", "keydiff")),
    ("pyramidkv", {"budget": 14, "window": 4}),
    ("sink++", {"sinks": 3, "window": 9, "stride": 4}),
    ("lm-infinite", {"sinks": 3, "window": 9}),
    ("truncate", {"budget": 10}),
    ("recompute", {"window": 9, "stride": 3}),
]


ANEW = ("truncate", "recompute")  # a decoder has a part in these
cells_on_decoders = pytest.mark.parametrize(
    ("decoder", "name", "options"),
    [(decoder, *cell) for cell in CELLS for decoder in DECODERS if decoder == "lean" or cell[0] in ANEW],
)


@cells_on_decoders
def test_saved_states_go_on_identically(decoder, name, options, tmp_path):
    """Saved in a prompt, before the first token is decoded, after it, and within the second prompt."""
    model, method = DECODERS[decoder](), method_class(name).build(options)
    ids = tiny.tokens(54)
    calls = [(13, False), (13, False), *[(1, True)] * 9, (6, False), (5, False), *[(1, True)] * 8]
    parts = ids.split([rows for rows, _ in calls])

    def go_on(cache: Cache, begin: int) -> list[Tensor]:
        out = []
        for i in range(begin, len(calls)):
            cache.decoding = calls[i][1]
            out.append(model.forward(parts[i], cache))
        return out

    wanted = go_on(model.new_cache(method), 0)
    cache = model.new_cache(method)
    for i, part in enumerate(parts):
        if i in (1, 2, 3, 12, 13):
            state.save(tmp_path / "state", cache, {}, {})
            again = model.new_cache(method)
            state.load(tmp_path / "state", again, {})
            assert (again.seen, again.visible(), again.bytes() > 0) == (cache.seen, cache.visible(), True)
            assert all(map(torch.equal, go_on(again, i), wanted[i:]))
        cache.decoding = calls[i][1]
        model.forward(part, cache)


@cells_on_decoders
def test_as_many_logits_as_were_asked_for(decoder, name, options):
    """0, 1, some, all, and more than there are rows, of prompts within and beyond the budget."""
    model, method, ids = DECODERS[decoder](), method_class(name).build(options), tiny.tokens(40)
    for first, count in itertools.product((0, 25), (0, 1, 4, 99)):
        cache, again = model.new_cache(method), model.new_cache(method)
        if first:
            model.forward(ids[:first], cache)
            model.forward(ids[:first], again)
        logits = model.forward(ids[first : first + 12], cache, count)
        assert logits.shape == (min(count, 12), tiny.VOCABULARY)
        assert cache.seen == first + 12
        if name != "truncate":  # its rows share the text that is read, and more rows read more
            every = model.forward(ids[first : first + 12], again, 12)
            assert torch.allclose(logits, every[12 - len(logits) :], atol=1e-4)


# --- truncate and recompute: the stock model on the text that is left


def stock(ids: Tensor) -> Tensor:
    """Logits [vocab] of the stock model for the token after `ids`."""
    return tiny.stock_logits("llama", ids)[-1]


@pytest.mark.parametrize(
    ("decoder", "turns", "budget"),
    [
        *(("lean", TALK, budget) for budget in (2, 10, 11, 26, 27, 54)),
        ("lean", [(1, 5), (1, 5), (1, 3)], 8),
        ("lean", [(30, 0), (3, 4)], 10),
        ("transformers", TALK, 11),
        ("transformers", [(8, 5), (1, 3), (30, 2)], 10),
    ],
)
def test_truncate_is_the_stock_model_on_head_and_tail(decoder, turns, budget):
    """Positions are contiguous: the stock model knows of nothing between."""
    model, ids = DECODERS[decoder](), tiny.tokens(length_of(turns))
    cache = model.new_cache(method_class("truncate").build({"budget": budget}))
    rows = iter(oracle_evict.truncated(turns, budget))
    first = 0
    for prompt, decoded in turns:
        for rows_now, decoding in [(prompt, False)] + [(1, True)] * decoded:
            cache.decoding = decoding
            found = model.forward(ids[first : first + rows_now], cache)[0]
            first += rows_now
            text = next(rows)
            assert (found - stock(ids[text])).abs().max() <= TOLERANCE
            assert (cache.seen, cache.position, cache.visible()) == (first, len(text), len(text))


@pytest.mark.parametrize(
    ("decoder", "window", "stride"),
    [
        *(("lean", *sizes) for sizes in [(9, 1), (9, 3), (9, 9), (9, 4), (1, 1), (60, 1), (40, 25)]),
        ("transformers", 9, 1),
        ("transformers", 9, 3),
    ],
)
def test_recompute_is_the_stock_model_on_the_last_window(decoder, window, stride):
    """For every position: read whole, in chunks, and in turns of prompts and decoding."""
    model, ids = DECODERS[decoder](), tiny.tokens(44)
    method = method_class("recompute").build({"window": window, "stride": stride})
    starts = [oracle_evict.window_start(p, window, stride) for p in range(44)]
    if stride == 1:
        assert starts == [max(p + 1 - window, 0) for p in range(44)]
    wanted = torch.stack([stock(ids[start : p + 1]) for p, start in enumerate(starts)])
    for sizes in ([44], [7] * 6 + [2], [20, *[1] * 6, 13, *[1] * 5]):
        cache = model.new_cache(method)
        found = []
        for part in ids.split(sizes):
            cache.decoding = len(part) == 1
            found.append(model.forward(part, cache, len(part)))
            assert cache.visible() == cache.seen - starts[cache.seen - 1] <= window
        assert (torch.cat(found) - wanted).abs().max() <= TOLERANCE


def test_recompute_reads_a_window_per_stride_and_a_prompt_once():
    """Rows that reach the layers: what is not needed for the logits asked for is not read."""
    model, ids = hf(), tiny.tokens(60)
    cache = model.new_cache(method_class("recompute").build({"window": 12, "stride": 4}))
    read_rows: list[int] = []
    attend = cache.layers[0].attend
    cache.layers[0].attend = lambda q, *rest, **more: read_rows.append(q.shape[1]) or attend(q, *rest, **more)
    model.forward(ids[:40], cache)
    assert sum(read_rows) == 12
    cache.decoding = True
    del read_rows[:]
    for token in ids[40:]:
        model.forward(token.view(1), cache)
    assert sum(read_rows) == 5 * (9 + 3)


def test_recompute_refuses_a_stride_beyond_its_window():
    with pytest.raises(UsageError, match="--stride"):
        method_class("recompute").build({"window": 8, "stride": 9})


# --- through the engine


@pytest.fixture(scope="module")
def engine_of(tiny_model):
    """`engine_of(name, options, chunk)`: an engine whose answers go on until they are stopped."""
    path = tiny_model("llama")
    decoder, tokenizer = LeanDecoder.from_dir(path, dtype=torch.float32), Tokenizer.from_dir(path)
    tokenizer.eos_ids = frozenset()
    about = EngineInfo("tiny", 512, "", "cpu", "float32", "0", frozenset())

    def make(name: str, options: dict[str, Any], chunk: int) -> LocalEngine:
        built = method_class(name).build(options)
        return LocalEngine(decoder, tokenizer, built, dataclasses.replace(about, method=name), chunk)

    return make


QUESTIONS = ["The mill ran by the river until the rain came down.", "And?", "Who counted the sacks of grain?"]


@pytest.mark.parametrize(
    ("name", "options"), [cell for cell in CELLS if cell[0] not in ANEW], ids=lambda value: str(value)
)
def test_chats_do_not_depend_on_chunks(engine_of, name, options):
    """Three turns; what is held and seen is counted after each."""
    whole, parts = (Conversation(engine_of(name, options, chunk)) for chunk in (512, 5))
    for question in QUESTIONS:
        answers = [
            "".join(piece.text for piece in chat.send(question, Sampling(max_tokens=6)))
            for chat in (whole, parts)
        ]
        assert answers[0] == answers[1]
        covered = whole.coverage()
        assert covered == parts.coverage()
        assert covered.seen == len(whole.engine.ids)
        if "budget" in options:
            grows = 6 if name in ("snapkv", "pyramidkv", "keydiff") else 0
            assert covered.visible <= options["budget"] + grows < covered.seen


@pytest.mark.parametrize(
    ("name", "options"),
    [("truncate", {"budget": 24}), ("recompute", {"window": 24, "stride": 3}), ("recompute", {"window": 9})],
)
def test_chats_that_read_anew(engine_of, name, options):
    """After each turn the next token is predicted from the text that the method leaves, and no other."""
    chat, full = Conversation(engine_of(name, options, 5)), engine_of("full", {}, 512)
    turns: list[tuple[int, int]] = []
    for question in QUESTIONS:
        before = len(chat.engine.ids)
        pieces = list(chat.send(question, Sampling(max_tokens=6)))
        turns.append((len(chat.engine.ids) - before - 6, 6))
        assert len(pieces) == 7
        seen = len(chat.engine.ids)
        text = list(
            range(
                oracle_evict.window_start(seen - 1, options.get("window", 1), options.get("stride", 1)), seen
            )
        )
        if name == "truncate":
            text = oracle_evict.truncated(turns, options["budget"])[-1]
        full.reset()
        full.prefill([chat.engine.ids[i] for i in text])
        assert (chat.engine.logits - full.logits).abs().max() <= TOLERANCE
        covered = chat.coverage()
        assert (covered.seen, covered.visible) == (seen, len(text))


@pytest.mark.parametrize("failing", [1, 2, 5, 6])
@pytest.mark.parametrize(
    ("name", "options"), [("truncate", {"budget": 9}), ("recompute", {"window": 9, "stride": 4})]
)
def test_a_mark_survives_readings_that_are_cut_short(monkeypatch, name, options, failing):
    """Ctrl-C in any layer, and in a later reading of the same call."""
    model, ids = lean(), tiny.tokens(30)
    cache = model.new_cache(method_class(name).build(options))
    model.forward(ids[:18], cache)
    mark = cache.snapshot()
    wanted = model.forward(ids[18:], cache, 12)
    cache.restore(mark)
    attend, calls = FullLayer.attend, itertools.count(1)

    def interrupted(self: FullLayer, *rest: Any, **more: Any) -> Tensor:
        if next(calls) == (failing if name == "recompute" else min(failing, 2)):
            raise KeyboardInterrupt
        return attend(self, *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr(FullLayer, "attend", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.forward(ids[18:], cache, 12)
    cache.restore(mark)
    assert (cache.seen, cache.visible()) == (18, 9 if name == "truncate" else 6)
    assert torch.equal(model.forward(ids[18:], cache, 12), wanted)
