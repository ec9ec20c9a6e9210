"""A long stream through one state: what a step costs, and what is held, near its start and near its end."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from longchat_cli.engine import Engine
from longchat_cli.sampling import Sampling

ROUNDS = 15
STEPS = 16


def stream(
    engine: Engine, ids: Sequence[int], lengths: Sequence[int], progress: Callable[[int, int], None]
) -> list[dict[str, Any]]:
    """Feed `ids` (repeated as needed) and time decoding at each of `lengths` tokens; rows as of `timed`."""
    engine.reset()
    marks, done, last = {}, 0, max(lengths)
    for length in sorted(lengths):
        while done < length:
            start = done % len(ids)
            part = ids[start : start + min(length - done, 8192)]
            engine.prefill(part)
            done += len(part)
            progress(done, last)
        marks[length] = engine.snapshot()
    return timed(engine, marks)


def timed(engine: Engine, marks: Mapping[int, Any]) -> list[dict[str, Any]]:
    """Time decoding from each of `marks`, states of the engine by their length in tokens.

    The rounds visit them in turn, so that a machine that slows down slows all of them. Per length: median
    seconds of a step, bytes held after it, tokens visible, whether every log-probability was finite.
    """
    samples: list[list[float]] = [[] for _ in marks]
    rows: list[dict[str, Any]] = [{"length": length, "finite": True} for length in marks]
    for _ in range(ROUNDS):
        for mark, times, row in zip(marks.values(), samples, rows, strict=True):
            engine.restore(mark)
            begun, count = time.perf_counter(), 0
            for piece in engine.generate(Sampling(max_tokens=STEPS)):
                count += len(piece.ids)
                row["finite"] &= math.isfinite(piece.logprob)
            times.append((time.perf_counter() - begun) / max(count, 1))
            held = engine.coverage()
            row |= {"bytes": held.bytes, "visible": held.visible, "seen": held.seen}
    for times, row in zip(samples, rows, strict=True):
        row |= {"step_s": statistics.median(times), "fastest_s": min(times), "slowest_s": max(times)}
    for row in rows:
        row["ratio"] = row["step_s"] / rows[0]["step_s"]
    return rows
