"""Slash commands about kept chats: going on with another one, copies, files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from longchat_cli.documents.names import printable
from longchat_cli.errors import CannotCreate, UsageError
from longchat_cli.exchange import as_json, as_markdown
from longchat_cli.sessions import Session, Sessions, title_of
from longchat_cli.terminal import open_output
from longchat_cli.terminal_text import brief

if TYPE_CHECKING:
    from longchat_cli.repl.loop import Repl

_SHOWN = 20
_FORCE = " --force"
_WRITTEN = (".md", ".markdown", ".txt", ".json", "")
"""Suffixes of files that chats are written to, all but JSON as Markdown."""


def branch(repl: Repl, argument: str) -> None:
    """Go on in a copy, from behind a turn."""
    before, number = _session(repl).id, repl.turn(argument)
    if before is None:
        raise UsageError("nothing was said yet")
    with repl.working("reading") as (progress, cancel):
        done = repl.conversation.branch(number, progress, cancel)
    repl.outcome(done, f"chat {_session(repl).id}: a copy of chat {before} up to turn {number}")


def save(repl: Repl, argument: str) -> None:
    """Name the chat; it is kept anyhow."""
    session = _session(repl)
    if not repl.conversation.turns:
        raise UsageError("nothing was said yet")
    session.title = argument or session.title
    if session.save(repl.conversation.chat(), len(repl.conversation.turns)):
        repl.console.notice(
            f"chat {session.id}: {brief(session.title)}; `longchat chat --resume {session.id}`"
        )


def load(repl: Repl, argument: str) -> None:
    """Go on with another chat."""
    if not argument:
        raise UsageError("which chat?", "", "/sessions lists them")
    before, number = repl.conversation.session, Sessions().find(argument)
    if before and before.id == number:
        raise UsageError(f"chat {number} is this one")
    made = repl.workbench.chat(str(number))
    if not repl.begin(made[0]):
        if made[0].session:
            made[0].session.close()
        repl.outcome(False, "")
        return
    if before:
        before.close()
    repl.conversation, repl.open_engine, repl.options = made


def export(repl: Repl, argument: str) -> None:
    """Write the chat to a file: JSON, or Markdown. One that is there is written over with --force alone."""
    name = argument.removesuffix(_FORCE).strip()
    if not name:
        raise UsageError("to which file?", "", "/export FILE.md, or FILE.json for `longchat sessions import`")
    path, chat = os.path.expanduser(name), repl.conversation.chat()  # noqa: PTH111
    suffix = os.path.splitext(path)[1]  # noqa: PTH122
    if suffix not in _WRITTEN:
        why = f"a chat is written as {', '.join(filter(None, _WRITTEN))}"
        raise UsageError(f"{brief(printable(suffix))} is no format of chats", why)
    if os.path.isfile(path) and not argument.endswith(_FORCE):  # noqa: PTH113
        raise CannotCreate(
            f"cannot write {brief(printable(name))}",
            "it is there already",
            f"{_FORCE.strip()} behind it writes over it",
        )
    named = repl.conversation.session.title if repl.conversation.session else ""
    chat = replace(chat, about=replace(chat.about, title=named or title_of(chat.turns)))
    text = json.dumps(as_json(chat), indent=2) + "\n" if suffix == ".json" else as_markdown(chat)
    try:
        with open_output(path) as file:
            file.write(text)
    except (OSError, ValueError) as error:  # a full device, a NUL in the name
        why = getattr(error, "strerror", None) or str(error)
        raise CannotCreate(f"cannot write {brief(printable(path))}", why) from error
    count = repl.conversation.exchanges
    turns = f"{count:,} turn{'' if count == 1 else 's'}"
    repl.console.notice(f"{turns} written to {printable(path)}")


def sessions(repl: Repl, argument: str) -> None:
    """List the kept chats."""
    current = repl.conversation.session.id if repl.conversation.session else None
    for about in Sessions().ls(_SHOWN):
        mark = "*" if about.id == current else " "
        used = about.updated[:16].replace("T", " ")
        repl.console.say(f"{about.id:>6}{mark} {used}  {about.exchanges:>5} turns  {brief(about.title)}")


def search(repl: Repl, argument: str) -> None:
    """Find turns of any chat by their words."""
    if not argument:
        raise UsageError("which words?", "", "/search WORDS")
    hits = Sessions().search(argument.split(), _SHOWN)
    for hit in hits:
        who = "you" if hit.role == "user" else "answer"
        repl.console.say(f"{hit.session:>6}  turn {hit.number:<5} {who:<6}  {brief(hit.snippet, 100)}")
    if not hits:
        repl.console.notice("no turn has all of these words")


def known(repl: Repl) -> Iterable[tuple[str, str]]:
    """Numbers and titles, for completion."""
    return [(str(about.id), brief(about.title)) for about in Sessions().ls(_SHOWN)]


def _session(repl: Repl) -> Session:
    """Where this chat is kept. Raises UsageError."""
    if repl.conversation.session is None:
        raise UsageError("this chat is not kept", "", "start `longchat chat` without --no-save")
    return repl.conversation.session
