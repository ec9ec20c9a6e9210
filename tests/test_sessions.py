"""Kept chats: what is written, found, deleted and exchanged, who may write, and that nothing costs a chat."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import sqlite3
import stat
import subprocess
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from conftest import write_tiny_tokenizer
from fakes import FakeEngine, Opener, install
from hypothesis import given
from hypothesis import strategies as st

from longchat_cli import sessions as module
from longchat_cli.chat import Conversation
from longchat_cli.cli import cli
from longchat_cli.documents import Document
from longchat_cli.errors import BadInput, CannotCreate, MissingInput, StorageError, UsageError
from longchat_cli.exchange import as_json, as_markdown, from_json
from longchat_cli.sampling import Sampling
from longchat_cli.sessions import About, Chat, InUse, Session, Sessions, Turn
from longchat_cli.terminal import Console
from longchat_cli.tokens import Tokenizer

ABOUT = About("model", "f" * 64, "sink", {"window": 60, "sinks": 4}, "Be brief.")
NOTE = Document("note.txt", "File: note.txt\n\nThe mill has seven sails.\n", header=16)
SAMPLING = Sampling(max_tokens=64)


def chat(*texts: str) -> Chat:
    """A chat of these texts in turn, with made up ids."""
    turns: list[Turn] = []
    for number, text in enumerate(texts):
        ids, start = array("I", range(number, number + 5)), turns[-1].end if turns else 3
        role = ("user", "assistant")[number % 2]
        turns.append(Turn(role, text, "eos" if number % 2 else None, ids, start))
    return Chat(ABOUT, [1, 2, 3], [NOTE], turns)


def same(one: Chat, other: Chat) -> bool:
    """But for what a chat gets when it is kept."""
    return (
        (one.about.model, one.about.fingerprint, one.about.method, one.about.options, one.about.system)
        == (
            other.about.model,
            other.about.fingerprint,
            other.about.method,
            other.about.options,
            other.about.system,
        )
        and list(one.opening) == list(other.opening)
        and list(one.documents) == list(other.documents)
        and list(one.turns) == list(other.turns)
    )


@pytest.fixture
def sessions(tmp_path: Path) -> Sessions:
    return Sessions(tmp_path / "data" / "sessions.db")


@pytest.fixture
def session(sessions: Sessions) -> Session:
    return Session(sessions, Console())


def test_a_chat_comes_back_as_it_went_in(sessions: Sessions, session: Session) -> None:
    assert sessions.ls() == []
    assert not sessions.path.exists()
    odd = chat("a\0b\x1b[31m 🐳", "", "where is the mill?" * 30, "there")
    odd.turns[2].documents, odd.turns[3].thoughts, odd.turns[0].pinned = (NOTE, NOTE), "hm", True
    assert session.save(odd, 0)
    assert session.id == 1
    back = sessions.load(1)
    assert same(back, odd)
    assert [turn.start for turn in back.turns] == [3, 8, 13, 18]
    assert back.about.title == "a\0b\x1b[31m 🐳"
    assert (back.about.exchanges, back.about.id) == (2, 1)
    for name in ("2", "99999999999999999999"):
        with pytest.raises(MissingInput):
            sessions.find(name)
    for name in ("x", "-1", "", "١"):
        with pytest.raises(UsageError):
            sessions.find(name)
    assert sessions.find("last") == sessions.find("1") == 1


def test_only_what_changed_is_written(sessions: Sessions, session: Session) -> None:
    first = chat("one", "two", "three", "four")
    session.save(first, 0)
    changed = chat("one", "two", "3", "4", "5", "6")
    changed.turns[0].text = "not to be written"
    session.save(changed, 2)
    assert [turn.text for turn in sessions.load(1).turns] == ["one", "two", "3", "4", "5", "6"]
    session.save(chat("one", "two"), 2)
    assert [turn.text for turn in sessions.load(1).turns] == ["one", "two"]
    assert sessions.search(["five"], 9) == []
    other = Chat(About("other", "0" * 64, "full", {}, None), [7, 8, 9], [], first.turns)
    session.save(other, 4)
    assert same(sessions.load(1), Chat(other.about, [7, 8, 9], [NOTE], first.turns)), "documents stay"


def test_an_answer_is_written_while_it_streams(
    sessions: Sessions, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    growing = chat("question", "")
    session.save(growing, 0)
    now = [time.monotonic()]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    for word in ("the ", "river ", "is ", "wide"):
        growing.turns[1].text += word
        session.stream(lambda: growing)
        now[0] += 0.3
    assert sessions.load(1).turns[1].text == "the river is ", "at most every half second"
    assert [hit.number for hit in sessions.search(["river"], 5)] == [1]


def test_search_by_words_and_beginnings(sessions: Sessions) -> None:
    sessions.add(chat("Who is the captain?", "Äneas Ahab of the Pequod"))
    sessions.add(chat("And now?", "White whales", "of what", "nothing"))
    for words in (["ahab"], ["pequod of"], ["PEQ", "the"], ["aneas"], ["äne"]):
        (hit,) = sessions.search(words, 5)
        assert (hit.session, hit.number, hit.role, hit.title) == (1, 1, "assistant", "Who is the captain?")
    assert {(hit.session, hit.number) for hit in sessions.search(["of"], 5)} == {(1, 1), (2, 2)}
    assert sessions.search(["captain", "white"], 5) == []


@given(st.text(max_size=20))
def test_any_words_can_be_searched(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    found = Sessions(tmp_path_factory.getbasetemp() / "searched.db")
    if not found.path.exists():
        found.add(chat("a", "b"))
    found.search([text], 3)


def test_what_is_removed_leaves_the_files(sessions: Sessions, session: Session) -> None:
    for number in range(30):
        sessions.add(chat(f"secretword{number}", "x" * 3000))
    sessions.remove([8])
    held = b"".join(path.read_bytes() for path in sessions.path.parent.iterdir())
    assert b"secretword8" in held
    assert b"secretword7" not in held
    assert sessions.search(["secretword7"], 5) == []
    assert len(sessions.ls()) == 29
    session.save(chat("new", "one"), 0)
    assert session.id == 31, "numbers are not given twice"
    with pytest.raises(InUse):
        sessions.remove([1, 31])
    with pytest.raises(MissingInput):
        sessions.remove([1, 8])
    assert sessions.about(1)


def test_only_its_owner_reads_it(sessions: Sessions, session: Session) -> None:
    umask = os.umask(0)
    try:
        session.save(chat("a", "b"), 0)
        files = list(sessions.path.parent.iterdir())
    finally:
        os.umask(umask)
    assert {path.suffix for path in files} == {".db", ".db-wal", ".db-shm", ".lock"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o600}
    assert stat.S_IMODE(sessions.path.parent.stat().st_mode) == 0o700


HOLD = """
import sys
from pathlib import Path
from longchat_cli.sessions import Session, Sessions
from longchat_cli.terminal import Console
sessions = Sessions(Path(sys.argv[1]))
session = Session(sessions, Console(), sessions.load(1))
print("held", flush=True)
sys.stdin.read()
"""


def test_one_process_writes_a_chat(sessions: Sessions) -> None:
    kept = sessions.load(sessions.add(chat("a", "b")))
    command = [sys.executable, "-c", HOLD, str(sessions.path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with pytest.raises(InUse, match=f"process {other.pid} has it"):
            Session(sessions, Console(), kept)
        assert same(sessions.load(1), kept), "reading is free"
        other.kill()
    session = Session(sessions, Console(), kept)
    with pytest.raises(InUse):
        Session(sessions, Console(), kept)
    session.close()
    Session(sessions, Console(), kept).close()


def test_many_write_at_once(sessions: Sessions) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nsys.path.insert(0, sys.argv[2])\n"
        "from test_sessions import chat\nfrom longchat_cli.sessions import Session, Sessions\n"
        "from longchat_cli.terminal import Console\n"
        "session = Session(Sessions(Path(sys.argv[1])), Console())\n"
        "said = []\n"
        "for number in range(20):\n"
        "    said += [sys.argv[3], str(number)]\n"
        "    assert session.save(chat(*said), len(said) - 2)\n"
    )
    command = [sys.executable, "-c", code, str(sessions.path), str(Path(__file__).parent)]
    running = [subprocess.Popen([*command, name]) for name in "abc"]
    assert [process.wait(100) for process in running] == [0, 0, 0]
    assert [about.exchanges for about in sessions.ls()] == [20, 20, 20]
    assert len(sessions.search(["b"], 100)) == 20


def test_damaged_locked_and_newer_files(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sessions.add(chat("a", "b"))
    half = sessions.path.read_bytes()[:2000]
    monkeypatch.setattr(module, "PATIENCE", 0.01)
    with contextlib.closing(sqlite3.connect(sessions.path)) as database:
        database.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StorageError, match="locked"):
            sessions.add(chat("a", "b"))
        database.execute("PRAGMA user_version = 99")
        database.commit()
    with pytest.raises(BadInput, match="newer longchat"):
        sessions.ls()
    for content in (b"no database at all, but long enough to be one" * 100, half):
        sessions.path.write_bytes(content)
        with pytest.raises(BadInput, match="move it away"):
            sessions.ls()
        session = Session(sessions, Console())
        capsys.readouterr()
        assert not session.save(chat("a", "b"), 0)
        assert not session.save(chat("a", "b", "c", "d"), 2)
        (line,) = capsys.readouterr().err.splitlines()
        assert line.endswith("the chat goes on and is not kept")
        assert sessions.path.read_bytes() == content, "nothing is overwritten"


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE sessions SET options = '{'",
        "UPDATE sessions SET opening = x'010203'",
        "UPDATE turns SET ids = x'0102' WHERE number = 1",
        "UPDATE turns SET ids = 7 WHERE number = 1",
        "DELETE FROM turns WHERE number = 1",
    ],
)
def test_values_that_nobody_wrote(sessions: Sessions, change: str) -> None:
    sessions.add(chat("a", "b"))
    with contextlib.closing(sqlite3.connect(sessions.path)) as database, database:
        database.execute(change)
    with pytest.raises(BadInput, match="is damaged"):
        sessions.load(1)


def test_what_could_not_be_kept_is_kept_later(
    sessions: Sessions, session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    said = chat("a", "b", "c", "d", "e", "f")
    session.save(Chat(ABOUT, [1, 2, 3], [NOTE], said.turns[:2]), 0)
    with sqlite3.connect(sessions.path) as database:
        database.execute("CREATE TRIGGER full BEFORE INSERT ON turns BEGIN SELECT raise(FAIL, 'full'); END")
    assert not session.save(Chat(ABOUT, [1, 2, 3], [NOTE], said.turns[:4]), 2)
    session.stream(lambda: Chat(ABOUT, [1, 2, 3], [NOTE], said.turns[:4]))
    with sqlite3.connect(sessions.path) as database:
        database.execute("DROP TRIGGER full")
    assert session.save(said, 4)
    assert same(sessions.load(1), said)
    assert "kept again" in capsys.readouterr().err
    shutil.move(sessions.path.parent, sessions.path.parent.with_name("away"))
    session._disconnect()
    assert session.save(said, 6), "as after a damaged file was moved away"
    assert same(sessions.load(session.id or 0), said)


def test_a_full_disk(sessions: Sessions) -> None:
    """A limit on the size of files fails writes as a full disk does."""
    sessions.add(chat("a", "b"))
    code = (
        "import resource, signal, sys\nfrom pathlib import Path\nsys.path.insert(0, sys.argv[2])\n"
        "from test_sessions import chat\nfrom longchat_cli.sessions import Session, Sessions\n"
        "from longchat_cli.terminal import Console\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "session = Session(Sessions(Path(sys.argv[1])), Console())\n"
        "assert session.save(chat('c', 'd'), 0)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, resource.RLIM_INFINITY))\n"
        "long = chat('c', 'd', 'e', 'word ' * 100_000)\n"
        "assert not session.save(long, 2)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))\n"
        "assert session.save(long, 4)\n"
    )
    command = [sys.executable, "-c", code, str(sessions.path), str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert "the chat goes on and is not kept" in done.stderr
    assert len(sessions.load(2).turns[3].text) == 500_000


def test_a_full_disk_is_read(sessions: Sessions) -> None:
    """Nothing can grow, not even what processes share."""
    sessions.add(chat("a", "b"))
    code = (
        "import resource, signal, sys\nfrom pathlib import Path\nfrom longchat_cli.sessions import Sessions\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))\n"
        "sys.exit(Sessions(Path(sys.argv[1])).load(1).turns[1].text != 'b')\n"
    )
    subprocess.run([sys.executable, "-c", code, str(sessions.path)], check=True, timeout=100)


def test_what_is_no_place_of_chats_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    for place in (tmp_path / "file" / "sessions.db", tmp_path / "loop"):
        with pytest.raises(StorageError):
            Sessions(place).ls()


def test_a_place_that_cannot_be_used_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "sessions.db").mkdir()
    with pytest.raises(StorageError, match="it is a directory; move it away"):
        Sessions(tmp_path / "sessions.db").ls()
    (tmp_path / "file").touch()
    with pytest.raises(CannotCreate, match="make its place writable, or name others"):
        Sessions(tmp_path / "file" / "chats" / "sessions.db").add(chat("a", "b"))


def test_a_chat_in_which_nothing_is_said_is_not_listed(sessions: Sessions, session: Session) -> None:
    first = sessions.add(chat("a", "b"))
    session.save(chat("c", "d"), 0)
    session.save(chat(), 0)  # the only turn was stopped while it was read
    assert [about.id for about in sessions.ls()] == [first] == [sessions.find("last")]
    assert [about.id for about in sessions.ls(empty=True)] == [session.id, first]


def test_places_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "sessions.db").symlink_to(tmp_path / "none" / "sessions.db")
    for place in ("file", "link"):
        session = Session(Sessions(tmp_path / place / "sessions.db"), Console())
        assert not session.save(chat("a", "b"), 0)
        (line,) = capsys.readouterr().err.splitlines()
        assert line.endswith("the chat goes on and is not kept")


def test_a_python_without_sqlite_talks_all_the_same(
    session: Session, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sqlite3", None)
    assert not session.save(chat("a", "b"), 0)
    assert "no sqlite3; the chat goes on" in capsys.readouterr().err


def test_export_and_import_are_one_another(sessions: Sessions) -> None:
    said = chat("one\x1b[2J", "two\x9b2J", "three", "four")
    said.turns[2].documents, said.turns[1].thoughts, said.turns[1].pinned = (NOTE,), "well", True
    kept = sessions.load(sessions.add(said))
    value = as_json(kept)
    again = from_json(json.dumps(value).encode(), "file")
    back = as_json(sessions.load(sessions.add(again)))
    assert {**back, "options": value["options"]} == value
    assert not again.about.fingerprint
    assert not any(turn.ids for turn in again.turns), "ids are not taken from a file"
    text = as_markdown(kept)
    assert "\x1b" not in text and "\x9b" not in text
    for part in ("# one", "> Be brief.", "* note.txt", "## You\n\none", "> well"):
        assert part in text


GOOD = {
    "format": "longchat chat",
    "version": 1,
    "turns": [{"role": "user", "text": "a"}, {"role": "assistant", "text": "b"}],
}


@pytest.mark.parametrize(
    "change",
    [
        {"format": "other"},
        {"version": 2},
        {"turns": "a"},
        {"turns": [1]},
        {"turns": GOOD["turns"][:1]},
        {"turns": GOOD["turns"][::-1]},
        {"turns": [*GOOD["turns"], {"role": "system", "text": "x"}, {"role": "assistant", "text": "x"}]},
        {"turns": [{"role": "user", "text": 1}, GOOD["turns"][1]]},
        {"turns": [{"role": "user", "text": "\ud800"}, GOOD["turns"][1]]},
        {"turns": [{"role": "user", "text": "a", "stop": ["eos"]}, GOOD["turns"][1]]},
        {"turns": [{"role": "user", "text": "a", "time": "9999-12-31T23:59:59-23:00"}, GOOD["turns"][1]]},
        {"turns": [{"role": "user", "text": "a", "time": "soon"}, GOOD["turns"][1]]},
        {"documents": [{"name": "x", "text": "y", "header": 5}]},
        {"documents": [{"name": "x", "text": "y", "header": "0"}]},
        {"documents": {"name": "x"}},
        {"system": 5},
        {"title": None},
    ],
    ids=str,
)
def test_hostile_files_are_refused(change: dict[str, Any]) -> None:
    assert len(from_json(json.dumps(GOOD).encode(), "x").turns) == 2
    with pytest.raises(BadInput, match="no chat that can be imported"):
        from_json(json.dumps({**GOOD, **change}).encode(), "x\x1b[2J")


@pytest.mark.parametrize(
    "data", [b"", b"\xff\xfe", b"[" * 100_000, b'{"a": ' * 100_000, b"1" * 5000, b"null"]
)
def test_what_is_no_json_is_refused(data: bytes) -> None:
    with pytest.raises(BadInput):
        from_json(data, "x")


def test_an_imported_file_decides_no_more_than_what_was_said() -> None:
    value = {
        **GOOD,
        "model": "evil/model",
        "method": "nothing",
        "options": {"sinks": 2**31 - 1},
        "updated": "9999-01-01T00:00:00+00:00",
        "opening": [1, 2],
        "id": 5,
    }
    value["turns"] = [{**turn, "ids": [0, 1]} for turn in GOOD["turns"]]
    found = from_json(json.dumps(value).encode(), "x")
    assert (found.about.fingerprint, found.about.method, found.about.options) == ("", "sink", {})
    assert found.about.updated <= module.now()
    assert not found.opening and not any(turn.ids for turn in found.turns)


# Conversations, over an engine without a model.


@pytest.fixture
def talk(tokenizer: Tokenizer, session: Session) -> Conversation:
    conversation = Conversation(FakeEngine(tokenizer), "Be brief.", session=session)
    conversation.begin()
    return conversation


def say(conversation: Conversation, text: str, cancel: Callable[[], bool] | None = None) -> None:
    for _ in conversation.send(text, SAMPLING, cancel=cancel):
        pass


def kept(conversation: Conversation) -> bool:
    """Whether what is on disk is the conversation."""
    session = conversation.session
    assert session is not None and session.id is not None
    return same(session.sessions.load(session.id), conversation.chat())


def after(calls: int) -> Callable[[], bool]:
    left = iter(range(calls))
    return lambda: next(left, None) is None


def test_the_file_follows_every_verb(talk: Conversation, sessions: Sessions) -> None:
    assert talk.session and talk.session.id is None
    assert not sessions.path.exists(), "nothing was said yet"
    for text in ("one", "two", "three", "four"):
        say(talk, text)
        assert kept(talk)
    say(talk, "a long story", after(5))
    assert talk.turns[-1].stop == "cancelled"
    assert kept(talk)
    talk.undo()
    assert len(talk.turns) == 8 and kept(talk)
    say(talk, "long " * 40, after(1))
    assert len(talk.turns) == 8 and kept(talk), "cancelled while it was read"
    talk.pin(2)
    assert kept(talk) and sessions.load(1).turns[3].pinned
    list(talk.edit(3, "long " * 40, SAMPLING, cancel=after(1)))
    assert len(talk.turns) == 8 and kept(talk)
    list(talk.edit(3, "3", SAMPLING))
    assert len(talk.turns) == 6 and kept(talk)
    talk.add([NOTE])
    list(talk.retry(SAMPLING))
    say(talk, "with a file")
    assert kept(talk) and sessions.load(1).turns[-2].documents == (NOTE,)
    talk.rebuild(system="Be kind.")
    assert kept(talk)
    while talk.undo():
        assert kept(talk)
    say(talk, "again")
    assert kept(talk)
    assert sessions.about(1).title == "one"


def test_failures_while_reading_leave_the_file_as_it_was(talk: Conversation) -> None:
    say(talk, "one")
    engine = talk.engine
    assert isinstance(engine, FakeEngine)
    engine.failure = MemoryError()
    with pytest.raises(MemoryError):
        say(talk, "two")
    assert len(talk.turns) == 2 and kept(talk)


def test_what_is_asked_is_on_disk_before_it_is_read(talk: Conversation, sessions: Sessions) -> None:
    found: list[list[str]] = []
    engine = talk.engine
    assert isinstance(engine, FakeEngine)
    read = engine.prefill

    def watched(*arguments: Any) -> int:
        if talk.session and talk.session.id:
            found.append([turn.text for turn in sessions.load(talk.session.id).turns])
        return read(*arguments)

    engine.prefill = watched  # type: ignore[method-assign]
    say(talk, "one")
    say(talk, "two")
    assert found == [["one", ""], ["one", "You said: one", "two", ""]]


def test_a_new_chat_and_a_copy(talk: Conversation, sessions: Sessions) -> None:
    for text in ("one", "two"):
        say(talk, text)
    before = sessions.load(1)
    assert talk.branch(1)
    say(talk, "other")
    assert kept(talk)
    assert same(sessions.load(1), before)
    copy = sessions.about(2)
    assert (copy.parent, copy.branched, copy.title) == (1, 1, "one")
    talk.open()
    assert talk.session and talk.session.id is None
    say(talk, "new")
    assert [about.id for about in sessions.ls()][0] == 3
    assert kept(talk) and same(sessions.load(1), before)
    Session(sessions, Console(), before).close()
    with pytest.raises(UsageError):
        talk.branch(5)
    talk.session = None
    with pytest.raises(UsageError, match="--no-save"):
        talk.branch()


def test_going_on(talk: Conversation, sessions: Sessions, tokenizer: Tokenizer) -> None:
    for text in ("one", "two"):
        say(talk, text)
    assert talk.session
    talk.session.close()
    before = sessions.load(1)
    ids = list(talk.engine.ids)  # type: ignore[attr-defined]
    engine = FakeEngine(tokenizer)
    session = Session(sessions, Console(), before)
    again = Conversation(engine, before.about.system, before.documents, session, kept=before)
    assert again.begin()
    assert engine.ids == ids
    say(again, "three")
    assert [turn.text for turn in sessions.load(1).turns[::2]] == ["one", "two", "three"]
    assert kept(again)


def test_going_on_with_another_tokenizer_renders_what_was_said(
    talk: Conversation, sessions: Sessions, tokenizer: Tokenizer
) -> None:
    say(talk, "one")
    say(talk, "two")
    imported = from_json(json.dumps(as_json(sessions.load(1))).encode(), "file")
    held = sessions.load(sessions.add(imported))
    engine = FakeEngine(tokenizer)
    again = Conversation(engine, held.about.system, [], Session(sessions, Console(), held), kept=held)
    assert again.begin()
    assert engine.ids == list(talk.engine.ids)  # type: ignore[attr-defined]
    assert kept(again), "with its ids from now on"


# The commands.

Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer) -> Run:
    """The commands over a fake model, with directories of their own."""
    for name in ("DATA", "CONFIG", "CACHE"):
        monkeypatch.setenv(f"LONGCHAT_{name}_DIR", str(tmp_path / name.lower()))
    monkeypatch.chdir(tmp_path)
    install(Opener(tokenizer, window=512), monkeypatch.setattr)
    return lambda *words, **more: CliRunner().invoke(cli, words, catch_exceptions=False, **more)


def stored() -> Sessions:
    return Sessions()


def test_chats_are_kept_and_go_on(run: Run) -> None:
    done = run("chat", input="one\n\ntwo\n")
    assert done.stdout == "You said: one\nYou said: two\n"
    assert "chats are kept in" in done.stderr
    done = run("chat", "--resume", input="three\n")
    assert done.stdout == "You said: three\n"
    assert "reused 0 of" in done.stderr and "kept in" not in done.stderr
    run("chat", "--resume", "1", "--fork", input="four\n")
    run("chat", "--fork", "--system", "Be kind.", input="five\n")
    run("chat", "--no-save", input="six\n")
    done = run("chat", "--no-save", "--max-tokens", "2", input="six and seven\n")
    assert done.stderr.endswith("the answer was cut at --max-tokens\n")
    with pytest.raises(UsageError, match="--window is 0: in a chat it must be at least 1"):
        run("chat", "--window", "0", input="x\n")
    with pytest.raises(UsageError, match="--window is 0"):
        run("chat", "--resume", "--window", "0", input="x\n")
    assert "warning: with --window 3 the" in run("chat", "--no-save", "--window", "3", input="x\n").stderr
    listed = run("sessions", "ls").stdout.splitlines()
    assert [line.split()[0] for line in listed] == ["3", "2", "1"]
    assert [about.exchanges for about in stored().ls()] == [5, 4, 3]
    assert [about.parent for about in stored().ls()] == [2, 1, None]
    assert [about.system for about in stored().ls()] == ["Be kind.", None, None]
    assert "six" not in run("sessions", "export", "3").stdout
    with pytest.raises(MissingInput):
        run("chat", "--resume", "9", input="x\n")
    with pytest.raises(MissingInput, match="there is no chat 9999"):
        run("chat", "--resume", "9" * 5000, input="x\n")
    with pytest.raises(UsageError):
        run("chat", "--resume", "first", input="x\n")


def test_where_a_chat_cannot_be_kept_it_goes_on_with_no_save(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("chat", input="one\n")
    usual = os.open

    def read_only(path: Any, flags: int, *rest: Any) -> int:
        if str(path).endswith(".lock"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return usual(path, flags, *rest)

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(StorageError) as raised:
        run("chat", "--resume", input="two\n")
    assert str(raised.value).endswith(
        "Read-only file system; make it writable, or go on without keeping what is said: --no-save"
    )
    with pytest.raises(StorageError, match="Read-only file system; make it writable$"):
        run("sessions", "rm", "1")
    assert run("chat", "--resume", "--no-save", input="two\n").stdout == "You said: two\n"


def test_a_read_only_copy_of_nothing(run: Run) -> None:
    with pytest.raises(MissingInput, match="no chat was kept yet"):
        run("chat", "--resume", input="x\n")
    listed = run("sessions", "ls")
    assert (listed.stdout, listed.stderr) == ("", "no chat was kept yet\n")
    assert json.loads(run("sessions", "ls", "--json").stdout) == []


def test_no_save_and_no_cache_write_nothing_of_their_kind(run: Run, tmp_path: Path) -> None:
    run("chat", "--no-save", input="one\n")
    assert not (tmp_path / "data" / "sessions").exists()
    assert not (tmp_path / "cache" / "pages").exists()
    run("chat", "--no-cache", input="one\n")
    assert (tmp_path / "data" / "sessions" / "sessions.db").exists()
    assert not (tmp_path / "cache" / "pages").exists()


def test_chats_as_json(run: Run) -> None:
    lines = [json.loads(line) for line in run("chat", "--json", input="a\nb\x1b[2J\n").stdout.splitlines()]
    assert [(line["session"], line["turn"], line["answer"]) for line in lines] == [
        (1, 1, "You said: a"),
        (1, 2, "You said: b\x1b[2J"),
    ]
    done = run("chat", "--json", "--no-save", "--method", "sink", input="word " * 5_000 + "\n")
    assert done.stderr.startswith("reading 20,") and "tokens; Ctrl-C stops" in done.stderr
    (line,) = run("chat", "--json", "--no-save", input="c\n").stdout.splitlines()
    assert json.loads(line)["session"] is None


def test_looking_through(run: Run) -> None:
    run("chat", input="how many\x1b[2J sails?\nlong \x9b2J" + "word " * 50 + "\n")
    run("chat", input="another\n")
    shown = run("sessions", "show", "1").stdout
    assert "> how many sails?\n\nYou said: how many" in shown
    assert "\x1b" not in shown and "\x9b" not in shown
    assert "\\u009b" in run("sessions", "show", "1", "--json").stdout
    assert run("sessions", "show").stdout.startswith("another\n")
    assert len(run("sessions", "search", "sail").stdout.splitlines()) == 2
    done = run("sessions", "search", "nobodysaidthis")
    assert (done.exit_code, done.stdout, done.stderr) == (0, "", "no turn has all of these words\n")
    assert json.loads(run("sessions", "search", "nobodysaidthis", "--json").stdout) == []
    assert run("sessions", "path").stdout == f"{stored().path}\n"
    run("sessions", "rm", "1")
    assert [about.id for about in stored().ls()] == [2]
    with pytest.raises(UsageError):
        run("sessions", "rm")
    run("sessions", "rm", "--all")
    assert stored().ls() == []


def test_files(run: Run, tmp_path: Path) -> None:
    run("chat", "--system", "Be brief.", input="one\ntwo\n")
    run("sessions", "export", "-o", "chat.json")
    run("sessions", "export", "--format", "markdown", "-o", "chat.md")
    assert "## You\n\none\n" in (tmp_path / "chat.md").read_text()
    run("sessions", "export", "last", "same.json")
    assert (tmp_path / "same.json").read_text() == (tmp_path / "chat.json").read_text()
    with pytest.raises(UsageError, match="name one"):
        run("sessions", "export", "last", "a.json", "-o", "b.json")
    assert run("sessions", "import", "chat.json").stdout == "2\n"
    assert run("sessions", "import", "-", input=(tmp_path / "chat.json").read_text()).stdout == "3\n"
    exported = [json.loads(run("sessions", "export", id).stdout) for id in "123"]
    assert exported[1] == exported[2] == {**exported[0], "options": {}}
    assert run("chat", "--resume", "2", input="three\n").stdout == "You said: three\n"
    assert stored().about(2).exchanges == 3
    with pytest.raises(MissingInput):
        run("sessions", "import", "none.json")
    os.mkfifo("pipe")
    for endless in ("pipe", os.devnull):
        with pytest.raises(BadInput, match="is no file"):
            run("sessions", "import", endless)
    (tmp_path / "loop").symlink_to("loop")
    for nowhere in ("loop", "x" * 300):
        with pytest.raises(CannotCreate):
            run("sessions", "export", "1", "-o", nowhere)
    assert run("sessions", "export", "1", "-o", "y" * 250).exit_code == 0


FAKES = Path(__file__).with_name("fakes.py")


def test_a_second_terminal_goes_on_with_a_copy(tmp_path: Path) -> None:
    """Two real processes: the second is told, and neither writes into the other's chat."""
    write_tiny_tokenizer(tmp_path)
    environment = {**os.environ, "LONGCHAT_DATA_DIR": str(tmp_path / "data")}
    command = [sys.executable, str(FAKES), str(tmp_path), "0,0", "chat", "--no-cache"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as first:
        assert first.stdin and first.stdout
        first.stdin.write("one\n")
        first.stdin.flush()
        assert first.stdout.readline() == "You said: one\n"
        second = subprocess.run(
            [*command, "--resume"], env=environment, input="two\n", capture_output=True, text=True, timeout=60
        )
        assert f"chat 1 is open elsewhere: process {first.pid} has it; this is a copy of it" in second.stderr
        assert second.stdout == "You said: two\n"
        out, _ = first.communicate("three\n", timeout=60)
        assert out == "You said: three\n"
    found = Sessions(tmp_path / "data" / "sessions" / "sessions.db")
    said = {about.id: [turn.text for turn in found.load(about.id).turns[::2]] for about in found.ls()}
    assert said == {1: ["one", "three"], 2: ["one", "two"]}
    assert found.about(2).parent == 1
    third = subprocess.run(
        [*command, "--resume", "1"],
        env=environment,
        input="four\n",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "elsewhere" not in third.stderr
    assert found.about(1).exchanges == 3


def test_roles_and_prompt_files(run: Run, tmp_path: Path) -> None:
    with pytest.raises(MissingInput, match="there are none"):
        run("chat", "--role", "pirate", input="x\n")
    (tmp_path / "config" / "roles").mkdir(parents=True)
    (tmp_path / "config" / "roles" / "pirate.md").write_text("Talk like a pirate.\n")
    (tmp_path / "prompt.txt").write_text("Be kind.\n")
    run("chat", "--role", "pirate", input="one\n")
    run("chat", "--system-file", "prompt.txt", input="two\n")
    assert [about.system for about in stored().ls()] == ["Be kind.", "Talk like a pirate."]
    run("chat", "--resume", "--role", "pirate", input="three\n")
    assert (stored().about(2).system, stored().about(2).exchanges) == ("Talk like a pirate.", 2)
    for words in (("--role", "../config/roles/pirate"), ("--role", ""), ("--system-file", "none")):
        with pytest.raises(MissingInput):
            run("chat", *words, input="x\n")
    with pytest.raises(UsageError, match="both system prompts"):
        run("chat", "--role", "pirate", "--system", "x", input="x\n")
    (tmp_path / "prompt.txt").write_bytes(b"\xff")
    for endless in ("prompt.txt", "/dev/zero"):
        with pytest.raises(BadInput):
            run("chat", "--system-file", endless, input="x\n")


def test_completion_of_numbers(run: Run) -> None:
    run("chat", input="the first\n")
    run("chat", input="the second\n")
    from longchat_cli.commands.chat import complete_resume

    found = complete_resume(None, None, "")  # type: ignore[arg-type]
    assert [(item.value, item.help) for item in found] == [
        ("last", "the latest one"),
        ("2", "the second"),
        ("1", "the first"),
    ]
