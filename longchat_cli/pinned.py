"""Engines to which what a chat begins with, system prompt and documents, stays visible for ever."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from longchat_cli import attention
from longchat_cli.ask import Open, opening
from longchat_cli.documents import Document
from longchat_cli.engine import Engine

WINDOW = 1020
"""Recent tokens that stay visible under `recall`, as under `sink`."""


def open_pinned(
    open_engine: Open,
    method: str,
    options: Mapping[str, Any],
    system: str | None = None,
    documents: Sequence[Document] = (),
) -> Engine:
    """An engine to which the opening stays visible for ever where the method can pin it (its `sinks`).

    When system prompt and documents do not fit beside the recent tokens, the system prompt alone is pinned.
    """
    if method == "recall":
        options = {"window": WINDOW, **options}
    engine = open_engine(method, options)
    for kept in (documents, ()):
        pinned = pin(method, options, len(opening(engine, system, kept)), engine.info.window)
        if pinned is not None:
            return open_engine(method, pinned)
    return engine


def pin(method: str, options: Mapping[str, Any], tokens: int, window: int) -> dict[str, Any] | None:
    """Options that keep the first `tokens` visible; None if the method has none, the user has decided, or
    they do not fit the trained `window` beside the recent ones."""
    values: dict[str, Any] = {
        option.name: option.default for option in dataclasses.fields(attention.method_class(method))
    }
    if "sinks" not in values or "sinks" in options:
        return None
    values.update(options)
    recent = values.get("window", values.get("local", 0))
    return {**options, "sinks": max(tokens, values["sinks"])} if tokens + recent <= window else None
