"""`longchat inspect`."""

from __future__ import annotations

import sys
from typing import Any

import click

from longchat_cli.commands.context import announce, current_console, reading, require_all
from longchat_cli.commands.framework import command
from longchat_cli.commands.options import Size, complete_files, complete_models, reading_options
from longchat_cli.terminal_text import json_text


@command("inspect")
@click.argument("names", nargs=-1, metavar="DOC...", required=True, shell_complete=complete_files)
@click.option(
    "--model",
    metavar="NAME",
    shell_complete=complete_models,
    help="Whose tokens are counted. [default: smollm2, see `models`]",
)
@click.option("--token-budget", type=Size(), metavar="N", help="Exit 6 when there are more tokens.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@reading_options
def inspect(
    names: tuple[str, ...], model: str | None, token_budget: int | None, as_json: bool, **params: Any
) -> None:
    """What would be read of files, folders, archives, URLs: tokens, encodings, skips and why, memory.

    The model's tokenizer counts; its weights are not loaded.
    """
    from longchat_cli import documents, inspection
    from longchat_cli.models import load
    from longchat_cli.tokens import Tokenizer

    console = current_console()
    announce(names, console)
    collection = documents.read(names, stdin=sys.stdin.buffer, options=reading(params))
    ready = load.find(model, console.notice)
    tokenizer = Tokenizer.from_dir(ready.path)
    with console.progress("counting") as bar:
        report = inspection.inspect(
            collection, ready.name, ready.window, ready.config, lambda text: len(tokenizer.encode(text)), bar
        )
    click.echo(json_text(report, indent=2) if as_json else inspection.show(report))
    require_all(collection, params["strict"])
    inspection.require_budget(report, token_budget)
