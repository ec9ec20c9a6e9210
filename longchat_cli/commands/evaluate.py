"""`longchat eval`."""

from __future__ import annotations

import json
from typing import Any

import click

from longchat_cli.commands.context import current_console, engine_opener
from longchat_cli.commands.framework import MethodCommand, command
from longchat_cli.commands.options import (
    MODEL,
    Name,
    Size,
    Sizes,
    chance_options,
    complete_files,
    method_option,
    model_options,
    take,
)
from longchat_cli.terminal import Console, Interrupts


@command("eval", cls=MethodCommand)
@click.argument("task")
@method_option("What is evaluated.")
@click.option("--lengths", type=Sizes(), default="2k", show_default=True, help="Tokens per text: 4k,16k,64k.")
@click.option("--n", type=int, default=20, show_default=True, help="Questions at each length.")
@click.option("--per-text", type=int, help="Questions over one text. [default: the task's own number]")
@click.option(
    "--data",
    multiple=True,
    metavar="FILE",
    shell_complete=complete_files,
    help="Books or records to use; repeatable.",
)
@click.option(
    "--overflow", type=Name(["error", "force"]), default="error", show_default=True, help="As for `ask`."
)
@click.option("--max-tokens", type=Size(), help="Longest answer. [default: what the task's answers need]")
@chance_options(temperature=0.0, top_p=1.0, repetition_penalty=1.0, start_penalty=0.0)
@click.option(
    "--seed",
    type=int,
    default=0,
    show_default=True,
    help="The same seed gives the same questions, and the same sampling.",
)
@click.option("--gold", is_flag=True, help="Ask each question of its planted text alone, too.")
@click.option("--rank-only", is_flag=True, help="Find passages and write no answers (recall).")
@click.option(
    "--output",
    "-o",
    metavar="FILE",
    shell_complete=complete_files,
    help="Keep measurements in FILE; a rerun goes on from there (finders, streameval, conversation).",
)
@click.option("--json", "as_json", is_flag=True, help="Every sample and the totals, as JSON.")
@model_options
def evaluate(task: str, method: str, method_options: dict[str, Any], as_json: bool, **params: Any) -> None:
    """Measure a method on a task whose answers are known.

    \b
    needle      one magic number in each text
    lookalike   ten magic numbers of different keys in one text
    values      four magic numbers of one key in each text, asked together
    uuid        one magic value of 32 hexadecimal digits in each text
    digits      one magic number of 64 digits in each text
    varied      twenty differently worded facts in one text
    reworded    ten facts in one text, asked in other words
    lines       the value of one line among many
    naturalqa   natural questions, passages planted in a book (--data)
    perplexity  perplexity by position of a book (--data)
    stream      step time and bytes held along one stream
    streameval  a chat of lines without end, asked for lines further and further back
    streameval-alike  the same, every line a magic number
    streameval-register  the same with LongEval's numbered lines
    conversation  two-turn prompts (--data FILE) typed to one `longchat chat`, beside fresh chats
    finders     ways to find side by side, by length: words, meaning, attention, all (--data)
    repository  where names of Python code are defined, what they return (--data FOLDER)
    book        facts in a whole book (--data): read once, a process for each question
    citations   true and altered statements checked against their text (no model; a book: --data)
    """
    from pathlib import Path

    from longchat_cli.ask import Request
    from longchat_cli.evaluation import run as running
    from longchat_cli.evaluation import subject as evaluated
    from longchat_cli.sampling import Sampling

    console = current_console()
    options = running.Options(
        lengths=params["lengths"],
        n=params["n"],
        seed=params["seed"],
        data=tuple(map(Path, params["data"])),
        per_text=params["per_text"],
        gold=params["gold"],
        output=None if params["output"] is None else Path(params["output"]),
    )
    kind = running.find(task)
    most = kind.answer_tokens if params["max_tokens"] is None else params["max_tokens"]
    sampling = Sampling(max_tokens=most, **take(params, running.CHANCES))
    request = Request((), None, method, method_options, params["overflow"], sampling)
    opener = engine_opener(take(params, MODEL), console)
    words = _words(method, method_options, params)
    subject = running.Subject(len, options=words)
    if kind.needs_model:
        quiet, interrupts = Console(quiet=True), Interrupts()
        subject = evaluated.subject(opener, request, quiet, interrupts, params["rank_only"], words)
    with console.progress(task) as bar:
        result = running.run(task, subject, options, bar or (lambda done, total: None))
    result |= {"method": method, "options": method_options}
    if as_json:
        click.echo(json.dumps(result, ensure_ascii=False))
        return
    if kind.show:
        click.echo(kind.show(result))
        return
    for total in result["totals"]:
        shown = {key: round(value, 4) if isinstance(value, float) else value for key, value in total.items()}
        click.echo("  ".join(f"{key} {value}" for key, value in shown.items() if not isinstance(value, list)))


def _words(method: str, method_options: dict[str, Any], params: dict[str, Any]) -> list[str]:
    """The method and model as they were named, for other commands of longchat."""
    named = {"method": method, **method_options, **take(params, MODEL)}
    given = {name.replace("_", "-"): value for name, value in named.items() if value not in (None, False)}
    return [f"--{name}" if value is True else f"--{name}={value}" for name, value in given.items()]
