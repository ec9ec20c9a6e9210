"""A decode step of fixed shapes, for methods that keep the last W tokens and perhaps the first few.

Keys and values lie in ring buffers (position p in slot p mod W), and everything that changes from step to
step is read from two tensors: the token and its position. So the step needs nothing from Python. On a GPU it
is captured once in a CUDA graph and replayed; elsewhere the same step runs as it is. The layers are the
method's own: a position that is a tensor makes their bounds and rotations tensors.

torch.compile is no alternative yet: in torch 2.13 it traces the step whole, but every backend refuses the
tensors of inference mode, in which the lean forward runs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from longchat_cli.attention.buffer import Buffer, KVBuffer
from longchat_cli.attention.layer import Cache, Layer, Method, Step
from longchat_cli.attention.window import WindowLayer
from longchat_cli.config import format_bytes
from longchat_cli.errors import OutOfMemory, UsageError
from longchat_cli.kernels import Span
from longchat_cli.models.lean import LeanDecoder
from longchat_cli.models.memory import free_bytes


class Clock:
    """What all layers of a step share. int64 [1]: its `position`, the `slot` of a ring that it writes and
    the `first` position that a ring holds then. `plan`: the first layer's spans, whose bounds serve all."""

    def __init__(self, window: int, device: torch.device) -> None:
        self.window = window
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self.read()

    def read(self) -> None:
        """Begin a step at `position`."""
        self.slot = self.position % self.window
        self.first = (self.position + 1 - self.window).clamp(min=0)
        self.plan: list[Span] | None = None

    def slots(self, first: int, end: int) -> Tensor:
        """Where the tokens at positions first to end are."""
        return torch.arange(first, end, device=self.position.device) % self.window


class Ring(Buffer):
    """The last `clock.window` tokens, k, v [KV heads, window, dim]: what comes replaces what is dropped."""

    def __init__(self, clock: Clock, like: KVBuffer) -> None:
        self.clock = clock
        self._kv = [x.new_zeros(x.shape[0], clock.window, x.shape[2]) for x in like.tensors()]

    @property
    def first(self) -> Tensor:  # type: ignore[override]
        return self.clock.first

    def append(self, *new: Tensor) -> None:
        self._write(self.clock.slot, new)

    def drop_before(self, index: int) -> None:
        pass

    def parts(self) -> list[tuple[Any, Any, Any]]:
        k, v = self._kv
        return [(k, v, self.first)]

    def tensors(self) -> list[Tensor]:
        return self._kv

    def load(self, buffer: Buffer) -> None:
        """Take what the query at the buffer's end sees of it."""
        first = max(buffer.first, buffer.end + 1 - self.clock.window)
        if first < buffer.end:
            self._write(self.clock.slots(first, buffer.end), buffer.between(first, buffer.end))

    def store(self, end: int) -> KVBuffer:
        """What the query at `end` sees of the tokens before it. Slot `end` mod window is not part of that: a
        step that was broken off may have written it."""
        buffer = KVBuffer(max(end + 1 - self.clock.window, 0))
        slots = self.clock.slots(buffer.first, end)
        buffer.append(*(x[:, slots] for x in self._kv))
        return buffer

    def _write(self, slots: Tensor, kv: tuple[Tensor, ...]) -> None:
        for x, new in zip(self._kv, kv, strict=True):
            x.index_copy_(1, slots, new)


class FixedLayer(Layer):
    """A layer of the method over memory that stays where it is."""

    def __init__(self, own: Any, clock: Clock) -> None:
        super().__init__(own.method, own.rope)
        self.own, self.clock = own, clock
        self.head: KVBuffer | None = getattr(own, "head", None)

    def spans(self, new: Step) -> list[Span]:
        if self.clock.plan is None:
            self.clock.plan = self.own.spans(new)
            return self.clock.plan
        self.own.kv.append(new.k, new.v)
        heads = [(self.head.k, self.head.v)] if self.head else []
        kept = [*heads, self.own.kv.tensors()]
        return [replace(span, k=k, v=v) for span, (k, v) in zip(self.clock.plan, kept, strict=True)]

    def load(self, layer: Any) -> None:
        """Take the state of an ordinary layer."""
        if not isinstance(self.own.kv, Ring):
            self.own.kv = Ring(self.clock, layer.kv)
            if self.head is not None and layer.head:
                self.head.append(layer.head.k, layer.head.v)
        self.own.kv.load(layer.kv)
        if self.head:
            self.head.k.copy_(layer.head.k)
            self.head.v.copy_(layer.head.v)

    def held(self) -> list[Tensor]:
        return [*self.own.kv.tensors(), *(self.head.tensors() if self.head else [])]


