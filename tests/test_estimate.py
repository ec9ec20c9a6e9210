"""What reading will cost: speeds from a clock that is known, bytes against what methods really hold."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from longchat_cli import estimate
from longchat_cli.attention import method_class
from longchat_cli.cli import cli
from longchat_cli.documents import Document
from longchat_cli.engine import EngineInfo
from longchat_cli.estimate import Cost, Pace, indexing, reading
from longchat_cli.local import LocalEngine
from longchat_cli.models.lean import LeanDecoder
from longchat_cli.pages import Store
from longchat_cli.tokens import Tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")


class Clock:
    """A reader that takes 2 s a call and 1 ms more for every token before it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.read = 0.0, 0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def __call__(self, ids: Sequence[Any]) -> Any:
        self.now += 2 + self.read / 1000
        self.read += len(ids)
        return np.zeros((len(ids), 8))


def test_the_pace_is_that_of_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    for tokens in (estimate.SAMPLE, 5000):
        pace = Pace.measure(Clock(monkeypatch), list(range(tokens)))
        assert (pace.seconds, pace.more) == pytest.approx((2, 0.001))
    short = Pace.measure(Clock(monkeypatch), [1, 2, 3])
    assert (short.seconds, short.more) == (2, 0)
    clock = Clock(monkeypatch)
    for start in range(0, 10_000, estimate.CALL):
        clock(range(start, min(start + estimate.CALL, 10_000)))
    assert pace.total(10_000, lambda position: position) == pytest.approx(clock.now)
    assert pace.total(10_240, lambda position: 0) == pytest.approx(2 * 20)


def test_indexing_is_in_proportion(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "A sentence of one length stands here. " * 640
    cost = indexing([Document("a", text)], Clock(monkeypatch))
    assert cost.seconds == pytest.approx(20, rel=0.01)
    assert cost.disk == 640 * 8 * 2
    assert indexing([Document("a", text)], None) == Cost("recall", 0.0, 0, 0)
    assert indexing([Document("a", "")], Clock(monkeypatch)).disk == 0


CASES: list[tuple[str, dict[str, Any]]] = [
    ("full", {}),
    ("sink", {"window": 500}),
    ("window", {"window": 400}),
    ("cca", {"group": 8, "local": 300}),
    ("full", {"kv_dtype": "int8"}),
    ("full", {"kv_dtype": "int4"}),
]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_bytes_are_about_what_is_held_and_kept(
    tiny_model: Callable[..., Path], tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    path = tiny_model()
    config = json.loads((path / "config.json").read_text())
    decoder = LeanDecoder.from_dir(path, dtype=torch.bfloat16)
    info = EngineInfo("tiny", 512, name, "cpu", "bfloat16", "f" * 64)
    engine = LocalEngine(decoder, Tokenizer.from_dir(path), method_class(name).build(options), info)
    ids = [7 + i % 300 for i in range(9000)]
    engine.read(ids, Store(tmp_path))
    cost = reading(name, options, len(ids), config, 512, Pace(1, 0))
    held = engine.coverage().bytes
    assert 0.6 * held < cost.memory < 1.5 * held
    entries = Store(tmp_path).entries()
    kept = sum(entry.bytes for entry in entries) - 4000 * len(entries)  # headers of a tiny model weigh much
    assert 0.6 * kept < cost.disk < 1.6 * kept
    assert bool(cost.trouble) == (name in ("full", "cca"))
    given = [word for key, value in options.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    assert cost.form.split() == [name, *given]


def test_the_command_says_it_and_reads_nothing(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONGCHAT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("LONGCHAT_OFFLINE", "1")
    book = tmp_path / "book.txt"
    book.write_text("The mill has seven sails. " * 500)
    model = ["--model", str(tiny_model())]
    for words in (["ingest", str(book)], ["ask", str(book), "How many?", "--max-tokens", "8"]):
        done = CliRunner().invoke(cli, [*words, "--estimate", *model], catch_exceptions=False)
        heading, columns, first, *rest = done.stdout.splitlines()
        assert "window 512" in heading and "can be kept" in heading
        assert columns.split() == ["form", "reading", "memory", "disk"]
        assert first.startswith("* recall") and [line.split()[0] for line in rest].count("full") == 3
    done = CliRunner().invoke(
        cli, ["ingest", str(book), "--estimate", "-m", "sink", "--window", "64", "--cache-size", "10", *model]
    )
    first = done.stdout.splitlines()[2]
    assert first.startswith("* sink --window 64") and "beginning" in first
    assert not (tmp_path / "cache" / "pages").exists()


def test_durations() -> None:
    shown = [estimate.duration(seconds) for seconds in (0.2, 45.4, 300, 6000)]
    assert shown == ["0 s", "45 s", "5 min", "1.7 h"]
