"""The process that measures llama.cpp through llama-cpp-python's low-level calls, a job on stdin.

No token goes through Python but as a number, so that what is measured is llama.cpp's own time.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Sequence
from typing import Any

import llama_cpp
import numpy as np

from longchat_cli.benchmark.process import Refused, Row, resident, serve

BATCH, MICRO_BATCH = 2048, 512
"""llama.cpp's own defaults."""
FORMS = {"Q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0, "Q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0}
FLASH_ON, FLASH_OFF = 1, 0


def answer(job: Row) -> Row:
    """Measure, or write a model in another form, as the job asks."""
    return quantise(job) if "form" in job else measure(job)


def quantise(job: Row) -> Row:
    """Write `target`: the GGUF file `source` with its matrices in `form`. Raises Refused."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = FORMS[job["form"]], True
    params.nthread = job["threads"]
    source, target = job["source"].encode(), job["target"].encode()
    if llama_cpp.llama_model_quantize(source, target, ctypes.byref(params)):
        raise Refused(f"llama.cpp cannot write {job['source']} as {job['form']}")
    return {}


def measure(job: Row) -> Row:
    """As `ours.measure`, for a GGUF file. Job: file, flash, warm, ids, following, threads."""
    base = resident()
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(job["file"].encode(), llama_cpp.llama_model_default_params())
    if not model:
        raise Refused(f"llama.cpp cannot read {job['file']}")
    context = llama_cpp.llama_init_from_model(model, _params(job))
    if not context:
        raise Refused("llama.cpp refuses this context", f"{len(job['ids']):,} tokens, flash {job['flash']}")
    reader = _Reader(model, context)
    reader.read(job["ids"][: job["warm"]], job["following"][:3])
    figures = reader.read(job["ids"], job["following"])
    figures["held"] = llama_cpp.llama_state_seq_get_size(context, 0)
    figures["resident"] = resident() - base
    figures["about"] = {
        "version": llama_cpp.__version__,
        "build": llama_cpp.llama_print_system_info().decode().strip(),
    }
    return figures


def _params(job: Row) -> Any:
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = len(job["ids"]) + len(job["following"]) + 1
    params.n_batch, params.n_ubatch = BATCH, MICRO_BATCH
    params.n_threads = params.n_threads_batch = job["threads"]
    params.flash_attn_type = FLASH_ON if job["flash"] else FLASH_OFF
    return params


class _Reader:
    """One context: reads ids and chooses the likeliest token after them."""

    def __init__(self, model: Any, context: Any) -> None:
        self.context = context
        self.width = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))

    def read(self, ids: Sequence[int], following: Sequence[int]) -> Row:
        """Seconds until the first token is chosen, and of every later one on average."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        begun = time.perf_counter()
        for start in range(0, len(ids), BATCH):
            self._feed(ids[start : start + BATCH])
        self._choose()
        first = time.perf_counter()
        for id in following:
            self._feed([id])
            self._choose()
        return {"first_s": first - begun, "step_s": (time.perf_counter() - first) / max(len(following), 1)}

    def _feed(self, ids: Sequence[int]) -> None:
        tokens = (llama_cpp.llama_token * len(ids))(*ids)
        code = llama_cpp.llama_decode(self.context, llama_cpp.llama_batch_get_one(tokens, len(ids)))
        if code:
            raise Refused("llama.cpp cannot read this", f"llama_decode gave {code}")

    def _choose(self) -> int:
        logits = llama_cpp.llama_get_logits_ith(self.context, -1)
        return int(np.ctypeslib.as_array(logits, shape=(self.width,)).argmax())


if __name__ == "__main__":
    serve(answer)
    sys.exit(0)
