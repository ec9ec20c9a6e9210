"""`longchat bench`."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import click

from longchat_cli.commands.context import current_console
from longchat_cli.commands.framework import Group
from longchat_cli.commands.options import MODEL, Name, Sizes, model_options, take

PEERS = ["llama.cpp"]
threads_option = click.option(
    "--threads", type=int, help="Threads of every process measured. [default: the CPUs there are]"
)
json_option = click.option("--json", "json_file", metavar="FILE", help="Every run, as JSON; '-': on stdout.")
markdown_option = click.option(
    "--markdown", metavar="FILE", help="Put the tables into their section of a page, docs/benchmarks.md."
)


@click.group("bench", cls=Group)
def bench() -> None:
    """Measure speed and memory, here and now; everything runs in processes of its own."""


@bench.command("speed")
@click.option("--peer", type=Name(PEERS), help="Measure this program beside longchat, in turn.")
@click.option(
    "--peer-models",
    multiple=True,
    metavar="FILE",
    help="GGUF files it reads; repeatable. [default: the model's own file, and as Q4_0 and Q8_0]",
)
@click.option("--lengths", type=Sizes(), default="512,2k,8k", show_default=True, help="Tokens per prompt.")
@click.option(
    "--methods", default="full", show_default=True, metavar="NAMES", help="full,sink:window=1024,recycled,..."
)
@click.option("--repeat", type=int, default=3, show_default=True, help="Runs of each.")
@threads_option
@click.option(
    "--data", multiple=True, metavar="FILE", help="A text to read. [default: one of longchat's own]"
)
@json_option
@click.option("--plot", metavar="DIR", help="step.png and memory.png (needs matplotlib).")
@markdown_option
@model_options
def speed(
    peer: str | None,
    json_file: str | None,
    plot: str | None,
    markdown: str | None,
    threads: int | None,
    **params: Any,
) -> None:
    """Time to the first token, prefill, decode and memory, by method and length.

    With --peer also of another program, its fastest form in each cell, and the ratios. Options of a method
    follow its name: "sink:window=1024".
    """
    from longchat_cli.benchmark import peer as peers
    from longchat_cli.benchmark import report
    from longchat_cli.benchmark import speed as measuring
    from longchat_cli.evaluation.haystack import load_text
    from longchat_cli.evaluation.measure import named, names
    from longchat_cli.models import load
    from longchat_cli.tokens import Tokenizer

    console = current_console()
    plan = measuring.Plan(params["lengths"], params["repeat"], threads or measuring.cores())
    methods = {method: named(method) for method in names(params["methods"])}
    if plot:
        report.require_plots()
    ready = load.find(params["model"], console.notice)
    text = load_text([*map(Path, params["data"])] or [measuring.TEXT])
    contenders = measuring.ours(methods, _engine(params), plan.threads)
    if peer:
        files = [*map(Path, params["peer_models"])]
        contenders += measuring.peers(peers.forms(ready.source, files, plan.threads), plan.threads)
    result: dict[str, Any] = {
        "command": shlex.join(["longchat", *sys.argv[1:]]),
        "plan": {"repeat": plan.repeat, "decoded": plan.decoded, "threads": plan.threads},
        "machine": measuring.machine(plan.threads),
        "rows": [],
    }
    ids = Tokenizer.from_dir(ready.path).encode(text or "")
    for row in measuring.rows(plan, contenders, ids, console.notice):
        result["rows"].append(row)
        if json_file and json_file != "-":
            _keep(json_file, result)  # as it comes: an interrupted run leaves what it has measured
    if plot:
        console.notice(f"plots: {', '.join(map(str, report.plot(result, Path(plot))))}")
    if markdown:
        report.insert(Path(markdown), "speed", report.page(result, result["command"]))
    click.echo(json.dumps(result, ensure_ascii=False) if json_file == "-" else report.show(result))


def _engine(params: dict[str, Any]) -> dict[str, Any]:
    engine = take(params, MODEL)
    return engine | {"quantize": None if engine["quantize"] == "none" else engine["quantize"]}


def _keep(file: str, result: dict[str, Any]) -> None:
    from longchat_cli.errors import CannotCreate

    try:
        Path(file).write_text(json.dumps(result, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise CannotCreate(f"cannot write {file}", error.strerror or str(error)) from error


@bench.command("kernels", context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def kernels(ctx: click.Context, arguments: tuple[str, ...]) -> None:
    """Check and time every attention kernel on a GPU: `python -m longchat_cli.kernels.bench`."""
    from longchat_cli.kernels.bench import main

    ctx.exit(main(arguments))
