"""The process that times steps far into a stream: `python -m longchat_cli.benchmark.streams`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from longchat_cli.attention.layer import Step
from longchat_cli.benchmark.process import Row, serve

if TYPE_CHECKING:
    from longchat_cli.attention.layer import Cache
    from longchat_cli.local import LocalEngine

FRESH = 2048
"""Tokens read by the model before a step is timed: more than the usual windows hold."""


def measure(job: Row) -> Row:
    """Step times at each of `lengths`: {"rows"} as `evaluation.stream.timed` has them.

    Job: engine, method, options, ids, lengths, threads. Only for methods whose state is their first and last
    tokens: what lies between is passed over without the model.
    """
    from longchat_cli import kernels, local
    from longchat_cli.evaluation.stream import timed

    torch.set_num_threads(job["threads"])
    settings = dict(job["engine"])
    kernels.force(settings.pop("kernel"))
    engine = local.open_engine(method=job["method"], options=job["options"], **settings)
    return {"rows": timed(engine, {length: _at(engine, length, job["ids"]) for length in job["lengths"]})}


def _at(engine: LocalEngine, length: int, ids: Sequence[int]) -> Any:
    """The state after `length` tokens, of which the model read the first and the last FRESH."""
    text = (list(ids) * (2 * FRESH // len(ids) + 1))[: 2 * FRESH]
    engine.reset()
    if length > len(text):
        engine.prefill(text[:FRESH])
        skip(engine.cache, length - len(text))
        engine.prefill(text[FRESH:])
    else:
        engine.prefill(text[:length])
    return engine.snapshot()


@torch.inference_mode()
def skip(cache: Cache, tokens: int) -> None:
    """Move a state `tokens` on: every layer takes the last keys and values it has once more."""
    for layer in cache.own():
        last = layer.kv.k, layer.kv.v  # type: ignore[attr-defined]
        end = layer.seen + tokens
        while layer.seen < end:
            k, v = (x[:, -(end - layer.seen) :].clone() for x in last)
            new = Step(k, k, v, layer.seen, 1.0, False)
            layer.spans(new)
            layer.seen = new.end
    cache.position += tokens


if __name__ == "__main__":
    serve(measure)
    sys.exit(0)
