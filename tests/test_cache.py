"""What ask and ingest keep, told by the command line: reuse, what is never kept, `longchat cache`."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from longchat_cli import local, state
from longchat_cli.__main__ import main
from longchat_cli.cli import cli
from longchat_cli.errors import BadInput, MissingInput, StorageError, UsageError
from longchat_cli.pages import Store, digest
from longchat_cli.prose import prose
from longchat_cli.sessions import OPENING, known_as

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory of one's own, with small pages."""
    monkeypatch.setenv("LONGCHAT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(local, "PAGE", 512)
    monkeypatch.setattr(local, "FAST_CHUNK", 512)
    return tmp_path / "cache" / "pages"


@pytest.fixture
def book(tmp_path: Path) -> Path:
    path = tmp_path / "book.txt"
    path.write_text(prose(6_000, random.Random(3)), encoding="utf-8")
    return path


Run = Callable[..., Result]


@pytest.fixture
def run(tiny_model: Callable[..., Path]) -> Run:
    def call(command: str, *words: object, stdin: str | None = None, **more: Any) -> Result:
        arguments = [command, *map(str, words)]
        if command in ("ask", "ingest"):
            arguments += ["--model", str(tiny_model()), "--method", more.pop("method", "sink")]
            arguments += ["--window", "64"] if "sink" in arguments else []
        if command == "ask":
            arguments += ["--max-tokens", "4"]
        return CliRunner().invoke(cli, arguments, input=stdin, catch_exceptions=False, **more)

    return call


def reused(result: Result) -> tuple[int, int]:
    found = re.search(r"reused ([\d,]+) of ([\d,]+) tokens", result.stderr)
    if not found:
        return 0, 0
    return int(found[1].replace(",", "")), int(found[2].replace(",", ""))


def listing(place: Path) -> list[tuple[str, int]]:
    """Every file of the cache directory but what is remembered of the model."""
    files = (path for path in place.parent.rglob("*") if path.is_file())
    return sorted(
        (str(path), path.stat().st_size) for path in files if path.parent.name in ("pages", "notes")
    )


def test_the_second_question_reads_the_question_alone(run: Run, book: Path, place: Path) -> None:
    first = run("ask", book, "What is it?")
    assert reused(first) == (0, 0) and "10.0 GiB at most" in first.stderr
    second = run("ask", book, "Who was it?")
    taken, total = reused(second)
    assert 2000 < total - 40 < taken < total
    assert "at most" not in second.stderr
    assert run("ask", book, "Who was it?", "--no-cache").stdout == second.stdout
    answer = json.loads(run("ask", book, "Who was it?", "--json").stdout)
    assert answer["usage"]["reused_tokens"] == taken


def test_an_appended_text_reads_what_is_new(run: Run, book: Path) -> None:
    run("ingest", book)
    with book.open("a") as file:
        file.write("One more line of the log.\n" * 3)
    taken, total = reused(run("ask", book, "What is it?"))
    assert 0 < total - taken < 2 * 512
    book.write_text("A new beginning. " + book.read_text())
    assert reused(run("ask", book, "What is it?")) == (0, 0)


def test_ingest_reads_for_later(run: Run, book: Path) -> None:
    assert "newly kept" in run("ingest", book).stderr
    assert ", 0 B newly kept" in run("ingest", book).stderr
    assert reused(run("ask", book, "What is it?"))[0] > 2000
    assert reused(run("ask", book, "What is it?", "--system", "Be brief.")) == (0, 0)


def test_recall_is_ingested_and_found(run: Run, book: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the model's own attention: no encoder is needed."""
    find = ("--find", "attention")
    run("ingest", book, *find, method="recall")
    done = run("ask", book, "What is it?", *find, method="recall")
    taken, total = reused(done)
    assert taken == total > 2000
    fresh = run("ask", book, "What is it?", *find, "--no-cache", method="recall")
    assert (fresh.stdout, reused(fresh)) == (done.stdout, (0, 0))
    sources = [re.search(r"book.txt:[\d-]+", result.stderr) for result in (done, fresh)]
    assert sources[0] and sources[1] and sources[0][0] == sources[1][0]


def test_no_cache_writes_nothing(run: Run, book: Path, place: Path) -> None:
    run("ask", book, "What is it?", "--no-cache")
    assert listing(place) == []
    run("ask", book, "What is it?")
    before = listing(place)
    assert before
    assert reused(run("ask", book, "Who was it?", "--no-cache")) == (0, 0)
    assert listing(place) == before


def test_standard_input_and_short_texts_are_kept_on_request(
    run: Run, book: Path, place: Path, tmp_path: Path
) -> None:
    note = tmp_path / "note.txt"
    note.write_text(book.read_text()[:3000])
    for words, stdin in ((("-", "What is it?"), book.read_text()), ((note, "What is it?"), None)):
        run("ask", *words, stdin=stdin)
        assert listing(place) == []
        run("ask", *words, "--cache", stdin=stdin)
        assert reused(run("ask", *words, "--cache", stdin=stdin))[0] > 500
        run("cache", "rm", "--all")
        assert listing(place) == []


@contextmanager
def full_disk(bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_ingest_that_kept_nothing_has_failed(run: Run, book: Path) -> None:
    run("ingest", book)
    book.write_text(book.read_text() + "More. " * 600)
    with full_disk(5_000), pytest.raises(StorageError, match="not all of what was read is kept: "):
        run("ingest", book)
    assert run("ingest", book).exit_code == 0


@pytest.mark.parametrize("method", ["sink", "cca"])
def test_a_full_disk_leaves_what_was_there_and_the_answer_comes(
    run: Run, book: Path, place: Path, method: str
) -> None:
    more = ("--overflow", "force")
    run("ask", book, "What is it?", *more, method=method)
    before = {path: path.read_bytes() for path in place.iterdir()}
    book.write_text(book.read_text() + "More. " * 600)
    expected = run("ask", book, "What is it?", *more, "--no-cache", method=method)
    with full_disk(5_000):
        done = run("ask", book, "What is it?", *more, method=method)
    assert done.exit_code == 0 and done.stdout == expected.stdout
    assert done.stderr.count("what was read is not kept") == 1
    after = {path: path.read_bytes() for path in place.iterdir()}
    assert after.items() <= before.items() and not list(place.glob(".tmp-*"))
    assert reused(run("ask", book, "What is it?", *more, method=method))[0] > 1000


def test_a_damaged_page_is_made_anew(run: Run, book: Path, place: Path) -> None:
    expected = run("ask", book, "What is it?").stdout
    for path in place.iterdir():
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    done = run("ask", book, "What is it?")
    assert (done.stdout, reused(done)) == (expected, (0, 0))
    assert reused(run("ask", book, "What is it?"))[0] > 2000


@pytest.mark.slow
@pytest.mark.parametrize("method", [("recall", "--find", "attention"), ("sink", "--window", "64")], ids=str)
def test_killed_at_any_moment_of_reading_and_answering(
    tiny_model: Callable[..., Path], tmp_path: Path, place: Path, method: tuple[str, ...]
) -> None:
    """Twenty times: no page is damaged, and the next run says what one without a cache does."""
    book = tmp_path / "long.txt"
    book.write_text(prose(80_000, random.Random(4)), encoding="utf-8")
    command = [sys.executable, "-m", "longchat_cli", "ask", str(book), "What is it?", "--json", "--no-log"]
    command += ["--model", str(tiny_model()), "--max-tokens", "16", "--method", *method]

    def answer(*more: str) -> dict[str, Any]:
        done = subprocess.run([*command, *more], capture_output=True, text=True, check=True)
        row = json.loads(done.stdout)
        return {key: row[key] for key in ("answer", "passages", "citations", "rested")}

    begun = time.perf_counter()
    fresh = answer("--no-cache")
    seconds = time.perf_counter() - begun
    for _ in range(20):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(random.uniform(0.3, 1.1) * seconds)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not Store(place).verify()[1]
    assert answer() == fresh
    assert Store(place).entries() and answer() == fresh


def test_damaged_pages_are_listed_as_such(run: Run, book: Path, place: Path) -> None:
    run("ingest", book)
    first, second = sorted(place.iterdir())[:2]
    first.write_bytes(b"\xff" * 100)
    second.write_bytes(b"")
    rows = {tuple(row["documents"]): row for row in json.loads(run("cache", "ls", "--json").stdout)}
    assert rows[()] == rows[()] | {"model": "", "method": "damaged", "pages": 2, "bytes": 100}
    assert rows[(str(book),)]["method"] == "sink"
    assert "damaged: `longchat cache verify` deletes them" in run("cache", "ls").stdout


def test_names_in_the_cache_are_made_safe(run: Run, book: Path) -> None:
    evil = book.rename(book.with_name("e\x1b[31m\n\u202e.txt"))
    run("ingest", evil)
    (shown,) = run("cache", "ls", color=True).stdout.splitlines()  # as on a terminal
    assert shown.endswith(r"e\x1b[31m\n\u202e.txt")
    listed = run("cache", "ls", "--json", color=True).stdout
    assert json.loads(listed)[0]["documents"] == [str(evil)]
    assert not {"\x1b", "\u202e"} & set(listed)


def test_the_cache_command(run: Run, book: Path, place: Path, tmp_path: Path) -> None:
    assert json.loads(run("cache", "ls", "--json").stdout) == []
    other = tmp_path / "other.txt"
    other.write_text(book.read_text()[::-1])
    for path in (book, other):
        run("ingest", path)
    assert run("cache", "path").stdout == f"{place}\n"
    rows = json.loads(run("cache", "ls", "--json").stdout)
    assert [row["documents"] for row in rows] == [[str(other)], [str(book)]]
    assert sum(row["bytes"] for row in rows) == sum(path.stat().st_size for path in place.iterdir())
    shown = run("cache", "ls").stdout.splitlines()
    assert len(shown) == 2 and str(other) in shown[0] and "sink" in shown[0]
    assert "pages are whole" in run("cache", "verify").stderr
    run("cache", "rm", os.path.relpath(other))  # noqa: PTH109
    assert reused(run("ask", book, "What is it?"))[0] > 2000
    assert [row["documents"] for row in json.loads(run("cache", "ls", "--json").stdout)] == [[str(book)]]
    first = next(place.iterdir())
    first.write_bytes(first.read_bytes()[:-1])
    with pytest.raises(BadInput, match="1 damaged"):
        run("cache", "verify")
    run("cache", "prune", "--cache-size", "0")
    assert listing(place) == []
    with pytest.raises(MissingInput):
        run("cache", "rm", str(book))
    with pytest.raises(UsageError):
        run("cache", "rm")


def test_pages_of_chats_are_deleted_by_their_names(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONGCHAT_DATA_DIR", str(tmp_path / "data"))
    for name in (known_as(3), known_as(4), OPENING):
        Store(about={"documents": [name], "model": "tiny", "method": "sink"}).put(
            digest(name), state.writer({"x": torch.zeros(4)})
        )
    assert OPENING in run("cache", "ls").stdout
    run("cache", "rm", "chat 3")
    assert {row["documents"][0] for row in json.loads(run("cache", "ls", "--json").stdout)} == {
        "chat 4",
        OPENING,
    }
    run("sessions", "rm", "--all")
    assert OPENING not in run("cache", "ls").stdout


def test_a_small_cache_keeps_the_beginning(run: Run, book: Path, place: Path) -> None:
    run("ingest", book, "--overflow", "force", method="full")
    size = sum(path.stat().st_size for path in place.iterdir())
    run("cache", "rm", "--all")
    done = run("ingest", book, "--overflow", "force", "--cache-size", size // 2, method="full")
    assert "only a part" in done.stderr
    taken, total = reused(run("ask", book, "What is it?", "--overflow", "force", method="full"))
    assert total // 4 < taken < total


def test_interrupted_reading_is_gone_on_with(
    run: Run, book: Path, place: Path, monkeypatch: pytest.MonkeyPatch, tiny_model: Callable[..., Path]
) -> None:
    calls = 0
    prefill = local.LocalEngine.prefill

    def interrupted(self: Any, *arguments: Any, **named: Any) -> int:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt
        return prefill(self, *arguments, **named)

    monkeypatch.setattr(local.LocalEngine, "prefill", interrupted)
    words = ["ask", str(book), "What?", "--method", "sink", "--window", "64", "--max-tokens", "2"]
    assert main([*words, "--model", str(tiny_model())]) == 130
    monkeypatch.undo()
    monkeypatch.setenv("LONGCHAT_CACHE_DIR", str(place.parent))
    monkeypatch.setattr(local, "PAGE", 512)
    monkeypatch.setattr(local, "FAST_CHUNK", 512)
    assert reused(run("ask", book, "What is it?"))[0] == 3 * 512


def test_what_verify_cannot_delete_it_names(run: Run, place: Path) -> None:
    (place / "page.safetensors").mkdir(parents=True)
    with pytest.raises(BadInput, match=r"page\.safetensors is damaged: it cannot be deleted"):
        run("cache", "verify")
