"""Each method's layer against its dense float64 reference, built from unrotated queries and keys."""

from __future__ import annotations

import dataclasses

import oracle
import pytest
import tiny
import torch
from small import SMALL
from spans import check
from torch import Tensor

from longchat_cli import kernels
from longchat_cli.attention import METHODS, method_class
from longchat_cli.attention.layer import Cache, Layer
from longchat_cli.attention.rope import Rope, probe
from longchat_cli.attention.select import pooled, ranked
from longchat_cli.errors import UsageError
from longchat_cli.models.lean import LeanDecoder

pytestmark = pytest.mark.usefixtures("one_thread")
TOLERANCE = 1e-4
SHAPES = {"gqa": (6, 2, 16), "mha": (2, 2, 32), "mqa": (4, 1, 16)}
TURNS = {
    "half": lambda dim: oracle.Turn(dim // 2),
    "interleaved": lambda dim: oracle.Turn(dim // 2, interleaved=True),
    "partial": lambda dim: oracle.Turn(dim // 4),
    "partial-interleaved": lambda dim: oracle.Turn(dim // 4, interleaved=True),
}
# Each shape with two ropes, each rope with at least one shape.
CASES = [
    ("gqa", "half"),
    ("gqa", "interleaved"),
    ("mha", "partial"),
    ("mqa", "half"),
    ("mqa", "partial-interleaved"),
]


@pytest.fixture(params=CASES, ids="-".join)
def case(request):
    shape, rope = request.param
    heads, groups, dim = SHAPES[shape]
    return heads, groups, dim, TURNS[rope](dim)


def tensors(heads: int, groups: int, dim: int, length: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(n, length, dim, generator=generator) for n in (heads, groups, groups))
    return q * 2, k * 2, v


def rope_of(turn: oracle.Turn) -> Rope:
    return Rope(torch.tensor(turn.frequencies(), dtype=torch.float64), turn.interleaved)


def layer_of(name: str, options: dict, turn: oracle.Turn | None) -> Layer:
    return method_class(name).build(options).layer(0, 1, rope_of(turn) if turn else None)


def run(
    layer: Layer,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    turn: oracle.Turn,
    chunks: list[int],
    decode: int = 0,
) -> Tensor:
    """Feed the layer rotated rows in chunks, then `decode` rows one by one; [heads, L, dim]."""
    length = q.shape[1]
    rotated_q, rotated_k = (turn(x, range(length)).float() for x in (q, k))
    steps = [(size, False) for size in chunks] + [(1, True)] * decode
    out, first = [], 0
    for size, decoding in steps:
        at = slice(first, first + size)
        out.append(layer.attend(rotated_q[:, at], rotated_k[:, at], v[:, at], q.shape[-1] ** -0.5, decoding))
        first += size
    assert first == length == layer.seen
    return torch.cat(out, dim=1)


def splits(length: int, decode: int) -> list[tuple[list[int], int]]:
    """Ways to read `length` tokens of which the last `decode` come one by one."""
    prompt = length - decode
    sizes = [[prompt], [7] * (prompt // 7) + [prompt % 7] * (prompt % 7 > 0), [1] * prompt]
    return [(size, decode) for size in sizes] + [([length], 0)]


def assert_close(found: Tensor, wanted: Tensor) -> None:
    worst = (found.double() - wanted).abs().amax(dim=(0, 2))
    assert float(worst.max()) <= TOLERANCE, f"off by {worst.max():.2e} at row {int(worst.argmax())}"


@pytest.mark.parametrize("length", [1, 2, 37])
def test_full(case, length):
    heads, groups, dim, turn = case
    q, k, v = tensors(heads, groups, dim, length)
    wanted = oracle.dense(q, k, v, turn, dim**-0.5, oracle.full_keys(length))
    for chunks, decode in splits(length, min(5, length - 1)):
        assert_close(run(layer_of("full", {}, turn), q, k, v, turn, chunks, decode), wanted)


@pytest.mark.parametrize("window", [1, 2, 9, 40, 41])
def test_window(case, window):
    heads, groups, dim, turn = case
    q, k, v = tensors(heads, groups, dim, 40)
    wanted = oracle.dense(q, k, v, turn, dim**-0.5, oracle.window_keys(40, window))
    for chunks, decode in splits(40, 12):
        layer = layer_of("window", {"window": window}, turn)
        assert_close(run(layer, q, k, v, turn, chunks, decode), wanted)
        assert layer.visible() == min(40, window)


@pytest.mark.parametrize(
    ("sinks", "window"), [(4, 9), (4, 1), (1, 36), (0, 9), (4, 36), (4, 37), (9, 3), (50, 5)]
)
def test_sink_equals_in_cache_positions(case, sinks, window):
    heads, groups, dim, turn = case
    q, k, v = tensors(heads, groups, dim, 40)
    wanted = oracle.dense(q, k, v, turn, dim**-0.5, oracle.sink_keys(40, sinks, window))
    for chunks, decode in splits(40, 15):
        layer = layer_of("sink", {"sinks": sinks, "window": window}, turn)
        assert_close(run(layer, q, k, v, turn, chunks, decode), wanted)
        assert layer.visible() == min(40, sinks + window)


def test_sink_positions_matter():
    """The oracle at true positions is far from the published one, so the test above can fail."""
    q, k, v = tensors(4, 2, 16, 40)
    turn = oracle.Turn(8)
    shifted = oracle.sink_keys(40, 4, 8)
    true = [[(j, j, t) for j, _, _ in keys] for t, keys in enumerate(shifted)]
    a, b = (oracle.dense(q, k, v, turn, 0.25, keys) for keys in (shifted, true))
    assert (a - b).abs().max() > 0.1


def test_sink_far_into_a_stream():
    """Exact at position 300,000, where float32 angles would be off by hundredths of a radian."""
    turn = oracle.Turn(8, base=10_000.0)
    q, k, v = tensors(4, 2, 16, 24)
    far = 300_000
    layer = layer_of("sink", {"sinks": 4, "window": 6}, turn)
    run(layer, q[:, :12], k[:, :12], v[:, :12], turn, [12])
    # Jump: tokens between are gone anyway, so only the counters have to move.
    layer.seen = far
    layer.kv.first = layer.kv.end = far
    out = []
    for i in range(12, 24):
        at = far + i - 12
        row = slice(i, i + 1)
        new_q, new_k = (turn(x[:, row], [at]).float() for x in (q, k))
        out.append(layer.attend(new_q, new_k, v[:, row], 0.25, True))
    kept = [0, 1, 2, 3, *range(18, 24)]
    keys = [[(j, place, 9) for place, j in enumerate(kept)]]
    logits, index = oracle.logits_of(q, k, turn, 0.25, keys[0], 23)
    wanted, _ = oracle.softmax_over(logits, v[:, index])
    assert (out[-1][:, 0].double() - wanted).abs().max() < 2e-4


@pytest.mark.parametrize("pool", ["attention", "mean", "max"])
@pytest.mark.parametrize("cores", ["kv", "head"])
@pytest.mark.parametrize("sinks", [0, 3])
def test_cca(case, pool, cores, sinks):
    heads, groups, dim, turn = case
    q, k, v = tensors(heads, groups, dim, 41)
    options = {"group": 4, "local": 6, "sinks": sinks, "cores": cores, "pool": pool}
    wanted = oracle.cca(q, k, v, turn, dim**-0.5, 4, 6, sinks, cores == "head", pool)
    for chunks, decode in splits(41, 13):
        assert_close(run(layer_of("cca", options, turn), q, k, v, turn, chunks, decode), wanted)


@pytest.mark.parametrize(
    ("g", "s", "sinks"),
    [
        (1, 1, 0),
        (1, 5, 2),
        (3, 1, 0),
        (5, 7, 4),
        (5, 7, 5),
        (5, 7, 6),
        (4, 40, 4),
        (4, 4, 30),
        (16, 8, 4),
        (64, 8, 4),
    ],
)
def test_cca_boundaries(g, s, sinks):
    """Groups of one, windows below a group, sinks that fill groups or outgrow the window, no core yet."""
    q, k, v = tensors(6, 2, 16, 40)
    turn = oracle.Turn(8)
    options = {"group": g, "local": s, "sinks": sinks, "cores": "head"}
    wanted = oracle.cca(q, k, v, turn, 0.25, g, s, sinks, True, "attention")
    for chunks, decode in splits(40, 13):
        assert_close(run(layer_of("cca", options, turn), q, k, v, turn, chunks, decode), wanted)


def test_cca_represents_each_token_exactly_once():
    layer = layer_of("cca", {"group": 4, "local": 6, "sinks": 3}, None)
    q, k, v = tensors(2, 2, 16, 50)
    for t in range(50):
        layer.attend(q[:, t : t + 1], k[:, t : t + 1], v[:, t : t + 1], 0.25, True)
        pooled = max((t + 1 - 6) // 4, 0)
        raw = layer.raw.end - max(layer.raw.first, pooled * 4)
        assert raw + pooled * 4 == t + 1
        assert 0 < raw <= 6 + 4 - 1


@pytest.mark.parametrize(
    "options",
    [
        {"init": 3, "local": 8, "block": 4, "topk": 2, "representatives": 2},
        {"init": 0, "local": 5, "block": 3, "topk": 1, "representatives": 1},
        {"init": 12, "local": 4, "block": 5, "topk": 3, "representatives": 9},
        {"init": 2, "local": 8, "block": 1, "topk": 4, "representatives": 4},
        {"init": 3, "local": 64, "block": 4, "topk": 2, "representatives": 2},
        {"init": 3, "local": 8, "block": 4, "topk": 99, "representatives": 2},
    ],
)
def test_infllm(case, options):
    heads, groups, dim, turn = case
    q, k, v = tensors(heads, groups, dim, 45)
    for chunks, decode in [([13, 13, 7], 12), ([7] * 5 + [3], 7), ([45], 0), ([1] * 20, 25)]:
        wanted, fetched = oracle.infllm(q, k, v, turn, dim**-0.5, chunks + [1] * decode, **options)
        assert_close(run(layer_of("infllm", options, turn), q, k, v, turn, chunks, decode), wanted)
    if options["local"] < 40:
        assert any(fetched), "the case must fetch a block"


def test_infllm_blocks_leave_and_memory_is_counted():
    turn = oracle.Turn(8)
    q, k, v = tensors(4, 2, 16, 1600)
    layer = layer_of("infllm", {"init": 4, "local": 16, "block": 8, "topk": 2}, turn)
    run(layer, q, k, v, turn, [16] * 100)
    values = 2 * 16 * 4 * 2 * 1600
    held = sum(x.untyped_storage().nbytes() for x in layer.held())
    assert held >= values, "blocks in host memory count as held"
    assert len(layer.near) <= 16 + 16 + 8
    assert layer.visible() <= 4 + 2 * 8 + len(layer.near)


@pytest.mark.parametrize("tau", [0.0, 0.3])
@pytest.mark.parametrize(
    ("share", "stride", "kernel"), [(8, 5, 7), (3, 1, 3), (4, 4, 1), (16, 50, 5), (2, 3, 4)]
)
def test_recycled(case, share, stride, kernel, tau):
    heads, groups, dim, turn = case
    q, k, v = tensors(heads, groups, dim, 46, seed=stride)
    options = {"fraction": share, "stride": stride, "pool": kernel, "tau": tau}
    wanted, full = oracle.recycled(q, k, v, turn, dim**-0.5, 24, share, stride, tau, kernel)
    for chunks in ([24], [7, 7, 7, 3], [1] * 24):
        assert_close(run(layer_of("recycled", options, turn), q, k, v, turn, chunks, 22), wanted)
    if tau == 0:
        assert sum(full) == 22 // stride


def test_recycled_dynamic_schedule_skips_and_takes_refreshes():
    taken = set()
    for seed in range(6):
        q, k, v = tensors(6, 2, 16, 46, seed)
        taken |= set(oracle.recycled(q, k, v, oracle.Turn(8), 0.25, 24, 4, 3, 0.3, 7)[1][2::3])
    assert taken == {True, False}


def test_recycled_never_loses_a_token():
    turn = oracle.Turn(8)
    q, k, v = tensors(6, 2, 16, 60)
    layer = layer_of("recycled", {"fraction": 8, "stride": 7}, turn)
    run(layer, q, k, v, turn, [20], 40)
    assert len(layer.kv) == 60
    assert torch.equal(layer.kv.v, v)


def test_recycled_with_a_budget_beyond_the_text_is_full():
    turn = oracle.Turn(8)
    q, k, v = tensors(6, 2, 16, 46)
    wanted = oracle.dense(q, k, v, turn, 0.25, oracle.full_keys(46))
    assert_close(run(layer_of("recycled", {"keep": 64, "stride": 9}, turn), q, k, v, turn, [24], 22), wanted)


@pytest.mark.parametrize("name", METHODS)
def test_learned_sinks_and_softcap_reach_every_method(name):
    """gpt-oss' learned logits and Gemma 2's softcap change a layer's output and stay chunk-invariant."""
    turn = oracle.Turn(8)
    q, k, v = (turn(x, range(20)).float() for x in tensors(4, 2, 16, 20))
    learned = torch.tensor([0.5, -1.0, 2.0, 0.0])
    outs = []
    for extra in ({}, {"softcap": 3.0}, {"sinks": learned}):
        layer = layer_of(name, {}, turn)
        whole = layer.attend(q, k, v, 0.25, False, **extra)
        layer = layer_of(name, {}, turn)
        parts = [
            layer.attend(*(x[:, i : i + 5] for x in (q, k, v)), 0.25, False, **extra) for i in range(0, 20, 5)
        ]
        assert torch.allclose(whole, torch.cat(parts, dim=1), atol=1e-5)
        outs.append(whole)
    assert (outs[0] - outs[1]).abs().max() > 1e-3
    assert (outs[0] - outs[2]).abs().max() > 1e-3


@pytest.mark.parametrize(
    "extra",
    [{"softcap": 2.0}, {"sinks": torch.tensor([3.0, -2.0, 0.0, 1.0, 4.0, -5.0])}],
    ids=["softcap", "sinks"],
)
def test_recycled_ranks_by_what_the_model_attends_to(extra):
    """Its choice after a prompt is that of an observed full step, softcap and learned sinks included."""
    q, k, v = tensors(6, 2, 16, 31)
    chosen = []
    for full_step in (False, True):
        layer = layer_of("recycled", {"keep": 5, "stride": 1 if full_step else 50}, None)
        layer.attend(q[:, :29], k[:, :29], v[:, :29], 0.25, False, **extra)
        if full_step:  # the same keys and query again, through an observed step
            layer.query = q[:, 28]
            layer.kv.end -= 1
            layer.seen -= 1
            layer.attend(q[:, 28:29], k[:, 28:29], v[:, 28:29], 0.25, True, **extra)
            chosen.append(layer.small.v[:, :5])
        else:
            layer.attend(q[:, 29:30], k[:, 29:30], v[:, 29:30], 0.25, True, **extra)
            chosen.append(layer.small.v[:, :5])
    assert torch.equal(*chosen)


# --- options and the registry


@pytest.mark.parametrize("name", METHODS)
def test_registry(name):
    kind = method_class(name)
    method = kind.build({})
    for text in (kind.summary, kind.keeps, kind.forgets, kind.cost):
        assert text and "\n" not in text
    for field in dataclasses.fields(method):
        assert field.metadata["help"]
        low, choices = field.metadata["low"], field.metadata["choices"]
        if low is not None:
            with pytest.raises(UsageError, match="at least"):
                kind.build({field.name: low - 1})
            kind.build({field.name: low})
        for choice in choices:
            kind.build({field.name: choice})
        if choices:
            with pytest.raises(UsageError, match="choose from"):
                kind.build({field.name: "nonsense"})
    with pytest.raises(UsageError, match="--no-such"):
        kind.build({"no_such": 1})


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("pyramidinfer", "ratio", float("nan")),
        ("pyramidinfer", "recent", 2.0),
        ("recycled", "tau", float("nan")),
        ("recycled", "tau", float("inf")),
        ("window", "window", 2**31),
    ],
)
def test_numbers_out_of_range_are_refused(name, option, value):
    with pytest.raises(UsageError, match=f"--{option} is {value}"):
        method_class(name).build({option: value})


def test_a_pooling_wider_than_the_text_takes_no_memory_and_ranks_as_the_widest():
    weights = torch.rand(2, 9, generator=torch.Generator().manual_seed(0))
    for kind in ("max", "mean"):
        widest = ranked(pooled(weights, 17, kind), 9)
        assert torch.equal(ranked(pooled(weights, 2**31 - 1, kind), 9), widest)
        assert torch.equal(ranked(pooled(weights, 40, kind), 9), widest)


def test_ranked_takes_the_earlier_of_equals_however_few_are_asked_for():
    generator = torch.Generator().manual_seed(0)
    for scores in (torch.randint(0, 5, (3, 400), generator=generator).float(), torch.zeros(2, 50)):
        everything = scores.sort(dim=-1, descending=True, stable=True).indices
        for count in (0, 1, 7, 40, scores.shape[1] // 2, scores.shape[1]):
            assert torch.equal(ranked(scores, count), everything[:, :count])


def test_pooling_is_torchs():
    weights = torch.rand(3, 40, generator=torch.Generator().manual_seed(0))
    for width in (1, 2, 3, 7, 8, 15):
        padded = torch.nn.functional.pad(weights, ((width - 1) // 2, width // 2))
        assert torch.equal(pooled(weights, width), torch.nn.functional.max_pool1d(padded, width, stride=1))


def test_unknown_method_has_a_hint():
    with pytest.raises(UsageError, match="sink"):
        method_class("sinks")
    with pytest.raises(UsageError, match="choose from"):
        method_class("zzz")


# --- marks


@pytest.mark.parametrize("name", METHODS)
def test_layer_snapshots_leave_no_trace(name):
    """Marks before and after evictions, restored in any order, twice: as if nothing had been."""
    turn = oracle.Turn(8)
    options = SMALL.get(name) or method_class(name).at_budget(12, 90)
    q, k, v = (turn(x, range(90)).float() for x in tensors(4, 2, 16, 90))
    noise = tensors(4, 2, 16, 90, seed=5)

    def feed(layer, first, stop, source=(q, k, v)):
        return torch.cat(
            [layer.attend(*(x[:, t : t + 1] for x in source), 0.25, True) for t in range(first, stop)], dim=1
        )

    plain = layer_of(name, options, turn)
    plain.attend(q[:, :30], k[:, :30], v[:, :30], 0.25, False)
    wanted = feed(plain, 30, 90)

    layer = layer_of(name, options, turn)
    layer.attend(q[:, :30], k[:, :30], v[:, :30], 0.25, False)
    early = layer.snapshot()
    feed(layer, 30, 50)
    late = layer.snapshot()
    for mark, start in [(early, 30), (late, 50), (early, 30), (late, 50)]:
        layer.restore(mark)
        feed(layer, start, start + 25, noise)
        layer.restore(mark)
        assert layer.seen == start
        assert torch.equal(feed(layer, start, 90), wanted[:, start - 30 :])


def test_cache_counts_storages_once():
    layer = layer_of("full", {}, None)
    q, k, v = tensors(2, 2, 16, 10)
    layer.attend(q, k, v, 0.25, False)
    expected = sum(x.untyped_storage().nbytes() for x in layer.kv.tensors())
    assert Cache(method_class("full")(), [layer, layer, None]).bytes() == expected > 2 * 2 * 16 * 10 * 4


# --- probing


def test_probe_tells_rotations_apart():
    key = torch.randn(2, 1, 16)
    half, pairs = oracle.Turn(8), oracle.Turn(8, interleaved=True)
    partial, slow = oracle.Turn(4), oracle.Turn(8, base=10_000.0)
    turns = [half, pairs, partial, slow, oracle.Turn(0)]

    def keys_at(position: int) -> list[Tensor | None]:
        rotated = [turn(key, [position]).float() for turn in turns]
        return [*rotated, rotated[0] / rotated[0].abs().max() * (1 + position), None]

    candidates = [rope_of(t) for t in (half, oracle.Turn(8, base=10_000.0), partial, pairs)]
    found = probe(keys_at, candidates)
    assert found[:4] == [candidates[0], candidates[3], candidates[2], candidates[1]]
    assert found[4] is None
    assert all(isinstance(reason, str) for reason in found[5:])


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    path = tmp_path_factory.mktemp("lean")
    tiny.build("Llama").save_pretrained(path)
    return LeanDecoder.from_dir(path, dtype=torch.float32)


def lends(name: str) -> bool:
    """Whether another method may read its prompts."""
    return method_class(name).dense_prompts and not method_class(name).observes_prompts


RULED = [(name, shared) for name in METHODS for shared in ({}, {"kv_dtype": "int4"})]
RULED += [(name, {"prefill": "minference:vertical=2,slash=30"}) for name in METHODS if lends(name)]


@pytest.mark.parametrize(("name", "shared"), RULED, ids=str)
def test_spans_keep_the_rules_of_kernels(decoder, name, shared, monkeypatch):
    """Whatever a method returns, in long and short calls and while decoding: within the keys, none twice."""
    method = method_class(name).build(SMALL.get(name, {}) | shared)
    attend, checked = kernels.attend, []

    def checking(q, spans, *others):
        for span in spans:
            check(q, span)
            checked.append(span.index is not None)
        return attend(q, spans, *others)

    monkeypatch.setattr(kernels, "attend", checking)
    cache, ids = decoder.new_cache(method), tiny.tokens(220)
    for part in [ids[:200]] if method.whole else ids[:200].split([100, 1, 70, 29]):
        decoder.forward(part, cache)
    cache.decoding = True
    for token in ids[200:]:
        decoder.forward(token.view(1), cache)
    assert len(checked) >= 20 * len(cache.layers)
    assert any(checked) or "prefill" not in shared, "the prompt was read through lists"
