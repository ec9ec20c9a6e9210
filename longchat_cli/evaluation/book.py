"""A whole book with planted facts, read once and asked as its user would: a new process for each question."""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longchat_cli.ask import QUOTING
from longchat_cli.config import cache_dir
from longchat_cli.errors import BadInput, LongchatError, UsageError
from longchat_cli.evaluation.facts import worded
from longchat_cli.evaluation.haystack import load_text, plant, sentence_ends
from longchat_cli.evaluation.places import linked
from longchat_cli.evaluation.score import contains, interval

ANSWER_TOKENS = 32
"""Room for the longest right answer and some words around it."""

Progress = Callable[[int, int], None]
Row = dict[str, Any]


@dataclass(frozen=True)
class Process:
    """What a run of longchat printed and took: seconds by the clock and of processor time."""

    stdout: str
    seconds: float
    cpu: float


def book(n: int, seed: int, data: Sequence[Path], options: Sequence[str], progress: Progress) -> Row:
    """Plant `n` facts in the book of `data`, `ingest` it, `ask` each; `options` go to both commands.

    What is kept of the book is kept in a directory that begins empty. A total: questions right, those in the
    model's `own` words, the passage `found`, those that `reused` the whole reading; what reading took, what a
    question takes (median), how often that goes into the first one's time (reading and answering), the first
    token's time from when the model is loaded (median and most). Raises UsageError without a book, BadInput
    for one without sentences, and as the processes do.
    """
    text = load_text(data)
    if text is None:
        raise UsageError("this task needs a book", "", "name one with --data")
    if not sentence_ends(text):  # an only fact would be all there is to find
        raise BadInput("the book has no two sentences to put a fact between", "", "name another with --data")
    rng = random.Random(f"{seed}/book")
    facts = worded(n, rng)
    text, depths = plant(text, [fact for fact, _, _ in facts], rng)
    with tempfile.TemporaryDirectory(prefix="longchat-") as folder:
        file = Path(folder) / "book.txt"
        file.write_text(text, encoding="utf-8")
        cache = linked(Path(folder) / "cache", cache_dir(), "pages")
        environment = {**os.environ, "LONGCHAT_CACHE_DIR": str(cache)}
        reading = _run(["ingest", str(file), *options], environment)
        kept = sum(page.stat().st_size for page in (cache / "pages").iterdir())
        samples = []
        for (fact, question, answer), depth in zip(facts, depths, strict=True):
            limits = ["--json", "--no-cite", "--no-log", "--max-tokens", str(ANSWER_TOKENS)]
            done = _run(["ask", str(file), "-q", question, *limits, *options], environment)
            samples.append(_sample(done, fact, question, answer, depth))
            progress(len(samples), n)
    return {"samples": samples, "totals": [_total(samples, reading, kept)]}


def _run(words: Sequence[str], environment: dict[str, str]) -> Process:
    """Run longchat. Raises LongchatError with the last it said where it fails."""
    begun, before = time.perf_counter(), os.times()
    done = subprocess.run(
        [sys.executable, "-m", "longchat_cli", *words], capture_output=True, text=True, env=environment
    )
    seconds, after = time.perf_counter() - begun, os.times()
    if done.returncode:
        said = done.stderr.strip().splitlines() or [""]
        raise LongchatError(f"longchat {words[0]} failed with exit code {done.returncode}", said[-1])
    user, system = after.children_user - before.children_user, after.children_system - before.children_system
    return Process(done.stdout, seconds, user + system)


def _sample(done: Process, fact: str, question: str, answer: str, depth: float) -> Row:
    got = json.loads(done.stdout)
    return {
        "question": question,
        "references": [answer],
        "evidence": fact,
        "depth": depth,
        "answer": got["answer"],
        "correct": contains(got["answer"], [answer]),
        "own": contains(got["answer"].rpartition(QUOTING)[0] if got["quoted"] else got["answer"], [answer]),
        "found": any(contains(passage["text"], [answer]) for passage in got["passages"]),
        "reused_tokens": got["usage"]["reused_tokens"],
        "document_tokens": got["usage"]["document_tokens"],
        "first_token_s": got["timings"]["first_token_s"],
        "seconds": round(done.seconds, 3),
        "cpu_s": round(done.cpu, 3),
    }


def _total(samples: Sequence[Row], reading: Process, kept: int) -> Row:
    n, correct = len(samples), sum(sample["correct"] for sample in samples)
    low, high = interval(correct, n)
    later, first = [sample["seconds"] for sample in samples], [sample["first_token_s"] for sample in samples]
    cpu = statistics.median(sample["cpu_s"] for sample in samples)
    return {
        "length": samples[0]["document_tokens"],
        "n": n,
        "correct": correct,
        "accuracy": correct / n,
        "low": low,
        "high": high,
        "own": sum(sample["own"] for sample in samples),
        "found": sum(sample["found"] for sample in samples),
        "reused": sum(sample["reused_tokens"] >= sample["document_tokens"] for sample in samples),
        "kept_bytes": kept,
        "reading_s": reading.seconds,
        "reading_cpu_s": reading.cpu,
        "question_s": statistics.median(later),
        "question_cpu_s": cpu,
        "first_to_later": (reading.seconds + later[0]) / statistics.median(later),
        "first_token_s": statistics.median(first),
        "first_token_most_s": max(first),
    }
