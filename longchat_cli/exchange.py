"""Kept chats as files: JSON that another machine reads, Markdown for people.

A file may come from anybody. It says what was said and nothing else: no token ids, which could hold control
tokens, and no model that would be fetched.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from longchat_cli import attention
from longchat_cli.documents import Document
from longchat_cli.documents.names import printable
from longchat_cli.errors import BadInput
from longchat_cli.sessions import STOPS, About, Chat, Turn, now, title_of
from longchat_cli.terminal_text import Sanitizer

FORMAT, VERSION = "longchat chat", 1
LARGEST = 1 << 28
"""Bytes of a file that is read."""


def as_json(chat: Chat) -> dict[str, Any]:
    """A chat as JSON values: what `from_json` makes the same chat of."""
    about = chat.about
    return {
        "format": FORMAT,
        "version": VERSION,
        "title": about.title,
        "created": about.created,
        "updated": about.updated,
        "model": about.model,
        "method": about.method,
        "options": dict(about.options),
        "system": about.system,
        "documents": _texts(chat.documents),
        "turns": [
            {
                "role": turn.role,
                "text": turn.text,
                "thoughts": turn.thoughts,
                "stop": turn.stop,
                "time": turn.time,
                "pinned": turn.pinned,
                "subject": turn.subject,
                "documents": _texts(turn.documents),
            }
            for turn in chat.turns
        ],
    }


def as_markdown(chat: Chat) -> str:
    """A chat for people, safe for a terminal."""
    about = chat.about
    parts = [f"# {about.title}", f"{about.created}, {about.model}, {about.method}"]
    if about.system:
        parts.append(_quoted(about.system))
    if chat.documents:
        parts.append(_named(chat.documents))
    for turn in chat.turns:
        parts.append("## You" if turn.role == "user" else "## Answer")
        if turn.documents:
            parts.append(_named(turn.documents))
        if turn.thoughts:
            parts.append(_quoted(turn.thoughts))
        parts.append(turn.text.strip())
    return Sanitizer().feed("\n\n".join(part for part in parts if part)) + "\n"


def from_json(data: bytes, name: str) -> Chat:
    """The chat that a file called `name` holds. Raises BadInput where it is anything else."""
    if len(data) > LARGEST:
        raise _bad(name, f"it has more than {LARGEST >> 20} MiB")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _bad(name, "it is no JSON") from error
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        raise _bad(name, "it does not say that it is one")
    if value.get("version") != VERSION:
        raise _bad(name, f"its version is not {VERSION}")
    try:
        return _chat(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise _bad(name, printable(str(error))) from error


def _chat(value: dict[str, Any]) -> Chat:
    """Raises ValueError, TypeError."""
    turns = [_turn(number, turn) for number, turn in enumerate(_items(value, "turns"))]
    if len(turns) % 2:
        raise ValueError("the last turn has no answer")
    system = value.get("system")
    method = _text(value, "method")
    if method not in attention.METHODS:
        method = "sink"
    about = About(
        _text(value, "model"),
        "",
        method,
        {},
        None if system is None else _text(value, "system"),
        _text(value, "title") or title_of(turns),
        _time(value, "created"),
        _time(value, "updated"),
    )
    return Chat(about, (), _documents(value), turns)


def _turn(number: int, value: Any) -> Turn:
    role, stop = _text(value, "role"), value.get("stop")
    if role != ("user", "assistant")[number % 2]:
        raise ValueError("user and assistant do not take turns")
    if stop is not None and stop not in STOPS:
        raise ValueError("a turn stops for no known reason")
    return Turn(
        role,
        _text(value, "text"),
        stop,
        pinned=value.get("pinned") is True,
        subject=value.get("subject") is True,
        documents=tuple(_documents(value)),
        thoughts=_text(value, "thoughts"),
        time=_time(value, "time"),
    )


def _documents(value: Any) -> list[Document]:
    found = []
    for item in _items(value, "documents"):
        text, header = _text(item, "text"), item.get("header", 0)
        if not isinstance(header, int) or not 0 <= header <= len(text):
            raise ValueError("a document's header is longer than its text")
        found.append(Document(_text(item, "name"), text, header=header))
    return found


def _items(value: Any, key: str) -> list[Any]:
    found = value.get(key, []) if isinstance(value, dict) else None
    if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
        raise ValueError(f"'{key}' is not a list of objects")
    return found


def _text(value: dict[str, Any], key: str) -> str:
    found = value.get(key, "")
    if not isinstance(found, str):
        raise ValueError(f"'{key}' is no text")
    found.encode()  # no half characters
    return found


def _time(value: dict[str, Any], key: str) -> str:
    """UTC; the future is now."""
    if not (found := _text(value, key)):
        return now()
    said = datetime.fromisoformat(found)
    said = said.replace(tzinfo=UTC) if said.tzinfo is None else said.astimezone(UTC)
    return min(said.isoformat(timespec="seconds"), now())


def _texts(documents: Sequence[Document]) -> list[dict[str, Any]]:
    return [{"name": d.name, "text": d.text, "header": d.header} for d in documents]


def _named(documents: Sequence[Document]) -> str:
    return "\n".join(f"* {printable(document.name)}" for document in documents)


def _quoted(text: str) -> str:
    return "\n".join(f"> {line}" for line in text.splitlines())


def _bad(name: str, why: str) -> BadInput:
    return BadInput(f"{printable(name)} is no chat that can be imported", why)
