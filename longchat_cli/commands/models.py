"""`longchat models`."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from longchat_cli.commands.context import current_console
from longchat_cli.commands.framework import Group
from longchat_cli.commands.options import complete_models
from longchat_cli.errors import one_line
from longchat_cli.terminal_text import json_text


@click.group("models", cls=Group)
def models() -> None:
    """List, pull and choose models."""


@models.command("list")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def models_list(as_json: bool) -> None:
    """Every model longchat knows, and which are here."""
    from longchat_cli.config import format_bytes
    from longchat_cli.models import catalog

    entries = catalog.entries()
    if as_json:
        rows = [{**dataclasses.asdict(e), "path": str(e.path) if e.path else None} for e in entries]
        click.echo(json_text(rows, indent=2))
        return
    for entry in entries:
        mark = "*" if entry.default else " "
        state = "installed" if entry.installed else "not pulled"
        size = format_bytes(entry.size) if entry.size else ""
        click.echo(f"{mark} {entry.name:<14} {size:>10}  {state:<10}  {entry.title}, {entry.licence}")


@models.command("pull")
@click.argument("name", shell_complete=complete_models)
def models_pull(name: str) -> None:
    """Fetch a model, verify it and keep it."""
    from longchat_cli.models import fetch

    console = current_console()
    path = fetch.pull(name, console.notice)
    console.notice(f"{name} is at {path}")


@models.command("info")
@click.argument("name", shell_complete=complete_models)
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def models_info(name: str, as_json: bool) -> None:
    """What is known about a model."""
    from longchat_cli.models import catalog

    about = catalog.info(name)
    if as_json:
        click.echo(json_text(about, indent=2))
        return
    for key, value in about.items():
        if value not in ("", None):
            click.echo(f"{key.replace('_', ' ') + ':':<16}{_plain(value)}")


def _plain(value: Any) -> str:
    """A value of `models info` as a person reads it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{name} {text}" for name, text in value.items())
    return one_line(", ".join(value) if isinstance(value, list) else str(value))


@models.command("remove")
@click.argument("name", shell_complete=complete_models)
def models_remove(name: str) -> None:
    """Delete a pulled model and what was made of it."""
    from longchat_cli.config import format_bytes
    from longchat_cli.models import catalog

    removed = catalog.remove(name)
    console = current_console()
    console.notice(f"removed {name}, {format_bytes(removed.bytes)} freed")
    if removed.note:
        console.notice(removed.note)


@models.command("default")
@click.argument("name", required=False, shell_complete=complete_models)
def models_default(name: str | None) -> None:
    """Show the default model, or choose it."""
    from longchat_cli.models import catalog

    if name is None:
        click.echo(catalog.default())
        return
    catalog.set_default(name)
    current_console().notice(f"the default model is {catalog.default()}")
