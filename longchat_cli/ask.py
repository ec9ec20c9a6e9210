"""Questions over documents: read once, asked many times, and told what the answer rests on.

Plain functions over the `Engine` protocol; whatever opens a model or builds a search index is passed in.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Protocol

from longchat_cli import attention, whole
from longchat_cli.citations import Checker, Range
from longchat_cli.config import format_bytes
from longchat_cli.documents import Collection, Document, is_remote
from longchat_cli.engine import Engine, Progress
from longchat_cli.errors import BadInput, ContextOverflow, Unavailable, UsageError
from longchat_cli.models.memory import free_bytes
from longchat_cli.pages import Store
from longchat_cli.prompt import Message, Prompt, Text
from longchat_cli.recall.passages import asks, with_neighbours
from longchat_cli.sampling import Sampling
from longchat_cli.sources import Sources, place, tokens_read
from longchat_cli.terminal import Console, Interrupts
from longchat_cli.terminal_text import Sanitizer

LONG = 2.0
"""Seconds after which it is said that an index is still being made."""
DIRECT = "Answer the question with words from the text, in one short sentence."
"""The system prompt where the user gives none and a question is about a place.

Left to itself the default model takes "how many" for a sum to be worked out and talks about "the text". With
this 24 of 44 facts asked in other words, 23 of 44 natural questions and 20 of 20 facts were answered right,
with "Answer the question from the text." 25, 18 and 17.
"""
QUOTING = "\n\n> "
"""Between a model's words and what a text says."""
QUOTED = 3
"""Passages that `quote` gives where the method's options name no number."""
AROUND = 160
"""Tokens kept free beside the passages: the labels and the sentence that is said again."""

Emit = Callable[[str], None]
Open = Callable[[str, Mapping[str, Any]], Engine]
"""Opens the model under a method with its options."""


class Found(Protocol):
    """A passage: characters [begin, end) of document number `document`, `focus` its nearest sentence."""

    document: int
    begin: int
    end: int
    score: float
    focus: tuple[int, int]


class Finder(Protocol):
    """Ranks passages of the documents it was made for, `reused` tokens of which were indexed before."""

    @property
    def reused(self) -> int: ...

    def find(self, question: str, budget: int) -> Sequence[Any]:
        """The passages (`Found`) to read, in reading order, `budget` tokens at most."""


MakeFinder = Callable[[Engine, Sequence[Document], Mapping[str, Any]], Finder]
Weigh = Callable[[Any, Any, Sequence[int]], Sequence[float]]
"""Attention that an answer's tokens paid to each token before: (engine, mark before the answer, its ids)."""


@dataclass(frozen=True)
class Request:
    """What to ask and how. `method` 'auto' is `full` where everything fits the window, else `recall`.

    `cite`: look every answer up in the documents. `mode`, for texts longer than the window: `find` passages,
    read the `whole` in parts, or `auto`, by the question. `store`: where what reading leaves behind is kept.
    No question at all: the documents are read for later ones.
    """

    questions: tuple[str, ...]
    system: str | None = None
    method: str = "auto"
    options: Mapping[str, Any] = field(default_factory=dict)
    overflow: str = "error"
    sampling: Sampling = field(default_factory=Sampling)
    cite: bool = False
    mode: str = "find"
    store: Store | None = None

    def opened(self) -> tuple[str, Mapping[str, Any]]:
        """The method that reads and its options. With `auto` they are recall's, of which full has some."""
        if self.method != "auto":
            return self.method, self.options
        if not self.options:
            return "full", {}
        known = {option.name for option in fields(attention.method_class("full"))}
        return "full", {name: value for name, value in self.options.items() if name in known}


