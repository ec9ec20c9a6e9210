"""The process that measures longchat: `python -m longchat_cli.benchmark.ours`, a job on stdin."""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from longchat_cli.benchmark.process import Row, resident, serve

if TYPE_CHECKING:
    from longchat_cli.local import LocalEngine


def measure(job: Row) -> Row:
    """Figures of one prompt and the tokens after it, under one method.

    Job: engine (model, device, dtype, quantize, compile, kernel), method, options, ids, following (the text's
    next ids, decoded one by one whatever the model would say), warm (tokens read before the clock starts, so
    that nothing is made under it), threads, count (whether to say what was asked of the machine).
    """
    base = resident()  # torch is imported, longchat's own room is not
    from longchat_cli import kernels, local
    from longchat_cli.models.lookup import Lookup

    torch.set_num_threads(job["threads"])
    settings = dict(job["engine"])
    kernels.force(settings.pop("kernel"))
    engine = local.open_engine(method=job["method"], options=job["options"], **settings)
    if isinstance(engine.stepper, Lookup):
        engine.stepper = None  # it is faster or slower with the text: steps of one token are measured
    ids, following = job["ids"], job["following"]
    _read(engine, ids[: job["warm"]], following[:3])
    figures = _read(engine, ids, following)
    figures["resident"] = resident() - base
    from longchat_cli.benchmark import limits

    figures["held"], figures["kept"] = engine.coverage().bytes, limits.kept(engine.decoder)
    if spent := _spent(engine, following):
        figures["spent"] = spent
    moved = sum(size for size, _ in limits.matrices(engine.decoder))
    figures["about"] = _about(engine) | {"step_weights": moved}
    if engine.decoder.device.type == "cpu":
        size = moved + figures["held"]
        figures["rates"] = {
            "bytes": size,
            "bytes_per_s": limits.reading(size, job["threads"]),
            "flops_per_s": limits.multiplying(engine.decoder.dtype),
        }
        if job["count"]:
            figures["asked"] = _asked(engine, ids, following)
    return figures


def _read(engine: LocalEngine, ids: Sequence[int], following: Sequence[int]) -> Row:
    """Seconds until the first token is chosen and of a later one on average; the kernels that served."""
    from longchat_cli import kernels

    choose = _chooser(engine)
    engine.reset()
    kernels.served.clear()
    begun = time.perf_counter()
    engine.prefill(ids)
    choose()
    first = time.perf_counter() - begun
    served = kernels.served.copy()
    seconds = _decode(engine, following)
    return {
        "first_s": first,
        "step_s": seconds / max(len(following), 1),
        "served": {"prompt": dict(served), "steps": dict(kernels.served - served)},
    }


def _decode(engine: LocalEngine, following: Sequence[int]) -> float:
    """Seconds that it takes to decode these ids."""
    choose = _chooser(engine)
    begun = time.perf_counter()
    for id in following:
        engine.feed([id], decoding=True)
        choose()
    return time.perf_counter() - begun


def _chooser(engine: LocalEngine) -> Callable[[], None]:
    """What chooses the likeliest token; made before a clock starts."""
    from longchat_cli.local import choose
    from longchat_cli.sampling import Sampling

    greedy = Sampling(temperature=0.0)

    def chosen() -> None:
        assert engine.logits is not None
        choose(engine.logits, greedy, ())

    return chosen


def _spent(engine: LocalEngine, following: Sequence[int]) -> Row | None:
    """Seconds of a later step by what they go to: the native library's phases, and Python around them.

    Steps of their own: to look at the clock takes time. None where no step is one call of the library.
    """
    from longchat_cli.kernels import native
    from longchat_cli.models.native import NativeProducts

    products = getattr(engine.decoder, "products", None)
    if not isinstance(products, NativeProducts) or not following:
        return None
    products.spent = (ctypes.c_int64 * len(native.PHASES))()
    seconds = _decode(engine, following)
    phases = {
        name: spent / 1e9 / len(following) for name, spent in zip(native.PHASES, products.spent, strict=True)
    }
    products.spent = None
    return (
        {"python": seconds / len(following) - sum(phases.values()), **phases}
        if any(phases.values())
        else None
    )


def _about(engine: LocalEngine) -> Row:
    info = engine.info
    decoding = [] if engine.stepper is None else [f"decoding: {engine.stepper.about}"]
    return {
        "model": info.model,
        "device": info.device,
        "dtype": info.dtype,
        "notes": [*info.notes, *decoding],
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def _asked(engine: LocalEngine, ids: Sequence[int], following: Sequence[int]) -> Row:
    """The least that the prompt and a step after it ask for: FLOPs, and bytes.

    Counted over the same tokens once more, the steps on torch's path, where every attention call is seen.
    """
    from longchat_cli import kernels
    from longchat_cli.benchmark import limits

    engine.reset()
    with limits.counting() as prompt:
        engine.prefill(ids)
    kernels.force("reference")
    with limits.counting() as steps:
        for id in following:
            engine.feed([id], decoding=True)
    *inner, head = limits.matrices(engine.decoder)
    return {
        "prompt_flops": 2 * (len(ids) * sum(weights for _, weights in inner) + head[1]) + prompt.flops,
        "step_bytes": sum(size for size, _ in (*inner, head)) + steps.bytes // max(len(following), 1),
    }


if __name__ == "__main__":
    serve(measure)
    sys.exit(0)
