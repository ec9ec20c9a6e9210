"""One measurement, one process: a job goes in as JSON on stdin, its figures come back as JSON on stdout."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from longchat_cli.errors import LongchatError

Row = dict[str, Any]
"""A job or its figures, ready for JSON."""


class Refused(LongchatError):
    """The process could not do the job, and said why."""


class Died(LongchatError):
    """The process ended without an answer."""


def ask(program: Sequence[str], job: Mapping[str, Any], environment: Mapping[str, str | None]) -> Row:
    """The figures that `program` gives for `job`.

    `environment` changes variables of the process; None removes one. Raises Refused and Died.
    """
    changed = {**os.environ, **environment}
    done = subprocess.run(
        program,
        input=json.dumps(job),
        capture_output=True,
        text=True,
        errors="replace",
        env={name: value for name, value in changed.items() if value is not None},
    )
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        raise Died(f"{' '.join(program[:3])} gave no figures", _ending(done)) from None
    if "refused" in answer:
        raise Refused(answer["refused"])
    return answer


def _ending(done: subprocess.CompletedProcess[str]) -> str:
    """Why a process gave no answer: the signal that ended it, or the last it said."""
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        return f"{name} ended it" + (": its build does not fit this CPU" if name == "SIGILL" else "")
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:300]


def serve(measure: Callable[[Row], Row]) -> None:
    """The process's side: answer the one job on stdin. What libraries print on stdout goes to stderr."""
    out = os.dup(1)
    os.dup2(2, 1)
    try:
        answer = measure(json.load(sys.stdin))
    except LongchatError as error:
        answer = {"refused": str(error)}
    with os.fdopen(out, "w", encoding="utf-8") as stream:
        json.dump(answer, stream)


def resident() -> int:
    """Bytes of this process that are in memory; where the system does not tell, the most there ever were."""
    pages = Path("/proc/self/statm")
    if pages.exists():
        return int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    import resource  # not on Windows

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
