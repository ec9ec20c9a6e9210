"""`longchat logs`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click
from click.shell_completion import CompletionItem

from longchat_cli import settings
from longchat_cli.commands.context import current_console
from longchat_cli.commands.framework import Group
from longchat_cli.errors import UsageError
from longchat_cli.terminal_text import json_text

if TYPE_CHECKING:
    from longchat_cli.logs import Entry, Log

WIDTH = 60
"""Characters of a question in a list."""
count_option = click.option(
    "--n", type=click.IntRange(1), default=20, show_default=True, help="Entries at most."
)
json_option = click.option("--json", "as_json", is_flag=True, help="As JSON.")


def complete_ids(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The newest entries."""
    newest = [(str(entry.id), entry.question) for entry in _log().last(100)]
    return [CompletionItem(id, help=question) for id, question in newest if id.startswith(incomplete)]


@click.group("logs", cls=Group)
def logs() -> None:
    """Look up what was asked and answered; it is kept on this machine, for you alone.

    `ask` and `chat` log their answers unless they are told --no-log, or `logs off` has said so for good.
    """


@logs.command("list")
@count_option
@json_option
def list_(n: int, as_json: bool) -> None:
    """The newest entries, the newest last."""
    _show_rows(_log().last(n), as_json, "the log is empty")


@logs.command("search")
@click.argument("words", nargs=-1, required=True)
@count_option
@json_option
def search(words: tuple[str, ...], n: int, as_json: bool) -> None:
    """Entries with all of the words, or words that begin like them."""
    _show_rows(_log().search(words, n), as_json, "no entry has all of these words")


@logs.command("show")
@click.argument("id", type=int, required=False, shell_complete=complete_ids)
@json_option
def show(id: int | None, as_json: bool) -> None:
    """An entry in full. [default: the newest]"""
    newest = _log().last(1)
    if id is None and not newest:
        current_console().notice("the log is empty")
        return
    entry = newest[0] if id is None else _log().get(id)
    if as_json:
        click.echo(json_text(asdict(entry), indent=2))
        return
    about = ", ".join((entry.time, entry.command, entry.model, entry.method, *entry.documents))
    click.echo(f"{_safe(about)}\n\n> {_safe(entry.question)}\n\n{_safe(entry.answer)}")


@logs.command("rm")
@click.argument("ids", type=int, nargs=-1, shell_complete=complete_ids)
@click.option("--all", "everything", is_flag=True, help="The whole log.")
def rm(ids: tuple[int, ...], everything: bool) -> None:
    """Delete entries; nothing of them stays in the file."""
    if everything == bool(ids):
        raise UsageError("name entries or --all", "", "`longchat logs list` shows them")
    if everything:
        _log().clear()
    else:
        _log().remove(ids)


@logs.command("path")
def path() -> None:
    """Where the log is, whether or not there is one."""
    click.echo(_log().path)


@logs.command("on")
def on() -> None:
    """Log answers again."""
    settings.user_file().drop(["no-log"])
    current_console().notice(f"answers are logged in {_log().path}")


@logs.command("off")
def off() -> None:
    """Log no answer from now on; what is there stays until `logs rm --all`."""
    settings.user_file().put(["no-log"], True)
    current_console().notice(
        "answers are not logged any more; `longchat logs rm --all` deletes those that were"
    )


def _log() -> Log:
    from longchat_cli.logs import Log, default_path

    return Log(default_path())


def _show_rows(entries: Sequence[Entry], as_json: bool, none: str) -> None:
    """The entries a line each, or as JSON; on stderr what it means that there are `none`."""
    if as_json:
        click.echo(json_text([asdict(entry) for entry in entries], indent=2))
        return
    for entry in entries:
        question = " ".join(_safe(entry.question).split())
        shown = question if len(question) <= WIDTH else f"{question[:WIDTH]}..."
        click.echo(f"{entry.id:>6}  {entry.time[:16].replace('T', ' ')}  {entry.command:<5}  {shown}")
    if not entries:
        current_console().notice(none)


def _safe(text: str) -> str:
    from longchat_cli.terminal_text import Sanitizer

    return Sanitizer().feed(text)
