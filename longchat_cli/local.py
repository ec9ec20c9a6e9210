"""The engine in this process: a torch decoder, its tokenizer and one state under one method."""

from __future__ import annotations

import array
import contextlib
import functools
import gc
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import chain, pairwise, zip_longest
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from longchat_cli import state
from longchat_cli.attention import method_class
from longchat_cli.attention.layer import Cache, Method
from longchat_cli.constrain import Constraint
from longchat_cli.engine import Coverage, EngineInfo, Piece, Progress, behind
from longchat_cli.errors import ContextOverflow, UsageError
from longchat_cli.kernels import native
from longchat_cli.models import lookup
from longchat_cli.models.lookup import Lookup
from longchat_cli.models.memory import give_back
from longchat_cli.models.static import StaticStep
from longchat_cli.pages import PAGE, Store
from longchat_cli.prefix import Prefix
from longchat_cli.prompt import Assembler, Message, Prompt
from longchat_cli.sampling import Sampling
from longchat_cli.terminal_text import StopMatcher
from longchat_cli.thinking import Thinking
from longchat_cli.tokens import Tokenizer

SOME = 256
"""Tokens from which a prompt's temporaries are worth giving back."""
CHUNK, FAST_CHUNK = 512, 1024
"""Rows of a prefill call, after which it can be stopped; more where tile instructions make up for that:
a row among 1,024 takes a fifth less time than one among 512."""
SHORTEST_LOOP, LONGEST_LOOP = 4, 64
LOOP_REPEATS, SAMPLED_REPEATS = 4, 8
"""Greedy decoding never leaves a loop: four rounds of the same 4 to 64 tokens end the answer. Sampling may
leave one; what has not after eight rounds is hardly going to."""
COLDEST = 1e-30
"""Below this temperature the likeliest token is taken: logits divided by it could leave float32."""
RAREST = 1e-30
"""No token of a smaller probability is chosen: one that a schema forbids has none."""
PENALTY_SPAN = 256
"""The repetition penalty looks at the last tokens that the model wrote, this many: not at what it read, which
it may have to quote, nor at the template's, without which no answer would end."""
START, STARTS = 3, 16
"""The start penalty looks at the first tokens, this many, of the last answers, this many."""


class Decoder(Protocol):
    """What an engine needs of a model; `models.lean.LeanDecoder` and `attention.hf.HFDecoder` are the two."""

    window: int
    vocab_size: int
    device: torch.device
    dtype: torch.dtype

    def new_cache(self, method: Method) -> Cache: ...

    def forward(self, ids: Tensor, cache: Cache, logits: int = 1) -> Tensor: ...


