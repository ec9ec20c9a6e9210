"""`longchat bench start`: what a user waits for at the shell, and steps far into a stream."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from longchat_cli.benchmark.process import Died, Row, ask
from longchat_cli.benchmark.report import Spread
from longchat_cli.terminal_text import table

PROGRAM = (sys.executable, "-m", "longchat_cli")
STREAMS = (sys.executable, "-m", "longchat_cli.benchmark.streams")
QUESTION = "What is this text about?"
PROMPT = 500
"""Tokens of the prompt whose first token is waited for."""
AROUND = 60
"""Of these, about so many are the template's and the question's."""


Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True)
class Plan:
    """What to measure: `repeat` runs of each with `threads`; `book`: whether the text is a book to search."""

    model: str | None
    engine: Row
    threads: int
    repeat: int
    book: bool
    streams: Mapping[str, tuple[str, Row]]
    lengths: tuple[int, ...]


def rows(plan: Plan, text: str, encode: Encode, program: Sequence[str] = PROGRAM) -> Iterator[Row]:
    """A row for each figure as it comes: what, unit, and the values of the runs. Raises Died."""
    shell = _Shell(program, plan)
    yield _row("`longchat --help`", "s", [shell.help() for _ in range(plan.repeat)])
    ids, read = _encoded(text, encode, plan.repeat)
    yield _row(f"tokenizing {len(text.encode()) / 1e6:.2f} MB", "MB/s", read)
    size = int((PROMPT - AROUND) * len(text) / len(ids))
    parts = [text[start : start + size] for start in range(0, plan.repeat * size, size)]
    yield _row(
        f"first token of a question of {PROMPT} tokens", "s", [shell.first_token(part) for part in parts]
    )
    for share in (2, 1) if plan.book else ():
        part = text[: len(text) // share]
        what = f"`recall` reading {len(ids) // share:,} tokens"
        yield _row(what, "s", [shell.recall(_turned(part, run)) for run in range(plan.repeat)])
    for called, (method, options) in plan.streams.items():
        job = {"engine": plan.engine, "method": method, "options": options, "threads": plan.threads}
        for row in ask(STREAMS, job | {"ids": list(ids), "lengths": plan.lengths}, shell.environment)["rows"]:
            values = [row[name] * 1e3 for name in ("fastest_s", "step_s", "slowest_s")]
            yield _row(f"step of {called} at {row['length']:,} tokens", "ms", values, f"{row['ratio']:.2f}x")


def show(found: Sequence[Row]) -> str:
    """The figures as a table."""
    lines = ([row["what"], Spread.of(row["values"]).show(), row["unit"], row["ratio"]] for row in found)
    return table(("what", "median", "unit", "of the first"), lines)


def _row(what: str, unit: str, values: Sequence[float], ratio: str = "") -> Row:
    return {"what": what, "unit": unit, "values": list(values), "ratio": ratio}


def _encoded(text: str, encode: Encode, repeat: int) -> tuple[Sequence[int], list[float]]:
    """The text's ids, and megabytes a second of encoding it."""
    rates: list[float] = []
    for _ in range(repeat):
        begun = time.perf_counter()
        ids = encode(text)
        rates.append(len(text.encode()) / 1e6 / (time.perf_counter() - begun))
    return ids, rates


def _turned(text: str, run: int) -> str:
    """As much text, beginning elsewhere."""
    at = text.find("\n", run * 1000)
    return text[at:] + text[:at]


class _Shell:
    """`longchat` started anew for each figure."""

    def __init__(self, program: Sequence[str], plan: Plan) -> None:
        self.program = list(program)
        self.environment = {"OMP_NUM_THREADS": str(plan.threads)}
        self.model = ["--model", plan.model] if plan.model else []

    def help(self) -> float:
        """Seconds."""
        begun = time.perf_counter()
        self._run(["--help"])
        return time.perf_counter() - begun

    def first_token(self, text: str) -> float:
        """Seconds from starting the process to the first character of the answer."""
        with _file(text) as name:
            arguments = self._asking(name, "--method", "full", "--max-tokens", "4")
            begun = time.perf_counter()
            with self._start(arguments) as process:
                assert process.stdout is not None
                first, seconds = process.stdout.read(1), time.perf_counter() - begun
                _, complaint = process.communicate()
        if not first:
            raise _died(arguments, complaint)
        return seconds

    def recall(self, text: str) -> float:
        """Seconds that a text takes until the first question's passages are found."""
        with _file(text) as name:
            found = ("--method", "recall", "--mode", "find")  # not a question about the whole
            arguments = self._asking(name, *found, "--max-tokens", "1", "--json")
            return json.loads(self._run(arguments))["timings"]["find_s"]

    def _asking(self, name: str, *more: str) -> list[str]:
        """Arguments that ask about a file, whatever earlier runs have kept of it."""
        return ["ask", name, QUESTION, "--no-cache", *more, *self.model]

    def _run(self, arguments: Sequence[str]) -> bytes:
        with self._start(arguments) as process:
            out, complaint = process.communicate()
        if process.returncode:
            raise _died(arguments, complaint)
        return out

    def _start(self, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [*self.program, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **self.environment},
            bufsize=0,
        )


def _died(arguments: Sequence[str], complaint: bytes) -> Died:
    said = complaint.decode(errors="replace").strip().splitlines()
    return Died(f"`longchat {arguments[0]}` failed", said[-1] if said else "")


@contextlib.contextmanager
def _file(text: str) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "text.txt"
        path.write_text(text, encoding="utf-8")
        yield str(path)
