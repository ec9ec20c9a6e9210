"""What every engine offers: count, render, prefill, generate, snapshot, save and load.

Nothing outside an engine may assume that the model runs in this process; the local torch engine
(`longchat_cli.local`) is the first implementation.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from longchat_cli.pages import Store
from longchat_cli.prompt import Message, Prompt
from longchat_cli.sampling import Sampling
from longchat_cli.thinking import Thinking

Progress = Callable[[int, int], None]
"""Called with (tokens done, tokens in all)."""


def behind(progress: Progress | None, begin: int, total: int) -> Progress | None:
    """Progress of a part that begins at `begin` of `total` tokens."""
    return (lambda done, _: progress(begin + done, total)) if progress else None


@dataclass(frozen=True)
class EngineInfo:
    """What an engine is: `window` is the trained context length in tokens, `options` are the method's."""

    model: str
    window: int
    method: str
    device: str
    dtype: str
    fingerprint: str
    capabilities: frozenset[str] = field(default_factory=frozenset)
    notes: tuple[str, ...] = ()  # what `--verbose` says of the model
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Piece:
    """A piece of a streamed answer: printable `text` (complete characters only) and the tokens behind it.

    `stop` is set on the last piece: 'eos', 'length', 'stop' (a stop string), 'loop' (one phrase is said over
    and over) or 'cancelled'. A `thought` comes before the answer and is none of it.
    """

    text: str
    ids: tuple[int, ...] = ()
    logprob: float = 0.0
    stop: str | None = None
    thought: bool = False


@dataclass(frozen=True)
class Coverage:
    """What the next query can see: tokens seen, still visible (raw or pooled), forgotten; bytes held.

    All is visible from the stream position `recent` on.
    """

    seen: int
    visible: int
    forgotten: int
    bytes: int
    recent: int = 0


class Engine(Protocol):
    """One model with one conversation state (its cache)."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def thinking(self) -> Thinking | None:
        """How the model thinks before it answers; None: it does not."""

    def count(self, text: str) -> int:
        """Tokens in `text` by the model's own tokenizer, special tokens off."""

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, special tokens off."""

    def render(self, messages: Sequence[Message], *, answer: bool = True) -> Prompt:
        """Messages to token ids by the model's template; `answer` opens the assistant's turn."""

    def render_turn(self, message: Message) -> Prompt:
        """Close the running answer, add the user's turn, open the next answer; appended, never re-read."""

    def prefill(
        self, ids: Sequence[int], progress: Progress | None = None, cancel: Callable[[], bool] | None = None
    ) -> int:
        """Read `ids` into the state, chunk by chunk; returns how many were read (fewer when cancelled)."""

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
        """As `prefill`, into an empty state, through the pages of `store`: (read or taken, taken of these).

        The state is the one `prefill` makes, bit for bit; logits are there once something is read behind it.
        `turns` come behind `ids`, as far as possible as `keep` left them; those numbered in `pinned` (from 0)
        are not to be forgotten, those in `subjects` begin new ones.
        """

    def keep(self, shared: int = 0) -> None:
        """Keep the state of what was read and written since `read`, or `keep`, as a turn in that store.

        The first `shared` turns are another conversation's, too.
        """

    def begin_turn(self, ids: Sequence[int], forget: bool = False) -> None:
        """A user's turn, `ids`, is read next; methods that forget whole turns count from its text on.

        `forget`: it begins a new subject; what was said before is out of sight from its text on.
        """

    def weigh(self, ids: Sequence[int]) -> list[float]:
        """The log-probability of each of `ids[1:]`, some hundred at most, behind the state, which stays."""

    def pin(self, start: int, stop: int, on: bool = True) -> bool:
        """The turns at the stream positions [start, stop) are never to be forgotten; whether that holds.

        Raises ContextOverflow when they do not fit the trained window beside the recent tokens.
        """

    def generate(
        self,
        sampling: Sampling,
        cancel: Callable[[], bool] | None = None,
        said: Sequence[Sequence[int]] = (),
    ) -> Iterator[Piece]:
        """Stream an answer; the state always holds whole tokens and agrees with what was yielded.

        `said`: the tokens of earlier answers, which the penalties look at, too.
        """

    def coverage(self) -> Coverage: ...

    def snapshot(self) -> Any:
        """A cheap mark of the state; `restore` returns to it, any number of times."""

    def restore(self, mark: Any) -> None: ...

    def reset(self) -> None:
        """Forget everything: an empty state."""

    def save(self, path: Path) -> None: ...

    def load(self, path: Path) -> None: ...
