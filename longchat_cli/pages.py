"""What reading leaves behind, kept for the next question: immutable pages in the cache directory.

A page is a safetensors file named by the hash of everything its content depends on, so that nothing can be
stale: what changed has another name. Every byte is under a checksum, looked at before a page is used; a page
that fails is deleted and made anew. Imports no torch: whoever makes a page says how its tensors are written.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError, safe_open

from longchat_cli.config import cache_dir, format_bytes, private
from longchat_cli.errors import LongchatError, MissingInput
from longchat_cli.terminal import Console

PAGE = 2048
"""Tokens of a page; a multiple of the rows of a prefill call, so that pages end where calls do."""
BUDGET = 10 << 30
"""Bytes that all pages together may take."""
SMALL = 2000
"""Documents of fewer tokens are read again sooner than they are worth keeping."""

Save = Callable[[str, dict[str, str]], None]
"""Writes a safetensors file of this name with this metadata."""

DAMAGED = "damaged"
"""What stands for the method of pages that do not say what they are of."""
_ENDING = ".safetensors"
_PARTIAL = ".tmp-"
_ABANDONED = 600.0
"""Seconds after which a file that never got its name belongs to a process that was killed."""
_MARK = b'"sha256":"'
_BLANK = b"0" * 64
_LONGEST_HEADER = 100 << 20  # as safetensors has it
_BLOCK = 1 << 20


class Damaged(ValueError):
    """A file is not what was written."""


def digest(parent: str, *parts: Any) -> str:
    """The name of what depends on all that `parent` names and on `parts` (bytes or JSON values)."""
    made = hashlib.sha256(parent.encode())
    for part in parts:
        data = part if isinstance(part, bytes) else json.dumps(part, sort_keys=True).encode()
        made.update(len(data).to_bytes(8, "little") + data)
    return made.hexdigest()


def write_sealed(path: Path, save: Save, metadata: Mapping[str, str]) -> int:
    """Write a safetensors file (0600) with a checksum of its every byte, through a rename; its size.

    Raises OSError or SafetensorError; nothing is left behind then.
    """
    handle, name = tempfile.mkstemp(prefix=_PARTIAL, dir=path.parent)
    os.close(handle)
    try:
        save(name, {**metadata, "sha256": _BLANK.decode()})
        with Path(name).open("r+b") as file:
            _, found, at = _examine(file)
            file.seek(at)
            file.write(found.encode())
            size = file.seek(0, os.SEEK_END)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return size


def read_sealed(path: Path) -> dict[str, str]:
    """The metadata of a sealed file whose checksum holds. Raises Damaged, OSError."""
    with path.open("rb") as file:
        header, found, at = _examine(file)
        file.seek(at)
        if file.read(len(_BLANK)) != found.encode():
            raise Damaged("its checksum does not hold")
    return _metadata(header)


def peek(path: Path) -> dict[str, str]:
    """The metadata of a sealed file, unverified. Raises Damaged, OSError."""
    with path.open("rb") as file:
        return _metadata(_header(file))


def _examine(file: BinaryIO) -> tuple[bytes, str, int]:
    """(header, digest of the file with its checksum blanked, where that checksum stands)."""
    header = _header(file)
    at = header.find(_MARK) + len(_MARK)
    if at < len(_MARK) or at + len(_BLANK) > len(header):
        raise Damaged("it has no checksum")
    blanked = header[:at] + _BLANK + header[at + len(_BLANK) :]
    made = hashlib.sha256(len(header).to_bytes(8, "little") + blanked)
    while block := file.read(_BLOCK):
        made.update(block)
    return header, made.hexdigest(), 8 + at


def _header(file: BinaryIO) -> bytes:
    length = int.from_bytes(file.read(8), "little")
    if length > _LONGEST_HEADER:
        raise Damaged("its header is too long")
    header = file.read(length)
    if len(header) < length:
        raise Damaged("it is truncated")
    return header


def _metadata(header: bytes) -> dict[str, str]:
    try:
        return dict(json.loads(header)["__metadata__"])
    except (ValueError, LookupError, TypeError) as error:
        raise Damaged("its header is no JSON") from error


@dataclass(frozen=True)
class Entry:
    """A page on disk; `used` is when it was last of use, seconds since the epoch."""

    key: str
    path: Path
    bytes: int
    used: float

    def about(self) -> dict[str, Any]:
        """What it was made of, unverified."""
        try:
            about = json.loads(peek(self.path)["about"])
        except (Damaged, LookupError, ValueError, OSError):
            return {}
        return about if isinstance(about, dict) else {}


@dataclass(frozen=True)
class Reading:
    """The pages that one reading of `documents` left, as far as it was the first to write them.

    Damaged pages, which do not say what they are of, are one without documents.
    """

    documents: tuple[str, ...]
    model: str
    method: str
    entries: list[Entry]

    @property
    def bytes(self) -> int:
        return sum(entry.bytes for entry in self.entries)

    @property
    def used(self) -> float:
        """When a page of it was last of use, seconds since the epoch."""
        return max(entry.used for entry in self.entries)


class Store:
    """The pages in `root`, `budget` bytes at most, of texts of `least` tokens or more.

    `about` tells people what the pages written are of. A page cannot be kept on a full or read-only disk:
    that is said once, and reading goes on without.
    """

    def __init__(
        self,
        root: Path | None = None,
        budget: int = BUDGET,
        console: Console | None = None,
        about: Mapping[str, Any] | None = None,
        least: int = 0,
    ) -> None:
        self.root = root or cache_dir() / "pages"
        self.budget, self.console, self.least = budget, console or Console(quiet=True), least
        self.about = dict(about or {})
        self.written = 0
        """Bytes written by this object, and not given up again for its budget."""
        self._mine: dict[str, None] = {}  # pages of this reading: not pruned for its own sake
        self._verified: dict[str, dict[str, str]] = {}
        self._total: int | None = None
        self.stopped = False
        """Nothing more is kept."""
        self.failure = ""
        """Why a page could not be written; a spent budget is none."""

    def of(self, tokens: int, **about: Any) -> Store | None:
        """This store for a text of so many tokens, told more about it; None where that is not kept."""
        self.about |= {"tokens": tokens, **about}
        return self if tokens >= self.least else None

    def path(self, key: str) -> Path:
        return self.root / (key + _ENDING)

    def has(self, key: str) -> bool:
        """Whether there is a page of this name; it may be damaged."""
        return self.path(key).exists()

    def readings(self) -> list[Reading]:
        """What is kept, by document; the latest used first. Raises MissingInput where none can be read."""
        found: dict[tuple[tuple[str, ...], str, str], list[Entry]] = {}
        for entry in self._entries():
            about = entry.about()
            documents = tuple(map(str, about.get("documents") or ()))
            names = (documents, str(about.get("model", "")), str(about.get("method", DAMAGED)))
            found.setdefault(names, []).append(entry)
        readings = [Reading(*names, entries) for names, entries in found.items()]
        return sorted(readings, key=lambda reading: -reading.used)

    def find(self, key: str) -> dict[str, str] | None:
        """The metadata of a page that is whole; a damaged one is deleted, and None returned as for none."""
        if key not in self._verified:
            try:
                metadata = read_sealed(self.path(key))
                if metadata.get("key") != key:
                    raise Damaged("it has another page's name")
            except FileNotFoundError:
                return None
            except (Damaged, OSError) as error:
                self.console.detail(f"a kept page is damaged and made anew: {error}")
                self.discard(key)
                return None
            self._verified[key] = metadata
        self._mine[key] = None
        return self._verified[key]

    def open(self, key: str, framework: str) -> Any:
        """A whole page as safetensors maps it (`get_tensor`), for "np" or "pt"; None as `find`."""
        if self.find(key) is None:
            return None
        try:
            return safe_open(self.path(key), framework=framework)
        except (SafetensorError, OSError):  # pruned by another process meanwhile
            return None

    def put(self, key: str, save: Save, metadata: Mapping[str, str] | None = None) -> bool:
        """Keep a page; whether it is there now."""
        if self.stopped:
            return False
        try:
            if self._total is None:
                self._total = self._open()
            told = {**(metadata or {}), "key": key, "about": json.dumps(self.about)}
            size = write_sealed(self.path(key), save, told)
        except (OSError, SafetensorError, LongchatError) as error:
            full = "No space left" in str(error)  # safetensors says so in words of its own
            self.failure = "the disk is full" if full else getattr(error, "strerror", None) or str(error)
            self._stop(f"what was read is not kept: {self.failure}")
            return False
        self._mine[key] = None
        self._verified.pop(key, None)
        self.written += size
        self._total += size
        if self._total > self.budget:
            self._total = self.prune(self.budget, self._mine)
        if self._total > self.budget:
            self.discard(key)
            self._total -= size
            self.written -= size
            limit = format_bytes(self.budget)
            self._stop(f"only a part of what was read is kept: --cache-size is {limit}")
        return not self.stopped

    def discard(self, key: str) -> int:
        """Delete a page; the bytes that freed."""
        self._mine.pop(key, None)
        self._verified.pop(key, None)
        path = self.path(key)
        try:
            size = path.stat().st_size
            path.unlink()
        except OSError:  # gone, or in a directory that cannot be written
            return 0
        return size

    def touch(self) -> None:
        """The pages of this reading were of use now; the first ones will be pruned last."""
        now = time.time_ns()
        for number, key in enumerate(self._mine):
            with contextlib.suppress(OSError):
                os.utime(self.path(key), ns=(now, now - 1000 * number))

    def entries(self) -> list[Entry]:
        """All pages, the least recently used first."""
        return sorted(self._entries(), key=lambda entry: entry.used)

    def prune(self, budget: int, spared: Iterable[str] = ()) -> int:
        """Delete what was not used for longest until `budget` bytes are left; what there is then."""
        held, spared = self.entries(), set(spared)
        total = sum(entry.bytes for entry in held)
        for entry in held:
            if total <= budget:
                break
            if entry.key not in spared:
                total -= self.discard(entry.key)
        return total

    def verify(self) -> tuple[int, list[str]]:
        """Read every page: (how many are whole, names of those that were damaged and are deleted)."""
        keys = [entry.key for entry in self._entries()]
        damaged = [key for key in keys if self.find(key) is None]
        return len(keys) - len(damaged), damaged

    def _entries(self) -> Iterator[Entry]:
        try:
            files = list(os.scandir(self.root))
        except FileNotFoundError:
            return
        except OSError as error:
            raise MissingInput(f"cannot read {self.root}", error.strerror or str(error)) from error
        for file in files:
            if file.name.endswith(_ENDING):
                with contextlib.suppress(FileNotFoundError):  # pruned by another process meanwhile
                    stat = file.stat()
                    key = file.name.removesuffix(_ENDING)
                    yield Entry(key, Path(file.path), stat.st_size, stat.st_mtime)

    def _open(self) -> int:
        """Make the directory, clear what killed processes left; the bytes of the pages in it."""
        if not self.root.exists():
            private(self.root)
            self.console.notice(
                f"what is read is kept for later questions in {self.root}, {format_bytes(self.budget)} at "
                "most; `longchat cache` shows it, --no-cache keeps nothing"
            )
        total = 0
        for file in os.scandir(self.root):
            with contextlib.suppress(FileNotFoundError):
                stat = file.stat()
                if file.name.startswith(_PARTIAL) and stat.st_mtime < time.time() - _ABANDONED:
                    Path(file.path).unlink()
                total += stat.st_size
        return total

    def _stop(self, why: str) -> None:
        self.stopped = True
        self.console.warn(why)
