"""One reading of a prompt for many methods: those that read prompts with full attention share the forward.

Their layers differ in what they note beside the keys. A `Chorus` stands in for one attention layer of all of
them: the attention is computed once, and every method's own layer takes the same queries, keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from longchat_cli import kernels
from longchat_cli.attention.full import Full
from longchat_cli.attention.layer import Cache, Layer, Step
from longchat_cli.kernels import Observe
from longchat_cli.local import LocalEngine


class Chorus(Layer):
    """The same attention layer under methods whose prompts are full attention over the same stored keys."""

    def __init__(self, voices: Sequence[Layer]) -> None:
        super().__init__(Full(), None)
        self.voices = list(voices)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        decoding: bool,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        new = Step(q, k, v, self.seen, scale, decoding, softcap, sinks)
        parts = [(voice, voice.shown(new)) for voice in self.voices]
        # Whoever wants probabilities comes first: the others take that call's output.
        parts.sort(key=lambda part: part[1][0].observe is None)
        found: dict[Observe | None, Any] = {}
        for voice, spans in parts:
            wanted = spans[0].observe or next(iter(found), None)
            if wanted not in found:
                found[wanted] = kernels.attend(q, spans, scale, softcap, sinks)
            if spans[0].observe:
                voice.observe(found[wanted][1], new)
            voice.seen = new.end
        self.seen = new.end
        return next(iter(found.values()))[0]


def read(engines: Sequence[LocalEngine], ids: Sequence[int]) -> None:
    """Empty the engines (one model under several methods) and prefill `ids` in each: as if one by one."""
    together: dict[str, list[LocalEngine]] = {}
    for engine in engines:
        engine.reset()
        if engine.method.dense_prompts and engine.method.prefill == "own":
            together.setdefault(engine.method.kv_dtype, []).append(engine)
        else:
            engine.prefill(ids)
    for group in together.values():
        _read_together(group, ids)


def _read_together(engines: Sequence[LocalEngine], ids: Sequence[int]) -> None:
    caches, first = [engine.cache for engine in engines], engines[0]
    layers = [
        Chorus([layer for layer in voices if layer is not None]) if voices[0] is not None else None
        for voices in zip(*(cache.layers for cache in caches), strict=True)
    ]
    reader = LocalEngine(first.decoder, first.tokenizer, Full(), first.info, first.chunk)
    reader.cache = Cache(Full(), layers, first.cache.foreign)
    reader.prefill(ids)
    for engine in engines:
        engine.ids, engine.logits = reader.ids[:], reader.logits
        engine.cache.position = reader.cache.position
        engine.cache.foreign = reader.cache.foreign and reader.cache.foreign.copy()
