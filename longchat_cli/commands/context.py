"""What commands share when they run: the console, the documents, the engine."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from longchat_cli.commands.options import take
from longchat_cli.errors import InputsSkipped
from longchat_cli.terminal import Console

if TYPE_CHECKING:
    from longchat_cli.ask import MakeFinder, Open
    from longchat_cli.documents import Collection, Options
    from longchat_cli.pages import Store

MOST = 5
"""Notices of one kind that are shown before the rest is counted."""


def current_console() -> Console:
    """The console as the global options want it."""
    meta = click.get_current_context().find_root().meta
    return Console(quiet=bool(meta.get("quiet")), verbose=bool(meta.get("verbose")))


def reading(params: dict[str, Any]) -> Options:
    """How documents are read."""
    from longchat_cli.documents import Options

    return Options(**take(params, ("boilerplate", "include", "exclude")))


def announce(names: Sequence[str], console: Console) -> None:
    """Say which of the documents come over the network. Raises UsageError and Unavailable as `locate`."""
    from longchat_cli.documents import remote
    from longchat_cli.documents.names import printable

    urls = [name for name in names if remote.is_remote(name)]
    for url in urls:  # before anything is said: there may be a password in it
        remote.locate(url)
    for url in urls:
        console.notice(f"fetching {printable(url)}")


def read(names: Sequence[str], console: Console, options: Options | None = None) -> Collection:
    """The documents, with a notice of what was skipped or changed."""
    from longchat_cli import documents

    announce(names, console)
    collection = documents.read(names, stdin=sys.stdin.buffer, options=options)
    notes = [f"{document.name}: {note}" for document in collection.documents for note in document.notes]
    for note in notes[:MOST]:
        console.notice(note)
    if len(notes) > MOST:
        console.notice(f"and {len(notes) - MOST} more such notes: `longchat inspect` lists all")
    if collection.skips:
        shown = ", ".join(f"{skip.name} ({skip.reason})" for skip in collection.skips[:MOST])
        more = len(collection.skips) - MOST
        console.notice(f"skipped {shown}{f' and {more} more' if more > 0 else ''}")
    return collection


def require_all(collection: Collection, strict: bool) -> None:
    """Raises InputsSkipped under --strict when something was skipped."""
    if strict and collection.skips:
        first, count = collection.skips[0], len(collection.skips)
        what = f"{count} input{'s were' if count > 1 else ' was'} skipped"
        raise InputsSkipped(what, f"{first.name}: {first.reason}", "leave --strict out to go on without")


def engine_opener(settings: dict[str, Any], console: Console) -> Open:
    """Opens the model at the first call; later ones share its weights under another method."""
    loaded: list[Any] = []

    def open_engine(method: str, options: Any) -> Any:
        from longchat_cli import local

        if loaded:
            return local.with_method(loaded[0], method, options)
        start = time.perf_counter()
        if not click.get_current_context().find_root().meta.get("debug"):
            import logging

            logging.disable(logging.WARNING)  # libraries log a line per layer and token
        if settings["kernel"] is not None:
            from longchat_cli import kernels

            kernels.force(settings["kernel"])
        quantize = None if settings["quantize"] == "none" else settings["quantize"]
        chosen = take(settings, ("model", "device", "dtype", "compile"))
        engine = local.open_engine(method=method, options=options, quantize=quantize, **chosen)
        console.detail(f"loaded {engine.info.model} in {time.perf_counter() - start:.1f} s")
        for note in engine.info.notes:
            console.detail(note)
        if engine.stepper is not None:
            console.detail(f"decoding: {engine.stepper.about}")
        if console.verbose:
            click.get_current_context().call_on_close(lambda: console.detail(_kernels_served()))
        loaded.append(engine)
        return engine

    return open_engine


def _kernels_served() -> str:
    from longchat_cli import kernels

    calls = ", ".join(f"{name} {count:,}" for name, count in kernels.served.items())
    return f"attention calls served by: {calls or 'no kernel'}"


def page_store(params: dict[str, Any], names: Sequence[str], console: Console) -> Store | None:
    """Where what reading leaves behind is kept; None where it is not."""
    from longchat_cli.pages import SMALL, Store

    wanted = params["cache"]
    if wanted is False or (wanted is None and "-" in names):
        return None
    about = {"documents": [known_as(name) for name in names]}
    return Store(budget=params["cache_size"], console=console, about=about, least=0 if wanted else SMALL)


def known_as(name: str) -> str:
    """What a document is called in the cache, from wherever it is named."""
    return name if name == "-" or "://" in name else os.path.abspath(name)  # noqa: PTH100


def estimate(
    opener: Open,
    collection: Collection,
    asked: tuple[str, dict[str, Any]],
    room: int,
    params: dict[str, Any],
    console: Console,
) -> None:
    """Print what reading will cost under a method with its options; `room`: tokens of question and answer."""
    import shutil

    from longchat_cli import estimate as estimating
    from longchat_cli.config import cache_dir, private
    from longchat_cli.errors import Unavailable
    from longchat_cli.models import load
    from longchat_cli.recall.semantic import Encoder

    engine: Any = opener("full", {})
    ids = [id for document in collection.documents for id in engine.tokenizer.encode(document.text)]
    name, options = asked
    if name == "auto":
        name = "full" if len(ids) + room <= engine.info.window else "recall"
    try:
        encode = Encoder(load.find_encoder(console.notice)).encode
    except Unavailable:
        encode = None
    config = load.find(params["model"], console.notice).config
    disk = min(params["cache_size"], shutil.disk_usage(private(cache_dir())).free)
    with console.progress("measuring"):
        report = estimating.compare(collection.documents, ids, (name, options), engine, config, encode, disk)
    click.echo(report)


def finder_maker(console: Console, store: Store | None) -> MakeFinder:
    """Finds passages with the engine that reads them; indexes are kept in `store`."""
    from longchat_cli import ask as asking

    def make(engine: Any, documents: Any, options: Any) -> Any:
        return asking.local_finder(engine, documents, options, console, store)

    return make
