"""Chats that are kept: transcripts with their token ids in one SQLite file, for their owner alone.

Every turn is on disk before the next prompt, and an answer while it streams. Whoever writes holds the chat's
lock, so that no two processes do. What goes wrong with the file never costs a chat: `Session` says so and
goes on, and keeps what is missing as soon as it can.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longchat_cli.config import data_dir, private
from longchat_cli.database import create, failures, matching, prepare
from longchat_cli.documents import Document
from longchat_cli.errors import BadInput, LongchatError, MissingInput, UsageError
from longchat_cli.terminal import Console

if TYPE_CHECKING:
    import sqlite3

VERSION = 2
PATIENCE = 5.0
"""Seconds to wait for another process that writes."""
PACE = 0.5
"""Seconds between two writes of an answer that streams."""
TITLE = 60
"""Characters of a title made of a chat's first words."""
STOPS = ("eos", "length", "stop", "loop", "cancelled")
_TABLES = (
    "CREATE TABLE sessions (id INTEGER PRIMARY KEY AUTOINCREMENT, title TEXT NOT NULL, "
    "created TEXT NOT NULL, updated TEXT NOT NULL, model TEXT NOT NULL, fingerprint TEXT NOT NULL, "
    "method TEXT NOT NULL, options TEXT NOT NULL, system TEXT, opening BLOB NOT NULL, parent INTEGER, "
    "branched INTEGER)",
    "CREATE TABLE turns (id INTEGER PRIMARY KEY, session INTEGER NOT NULL, number INTEGER NOT NULL, "
    "role TEXT NOT NULL, text TEXT NOT NULL, thoughts TEXT NOT NULL, stop TEXT, time TEXT NOT NULL, "
    "pinned INTEGER NOT NULL, ids BLOB NOT NULL, subject INTEGER NOT NULL DEFAULT 0, "
    "UNIQUE (session, number))",
    "CREATE TABLE documents (session INTEGER NOT NULL, turn INTEGER NOT NULL, place INTEGER NOT NULL, "
    "name TEXT NOT NULL, text TEXT NOT NULL, header INTEGER NOT NULL, PRIMARY KEY (session, turn, place))",
    "CREATE VIRTUAL TABLE words USING fts5(text, content='turns', content_rowid='id')",
    "CREATE TRIGGER added AFTER INSERT ON turns BEGIN "
    "INSERT INTO words(rowid, text) VALUES (new.id, new.text); END",
    "CREATE TRIGGER changed AFTER UPDATE OF text ON turns BEGIN "
    "INSERT INTO words(words, rowid, text) VALUES ('delete', old.id, old.text); "
    "INSERT INTO words(rowid, text) VALUES (new.id, new.text); END",
    "CREATE TRIGGER removed AFTER DELETE ON turns BEGIN "
    "INSERT INTO words(words, rowid, text) VALUES ('delete', old.id, old.text); END",
)
_CHANGES = ("ALTER TABLE turns ADD COLUMN subject INTEGER NOT NULL DEFAULT 0",)
"""What makes a file of version n, from 1 on, one of the next."""
_OPENING = -1
"""The `turn` of documents that stand before all turns."""


