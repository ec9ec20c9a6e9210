"""What a chat remembers beyond its cache: forgotten turns are found by what is asked, and read again.

Turns are indexed as text, each once. What the method no longer sees and fits the user's next words better
than all that it sees, and well enough, is put in front of them: read once, and forgotten in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from longchat_cli.documents import Document
from longchat_cli.engine import Progress
from longchat_cli.pages import Store
from longchat_cli.prompt import Message, Text

ASKING, SAYING = 0.5, 0.75
"""Least score of a passage, cosine + 0.5 x lexical^2, for words that ask something, up to the last question
mark, and for all words: "Please use numbers" behind a question says how to answer, and finds other requests.

Measured: 22 facts asked in much the same words score 0.83 at least, 60 facts asked in quite other words 0.48
in the median. What 158 prompts of a benchmark find of each other scores 0.4 in the median; requests like
"Rewrite your previous response" find each other, up to 0.71, and a small model is led astray by them.
"""
WORDS = 0.6
"""Words alone score so much lower: the same facts 0.36 at least, the prompts 0.12 in the median."""
PASSAGES = 1
"""Passages read again for one turn, where the method's options name no number."""
BUDGET = 192
"""Tokens of passages for one turn at most."""
LONGEST = 400
"""Characters of a long message, its last sentences, that are looked up."""


class Said(Protocol):
    """A turn of a conversation, as `chat.Turn`: at the stream positions [start, end)."""

    role: str
    text: str
    start: int
    pinned: bool
    documents: tuple[Document, ...]

    @property
    def end(self) -> int: ...


@dataclass(frozen=True)
class Entry:
    """A text that was said: `name` says by whom, `index` in which turn; -1: before the first. `file`: it is a
    document's."""

    name: str
    text: str
    index: int
    file: bool = False

    @property
    def exchange(self) -> int:
        """The number of its exchange, from 1."""
        return self.index // 2 + 1


@dataclass(frozen=True)
class Passage:
    """Characters of a forgotten text that are read again; `focus` is the nearest sentence."""

    entry: Entry
    text: str
    focus: str
    score: float


@dataclass(frozen=True)
class Recalled:
    """What is read again in front of a user's words, in the order in which it was said; `behind` the first
    characters of them where so many words would themselves push it out of sight."""

    passages: tuple[Passage, ...] = ()
    tokens: int = 0
    behind: int = 0

    def __str__(self) -> str:
        entries = [passage.entry for passage in self.passages]
        turns = sorted({entry.exchange for entry in entries if not entry.file})
        named = [f"turn{'s' if len(turns) > 1 else ''} {' and '.join(map(str, turns))}"] if turns else []
        places = [*dict.fromkeys(entry.name for entry in entries if entry.file), *named]
        passages = f"{len(entries)} passage{'s' if len(entries) > 1 else ''}, {self.tokens:,} tokens"
        return f"recalled {passages}, from {', '.join(places)}"

    def before(self, message: Message) -> Message:
        """The user's `message` behind the passages.

        Measured on the default model, right answers to 30 questions: the passage as a quotation 18, labelled
        "Text" and "Question" 22, as here, with its nearest sentence said once more, 27.
        """
        if not self.passages:
            return message
        said = [text for passage in self.passages for text in _quoted(passage)]
        best = max(self.passages, key=lambda passage: passage.score)
        again = [Text(best.focus), Text("\n\n")] if best.focus != best.text else []
        *documents, words = message.parts
        first = [Text(words.text[: self.behind]), Text("\n\n")] if self.behind else []
        asked = Text(words.text[self.behind :])
        return Message("user", (*documents, *first, *said, *again, Text("Question: "), asked))


def _quoted(passage: Passage) -> list[Text]:
    lead = f"Earlier in this conversation, {passage.entry.name} said:\n"
    return [Text(lead), Text(passage.text), Text("\n\n")]


NOTHING = Recalled()