@dataclass(frozen=True)
class Answer:
    """One answer and its evidence; `as_json` is the object that `ask --json` prints.

    usage: document_tokens (in all documents), prompt_tokens, reused_tokens, answer_tokens.
    timings: first_token_s (since the model was loaded, or the answer before), find_s, prefill_s, decode_s,
    tokens_per_s.
    coverage: seen, visible, forgotten, bytes (of the model's state), read (document tokens in the prompt).
    passages: source, line, end_line, place, begin, end (characters), score, text.
    citations: per sentence begin, end (of the answer), sentence, verdict, exact, quote (a place as above).
    rested: places that the answer's tokens looked at, with their share, the most first.
    notes: of the whole read in parts: each part's place, begin, end, note, kept (from an earlier run).
    quoted: the sentence of the documents, a place as above, with which `answer` ends; `words` come before it.
    """

    question: str
    answer: str
    stop: str
    model: str
    method: str
    usage: dict[str, int]
    timings: dict[str, float]
    coverage: dict[str, int]
    documents: list[str]
    passages: list[dict[str, Any]]
    citations: list[dict[str, Any]] = field(default_factory=list)
    rested: list[dict[str, Any]] = field(default_factory=list)
    notes: list[dict[str, Any]] = field(default_factory=list)
    quoted: dict[str, Any] | None = None

    @property
    def cancelled(self) -> bool:
        return self.stop == "cancelled"

    @property
    def words(self) -> str:
        """The model's own."""
        return self.answer.rpartition(QUOTING)[0] if self.quoted else self.answer

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    def evidence(self) -> str:
        """The coverage line: tokens read, visible, retrieved, from where."""
        total, read = self.usage["document_tokens"], self.coverage["read"]
        if self.method == "whole":
            kept = sum(note["kept"] for note in self.notes)
            before = f", {kept} of them noted before" if kept else ""
            count = f"{len(self.notes)} of {self.coverage['parts']} parts{before}"
            return f"whole: read {read:,} of {total:,} tokens, {count}"
        reused = self.usage["reused_tokens"]
        if self.method == "recall":
            places = ", ".join(map(place, self.passages)) or "nothing"
            count = f"{len(self.passages)} passage{'s' if len(self.passages) != 1 else ''}"
            again = f"; reused {reused:,} of {total:,} tokens" if reused else ""
            return f"recall: retrieved {count}, {read:,} of {total:,} tokens, all visible: {places}{again}"
        forgotten = self.coverage["forgotten"]
        visible = self.coverage["visible"]
        seen = f"{visible:,} visible, {forgotten:,} forgotten" if forgotten else "all visible"
        again = f", reused {reused:,} of {self.usage['prompt_tokens']:,} tokens" if reused else ""
        return f"{self.method}: read {read:,} of {total:,} tokens of {_names(self.documents)}, {seen}{again}"


def split_arguments(
    words: Sequence[str], questions: Sequence[str], stdin_is_tty: bool
) -> tuple[list[str], list[str]]:
    """(documents, questions) of `ask DOC... QUESTION` and of `ask DOC... -q QUESTION`. Raises UsageError.

    '-' (standard input) is the document only when no other is named and somebody pipes into it, so that a
    `while read` loop around `ask FILE QUESTION` keeps its list.
    """
    documents, asked = list(words), list(questions)
    if not asked:
        if not documents:
            raise UsageError("a question is missing", "", "longchat ask DOC... QUESTION")
        if len(documents) == 1 and _is_document(documents[0]):
            hint = f'longchat ask {documents[0]} "QUESTION"'
            raise UsageError(f"the question about {documents[0]} is missing", "", hint)
        asked = [documents.pop()]
    if not all(question.strip() for question in asked):
        raise UsageError("the question is empty")
    if not documents:
        if stdin_is_tty:
            do = "name a file or folder before the question, or pipe a text in"
            raise UsageError("there is no document to ask about", "", do)
        documents = ["-"]
    return documents, asked


def _is_document(word: str) -> bool:
    try:
        return word == "-" or is_remote(word) or Path(word).exists()
    except (OSError, ValueError):
        return False


