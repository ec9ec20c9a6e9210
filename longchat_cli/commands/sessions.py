"""`longchat sessions`."""

from __future__ import annotations

import stat
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from longchat_cli.commands.context import current_console
from longchat_cli.commands.framework import Group
from longchat_cli.commands.options import Name, complete_files
from longchat_cli.errors import BadInput, MissingInput, UsageError
from longchat_cli.terminal_text import json_text

if TYPE_CHECKING:
    from longchat_cli.sessions import About, Chat, Sessions

count_option = click.option(
    "--n", type=click.IntRange(1), default=20, show_default=True, help="So many at most."
)
json_option = click.option("--json", "as_json", is_flag=True, help="As JSON.")


def complete_chats(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The kept chats, the most recently used first."""
    known = [(str(about.id), about.title) for about in _sessions().ls(100)]
    return [CompletionItem(id, help=title) for id, title in known if id.startswith(incomplete)]


chat_argument = click.argument("chat", metavar="[ID]", default="last", shell_complete=complete_chats)


@click.group("sessions", cls=Group)
def sessions() -> None:
    """Look through the chats that were kept; `longchat chat --resume ID` goes on with one.

    They are kept on this machine, for you alone, unless `chat` is told --no-save.
    """


@sessions.command("ls")
@count_option
@json_option
def ls(n: int, as_json: bool) -> None:
    """The chats, the most recently used first."""
    found = _sessions().ls(n)
    if as_json:
        click.echo(json_text([_row(about) for about in found], indent=2))
        return
    for about in found:
        used = about.updated[:16].replace("T", " ")
        click.echo(f"{about.id:>6}  {used}  {about.exchanges:>5} turns  {_line(about.title)}")
    if not found:
        current_console().notice("no chat was kept yet")


@sessions.command("show")
@chat_argument
@json_option
def show(chat: str, as_json: bool) -> None:
    """A chat in full. [default: the last one]"""
    found = _load(chat)
    if as_json:
        turns = [_turn(number // 2 + 1, turn) for number, turn in enumerate(found.turns)]
        click.echo(json_text({**_row(found.about), "turns": turns}, indent=2))
        return
    about = found.about
    click.echo(f"{_line(about.title)}\n{about.created}, {_line(about.model)}, {about.method}")
    for turn in found.turns:
        click.echo(f"\n> {_safe(turn.text)}" if turn.role == "user" else f"\n{_safe(turn.text)}")


@sessions.command("search")
@click.argument("words", nargs=-1, required=True)
@count_option
@json_option
def search(words: tuple[str, ...], n: int, as_json: bool) -> None:
    """Turns with all of the words, or words that begin like them, the best first."""
    hits = _sessions().search(words, n)
    if as_json:
        click.echo(json_text([asdict(hit) for hit in hits], indent=2))
        return
    for hit in hits:
        who = "you" if hit.role == "user" else "answer"
        click.echo(f"{hit.session:>6}  turn {hit.number:<5} {who:<6}  {_line(hit.snippet)}")
    if not hits:
        current_console().notice("no turn has all of these words")


@sessions.command("rm")
@click.argument("chats", nargs=-1, metavar="[ID]...", shell_complete=complete_chats)
@click.option("--all", "everything", is_flag=True, help="All chats.")
def rm(chats: tuple[str, ...], everything: bool) -> None:
    """Delete chats with their states; nothing of them stays in the file."""
    from longchat_cli.pages import Store
    from longchat_cli.sessions import OPENING, known_as

    if everything == bool(chats):
        raise UsageError("name chats or --all", "", "`longchat sessions ls` shows them")
    found = _sessions()
    ids = [about.id for about in found.ls(empty=True)] if everything else [found.find(name) for name in chats]
    if ids:
        found.remove(ids)
    store, names = Store(), {known_as(id) for id in ids} | ({OPENING} if everything else set())
    for reading in store.readings():
        if names & set(reading.documents):
            for entry in reading.entries:
                store.discard(entry.key)


@sessions.command("export")
@chat_argument
@click.option(
    "--format",
    "kind",
    type=Name(["json", "markdown"]),
    default="json",
    show_default=True,
    help="`sessions import` reads JSON.",
)
@click.argument("file", metavar="[FILE]", required=False, shell_complete=complete_files)
@click.option("--output", "-o", metavar="FILE", shell_complete=complete_files, help="Instead of stdout.")
def export(chat: str, kind: str, file: str | None, output: str | None) -> None:
    """Write a chat as JSON or Markdown. [default: the last one]"""
    from longchat_cli.exchange import as_json, as_markdown
    from longchat_cli.terminal import open_output

    if file and output:
        raise UsageError("FILE and --output are both where it is written", "", "name one")
    found = _load(chat)
    text = json_text(as_json(found), indent=2) if kind == "json" else as_markdown(found).rstrip("\n")
    with open_output(file or output) as out:
        out.write(f"{text}\n")


@sessions.command("import")
@click.argument("file", metavar="FILE", shell_complete=complete_files)
def import_(file: str) -> None:
    """Keep the chat of a file that `sessions export` wrote, as a new one; - is standard input.

    Whoever wrote the file decides nothing but what was said: to go on, a model of yours reads the chat.
    """
    from longchat_cli.exchange import from_json

    id = _sessions().add(from_json(_read(file), file))
    current_console().notice(f"it is chat {id} now")
    click.echo(id)


@sessions.command("path")
def path() -> None:
    """Where the chats are, whether or not there are any."""
    click.echo(_sessions().path)


def _read(name: str) -> bytes:
    """A file, or a byte more than any that is read. Raises MissingInput, BadInput."""
    from longchat_cli.documents.names import printable
    from longchat_cli.exchange import LARGEST

    try:
        if name == "-":
            return sys.stdin.buffer.read(LARGEST + 1)
        if not stat.S_ISREG(Path(name).stat().st_mode):  # a device may never end, a pipe never begin
            raise BadInput(f"{printable(name)} is no file", "", "name a file, or - for standard input")
        with Path(name).open("rb") as file:
            return file.read(LARGEST + 1)
    except OSError as error:
        raise MissingInput(f"cannot read {printable(name)}", error.strerror or str(error)) from error


def _sessions() -> Sessions:
    from longchat_cli.sessions import Sessions

    return Sessions()


def _load(name: str) -> Chat:
    found = _sessions()
    return found.load(found.find(name))


def _row(about: About) -> dict[str, Any]:
    names = ("id", "title", "created", "updated", "model", "method", "options", "system", "exchanges")
    return {
        **{name: getattr(about, name) for name in names},
        "parent": about.parent,
        "branched": about.branched,
    }


def _turn(number: int, turn: Any) -> dict[str, Any]:
    names = ("role", "text", "thoughts", "stop", "time", "pinned")
    documents = [document.name for document in turn.documents]
    return {
        "number": number,
        **{name: getattr(turn, name) for name in names},
        "tokens": len(turn.ids),
        "documents": documents,
    }


def _line(text: str) -> str:
    return " ".join(_safe(text).split())


def _safe(text: str) -> str:
    from longchat_cli.terminal_text import Sanitizer

    return Sanitizer().feed(text)
