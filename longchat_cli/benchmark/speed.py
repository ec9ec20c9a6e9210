"""`longchat bench speed`: contenders in turn, a process for each run; medians are `report`'s business."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

from longchat_cli import __version__
from longchat_cli.benchmark.peer import PROGRAM, Form
from longchat_cli.benchmark.process import Row, ask
from longchat_cli.errors import LongchatError, UsageError

OURS = (sys.executable, "-m", "longchat_cli.benchmark.ours")
WARM = 512
"""Tokens that everybody reads before anything is timed."""
NEAR = 1.25
"""After the first round, forms of the other program that are slower by this in everything are left out."""
TEXT = Path(__file__).with_name("text.txt")
"""A Scandal in Bohemia (Arthur Conan Doyle, 1891), in the public domain."""


@dataclass(frozen=True)
class Plan:
    """What to measure: prompts of `lengths` tokens, `decode` more one by one, `repeat` rounds, `threads` for
    everybody."""

    lengths: tuple[int, ...]
    repeat: int
    threads: int
    decode: int = 96

    def __post_init__(self) -> None:
        """Raises UsageError."""
        for name, value in (
            ("lengths", min(self.lengths)),
            ("repeat", self.repeat),
            ("threads", self.threads),
            ("decode", self.decode),
        ):
            if value < 1:
                raise UsageError(f"--{name} is {value}", "it must be at least 1")


@dataclass(frozen=True)
class Contender:
    """Something measured: `program` answers `job` with a text added. `peer`: it is the other program's."""

    name: str
    program: Sequence[str]
    job: Row
    peer: bool = False
    environment: Mapping[str, str | None] = field(default_factory=dict)


def ours(
    methods: Mapping[str, tuple[str, Row]], engine: Row, threads: int, program: Sequence[str] = OURS
) -> list[Contender]:
    """longchat under each of `methods` (name and options by what they are called), with `engine` settings."""
    environment = {"OMP_NUM_THREADS": str(threads)}
    return [
        Contender(called, program, {"method": name, "options": options, "engine": engine}, False, environment)
        for called, (name, options) in methods.items()
    ]


def peers(
    forms: Sequence[Form], environment: Mapping[str, str | None], program: Sequence[str] = PROGRAM
) -> list[Contender]:
    """The other program with each form of the model, in the environment that `peer.waiting` found."""
    return [
        Contender(form.name, program, {"file": str(form.file), "flash": form.flash}, True, environment)
        for form in forms
    ]


def rows(
    plan: Plan, contenders: Sequence[Contender], ids: Sequence[int], say: Callable[[str], None]
) -> Iterator[Row]:
    """A row for each run, as it comes: name, peer, length, round, load, and its figures or why it `failed`.

    Whoever failed is not tried again at that length. `ids` is the text, repeated when it is too short.
    """
    longest = max(plan.lengths) + plan.decode
    ids = (list(ids) * (longest // len(ids) + 1))[:longest]
    for length in plan.lengths:
        left, done = list(contenders), []
        for number in range(plan.repeat):
            for contender in _in_turn(left):
                text = {"ids": ids[:length], "following": ids[length : length + plan.decode], "warm": WARM}
                job = contender.job | text | {"threads": plan.threads, "count": not number}
                row = {"name": contender.name, "peer": contender.peer, "length": length, "round": number}
                row["waits"] = contender.environment.get("OMP_WAIT_POLICY")
                done.append(row | _figures(contender, job))
                say(f"{length:,} tokens, round {number + 1} of {plan.repeat}: {_line(done[-1])}")
                yield done[-1]
            left = [contender for contender in left if _goes_on(contender, done)]


def _figures(contender: Contender, job: Row) -> Row:
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    try:
        return {"load": load} | ask(contender.program, job, contender.environment)
    except LongchatError as error:
        return {"load": load, "failed": str(error)}


def _in_turn(contenders: Sequence[Contender]) -> Iterator[Contender]:
    """One of ours, one of theirs, and so on: a machine that slows down slows both."""
    sides = ([each for each in contenders if each.peer is side] for side in (False, True))
    for pair in zip_longest(*sides):
        yield from (each for each in pair if each is not None)


def _goes_on(contender: Contender, done: Sequence[Row]) -> bool:
    """Whether another round is worth its time: ours always, theirs while near the best in something."""
    own = [row for row in done if (row["name"], row["peer"]) == (contender.name, contender.peer)]
    if any("failed" in row for row in own):
        return False
    rivals = [row for row in done if row["peer"] and "failed" not in row]
    return not contender.peer or any(
        min(row[figure] for row in own) <= NEAR * min(row[figure] for row in rivals)
        for figure in ("first_s", "step_s")
    )


def _line(row: Row) -> str:
    who = f"llama.cpp {row['name']}" if row["peer"] else row["name"]
    if "failed" in row:
        return f"{who}: {row['failed']}"
    return f"{who}: first token {row['first_s']:.2f} s, {1 / row['step_s']:.1f} tokens/s"


def machine(threads: int) -> Row:
    """What the figures hold for."""
    return {
        "longchat": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu(),
        "cpus": os.cpu_count(),
        "threads": threads,
    }


def _cpu() -> str:
    about = Path("/proc/cpuinfo")
    lines = about.read_text().splitlines() if about.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def cores() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
