"""`longchat methods`."""

from __future__ import annotations

import json
from typing import Any

import click
from click.core import ParameterSource

from longchat_cli.attention import METHODS, method_class
from longchat_cli.commands.context import current_console, engine_opener
from longchat_cli.commands.framework import command
from longchat_cli.commands.options import MODEL, Size, complete_files, complete_methods, model_options, take
from longchat_cli.errors import UsageError


@command("methods")
@click.argument("name", required=False, shell_complete=complete_methods)
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.option("--measure", is_flag=True, help="Measure the methods side by side at the same bytes held.")
@click.option(
    "--methods", "chosen", metavar="NAMES", help="full,sink,recycled stride=5,... [default: all of them]"
)
@click.option(
    "--columns",
    metavar="NAMES",
    help="stream, question tasks of `eval`, TASK@LENGTH, TASK:later (question after the text is compressed). "
    "[default: stream,needle,needle:later,lines@4k]",
)
@click.option("--budget", default="1/8", show_default=True, help="Share of --length that methods may hold.")
@click.option("--length", type=Size(), default="6k", show_default=True, help="Tokens of a text.")
@click.option("--stream", type=Size(), default="8k", show_default=True, help="Tokens of the stream.")
@click.option("--n", type=int, default=20, show_default=True, help="Questions in each column.")
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed gives the same texts.")
@click.option(
    "--data",
    multiple=True,
    metavar="FILE",
    shell_complete=complete_files,
    help="A book, LongEval records; repeatable.",
)
@click.option("--max-tokens", type=Size(), help="Longest answer. [default: what the task's answers need]")
@click.option(
    "--output",
    "-o",
    metavar="FILE",
    shell_complete=complete_files,
    help="Keep measurements in FILE; a rerun goes on from there.",
)
@model_options
def methods(name: str | None, as_json: bool, measure: bool, **params: Any) -> None:
    """What each attention method keeps, forgets and costs; with --measure, how well each does.

    The table gives bytes held after a text, step time and perplexity at the end of a stream against full
    attention's, and questions answered.
    """
    if measure:
        if name is not None:
            raise UsageError(f"--measure takes no name beside it: {name}", "", f"say --methods {name}")
        _measure(params, as_json)
        return
    _require_no_measuring(click.get_current_context())
    classes = {key: method_class(key) for key in (METHODS if name is None else [name])}
    rows = {key: _about(cls) for key, cls in classes.items()}
    if as_json:
        click.echo(json.dumps(rows, ensure_ascii=False, indent=2))
        return
    for key, row in rows.items():
        click.echo(f"{key}: {row['summary']}")
        for heading in ("keeps", "forgets", "cost", "reach"):
            click.echo(f"  {heading + ':':<9}{row[heading]}")
        if name:
            for option in row["options"]:
                click.echo(f"  --{option['name'].replace('_', '-')}  {option['help']} [{option['default']}]")


def _require_no_measuring(context: click.Context) -> None:
    """Refuse options on the command line that only measuring has."""
    for param in context.command.params:
        given = context.get_parameter_source(str(param.name)) is ParameterSource.COMMANDLINE
        if given and param.name in context.params and param.name not in ("name", "as_json", "measure"):
            raise UsageError(f"{param.opts[0]} belongs to --measure", "", "add it, or leave this out")


def _measure(params: dict[str, Any], as_json: bool) -> None:
    from pathlib import Path

    from longchat_cli.evaluation import measure as measuring

    console = current_console()
    chosen = params["chosen"]
    plan = measuring.Plan(
        methods=tuple(METHODS) if chosen is None else measuring.names(chosen),
        columns=measuring.COLUMNS if params["columns"] is None else measuring.names(params["columns"]),
        budget=measuring.share(params["budget"]),
        data=tuple(map(Path, params["data"])),
        **take(params, ("length", "stream", "n", "seed", "max_tokens")),
    )
    output = None if params["output"] is None else Path(params["output"])
    result = measuring.measure(engine_opener(take(params, MODEL), console), plan, output, console)
    click.echo(json.dumps(result, ensure_ascii=False, indent=2) if as_json else measuring.show(result))


def _about(cls: Any) -> dict[str, Any]:
    options = [
        {"name": field.name, "default": field.default, "help": field.metadata.get("help", "")}
        for field in cls.options()
    ]
    return {
        "summary": cls.summary,
        "keeps": cls.keeps,
        "forgets": cls.forgets,
        "cost": cls.cost,
        "reach": "texts of any length" if cls.unlimited else "the model's trained window",
        "options": options,
    }
