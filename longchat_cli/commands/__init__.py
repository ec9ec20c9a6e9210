"""One file per command. A new one is a file in this folder and a line in `COMMANDS`.

A command is imported when it is run or its help is shown; importing it is cheap, too: what is heavy is
imported inside the functions that need it.
"""

from __future__ import annotations

import importlib
from collections import UserDict
from typing import Any

COMMANDS: dict[str, str] = {
    "chat": "chat:chat",
    "ask": "ask:ask",
    "ingest": "ingest:ingest",
    "inspect": "inspect:inspect",
    "cache": "cache:cache",
    "methods": "methods:methods",
    "models": "models:models",
    "eval": "evaluate:evaluate",
    "bench": "bench:bench",
    "sessions": "sessions:sessions",
    "logs": "logs:logs",
    "config": "config:config",
    "schema": "schema:schema",
    "completion": "completion:completion",
    "man": "man:man",
    "doctor": "doctor:doctor",
}


class Commands(UserDict[str, Any]):
    """click commands by name, each imported when it is looked up."""

    def __init__(self) -> None:
        super().__init__(COMMANDS)

    def __getitem__(self, name: str) -> Any:
        module, attribute = self.data[name].split(":")
        return getattr(importlib.import_module(f"{__name__}.{module}"), attribute)
