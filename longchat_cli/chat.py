"""A conversation over an engine: append-only, cancellable; transcript, state and what is saved agree."""

from __future__ import annotations

import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import EllipsisType
from typing import Any

from longchat_cli import answering, subjects
from longchat_cli.ask import Open, compose, messages, opening
from longchat_cli.documents import Document
from longchat_cli.engine import Coverage, Engine, Piece, Progress, behind
from longchat_cli.errors import LongchatError, UsageError
from longchat_cli.memory import NOTHING, Memory, Recalled, local_encoder
from longchat_cli.models import catalog
from longchat_cli.pages import Store
from longchat_cli.pinned import open_pinned
from longchat_cli.prompt import Message
from longchat_cli.sampling import Sampling
from longchat_cli.sessions import About, Chat, Session, Turn, known_as

Cancel = Callable[[], bool]
MARKS = 4
"""Exchanges that are taken back without reading anything; a mark of a bounded method weighs as much as it."""
LONG = 16_384
"""Tokens of a turn that take so long that it is said beforehand."""
SAID = 64
"""Earlier answers whose words may count against the same words in a new one."""


@dataclass(frozen=True)
class Context:
    """What the next turn can see, in tokens: of the `opening`, of `pinned` turns, of the first tokens beside
    the opening that stay (`sinks`), `retrieved` again by memory, all that is `visible`, what is `forgotten`.

    `turns` counts exchanges, `forgotten_turns` those of which nothing is visible; number `subject` began a
    new one (0: none did); `bytes` are held.
    """

    opening: int
    pinned: int
    sinks: int
    visible: int
    retrieved: int
    forgotten: int
    turns: int
    forgotten_turns: int
    bytes: int
    subject: int = 0


@dataclass(frozen=True)
class _Before:
    """All that an exchange changes."""

    mark: Any
    turns: list[Turn]
    marks: dict[int, Any]