class StaticStep:
    """Decodes from a cache's state, which stays behind until `settle` brings it up to date.

    Raises UsageError where the method's state has no fixed shape or the model is not a LeanDecoder,
    OutOfMemory where the rings, which are made whole, would not fit.
    """

    def __init__(self, decoder: Any, method: Method) -> None:
        layers = decoder.new_cache(method).own()
        reason = _refusal(decoder, method, layers)
        if reason:
            raise UsageError("--compile cannot serve here", reason, "leave it out")
        _check_room(decoder, layers[0].window)
        self.decoder: LeanDecoder = decoder
        self.clock = Clock(layers[0].window, decoder.device)
        self.layers = [FixedLayer(layer, self.clock) for layer in layers]
        self.fixed = Cache(method, self.layers)
        self.fixed.decoding = True
        self.token = torch.zeros(1, dtype=torch.int64, device=decoder.device)
        self.end: int | None = None  # tokens read, while the state is here
        self._graph: torch.cuda.CUDAGraph | None = None

    @property
    def about(self) -> str:
        """For `--verbose`."""
        captured = self.token.is_cuda
        return "a fixed decode step, " + ("captured in a CUDA graph" if captured else "not captured: no GPU")

    def feed(self, token: int, cache: Cache) -> Tensor | None:
        """Read one token; float32 logits [vocab] of the next. None while the first tokens are not all there.

        Whatever interrupts it leaves a state of whole tokens, to feed again or to settle.
        """
        if self.end is None:
            if not all(map(_begun, cache.own())):
                return None
            for fixed, layer in zip(self.layers, cache.own(), strict=True):
                fixed.load(layer)
            self.end = cache.position
        self.token.fill_(token)
        self.clock.position.fill_(self.end)
        logits = self._replay() if self.token.is_cuda else self._run()
        self.end += 1
        return logits

    def settle(self, cache: Cache) -> None:
        """Bring the cache up to date; the next token is taken from it again."""
        if self.end is None:
            return
        states = [{"kv": fixed.own.kv.store(self.end), "seen": self.end} for fixed in self.layers]
        for layer, state in zip(cache.own(), states, strict=True):
            vars(layer).update(state)
        cache.position, self.end = self.end, None

    def forget(self) -> None:
        """Begin from a cache again."""
        self.end = None

    def bytes(self) -> int:
        """Bytes held beside the cache."""
        return sum(x.nbytes for layer in self.layers for x in layer.held())

    def _run(self) -> Tensor:
        self.clock.read()
        self.fixed.position = self.clock.position  # type: ignore[assignment]
        for layer in self.layers:
            layer.seen = self.clock.position  # type: ignore[assignment]
        return self.decoder.forward(self.token, self.fixed)[-1]

    def _replay(self) -> Tensor:
        if self._graph is None:
            self._capture()
        assert self._graph is not None
        self._graph.replay()
        return self._logits.clone()

    def _capture(self) -> None:
        """Run once, so that kernels are compiled and libraries ready, then record. Both write where the first
        replay writes."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._logits = self._run()
        self._graph = graph


def _refusal(decoder: Any, method: Method, layers: list[Layer]) -> str | None:
    if not isinstance(decoder, LeanDecoder):
        return "the model runs through transformers"
    if any(layer.method is not method for layer in layers):
        return "some layers of the model have a window of their own"
    if not all(isinstance(layer, WindowLayer) for layer in layers):
        return "the method's state has no fixed shape, as that of window, sink and lm-infinite has"
    if getattr(method, "evict", "tokens") != "tokens":
        return "turns are of any length"
    return None if method.kv_dtype == "auto" else f"--kv-dtype is {method.kv_dtype}"


def _check_room(decoder: LeanDecoder, tokens: int) -> None:
    needed = 2 * decoder.layers * decoder.kv_heads * decoder.dim * decoder.dtype.itemsize * tokens
    on_gpu = decoder.device.type == "cuda"
    free = torch.cuda.mem_get_info(decoder.device)[0] if on_gpu else free_bytes()
    if needed > free:
        why = f"{tokens:,} tokens take {format_bytes(needed)} at once, and {format_bytes(free)} are free"
        raise OutOfMemory("--compile cannot serve here", why, "choose a smaller --window, or leave it out")


def _begun(layer: Any) -> bool:
    """Whether a layer's memory is known and its first tokens are complete."""
    return bool(layer.kv.tensors()) and len(getattr(layer, "head", ())) >= getattr(layer, "sinks", 0)