def compose(documents: Sequence[Document], question: str) -> Message:
    """The user's turn: documents first, the question last, so that questions share the prefix."""
    texts: list[Text] = []
    for document in documents:
        if len(documents) > 1 and not document.header:  # files of a folder come with theirs
            texts.append(Text(f"{document.name}\n"))
        texts += [Text(_body(document), document.name), Text("\n\n")]
    return _labelled(texts, question) if texts else Message.of("user", question)


def _body(document: Document) -> str:
    return document.text.rstrip("\n")


def _labelled(texts: Sequence[Text], question: str) -> Message:
    """Small models find more in a text that is called one: 8 against 6 of 11 hard needles at 6k tokens."""
    return Message("user", (Text("Text:\n"), *texts, Text("Question: "), Text(question)))


def messages(system: str | None, user: Message) -> list[Message]:
    """The conversation's beginning."""
    return [Message.of("system", system), user] if system else [user]


def opening(engine: Engine, system: str | None, documents: Sequence[Document]) -> list[int]:
    """The ids that come before the user's first words, whatever those are."""
    first, second = (engine.render(messages(system, compose(documents, word))).ids for word in ("0", "x"))
    return first[: next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), 0)]


def ask(
    open_engine: Open,
    make_finder: MakeFinder,
    collection: Collection,
    request: Request,
    emit: Emit,
    console: Console,
    interrupts: Interrupts,
    show: Callable[[Engine, Prompt], None] | None = None,
    weigh: Weigh | None = None,
) -> Iterator[Answer]:
    """Answer every question in turn, streaming text to `emit`; the last answer may be cut by Ctrl-C.

    `show` receives each prompt before it is read; `weigh` tells what a cited answer rested on. Raises
    ContextOverflow, KeyboardInterrupt while reading, and whatever opening the model or its method raises.
    """
    documents = collection.documents
    if not documents:
        raise BadInput("there is no text to ask about")
    engine = open_engine(*request.opened())
    loaded = time.perf_counter()
    session = _Session(engine, documents, request, emit, console, interrupts, show, weigh, loaded)
    session.require_questions_fit()
    method = session.method()
    if method != "recall":
        yield from session.answer_from_everything(method)
        return
    finder = None if request.questions else make_finder(engine, documents, request.options)
    for question in request.questions:
        kind = session.about_the_whole(question)
        if kind:
            yield session.answer_from_all_parts(question, kind)
            continue
        build, reused = time.perf_counter(), session.total
        if finder is None:
            finder = make_finder(engine, documents, request.options)
            reused = min(finder.reused, session.total)
        yield session.answer_from_passages(finder, question, time.perf_counter() - build, reused)


@dataclass(frozen=True)
class Quotes:
    """The passages nearest to a question, best first; fields as in `Answer`."""

    question: str
    passages: list[dict[str, Any]]

    def as_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    def as_text(self) -> str:
        """Each passage under its place."""
        return "\n\n".join(f"{place(passage)}\n{passage['text']}" for passage in self.passages)


def quote(
    open_engine: Open, make_finder: MakeFinder, documents: Sequence[Document], request: Request
) -> Iterator[Quotes]:
    """What `recall` finds for every question, itself the answer. Raises BadInput."""
    if not documents:
        raise BadInput("there is no text to quote from")
    options = {**request.options, "passages": request.options.get("passages") or QUOTED}
    finder = make_finder(open_engine("recall", options), documents, options)
    for question in request.questions:
        found = sorted(finder.find(question, sys.maxsize), key=lambda passage: -passage.score)
        yield Quotes(question, [describe(documents, passage) for passage in found])


def describe(documents: Sequence[Document], passage: Found) -> dict[str, Any]:
    """A passage as plain values: its place, characters, score and text."""
    document = documents[passage.document]
    return {
        **asdict(document.locate(passage.begin, passage.end)),
        "begin": passage.begin,
        "end": passage.end,
        "score": round(float(passage.score), 4),
        "text": document.text[passage.begin : passage.end],
    }


