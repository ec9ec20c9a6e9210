"""The contract of a method: it keeps what it wants of the new keys and values and returns what is visible.

A method is a frozen dataclass (its fields are the user's options) that makes one `Layer` per attention
layer of the model. A layer decides; a kernel computes. Tensors kept on a layer are replaced, never written
in place, so that a snapshot is a copy of references.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from longchat_cli import kernels
from longchat_cli.attention.buffer import Buffer, KVBuffer, PackedBuffer
from longchat_cli.attention.rope import Rope
from longchat_cli.errors import UsageError
from longchat_cli.kernels import Bound, Observe, Rotation, Span
from longchat_cli.kernels.span import INDEX_ROWS


class Rows:
    """Where the new tokens of one call stand: at positions first, first + 1, ...

    In a step of fixed shapes (`models.static`) `first` is an int64 tensor [1] that nobody may look at.
    """

    first: int
    decoding: bool

    @property
    def rows(self) -> int:
        raise NotImplementedError

    @property
    def end(self) -> int:
        return self.first + self.rows

    @property
    def positions(self) -> Tensor:
        """int64 [rows]."""
        return places(self.first, self.rows, torch.device("cpu"))


class Coming(Rows):
    """Tokens to be decoded on a CPU, whose queries, keys and values come later."""

    decoding = True

    def __init__(self, first: int, rows: int) -> None:
        self.first, self._rows = first, rows

    @property
    def rows(self) -> int:
        return self._rows


@dataclass(frozen=True)
class Step(Rows):
    """The new tokens of one call: q [heads, rows, dim] and k, v [KV heads, rows, dim], rotated at their true
    positions first, first + 1, ...; `decoding` is false while a prompt is read. `scale`, `softcap` and the
    learned `sinks` shape logits as in `kernels.attend`."""

    q: Tensor
    k: Tensor
    v: Tensor
    first: int
    scale: float
    decoding: bool
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def rows(self) -> int:
        return self.k.shape[1]

    @property
    def positions(self) -> Tensor:
        return places(self.first, self.rows, self.k.device)


def places(first: int | Tensor, rows: int, device: torch.device) -> Tensor:
    """int64 [rows]: first, first + 1, ...; a tensor [1] is the place of one row."""
    return first if isinstance(first, Tensor) else torch.arange(first, first + rows, device=device)


LARGEST = 2**31 - 1
"""No option is larger: as int32, kernels' bounds hold it, and so do sums of a few as int64."""


def option(
    default: Any,
    text: str,
    low: float | None = None,
    high: float = LARGEST,
    choices: Sequence[str] = (),
    budget: float = 0,
) -> Any:
    """A method's option: its default, help text and choices; a number's least and greatest value.

    `budget`: the share of a token budget that it takes when methods are compared at the same bytes.
    """
    about = {"help": text, "low": low, "high": high, "choices": tuple(choices), "budget": budget}
    return dataclasses.field(default=default, metadata=about)


Run = Callable[[Tensor, "Cache", int], Tensor]
"""Reads token ids int64 [rows] at the cache's position; float32 logits [the last so many rows, vocab]."""