def now() -> str:
    """UTC in ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def no_ids() -> array.array[int]:
    """Token ids, four bytes each."""
    return array.array("I")


@dataclass
class Turn:
    """One side's words. `stop` of an answer: why it ended ('eos', 'length', 'stop', 'loop', 'cancelled').

    `ids` are all tokens that it put into the state, those of the template included, from the stream position
    `start` on; an imported turn has none. `documents` stand in front of a user's words, `thoughts` before an
    answer's; `pinned`: it is not to be forgotten. `subject`: a user's turn that began a new one, before which
    nothing was visible from there on.
    """

    role: str
    text: str
    stop: str | None = None
    ids: array.array[int] = field(default_factory=no_ids)
    start: int = 0
    pinned: bool = False
    documents: tuple[Document, ...] = ()
    thoughts: str = ""
    time: str = field(default_factory=now)
    subject: bool = False

    @property
    def end(self) -> int:
        """The stream position behind it."""
        return self.start + len(self.ids)


@dataclass(frozen=True)
class About:
    """What a chat is with. `model` is what --model takes; without a `fingerprint` it is hearsay, of an
    imported file. `branched`: how many exchanges it took over from chat number `parent`."""

    model: str
    fingerprint: str
    method: str
    options: Mapping[str, Any]
    system: str | None = None
    title: str = ""
    created: str = field(default_factory=now)
    updated: str = ""
    parent: int | None = None
    branched: int | None = None
    exchanges: int = 0
    id: int = 0


@dataclass(frozen=True)
class Chat:
    """All that is kept of a chat: `opening` are the token ids before the first words."""

    about: About
    opening: Sequence[int]
    documents: Sequence[Document]
    turns: Sequence[Turn]


@dataclass(frozen=True)
class Hit:
    """A turn that has the words: its chat, the number of its exchange, and the words around."""

    session: int
    title: str
    number: int
    role: str
    time: str
    snippet: str


def default_path() -> Path:
    """Where the chats are, whether or not there are any."""
    return data_dir() / "sessions" / "sessions.db"


class Sessions:
    """The chats in a file; it is made with the first one. Raises BadInput where it is damaged or of a newer
    longchat, StorageError where it cannot be used, MissingInput for chats that are not in it."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or default_path()

    def ls(self, count: int | None = None, empty: bool = False) -> list[About]:
        """The chats, the most recently used first; those in which nothing is said where `empty`, too."""
        limit = -1 if count is None else count
        said = "" if empty else "WHERE EXISTS (SELECT 1 FROM turns WHERE session = sessions.id) "
        return self._abouts(f"{said}ORDER BY updated DESC, id DESC LIMIT ?", limit)

    def find(self, name: str) -> int:
        """The number of the chat called `name`: a number, or `last`."""
        if name == "last":
            newest = self.ls(1)
            if not newest:
                raise MissingInput("no chat was kept yet")
            return newest[0].id
        if not (name.isascii() and name.isdecimal()):
            raise UsageError(f"'{name[:99]}' is not the number of a chat", "", _LIST)
        if len(name) > _DIGITS:
            raise MissingInput(f"there is no chat {name[:_DIGITS]}...", "", _LIST)
        return self.about(int(name)).id

    def about(self, id: int) -> About:
        """What chat `id` is with."""
        found = self._abouts("WHERE id = ?", min(id, (1 << 63) - 1))
        if not found:
            raise MissingInput(f"there is no chat {id}", "", _LIST)
        return found[0]

    def load(self, id: int) -> Chat:
        """Chat `id` in full."""
        about = self.about(id)
        with self._open() as database:
            row = database.execute("SELECT opening FROM sessions WHERE id = ?", (id,)).fetchone()
            texts = database.execute(
                "SELECT turn, name, text, header FROM documents WHERE session = ? ORDER BY turn, place", (id,)
            ).fetchall()
            rows = database.execute(
                "SELECT number, role, text, thoughts, stop, time, pinned, ids, subject FROM turns "
                "WHERE session = ? ORDER BY number",
                (id,),
            ).fetchall()
        with _failures(self.path):
            documents: dict[int, list[Document]] = {}
            for turn, name, text, header in texts:
                documents.setdefault(turn, []).append(Document(name, text, header=header))
            first = _ids(*row)
            turns: list[Turn] = []
            for number, role, text, thoughts, stop, said, pinned, ids, subject in rows:
                start = turns[-1].end if turns else len(first)
                carried = tuple(documents.get(number, ()))
                marks = bool(pinned), carried, thoughts, said, bool(subject)
                turns.append(Turn(role, text, stop, _ids(ids), start, *marks))
            if len(turns) % 2:
                raise ValueError(f"chat {id} lacks an answer")
        return Chat(about, first, documents.get(_OPENING, []), turns)

    def search(self, words: Sequence[str], count: int) -> list[Hit]:
        """The best turns with all of the words, or words that begin like them."""
        terms = matching(words)
        if not terms or not self._begun():
            return []
        with self._open() as database:
            rows = database.execute(
                "SELECT sessions.id, title, number / 2 + 1, role, time, snippet(words, 0, '', '', '...', 16) "
                "FROM words JOIN turns ON turns.id = words.rowid JOIN sessions ON sessions.id = session "
                "WHERE words MATCH ? ORDER BY rank LIMIT ?",
                (terms, count),
            ).fetchall()
        return [Hit(*row) for row in rows]

    def remove(self, ids: Sequence[int]) -> None:
        """Delete chats; nothing of them stays in the file. Raises UsageError for one that is open."""
        with contextlib.ExitStack() as held:
            locks = []
            for id in ids:
                locks.append(self.lock(self.about(id).id))
                held.callback(locks[-1].release)
            with self._open() as database:
                with _transaction(database):
                    for table, column in (("turns", "session"), ("documents", "session"), ("sessions", "id")):
                        database.executemany(f"DELETE FROM {table} WHERE {column} = ?", [(id,) for id in ids])
                    database.execute("INSERT INTO words(words) VALUES ('optimize')")
                database.execute("VACUUM")
                database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            for lock in locks:
                lock.path.unlink(missing_ok=True)

    def add(self, chat: Chat) -> int:
        """Keep a whole chat as a new one; its number."""
        with self.writing() as database:
            id = _insert(database, chat)
            _put(database, id, chat, 0)
        return id

    def lock(self, id: int) -> Lock:
        """The right to write chat `id`. Raises InUse while another process has it."""
        return Lock(self.path.parent, id)

    @contextlib.contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """One transaction of a connection of its own, in a file that is made when there is none."""
        with _failures(self.path):
            create(self.path)
        with self._open() as database, _transaction(database):
            yield database

    def connect(self) -> sqlite3.Connection:
        """A connection to the file, which is made when there is none."""
        with _failures(self.path) as sqlite:
            create(self.path)
            try:
                return self._connect(sqlite, "NORMAL")
            except sqlite.OperationalError as error:
                if "I/O" not in str(error):
                    raise
                # A full disk has no room for what processes share; for one alone it is in memory.
                return self._connect(sqlite, "EXCLUSIVE")

    def _connect(self, sqlite: Any, locking: str) -> sqlite3.Connection:
        # Whoever asks and whoever answers may be different threads, but they take turns.
        database: sqlite3.Connection = sqlite.connect(self.path, PATIENCE, check_same_thread=False)
        try:
            database.execute(f"PRAGMA locking_mode = {locking}")
            database.execute("PRAGMA secure_delete = ON")
            database.execute("PRAGMA journal_mode = WAL")
            prepare(database, self.path, VERSION, _TABLES, _CHANGES)
        except BaseException:
            database.close()
            raise
        return database

    def _abouts(self, clause: str, value: int) -> list[About]:
        if not self._begun():
            return []
        with self._open() as database:
            rows = database.execute(
                "SELECT id, title, created, updated, model, fingerprint, method, options, system, parent, "
                "branched, (SELECT count(*) / 2 FROM turns WHERE session = sessions.id) FROM sessions "
                + clause,
                (value,),
            ).fetchall()
            return [_about(*row) for row in rows]

    def _begun(self) -> bool:
        """Whether there is a file. Raises StorageError where there can be none."""
        with _failures(self.path):
            try:
                self.path.stat()
            except FileNotFoundError:
                return False
        return True

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        with _failures(self.path), contextlib.closing(self.connect()) as database:
            yield database


