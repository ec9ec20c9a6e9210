"""The log: what is kept, found and deleted, who may read it, and that it never costs an answer."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from conftest import write_tiny_tokenizer
from fakes import Opener, install
from hypothesis import given
from hypothesis import strategies as st

from longchat_cli import logs
from longchat_cli.cli import cli
from longchat_cli.database import failures
from longchat_cli.errors import BadInput, MissingInput, StorageError
from longchat_cli.logs import Entry, Log, Recorder
from longchat_cli.terminal import Console
from longchat_cli.tokens import Tokenizer

ENTRY = Entry("ask", "model", "full", "Who is the captain?", "Äneas Ahab of the Pequod", "eos", ("moby.txt",))


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path / "data" / "logs.db")


def test_entries_come_back_as_they_went_in(log: Log) -> None:
    assert log.last(5) == []
    assert log.search(["x"], 5) == []
    assert not log.path.exists()
    odd = Entry("chat", "m", "sink", "a\0b\x1b[31m 🐳", "", "cancelled")
    assert [log.add(ENTRY), log.add(odd)] == [1, 2]
    first, second = log.last(5)
    assert (first, second) == (
        Entry(**{**vars(ENTRY), "id": 1}),
        Entry(**{**vars(odd), "id": 2}),
    )
    assert log.last(1) == [second]
    assert log.get(1) == first
    with pytest.raises(MissingInput):
        log.get(3)


def test_search_by_words_and_beginnings(log: Log) -> None:
    log.add(ENTRY)
    log.add(Entry("ask", "m", "full", "What of whales?", "White", "eos"))
    for words in (["ahab"], ["pequod captain"], ["CAPT", "of"], ["aneas"], ["äne"]):
        assert [entry.id for entry in log.search(words, 5)] == [1], words
    assert [entry.id for entry in log.search(["of"], 5)] == [1, 2]
    assert log.search(["ahab", "white"], 5) == []
    for words in (['"'], ["OR"], ["NOT of"], ["a*b"], ["(", "-"], ["question:of"], [""], ["\0"]):
        log.search(words, 5)


@given(st.text(max_size=20))
def test_any_words_can_be_searched(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    log = Log(tmp_path_factory.getbasetemp() / "search.db")
    if not log.path.exists():
        log.add(ENTRY)
    log.search([text], 3)


def test_what_is_removed_leaves_the_file(log: Log) -> None:
    for number in range(50):
        log.add(Entry("ask", "m", "full", f"secretword{number}", "x" * 3000, "eos"))
    assert b"secretword7" in log.path.read_bytes()
    log.remove([8])
    assert b"secretword7" not in log.path.read_bytes()
    assert log.search(["secretword7"], 5) == []
    assert len(log.last(100)) == 49
    log.add(ENTRY)
    assert log.last(1)[0].id == 51, "ids are not given twice"
    with pytest.raises(MissingInput):
        log.remove([1, 8])
    assert log.get(1)
    log.clear()
    log.clear()
    assert log.last(5) == []


def test_only_its_owner_reads_it(log: Log) -> None:
    umask = os.umask(0)
    try:
        log.add(ENTRY)
    finally:
        os.umask(umask)
    assert stat.S_IMODE(log.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(log.path.parent.stat().st_mode) == 0o700


def test_many_write_at_once(log: Log) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom longchat_cli.logs import Entry, Log\n"
        "for number in range(20):\n"
        "    Log(Path(sys.argv[1])).add(Entry('ask', 'm', 'full', sys.argv[2], str(number), 'eos'))\n"
    )
    command = [sys.executable, "-c", code, str(log.path)]
    running = [subprocess.Popen([*command, name]) for name in "abc"]
    assert [process.wait(100) for process in running] == [0, 0, 0]
    assert len(log.last(100)) == 60
    assert len(log.search(["b"], 100)) == 20


def test_damaged_locked_and_newer_files(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    log.add(ENTRY)
    with sqlite3.connect(log.path) as database:
        monkeypatch.setattr(logs, "PATIENCE", 0.01)
        database.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StorageError, match="locked"):
            log.last(1)
        database.execute("PRAGMA user_version = 99")
        database.commit()
    with pytest.raises(BadInput, match="newer longchat"):
        log.add(ENTRY)
    log.path.write_bytes(b"no database at all, but long enough to be one" * 100)
    with pytest.raises(BadInput, match="rm --all"):
        log.last(1)


def test_a_failure_costs_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LONGCHAT_DATA_DIR", str(tmp_path))
    (tmp_path / "logs.db").write_bytes(b"x" * 5000)
    record = Recorder(False, Console())
    record(ENTRY)
    record(ENTRY)
    (line,) = capsys.readouterr().err.splitlines()
    assert "damaged" in line
    assert "not logged" in line


def test_a_place_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "logs.db").symlink_to(tmp_path / "none" / "logs.db")
    for place in ("file", "link"):
        monkeypatch.setenv("LONGCHAT_DATA_DIR", str(tmp_path / place))
        Recorder(False, Console())(ENTRY)
        (line,) = capsys.readouterr().err.splitlines()
        assert line.endswith("the answer is not logged")


def test_a_python_without_sqlite_answers_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LONGCHAT_DATA_DIR", str(tmp_path))
    monkeypatch.setitem(sys.modules, "sqlite3", None)
    Recorder(False, Console())(ENTRY)
    assert "no sqlite3; the answer is not logged" in capsys.readouterr().err


Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The commands over a fake model, with directories of their own."""
    for name in ("DATA", "CONFIG"):
        monkeypatch.setenv(f"LONGCHAT_{name}_DIR", str(tmp_path / name.lower()))
    monkeypatch.delenv("LONGCHAT_NO_LOG")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "note.txt").write_text("The mill has seven sails.\n")
    write_tiny_tokenizer(tmp_path)
    install(Opener(Tokenizer.from_dir(tmp_path), window=512), monkeypatch.setattr)
    return lambda *words, **more: CliRunner().invoke(cli, words, catch_exceptions=False, **more)