@dataclass(frozen=True)
class Method:
    """Options of a method. `needs_rope`: the method moves keys or queries to other positions;
    `dense_prompts`: while a prompt is read, every query sees every earlier token."""

    summary: ClassVar[str]
    keeps: ClassVar[str]
    forgets: ClassVar[str]
    cost: ClassVar[str]
    needs_rope: ClassVar[bool] = False
    dense_prompts: ClassVar[bool] = False
    unlimited: ClassVar[bool] = False  # serves texts longer than the trained window
    chunk: ClassVar[int | None] = None  # most rows a prefill call may have, where the method sets it
    whole: ClassVar[bool] = False  # a prompt comes in one call
    observes_prompts: ClassVar[bool] = False  # wants the probabilities of every query of a prompt
    exact_rows: ClassVar[bool] = False  # rows decoded together see what each would alone; `rewind` works
    prefill: str = option("own", "how prompts are read: own, or minference[:option=value,...]")
    kv_dtype: str = option(
        "auto",
        "how keys and values are stored; auto: as the model computes, fp8 to int4: recent tokens exact",
        choices=("auto", "bf16", "fp8", "int8", "int4"),
    )

    def __post_init__(self) -> None:
        """Check every option against its metadata. Raises UsageError."""
        for field in dataclasses.fields(self):
            value, flag = getattr(self, field.name), "--" + field.name.replace("_", "-")
            low, high, choices = (field.metadata.get(name) for name in ("low", "high", "choices"))
            if low is not None and not value >= low:  # NaN is refused as well
                raise UsageError(f"{flag} is {value}", f"it must be at least {low}")
            if low is not None and value > high:
                raise UsageError(f"{flag} is {value}", f"it must be at most {high}")
            if choices and value not in choices:
                raise UsageError(f"{flag} is {value}", "", f"choose from {', '.join(choices)}")
        if _prefill(self.prefill) and not (self.dense_prompts and not self.observes_prompts):
            why = (
                "weighs keys by all queries of a prompt"
                if self.observes_prompts
                else "reads prompts its own way"
            )
            raise UsageError("--prefill does not fit this method", f"it {why}", "leave it out")

    def layer(self, index: int, layers: int, rope: Rope | None) -> Layer:
        """The state of attention layer `index` of `layers`."""
        raise NotImplementedError

    def forward(self, run: Run, ids: Tensor, cache: Cache, logits: int) -> Tensor:
        """How new ids int64 [rows] reach the model; methods that read text anew override it."""
        return run(ids, cache, logits)

    def narrow(self, spans: list[Span], new: Step) -> list[Span]:
        """What more than 64 rows of a prompt see of `spans`, as `prefill` has it."""
        other = _prefill(self.prefill)
        return other.narrow(spans, new) if other else spans

    def link(self, layers: Sequence[Layer]) -> None:
        """Called once with the layers of a cache, in order: they may get to know each other."""

    @classmethod
    def at_budget(cls, tokens: int, length: int) -> dict[str, Any]:
        """Options that hold about `tokens` of `length` tokens, or see that many per step where all stay."""
        shares = {field.name: field.metadata.get("budget") for field in dataclasses.fields(cls)}
        return {name: max(int(tokens * share), 1) for name, share in shares.items() if share}

    @classmethod
    def options(cls) -> list[dataclasses.Field]:
        """The method's own options, then those that every method has."""
        shared = {field.name for field in dataclasses.fields(Method)}
        return sorted(dataclasses.fields(cls), key=lambda field: field.name in shared)

    @classmethod
    def build(cls, options: Mapping[str, Any]) -> Method:
        """A method from user options. Raises UsageError for an unknown option or a value out of range."""
        known = {field.name for field in dataclasses.fields(cls)}
        for name in options:
            if name not in known:
                raise UsageError(f"--{name.replace('_', '-')} is not an option of this method")
        return cls(**options)


@functools.cache
def _prefill(text: str) -> Method | None:
    """The method that reads prompts in place of one's own. Raises UsageError."""
    from longchat_cli.attention import minference  # it needs this module

    return None if text == "own" else minference.parse(text)


class Seen(NamedTuple):
    """What new rows see of a buffer: its tokens from absolute index `start` up to `stop` (bounds per row)."""

    buffer: Buffer
    start: Bound
    stop: Bound
    turn: Rotation | None = None
    observe: Observe | None = None

    def spans(self) -> list[Span]:
        return [
            Span(
                k,
                v,
                at_least(self.start - first, 0),
                at_most(self.stop - first, k.shape[1]),
                self.turn,
                self.observe,
            )
            for k, v, first in self.buffer.parts()
            if not isinstance(self.stop, int) or first < self.stop
        ]