@dataclass(frozen=True)
class _Said:
    """What the model said: its ids, why it stopped, and the engine's state before it."""

    text: str
    ids: Sequence[int]
    stop: str
    mark: Any = None
    quoted: dict[str, Any] | None = None


class _Session:
    """One run of `ask`."""

    def __init__(
        self,
        engine: Engine,
        documents: Sequence[Document],
        request: Request,
        emit: Emit,
        console: Console,
        interrupts: Interrupts,
        show: Callable[[Engine, Prompt], None] | None,
        weigh: Weigh | None,
        loaded: float,
    ) -> None:
        self.engine, self.documents, self.request = engine, documents, request
        self.emit, self.console, self.interrupts, self.show = emit, console, interrupts, show
        self.weigh, self.sources = weigh, Sources(documents)
        self.system = DIRECT if request.system is None else request.system
        self.warned = False
        self.total = sum(engine.count(_body(document)) for document in documents)
        self.store = request.store and request.store.of(self.total, model=engine.info.model)
        self.room = engine.info.window - request.sampling.max_tokens
        """Tokens a prompt may have so that the answer fits the trained window too."""
        self.begun = loaded
        """When work on the next answer began."""

    def require_questions_fit(self) -> None:
        """A question longer than the window cannot be answered by any method."""
        if self.room <= 0:
            raise ContextOverflow(
                f"--max-tokens {self.request.sampling.max_tokens:,} leaves no room to read",
                f"{self.engine.info.model} has a window of {self.engine.info.window:,} tokens",
                "lower --max-tokens",
            )
        for question in self.request.questions:
            size = len(self._prompt([], question))
            if size > self.room:
                raise ContextOverflow(
                    f"the question alone has {size:,} tokens",
                    self._limits(),
                    "ask a shorter one or lower --max-tokens",
                )

    def method(self) -> str:
        """`auto` decided by the counts. Raises ContextOverflow for a method that breaks past the window."""
        chosen = self.request.method
        if self.request.mode == "whole" and chosen not in ("auto", "full", "recall"):
            raise UsageError("--mode whole reads with full attention", "", f"leave out --method {chosen}")
        if chosen == "auto" or (chosen == "full" and self.request.mode == "whole"):
            return "full" if self._longest() <= self.room else "recall"
        if not attention.method_class(chosen).unlimited and (size := self._longest()) > self.room:
            if self.request.overflow != "force":
                raise ContextOverflow(
                    f"{chosen} cannot read this: the prompt has {size:,} tokens",
                    self._limits(),
                    "choose --method recall (finds the passages), --method sink (sees the end), "
                    "or --overflow force (answers break down)",
                )
            self.console.warn(
                f"{chosen} past the window: {size:,} tokens, {self._limits()}; expect answers to break down"
            )
        return chosen

    def answer_from_everything(self, method: str) -> Iterator[Answer]:
        """The documents are in the prompt: one prefill of what the questions share, then each question."""
        prompts = [self._prompt(self.documents, question) for question in self.request.questions]
        # Read up to the question for a single one too: the same chunks, so the same answer, however many.
        begin = opening(self.engine, self.system, self.documents)
        shared = len(begin)
        reading, reused = self._read_first(begin, method)
        mark = self.engine.snapshot()
        for index, (question, prompt) in enumerate(zip(self.request.questions, prompts, strict=True)):
            if self.show:
                self.show(self.engine, prompt)
            if index:
                self.engine.restore(mark)
            if prompt is prompts[-1]:
                mark = None  # it would hold what the method gives up while it answers
            reading += self._read(prompt.ids[shared:], method)
            yield self._generate(
                question, prompt, method, reused=shared if index else reused, timings={"prefill_s": reading}
            )
            reading = 0.0

    def answer_from_passages(self, finder: Finder, question: str, build: float, reused: int) -> Answer:
        """Find passages, read them alone inside the window, answer."""
        start = time.perf_counter()
        budget = max(self.room - len(self._prompt([], question)) - AROUND, 1)
        found = finder.find(question, budget)
        timings = {"find_s": build + time.perf_counter() - start}
        prompt = self.engine.render(messages(self.system, self._compose_passages(found, question)))
        if self.show:
            self.show(self.engine, prompt)
        self.engine.reset()
        timings["prefill_s"] = self._read(prompt.ids, "recall")
        return self._generate(question, prompt, "recall", reused=reused, timings=timings, found=found)

    def about_the_whole(self, question: str) -> whole.Kind | None:
        """How `question` is to be answered from all parts; None: from passages."""
        if self.request.mode == "find":
            return None
        return whole.kind(question) or ("change" if self.request.mode == "whole" else None)

    def answer_from_all_parts(self, question: str, kind: whole.Kind) -> Answer:
        """Read every part and note what it says, then answer from the notes; Ctrl-C ends the reading."""
        start = time.perf_counter()
        asked = whole.instruction(question, kind)
        room = self.engine.info.window - whole.NOTE_TOKENS - len(self._prompt([], asked)) - AROUND
        cut = whole.parts(self.documents, self.engine.count, max(min(whole.PART_TOKENS, room), 1))
        self.console.notice(
            f"reading all {self.total:,} tokens in {len(cut)} parts; Ctrl-C: answer from those read so far"
        )
        store = self.store and self.store.of(self.total, method="whole")
        notes = whole.Notes(store, self.engine.info.fingerprint, self.request.system or "", asked)
        with self.interrupts.catching(), self.console.progress("reading") as bar:
            made = whole.read_all(self.documents, cut, question, kind, self._say, notes, bar)
        if store:
            store.touch()
        if self.interrupts.leave or not made:
            raise KeyboardInterrupt
        if len(made) < len(cut):
            self.console.warn(f"stopped after {len(made)} of {len(cut)} parts; ask again to go on from there")
        said = whole.useful(made)
        if kind == "list":
            items, strange = whole.items(said, self.documents)
            if strange:
                self.console.notice(f"left out {strange} items that the text does not have")
            text = "\n".join(f"- {item}" for item in items) or whole.EMPTY
            self.emit(text)
            answer = self._answer(question, Prompt(), "whole", 0, {}, _Said(text, [], "eos"))
        else:
            answer = self._answer_from_notes(question, kind, [note.text for note in said] or [whole.EMPTY])
        return replace(
            answer,
            timings={"find_s": 0.0, "reading_s": round(time.perf_counter() - start, 4)} | answer.timings,
            coverage={
                **answer.coverage,
                "read": sum(note.part.tokens for note in made) if len(made) < len(cut) else self.total,
                "parts": len(cut),
            },
            notes=[self._describe_note(note) for note in made],
        )

    def _answer_from_notes(self, question: str, kind: whole.Kind, notes: Sequence[str]) -> Answer:
        asked = whole.final(question, kind)
        room = self.room - len(self._prompt([], asked)) - AROUND
        with self.interrupts.catching():
            texts = whole.condense(notes, question, kind, room, self.engine.count, self._say)
        if texts is None:
            raise KeyboardInterrupt
        prompt = self.engine.render(
            messages(self.request.system, _labelled([Text("\n\n".join(texts) + "\n\n")], asked))
        )
        if self.show:
            self.show(self.engine, prompt)
        self.engine.reset()
        seconds = self._read(prompt.ids, "full")
        return self._generate(question, prompt, "whole", reused=0, timings={"prefill_s": seconds})

    def _say(self, texts: Sequence[Text], question: str, tokens: int) -> str | None:
        """`whole.Say` over the engine, from an empty state."""
        prompt = self.engine.render(
            messages(self.request.system, _labelled([*texts, Text("\n\n")], question))
        )
        self.engine.reset()
        if self.engine.prefill(prompt.ids, None, self.interrupts.stopped) < len(prompt.ids):
            return None
        pieces = list(self.engine.generate(Sampling(max_tokens=tokens), self.interrupts.stopped))
        return None if pieces[-1].stop == "cancelled" else Sanitizer().feed("".join(p.text for p in pieces))

    def _describe_note(self, note: whole.Note) -> dict[str, Any]:
        part = note.part
        where = asdict(self.documents[part.document].locate(part.begin, part.end))
        return {**where, "begin": part.begin, "end": part.end, "note": note.text, "kept": note.kept}

    def _prompt(self, documents: Sequence[Document], question: str) -> Prompt:
        return self.engine.render(messages(self.system, compose(documents, question)))

    def _longest(self) -> int:
        """Tokens of the longest prompt; a text that cannot fit is not encoded a second time."""
        if self.total > self.engine.info.window:
            return self.total
        questions = self.request.questions or ("",)
        return max(len(self._prompt(self.documents, question)) for question in questions)

    def _limits(self) -> str:
        info = self.engine.info
        return (
            f"with {self.request.sampling.max_tokens:,} for the answer that is more than the "
            f"{info.window:,} {info.model} was trained for"
        )

    def _read(self, ids: Sequence[int], method: str) -> float:
        """Prefill with a bar; seconds. Raises KeyboardInterrupt when it was cancelled.

        Ctrl-C itself may cut in: nothing is there to be kept, and a chunk can take seconds.
        """
        start = time.perf_counter()
        with self.console.progress("reading") as bar:
            done = self.engine.prefill(ids, self._watch(bar, method), self.interrupts.stopped)
        if done < len(ids):
            raise KeyboardInterrupt
        return time.perf_counter() - start

    def _read_first(self, ids: Sequence[int], method: str) -> tuple[float, int]:
        """As `_read`, into an empty state, through what is kept: (seconds, tokens that were)."""
        if self.store is None:
            return self._read(ids, method), 0
        start = time.perf_counter()
        self.store.about["method"] = method
        with self.console.progress("reading") as bar:
            watch, cancel = self._watch(bar, method), self.interrupts.stopped
            done, reused = self.engine.read(ids, self.store, watch, cancel)
        if done < len(ids):
            raise KeyboardInterrupt
        return time.perf_counter() - start, reused

    def _watch(self, bar: Progress | None, method: str) -> Progress | None:
        """Progress that warns, once and as soon as it is known, of what the method forgets or cannot hold."""
        if self.warned:
            return bar

        def update(done: int, total: int) -> None:
            if not self.warned and (warning := self._warning(method, done, total)):
                self.warned = True
                self.console.warn(warning)
            if bar:
                bar(done, total)

        return update

    def _warning(self, method: str, done: int, total: int) -> str | None:
        """That a method forgets, or needs more memory than is free, `done` of `total` tokens being read."""
        forgets, state = attention.method_class(method).forgets, self.engine.coverage()
        if state.forgotten and not forgets.startswith("nothing"):
            return (
                f"{method} sees {state.visible:,} of {max(self.total, total):,} tokens at a time; "
                f"it forgets {forgets}; `--method recall` finds passages anywhere"
            )
        needed = state.bytes * (total - done) // max(state.seen, 1)
        if forgets.startswith("nothing") and needed > (free := free_bytes()):
            return (
                f"{method} needs {format_bytes(needed)} more of memory, {format_bytes(free)} are free; "
                "--kv-dtype int4, --method cca and --method recall need less, --estimate compares them"
            )
        return None

    def _generate(
        self,
        question: str,
        prompt: Prompt,
        method: str,
        reused: int,
        timings: dict[str, float],
        found: Sequence[Found] = (),
    ) -> Answer:
        start = time.perf_counter()
        weighs = self.weigh is not None and self.request.cite and method in ("full", "recall")
        mark = self.engine.snapshot() if weighs else None
        sanitizer, pieces, stop = Sanitizer(), [], "cancelled"
        ids: list[int] = []
        with self.interrupts.catching():
            for piece in self.engine.generate(self.request.sampling, self.interrupts.stopped):
                timings.setdefault("first_token_s", time.perf_counter() - self.begun)
                pieces.append(sanitizer.feed(piece.text))
                self.emit(pieces[-1])
                ids += piece.ids
                stop = piece.stop or stop
        seconds = time.perf_counter() - start
        timings |= {"decode_s": seconds, "tokens_per_s": len(ids) / seconds if seconds else 0.0}
        quoted = None if stop == "cancelled" else self._missing("".join(pieces), found)
        if quoted:
            lead = QUOTING if "".join(pieces).strip() else QUOTING.lstrip()
            pieces.append(lead + " ".join(Sanitizer().feed(quoted["text"]).split()))
            self.emit(pieces[-1])
        said = _Said("".join(pieces), ids, stop, mark, quoted)
        return self._answer(question, prompt, method, reused, timings, said, found)

    def _missing(self, said: str, found: Sequence[Found]) -> dict[str, Any] | None:
        """The nearest sentence of the passages, for an answer that is no quote of them.

        A small model reads wrong what is in front of it: of 150 natural questions 60 were answered in its own
        words, 96 with the sentence behind them. A user's own system prompt decides what an answer is.
        """
        if not found or self.request.system is not None:
            return None
        read = [Document("", self.documents[p.document].text[p.begin : p.end]) for p in found]
        cited = Checker(read).check(said)
        if cited and all(citation.verdict == "verified" for citation in cited):
            return None
        return self.sources.quote(*self._nearest(found))

    def _nearest(self, found: Sequence[Found]) -> Range:
        """The nearest sentence of the best passage; one that asks with those beside it, which may answer."""
        best = max(found, key=lambda passage: passage.score)
        text, (begin, end) = self.documents[best.document].text, best.focus
        if asks(text[begin:end]):
            begin, end = with_neighbours(text, (best.begin, best.end), best.focus)
        return best.document, begin, end

    def _answer(
        self,
        question: str,
        prompt: Prompt,
        method: str,
        reused: int,
        timings: dict[str, float],
        said: _Said,
        found: Sequence[Found] = (),
    ) -> Answer:
        self.begun = time.perf_counter()
        state = self.engine.coverage()
        evidence = (
            self._evidence(said, prompt, found) if self.request.cite and said.stop != "cancelled" else {}
        )
        return Answer(
            question=question,
            answer=said.text,
            stop=said.stop,
            model=self.engine.info.model,
            method=method,
            usage={
                "document_tokens": self.total,
                "prompt_tokens": len(prompt),
                "reused_tokens": reused,
                "answer_tokens": len(said.ids),
            },
            timings={name: round(value, 4) for name, value in timings.items()},
            coverage={**asdict(state), "read": tokens_read(prompt)},
            documents=[document.name for document in self.documents],
            passages=[describe(self.documents, passage) for passage in found],
            quoted=said.quoted,
            **evidence,
        )

    def _evidence(self, said: _Said, prompt: Prompt, found: Sequence[Found]) -> dict[str, Any]:
        """Both kinds of sources of an answer; an interrupt waits for them."""
        read: list[Range] = [(passage.document, passage.begin, passage.end) for passage in found]
        with self.interrupts.catching():
            paid = (
                self.weigh(self.engine, said.mark, said.ids) if self.weigh and said.mark is not None else ()
            )
            return {
                "citations": self.sources.citations(said.text, read),
                "rested": self.sources.rested(prompt, paid, read),
            }

    def _compose_passages(self, found: Sequence[Found], question: str) -> Message:
        """The passages, the nearest sentence of the best one once more, and the question.

        A small model is easily led away by what stands beside the answer: saying the sentence again (and
        labelling text and question) raised the default model from 59 to 77 right answers of 110.
        """
        parts = [self._cut(passage.document, passage.begin, passage.end) for passage in found]
        if found:
            parts.append(self._cut(*self._nearest(found)))
        spaced = [piece for part in parts for piece in (part, Text("\n\n"))]
        return _labelled(spaced, question)

    def _cut(self, number: int, begin: int, end: int) -> Text:
        document = self.documents[number]
        return Text(document.text[begin:end], document.name, begin)


