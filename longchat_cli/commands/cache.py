"""`longchat cache`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from longchat_cli.commands.context import current_console, known_as
from longchat_cli.commands.framework import Group
from longchat_cli.commands.options import Size, complete_files
from longchat_cli.errors import BadInput, MissingInput, UsageError
from longchat_cli.terminal_text import json_text

if TYPE_CHECKING:
    from longchat_cli.pages import Reading, Store


@click.group("cache", cls=Group)
def cache() -> None:
    """See and clear what was kept of documents that were read."""


@cache.command("ls")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def cache_ls(as_json: bool) -> None:
    """What is kept, the most recently used first."""
    from longchat_cli.config import format_bytes
    from longchat_cli.documents.names import printable

    readings = _store().readings()
    if as_json:
        click.echo(json_text([_row(reading) for reading in readings], indent=2))
        return
    for reading in readings:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(reading.used))
        names = ", ".join(map(printable, reading.documents))
        size = format_bytes(reading.bytes)
        what = (
            f"{reading.method:<8} {names}"
            if names
            else f"{reading.method}: `longchat cache verify` deletes them"
        )
        click.echo(f"{size:>10}  {len(reading.entries):>6,} pages  {used}  {what}")
    total = format_bytes(sum(reading.bytes for reading in readings))
    current_console().notice(f"{total} in all, in {_store().root}")


def _row(reading: Reading) -> dict[str, object]:
    return {
        "documents": list(reading.documents),
        "model": reading.model,
        "method": reading.method,
        "pages": len(reading.entries),
        "bytes": reading.bytes,
        "used": round(reading.used, 3),
    }


@cache.command("rm")
@click.argument("names", nargs=-1, metavar="[DOC]...", shell_complete=complete_files)
@click.option("--all", "everything", is_flag=True, help="Of all documents.")
def cache_rm(names: tuple[str, ...], everything: bool) -> None:
    """Delete what was kept of documents, named as they were when they were read."""
    from longchat_cli.config import format_bytes

    if bool(names) == everything:
        raise UsageError("name documents, or --all", "", "`longchat cache ls` shows what is kept")
    store = _store()
    wanted = {*names, *map(known_as, names)}  # "chat 3" is no file
    readings = [r for r in store.readings() if everything or wanted & set(r.documents)]
    if not readings and not everything:
        raise MissingInput(f"nothing is kept of {', '.join(names)}", "", "`longchat cache ls` shows what is")
    freed = sum(store.discard(entry.key) for reading in readings for entry in reading.entries)
    current_console().notice(f"{format_bytes(freed)} freed")


@cache.command("prune")
@click.option("--cache-size", type=Size(), default="10GiB", show_default=True, help="Most that is left.")
def cache_prune(cache_size: int) -> None:
    """Delete what was not used for longest until the rest fits."""
    from longchat_cli.config import format_bytes

    store = _store()
    before = sum(entry.bytes for entry in store.entries())
    left = store.prune(cache_size)
    current_console().notice(f"{format_bytes(before - left)} freed, {format_bytes(left)} left")


@cache.command("verify")
def cache_verify() -> None:
    """Read every page; exit 65 when one was damaged. Damaged ones are deleted and made anew when needed."""
    store = _store()
    whole, damaged = store.verify()
    current_console().notice(f"{whole:,} pages are whole")
    if damaged:
        left = [key for key in damaged if store.has(key)]
        if left:
            raise BadInput(f"{store.path(left[0])} is damaged", "it cannot be deleted", "delete it yourself")
        pages = f"{len(damaged):,} damaged page{'s were' if len(damaged) > 1 else ' was'} deleted"
        raise BadInput(pages, "", "made anew when needed")


@cache.command("path")
def cache_path() -> None:
    """Where it is kept."""
    click.echo(_store().root)


def _store() -> Store:
    from longchat_cli.pages import Store

    return Store()