class Layer:
    """One attention layer's state under a method.

    Subclasses define `joins` and `sees`, or `spans` where these need the tokens' queries, keys or values, and
    `observe` if they ask for probabilities.
    """

    onward: Tensor | None = None  # int64, the rows of the last call that deeper layers need; None: all

    def __init__(self, method: Any, rope: Rope | None) -> None:
        self.method, self.rope = method, rope
        self.seen = 0

    def buffer(self, first: int = 0) -> Buffer:
        """An empty buffer for keys and values from the absolute index `first` on, in the precision chosen."""
        kind = self.method.kv_dtype
        if kind in ("auto", "bf16"):
            return KVBuffer(first, torch.bfloat16 if kind == "bf16" else None)
        return PackedBuffer(kind, first)

    def expect(self, end: int) -> None:
        """A prompt up to the position `end` is about to come in several calls."""

    def joins(self, new: Rows) -> list[Buffer]:
        """The buffers that the new tokens join, without what these push out."""
        raise NotImplementedError

    def sees(self, new: Rows) -> list[Seen]:
        """What the new tokens' queries see, once they have joined, themselves included."""
        raise NotImplementedError

    alike: ClassVar[bool] = False
    """Whether what the layers of a cache see differs in nothing but whose buffers it is: then the first one's
    `sees` speaks for all. Whoever defines `sees` says so anew."""

    def __init_subclass__(cls) -> None:
        if "sees" in vars(cls) and "alike" not in vars(cls):
            cls.alike = False

    def foreseen(self, new: Rows) -> bool:
        """Whether `joins` and `sees` are all that decoding these tokens asks for, before they are known."""
        return type(self).spans is Layer.spans

    def spans(self, new: Step) -> list[Span]:
        """Take the new tokens and return what their queries see, the tokens themselves included."""
        for buffer in self.joins(new):
            buffer.append(new.k, new.v)
        return [span for seen in self.sees(new) for span in seen.spans()]

    def shown(self, new: Step) -> list[Span]:
        """`spans` without those that have no keys."""
        return [span for span in self.spans(new) if span.k.shape[1]]

    def observe(self, scores: Sequence[Tensor | None], new: Step) -> None:
        """Receive the probabilities the spans asked for, float32 [KV heads, keys] each."""

    def visible(self) -> int:
        """Tokens that the next query can see, raw or pooled."""
        return self.seen

    def recent(self) -> int:
        """Where what is forgotten ends: all from this absolute index on is visible."""
        return 0

    subject = 0
    """Where the last subject of a chat began, for methods that forget what was before it."""

    def begin_turn(self, position: int, forget: bool = False) -> None:
        """A turn of a chat begins at `position`, which may be ahead; for methods that forget whole turns.
        `forget`: it begins a new subject."""

    def pin(self, start: int, stop: int) -> bool:
        """Tokens [start, stop) are to stay visible; `stop` may be ahead. Whether they do from now on."""
        return False

    def pinned(self) -> int:
        """Tokens that were pinned."""
        return 0

    def unpin(self, start: int) -> None:
        """What was pinned from `start` on need not stay."""

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
        """q [heads, rows, dim] and k, v [KV heads, rows, dim] at true positions -> [heads, rows, dim]."""
        new = Step(q, k, v, self.seen, scale, decoding, softcap, sinks)
        spans = self.shown(new)
        if not decoding and new.rows > INDEX_ROWS:
            spans = self.method.narrow(spans, new)
        out, scores = kernels.attend(q, spans, scale, softcap, sinks)
        self.seen = new.end
        if any(span.observe for span in spans):
            self.observe(scores, new)
        return out

    def rewind(self, seen: int) -> None:
        """Go back to the first `seen` tokens, where the method has `exact_rows`."""
        raise NotImplementedError

    def turn(self, new: Rows, apparent: Bound) -> Rotation | None:
        """The rotation that moves the new queries from their positions to `apparent` ones (a bound)."""
        if self.rope is None:
            return None
        if isinstance(apparent, int) and isinstance(new.first, int) and new.rows == 1:
            return self.rope.shift(apparent - new.first)
        return self.rope.rotation(apparent - new.positions)

    def unrotated(self, k: Tensor, first: int) -> Tensor:
        """Keys [KV heads, tokens, dim] of the positions from `first` on, as if all stood at position 0."""
        if self.rope is None:
            return k.clone()
        return self.rope.unrotate(k, torch.arange(first, first + k.shape[1], device=k.device))

    def held(self) -> list[Tensor]:
        """Every tensor kept between calls (whole storages)."""
        return [tensor for value in self.state().values() for tensor in _tensors(value)]

    def state(self) -> dict[str, Any]:
        """The mutable part: everything but the rotation and the method's options (names in `fixed`)."""
        return {name: value for name, value in vars(self).items() if name not in self.fixed}

    fixed: ClassVar[frozenset[str]] = frozenset({"rope", "method"})

    def snapshot(self) -> dict[str, Any]:
        """A mark in O(1): buffers share their storage with it."""
        return {name: _copy(value) for name, value in self.state().items()}

    def restore(self, mark: dict[str, Any]) -> None:
        vars(self).update({name: _copy(value) for name, value in mark.items()})


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    if isinstance(value, Buffer):
        return value.tensors()
    return [value] if isinstance(value, Tensor) else []


def _copy(value: Any) -> Any:
    if isinstance(value, list):
        return [_copy(item) for item in value]
    return value.copy() if isinstance(value, Buffer) else value


def each_row(new: Rows, function: Callable[[Any], Any]) -> Bound:
    """`function(position)` for every new row: a number for one row (no tensors in decoding), else int64."""
    return function(new.first) if new.rows == 1 else function(new.positions)