def _names(names: Sequence[str], most: int = 3) -> str:
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


class PlannedFinder:
    """A finder with its options decided."""

    def __init__(self, finder: Any, plan: Any, by: Any) -> None:
        self._finder, self._plan, self._by = finder, plan, by
        self.reused: int = finder.reused

    def find(self, question: str, budget: int) -> Sequence[Any]:
        return self._finder.read(question, budget, self._plan, self._by)

    def rank(self, question: str, k: int) -> Sequence[Any]:
        """The `k` best passages as they would be read, best first."""
        return self._finder.passages(question, k, self._by)

    def by(self, find: str) -> PlannedFinder:
        """The same index searched in another way."""
        return PlannedFinder(self._finder, self._plan, find)


def local_finder(
    engine: Any,
    documents: Sequence[Document],
    options: Mapping[str, Any],
    console: Console,
    store: Store | None = None,
) -> PlannedFinder:
    """The search index of `recall` over an engine in this process, with the method's options.

    What it is made of is kept in `store`.
    The sentence encoder is pulled when it is not here; where it cannot be had, `fused` goes by words alone
    and says so.
    """
    from longchat_cli.attention.recall import Recall
    from longchat_cli.models import load
    from longchat_cli.recall.find import Finder as Ranker
    from longchat_cli.recall.likelihood import Likelihood
    from longchat_cli.recall.passages import ReadingPlan
    from longchat_cli.recall.semantic import Encoder

    chosen = Recall(**options)
    encoder, heads = None, None
    if chosen.find in ("semantic", "fused"):
        try:
            encoder = Encoder(load.find_encoder(console.notice))
        except Unavailable as error:
            if chosen.find == "semantic":
                raise
            console.warn(f"finding by words alone, questions in other words will miss: {error}")
    if chosen.find == "attention":
        heads = _attention_index(engine, documents, console, store)
    with console.progress("indexing") as bar:
        ranker = Ranker(
            documents,
            engine.tokenizer,
            encoder,
            heads,
            store,
            _announced(bar, console),
            engine.info.fingerprint,
            Likelihood(engine.decoder, engine.tokenizer),
        )
    default = ReadingPlan()
    plan = ReadingPlan(
        chosen.passages or default.passages,
        default.margin if chosen.margin < 0 else chosen.margin,
        default.order,
    )
    return PlannedFinder(ranker, plan, chosen.find)


def _announced(bar: Progress | None, console: Console) -> Progress:
    """Progress that says what takes long, where no bar shows it, too."""
    begin, said = time.perf_counter(), False

    def update(done: int, total: int) -> None:
        nonlocal said
        if not said and done < total and time.perf_counter() - begin > LONG:
            said = True
            console.notice(f"indexing {total:,} tokens")
        if bar:
            bar(done, total)

    return update


def _attention_index(
    engine: Any, documents: Sequence[Document], console: Console, store: Store | None
) -> Any:
    """Keys of the model's retrieval heads over the documents."""
    from longchat_cli.recall.heads import AttentionIndex, retrieval_heads

    heads = retrieval_heads(engine.decoder, engine.tokenizer.encode, engine.info.fingerprint)
    ids = [id for document in documents for id in engine.tokenizer.encode(document.text)]
    store = store and store.of(len(ids), method="recall")
    identity = f"{engine.info.fingerprint} {engine.info.dtype} {engine.info.device}"
    with console.progress("reading") as bar:
        return AttentionIndex.read(engine.decoder, ids, heads, bar, store, identity)
