"""Names and messages as they may be printed: files hold any bytes, not all are for a terminal."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import PurePath

from longchat_cli.documents.text import CONTROL


def printable(path: PurePath | str) -> str:
    """The name in valid Unicode, with undecodable bytes and control characters as backslash escapes."""
    name = os.fsencode(path).decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)


def brief(error: BaseException) -> str:
    """An error's message on one short line; what it quotes of a file is made printable."""
    line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return printable(_short(line).encode("utf-8", "replace").decode())


def heading(words: Iterable[str]) -> str:
    """A document's own title as a place: one short line without control characters."""
    return _short(CONTROL.sub("", " ".join("".join(words).split())))


def _short(line: str, most: int = 120) -> str:
    return line if len(line) <= most else f"{line[:most]}..."
