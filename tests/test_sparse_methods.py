"""Quest, MInference and PyramidInfer against their dense float64 references, and what they save."""

from __future__ import annotations

import functools
from typing import Any

import oracle
import oracle_sparse
import pytest
import tiny
import torch
from test_methods import assert_close, case, layer_of, rope_of, run, tensors  # noqa: F401
from torch import Tensor

from longchat_cli import kernels
from longchat_cli.attention import METHODS, method_class
from longchat_cli.attention.hf import HFDecoder
from longchat_cli.attention.layer import Cache, Layer, Step
from longchat_cli.attention.minference import diagonals, listing
from longchat_cli.attention.probabilities import probabilities
from longchat_cli.errors import UsageError
from longchat_cli.kernels import Span
from longchat_cli.kernels.reference import listed
from longchat_cli.models.lean import LeanDecoder

pytestmark = pytest.mark.usefixtures("one_thread")
HALF = oracle.Turn(8)


# --- what the methods share


@pytest.mark.parametrize("extra", [{}, {"softcap": 1.5}, {"sinks": torch.tensor([1.0, -2.0, 0.0, 3.0])}])
def test_probabilities_are_those_of_the_model(extra):
    q, k, _ = tensors(4, 2, 16, 30)
    new = Step(q, k, k, 0, 0.25, False, **extra)
    found = probabilities(q[:, -5:], k, new)
    assert found.shape == (2, 2, 5, 30)
    for head in range(4):
        for row in range(5):
            logits = (k[head // 2, : 26 + row] @ q[head, 25 + row]).double() * 0.25
            if "softcap" in extra:
                logits = 1.5 * torch.tanh(logits / 1.5)
            if "sinks" in extra:
                logits = torch.cat([logits, extra["sinks"][head].double().view(1)])
            wanted = torch.softmax(logits, 0)[: 26 + row]
            assert (found[head // 2, head % 2, row, : 26 + row] - wanted).abs().max() <= 1e-6
            assert not found[head // 2, head % 2, row, 26 + row :].any()


@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (3, 3), (4, 9), (64, 65)])
def test_diagonals(rows, keys):
    weights = torch.rand(2, rows, keys).tril(keys - rows)
    wanted = torch.zeros(2, keys)
    for i in range(rows):
        for j in range(keys - rows + i + 1):
            wanted[:, keys - rows + i - j] += weights[:, i, j]
    assert torch.allclose(diagonals(weights), wanted, atol=1e-5)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_a_listing_lists_each_key_once(share):
    seen = torch.rand(2, 3, 50, generator=torch.Generator().manual_seed(0)) < share
    index = listing(seen)
    assert index.shape == (2, 3, int(seen.sum(-1).max()))
    for row, marks in zip(index.flatten(0, 1), seen.flatten(0, 1), strict=True):
        assert [x for x in row.tolist() if x >= 0] == marks.nonzero().flatten().tolist()
    if share:
        assert torch.equal(listed(index, 50, 192)[:, ::64], seen)


# --- Quest


@pytest.mark.parametrize("heads", ["max", "mean"])
@pytest.mark.parametrize(("budget", "page"), [(1, 4), (16, 4), (20, 3), (8, 1), (24, 6)])
def test_quest(case, budget, page, heads):  # noqa: F811
    n, groups, dim, turn = case
    q, k, v = tensors(n, groups, dim, 60)
    options = {"budget": budget, "page": page, "heads": heads, "dense": 0}
    wanted, seen = oracle_sparse.quest(q, k, v, turn, dim**-0.5, 34, budget, page, heads)
    for chunks in ([34], [7] * 4 + [6], [1] * 34):
        assert_close(run(layer_of("quest", options, turn), q, k, v, turn, chunks, 26), wanted)
    assert max(seen) <= max(3 * page, budget // page * page) + page - 1 < 34


def test_quest_reads_all_while_every_page_fits_and_in_its_first_layers():
    q, k, v = tensors(6, 2, 16, 60)
    wanted = oracle.dense(q, k, v, HALF, 0.25, oracle.full_keys(60))
    assert_close(run(layer_of("quest", {"budget": 48, "dense": 0}, HALF), q, k, v, HALF, [30], 30), wanted)
    method = method_class("quest").build({"budget": 1, "page": 2})
    for index in range(3):
        layer = method.layer(index, 3, rope_of(HALF))
        dense = torch.allclose(run(layer, q, k, v, HALF, [30], 30).double(), wanted, atol=1e-4)
        assert dense == (index < 2)


def test_quest_holds_two_bounds_a_page_and_no_copies():
    q, k, v = tensors(4, 2, 16, 6400)
    layer = layer_of("quest", {"budget": 64, "dense": 0}, None)
    layer.attend(q, k, v, 0.25, False)
    spans = layer.spans(Step(q[:, :1], k[:, :1], v[:, :1], 6400, 0.25, True))
    assert [span.index.shape for span in spans] == [(2, 1, 65)]
    assert spans[0].k.untyped_storage().data_ptr() == layer.kv.k.untyped_storage().data_ptr()
    held = sum(x.untyped_storage().nbytes() for x in layer.held())
    full = layer_of("full", {}, None)
    full.attend(q, k, v, 0.25, False)
    everything = sum(x.untyped_storage().nbytes() for x in full.held())
    assert 1 + 1 / 16 <= held / everything <= 1 + 1.6 / 16


# --- MInference


PATTERNS: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "vertical-slash": ({"vertical": 40, "slash": 102}, {"vertical": 40, "slash": 102}),
    "forced": ({"vertical": 0, "slash": 0}, {"vertical": 0, "slash": 0}),
    "columns": ({"vertical": 120, "slash": 3}, {"vertical": 120, "slash": 3}),
    "a-shape": ({"pattern": "a-shape", "sinks": 5, "window": 50}, {"sinks": 5, "window": 50}),
    "block-sparse": ({"pattern": "block-sparse", "blocks": 3}, {"blocks": 3}),
    "own blocks": ({"pattern": "block-sparse", "blocks": 1}, {"blocks": 1}),
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_minference(case, pattern):  # noqa: F811
    n, groups, dim, turn = case
    options, rules = PATTERNS[pattern]
    calls = {"gqa": [330], "mha": [130, 200], "mqa": [100, 40, 190]}[{6: "gqa", 2: "mha", 4: "mqa"}[n]]
    q, k, v = tensors(n, groups, dim, 330)
    wanted, share = oracle_sparse.minference(q, k, v, turn, dim**-0.5, calls, **rules)
    assert 0.1 < share < 0.98, "the case must leave keys out"
    assert_close(run(layer_of("minference", options, turn), q, k, v, turn, calls), wanted)


def test_minference_decodes_over_everything():
    q, k, v = tensors(4, 2, 16, 310)
    layer = layer_of("minference", {"vertical": 0, "slash": 0}, HALF)
    found = run(layer, q, k, v, HALF, [300], 10)[:, 300:]
    visible = [oracle.full_keys(310)[t] for t in range(300, 310)]
    for row, (t, keys) in enumerate(zip(range(300, 310), visible, strict=True)):
        logits, index = oracle.logits_of(q, k, HALF, 0.25, keys, t)
        assert (found[:, row].double() - oracle.softmax_over(logits, v[:, index])[0]).abs().max() <= 1e-4
    assert layer.visible() == 310


@pytest.mark.parametrize(
    "options",
    [{}, {"vertical": 300, "slash": 0}, {"vertical": 0, "slash": 300}]
    + [
        {"pattern": "a-shape"},
        {"pattern": "block-sparse"},
        {"pattern": "a-shape", "sinks": 300, "window": 1},
    ],
)
def test_a_pattern_that_covers_everything_is_full_attention_exactly(options):
    q, k, v = tensors(4, 2, 16, 300)
    found = run(layer_of("minference", options, HALF), q, k, v, HALF, [100, 200])
    assert torch.equal(found, run(layer_of("full", {}, HALF), q, k, v, HALF, [100, 200]))


NARROW = "minference:vertical=40,slash=102"
COMPOSES = {name for name in METHODS if method_class(name).dense_prompts} - {"h2o"}  # h2o weighs every query


@pytest.mark.parametrize("name", METHODS)
def test_prefill_composes_with_methods_that_read_prompts_densely(name):
    kind = method_class(name)
    if name not in COMPOSES:
        with pytest.raises(UsageError, match="--prefill does not fit this method: it"):
            kind.build({"prefill": NARROW})
        return
    small = {"budget": 40} if "budget" in {field.name for field in kind.options()} else {}
    q, k, v = tensors(4, 2, 16, 340)
    first, second = (layer_of(name, {**small, "prefill": how}, HALF) for how in (NARROW, "own"))
    found = run(first, q[:, :330], k[:, :330], v[:, :330], HALF, [130, 200])
    wanted, _ = oracle_sparse.minference(
        q[:, :330], k[:, :330], v[:, :330], HALF, 0.25, [130, 200], vertical=40, slash=102
    )
    assert_close(found, wanted)
    # Decoding is the method's own, over the same keys.
    run(second, q[:, :330], k[:, :330], v[:, :330], HALF, [130, 200])
    for t in range(330, 340):
        step = HALF(q[:, t : t + 1], [t]).float(), HALF(k[:, t : t + 1], [t]).float(), v[:, t : t + 1]
        assert torch.allclose(first.attend(*step, 0.25, True), second.attend(*step, 0.25, True), atol=1e-5)


def test_prefill_after_an_eviction_counts_places_in_the_cache():
    """Kept entries stand just before the new ones, so nearness and columns still mean something."""
    q, k, v = tensors(4, 2, 16, 400)
    layer = layer_of("snapkv", {"budget": 60, "prefill": "minference:vertical=0,slash=0"}, None)
    for first, stop, decoding in [(0, 100, False), (100, 101, True)]:
        layer.attend(*(x[:, first:stop] for x in (q, k, v)), 0.25, decoding)
    kept = len(layer.kv)
    seen = []
    spans = layer.spans(Step(q[:, 101:], k[:, 101:], v[:, 101:], 101, 0.25, False))
    narrowed = layer.method.narrow(spans, Step(q[:, 101:], k[:, 101:], v[:, 101:], 101, 0.25, False))
    seen = listed(narrowed[0].index, kept + 299, 299)
    assert kept == 61
    assert bool(seen[:, :, :30].all()), "the first columns are always seen"
    assert not bool(seen[:, 290, 30:200].any())
    assert bool(seen[:, 290, 256 + 61 - 99 : 290 + 61].all())


@pytest.mark.parametrize(
    "text",
    ["window", "minference:", "minference:vertical", "minference:vertical=x", "minference:nonsense=3"]
    + [
        "minference:vertical=-1",
        "minference:pattern=round",
        "minference:prefill=own",
        "minference:kv-dtype=int8",
    ]
    + ["none", ""],
)
def test_a_prefill_is_refused_in_one_line(text):
    if text == "minference:":
        assert method_class("full").build({"prefill": text}).prefill == text
        return
    with pytest.raises(UsageError) as error:
        method_class("full").build({"prefill": text})
    assert f"prefill is {text}: " in str(error.value) or f"no prefill '{text}'" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_prefill_takes_every_option():
    text = "minference:pattern=a-shape,sinks=5,window=50"
    q, k, v = tensors(4, 2, 16, 200)
    a = run(layer_of("full", {"prefill": text}, HALF), q, k, v, HALF, [200])
    b = run(layer_of("minference", PATTERNS["a-shape"][0], HALF), q, k, v, HALF, [200])
    assert torch.equal(a, b)


# --- PyramidInfer


STEEP = {"ratio": 0.8, "decay": 0.4, "recent": 0.15, "least": 3}
SCALE = 0.25


def stack(options: dict[str, Any], turn: oracle.Turn, count: int = 4) -> list[Layer]:
    method = method_class("pyramidinfer").build(options)
    cache = Cache(method, [method.layer(index, count, rope_of(turn)) for index in range(count)])
    return cache.own()


def feed(
    layers: list[Layer],
    data: list[tuple[Tensor, Tensor, Tensor]],
    turn: oracle.Turn,
    first: int,
    stop: int,
    decoding: bool = False,
    drop: bool = False,
) -> list[Tensor]:
    """One call through every layer: all rows, or with `drop` those that reach each layer. Rows that are
    not computed come back as NaN."""
    rows = torch.arange(first, stop)
    outs = []
    for layer, (q, k, v) in zip(layers, data, strict=True):
        new_q, new_k = (turn(x[:, rows], rows.tolist()).float() for x in (q, k))
        out = torch.full((q.shape[0], stop - first, v.shape[-1]), torch.nan)
        out[:, rows - first] = layer.attend(new_q, new_k, v[:, rows], SCALE, decoding)
        outs.append(out)
        if drop and layer.onward is not None:
            rows = rows[layer.onward]
    return outs


@pytest.mark.parametrize("drop", [False, True], ids=["all rows", "rows dropped"])
@pytest.mark.parametrize(
    "options", [STEEP, {}, {**STEEP, "sinks": 0}, {**STEEP, "recent": 0.0}, {**STEEP, "least": 20}]
)
def test_pyramidinfer(case, options, drop):  # noqa: F811
    heads, groups, dim, turn = case
    data = [tensors(heads, groups, dim, 130, seed) for seed in range(4)]
    wanted, held = oracle_sparse.pyramid(data, turn, SCALE, [95, 30], 5, **options)
    layers = stack(options, turn)
    calls = [(0, 95, False), (95, 125, False), *((t, t + 1, True) for t in range(125, 130))]
    found = [feed(layers, data, turn, *call, drop=drop) for call in calls]
    for index, layer in enumerate(layers):
        out = torch.cat([call[index] for call in found], dim=1)
        computed = ~out.isnan().any(0).any(-1)
        assert bool(computed[-1])
        assert_close(out[:, computed], torch.stack(wanted[index], dim=1)[:, computed])
        assert layer.seen == 130
        assert len(layer.kv) == layer.visible() == len(held[index])
        assert torch.equal(layer.kv.v, data[index][2][:, held[index]])
        if drop and options != {}:
            assert int(computed[:95].sum()) == sum(j < 95 for j in held[index])
    sizes = [len(x) for x in held]
    assert sizes[0] == 130
    assert sizes == sorted(sizes, reverse=True)


def test_pyramidinfer_drops_nothing_from_short_prompts():
    data = [tensors(4, 2, 16, 60, seed) for seed in range(4)]
    layers = stack({}, HALF)
    feed(layers, data, HALF, 0, 60)
    assert [len(layer.kv) for layer in layers] == [60] * 4


def test_pyramidinfer_goes_back_to_a_mark():
    data = [tensors(4, 2, 16, 120, seed) for seed in range(4)]
    layers = stack(STEEP, HALF)
    feed(layers, data, HALF, 0, 80)
    marks = [layer.snapshot() for layer in layers]
    outs = []
    for _ in range(2):
        feed(layers, data, HALF, 80, 110)
        outs.append(feed(layers, data, HALF, 110, 111, decoding=True))
        for layer, mark in zip(layers, marks, strict=True):
            layer.restore(mark)
    assert all(torch.equal(a, b) for a, b in zip(*outs, strict=True))
    assert [layer.seen for layer in layers] == [80] * 4


@functools.cache
def llama() -> Any:
    return tiny.build("Llama", num_hidden_layers=4)


@torch.no_grad()
def by_hand(model: Any, ids: Tensor, options: dict[str, Any]) -> tuple[Tensor, list[int]]:
    """The paper's procedure with stock modules: hidden states are dropped between decoder layers.

    Logits of the last token and how many tokens reached each layer.
    """
    weights: list[Tensor] = []
    hooks = [
        layer.self_attn.register_forward_hook(lambda module, args, out: weights.append(out[1]))
        for layer in model.model.layers
    ]
    hidden = model.model.embed_tokens(ids.unsqueeze(0))
    reached, sizes = list(range(len(ids))), []
    for index, layer in enumerate(model.model.layers):
        rows = torch.tensor([reached])
        mask = torch.full((len(reached),) * 2, -torch.inf).triu(1)[None, None]
        turn = model.model.rotary_emb(hidden, rows)
        sizes.append(len(reached))
        hidden = layer(hidden, attention_mask=mask, position_ids=rows, position_embeddings=turn)
        part = oracle_sparse.share(index, 4, options["ratio"], options["decay"])
        before = reached
        if index < 3:
            reached = oracle_sparse.pyramid_choice(
                weights[-1][0], reached, len(ids), part, options["recent"], 4, options["least"], 0
            )
        hidden = hidden[:, [before.index(row) for row in reached]]
    for hook in hooks:
        hook.remove()
    return model.lm_head(model.model.norm(hidden))[0, -1], sizes


def test_pyramidinfer_is_the_papers_procedure_on_both_decoders(tmp_path):
    model, ids = llama(), tiny.tokens(90)
    wanted, sizes = by_hand(model, ids[:80], STEEP)
    assert sizes[0] == 80 > sizes[1] > sizes[2] > sizes[3]
    model.save_pretrained(tmp_path)
    method = method_class("pyramidinfer").build(STEEP)
    lean = LeanDecoder.from_dir(tmp_path, dtype=torch.float32)
    full = HFDecoder(tiny.build("Llama", num_hidden_layers=4)).forward(
        ids[:80], HFDecoder(tiny.build("Llama", num_hidden_layers=4)).new_cache(method_class("full")())
    )
    assert (full[-1] - wanted).abs().max() > 1e-2, "what is dropped must matter"
    answers = []
    for decoder in (lean, HFDecoder(tiny.build("Llama", num_hidden_layers=4))):
        cache = decoder.new_cache(method)
        logits = decoder.forward(ids[:80], cache)
        assert (logits[-1] - wanted).abs().max() <= 1e-4
        assert [len(layer.kv) for layer in cache.own()] == sizes
        assert cache.seen == 80
        assert cache.visible() == sizes[-1]
        cache.decoding = True
        answers.append(torch.cat([decoder.forward(token.view(1), cache) for token in ids[80:]]))
        assert [len(layer.kv) for layer in cache.own()] == [size + 10 for size in sizes]
    assert (answers[0] - answers[1]).abs().max() <= 1e-4


def test_lean_rows_are_really_dropped_unless_their_logits_are_asked_for(tmp_path):
    llama().save_pretrained(tmp_path)
    model = LeanDecoder.from_dir(tmp_path, dtype=torch.float32)
    ids, method = tiny.tokens(80), method_class("pyramidinfer").build(STEEP)
    states = model.read(ids, model.new_cache(method), 4)
    cache = model.new_cache(method)
    every = model.forward(ids, cache, 80)
    last = model.forward(ids, model.new_cache(method), 1)
    assert len(states) == len(cache.own()[-1].kv) < 40
    assert every.shape[0] == 80
    assert torch.allclose(every[-1:], last, atol=1e-5)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_buffer_in_parts_is_narrowed_part_by_part(pattern):
    """Packed older entries and exact recent ones make two spans: they show what one would."""
    q, k, v = tensors(4, 2, 16, 300)
    new = Step(q, k, v, 0, 0.25, False)
    stop = torch.arange(1, 301)
    parts = [Span(k[:, :170], v[:, :170], 0, stop.clamp(max=170))]
    parts.append(Span(k[:, 170:], v[:, 170:], 0, (stop - 170).clamp(min=0)))
    method = method_class("minference").build(PATTERNS[pattern][0])
    one, two = method.narrow([Span(k, v, 0, stop)], new), method.narrow(parts, new)
    assert_close(kernels.attend(q, two, 0.25)[0], kernels.attend(q, one, 0.25)[0].double())
