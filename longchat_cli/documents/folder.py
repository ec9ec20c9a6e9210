"""The text files of a folder, in a fixed order, each headed by its path."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from longchat_cli.config import format_bytes
from longchat_cli.documents import formats
from longchat_cli.documents.document import Collection, Document, Skip
from longchat_cli.documents.ignore import Rules, ignored, rules_above, rules_in
from longchat_cli.documents.names import printable
from longchat_cli.errors import BadInput

MAX_BYTES = 16 << 20
"""Larger files of a folder are skipped; named by itself a file may have any size."""


def read_folder(root: Path, max_bytes: int = MAX_BYTES) -> Collection:
    """Every text file below `root` by .gitignore rules; symbolic links are not followed.

    What cannot be read is skipped with a reason, never an error.
    """
    found = Collection([], [])
    count = 0
    for path, reason in _walk(root):
        if reason == _IGNORED:
            count += 1
            continue
        result = Skip(printable(path), reason) if reason else _read_file(path, max_bytes)
        if isinstance(result, Skip):
            found.skips.append(result)
        else:
            found.documents.append(result)
    return replace(found, ignored=count)


_IGNORED = "ignored by .gitignore"


def _walk(root: Path) -> Iterator[tuple[Path, str]]:
    """(file, "") in reading order, or (file or folder, the reason to skip it)."""
    base = root.resolve()
    pending: list[tuple[Path, Path, tuple[Rules, ...]]] = [(root, base, rules_above(base))]
    while pending:
        shown, actual, rules = pending.pop()
        try:
            entries = sorted(os.scandir(shown), key=_order)
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


def _order(entry: os.DirEntry[str]) -> tuple[bool, str, str]:
    readme = entry.name.lower().partition(".")[0] == "readme"
    return (not readme, entry.name.casefold(), entry.name)


def _read_file(path: Path, max_bytes: int) -> Document | Skip:
    name = printable(path)
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            return Skip(name, "not a regular file")
        if status.st_size > max_bytes:
            return Skip(name, f"too large ({format_bytes(status.st_size)}, limit {format_bytes(max_bytes)})")
        document = formats.parse(name, path.read_bytes())
    except OSError as error:
        return Skip(name, (error.strerror or "unreadable").lower())
    except BadInput as error:
        return Skip(name, error.why)
    header = f"File: {name}\n\n"
    return replace(document, text=header + document.text, header=len(header))