class Conversation:
    """Turns over one engine state.

    Each token is prefilled once: the opening (system prompt, documents) ahead of the first turn, then every
    turn behind what is there. A turn whose prefill is cancelled or fails leaves no trace; an answer that is
    cut short stays, as far as it came, in the transcript and in the state. Exchanges, a user's turn and its
    answer, are numbered from 1.

    `session`: where it is kept, from the first turn on. `store`: where the state is, so that it need not be
    read again. `kept`: the chat that goes on, after `begin`.
    """

    think: int | None = None
    """Tokens of thoughts before an answer at most; None: as many as the model likes."""
    shows_thoughts: bool = True
    """Whether pieces of thoughts are handed on; they are kept in any case."""
    notice: Callable[[str], None] = staticmethod(lambda text: None)
    """Is told what memory has done."""

    def __init__(
        self,
        engine: Engine,
        system: str | None = None,
        documents: Sequence[Document] = (),
        session: Session | None = None,
        store: Store | None = None,
        kept: Chat | None = None,
    ) -> None:
        self.engine, self.system, self.documents = engine, system, documents
        self.session, self.store = session, store
        self.memory = self._memory()
        same = kept is not None and kept.about.fingerprint == engine.info.fingerprint
        as_kept = same and kept is not None and kept.about.system == system
        self.opening = kept.opening if kept and as_kept else opening(engine, system, documents)
        self.turns: list[Turn] = []
        if kept:
            self.turns = list(kept.turns) if as_kept else self._rendered(kept.turns, same)
        self._other = kept is not None and not as_kept  # than what is on disk
        self.reused = 0
        """Tokens that `begin` or `rebuild` found in the store."""
        self.added: list[Document] = []
        """What the next user's turn carries in front of its words."""
        self._quotes = False  # the next answer is from a passage that was read again
        self._marks: dict[int, Any] = {}  # engine marks by stream position, of the last exchanges

    def open(self, progress: Progress | None = None, cancel: Cancel | None = None) -> bool:
        """Read what comes before the first words; False when cancelled, with an empty state.

        Raises ContextOverflow when the method cannot hold it.
        """
        answering.require_room(self.engine, len(self.opening), seen=0)
        if self.session and self.turns:
            self.session.close()
            self.session = self.session.another()
        self.turns, self._marks, self.added = [], {}, []
        if self._read_anew([], progress, cancel):
            return True
        self.engine.reset()
        return False

    def begin(self, progress: Progress | None = None, cancel: Cancel | None = None) -> bool:
        """Read all that comes before the next words, the turns of a chat that goes on, too; False when
        cancelled. Raises ContextOverflow when the method cannot hold it."""
        answering.require_room(self.engine, self._end, seen=0)
        if not self._read_anew(self.turns, progress, cancel):
            return False
        if self._other:
            self._save(0)
        return True

    def branch(
        self, number: int | None = None, progress: Progress | None = None, cancel: Cancel | None = None
    ) -> bool:
        """Go on in a copy of the chat, from behind exchange `number` or where it is; the chat itself stays as
        it is. False when cancelled: everything is as before. Raises UsageError."""
        if self.session is None:
            raise UsageError("this chat is not kept", "", "leave out --no-save")
        number = self.exchanges if number is None else number
        if number:
            self._user(number)
        if 2 * number < len(self.turns) and not self._go_back(self.turns[: 2 * number], progress, cancel):
            return False
        self.session.close()
        self.session = self.session.another(number)
        self._save(0)
        return True

    def send(
        self,
        text: str,
        sampling: Sampling,
        progress: Progress | None = None,
        cancel: Cancel | None = None,
    ) -> Iterator[Piece]:
        """Read the user's turn and stream the answer. Raises ContextOverflow before anything is read."""
        return self._exchange(len(self.turns), text, None, sampling, progress, cancel)

    def add(self, documents: Sequence[Document]) -> None:
        """The next user's turn carries these in front of its words."""
        self.added += documents

    def undo(self, progress: Progress | None = None, cancel: Cancel | None = None) -> bool:
        """Drop the last exchange. False when there is none, or when cancelled while older ones were read
        anew: then everything is as before."""
        done = bool(self.turns) and self._go_back(self.turns[:-2], progress, cancel)
        if done:
            self._save(len(self.turns))
        return done

    def retry(
        self, sampling: Sampling, progress: Progress | None = None, cancel: Cancel | None = None
    ) -> Iterator[Piece]:
        """Another answer to the last user's turn. Raises UsageError when there is none."""
        return self.edit(self.exchanges, None, sampling, progress, cancel)

    def edit(
        self,
        number: int,
        text: str | None,
        sampling: Sampling,
        progress: Progress | None = None,
        cancel: Cancel | None = None,
    ) -> Iterator[Piece]:
        """Go back to before exchange `number` and send `text` (None: the same words) in its place.

        Cancelled while reading: everything is as before. Raises UsageError when there is no such exchange.
        """
        user = self._user(number)
        text = user.text if text is None else text
        return self._exchange(2 * (number - 1), text, user.documents, sampling, progress, cancel)

    def pin(self, number: int, on: bool = True) -> bool:
        """Exchange `number` is not to be forgotten (or may be again). Whether that holds at once: else it
        does when the conversation is read anew. Raises UsageError when there is no such exchange."""
        self._user(number)
        user, answer = self.turns[2 * number - 2 : 2 * number]
        held = self.engine.pin(user.start, answer.end, on)
        user.pinned = answer.pinned = on
        self._save(2 * number - 2)
        return held

    def rebuild(
        self,
        engine: Engine | None = None,
        system: str | None | EllipsisType = ...,
        progress: Progress | None = None,
        cancel: Cancel | None = None,
    ) -> bool:
        """Read the whole transcript anew, under another engine (model, method) or system prompt where given.

        False when cancelled: everything is as before. Raises ContextOverflow before anything is read.
        """
        engine = engine or self.engine
        system = self.system if system is ... else system
        other = Conversation(engine, system, self.documents, store=self.store)
        same = engine.info.fingerprint == self.engine.info.fingerprint
        other.turns = other._rendered(self.turns, same)
        answering.require_room(engine, other._end, seen=0)
        before = self.engine.snapshot()
        try:
            done = other._read_anew(other.turns, progress, cancel)
        except BaseException:
            self.engine.restore(before)
            raise
        if not done:
            self.engine.restore(before)
            return False
        self.engine, self.system, self.opening = engine, other.system, other.opening
        if not (same and self.memory and other.memory):  # what is indexed stays
            self.memory = self._memory()
        self.turns, self._marks, self.reused = other.turns, {}, other.reused
        self._save(0)
        return True

    @property
    def exchanges(self) -> int:
        """How many there are."""
        return len(self.turns) // 2

    def coverage(self) -> Coverage:
        """What the next turn can see."""
        return self.engine.coverage()

    def context(self) -> Context:
        """The same by what it is."""
        state, sinks = self.coverage(), int(self.engine.info.options.get("sinks", 0))
        gone = [turn for turn in self.turns[1::2] if sinks < turn.end <= state.recent and not turn.pinned]
        return Context(
            opening=len(self.opening),
            pinned=sum(len(turn.ids) for turn in self.turns if turn.pinned),
            sinks=max(min(sinks, state.seen) - len(self.opening), 0),
            visible=state.visible,
            retrieved=self.memory.visible(state.recent) if self.memory else 0,
            forgotten=state.forgotten,
            turns=self.exchanges,
            forgotten_turns=len(gone),
            bytes=state.bytes,
            subject=self._subject(),
        )

    def _exchange(
        self,
        keep: int,
        text: str,
        documents: tuple[Document, ...] | None,
        sampling: Sampling,
        progress: Progress | None,
        cancel: Cancel | None,
    ) -> Iterator[Piece]:
        """Behind the first `keep` turns, a user's turn and its answer; `documents` None: those added."""
        carried = tuple(self.added) if documents is None else documents
        if not self._exchanged(keep, text, carried, progress, cancel):
            yield Piece("", stop="cancelled")
            return
        if documents is None:
            self.added = []
        if self._quotes:  # what was read again is to be said again
            sampling = replace(sampling, repetition_penalty=1.0, start_penalty=0.0)
        answer, thinking = self.turns[-1], self.engine.thinking
        mark = self.engine.snapshot() if thinking and thinking.dropped else None
        thought = False
        try:
            for piece in answering.answer(self.engine, sampling, self.think, self._said(), cancel):
                thought = thought or piece.thought
                self._take(answer, piece, mark is None or not piece.thought)
                if self.shows_thoughts or not piece.thought or piece.stop:
                    yield piece
        finally:
            if thought and mark is not None:
                answer.ids = array.array("I", self.engine.encode(answer.text))
            self._save(len(self.turns) - 1)
        if thought and mark is not None:  # as the template has it from the next turn on
            self.engine.restore(mark)
            self.engine.prefill(answer.ids)
        self._keep()

    def _said(self) -> list[Sequence[int]]:
        """The tokens of the answers before this one, as far as any sampler looks back: what is out of sight
        is not said again."""
        first = max(self._subject(), 1)
        return [turn.ids for turn in self.turns[2 * first - 1 : -1 : 2][-SAID:]]

    def _subject(self) -> int:
        """The number of the exchange before which all is out of sight; 0: none is."""
        begun = [number for number, user in enumerate(self.turns[::2], 1) if user.subject]
        return max(begun, default=0) if self._forgets_subjects() else 0

    def _forgets_subjects(self) -> bool:
        return self.engine.info.options.get("evict") == "subjects"

    def _take(self, answer: Turn, piece: Piece, stays: bool) -> None:
        """Add a piece to the answer; `stays`: its tokens are not taken back."""
        if piece.thought:
            answer.thoughts += piece.text
        else:
            answer.text += piece.text
        if stays:
            answer.ids.extend(piece.ids)
        answer.stop = piece.stop or answer.stop
        if self.session:
            self.session.stream(self.chat)

    def _exchanged(
        self,
        keep: int,
        text: str,
        documents: tuple[Document, ...],
        progress: Progress | None,
        cancel: Cancel | None,
    ) -> bool:
        """Put a user's turn and an empty answer behind the first `keep` turns; False when cancelled.

        They are saved before they are read: whoever pulls the plug finds the words again.
        """
        before = _Before(self.engine.snapshot(), list(self.turns), dict(self._marks))
        try:
            done = self._agree(progress, cancel)
            if done and keep < len(self.turns):
                done = self._go_back(self.turns[:keep], progress, cancel)
            if done:
                subject = self._begins_subject(text)
                coming = self._user_turn(text, documents)
                if len(coming.ids) >= LONG:
                    self.notice(f"reading {len(coming.ids):,} tokens; Ctrl-C stops, and all is as before")
                recalled = self._recall(coming, subject, progress, cancel)
                self._quotes = bool(recalled.passages)
                user = self._user_turn(text, documents, recalled)
                user.subject = subject
                answering.require_room(self.engine, len(user.ids))
                self._keep()
                self._mark()
                # The answer was stopped, until the engine says otherwise.
                self.turns = [*self.turns, user, Turn("assistant", "", "cancelled", start=user.end)]
                self._save(keep)
                self.engine.begin_turn(user.ids, subject)
                done = self._read(user.ids, progress, cancel)
        except BaseException:
            self._return(before, keep)
            raise
        if not done:
            self._return(before, keep)
        return done

    def _user(self, number: int) -> Turn:
        if not 1 <= number <= self.exchanges:
            known = f"they are 1 to {self.exchanges}" if self.turns else "nothing was said yet"
            raise UsageError(f"there is no turn {number}", known)
        return self.turns[2 * (number - 1)]

    def _memory(self) -> Memory | None:
        """Where the method remembers. Raises UsageError for a window of nothing."""
        info, engine = self.engine.info, self.engine
        if info.method != "recall":
            return None
        if info.options.get("window") == 0:  # elsewhere recall has none
            raise UsageError("--window is 0", "in a chat it must be at least 1")
        encoder = local_encoder(lambda text: self.notice(text))
        return Memory(engine, encoder, info.options["find"], info.options["passages"], self.store)

    def _begins_subject(self, text: str) -> bool:
        """Whether the user's next `text` does, where the method forgets a subject as a whole."""
        if not (self._forgets_subjects() and self.turns):
            return False
        if not subjects.begins(self.engine, self.engine.render_turn(Message.of("user", text))):
            return False
        count = self.exchanges - self.context().forgotten_turns
        self.notice(f"new subject: {count:,} turn{'' if count == 1 else 's'} out of sight")
        return True

    def _recall(
        self, coming: Turn, subject: bool, progress: Progress | None, cancel: Cancel | None
    ) -> Recalled:
        """What is read again for a user's turn that is `coming`; all that was said is forgotten where it
        begins a new `subject`. So is what the turn itself pushes out of sight, its own beginning, too."""
        if self.memory is None:
            return NOTHING
        options = self.engine.info.options
        recent = max(self.coverage().recent, coming.end + 1 - options["window"])
        if subject:
            recent = max(recent, coming.start + 1)  # not even the last words
        documents = self.documents if options["sinks"] < len(self.opening) else ()
        if recent <= 0:
            return NOTHING
        long = coming if coming.start < recent - 1 else None
        if not self.memory.update(documents, self.turns, progress, cancel, long):
            return NOTHING
        recalled = self.memory.recall([*self.turns, coming], recent)
        if recalled.passages:
            self.notice(str(recalled))
        return recalled

    def _user_turn(self, text: str, documents: tuple[Document, ...], recalled: Recalled = NOTHING) -> Turn:
        """A user's turn behind those that are there."""
        if self.turns:
            ids = self.engine.render_turn(recalled.before(compose(documents, text))).ids
        else:
            user = recalled.before(compose((*self.documents, *documents), text))
            ids = self.engine.render(messages(self.system, user)).ids[len(self.opening) :]
        thinking = self.engine.thinking
        if thinking and thinking.dropped and thinking.opened:  # no earlier turn has it
            ids = ids[: -len(thinking.opened)]
        return Turn("user", text, None, array.array("I", ids), self._end, documents=documents)

    def _rendered(self, turns: Sequence[Turn], same: bool) -> list[Turn]:
        """The `turns` behind this opening; `same` is the tokenizer that they came from."""
        self.turns = []
        for turn in turns:
            if turn.role == "user":
                new = self._user_turn(turn.text, turn.documents)
                if same and self.turns:
                    new.ids = turn.ids
            else:
                ids = turn.ids if same else array.array("I", self.engine.encode(turn.text))
                new = replace(turn, ids=ids, start=self._end)
            self.turns.append(replace(new, pinned=turn.pinned, subject=turn.subject))
        return self.turns

    @property
    def _end(self) -> int:
        """The stream position behind the last turn."""
        return self.turns[-1].end if self.turns else len(self.opening)

    def _go_back(self, turns: list[Turn], progress: Progress | None, cancel: Cancel | None) -> bool:
        """To where only the first `turns` were said; False when cancelled, with everything as before."""
        at = turns[-1].end if turns else len(self.opening)
        if at in self._marks:
            self.engine.restore(self._marks[at])
        else:
            before = self.engine.snapshot()
            try:
                done = self._read_anew(turns, progress, cancel)
            except BaseException:
                self.engine.restore(before)
                raise
            if not done:
                self.engine.restore(before)
                return False
        self.turns = turns
        self._marks = {place: mark for place, mark in self._marks.items() if place < at}
        return True

    def _return(self, before: _Before, same: int) -> None:
        """To all that was `before`; the first `same` turns are saved as they were."""
        self.engine.restore(before.mark)
        self.turns, self._marks = before.turns, before.marks
        self._save(same)

    def _agree(self, progress: Progress | None, cancel: Cancel | None) -> bool:
        """Read anew where an interrupt cut through a step and left a token that the transcript lacks."""
        return self.coverage().seen == self._end or self._read_anew(self.turns, progress, cancel)

    def chat(self) -> Chat:
        """All that is kept of it."""
        info = self.engine.info
        about = About(lasting(info.model), info.fingerprint, info.method, info.options, self.system)
        return Chat(about, self.opening, self.documents, self.turns)

    def _save(self, same: int) -> None:
        """Make what is kept the transcript, the first `same` turns of which are kept already."""
        if self.session and (self.turns or self.session.id is not None):
            self.session.save(self.chat(), same)

    def _keep(self) -> None:
        """Keep the state as it is."""
        if self.session and self.store:
            self._label()
            self.engine.keep(self.session.branched or 0)

    def _label(self) -> None:
        """Pages are this chat's from now on, and go with it."""
        if self.store and self.session and self.session.id is not None:
            self.store.about["documents"] = [known_as(self.session.id)]

    def _mark(self) -> None:
        """The state behind the last turn can be returned to; only so many of these are kept."""
        self._marks[self._end] = self.engine.snapshot()
        for place in sorted(self._marks)[:-MARKS]:
            del self._marks[place]

    def _read_anew(self, turns: Sequence[Turn], progress: Progress | None, cancel: Cancel | None) -> bool:
        """Read the opening and `turns` into an empty state, exchange by exchange."""
        self.engine.reset()
        exchanges = [[*user.ids, *answer.ids] for user, answer in zip(turns[::2], turns[1::2], strict=True)]
        parts, done, self.reused = [self.opening, *exchanges], 0, 0
        total = sum(map(len, parts))
        if self.store:
            self._label()
            pinned, begun = (
                {number for number, user in enumerate(turns[::2]) if getattr(user, name)}
                for name in ("pinned", "subject")
            )
            done, self.reused = self.engine.read(
                self.opening, self.store, progress, cancel, turns=exchanges, pinned=pinned, subjects=begun
            )
            return done == total
        for number, part in enumerate(parts):
            if number:
                self.engine.begin_turn(part, turns[2 * number - 2].subject)
            read = self.engine.prefill(part, behind(progress, done, total), cancel)
            if number and turns[2 * number - 2].pinned:
                self.engine.pin(done, done + read)
            done += read
            if read < len(part):
                return False
        return True

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


def lasting(model: str) -> str:
    """What --model has to be for the same one from anywhere."""
    try:
        found = catalog.resolve(model)
    except LongchatError:
        return model
    return str(found) if isinstance(found, Path) else model


def open_conversation(
    open_engine: Open,
    method: str,
    options: Mapping[str, Any],
    system: str | None = None,
    documents: Sequence[Document] = (),
) -> Conversation:
    """A conversation over `open_pinned`'s engine."""
    return Conversation(open_pinned(open_engine, method, options, system, documents), system, documents)
