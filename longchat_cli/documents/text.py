"""Plain text: decode, normalise line ends, take out control characters."""

from __future__ import annotations

import re

from longchat_cli.documents.document import Document
from longchat_cli.documents.encoding import Undecodable, decode
from longchat_cli.errors import BadInput

_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\))")
_BREAK = re.compile(r"[\v\f\x85]")
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1f\x7f-\x9f]")


def parse(name: str, data: bytes) -> Document:
    """A text file's bytes to a Document. Raises BadInput when they are binary or hold no text."""
    try:
        decoded = decode(data)
    except Undecodable as error:
        raise BadInput(f"{name} is not a text file", str(error)) from error
    text, notes = clean(decoded.text)
    if not text.strip():
        raise BadInput(f"{name} holds no text", "only white space")
    if decoded.damaged:
        notes = (*notes, f"{decoded.damaged:,} damaged characters replaced (not {decoded.encoding})")
    return Document(name, text, decoded.encoding, notes)


def clean(text: str) -> tuple[str, tuple[str, ...]]:
    """Text with `\\n` line ends and without control characters and terminal escapes, and what was done."""
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    text, escapes = _ESCAPE.subn("", text)
    nuls = text.count("\0")
    text, controls = _CONTROL.subn("", _BREAK.sub(" ", text))
    notes = []
    if escapes:
        notes.append(f"{escapes:,} terminal escape sequences removed")
    if controls:
        notes.append(f"{controls:,} control characters removed" + (f" ({nuls:,} NUL)" if nuls else ""))
    return text, tuple(notes)