class LocalEngine:
    """Implements `engine.Engine` for a decoder in this process.

    `compile`: decode in a step of fixed shapes. Raises UsageError where `models.static` cannot, and where the
    method is to forget subjects that layers of the model's own go on seeing.
    """

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Tokenizer,
        method: Method,
        info: EngineInfo,
        chunk: int | None = None,
        compile: bool = False,
    ) -> None:
        self.decoder, self.tokenizer, self.method = decoder, tokenizer, method
        self.assembler = Assembler(tokenizer)
        self._info = replace(info, options=asdict(method))
        chunk = chunk or (FAST_CHUNK if decoder.device.type == "cpu" and native.has_tiles() else CHUNK)
        self.chunk = sys.maxsize if method.whole else min(chunk, method.chunk or chunk)
        self.stepper: StaticStep | Lookup | None = None
        if compile:
            self.stepper = StaticStep(decoder, method)
        elif lookup.serves(decoder, method):
            self.stepper = Lookup(decoder, lambda: self.ids)
        self.reset()
        whole = len(self.cache.ruled()) == len(self.cache.layers)
        if getattr(method, "evict", "") == "subjects" and not whole:
            why = "some layers of the model have a window of their own, in which all stays visible"
            raise UsageError("--evict subjects cannot serve here", why, "choose tokens or turns")

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def thinking(self) -> Thinking | None:
        return self.assembler.thinking

    @property
    def cache(self) -> Cache:
        """The state, up to date."""
        if self.stepper is not None:
            self.stepper.settle(self._cache)
        return self._cache

    @cache.setter
    def cache(self, cache: Cache) -> None:
        if self.stepper is not None:
            self.stepper.forget()
        self._cache = cache

    def reset(self) -> None:
        self.cache = self.decoder.new_cache(self.method)
        self.ids = array.array("I")  # every token read or written, four bytes each
        self.logits: Tensor | None = None
        self._trail: tuple[Prefix, Any] | None = None  # what is kept of `ids`, and the mark at its end

    def count(self, text: str) -> int:
        return len(self.encode(text))

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def render(self, messages: Sequence[Message], *, answer: bool = True) -> Prompt:
        return self.assembler.render(messages, answer=answer)

    def render_turn(self, message: Message) -> Prompt:
        return self.assembler.turn(message)

    def prefill(
        self, ids: Sequence[int], progress: Progress | None = None, cancel: Callable[[], bool] | None = None
    ) -> int:
        done = 0
        self.cache.expect(len(ids))
        while done < len(ids) and not (cancel and cancel()):
            part = ids[done : done + self.chunk]
            self.feed(part, decoding=False)
            done += len(part)
            if progress:
                progress(done, len(ids))
        if done >= SOME:
            give_back()
        return done

    def read(
        self,
        ids: Sequence[int],
        store: Store,
        progress: Progress | None = None,
        cancel: Callable[[], bool] | None = None,
        turns: Sequence[Sequence[int]] = (),
        pinned: Collection[int] = (),
        subjects: Collection[int] = (),
    ) -> tuple[int, int]:
        page = -(-PAGE // self.chunk) * self.chunk  # pages end where calls do
        device = self.decoder.device
        identity = {**self._identity(), "chunk": self.chunk, "device": device.type}
        prefix = Prefix(store, identity, ids, page, device)
        for number, turn in enumerate(turns):
            prefix = prefix.turn(turn, number in subjects)
        ids = [*ids, *chain.from_iterable(turns)]
        ends = [0, *prefix.ends]
        at = reused = 0
        exact = True  # a turn that was decoded and one that is read differ in their last bits
        try:
            while ends[at] < len(ids) and not (cancel and cancel()):
                begin, start = ends[at], at
                if exact and (at := prefix.advance(self.cache, start)) > start:
                    reused += ends[at] - begin
                    self.ids.extend(ids[begin : ends[at]])
                    self.logits = None
                    self._pin_again(ends[prefix.text : at + 1], pinned)
                else:
                    before = self.cache.snapshot()
                    if at >= prefix.text:
                        self.begin_turn(ids[begin : ends[at + 1]], at - prefix.text in subjects)
                    done = self.prefill(ids[begin : ends[at + 1]], behind(progress, begin, len(ids)), cancel)
                    if begin + done < ends[at + 1]:
                        return begin + done, reused
                    prefix.keep(self.cache, before, at)
                    at += 1
                    exact = at <= prefix.text
                    if not exact and at - prefix.text - 1 in pinned:
                        self.pin(begin, ends[at])
                if progress:
                    progress(ends[at], len(ids))
        finally:
            store.touch()
        if ends[at] == len(ids):
            self._trail = prefix, self.cache.snapshot()
        return ends[at], reused

    def _pin_again(self, ends: Sequence[int], pinned: Collection[int]) -> None:
        """Turns that end at `ends` may have been pinned, or released, since their state was kept."""
        for number, (start, stop) in enumerate(pairwise(ends)):
            if number in pinned or self.cache.pinned():
                with contextlib.suppress(ContextOverflow):
                    self.pin(start, stop, number in pinned)

    def keep(self, shared: int = 0) -> None:
        if self._trail is None:
            return
        prefix, before = self._trail
        new = self.ids[prefix.ends[-1] :]
        if new:
            longer = prefix.turn(new, self.cache.subject() >= prefix.ends[-1])
            longer.keep(self.cache, before, len(prefix.ends), shared)
            self._trail = longer, self.cache.snapshot()

    def generate(
        self,
        sampling: Sampling,
        cancel: Callable[[], bool] | None = None,
        said: Sequence[Sequence[int]] = (),
    ) -> Iterator[Piece]:
        generator = torch.Generator().manual_seed(sampling.seed) if sampling.seed is not None else None
        constraint = Constraint(sampling.schema, self.tokenizer) if sampling.schema else None
        decoder, matcher = self.tokenizer.decoder(), StopMatcher((*sampling.stop, *self.assembler.stops))
        recent = deque(chain.from_iterable(said), PENALTY_SPAN)
        starts = zip_longest(*(ids[:START] for ids in said[-STARTS:]))
        for count in range(sampling.max_tokens + 1):
            if count == sampling.max_tokens or (cancel and cancel()):
                # Bytes of a character that is not complete yet are left out.
                yield Piece(matcher.flush(), stop="length" if count == sampling.max_tokens else "cancelled")
                return
            assert self.logits is not None, "generate needs a prefilled prompt"
            logits = constraint.allow(self.logits) if constraint else self.logits
            begun = [id for id in next(starts, ()) if id is not None]
            token, logprob = choose(logits, sampling, recent, generator, begun)
            if token in self.tokenizer.eos_ids:
                tail, _ = matcher.feed(decoder.flush())
                yield Piece(tail + matcher.flush(), stop="eos")
                return
            # Fed before it is yielded: whoever stops listening leaves a state that agrees with what they saw.
            self.feed([token], decoding=True)
            recent.append(token)
            if constraint:
                constraint.take(token)
            text, stopped = matcher.feed(decoder.push(token))
            if stopped:
                yield Piece(text, (token,), logprob, "stop")
                return
            if self._loops(count + 1, SAMPLED_REPEATS if sampling.temperature else LOOP_REPEATS):
                yield Piece(text + matcher.flush(), (token,), logprob, "loop")
                return
            yield Piece(text, (token,), logprob)

    def _loops(self, written: int, rounds: int) -> bool:
        """Whether the answer, the last `written` tokens, ends in one phrase said so many times."""
        tail = self.ids[-min(written, rounds * LONGEST_LOOP) :]
        return any(
            tail[-period * rounds : -period] == tail[-period * (rounds - 1) :]
            for period in range(SHORTEST_LOOP, len(tail) // rounds + 1)
        )

    def coverage(self) -> Coverage:
        seen, visible = self.cache.seen, self.cache.visible()
        held = self.cache.bytes() + (0 if self.stepper is None else self.stepper.bytes())
        return Coverage(seen, visible, seen - visible, held, self.cache.recent())

    def begin_turn(self, ids: Sequence[int], forget: bool = False) -> None:
        self.cache.begin_turn(self.cache.seen + self._closing(ids), forget)

    def weigh(self, ids: Sequence[int]) -> list[float]:
        mark = self.cache.snapshot()
        try:
            self.cache.decoding = False
            logits = self.decoder.forward(torch.tensor(ids), self.cache, logits=len(ids))
        finally:
            self.cache.restore(mark)
        likely = logits[:-1].float().log_softmax(dim=-1).cpu()
        return likely.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()

    def pin(self, start: int, stop: int, on: bool = True) -> bool:
        if self.method.forgets.startswith("nothing") or not self.method.unlimited:
            return True
        start += self._closing(self.ids[start:])
        if not on:
            self.cache.unpin(start)
            return True
        options = self._info.options
        held = options.get("sinks", 0) + self.cache.pinned()
        if held + stop - start + options.get("window", 0) > self._info.window:
            raise ContextOverflow(
                "these turns cannot be pinned",
                f"with the recent tokens they do not fit the {self._info.window:,} of {self._info.model}",
                "pin fewer, or choose a smaller --window",
            )
        return not isinstance(self.stepper, StaticStep) and self.cache.pin(start, stop + len(self._closes))

    @functools.cached_property
    def _closes(self) -> list[int]:
        """What closes an answer and opens the next turn, ahead of its text."""
        one, other = (self.assembler.turn(Message.of("user", word)).ids for word in ("0", "x"))
        return one[: next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)]

    def _closing(self, ids: Sequence[int]) -> int:
        """How many of `ids` do that."""
        return len(self._closes) if list(ids[: len(self._closes)]) == self._closes else 0

    def snapshot(self) -> Any:
        return self.cache.snapshot(), self.ids[:], self.logits, self._trail

    def restore(self, mark: Any) -> None:
        saved, ids, self.logits, self._trail = mark
        self.cache.restore(saved)
        self.ids = ids[:]

    def save(self, path: Path) -> None:
        extra = {} if self.logits is None else {"logits": self.logits}
        state.save(path, self.cache, {**self._identity(), "ids": self.ids.tolist()}, extra)

    def load(self, path: Path) -> None:
        cache = self.decoder.new_cache(self.method)
        about, extra = state.load(path, cache, self._identity(), self.decoder.device)
        self.cache = cache
        self.ids = array.array("I", about["ids"])
        self.logits = extra.get("logits")
        self._trail = None

    def _identity(self) -> dict[str, Any]:
        info = self._info
        return {
            "model": info.fingerprint,
            "method": info.method,
            "options": info.options,
            "dtype": info.dtype,
        }

    def feed(self, ids: Sequence[int], decoding: bool) -> None:
        """One forward, as a prompt or as decoding; whatever interrupts it leaves the state as it was."""
        logits = None
        if self.stepper is not None and decoding and len(ids) == 1:
            logits = self.stepper.feed(ids[0], self._cache)
        self.logits = self._forward(ids, decoding) if logits is None else logits
        self.ids.extend(ids)

    def _forward(self, ids: Sequence[int], decoding: bool) -> Tensor:
        mark = self.cache.snapshot()
        self.cache.decoding = decoding
        try:
            return self.decoder.forward(torch.tensor(ids, dtype=torch.int64), self.cache)[-1]
        except BaseException:
            self.cache.restore(mark)
            raise


def choose(
    logits: Tensor,
    sampling: Sampling,
    recent: Collection[int],
    generator: torch.Generator | None = None,
    begun: Sequence[int] = (),
) -> tuple[int, float]:
    """The next token and its log-probability under the model, from logits float32 [vocab].

    The repetition penalty is that of CTRL (Keskar et al., 2019), section 4.1, with what was `recent`ly said.
    The start penalty, ours, is taken off once for each time that a token is in `begun`.
    """
    # In numpy: torch hands every operation on so many numbers to threads, which takes longer than these do.
    known = logits.detach().to("cpu", torch.float32).numpy()
    most = known.max()
    whole = most + np.log(np.exp(known - most).sum(dtype=np.float64))
    scores = known
    if sampling.repetition_penalty != 1.0 and len(recent):
        index = np.unique(np.fromiter(recent, np.int64))
        held, scores = known[index], known.copy()
        factor = np.where(held > 0, 1 / sampling.repetition_penalty, sampling.repetition_penalty)
        scores[index] = held * factor
    if sampling.start_penalty and begun:
        scores = scores.copy()
        np.subtract.at(scores, np.array(begun), sampling.start_penalty)
    if sampling.temperature < COLDEST:
        token = int(scores.argmax())
    else:
        token = _drawn(scores / sampling.temperature, sampling, generator)
    return token, float(known[token] - whole)


def _drawn(scores: np.ndarray, sampling: Sampling, generator: torch.Generator | None) -> int:
    """A token drawn by its probability, from scores float32 [vocab]."""
    probabilities = np.exp(scores - scores.max())
    probabilities /= probabilities.sum(dtype=np.float64)
    kept = _kept(probabilities, sampling)
    ends = probabilities[kept].cumsum(dtype=np.float64)
    at = float(torch.rand((), generator=generator, dtype=torch.float64)) * ends[-1]
    return int(kept[min(int(ends.searchsorted(at, side="right")), len(kept) - 1)])


def _kept(probabilities: np.ndarray, sampling: Sampling) -> np.ndarray:
    """The tokens that top-k, min-p and then top-p leave of probabilities [vocab], int64."""
    least = max(sampling.min_p * probabilities.max(), RAREST)
    if 0 < sampling.top_k < len(probabilities):
        least = max(least, np.partition(probabilities, -sampling.top_k)[-sampling.top_k])
    kept = np.flatnonzero(probabilities >= least)
    if sampling.top_p >= 1:
        return kept
    left = probabilities[kept].sum(dtype=np.float64)
    # The last token that top-p keeps and all rarer ones share more than 1 - p: it is no rarer than their
    # mean. So few need to be sorted.
    kept = kept[probabilities[kept] >= (1 - sampling.top_p) * left / len(kept)]
    kept = kept[np.argsort(-probabilities[kept], kind="stable")]
    ordered = probabilities[kept]
    return kept[ordered.cumsum(dtype=np.float64) - ordered < sampling.top_p * left]


def open_engine(
    model: str | None = None,
    method: str = "full",
    options: Mapping[str, Any] | None = None,
    device: str = "auto",
    dtype: str = "auto",
    quantize: str | None = None,
    compile: bool = False,
) -> LocalEngine:
    """Load a model (pulling or converting it when needed) under a method.

    Raises LongchatError subclasses: unknown names, damaged or unreachable models, options out of range.
    """
    from longchat_cli.models import load

    built = method_class(method).build(options or {})
    ready = load.find(model)
    decoder = load.load_decoder(ready, device=device, dtype=dtype, quantize=quantize)
    tokenizer = Tokenizer.from_dir(ready.path)
    gc.freeze()  # what imports and loading left is not looked through again and again while decoding
    give_back()
    info = EngineInfo(
        model=ready.name,
        window=decoder.window,
        method=method,
        device=str(decoder.device),
        dtype=str(decoder.dtype).removeprefix("torch."),
        fingerprint=f"{ready.fingerprint}-{quantize}" if quantize else ready.fingerprint,
        capabilities=frozenset({"save", "snapshot"}),
        notes=decoder.notes,
    )
    return LocalEngine(decoder, tokenizer, built, info, compile=compile)


def with_method(engine: LocalEngine, name: str, options: Mapping[str, Any] | None = None) -> LocalEngine:
    """The same loaded model under another method, with an empty state."""
    info = replace(engine.info, method=name)
    built, compiled = method_class(name).build(options or {}), isinstance(engine.stepper, StaticStep)
    return LocalEngine(engine.decoder, engine.tokenizer, built, info, compile=compiled)
