"""The log of questions and answers: one SQLite file on this machine, which only its owner can read.

It is there for its owner to look something up and can be turned off. What goes wrong with it never costs an
answer: `Recorder` warns once and goes on.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longchat_cli.config import data_dir
from longchat_cli.database import create, failures, matching, prepare
from longchat_cli.errors import LongchatError, MissingInput
from longchat_cli.terminal import Console

if TYPE_CHECKING:
    import sqlite3

VERSION = 1
PATIENCE = 5.0
"""Seconds to wait for another process that writes."""
_TABLES = (
    "CREATE TABLE answers (id INTEGER PRIMARY KEY AUTOINCREMENT, time TEXT NOT NULL, command TEXT NOT NULL, "
    "model TEXT NOT NULL, method TEXT NOT NULL, question TEXT NOT NULL, answer TEXT NOT NULL, "
    "stop TEXT NOT NULL, documents TEXT NOT NULL)",
    "CREATE VIRTUAL TABLE words USING fts5(question, answer, content='answers', content_rowid='id')",
    "CREATE TRIGGER added AFTER INSERT ON answers BEGIN INSERT INTO words(rowid, question, answer) "
    "VALUES (new.id, new.question, new.answer); END",
    "CREATE TRIGGER removed AFTER DELETE ON answers BEGIN INSERT INTO words(words, rowid, question, answer) "
    "VALUES ('delete', old.id, old.question, old.answer); END",
)


@dataclass(frozen=True)
class Entry:
    """A question with its answer; `time` is UTC in ISO 8601, `stop` as `engine.Piece` has it."""

    command: str
    model: str
    method: str
    question: str
    answer: str
    stop: str
    documents: tuple[str, ...] = ()
    time: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    id: int = 0


def default_path() -> Path:
    """Where the log is, whether or not there is one."""
    return data_dir() / "logs.db"


class Log:
    """The log in a file; it is made at the first entry. Raises BadInput where it is damaged or of a newer
    longchat, StorageError where it cannot be written, MissingInput for ids that are not in it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, entry: Entry) -> int:
        """Append an entry; returns its id."""
        with _failures(self.path):
            create(self.path)
        row = (
            entry.time,
            entry.command,
            entry.model,
            entry.method,
            entry.question,
            entry.answer,
            entry.stop,
            json.dumps(entry.documents, ensure_ascii=False),
        )
        columns = "time, command, model, method, question, answer, stop, documents"
        with self._open() as database:
            added = database.execute(f"INSERT INTO answers ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
            return int(added.lastrowid or 0)

    def last(self, count: int) -> list[Entry]:
        """The newest entries, the newest last."""
        return self._entries("ORDER BY id DESC LIMIT ?", count)[::-1]

    def get(self, id: int) -> Entry:
        """The entry `id`."""
        found = self._entries("WHERE id = ?", id)
        if not found:
            raise MissingInput(f"there is no entry {id} in the log", "", "`longchat logs list` shows them")
        return found[0]

    def search(self, words: Sequence[str], count: int) -> list[Entry]:
        """The best entries with all of the words, or words that begin like them; the newest last."""
        terms = matching(words)
        if not terms:
            return []
        found = "WHERE id IN (SELECT rowid FROM words WHERE words MATCH ? ORDER BY rank LIMIT ?)"
        return self._entries(f"{found} ORDER BY id", terms, count)

    def remove(self, ids: Sequence[int]) -> None:
        """Delete entries; nothing of them stays in the file."""
        for id in ids:
            self.get(id)
        with self._open() as database:
            database.executemany("DELETE FROM answers WHERE id = ?", [(id,) for id in ids])
            database.execute("INSERT INTO words(words) VALUES ('optimize')")
        with self._open() as database:
            database.execute("VACUUM")

    def clear(self) -> None:
        """Delete the file."""
        with _failures(self.path):
            self.path.unlink(missing_ok=True)

    def _entries(self, clause: str, *values: Any) -> list[Entry]:
        if not self.path.exists():
            return []
        with self._open() as database:
            rows = database.execute(f"SELECT * FROM answers {clause}", values).fetchall()
        return [_entry(*row) for row in rows]

    @contextlib.contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """A connection with the tables there; what the body did is kept when it ends well."""
        with (
            _failures(self.path) as sqlite,
            contextlib.closing(sqlite.connect(self.path, PATIENCE)) as database,
        ):
            database.execute("PRAGMA secure_delete = ON")
            prepare(database, self.path, VERSION, _TABLES)
            yield database


def _entry(
    id: int,
    time: str,
    command: str,
    model: str,
    method: str,
    question: str,
    answer: str,
    stop: str,
    documents: str,
) -> Entry:
    names = tuple(json.loads(documents))
    return Entry(command, model, method, question, answer, stop, names, time, id)


def _failures(path: Path) -> contextlib.AbstractContextManager[Any]:
    return failures(path, "the log", "`longchat logs rm --all` begins a new one")


class Recorder:
    """Adds to the log, unless `off`. A failure is told once."""

    def __init__(self, off: bool, console: Console) -> None:
        self._log = None if off else Log(default_path())
        self._console = console

    def __call__(self, entry: Entry) -> None:
        if self._log is None:
            return
        first = not self._log.path.exists()
        try:
            self._log.add(entry)
        except LongchatError as error:
            self._log = None
            self._console.warn(f"{error}; the answer is not logged")
            return
        if first:
            where = self._log.path
            self._console.notice(
                f"answers are logged in {where}, for you alone; `longchat logs off` ends that"
            )