class Memory:
    """All that was said in one conversation, indexed turn by turn; what is visible need not be read again.

    `engine` has the model's tokenizer. `encoder` is asked for the sentence encoder when something is first
    forgotten; where it gives none, words alone serve. `find` and `passages` are options of `recall`. `store`:
    where what the encoder makes of sentences is kept.
    """

    def __init__(
        self,
        engine: Any,
        encoder: Callable[[], Any],
        find: str = "fused",
        passages: int = 0,
        store: Store | None = None,
    ) -> None:
        self._engine, self._make_encoder, self._store = engine, encoder, store
        self.find, self.passages = find, passages or PASSAGES
        self.entries: list[Entry] = []
        self._finder: Any = None
        self._read: dict[tuple[int, int, int], tuple[int, int]] = {}  # passages read again: where, tokens

    def update(
        self,
        documents: Sequence[Document],
        turns: Sequence[Said],
        progress: Progress | None = None,
        cancel: Callable[[], bool] | None = None,
        coming: Said | None = None,
    ) -> bool:
        """Index what is new: `documents` from before the first turn, `turns`, and of a user's turn that is
        `coming` all but what it asks; False when cancelled.

        Turns that were taken back are forgotten for good. Cancelled, it goes on from there the next time.
        """
        wanted = list(_entries(documents, turns))
        if coming:
            wanted += [*_entries((), [coming], len(turns))][:-1]
        same = next((i for i, (a, b) in enumerate(zip(self.entries, wanted, strict=False)) if a != b), None)
        held = min(len(self.entries), len(wanted)) if same is None else same
        if held < len(self.entries):
            self._finder.keep(held)
            del self.entries[held:]
        goes_on = self._finder is None
        for entry in wanted[held:]:
            self._open_finder().add(entry)
            self.entries.append(entry)
        done = self._finder is None or self._finder.encode(progress, cancel)
        if self._store and goes_on:  # what is kept of this chat was of use
            self._store.touch()
        return done

    def _open_finder(self) -> Any:
        if self._finder is None:
            from longchat_cli.recall.growing import GrowingFinder

            encoder = self._make_encoder() if self.find != "lexical" else None
            if encoder is None and self.find == "fused":
                self.find = "lexical"
            self._finder = GrowingFinder(self._engine.tokenizer, encoder, self._store)
        return self._finder

    def recall(self, turns: Sequence[Said], recent: int) -> Recalled:
        """What to read again for the last of `turns`, a user's that was not read yet.

        Forgotten passages that fit better than all that is visible: from `recent` on, pinned, or read again.
        """
        if not self.entries:
            return NOTHING
        coming, question = turns[-1], asked(turns[-1].text)
        self._read = {
            place: (where, n) for place, (where, n) in self._read.items() if recent <= where < coming.start
        }
        good = self._good(question, turns, recent)
        if not good:
            return NOTHING
        from longchat_cli.recall.passages import ReadingPlan, choose

        outlines = self._finder.outlines
        chosen = choose(good, outlines, ReadingPlan(self.passages), BUDGET)
        sizes = [outlines[found.document].count(found.begin, found.end) for found in chosen]
        places = [(found.document, found.begin, found.end) for found in chosen]
        words = self._engine.count(coming.text)
        long = coming.end - words < recent
        at = coming.end - (self._engine.count(question) if long else words)
        self._read |= {place: (at, size) for place, size in zip(places, sizes, strict=True)}
        behind = coming.text.rindex(question) if long else 0
        return Recalled(tuple(map(self._passage, chosen)), sum(sizes), behind)

    def visible(self, recent: int) -> int:
        """Tokens that were read again and are still visible."""
        return sum(tokens for where, tokens in self._read.values() if where >= recent)

    def _good(self, question: str, turns: Sequence[Said], recent: int) -> list[Any]:
        """Forgotten passages that fit all the words, else what asks among them, well enough and best."""
        from longchat_cli.recall.passages import ASKS

        asks = question[: max(question.rfind(mark) for mark in ASKS) + 1]
        scale = WORDS if self.find == "lexical" else 1
        for words, least in {question: SAYING, asks: ASKING}.items():
            good = []
            for found in self._finder.rank(words, self.passages, self.find) if words else ():
                if found.score < least * scale or not self._forgotten(found, turns, recent):
                    break
                good.append(found)
            if good:
                return good
        return []

    def _forgotten(self, found: Any, turns: Sequence[Said], recent: int) -> bool:
        entry = self.entries[found.document]
        if any(
            document == found.document and begin < found.end and found.begin < end
            for document, begin, end in self._read
        ):
            return False
        if entry.index < 0:
            return True
        turn = turns[entry.index]
        # Where in the turn's tokens a passage ends is not known, but about.
        before = sum(len(e.text) for e in self.entries[: found.document] if e.index == entry.index)
        whole = sum(len(document.text) for document in turn.documents) + len(turn.text)
        end = turn.start + (turn.end - turn.start) * (before + found.end) / max(whole, 1)
        return end < recent and not turn.pinned

    def _passage(self, found: Any) -> Passage:
        entry = self.entries[found.document]
        focus = entry.text[slice(*found.focus)]
        return Passage(entry, entry.text[found.begin : found.end], focus, found.score)


def asked(text: str) -> str:
    """Of a long message its last sentences: what is asked stands there."""
    if len(text) <= LONGEST:
        return text
    text = text.rstrip().rpartition("\n\n")[2][-4 * LONGEST :]  # however long it is
    from longchat_cli.recall.passages import split_sentences

    begins = [begin for begin, _ in split_sentences(text)[0].tolist()]
    return text[next((b for b in begins if b >= len(text) - LONGEST), -LONGEST) :]


def _entries(documents: Sequence[Document], turns: Sequence[Said], first: int = 0) -> Iterator[Entry]:
    """Of a user's long message what it asks is apart: it looks for the rest."""
    yield from (Entry(document.name, document.text, -1, True) for document in documents)
    for index, turn in enumerate(turns, first):
        yield from (Entry(document.name, document.text, index, True) for document in turn.documents)
        end = turn.text.rindex(asked(turn.text)) if turn.role == "user" else 0
        parts = filter(None, (turn.text[:end], turn.text[end:]))
        yield from (Entry(f"the {turn.role}", text, index) for text in parts)


def local_encoder(notify: Callable[[str], None]) -> Callable[[], Any]:
    """Loads the sentence encoder where it is installed; else None, and a word to `notify`.

    It is not pulled: a chat does not stop for that.
    """

    def load() -> Any:
        from longchat_cli.models import catalog
        from longchat_cli.recall.semantic import Encoder

        model = catalog.MODELS[catalog.ENCODER]
        if model.installed():
            return Encoder(model.path)
        lacking = f"without the sentence encoder (`longchat models pull {model.name}`)"
        notify(f"remembering by words alone, {lacking}: what is asked in other words is missed")
        return None

    return load
