"""Methods side by side: a shared reading leaves the same states, and what is finished is not done twice."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

from longchat_cli import local, prose
from longchat_cli.attention import METHODS, method_class
from longchat_cli.attention.buffer import KVBuffer
from longchat_cli.cli import cli
from longchat_cli.errors import BadInput, CannotCreate, UsageError
from longchat_cli.evaluation import measure
from longchat_cli.evaluation.chorus import read
from longchat_cli.evaluation.journal import Journal
from longchat_cli.local import LocalEngine
from longchat_cli.terminal import Console

pytestmark = pytest.mark.usefixtures("one_thread")

BUDGET, LENGTH = 40, 320
IDS = torch.randint(3, 400, (LENGTH,), generator=torch.Generator().manual_seed(0)).tolist()
DENSE = [name for name in METHODS if method_class(name).dense_prompts]

Make = Callable[..., LocalEngine]


@pytest.fixture(scope="module")
def engine(tiny_model) -> Make:
    """`engine(method, arch, **options)`: over one loaded tiny model for each architecture."""
    loaded: dict[str, LocalEngine] = {}

    def make(method: str, arch: str = "llama", **options: Any) -> LocalEngine:
        if arch not in loaded:
            path = tiny_model(arch, max_position_embeddings=2048)
            loaded[arch] = local.open_engine(str(path), dtype="float32")
        made = local.with_method(loaded[arch], method, options)
        made.chunk = min(made.chunk, 64)  # several calls a prompt
        return made

    return make


def scaled(method: str, **options: Any) -> dict[str, Any]:
    return method_class(method).at_budget(BUDGET, LENGTH) | options


def same(a: Any, b: Any) -> bool:
    """Whether two states hold the same: tensors, buffers, counters, and lists of them."""
    if isinstance(a, Tensor):
        return torch.allclose(a, b, atol=1e-5)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, KVBuffer):
        return (a.first, a.end) == (b.first, b.end) and (not len(a) or same([a.k, a.v], [b.k, b.v]))
    return isinstance(a, type(b)) if hasattr(a, "__dict__") else a == b


def states(engine: LocalEngine) -> list[dict[str, Any]]:
    return [layer.state() for layer in engine.cache.own()]


def decoded(engine: LocalEngine, ids: list[int]) -> Tensor:
    """Logits after the prompt and after each of ids."""
    rows = [engine.logits]
    for id in ids:
        engine.feed([id], decoding=True)
        rows.append(engine.logits)
    return torch.stack(rows)


@pytest.mark.parametrize("arch", ["llama", "gemma2"])
def test_a_shared_reading_leaves_every_method_as_its_own_reading_does(engine, arch):
    """So `dense_prompts` is true of every method that claims it; gemma2 keeps sliding layers of its own."""
    together = [engine(name, arch, **scaled(name)) for name in DENSE]
    read(together, IDS[:-5])
    for name, shared in zip(DENSE, together, strict=True):
        alone = engine(name, arch, **scaled(name))
        alone.prefill(IDS[:-5])
        assert alone.ids == shared.ids and alone.cache.seen == shared.cache.seen == LENGTH - 5
        for a, b in zip(states(alone), states(shared), strict=True):
            assert a.keys() == b.keys()
            assert [key for key in a if not same(a[key], b[key])] == [], name
        assert torch.allclose(decoded(alone, IDS[-5:]), decoded(shared, IDS[-5:]), atol=1e-4), name


def test_that_check_finds_a_false_claim(engine, monkeypatch):
    monkeypatch.setattr(method_class("window"), "dense_prompts", True)
    shared, alone = engine("window", **scaled("window")), engine("window", **scaled("window"))
    read([engine("full"), shared], IDS[:-5])
    alone.prefill(IDS[:-5])
    assert not torch.allclose(decoded(alone, IDS[-5:]), decoded(shared, IDS[-5:]), atol=1e-4)


def test_a_shared_reading_is_one_reading_and_others_read_their_own(engine, monkeypatch):
    engines = [engine(name, **scaled(name)) for name in ("full", "h2o", "sink", "snapkv")]
    rows: list[int] = []
    forward = type(engines[0].decoder).forward
    monkeypatch.setattr(
        type(engines[0].decoder),
        "forward",
        lambda self, ids, *rest, **more: rows.append(len(ids)) or forward(self, ids, *rest, **more),
    )
    read(engines, IDS)
    assert sum(rows) == 2 * LENGTH


def test_keys_stored_in_few_bits_are_read_on_their_own(engine):
    engines = [engine("full"), engine("full", kv_dtype="int8"), engine("recycled", kv_dtype="int8", keep=9)]
    alone = engine("recycled", kv_dtype="int8", keep=9)
    read(engines, IDS[:-3])
    alone.prefill(IDS[:-3])
    assert torch.allclose(decoded(alone, IDS[-3:]), decoded(engines[2], IDS[-3:]), atol=1e-4)
    assert engines[1].coverage().bytes < engines[0].coverage().bytes


@pytest.mark.parametrize("name", METHODS)
def test_budgets(engine, name):
    """At a budget a method holds about as many tokens, or says that it keeps all."""
    options = scaled(name)
    assert bool(options) == (name not in ("full", "recall"))
    if name in ("full", "recall", "pyramidinfer"):
        return
    bounded = engine(name, **options)
    bounded.prefill(IDS[:-4])
    decoded(bounded, IDS[-4:])
    kept = [
        sum(len(value) for value in state.values() if isinstance(value, KVBuffer))
        for state in states(bounded)
    ]
    keeps_all = method_class(name).keeps.startswith("every token")
    assert keeps_all or sum(kept) / len(kept) <= 1.3 * BUDGET + 8


def test_the_budget_of_a_pyramid():
    options = method_class("pyramidinfer").at_budget(750, 6000)
    held = [options["recent"] + (1 - options["recent"]) * options["ratio"] ** layer for layer in range(30)]
    assert options["decay"] == options["ratio"] and sum(held) / 30 == pytest.approx(1 / 8, abs=0.002)


@pytest.fixture(scope="module")
def book(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("book") / "book.txt"
    path.write_text(prose.prose(20_000, random.Random(1)))
    return path


COLUMNS = "stream,needle,needle:later,lines@300"


SIZES = {"length": 400, "stream": 120, "n": 2, "max_tokens": 4}


@pytest.fixture
def run(engine, book, monkeypatch) -> Callable[..., dict[str, Any]]:
    """`measure` over a tiny model, with the methods and columns between commas."""
    monkeypatch.setattr(measure, "DECODED", 16)

    def run(methods: str, columns: str = COLUMNS, output: Path | None = None, **sizes: int) -> dict[str, Any]:
        plan = measure.Plan(measure.names(methods), measure.names(columns), data=(book,), **SIZES | sizes)
        opener = lambda name, options: engine(name, **options)  # noqa: E731
        return measure.measure(opener, plan, output, Console(quiet=True))

    return run


def timeless(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "step"} for row in result["rows"]]


def test_the_table(run):
    result = run("sink,snapkv,recycled stride=2,pyramidinfer")
    rows = {row["method"]: row for row in result["rows"]}
    assert list(rows) == ["full", "sink", "snapkv", "recycled stride=2", "pyramidinfer"]
    assert rows["full"]["perplexity"] == rows["full"]["share"] == rows["full"]["step"] == 1
    assert rows["sink"]["options"] == {"window": 50} and rows["recycled stride=2"]["options"]["stride"] == 2
    assert rows["recycled stride=2"]["bytes"] > rows["full"]["bytes"] > 0
    for row in rows.values():
        assert row["step"] > 0 and 0.5 < row["perplexity"] < 2
        assert {column: score["n"] for column, score in row["scores"].items()} == {
            "needle": 2,
            "needle:later": 2,
            "lines@300": 2,
        }
    shown = measure.show(result)
    assert "| full " in shown and "perplexity at 120" in shown and "needle:later" in shown and "/2 |" in shown


def test_what_is_finished_is_not_done_again(run, tmp_path, monkeypatch):
    out, asked = tmp_path / "rows.jsonl", ("sink,snapkv", "stream,needle:later")
    whole = run(*asked)
    fed, feed = 0, LocalEngine.feed

    def interrupted(self, ids, decoding):
        nonlocal fed
        fed += 1
        if fed == 220:
            raise KeyboardInterrupt
        feed(self, ids, decoding)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(LocalEngine, "feed", interrupted)
        run(*asked, out)
    before = out.read_text().splitlines()
    assert 4 < len(before) < 10
    out.write_text("\n".join(before) + '\n{"column": "nee')  # and a line was cut
    assert timeless(run(*asked, out)) == timeless(whole)
    assert out.read_text().splitlines()[: len(before)] == before

    def refuse(self, ids, decoding):
        raise AssertionError("nothing is left to be read")

    with monkeypatch.context() as patch:
        patch.setattr(LocalEngine, "feed", refuse)
        assert timeless(run(*asked, out)) == timeless(whole)
    more = run("sink,snapkv,tova", asked[1], out)
    assert timeless(more)[:-1] == timeless(whole) and more["rows"][-1]["method"] == "tova"


def test_losses_are_those_of_decoding(engine, book):
    """The reference's equal one plain forward's, a method's equal those of its own state."""
    ids = IDS[:100]
    engines = {"full": engine("full"), "sink": engine("sink", window=9)}
    read(list(engines.values()), ids[:-32])
    times, losses = measure._decode(engines, ids[-32:])
    for name, options in (("full", {}), ("sink", {"window": 9})):
        plain = engine(name, **options)
        logits = plain.decoder.forward(torch.tensor(ids[:-1]), plain.cache, len(ids) - 1)[-32:]
        wanted = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[-32:]), reduction="none")
        assert torch.allclose(torch.tensor(losses[name]), wanted, atol=1e-3)
        assert len(times[name]) == 2


