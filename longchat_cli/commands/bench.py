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
@click.option("--decode", type=int, default=96, show_default=True, help="Tokens decoded after each prompt.")
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

    console = current_console()
    threads = threads or measuring.cores()
    plan = measuring.Plan(params["lengths"], params["repeat"], threads, params["decode"])
    methods = _methods(params["methods"])
    if plot:
        report.require_plots()
    ready, tokenizer, text = _subject(params)
    ids = tokenizer.encode(text)
    contenders = measuring.ours(methods, _engine(params), plan.threads)
    if peer:
        files = [*map(Path, params["peer_models"])]
        forms = peers.forms(ready.source, files, plan.threads)
        contenders += measuring.peers(forms, peers.waiting(forms[0], ids, plan.threads))
    result = _result(plan.threads, {"repeat": plan.repeat, "decode": plan.decode})
    for row in measuring.rows(plan, contenders, ids, console.notice):
        result["rows"].append(row)
        _keep(json_file, result)
    if plot:
        console.notice(f"plots: {', '.join(map(str, report.plot(result, Path(plot))))}")
    if markdown:
        report.insert(Path(markdown), "speed", report.page(result, result["command"]))
    click.echo(json.dumps(result, ensure_ascii=False) if json_file == "-" else report.show(result))


def _engine(params: dict[str, Any]) -> dict[str, Any]:
    engine = take(params, MODEL)
    return engine | {"quantize": None if engine["quantize"] == "none" else engine["quantize"]}


def _methods(text: str) -> dict[str, tuple[str, dict[str, Any]]]:
    """Name and options of each method, by what the user calls it."""
    from longchat_cli.evaluation.measure import named, names

    return {method: named(method) for method in names(text)}


def _subject(params: dict[str, Any]) -> tuple[Any, Any, str]:
    """The model's ready form, its tokenizer, and the text to read."""
    from longchat_cli.benchmark.speed import TEXT
    from longchat_cli.errors import UsageError
    from longchat_cli.evaluation.haystack import load_text
    from longchat_cli.models import load
    from longchat_cli.tokens import Tokenizer

    ready = load.find(params["model"], current_console().notice)
    text = load_text([*map(Path, params["data"])] or [TEXT])
    if not text:
        raise UsageError("there is nothing to read", "--data names no .txt file")
    return ready, Tokenizer.from_dir(ready.path), text


def _result(threads: int, plan: dict[str, Any]) -> dict[str, Any]:
    from longchat_cli.benchmark.speed import machine

    command = shlex.join(["longchat", *sys.argv[1:]])
    return {"command": command, "plan": plan, "machine": machine(threads), "rows": []}


def _keep(file: str | None, result: dict[str, Any]) -> None:
    """Written after every run: an interrupted one leaves what it has measured."""
    from longchat_cli.errors import CannotCreate

    if file in (None, "-"):
        return
    assert file is not None
    try:
        Path(file).write_text(json.dumps(result, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise CannotCreate(f"cannot write {file}", error.strerror or str(error)) from error


@bench.command("start")
@click.option("--repeat", type=int, default=3, show_default=True, help="Runs of each.")
@click.option(
    "--streams",
    default="sink,window,lm-infinite",
    show_default=True,
    metavar="NAMES",
    help="Methods, or '' for none.",
)
@click.option("--lengths", type=Sizes(), default="4k,128k,1M", show_default=True, help="Tokens of a stream.")
@click.option(
    "--data",
    multiple=True,
    metavar="FILE",
    help="A book: `recall` reads half and all of it. [default: no book]",
)
@threads_option
@json_option
@markdown_option
@model_options
def start(json_file: str | None, markdown: str | None, threads: int | None, **params: Any) -> None:
    """What one waits for at the shell: help, a first token, a book read by recall; steps far into a stream.

    The model reads the first and last 2,048 tokens of a stream; those between only move the state on.
    """
    from longchat_cli.benchmark import report
    from longchat_cli.benchmark import start as measuring
    from longchat_cli.benchmark.speed import cores

    console = current_console()
    plan = measuring.Plan(
        model=params["model"],
        engine=_engine(params),
        threads=threads or cores(),
        streams=_methods(params["streams"]) if params["streams"] else {},
        book=bool(params["data"]),
        **take(params, ("repeat", "lengths")),
    )
    _, tokenizer, text = _subject(params)
    result = _result(plan.threads, {"repeat": plan.repeat})
    for row in measuring.rows(plan, text, tokenizer.encode):
        result["rows"].append(row)
        console.notice(f"{row['what']}: {report.Spread.of(row['values']).show()} {row['unit']}")
        _keep(json_file, result)
    shown = measuring.show(result["rows"])
    if markdown:
        report.insert(Path(markdown), "start", f"`{result['command']}`\n\n{shown}")
    click.echo(json.dumps(result, ensure_ascii=False) if json_file == "-" else shown)


@bench.command("kernels", context_settings={"ignore_unknown_options": True})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def kernels(ctx: click.Context, arguments: tuple[str, ...]) -> None:
    """Check and time every attention kernel on a GPU.

    The arguments are those of `python -m longchat_cli.kernels.bench`; `bench kernels -- --help` shows them.
    """
    from longchat_cli.kernels.bench import main

    ctx.exit(main(arguments))
