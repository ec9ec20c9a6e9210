"""Private, atomic files: nothing is ever visible under its final name before it is complete."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from longchat_cli.config import format_bytes, private
from longchat_cli.errors import DISK_FULL, LongchatError, StorageError

try:
    import fcntl
except ImportError:  # Windows: temporary names and renames alone keep the files whole
    fcntl = None  # type: ignore[assignment]

_SCRATCH = ".tmp-"


@contextlib.contextmanager
def storage_errors(doing: str) -> Iterator[None]:
    """Turn an OSError met while `doing` something into a StorageError (exit 74)."""
    try:
        yield
    except OSError as error:
        raise storage_error(doing, error) from error


def storage_error(doing: str, error: OSError) -> StorageError:
    """The StorageError that says what failed, and what to do when the disk is full."""
    do = "free some space and run it again" if error.errno in DISK_FULL else ""
    return StorageError(f"failed while {doing}", error.strerror or str(error), do)


def require_space(directory: Path, needed: int, doing: str) -> None:
    """Raise StorageError when the file system of `directory` has less than `needed` bytes free."""
    free = shutil.disk_usage(directory).free
    if free < needed:
        why = f"{format_bytes(needed)} needed in {directory}, {format_bytes(free)} free"
        raise StorageError(f"not enough disk space for {doing}", why, "free some space and run it again")


@contextlib.contextmanager
def scratch(parent: Path) -> Iterator[Path]:
    """A temporary directory (0700) inside `parent`, so that its files can be renamed into place.

    It is locked while it is in use; those that killed processes left behind are not, and are deleted first.
    """
    private(parent)
    for abandoned in parent.glob(f"{_SCRATCH}*/"):
        if (handle := _lock_directory(abandoned, wait=False)) is not None:
            shutil.rmtree(abandoned, ignore_errors=True)
            os.close(handle)
    with storage_errors(f"writing in {parent}"):
        while True:
            directory = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=parent))
            handle = _lock_directory(directory, wait=True)
            if directory.exists():  # else another process took it for abandoned before it was locked
                break
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        if handle is not None:
            os.close(handle)


def _lock_directory(directory: Path, wait: bool) -> int | None:
    """A handle that keeps `directory` locked until it is closed.

    None when it is gone, in use elsewhere, or the file system knows no locks.
    """
    if fcntl is None:
        return None
    try:
        handle = os.open(directory, os.O_RDONLY)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        if directory.exists():
            return handle
    os.close(handle)
    return None


@contextlib.contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold the advisory lock file `path`; other processes wait here."""
    private(path.parent)
    with storage_errors(f"locking {path}"):
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if fcntl is not None:
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def install_directory(source: Path, target: Path) -> None:
    """Rename the complete directory `source` to `target`, replacing what was there."""
    with storage_errors(f"writing {target}"), scratch(target.parent) as old:
        if target.exists():
            target.rename(old / "old")
        source.rename(target)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as `write_text` does."""
    write_text(path, json.dumps(value, indent=1))


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` (0600) through a temporary file and a rename. Raises StorageError."""
    with storage_errors(f"writing {path}"):
        handle, name = tempfile.mkstemp(prefix=".tmp-", dir=private(path.parent))
        try:
            with os.fdopen(handle, "w", encoding="utf-8", errors="surrogateescape") as file:
                file.write(text)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


def read_json(path: Path) -> Any:
    """The JSON value in `path`; None when there is none or it is damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def sha256(path: Path) -> str:
    """Hex digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def remembered_sha256(path: Path, cache: Path) -> str:
    """`sha256` of `path`, remembered in the directory `cache` for as long as size and mtime stay."""
    path = path.resolve()
    stat = path.stat()
    key = hashlib.sha256(str(path).encode("utf-8", "surrogateescape")).hexdigest()[:32]
    known = read_json(cache / f"{key}.json")
    stamp = [stat.st_size, stat.st_mtime_ns, stat.st_ino]
    if isinstance(known, dict) and known.get("stamp") == stamp:
        return str(known["sha256"])
    digest = sha256(path)
    # A read-only or full cache costs the next start the hash again, no more.
    with contextlib.suppress(LongchatError):
        write_json(cache / f"{key}.json", {"stamp": stamp, "sha256": digest})
    return digest
