"""`longchat chat`."""

from __future__ import annotations

from typing import Any

import click

from longchat_cli.attention import METHODS
from longchat_cli.commands.context import current_console, engine_opener, read
from longchat_cli.commands.framework import MethodCommand, command
from longchat_cli.commands.options import (
    MODEL,
    SAMPLERS,
    Name,
    complete_files,
    log_option,
    model_options,
    sampling_options,
    take,
)


@command("chat", cls=MethodCommand)
@click.option(
    "--method",
    "-m",
    type=Name([name for name in METHODS if name != "recall"]),
    default="sink",
    show_default=True,
    help="Attention method; `longchat methods` explains them.",
)
@click.option(
    "--with",
    "documents",
    multiple=True,
    metavar="DOC",
    shell_complete=complete_files,
    help="Start from a document; repeatable.",
)
@click.option("--system", metavar="TEXT", help="System prompt; it is never forgotten.")
@click.option(
    "--keys", type=Name(["emacs", "vi"]), default="emacs", show_default=True, help="How lines are edited."
)
@click.option("--plain", is_flag=True, help="Show answers as they are: no colours for their Markdown.")
@log_option
@model_options
@sampling_options(temperature=0.2, top_p=0.9, max_tokens=1024)
def chat(documents: tuple[str, ...], method: str, method_options: dict[str, Any], **params: Any) -> None:
    """Talk with a model, without end.

    Text piped in is a turn a line, and the chat ends with it. `--with -` reads a document from standard
    input and the keyboard from the terminal. Ctrl-C stops an answer, twice leaves, Ctrl-D leaves.
    """
    from longchat_cli import repl
    from longchat_cli.logs import Entry, Recorder
    from longchat_cli.sampling import Sampling

    console = current_console()
    sampling = Sampling(**take(params, SAMPLERS))
    collection = read(documents, console) if documents else None
    record = Recorder(params["no_log"], console)

    def keep(model: str, method: str, question: str, answer: str, stop: str) -> None:
        record(Entry("chat", model, method, question, answer, stop, documents))

    def open_model(name: str) -> Any:
        return engine_opener({**take(params, MODEL), "model": name}, console)

    repl.run(
        engine_opener(take(params, MODEL), console),
        method=method,
        options=method_options,
        system=params["system"],
        documents=collection.documents if collection else [],
        sampling=sampling,
        console=console,
        keyboard="/dev/tty" if "-" in documents else None,
        record=keep,
        workbench=repl.Workbench(open_model, lambda names: read(names, console)),
        keys=params["keys"],
        plain=params["plain"],
    )
