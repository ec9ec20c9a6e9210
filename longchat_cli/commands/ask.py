"""`longchat ask`."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from longchat_cli.attention import METHODS
from longchat_cli.commands.context import (
    current_console,
    engine_opener,
    finder_maker,
    read,
    reading,
    require_all,
)
from longchat_cli.commands.framework import MethodCommand, command
from longchat_cli.commands.options import (
    MODEL,
    SAMPLERS,
    Name,
    complete_files,
    model_options,
    reading_options,
    sampling_options,
    take,
)
from longchat_cli.terminal import Interrupts, is_tty, open_output

if TYPE_CHECKING:
    from longchat_cli.ask import Answer, Open, Request
    from longchat_cli.documents import Collection
    from longchat_cli.terminal import Console

CUT = {"loop": "the answer repeated itself and was ended", "length": "the answer was cut at --max-tokens"}


@command("ask", cls=MethodCommand)
@click.argument("words", nargs=-1, metavar="DOC... QUESTION", shell_complete=complete_files)
@click.option(
    "--question", "-q", "questions", multiple=True, metavar="TEXT", help="A question; repeatable, read once."
)
@click.option(
    "--method",
    "-m",
    type=Name(["auto", *METHODS]),
    default="auto",
    show_default=True,
    help="auto: full if everything fits the window, else recall.",
)
@click.option(
    "--overflow",
    type=Name(["error", "force"]),
    default="error",
    show_default=True,
    help="What to do when the text does not fit the method.",
)
@click.option("--system", metavar="TEXT", help="System prompt.")
@click.option(
    "--output",
    "-o",
    metavar="FILE",
    shell_complete=complete_files,
    help="Write the answer to FILE, atomically.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object per question, a line each.")
@click.option("--show-prompt", is_flag=True, help="Print the prompt on stderr, control tokens marked.")
@reading_options
@model_options
@sampling_options(temperature=0.0, top_p=1.0, max_tokens=256)
def ask(
    words: tuple[str, ...],
    questions: tuple[str, ...],
    method: str,
    method_options: dict[str, Any],
    output: str | None,
    as_json: bool,
    **params: Any,
) -> None:
    """Ask about files, folders or standard input.

    The last argument is the question; with -q every argument is a document. Standard input is read for '-',
    or when no document is named and something is piped in.
    """
    from longchat_cli.ask import Request, split_arguments
    from longchat_cli.sampling import Sampling

    console = current_console()
    names, asked = split_arguments(words, questions, is_tty(sys.stdin))
    sampling = Sampling(**take(params, SAMPLERS))
    request = Request(tuple(asked), params["system"], method, method_options, params["overflow"], sampling)
    collection = read(names, console, reading(params))
    require_all(collection, params["strict"])
    opener = engine_opener(take(params, MODEL), console)
    _answer_all(opener, collection, request, console, output, as_json, params["show_prompt"])


def _answer_all(
    opener: Open,
    collection: Collection,
    request: Request,
    console: Console,
    output: str | None,
    as_json: bool,
    show_prompt: bool,
) -> None:
    from longchat_cli import ask as asking
    from longchat_cli.config import format_bytes

    interrupts = Interrupts()
    show = (
        (lambda engine, prompt: click.echo(engine.assembler.show(prompt), err=True)) if show_prompt else None
    )
    with open_output(output) as out:
        emit = (lambda text: None) if as_json else out.write
        answers = asking.ask(
            opener, finder_maker(console), collection, request, emit, console, interrupts, show
        )
        for index, answer in enumerate(answers):
            if as_json:
                out.write(json.dumps(answer.as_json(), ensure_ascii=False) + "\n")
            else:
                out.write(_ending(answer, last=index == len(request.questions) - 1))
            console.notice(answer.evidence())
            if answer.stop in CUT:
                console.notice(CUT[answer.stop])
            held = format_bytes(answer.coverage["bytes"])
            console.detail(f"{answer.usage} {answer.timings}, {held} of keys and values held")
            if answer.cancelled:
                raise KeyboardInterrupt


def _ending(answer: Answer, last: bool) -> str:
    """A newline behind the answer, and an empty line between two."""
    end = "" if answer.answer.endswith("\n") else "\n"
    return end if last else end + "\n"
