"""What reading documents will cost, before it is done: time, memory and disk of each form that fits the need.

Times are measured on a sample of the documents themselves, on this machine, now; bytes are counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from longchat_cli import inspection
from longchat_cli.attention import method_class
from longchat_cli.config import format_bytes
from longchat_cli.documents import Document
from longchat_cli.engine import Engine
from longchat_cli.models.memory import free_bytes, kv_bytes
from longchat_cli.pages import PAGE
from longchat_cli.recall.passages import split_sentences

FORMS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("recall", {}),
    ("sink", {}),
    ("cca", {}),
    ("full", {"kv_dtype": "int4"}),
    ("full", {"kv_dtype": "int8"}),
    ("full", {}),
)
"""Offered beside the one that was asked for, the smallest first."""
SHARE = {"auto": 1.0, "bf16": 1.0, "fp8": 0.47, "int8": 0.47, "int4": 0.26}
"""Bytes of --kv-dtype as a share of bfloat16's, measured at 8k tokens."""
SAMPLE = 2048
"""Tokens that are read to measure the speed, and ..."""
CALL = 512
"""... the rows of each call."""
LAST = 1024
"""Rows that the last call has at most."""
SENTENCES = 64
"""Sentences that are encoded to measure it."""
TIPS = 16 * PAGE
"""A bounded state is kept once in so many tokens, and three times at the end."""

Read = Callable[[Sequence[int]], Any]
Encode = Callable[[Sequence[str]], Any]


@dataclass(frozen=True)
class Cost:
    """Of one form: seconds to read, bytes of `memory` while it answers and of `disk`; `trouble` it meets."""

    form: str
    seconds: float
    memory: int
    disk: int
    trouble: str = ""


@dataclass(frozen=True)
class Pace:
    """A call of CALL rows takes `seconds`, and `more` for every token before it that is visible."""

    seconds: float
    more: float

    @classmethod
    def measure(cls, read: Read, ids: Sequence[int]) -> Pace:
        """Of `read`, which appends to a state, on the first SAMPLE of `ids`; least squares over its calls."""
        times = []
        for start in range(0, min(SAMPLE, len(ids)), CALL):
            begin = time.perf_counter()
            read(ids[start : start + CALL])
            times.append(time.perf_counter() - begin)
        places = [float(CALL * index) for index in range(len(times))]
        middle, mean = sum(places) / len(places), sum(times) / len(times)
        spread = sum((place - middle) ** 2 for place in places)
        slope = sum((p - middle) * (t - mean) for p, t in zip(places, times, strict=True)) / (spread or 1)
        slope = max(slope, 0.0)
        return cls(max(mean - slope * middle, 0.0), slope)

    def total(self, tokens: int, visible: Callable[[int], float]) -> float:
        """Seconds to read `tokens`, of which `visible(position)` are seen from a position."""
        starts = range(0, tokens, CALL)
        return sum(self.seconds + self.more * visible(start) for start in starts)


def sizes(name: str, options: Mapping[str, Any], window: int) -> tuple[float, int]:
    """Of what a method holds: tokens per token read, and tokens whatever is read."""
    if name == "cca":
        method: Any = method_class(name).build(options)
        return 1 / method.group, method.local + method.sinks
    most = inspection.most(name, window, options)
    return (1.0, 0) if most is None else (0.0, most)


def reading(
    name: str, options: Mapping[str, Any], tokens: int, config: Mapping[str, Any], window: int, pace: Pace
) -> Cost:
    """The cost of reading `tokens` under a method."""
    grows, fixed = sizes(name, options, window)
    kind = str(options.get("kv_dtype", "auto"))

    def held(count: int) -> float:
        return min(count, grows * count + fixed)

    plain = kv_bytes(config, PAGE) / PAGE
    weight = SHARE[kind] * plain
    # Where not everything stays as it is, the rows of the last call are still there, and exact.
    last = plain * LAST if fixed or weight < plain else 0.0
    tips = (weight * fixed + last) * (tokens // TIPS + 3)
    form = " ".join([name, *(f"--{key.replace('_', '-')} {value}" for key, value in options.items())])
    far = tokens > window and not method_class(name).unlimited
    return Cost(
        form,
        pace.total(tokens, held),
        int(weight * held(tokens) + last),
        int(min(weight * grows * tokens + tips, 2 * plain * tokens)),
        f"answers break down past the window of {window:,} tokens" if far else "",
    )


def indexing(documents: Sequence[Document], encode: Encode | None) -> Cost:
    """The cost of recall's index; `encode` None: it goes by words alone."""
    sentences = [d.text[i:j] for d in documents for i, j in split_sentences(d.text)[0].tolist()]
    seconds, width = 0.0, 0
    if encode and sentences:
        step = max(len(sentences) // SENTENCES, 1)
        sample = sentences[::step][:SENTENCES]
        begin = time.perf_counter()
        width = encode(sample).shape[1]
        taken = time.perf_counter() - begin
        seconds = taken * sum(map(len, sentences)) / max(sum(map(len, sample)), 1)
    held = len(sentences) * width * 2  # float16
    return Cost("recall", seconds, 2 * held, held)


def compare(
    documents: Sequence[Document],
    ids: Sequence[int],
    asked: tuple[str, Mapping[str, Any]],
    engine: Engine,
    config: Mapping[str, Any],
    encode: Encode | None,
    disk: int,
) -> str:
    """The report: what was asked for, marked, beside FORMS; `disk` bytes can be kept.

    `engine` is a fresh one of full attention, `ids` are the documents' tokens by it, `config` the model's.
    """
    window = engine.info.window
    pace = Pace.measure(engine.prefill, ids)
    costs: dict[str, Cost] = {}
    for name, options in (asked, *FORMS):
        if name == "recall":
            cost = indexing(documents, encode)
        else:
            cost = reading(name, options, len(ids), config, window, pace)
        costs.setdefault(cost.form, replace(cost, trouble=cost.trouble or _trouble(cost, disk)))
    heading = f"{len(ids):,} tokens by {engine.info.model}, window {window:,}; "
    heading += f"{format_bytes(free_bytes())} of memory are free, {format_bytes(disk)} can be kept"
    return f"{heading}\n{show(list(costs.values()))}"


def _trouble(cost: Cost, disk: int) -> str:
    if cost.memory > free_bytes():
        return "more than the memory that is free"
    return "only its beginning would be kept" if cost.disk > disk else ""


def show(costs: Sequence[Cost]) -> str:
    """A line for each, the first one marked."""
    lines = [f"  {'form':<24}{'reading':>10}{'memory':>12}{'disk':>12}"]
    for cost in costs:
        mark = "*" if cost is costs[0] else " "
        sizes = f"{format_bytes(cost.memory):>12}{format_bytes(cost.disk):>12}"
        trouble = f"  {cost.trouble}" if cost.trouble else ""
        lines.append(f"{mark} {cost.form:<24}{duration(cost.seconds):>10}{sizes}{trouble}")
    return "\n".join(lines)


def duration(seconds: float) -> str:
    """45 s, 5 min, 1.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
