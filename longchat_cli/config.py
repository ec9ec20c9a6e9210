"""Directories, environment settings and human-readable sizes. Imports neither torch nor transformers."""

from __future__ import annotations

import os
import re
from pathlib import Path

from longchat_cli.errors import BadConfig, UsageError

APP = "longchat"
_UNITS = {"": 1, "k": 1000, "m": 10**6, "g": 10**9, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}


def data_dir() -> Path:
    """Models and sessions: $LONGCHAT_DATA_DIR, else the platform's data directory (XDG_DATA_HOME)."""
    return _directory("LONGCHAT_DATA_DIR", "data")


def cache_dir() -> Path:
    """Converted weights and KV states, safe to delete: $LONGCHAT_CACHE_DIR, else XDG_CACHE_HOME."""
    return _directory("LONGCHAT_CACHE_DIR", "cache")


def config_dir() -> Path:
    """The user's configuration file: $LONGCHAT_CONFIG_DIR, else XDG_CONFIG_HOME."""
    return _directory("LONGCHAT_CONFIG_DIR", "config")


def state_dir() -> Path:
    """Histories and logs: $LONGCHAT_STATE_DIR, else XDG_STATE_HOME."""
    return _directory("LONGCHAT_STATE_DIR", "state")


def private(directory: Path) -> Path:
    """Create `directory` readable by its owner only (0700) and return it.

    Raises CannotCreate when the directory cannot be made.
    """
    from longchat_cli.errors import CannotCreate

    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        do = "make its place writable, or name others (LONGCHAT_DATA_DIR, LONGCHAT_CACHE_DIR, ...)"
        raise CannotCreate(f"cannot create {directory}", error.strerror or str(error), do) from error
    return directory


def offline() -> bool:
    """True when LONGCHAT_OFFLINE (set by --offline) or HF_HUB_OFFLINE forbids the network."""
    return any(os.environ.get(name, "").lower() in {"1", "true", "yes", "on"} for name in _OFFLINE)


_OFFLINE = ("LONGCHAT_OFFLINE", "HF_HUB_OFFLINE")


def parse_size(text: str) -> int:
    """`32k` -> 32000, `4GiB` -> 4294967296, `900` -> 900. Raises UsageError."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d+)?)\s*([kmg]?i?)b?", text.strip().lower())
    if not match or match[2] not in _UNITS:
        raise UsageError(f"'{text}' is not a size", "", "write a number such as 900, 32k or 4GiB")
    return int(float(match[1]) * _UNITS[match[2]])


def format_bytes(count: int) -> str:
    """1536 -> '1.5 KiB'."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError


def _directory(variable: str, kind: str) -> Path:
    if os.environ.get(variable):
        try:
            return Path(os.environ[variable]).expanduser()
        except RuntimeError as error:  # ~ of nobody
            raise BadConfig(f"{variable} is in no home directory", str(error), "name a full path") from error
    import platformdirs  # not for `--help`

    return Path(getattr(platformdirs, f"user_{kind}_path")(APP))
