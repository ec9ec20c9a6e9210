"""Configuration files: where they are and what is written in them; `commands.configured` knows the keys.

TOML: a key at the top is for every command, `[ask]` for one, `[sink]` or `[ask.sink]` for a method's options.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from longchat_cli.config import config_dir, private
from longchat_cli.errors import DISK_FULL, BadConfig, CannotCreate, StorageError

PROJECT = "longchat.toml"
MOST_BYTES = 1 << 20


@dataclass(frozen=True)
class File:
    """A configuration file and its `kind`, project or user. It need not exist."""

    kind: str
    path: Path

    def __str__(self) -> str:
        return f"{self.kind} file {self.path}"

    @cached_property
    def table(self) -> dict[str, Any]:
        """What is in the file; nothing when there is none. Raises BadConfig."""
        text = self.text()
        if not text:
            return {}
        import tomllib

        try:
            return tomllib.loads(text)
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise BadConfig(f"{self.path} is not valid TOML", str(error), _REPAIR) from error

    def text(self) -> str:
        """The file as it stands. Raises BadConfig when it cannot be read."""
        try:
            if not _is_file(self.path):
                return ""
            with self.path.open("rb") as file:
                data = file.read(MOST_BYTES + 1)
            if len(data) > MOST_BYTES:
                raise BadConfig(f"{self.path} is too large for a configuration file", "", _REPAIR)
            return data.decode("utf-8-sig")
        except OSError as error:
            raise BadConfig(f"cannot read {self.path}", os.strerror(error.errno or 0)) from error
        except UnicodeDecodeError as error:
            raise BadConfig(f"{self.path} is not valid TOML", "it is not UTF-8", _REPAIR) from error

    def section(self, names: Sequence[str]) -> dict[str, Any]:
        """The table `[a.b]` of the names a, b; empty when there is none."""
        table: Any = self.table
        for name in names:
            table = table.get(name, {}) if isinstance(table, dict) else {}
        return table if isinstance(table, dict) else {}

    def put(self, keys: Sequence[str], value: Any) -> None:
        """Set a.b.c = value; comments and order of the rest stay. Raises BadConfig and CannotCreate."""
        import tomlkit

        document = self._document()
        table: Any = document
        for key in keys[:-1]:
            table = table.setdefault(key, {})
            if not isinstance(table, dict):
                raise BadConfig(f"{self.path}: {key} is a value, no table", "", _REPAIR)
        table[keys[-1]] = value
        self._write(tomlkit.dumps(document))

    def drop(self, keys: Sequence[str]) -> bool:
        """Remove a.b.c; False when it was not there. Raises BadConfig and CannotCreate."""
        import tomlkit

        document = self._document()
        table: Any = document
        for key in keys[:-1]:
            table = table.get(key, {}) if isinstance(table, dict) else {}
        if not isinstance(table, dict) or keys[-1] not in table:
            return False
        del table[keys[-1]]
        self._write(tomlkit.dumps(document))
        return True

    def create(self, text: str) -> None:
        """Start the file with `text`. Raises CannotCreate."""
        self._write(text)

    def _document(self) -> Any:
        import tomlkit

        _ = self.table  # says what is wrong with the file
        return tomlkit.parse(self.text())

    def _write(self, text: str) -> None:
        if self.kind == "user":
            private(self.path.parent)
        target = self.path.resolve()  # a symlink, as dotfile managers make them, stays one
        partial = target.with_name(f".{target.name}.{os.getpid()}")
        try:
            partial.touch(mode=0o600)
            partial.write_text(text, encoding="utf-8")
            if target.exists():
                partial.chmod(target.stat().st_mode & 0o7777)
            partial.replace(target)
        except OSError as error:
            kind = StorageError if error.errno in DISK_FULL else CannotCreate
            raise kind(f"cannot write {self.path}", os.strerror(error.errno or 0)) from error
        finally:
            partial.unlink(missing_ok=True)


_REPAIR = "repair it with `longchat config edit`"


def user_file() -> File:
    """The user's own, which need not exist."""
    return File("user", config_dir() / "config.toml")


def project_file() -> File | None:
    """The nearest `longchat.toml` in the working directory or above."""
    try:
        here = Path.cwd()
    except OSError:  # the working directory was removed
        return None
    return next((File("project", path) for path in _upwards(here) if _is_file(path)), None)


def new_project_file() -> File:
    """A project file in the working directory."""
    return File("project", Path.cwd() / PROJECT)


def is_foreign(file: File) -> bool:
    """Whether somebody else than this user or root could have written the file, as in /tmp."""
    owner = file.path.stat().st_uid
    return hasattr(os, "geteuid") and owner not in (0, os.geteuid())


def _is_file(path: Path) -> bool:
    """As `Path.is_file`; in a folder that may not be entered there is none."""
    return os.path.isfile(path)  # noqa: PTH113


def _upwards(folder: Path) -> Iterator[Path]:
    return (parent / PROJECT for parent in (folder, *folder.parents))
