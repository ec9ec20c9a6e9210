"""The readable files of a folder, in a fixed order, each headed by its path."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from longchat_cli.config import format_bytes
from longchat_cli.documents.document import Collection, Document, Skip
from longchat_cli.documents.ignore import Rules, ignored, rules_above, rules_in
from longchat_cli.documents.member import Options, order, read_member
from longchat_cli.documents.names import printable

MAX_BYTES = 16 << 20
"""Larger files of a folder are skipped; named by itself a file may have any size."""


def read_folder(
    root: Path, options: Options | None = None, max_bytes: int = MAX_BYTES, name: str = ""
) -> Collection:
    """Every readable file below `root` by .gitignore and .longchatignore rules and by `options`; symbolic
    links are not followed.

    What cannot be read is skipped with a reason, never an error. Files are called `name`/path, by default as
    they are reached through `root`.
    """
    options = options or Options()
    found = Collection([], [])
    count = 0
    for path, reason in _walk(root):
        if reason == _IGNORED or (not reason and options.leaves_out(path.relative_to(root).as_posix())):
            count += 1
            continue
        shown = printable(f"{name}/{path.relative_to(root).as_posix()}" if name else path)
        found.add(Skip(shown, reason) if reason else _read_file(path, shown, options, max_bytes))
    return replace(found, ignored=count)


_IGNORED = "ignored"


def _walk(root: Path) -> Iterator[tuple[Path, str]]:
    """(file, "") in reading order, or (file or folder, the reason to skip it)."""
    base = root.resolve()
    pending: list[tuple[Path, Path, tuple[Rules, ...]]] = [(root, base, rules_above(base))]
    while pending:
        shown, actual, rules = pending.pop()
        try:
            entries = sorted(os.scandir(shown), key=lambda entry: order(Path(entry.name)))
        except OSError as error:
            yield shown, (error.strerror or "unreadable").lower()
            continue
        rules += rules_in(actual)
        folders = []
        for entry in entries:
            is_dir = entry.is_dir(follow_symlinks=False)
            if entry.name == ".git":
                continue
            if ignored(actual / entry.name, is_dir, rules):
                yield shown / entry.name, _IGNORED
            elif is_dir:
                folders.append((shown / entry.name, actual / entry.name, rules))
            elif entry.is_symlink():
                yield shown / entry.name, "symbolic link, not followed"
            else:
                yield shown / entry.name, ""
        pending.extend(reversed(folders))


def _read_file(path: Path, name: str, options: Options, max_bytes: int) -> Document | Skip:
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            return Skip(name, "not a regular file")
        if status.st_size > max_bytes:
            return Skip(name, f"too large ({format_bytes(status.st_size)}, limit {format_bytes(max_bytes)})")
        return read_member(name, path.read_bytes(), options)
    except OSError as error:
        return Skip(name, (error.strerror or "unreadable").lower())