_LIST = "`longchat sessions ls` shows them"
_DIGITS = 19
"""Of the highest number SQLite has."""


_DO = "move it away, and a new one is begun"


@contextlib.contextmanager
def _failures(path: Path) -> Iterator[Any]:
    """Errors of SQLite, and values that are not what was written, as longchat's."""
    with failures(path, "the file of chats", _DO) as sqlite:
        try:
            yield sqlite
        except UnicodeEncodeError:  # no damage; `failures` tells it
            raise
        except (ValueError, TypeError) as error:
            raise BadInput(f"the file of chats {path} is damaged", str(error), _DO) from error


@contextlib.contextmanager
def _transaction(database: sqlite3.Connection) -> Iterator[None]:
    """All or nothing."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
        database.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(Exception):  # a full disk has rolled it back already
            database.execute("ROLLBACK")
        raise


def _ids(blob: bytes) -> array.array[int]:
    ids = no_ids()
    ids.frombytes(blob)
    return ids


def _blob(ids: Sequence[int]) -> bytes:
    return array.array("I", ids).tobytes()


def _about(
    id: int,
    title: str,
    created: str,
    updated: str,
    model: str,
    fingerprint: str,
    method: str,
    options: str,
    system: str | None,
    parent: int | None,
    branched: int | None,
    exchanges: int,
) -> About:
    given = json.loads(options)
    return About(
        model, fingerprint, method, given, system, title, created, updated, parent, branched, exchanges, id
    )


def _insert(database: sqlite3.Connection, chat: Chat) -> int:
    about = chat.about
    made = database.execute(
        "INSERT INTO sessions (title, created, updated, model, fingerprint, method, options, system, "
        "opening, parent, branched) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (
            about.title or title_of(chat.turns),
            about.created,
            about.updated or now(),
            *_head(chat),
            about.parent,
            about.branched,
        ),
    )
    id = int(made.lastrowid or 0)
    _put_documents(database, id, _OPENING, chat.documents)
    return id


def _head(chat: Chat) -> tuple[Any, ...]:
    """The columns that change when the chat goes on under another method, model or system prompt."""
    about = chat.about
    options = json.dumps(dict(about.options), sort_keys=True)
    return about.model, about.fingerprint, about.method, options, about.system, _blob(chat.opening)


def _put(database: sqlite3.Connection, id: int, chat: Chat, same: int) -> None:
    """Make the turns of chat `id` those of `chat`, the first `same` of which are there already."""
    database.execute("DELETE FROM turns WHERE session = ? AND number >= ?", (id, len(chat.turns)))
    database.execute("DELETE FROM documents WHERE session = ? AND turn >= ?", (id, same))
    for number, turn in enumerate(chat.turns[same:], same):
        database.execute(
            "INSERT INTO turns (session, number, role, text, thoughts, stop, time, pinned, ids, subject) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (session, number) DO UPDATE SET "
            "role = excluded.role, text = excluded.text, thoughts = excluded.thoughts, stop = excluded.stop, "
            "time = excluded.time, pinned = excluded.pinned, ids = excluded.ids, subject = excluded.subject",
            (
                id,
                number,
                turn.role,
                turn.text,
                turn.thoughts,
                turn.stop,
                turn.time,
                turn.pinned,
                _blob(turn.ids),
                turn.subject,
            ),
        )
        _put_documents(database, id, number, turn.documents)


def _put_documents(database: sqlite3.Connection, id: int, turn: int, documents: Sequence[Document]) -> None:
    rows = [(id, turn, place, d.name, d.text, d.header) for place, d in enumerate(documents)]
    database.executemany("INSERT INTO documents VALUES (?, ?, ?, ?, ?, ?)", rows)


OPENING = "the opening of chats"
"""What pages are of that every chat with the same system prompt begins with."""


def known_as(id: int) -> str:
    """What the pages of a chat's state are of."""
    return f"chat {id}"