def at_least(value: Any, low: int) -> Any:
    """max(value, low) for a number or a tensor."""
    if isinstance(value, int):  # the quickest test: every layer asks at every token
        return value if value > low else low
    return value.clamp(min=low)


def at_most(value: Any, high: int) -> Any:
    """min(value, high) for a number or a tensor."""
    if isinstance(value, int):
        return value if value < high else high
    return value.clamp(max=high)


def seen_by(new: Rows, buffer: Buffer, start: Bound = 0, observe: Observe | None = None) -> Seen:
    """Row at position p sees the buffer's tokens from absolute index `start` (a bound per row) up to p."""
    end = each_row(new, lambda position: position + 1)
    return Seen(buffer, at_least(start, buffer.first), end, observe=observe)


def causal(buffer: Buffer, new: Rows, start: Bound = 0, observe: Observe | None = None) -> list[Span]:
    """The spans of `seen_by`."""
    return seen_by(new, buffer, start, observe).spans()


def joined(scores: Sequence[Tensor | None]) -> Tensor:
    """The scores of the spans that asked, [KV heads, their keys]."""
    given = [score for score in scores if score is not None]
    return given[0] if len(given) == 1 else torch.cat(given, dim=-1)


class Cache:
    """A model's state: a layer each, None where the model keeps its own (`foreign`: sliding, linear ...).

    Whoever feeds tokens says in `decoding` whether they were decoded or are a prompt's; marks leave it out.
    `position` is the model's next position; a method that reads text anew has seen `skipped` tokens more, and
    keeps in `text` those it may read again.
    """

    def __init__(self, method: Method, layers: Sequence[Layer | None], foreign: Any = None) -> None:
        self.method = method
        self.layers = list(layers)
        self.decoding = False
        self.position = self.skipped = 0
        self.text = torch.empty(0, dtype=torch.int64)
        self.foreign = foreign
        method.link(self.ruled())
        self._empty = self.snapshot()

    @property
    def seen(self) -> int:
        """Tokens seen so far."""
        return self.position + self.skipped

    def restart(self, skipped: int) -> None:
        """Forget what was read, to go on after `skipped` tokens of the text; `text` stays."""
        text = self.text
        self.restore(self._empty)
        self.skipped, self.text = skipped, text

    def expect(self, tokens: int) -> None:
        """So many tokens are about to come in several calls."""
        for layer in self.own():
            layer.expect(self.position + tokens)

    def rewind(self, position: int) -> None:
        """Go back to an earlier position without a mark of it, where the method has `exact_rows`."""
        for layer in self.own():
            layer.rewind(position)
        self.position = position

    def own(self) -> list[Layer]:
        return [layer for layer in self.layers if layer is not None]

    def ruled(self) -> list[Layer]:
        """The layers under the cache's method: not those whose window is the model's."""
        return [layer for layer in self.own() if layer.method is self.method]

    def bytes(self) -> int:
        """Bytes of the storages actually held."""
        storages = {
            x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
            for layer in self.own()
            for x in layer.held()
        }
        return sum(storages.values())

    def visible(self) -> int:
        return min((layer.visible() for layer in self.ruled()), default=self.seen)

    def recent(self) -> int:
        """Where what is forgotten ends: all from this position of the stream on is visible."""
        return max((layer.recent() for layer in self.ruled()), default=0)

    def pinned(self) -> int:
        """Tokens of pinned turns."""
        return max((layer.pinned() for layer in self.ruled()), default=0)

    def subject(self) -> int:
        """Where the last subject began; 0: all is one."""
        return max((layer.subject for layer in self.ruled()), default=0)

    def begin_turn(self, position: int, forget: bool = False) -> None:
        for layer in self.ruled():
            layer.begin_turn(position, forget)

    def pin(self, start: int, stop: int) -> bool:
        held = [layer.pin(start, stop) for layer in self.ruled()]  # each of them, whatever the others say
        return all(held)

    def unpin(self, start: int) -> None:
        for layer in self.ruled():
            layer.unpin(start)

    def snapshot(self) -> Any:
        counters = self.position, self.skipped, self.text
        return counters, [layer.snapshot() for layer in self.own()], _foreign_copy(self.foreign)

    def restore(self, mark: Any) -> None:
        (self.position, self.skipped, self.text), layers, foreign = mark
        for layer, saved in zip(self.own(), layers, strict=True):
            layer.restore(saved)
        self.foreign = _foreign_copy(foreign)


def _foreign_copy(foreign: Any) -> Any:
    return None if foreign is None else foreign.copy()