def test_a_later_question_does_not_choose_what_is_kept(engine):
    """SnapKV chooses by the last queries of the prompt: with the question in it, by the question's."""
    chosen = {}
    for later in (False, True):
        snapkv = engine("snapkv", budget=12, window=4)
        work = measure._Work(None, measure.Plan(()), {"full": snapkv}, Journal(None, {}), None)
        read([snapkv], IDS[:200])
        mark, before = snapkv.snapshot(), snapkv.cache.layers[0].queries
        work.sampling = work.sampling.__class__(max_tokens=2)
        work._answers(snapkv, mark, [IDS[200:210], IDS[210:220]], later)
        chosen[later] = torch.equal(before, snapkv.cache.layers[0].queries)
    assert chosen == {False: False, True: True}


def test_recall_answers_from_passages_and_has_no_state_to_measure(run):
    (full, recall) = run("recall find=lexical")["rows"]
    assert set(recall["scores"]) == {"needle", "lines@300"} and set(full["scores"]) > set(recall["scores"])
    assert recall["step"] is None and 0 < recall["bytes"] < full["bytes"]


def test_answers_are_as_long_as_the_task_asks_for(run, monkeypatch):
    """A number of 64 digits was cut at 32 tokens whatever the method."""
    seen = []
    generate = LocalEngine.generate
    monkeypatch.setattr(LocalEngine, "generate", lambda *x: seen.append(x[1].max_tokens) or generate(*x))
    for given, expected in ((None, [128, 32]), (4, [4, 4])):
        seen.clear()
        run("full", "digits@700,needle", n=1, max_tokens=given)
        assert seen == expected


