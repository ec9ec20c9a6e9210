"""A conversation over an engine: append-only, cancellable, transcript and state always in agreement."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from longchat_cli import attention
from longchat_cli.ask import Open, compose, messages, opening
from longchat_cli.documents import Document
from longchat_cli.engine import Coverage, Engine, Piece, Progress
from longchat_cli.errors import ContextOverflow
from longchat_cli.prompt import Message
from longchat_cli.sampling import Sampling

Cancel = Callable[[], bool]


@dataclass
class Turn:
    """One side's words. `stop` of an answer: why it ended ('eos', 'length', 'stop', 'cancelled')."""

    role: str
    text: str
    stop: str | None = None


class Conversation:
    """Turns over one engine state.

    Each token is prefilled once: the opening (system prompt, documents) ahead of the first turn, then every
    turn behind what is there. A turn whose prefill is cancelled or fails leaves no trace; an answer that is
    cut short stays, as far as it came, in the transcript and in the state.
    """

    def __init__(self, engine: Engine, system: str | None = None, documents: Sequence[Document] = ()) -> None:
        self.engine, self.system, self.documents = engine, system, documents
        self.opening = opening(engine, system, documents)
        self.turns: list[Turn] = []

    def open(self, progress: Progress | None = None, cancel: Cancel | None = None) -> bool:
        """Read what comes before the first words; False when cancelled, with an empty state.

        Raises ContextOverflow when the method cannot hold it.
        """
        self._require_room(len(self.opening))
        self.engine.reset()
        self.turns = []
        return self._read(self.opening, progress, cancel)

    def send(
        self,
        text: str,
        sampling: Sampling,
        progress: Progress | None = None,
        cancel: Cancel | None = None,
    ) -> Iterator[Piece]:
        """Read the user's turn and stream the answer. Raises ContextOverflow before anything is read."""
        ids = self._turn_ids(text)
        self._require_room(len(ids))
        if not self._read(ids, progress, cancel):
            yield Piece("", stop="cancelled")
            return
        answer = Turn("assistant", "", "cancelled")  # until the engine says otherwise
        self.turns += [Turn("user", text), answer]
        for piece in self.engine.generate(self._within_room(sampling), cancel):
            answer.text += piece.text
            answer.stop = piece.stop or answer.stop
            yield piece

    def coverage(self) -> Coverage:
        """What the next turn can see."""
        return self.engine.coverage()

    def _turn_ids(self, text: str) -> list[int]:
        if self.turns:
            return self.engine.render_turn(Message.of("user", text)).ids
        first = self.engine.render(messages(self.system, compose(self.documents, text))).ids
        return first[len(self.opening) :]

    def _read(self, ids: Sequence[int], progress: Progress | None, cancel: Cancel | None) -> bool:
        """Prefill all of `ids` or nothing."""
        mark = self.engine.snapshot()
        try:
            done = self.engine.prefill(ids, progress, cancel)
        except BaseException:
            self.engine.restore(mark)
            raise
        if done < len(ids):
            self.engine.restore(mark)
        return done == len(ids)

    def _require_room(self, new: int) -> None:
        if self._room() <= new:
            info, seen = self.engine.info, self.engine.coverage().seen
            raise ContextOverflow(
                f"{info.method} is at its end",
                f"{seen:,} tokens so far and {new:,} new ones do not fit the {info.window:,} of {info.model}",
                "start anew (/new), or use --method sink, which goes on without end",
            )

    def _within_room(self, sampling: Sampling) -> Sampling:
        return replace(sampling, max_tokens=int(min(sampling.max_tokens, self._room())))

    def _room(self) -> float:
        """Tokens that still fit; infinite for methods that forget."""
        info = self.engine.info
        if attention.method_class(info.method).unlimited:
            return float("inf")
        return info.window - self.engine.coverage().seen


def open_conversation(
    open_engine: Open,
    method: str,
    options: Mapping[str, Any],
    system: str | None = None,
    documents: Sequence[Document] = (),
) -> Conversation:
    """A conversation whose opening stays visible for ever where the method can pin it (its `sinks`).

    When system prompt and documents do not fit beside the recent tokens, the system prompt alone is pinned.
    """
    engine = open_engine(method, options)
    conversation = Conversation(engine, system, documents)
    for first in (conversation.opening, opening(engine, system, ())):
        pinned = pin(method, options, len(first), engine.info.window)
        if pinned is not None:
            conversation.engine = open_engine(method, pinned)
            break
    return conversation


def pin(method: str, options: Mapping[str, Any], tokens: int, window: int) -> dict[str, Any] | None:
    """Options that keep the first `tokens` visible; None if the method has none, the user has decided, or
    they do not fit the trained `window` beside the recent ones."""
    values: dict[str, Any] = {
        option.name: option.default for option in dataclasses.fields(attention.method_class(method))
    }
    if "sinks" not in values or "sinks" in options:
        return None
    values.update(options)
    recent = values.get("window", values.get("local", 0))
    return {**options, "sinks": max(tokens, values["sinks"])} if tokens + recent <= window else None