def title_of(turns: Sequence[Turn]) -> str:
    """The first words that were said."""
    words = " ".join(turns[0].text[: 10 * TITLE].split()) if turns else ""
    if len(words) <= TITLE:
        return words
    return words[:TITLE].rsplit(" ", 1)[0] + " ..."


class InUse(UsageError):
    """A chat is open in another process (exit 2)."""


class Lock:
    """The right to write a chat, until `release` or the end of the process. Raises InUse.

    Where the system has no such locks nobody is kept out.
    """

    def __init__(self, directory: Path, id: int) -> None:
        self.path = private(directory) / f"{id}.lock"
        self._handle: int | None = None
        try:
            import fcntl
        except ImportError:  # Windows
            return
        with _failures(self.path):
            handle = os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = os.pread(handle, 20, 0).decode("ascii", "replace").strip()
            os.close(handle)
            why = f"process {owner} has it" if owner.isdecimal() else ""
            raise InUse(f"chat {id} is open elsewhere", why) from error
        except OSError:  # a file system without locks
            os.close(handle)
            return
        self._handle = handle
        with contextlib.suppress(OSError):  # a full disk: the lock holds all the same
            os.ftruncate(handle, 0)
            os.pwrite(handle, str(os.getpid()).encode(), 0)

    def release(self) -> None:
        """Let others write."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None


class Session:
    """A chat while it goes on, kept in `sessions` from its first turn on; `id` is None before.

    `of`: it is the kept chat of that number. `parent` and `branched`: it begins as a copy of another one.
    Nothing here raises a LongchatError: a failure is told once, and what is missing is kept when that can be.
    """

    def __init__(
        self,
        sessions: Sessions,
        console: Console,
        of: Chat | None = None,
        parent: int | None = None,
        branched: int | None = None,
    ) -> None:
        self.sessions, self.console = sessions, console
        self.parent = of.about.parent if of else parent
        self.branched = of.about.branched if of else branched
        self.title = of.about.title if of else ""
        self.id = of.about.id if of else None
        self._lock = sessions.lock(of.about.id) if of else None
        self._same = len(of.turns) if of else 0  # turns that are on disk as they are
        self._head = _head(of) if of else None
        self._database: sqlite3.Connection | None = None
        self._failing = False
        self._due = 0.0

    def save(self, chat: Chat, same: int) -> bool:
        """Keep `chat`, the first `same` turns of which are as they were. It outlasts this process and, as far
        as the disk keeps its word, the power. Whether that is done."""
        self._same = min(self._same, same)
        try:
            self._write(chat, "FULL", PATIENCE)
        except LongchatError as error:
            if not self._failing:
                self.console.warn(f"{error}; the chat goes on and is not kept")
            self._failing = True
            self._disconnect()
            return False
        if self._failing:
            self.console.notice("the chat is kept again")
        self._failing = False
        self._due = time.monotonic() + PACE
        return True

    def stream(self, now: Callable[[], Chat]) -> None:
        """Keep the last turn of what the chat is `now`, every half second: it outlasts this process."""
        if self._failing or time.monotonic() < self._due:
            return
        self._due, chat = time.monotonic() + PACE, now()
        self._same = min(self._same, len(chat.turns) - 1)
        with contextlib.suppress(LongchatError):  # its end is told when the answer is complete
            self._write(chat, "NORMAL", 0.05)

    def another(self, branched: int | None = None) -> Session:
        """For another chat in the same place: a new one, or one that takes over so many exchanges of this."""
        return Session(self.sessions, self.console, None, None if branched is None else self.id, branched)

    def close(self) -> None:
        """Others may write the chat."""
        self._disconnect()
        if self._lock:
            self._lock.release()
            self._lock = None

    def _write(self, chat: Chat, synchronous: str, patience: float) -> None:
        with _failures(self.sessions.path):
            if self._database is None:
                first = not self.sessions.path.exists()
                self._database = self.sessions.connect()
                if first:
                    self.console.notice(
                        f"chats are kept in {self.sessions.path}, for you alone; --no-save keeps nothing"
                    )
            self._database.execute(f"PRAGMA synchronous = {synchronous}")
            self._database.execute(f"PRAGMA busy_timeout = {int(1000 * patience)}")
            id, lock, title = self.id, self._lock, self.title or title_of(chat.turns)
            about = replace(
                chat.about, title=title, parent=self.parent, branched=self.branched, updated=now()
            )
            chat = replace(chat, about=about)
            with _transaction(self._database):
                if id is not None and self._update(id, chat):
                    _put(self._database, id, chat, self._same)
                else:  # new, or the file was moved away
                    id = _insert(self._database, chat)
                    lock = self.sessions.lock(id)
                    _put(self._database, id, chat, 0)
        self.id, self._lock, self.title = id, lock, title
        self._head, self._same = _head(chat), len(chat.turns)

    def _update(self, id: int, chat: Chat) -> bool:
        """Bring the chat's own row up to date; False when there is none."""
        assert self._database is not None
        columns, values = "updated = ?, title = ?", [chat.about.updated, chat.about.title]
        if (head := _head(chat)) != self._head:
            columns += ", model = ?, fingerprint = ?, method = ?, options = ?, system = ?, opening = ?"
            values += head
        done = self._database.execute(f"UPDATE sessions SET {columns} WHERE id = ?", (*values, id))
        return done.rowcount > 0

    def _disconnect(self) -> None:
        if self._database is not None:
            with contextlib.suppress(Exception):
                self._database.close()
            self._database = None
