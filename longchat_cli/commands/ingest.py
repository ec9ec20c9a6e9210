"""`longchat ingest`."""

from __future__ import annotations

import time
from typing import Any

import click

from longchat_cli.commands.context import (
    current_console,
    engine_opener,
    estimate,
    finder_maker,
    page_store,
    read,
    reading,
    require_all,
)
from longchat_cli.commands.framework import MethodCommand, command
from longchat_cli.commands.options import (
    MODEL,
    Size,
    Words,
    cache_size_option,
    complete_files,
    estimate_option,
    method_option,
    model_options,
    overflow_option,
    reading_options,
    take,
)
from longchat_cli.errors import StorageError
from longchat_cli.terminal import Interrupts


@command("ingest", cls=MethodCommand)
@click.argument("names", nargs=-1, metavar="DOC...", required=True, shell_complete=complete_files)
@method_option("As `ask` will have it; auto: full if everything fits the window, else recall.")
@overflow_option
@click.option("--system", type=Words(), metavar="TEXT", help="System prompt, as `ask` will have it.")
@click.option(
    "--max-tokens",
    type=Size(),
    default=256,
    show_default=True,
    help="Longest answer, as `ask` will have it: text and answer must fit the window to be read in full.",
)
@cache_size_option
@estimate_option
@reading_options
@model_options
def ingest(names: tuple[str, ...], method: str, method_options: dict[str, Any], **params: Any) -> None:
    """Read documents now and keep what that leaves behind, for questions later.

    `ask` with the same documents, method and system prompt begins where this ended. Interrupted, it goes on
    where it was; a document that changed is read from the change on.
    """
    from longchat_cli import ask as asking
    from longchat_cli.config import format_bytes
    from longchat_cli.sampling import Sampling

    console = current_console()
    collection = read(names, console, reading(params))
    require_all(collection, params["strict"])
    store = page_store({**params, "cache": True}, names, console)
    assert store is not None
    request = asking.Request(
        (),
        params["system"],
        method,
        method_options,
        params["overflow"],
        Sampling(max_tokens=params["max_tokens"]),
        store=store,
    )
    opener = engine_opener(take(params, MODEL), console)
    if params["estimate"]:
        estimate(opener, collection, (method, method_options), params["max_tokens"], params, console)
        return
    start = time.perf_counter()
    for _ in asking.ask(
        opener, finder_maker(console, store), collection, request, lambda text: None, console, Interrupts()
    ):
        pass
    tokens, kept = store.about["tokens"], format_bytes(store.written)
    seconds = time.perf_counter() - start
    console.notice(f"{store.about['method']}: {tokens:,} tokens in {seconds:.1f} s, {kept} newly kept")
    if store.failure:
        do = f"make room in {store.root} and run it again"
        raise StorageError("not all of what was read is kept", store.failure, do)
