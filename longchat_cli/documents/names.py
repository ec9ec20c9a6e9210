"""File names as they may be printed: any bytes are allowed in a name, not all on a terminal."""

from __future__ import annotations

import os
from pathlib import PurePath


def printable(path: PurePath | str) -> str:
    """The name in valid Unicode, with undecodable bytes and control characters as backslash escapes."""
    name = os.fsencode(path).decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)