def test_several_questions_over_one_text(run, tmp_path):
    """More of them are all asked, whatever the file has answers to; fewer are those of the whole text."""
    for n in (2, 3, 2):
        (row,) = run("full", "lookalike@1500:later", tmp_path / "rows", n=n)["rows"]
        assert row["scores"]["lookalike@1500:later"]["n"] == n and row["bytes"] is None
    assert len((tmp_path / "rows").read_text().splitlines()) == 3


def test_the_command(tiny_model, book):
    """Rows, and methods that cannot serve the model: OPT's keys are not rotated."""
    arguments = ["methods", "--measure", "--model", str(tiny_model("opt")), "--data", str(book), "--n", "1"]
    more = ["--length", "300", "--max-tokens", "2", "--columns", "needle", "--methods", "sink,window"]
    done = CliRunner().invoke(cli, arguments + more, catch_exceptions=False)
    assert done.exit_code == 0 and done.stdout.startswith("| method | held at 300 |")
    assert "\nsink: this method cannot serve this model" in done.stdout and "\n| window " in done.stdout
    result = CliRunner().invoke(cli, [*arguments, *more, "--json"], catch_exceptions=False)
    assert [row["method"] for row in json.loads(result.stdout)["rows"]] == ["full", "window"]


def test_names_and_shares():
    given = "full, recycled stride=5 tau=0.5,snapkv prefill=minference:vertical=9,slash=9"
    assert measure.names(given)[1:] == (
        "recycled stride=5 tau=0.5",
        "snapkv prefill=minference:vertical=9,slash=9",
    )
    plan = measure.Plan((), budget=measure.share("1/8"), length=6000)
    assert plan.options("recycled stride=5 tau=0.5") == (
        "recycled",
        {"keep": 750, "stride": 5, "tau": 0.5},
    )
    assert plan.options("cca")[1] == {"group": 16, "local": 375}
    assert measure.share("0.125") == Fraction(1, 8)
    assert measure.Column.parse("lines@4k:later", 9) == measure.Column("lines", 4000, True)
    assert measure.Column.parse("needle", 9) == measure.Column("needle", 9, False)


@pytest.mark.parametrize(
    "call",
    [
        lambda: measure.share("2"),
        lambda: measure.share("1/0"),
        lambda: measure.Column.parse("neddle", 9),
        lambda: measure.Column.parse("perplexity", 9),
        lambda: measure.Column.parse("needle:sooner", 9),
        lambda: measure.Column.parse("needle@x", 9),
        lambda: measure.Column.parse("needle@0", 9),
        lambda: measure.Plan((), n=0),
        lambda: measure.Plan((), length=0),
        lambda: measure.Plan((), max_tokens=0),
        lambda: measure.Plan(()).options("recycled stride=x"),
        lambda: measure.Plan(()).options("recycld"),
    ],
)
def test_what_makes_no_sense_is_refused(call):
    with pytest.raises(UsageError):
        call()


def test_a_journal_of_other_settings_is_left_alone(tmp_path):
    path = tmp_path / "rows"
    Journal(path, {"seed": 1, "length": 2}).add({"column": "x"})
    with pytest.raises(UsageError, match="other measurements: it differs in seed"):
        Journal(path, {"seed": 2, "length": 2})
    assert Journal(path, {"seed": 1, "length": 2}).where(column="x") == [{"column": "x"}]
    for text in ("no measurements\n", "no measurements", "[1]\n"):
        (tmp_path / "text").write_text(text)
        with pytest.raises(BadInput):
            Journal(tmp_path / "text", {})
        assert (tmp_path / "text").read_text() == text
    (tmp_path / "half").write_text('{"seed": 1, "le')
    assert not Journal(tmp_path / "half", {"seed": 1, "length": 2}).rows
    with pytest.raises(CannotCreate):
        Journal(tmp_path / "none" / "rows", {})
