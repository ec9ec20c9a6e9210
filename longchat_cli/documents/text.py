"""Plain text: decode, normalise line ends, take out control characters."""

from __future__ import annotations

import re

from longchat_cli.documents.document import Document
from longchat_cli.documents.encoding import Undecodable, decode
from longchat_cli.errors import BadInput, NoText

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters that no text keeps."""
_LONE = re.compile(r"[\ud800-\udfff]")  # half a character: neither a tokenizer nor a terminal takes it
_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\))")
_BREAK = re.compile(r"[\v\f\x85]")


def parse(name: str, data: bytes) -> Document:
    """A text file's bytes to a Document. Raises BadInput when they are binary or hold no text."""
    return require_text(decoded(name, data))


def decoded(name: str, data: bytes, declared: str = "") -> Document:
    """As `parse`, but the text may be blank; `declared` is the encoding that the file itself names."""
    try:
        found = decode(data, declared)
    except Undecodable as error:
        raise BadInput(f"{name} is not a text file", str(error)) from error
    text, notes = clean(found.text)
    if found.damaged:
        notes = (*notes, f"{found.damaged:,} damaged characters replaced (not {found.encoding})")
    return Document(name, text, found.encoding, notes)


def require_text(document: Document) -> Document:
    """The document itself. Raises NoText when it is blank."""
    if not document.text.strip():
        raise NoText(f"{document.name} holds no text", "only white space")
    return document


def clean(text: str) -> tuple[str, tuple[str, ...]]:
    """Text with `\\n` line ends and without control characters and terminal escapes, and what was done."""
    text = _LONE.sub("\ufffd", text.removeprefix("\ufeff")).replace("\r\n", "\n").replace("\r", "\n")
    text, escapes = _ESCAPE.subn("", text)
    nuls = text.count("\0")
    text, controls = CONTROL.subn("", _BREAK.sub(" ", text))
    notes = []
    if escapes:
        notes.append(f"{escapes:,} terminal escape sequences removed")
    if controls:
        notes.append(f"{controls:,} control characters removed" + (f" ({nuls:,} NUL)" if nuls else ""))
    return text, tuple(notes)
