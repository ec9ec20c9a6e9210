"""A program that `longchat bench` may start: answers a job as the real ones do, from what the job says.

A file `crash` ends it by a signal, `silent` without an answer, `refused` is refused; any other name ends
in the milliseconds that a prompt and a step take. Every job goes to the end of `$FAKE_LOG`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from longchat_cli.benchmark.process import Refused, serve


def answer(job: dict[str, Any]) -> dict[str, Any]:
    if log := os.environ.get("FAKE_LOG"):
        with Path(log).open("a", encoding="utf-8") as file:
            file.write(json.dumps(job | {"wait": os.environ.get("OMP_WAIT_POLICY")}) + "\n")
    print("a library says hello on stdout")
    os.write(1, b"so does its C part\n")
    if "form" in job:
        return _write(job)
    kind = Path(job.get("file", job.get("method"))).stem
    if kind == "crash":
        os.kill(os.getpid(), signal.SIGILL)
    if kind == "silent":
        print("nothing to say", file=sys.stderr)
        os._exit(3)
    if kind == "refused":
        raise Refused("no such thing", "it is refused")
    first, step = (int(part) / 1000 for part in kind.split("-")[1:])
    asleep = os.environ.get("OMP_WAIT_POLICY") == "PASSIVE"
    if "FAKE_LIKES_SLEEP" in os.environ and asleep != bool(os.environ["FAKE_LIKES_SLEEP"]):
        first, step = 10 * first, 10 * step
    seconds = {"first_s": first, "step_s": step, "held": 2**20, "kept": 2**21, "resident": 3 * 2**20}
    about = {"version": "1", "build": "AVX", "torch": "2", "cpu_capability": "AVX", "notes": ["a note"]}
    served = {"prompt": {"sdpa": 30}, "steps": {"native": 96}}
    return seconds | {"served": served, "about": about | {"model": "m", "dtype": "bfloat16"}}


def _write(job: dict[str, Any]) -> dict[str, Any]:
    Path(job["target"]).write_text(job["form"])
    if job["form"] == "Q8_0" and os.environ.get("FAKE_FULL"):
        raise Refused("the disk is full")
    return {}


if __name__ == "__main__":
    serve(answer)
