"""`longchat inspect`: what a model would be given to read. No weights are loaded."""

from __future__ import annotations

import dataclasses
import os.path
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from longchat_cli.attention import METHODS, method_class
from longchat_cli.config import format_bytes
from longchat_cli.documents import Collection
from longchat_cli.engine import Progress
from longchat_cli.errors import OverTokenBudget

Count = Callable[[str], int]
"""Tokens of a text."""


def inspect(
    collection: Collection,
    model: str,
    window: int,
    config: Mapping[str, Any],
    count: Count,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """The object that `inspect --json` prints.

    model, window (tokens), tokens (of all documents), fits (they alone fit the window), ignored (entries);
    files: name, encoding, characters, tokens, notes; skips: name, reason;
    memory: {method: {tokens, bytes}} held once all is read, at most, with the method's default options.
    """
    total = sum(len(document.text) for document in collection.documents)
    done = 0
    files: list[dict[str, Any]] = []
    for document in collection.documents:
        size = len(document.text)
        row = {"name": document.name, "encoding": document.encoding, "characters": size}
        files.append({**row, "tokens": count(document.text), "notes": list(document.notes)})
        done += size
        if progress:
            progress(done, total)
    tokens = sum(file["tokens"] for file in files)
    return {
        "model": model,
        "window": window,
        "tokens": tokens,
        "fits": tokens <= window,
        "files": files,
        "skips": [dataclasses.asdict(skip) for skip in collection.skips],
        "ignored": collection.ignored,
        "memory": {name: _memory(name, tokens, window, config) for name in METHODS},
    }


def require_budget(report: Mapping[str, Any], budget: int | None) -> None:
    """Raise OverTokenBudget when the documents have more tokens than `budget`."""
    if budget is not None and report["tokens"] > budget:
        what = f"the documents have {report['tokens']:,} tokens"
        raise OverTokenBudget(what, f"--token-budget is {budget:,}", "leave some out with --exclude")


def show(report: Mapping[str, Any]) -> str:
    """The report for people: a tree of files with their tokens, what was left out, memory."""
    lines = list(_tree(report["files"]))
    for file in report["files"]:
        lines += [f"{file['name']}: {note}" for note in file["notes"]]
    lines += [f"skipped {skip['name']}: {skip['reason']}" for skip in report["skips"]]
    if report["ignored"]:
        lines.append(f"{report['ignored']:,} left out by ignore files, --include or --exclude")
    tokens, window = report["tokens"], report["window"]
    verdict = (
        f"{window - tokens:,} are left" if report["fits"] else f"{tokens - window:,} too many: recall reads"
    )
    verdict += " for question and answer" if report["fits"] else " the passages that a question needs"
    lines += ["", f"{tokens:,} tokens by {report['model']}, window {window:,}: {verdict}"]
    lines.append("keys and values held once all is read, at most:")
    return "\n".join([*lines, *_sizes(report["memory"])])


def _memory(name: str, tokens: int, window: int, config: Mapping[str, Any]) -> dict[str, int]:
    from longchat_cli.models.memory import kv_bytes

    held = tokens if (limit := most(name, window)) is None else min(tokens, limit)
    return {"tokens": held, "bytes": kv_bytes(config, held)}


def most(name: str, window: int, options: Mapping[str, Any] | None = None) -> int | None:
    """Tokens that a method holds at most, whatever it read; None where that grows with the text."""
    cls = method_class(name)
    fields = dataclasses.fields(cls)
    if name == "recall":
        return window
    if cls.keeps.startswith("every token") or not any(field.metadata.get("budget") for field in fields):
        return None
    holding = [field.name for field in fields if field.metadata.get("budget") or field.name == "sinks"]
    method = cls.build(options or {})
    return sum(getattr(method, option) for option in holding)


def _sizes(memory: Mapping[str, Mapping[str, int]]) -> Iterator[str]:
    """One line per size, with the methods that have it, the largest first."""
    groups: dict[tuple[int, int], list[str]] = {}
    for name, row in memory.items():
        groups.setdefault((row["bytes"], row["tokens"]), []).append(name)
    for (size, tokens), names in sorted(groups.items(), reverse=True):
        yield f"  {format_bytes(size):>10}  {tokens:>10,} tokens  {', '.join(names)}"


def _tree(files: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Files below their folders, each with its tokens; a folder has the sum."""
    paths = [PurePath(file["name"]).parts for file in files]
    sums: Counter[tuple[str, ...]] = Counter()
    for path, file in zip(paths, files, strict=True):
        sums.update({path[:depth]: file["tokens"] for depth in range(1, len(path))})
    shared = len(os.path.commonprefix([path[:-1] for path in paths]))
    if shared:
        root = paths[0][:shared]
        yield _row(0, str(PurePath(*root) / "_")[:-1], sums[root], "")
    indent, shown = min(shared, 1) - shared, paths[0][:shared]
    for path, file in zip(paths, files, strict=True):
        folders = path[:-1]
        for depth in range(len(os.path.commonprefix([shown, folders])), len(folders)):
            folder = path[: depth + 1]
            yield _row(depth + indent, folder[-1].rstrip("/") + "/", sums[folder], "")
        yield _row(len(folders) + indent, path[-1], file["tokens"], file["encoding"])
        shown = folders


def _row(depth: int, name: str, tokens: int, encoding: str) -> str:
    return f"{tokens:>12,}  {encoding:<10}  {'  ' * depth}{name}"
