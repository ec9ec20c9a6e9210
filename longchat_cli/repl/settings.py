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
    "seed": lambda text: None if text == "off" else int(text),
}
WORDS = {"keys": ("emacs", "vi"), "markdown": ("on", "off"), "think": ("show", "hide")}
NAMES = (*_SAMPLERS, *WORDS)


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
    if name == "keys":
        return repl.keys
    if name == "markdown":
        return "on" if repl.styled else "off"
    if name == "think":
        return "show" if repl.thoughts else "hide"
    value = getattr(repl.sampling, name.replace("-", "_"))
    return "off" if value is None else value


def put(repl: Repl, name: str, text: str) -> None:
    """Change a setting. Raises UsageError for what it cannot be."""
    name = known(name)
    if name in _SAMPLERS:
        try:
            value = _SAMPLERS[name](text)
        except ValueError:
            raise UsageError(f"{name} is a number, not {printable(text)}") from None
        repl.sampling = replace(repl.sampling, **{name.replace("-", "_"): value})
        return
    if text not in WORDS[name]:
        raise UsageError(f"{name} is {' or '.join(WORDS[name])}, not {printable(text)}")
    if name == "markdown":
        repl.styled = text == "on"
    elif name == "think":
        repl.thoughts = text == "show"
    else:
        repl.keys = text