def test_ask_and_chat_are_logged_unless_told_not_to(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    done = run("ask", "note.txt", "-q", "one?", "-q", "two?")
    assert "answers are logged in" in done.stderr
    assert "answers are logged in" not in run("ask", "note.txt", "three?").stderr
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"four\nfive\n")))
    assert "You said: four" in run("chat", input="four\nfive\n").stdout
    run("ask", "note.txt", "six?", "--no-log")
    monkeypatch.setenv("LONGCHAT_NO_LOG", "1")
    run("ask", "note.txt", "seven?")
    monkeypatch.delenv("LONGCHAT_NO_LOG")
    found = json.loads(run("logs", "list", "--json").stdout)
    assert [entry["question"] for entry in found] == ["one?", "two?", "three?", "four", "five"]
    assert [entry["command"] for entry in found] == ["ask", "ask", "ask", "chat", "chat"]
    assert (found[0]["answer"], found[0]["documents"]) == ("You said: one?", ["note.txt"])
    assert found[4]["answer"] == "You said: five"


def test_off_and_on(run: Run, tmp_path: Path) -> None:
    run("logs", "off")
    run("ask", "note.txt", "one?")
    assert not (tmp_path / "data" / "logs.db").exists()
    assert run("config", "get", "ask.no-log").stdout == "true\n"
    run("logs", "on")
    run("ask", "note.txt", "two?")
    assert [entry.question for entry in Log(tmp_path / "data" / "logs.db").last(5)] == ["two?"]


def test_looking_things_up(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "data" / "logs.db"
    assert run("logs", "path").stdout == f"{path}\n"
    assert run("logs", "list").stdout == run("logs", "show").stdout == ""
    run("ask", "note.txt", "how many\x1b[2J sails?")
    Log(path).add(Entry("chat", "m", "sink", "long " * 100, "a\x1b]0;title\x07b", "eos"))
    listed = run("logs", "list").stdout.splitlines()
    assert "how many sails?" in listed[0]
    assert listed[1].endswith("...")
    shown = run("logs", "show").stdout
    assert "\x1b" not in shown
    assert shown.endswith("\n\nab\n")
    assert "> how many sails?\n\nYou said: how many" in run("logs", "show", "1").stdout
    assert len(run("logs", "search", "sail").stdout.splitlines()) == 1
    nothing = run("logs", "search", "nobodysaidthis")
    assert (nothing.stdout, nothing.stderr) == ("", "no entry has all of these words\n")
    assert run("logs", "rm", "1").exit_code == 0
    assert len(run("logs", "list").stdout.splitlines()) == 1
    run("logs", "rm", "--all")
    assert not path.exists()


def test_a_log_that_must_not_be_written_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "logs.db"
    Log(path).add(ENTRY)
    with (
        contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database,
        pytest.raises(StorageError, match="cannot be written: .* read-only; make it writable"),
        failures(path, "the log", ""),
    ):
        database.execute("DELETE FROM answers")
