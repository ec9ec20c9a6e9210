"""`longchat schema`."""

from __future__ import annotations

from pathlib import Path

import click

from longchat_cli.commands import configured
from longchat_cli.commands.framework import command
from longchat_cli.errors import UsageError

FOLDER = Path(__file__).parent.parent / "schemas"


def complete_schemas(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """The first word of each command that has one."""
    return sorted({name.partition(".")[0] for name in names() if name.startswith(incomplete)})


@command("schema")
@click.argument("words", nargs=-1, metavar="[COMMAND]...", shell_complete=complete_schemas)
def schema(words: tuple[str, ...]) -> None:
    """Print the JSON Schema of what a command prints with --json; without a command, which have one.

    `longchat schema ask`, `longchat schema models list`.
    """
    if not words:
        click.echo("\n".join(name.replace(".", " ") for name in names()))
        return
    name = ".".join(words)
    if name not in names():
        hint = configured.meant(name, names()) or "`longchat schema` lists the commands that have one"
        raise UsageError(f"there is no schema for '{' '.join(words)}'", "", hint.replace(".", " "))
    click.echo((FOLDER / f"{name}.json").read_text(encoding="utf-8"), nl=False)


def names() -> list[str]:
    """Of the schemas there are: ask, models.list."""
    return sorted(entry.name.removesuffix(".json") for entry in FOLDER.iterdir())
