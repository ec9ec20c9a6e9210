"""What longchat's SQLite files have in common: made for their owner alone, words to search, clear errors."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from longchat_cli.config import private
from longchat_cli.errors import BadInput, StorageError

_ROOM = "free some space (`longchat cache rm --all` does)"


@contextlib.contextmanager
def failures(path: Path, what: str, do: str) -> Iterator[Any]:
    """Errors of SQLite as longchat's, of `what` ("the log"): StorageError, and BadInput for a damaged file,
    with what to `do` then. Yields its module, which not every Python has."""
    try:
        import sqlite3
    except ImportError as error:
        raise StorageError(f"{what} {path} cannot be used", "this Python has no sqlite3") from error
    try:
        yield sqlite3
    except sqlite3.OperationalError as error:
        if "disk is full" in str(error):
            raise StorageError(f"{what} {path} cannot be written", "the disk is full", _ROOM) from error
        if "readonly database" in str(error):
            why = "the file, its directory or the disk is read-only"
            raise StorageError(f"{what} {path} cannot be written", why, "make it writable") from error
        if path.is_dir():
            raise StorageError(f"{what} {path} cannot be used", "it is a directory", do) from error
        raise StorageError(f"{what} {path} cannot be used", str(error)) from error
    except sqlite3.DatabaseError as error:
        raise BadInput(f"{what} {path} is damaged", str(error), do) from error
    except UnicodeEncodeError as error:  # what is to be written is at fault, not the file
        raise StorageError(f"{what} {path} cannot hold this", str(error)) from error
    except OSError as error:
        do = "make it writable" if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM) else ""
        raise StorageError(f"{what} {path} cannot be used", error.strerror or str(error), do) from error


def create(path: Path) -> None:
    """Make an empty file (0600), in a directory (0700), if there is none. Raises CannotCreate, OSError."""
    private(path.parent)
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))


def prepare(
    database: Any, path: Path, version: int, tables: Sequence[str], changes: Sequence[str] = ()
) -> None:
    """Make the `tables` in a new file; one of version n, from 1 on, gets the `changes` from number n on.

    Raises BadInput for one of a newer version.
    """
    database.isolation_level = None
    if _version(database, path, version) == version:
        return
    database.execute("BEGIN IMMEDIATE")
    found = _version(database, path, version)  # somebody may have done it meanwhile
    for statement in changes[found - 1 :] if found else tables:
        database.execute(statement)
    database.execute(f"PRAGMA user_version = {version}")
    database.execute("COMMIT")


def _version(database: Any, path: Path, version: int) -> int:
    (found,) = database.execute("PRAGMA user_version").fetchone()
    if found > version:
        raise BadInput(f"{path} is of a newer longchat", "", "update longchat, or move the file away")
    return int(found)


def matching(words: Sequence[str]) -> str:
    """The full-text query for what has all of the words, or words that begin like them; empty: nothing."""
    quoted = (word.replace('"', '""') for word in " ".join(words).replace("\0", " ").split())
    return " ".join(f'"{word}"*' for word in quoted)
