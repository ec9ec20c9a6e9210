"""`longchat bench`: real child processes over a tiny model, and a fake one where another program would be."""

from __future__ import annotations

import json
import math
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from longchat_cli import local
from longchat_cli.benchmark import limits, ours, peer, process, report, speed, start
from longchat_cli.benchmark.streams import skip
from longchat_cli.cli import cli
from longchat_cli.errors import CannotCreate, LongchatError, MissingInput, Unavailable, UsageError
from longchat_cli.evaluation.measure import named, names
from longchat_cli.kernels import native

pytestmark = pytest.mark.usefixtures("one_thread")

FAKE = (sys.executable, str(Path(__file__).with_name("fake_peer.py")))
FAKES = str(Path(__file__).with_name("fakes.py"))
ENGINE = {"device": "cpu", "dtype": "float32", "quantize": None, "compile": False, "kernel": None}
LAYERS, HEADS, GROUPS, DIM = 3, 4, 2, 16
IDS = [3 + index * 7 % 390 for index in range(160)]


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[dict[str, Any]]]:
    """The jobs that fake programs were given, in order."""
    file = tmp_path / "jobs"
    monkeypatch.setenv("FAKE_LOG", str(file))
    return lambda: [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


# Processes


def test_what_libraries_print_is_no_answer():
    answer = process.ask(FAKE, {"file": "a-2000-500"}, {})
    assert (answer["first_s"], answer["step_s"]) == (2, 0.5)


@pytest.mark.parametrize(
    ("file", "kind", "said"),
    [
        ("crash", process.Died, "SIGILL ended it: its build does not fit this CPU"),
        ("silent", process.Died, "nothing to say"),
        ("refused", process.Refused, "no such thing: it is refused"),
    ],
)
def test_a_process_that_gives_no_figures(file: str, kind: type[LongchatError], said: str):
    with pytest.raises(kind, match=said):
        process.ask(FAKE, {"file": file}, {})


def test_the_environment_of_a_process(log, monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    process.ask(FAKE, {"file": "a-1000-1000"}, {})
    process.ask(FAKE, {"file": "a-1000-1000"}, {"OMP_WAIT_POLICY": None})
    assert [job["wait"] for job in log()] == ["PASSIVE", None]


def test_resident_memory_grows_with_what_is_held():
    before = process.resident()
    held = bytearray(b"x" * 2**26)
    assert 2**25 < process.resident() - before < 2**28
    del held


# Our own process


@pytest.fixture(scope="module")
def model(tiny_model) -> Path:
    return tiny_model("llama")


def job(model: Path, method: str = "full", **more: Any) -> dict[str, Any]:
    engine = {"model": str(model), **ENGINE}
    text = {"ids": IDS[:100], "following": IDS[100:120], "warm": 50, "threads": 1, "count": True}
    return {"engine": engine, "method": method, "options": {}, **text, **more}


def weights(model: Path) -> tuple[int, int]:
    """Elements of all matrices but the embedding and the head, and of the head, from the file's header."""
    with (model / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
    sizes = {name: math.prod(about["shape"]) for name, about in header.items() if name != "__metadata__"}
    matrices = {name: size for name, size in sizes.items() if len(header[name]["shape"]) > 1}
    inner = sum(size for name, size in matrices.items() if ".layers." in name)
    return inner, matrices.get("lm_head.weight", matrices["model.embed_tokens.weight"])


@pytest.mark.parametrize(("method", "options", "seen"), [("full", {}, 10**9), ("window", {"window": 40}, 40)])
def test_what_a_prompt_and_a_step_ask_for(model, method, options, seen):
    """Against sums written out from the sizes of the model and the rows of the mask."""
    got = ours.measure(job(model, method, options=options))
    inner, head = weights(model)
    pairs = sum(min(row + 1, seen) for row in range(100))
    assert got["asked"]["prompt_flops"] == 2 * (100 * inner + head) + LAYERS * HEADS * pairs * 4 * DIM
    keys = sum(min(row + 1, seen) for row in range(100, 120)) / 20
    moved = LAYERS * 4 * (2 * HEADS * DIM + 2 * GROUPS * DIM * keys)
    assert got["asked"]["step_bytes"] == pytest.approx(4 * (inner + head) + moved, abs=1)
    assert got["rates"]["bytes"] > 4 * (inner + head)
    assert got["rates"]["bytes_per_s"] > 1e8 and got["rates"]["flops_per_s"] > 1e8


def test_figures_of_a_real_process(model):
    got = process.ask(speed.OURS, job(model), {"OMP_NUM_THREADS": "1"})
    per_token = LAYERS * 2 * GROUPS * DIM * 4
    assert 120 * per_token <= got["held"] <= 2 * 120 * per_token
    elements = sum(weights(model)) + weights(model)[1]
    assert 0.9 * 4 * elements < got["kept"] < 1.2 * 4 * elements
    assert got["first_s"] > 0 and got["step_s"] > 0 and got["resident"] > got["held"]
    assert (
        sum(got["served"]["prompt"].values()) == LAYERS
        and sum(got["served"]["steps"].values()) == LAYERS * 20
    )


@pytest.mark.skipif(native.missing() is not None, reason=f"native library: {native.missing()}")
def test_where_the_time_of_a_step_goes(model):
    engine = {**ENGINE, "dtype": "bfloat16", "model": str(model)}
    got = ours.measure(job(model, engine=engine, count=False))
    spent = got["spent"]
    assert list(spent) == ["python", *native.PHASES]
    assert all(seconds > 0 for name, seconds in spent.items() if name != "waiting")  # one thread has no other
    assert 0.2 * got["step_s"] < sum(spent.values()) < 5 * got["step_s"]
    layered = ours.measure(job(model, "quest", engine=engine, count=False))
    assert "spent" not in layered  # its layers are calls of their own


def test_a_forced_kernel_is_named(model):
    engine = {"model": str(model), **ENGINE, "kernel": "reference"}
    try:
        got = ours.measure(job(model, engine=engine, count=False))
    finally:
        local_kernels().force(None)
    assert got["served"] == {"prompt": {"reference": LAYERS}, "steps": {"reference": LAYERS * 20}}
    assert "asked" not in got


def local_kernels() -> Any:
    from longchat_cli import kernels

    return kernels


@pytest.fixture(autouse=True)
def no_forced_kernel():
    yield
    local_kernels().force(None)


def test_counting_leaves_attention_as_it_was():
    before = local_kernels().attend
    with pytest.raises(KeyError), limits.counting():
        raise KeyError
    assert local_kernels().attend is before


# Runs in turn


def contenders(*files: str, mine: str = "a-1000-100") -> list[speed.Contender]:
    own = speed.ours({mine: (mine, {})}, {}, 1, FAKE)
    return own + speed.peers([peer.Form(Path(file), False, file) for file in files], {}, FAKE)


def run(plan: speed.Plan, who: list[speed.Contender]) -> tuple[list[dict[str, Any]], list[str]]:
    said: list[str] = []
    return list(speed.rows(plan, who, IDS, said.append)), said


def test_runs_alternate_and_slow_forms_of_the_other_are_left_out(log):
    plan = speed.Plan((40, 100), 2, 1, decode=6)
    rows, said = run(plan, contenders("p-2000-400", "q-9000-300", "r-9000-900"))
    order = ["a-1000-100", "p-2000-400", "q-9000-300", "r-9000-900", "a-1000-100", "p-2000-400", "q-9000-300"]
    assert [row["name"] for row in rows] == order * 2
    assert [row["round"] for row in rows[:7]] == [0, 0, 0, 0, 1, 1, 1]
    jobs = log()
    assert [len(given["ids"]) for given in jobs] == [40] * 7 + [100] * 7
    assert all(given["following"] == IDS[len(given["ids"]) :][:6] for given in jobs)
    assert [given["count"] for given in jobs[:7]] == [True] * 4 + [False] * 3
    assert "40 tokens, round 1 of 2: a-1000-100: first token 1.00 s, 10.0 tokens/s" in said


def test_whoever_fails_is_reported_and_not_tried_again():
    rows, said = run(speed.Plan((40,), 2, 1), contenders("crash", "p-2000-400"))
    assert [row["name"] for row in rows] == ["a-1000-100", "crash", "p-2000-400", "a-1000-100", "p-2000-400"]
    assert "SIGILL" in rows[1]["failed"] and any("llama.cpp crash: " in line for line in said)


def test_a_short_text_is_repeated(log):
    run(speed.Plan((400,), 1, 1), contenders())
    assert log()[0]["ids"] == (IDS * 3)[:400]


@pytest.mark.parametrize("wrong", [{"lengths": (0,)}, {"repeat": 0}, {"threads": -1}, {"decode": 0}])
def test_plans_that_make_no_sense(wrong):
    with pytest.raises(UsageError):
        speed.Plan(**{"lengths": (5,), "repeat": 1, "threads": 1} | wrong)


# The other program


@pytest.fixture
def gguf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LONGCHAT_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "model.gguf").write_text("weights")
    return tmp_path / "model.gguf"


def test_forms_are_written_once(gguf, log):
    found = peer.forms(str(gguf), [], 1, FAKE)
    assert [form.flash for form in found] == [False, True] * 3
    assert found[0].file == gguf and [form.file.read_text() for form in found[2::2]] == ["Q4_0", "Q8_0"]
    assert [form.name for form in found[:4:3]] == ["model", "Q4_0, flash attention"]
    assert peer.forms(str(gguf), [], 1, FAKE) == found and len(log()) == 2


@pytest.mark.parametrize(("asleep", "chosen"), [("1", "PASSIVE"), ("", None)])
def test_the_other_program_waits_as_is_faster_for_it(asleep, chosen, log, monkeypatch):
    """The fake is ten times slower in one of the two; longchat's own setting must not reach it."""
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.setenv("FAKE_LIKES_SLEEP", asleep)
    found = peer.waiting(peer.Form(Path("a-1000-1000"), False, "a"), IDS, 3, FAKE)
    assert found == {"OMP_NUM_THREADS": "3", "OMP_WAIT_POLICY": chosen}
    assert [job["wait"] for job in log()] == [None, "PASSIVE"]


def test_a_form_that_could_not_be_written_leaves_nothing(gguf, monkeypatch):
    monkeypatch.setenv("FAKE_FULL", "1")
    with pytest.raises(LongchatError, match="the disk is full"):
        peer.forms(str(gguf), [], 1, FAKE)
    assert [file.suffixes[-2:] for file in gguf.parent.glob("cache/bench/*")] == [[".Q4_0", ".gguf"]]


def test_files_that_are_named_are_taken(gguf):
    assert [form.file for form in peer.forms("some/dir", [gguf], 1, FAKE)] == [gguf, gguf]
    twins = [gguf.with_name(name) for name in ("a.Q8_0.gguf", "b.Q8_0.gguf", "b-q4_k_m.gguf")]
    for file in twins:
        file.touch()
    assert [form.label for form in peer.forms("", twins[1:], 1, FAKE)[::2]] == ["Q8_0", "q4_k_m"]
    assert [form.label for form in peer.forms("", twins[:2], 1, FAKE)[::2]] == ["a.Q8_0", "b.Q8_0"]
    with pytest.raises(MissingInput):
        peer.forms("some/dir", [gguf.with_name("none.gguf")], 1, FAKE)
    with pytest.raises(UsageError, match="GGUF"):
        peer.forms("some/dir", [], 1, FAKE)


def test_without_llama_cpp_it_says_what_to_install(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    monkeypatch.setattr(peer.importlib.util, "find_spec", lambda name: None)
    result = CliRunner().invoke(cli, ["bench", "speed", "--peer", "llama.cpp", "--model", str(model)])
    assert isinstance(result.exception, Unavailable) and result.exception.exit_code == 69
    assert "pip install llama-cpp-python" in str(result.exception)


# The report


def row(name: str, length: int, first: float, step: float, peer: bool = False, **more: Any) -> dict[str, Any]:
    figures = {"first_s": first, "step_s": step, "held": 2**20, "kept": 2**21, "resident": 3 * 2**20}
    served = {"served": {"prompt": {"sdpa": 1}, "steps": {"native": 2}}, "load": 0.5, "waits": None}
    return {"name": name, "peer": peer, "length": length, **figures, **served, **more}


ROWS = [
    row("full", 1000, 1.0, 0.01),
    row("full", 1000, 2.0, 0.02),
    row("full", 1000, 4.0, 0.05),
    row("x", 1000, 10.0, 0.04, True),
    row("y", 1000, 8.0, 0.08, True),
    row("full", 2000, 5.0, 0.10),
    {"name": "x", "peer": True, "length": 2000, "load": None, "failed": "SIGILL ended it"},
]


def result(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"machine": speed.machine(2), "plan": {"repeat": 3, "decode": 96}, "rows": rows}


def cells_of(shown: str, first: str) -> list[list[str]]:
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in shown.splitlines() if "|" in line]
    return [line for line in lines if line[0] == first]


def test_medians_spreads_and_ratios_to_the_best_of_the_other():
    shown = report.show(result(ROWS))
    own, longer, against = cells_of(shown, "full")
    assert own[1:4] == ["1,000", "2.00 (1.00-4.00)", "500 (250-1,000)"]
    assert own[5] == "50.0 (20.0-100)" and own[-1] == "sdpa 1; native 2" and longer[1] == "2,000"
    assert own[-2] == "1.00"  # 3 MiB resident of 1 held and 2 kept
    assert against[2:5] == ["500 (250-1,000)", "125", "4.00x"]
    assert against[5:] == ["50.0 (20.0-100)", "25.0", "2.00x"]
    assert "x, 2,000 tokens: SIGILL ended it" in shown and "2 threads each" in shown
    assert "load average 0.5 to 0.5" in shown


def test_what_a_step_is_spent_on_in_shares():
    spent = [{"python": 0.001, "products": 0.003}, {"python": 0.003, "products": 0.003}]
    rows = [row("full", 1000, 1.0, 0.01, spent=each) for each in spent]
    shown = report.show(result([*rows, row("quest", 1000, 1.0, 0.01)]))
    assert cells_of(shown, "full")[-1] == ["full", "1,000", "5.00", "2.00 (40%)", "3.00 (60%)"]
    assert len(cells_of(shown, "quest")) == 1
    assert "Where the time of a step goes" not in report.show(result(ROWS))


def test_limits_are_what_the_machine_could_do_at_its_best():
    asked = {"step_bytes": 100, "prompt_flops": 1000}
    rates = [
        {"bytes": 90, "bytes_per_s": 1e6, "flops_per_s": 500.0},
        {"bytes": 100, "bytes_per_s": 5000.0, "flops_per_s": 1000.0},
        {"bytes": 200, "bytes_per_s": 4000.0, "flops_per_s": 400.0},
    ]
    rows = [row("full", 1000, 2.0, 0.1, rates=rate, asked=asked) for rate in rates]
    (line,) = cells_of(report.show(result(rows)), "full")
    assert line[4] == "50%"  # 1 s of 2
    assert line[6:8] == ["50.0", "20%"]  # a block of 90 bytes is too small to say


def test_a_section_of_a_page_is_replaced_and_the_rest_stays(tmp_path):
    file = tmp_path / "page.md"
    report.insert(file, "speed", "old \\1")
    file.write_text(file.read_text() + "\nWritten by hand.\n")
    report.insert(file, "start", "other")
    report.insert(file, "speed", "new \\2")
    text = file.read_text()
    assert text.startswith("# Benchmarks\n") and "old" not in text
    assert text.index("new \\2") < text.index("Written by hand.") < text.index("other")
    with pytest.raises(CannotCreate):
        report.insert(tmp_path / "none" / "page.md", "speed", "text")


def test_plots(tmp_path):
    pytest.importorskip("matplotlib")
    for file in report.plot(result(ROWS), tmp_path / "plots"):
        assert file.read_bytes().startswith(b"\x89PNG") and file.stat().st_size > 5000


def test_without_matplotlib_nothing_is_measured(model, monkeypatch):
    monkeypatch.setattr(peer.importlib.util, "find_spec", lambda name: None)
    ran = CliRunner().invoke(cli, ["bench", "speed", "--plot", "p", "--model", str(model)])
    assert isinstance(ran.exception, Unavailable) and "longchat-cli[bench]" in str(ran.exception)


# The commands


def test_methods_with_options():
    assert [named(name) for name in names("full,sink:window=10,sinks=2,recycled stride=5 fraction=4")] == [
        ("full", {}),
        ("sink", {"window": 10, "sinks": 2}),
        ("recycled", {"stride": 5, "fraction": 4}),
    ]
    assert named("sink++:window=9")[0] == "sink++"
    assert named("full prefill=minference:slash=9") == ("full", {"prefill": "minference:slash=9"})


def test_bench_speed(model, tmp_path):
    out, page = tmp_path / "runs.json", tmp_path / "page.md"
    arguments = ["--methods", "full,window:window=20", "--lengths", "60", "--repeat", "1", "--threads", "1"]
    places = ["--json", str(out), "--markdown", str(page), "--model", str(model), "--dtype", "float32"]
    ran = CliRunner().invoke(cli, ["bench", "speed", *arguments, *places], catch_exceptions=False)
    assert ran.exit_code == 0 and cells_of(ran.stdout, "window:window=20")[0][1] == "60"
    kept = json.loads(out.read_text())
    assert [run["name"] for run in kept["rows"]] == ["full", "window:window=20"]
    assert kept["rows"][1]["held"] < kept["rows"][0]["held"]
    assert ran.stdout.strip() in page.read_text()


def test_the_bundled_text_is_long_enough_for_the_default_lengths():
    assert len(speed.TEXT.read_text(encoding="utf-8")) > 5 * (8000 + 96)


# Waiting, and streams


def plan(**more: Any) -> start.Plan:
    settings = {"model": None, "engine": ENGINE, "threads": 1, "repeat": 2, "book": False, "streams": {}}
    return start.Plan(**settings | {"lengths": ()} | more)


def test_a_first_token_is_waited_for(model):
    """Loading takes 0.4 s here; whatever is slow before the first character counts."""
    encode = local.open_engine(str(model), dtype="float32").tokenizer.encode
    text = speed.TEXT.read_text(encoding="utf-8")[:6000]
    found = list(start.rows(plan(), text, encode, (sys.executable, FAKES, str(model), "0,0.4")))
    help_, tokenizing, first = found
    assert min(first["values"]) > 0.4 and min(help_["values"]) > 0 and min(tokenizing["values"]) > 0
    assert all(len(each["values"]) == 2 for each in found)
    assert "first token of a question of 500 tokens" in start.show(found)


def test_a_shell_that_fails(model):
    with pytest.raises(process.Died, match="--help"):
        list(start.rows(plan(), "text", list, (sys.executable, "-c", "raise SystemExit(1)")))


@pytest.mark.parametrize("method", ["sink", "window", "lm-infinite"])
def test_a_state_moved_on_is_like_one_that_read_as_much(model, method):
    read = local.open_engine(str(model), method, {"window": 24}, dtype="float32")
    moved = local.with_method(read, method, {"window": 24})
    read.prefill([IDS[i % 100] for i in range(500)])
    moved.prefill(IDS[:60])
    skip(moved.cache, 440)
    for engine in (read, moved):
        engine.prefill(IDS[:100])
    assert moved.cache.seen == read.cache.seen == 600 and moved.coverage().visible == read.coverage().visible
    for a, b in zip(moved.cache.own(), read.cache.own(), strict=True):
        assert (a.kv.first, a.kv.end, a.kv.k.shape) == (b.kv.first, b.kv.end, b.kv.k.shape)
    # The first layer's keys come from the tokens alone: the same ones give the same, at the same positions.
    first, second = (engine.cache.own()[0].kv.k[:, -100:] for engine in (read, moved))
    assert (first - second).abs().max() < 1e-5


def test_a_stream_in_its_own_process(model):
    engine = {"model": str(model), **ENGINE}
    given = {"engine": engine, "method": "window", "options": {"window": 24}, "threads": 1}
    rows = process.ask(start.STREAMS, given | {"ids": IDS, "lengths": [100, 9000]}, {})["rows"]
    assert [each["length"] for each in rows] == [100, 9000] and all(each["finite"] for each in rows)
    assert rows[1]["visible"] == 24 and rows[0]["step_s"] > 0


@pytest.mark.slow
def test_llama_cpp_itself(default_model_dir, tmp_path):
    """The real program on the default model's file: it reads as many tokens, and keeps as much of them."""
    pytest.importorskip("llama_cpp")
    from longchat_cli.models import load

    source = load.find("smollm2").source
    forms = peer.forms(source, [], 2)
    theirs = speed.peers(forms, peer.waiting(forms[0], IDS, 2))
    rows = list(speed.rows(speed.Plan((200,), 1, 2), theirs, IDS, print))
    assert len(rows) == 6 and not [each["failed"] for each in rows if "failed" in each]
    keys_and_values = 30 * 2 * 3 * 64 * 2 * (200 + 96)
    for each in rows:
        assert each["held"] == pytest.approx(keys_and_values, rel=0.1)
        assert 0 < each["step_s"] < each["first_s"]
