"""What /set changes: samplers, and how the terminal is used."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from longchat_cli.config import parse_size
from longchat_cli.documents.names import printable
from longchat_cli.errors import UsageError

if TYPE_CHECKING:
    from longchat_cli.repl.loop import Repl

_SAMPLERS: dict[str, Callable[[str], Any]] = {
    "max-tokens": parse_size,
    "temperature": float,
    "top-p": float,
    "top-k": int,
    "min-p": float,
    "repetition-penalty": float,
    "start-penalty": float,
    "seed": lambda text: None if text == "off" else int(text),
}
_WORDS = {"keys": ("emacs", "vi"), "markdown": ("on", "off")}
NAMES = (*_SAMPLERS, *_WORDS, "think")


def known(name: str) -> str:
    """The setting of that name. Raises UsageError."""
    plain = name.removeprefix("--").replace("_", "-")
    if plain in NAMES:
        return plain
    close = difflib.get_close_matches(plain, NAMES, 1)
    hint = f"did you mean {close[0]}?" if close else f"choose from {', '.join(NAMES)}"
    raise UsageError(f"there is no setting {printable(name)}", "", hint)


def get(repl: Repl, name: str) -> Any:
    """A setting's value."""
    match name:
        case "keys":
            return repl.keys
        case "markdown":
            return "on" if repl.styled else "off"
        case "think":
            conversation = repl.conversation
            shown = "show" if conversation.shows_thoughts else "hide"
            return shown if conversation.think is None else conversation.think
    value = getattr(repl.sampling, name.replace("-", "_"))
    return "off" if value is None else value


def put(repl: Repl, name: str, text: str) -> None:
    """Change a setting. Raises UsageError for what it cannot be."""
    name = known(name)
    if name in _WORDS and text not in _WORDS[name]:
        raise UsageError(f"{name} is {' or '.join(_WORDS[name])}, not {printable(text)}")
    match name:
        case "keys":
            repl.keys = text
        case "markdown":
            repl.styled = text == "on"
        case "think":
            conversation = repl.conversation
            conversation.think = None if text in ("show", "hide") else _number(name, text, parse_size)
            conversation.shows_thoughts = text != "hide"
        case _:
            value = _number(name, text, _SAMPLERS[name])
            repl.sampling = replace(repl.sampling, **{name.replace("-", "_"): value})


def _number(name: str, text: str, kind: Callable[[str], Any]) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise UsageError(f"{name} is a number, not {printable(text)}") from None
