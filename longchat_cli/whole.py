"""Questions about the whole of a text: every part is read in its turn and noted, then the notes are read.

A question about a place needs a passage; "summarise", "list all" and "how does X change" need everything, and
a text beyond the window can only be had in parts. Each part is read with full attention in a window of its
own; notes are short, and where they are more than the window holds they are read in groups first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from safetensors.numpy import save_file

from longchat_cli.citations import Checker, Citation
from longchat_cli.documents import Document
from longchat_cli.pages import Store, digest
from longchat_cli.prompt import Text
from longchat_cli.recall.passages import split_sentences
from longchat_cli.wording import FREE, PREPOSITIONS

Kind = Literal["summary", "list", "change"]

PART_TOKENS = 1536
"""Tokens of a part at most; small models note little of longer ones."""
NOTE_TOKENS = 96
"""Tokens of a note at most."""
TERM = 3
"""Words of an item of a list that need not be quoted."""
NOTHING = re.compile(r"\W*(?:none|nothing|no|n/?a|not mentioned|unknown)\b\W*", re.IGNORECASE)

_LOOSE = FREE | PREPOSITIONS | {"i", "you", "he", "she", "it", "we", "they", "me", "him", "her", "us", "them"}
"""An item that ends in such a word was cut off, or is nothing else."""

EMPTY = "Nothing of that kind was found."
"""The answer, or the only note, where no part says anything."""

_KINDS: dict[Kind, re.Pattern[str]] = {
    "list": re.compile(
        r"^\W*(?:please\s+)?(?:list|enumerate)\b"
        r"|\b(?:name|find|give|show|what are|who are|which)\b.{0,24}\b(?:all|every|each)\b"
        r"|\bevery (?:mention|occurrence)\b",
        re.IGNORECASE,
    ),
    "change": re.compile(
        r"\bhow (?:do|does|did|has|have|is|are|was|were)\b.*\b(?:changed?s?|changing|evolved?s?|evolving)\b"
        r"|\bhow\b.*\b(?:develop|grow|grew|progress)\w*\b.*\b(?:over|during|throughout|across)\b"
        r"|\bthroughout the\b|\bfrom (?:beginning|start) to (?:end|finish)\b",
        re.IGNORECASE,
    ),
    "summary": re.compile(
        r"\b(?:summari[sz]e|summary|overview|outline|synopsis|gist|tl;?dr|plot|recap)\b"
        r"|\bmain (?:points?|ideas?|themes?|topics?|arguments?|characters?|conclusions?)\b"
        r"|\bwhat (?:is|are) (?:this|the|these) \w+(?: \w+)? (?:all )?about\b",
        re.IGNORECASE,
    ),
}
_NOTE: dict[Kind, str] = {
    "summary": "Summarise this part of the text in two sentences.",
    "list": "{question} Answer from this part of the text alone, one item a line. "
    "If there is none, say: none",
    "change": "What does this part of the text say on this: {question} Answer in one sentence. "
    "If it says nothing, say: nothing",
}
_REDUCE: dict[Kind, str] = {
    "summary": "These are notes on the parts of one text, in order. {question}",
    "list": "These are lists from the parts of one text. {question}",
    "change": "These are notes on the parts of one text, in order. {question}",
}

Count = Callable[[str], int]
Say = Callable[[Sequence[Text], str, int], str | None]
"""Reads texts and answers a question on them within so many tokens; None when it was stopped."""
Progress = Callable[[int, int], None]


def kind(question: str) -> Kind | None:
    """What kind of question about the whole this is; None for one about a place."""
    return next((kind for kind, pattern in _KINDS.items() if pattern.search(question)), None)


@dataclass(frozen=True)
class Part:
    """Characters [begin, end) of document number `document`, of so many tokens."""

    document: int
    begin: int
    end: int
    tokens: int


@dataclass(frozen=True)
class Note:
    """What the model noted on a part. `kept`: in an earlier run."""

    part: Part
    text: str
    kept: bool = False


def parts(documents: Sequence[Document], count: Count, most: int = PART_TOKENS) -> list[Part]:
    """The documents cut into parts of `most` tokens at most, along sentences.

    From half full on, a part is closed where a place (a page, a chapter) ends.
    """
    return [part for number, document in enumerate(documents) for part in _cut(number, document, count, most)]


def _cut(number: int, document: Document, count: Count, most: int) -> Iterator[Part]:
    bounds, paragraphs = split_sentences(document.text)
    begin = end = held = 0
    before = -1
    for (low, high), paragraph in zip(bounds.tolist(), paragraphs.tolist(), strict=True):
        size = count(document.text[low:high]) + 1
        turn = paragraph != before and document.locate(low, high).place != document.locate(begin, end).place
        if held and (held + size > most or (turn and 2 * held >= most)):
            yield Part(number, begin, end, held)
            held = 0
        if not held:
            begin = low
        end, held, before = high, held + size, paragraph
    if held:
        yield Part(number, begin, end, held)


def instruction(question: str, kind: Kind) -> str:
    """What is asked of each part."""
    return _NOTE[kind].format(question=question)


class Notes:
    """Notes kept in `store`, a page each, by model, instruction and text: an interrupt's are gone on with.

    `store` None keeps nothing beyond this object.
    """

    def __init__(self, store: Store | None, *identity: str) -> None:
        self._store, self._identity = store, identity
        self._held: dict[str, str] = {}

    def get(self, text: str) -> str | None:
        """The note on a part with this text."""
        key = self._key(text)
        if key not in self._held and self._store and (page := self._store.find(key)):
            self._held[key] = page["note"]
        return self._held.get(key)

    def add(self, text: str, note: str) -> None:
        """Keep a note at once."""
        key = self._key(text)
        self._held[key] = note
        if self._store:
            self._store.put(key, _blank, {"note": note})

    def _key(self, text: str) -> str:
        return digest("note", *self._identity, text.encode("utf-8", "surrogatepass"))


def _blank(name: str, metadata: dict[str, str]) -> None:
    """A page whose metadata is all it holds."""
    save_file({}, name, metadata)


def read_all(
    documents: Sequence[Document],
    cut: Sequence[Part],
    question: str,
    kind: Kind,
    say: Say,
    notes: Notes,
    progress: Progress | None = None,
) -> list[Note]:
    """A note on each part, in order; fewer when `say` was stopped."""
    made, done, total = [], 0, sum(part.tokens for part in cut)
    for part in cut:
        document = documents[part.document]
        text = document.text[part.begin : part.end]
        note = notes.get(text)
        kept = note is not None
        if note is None:
            note = say([Text(text, document.name, part.begin)], instruction(question, kind), NOTE_TOKENS)
            if note is None:
                break
            note = note if kind == "list" else _tidy(note)
            notes.add(text, note)
        made.append(Note(part, note.strip(), kept))
        done += part.tokens
        if progress:
            progress(done, total)
    return made


def _tidy(note: str) -> str:
    """Each sentence once, and none that was cut off: small models go on when they have said all."""
    text = " ".join(note.split())
    bounds, _ = split_sentences(text)
    found = list(dict.fromkeys(text[begin:end] for begin, end in bounds.tolist()))
    whole = [sentence for sentence in found if sentence[-1] in ".!?。”\"’'"]
    return " ".join(whole or found)


def useful(notes: Sequence[Note]) -> list[Note]:
    """The notes that say something."""
    return [note for note in notes if note.text and not NOTHING.fullmatch(note.text.splitlines()[0])]


def condense(
    notes: Sequence[str], question: str, kind: Kind, room: int, count: Count, say: Say
) -> list[str] | None:
    """Notes that fit `room` tokens: as they are, or read in groups, as often as it takes. None: stopped."""
    texts = list(notes)
    while len(texts) > 1 and sum(count(text) + 2 for text in texts) > room:
        shorter = []
        for group in _groups(texts, room, count):
            note = say([Text("\n\n".join(group))], final(question, kind), NOTE_TOKENS)
            if note is None:
                return None
            shorter.append(note.strip())
        if len(shorter) >= len(texts):  # each as long as the room: the first ones must do
            return shorter[:1]
        texts = shorter
    return texts


def _groups(texts: Sequence[str], room: int, count: Count) -> Iterator[list[str]]:
    group: list[str] = []
    held = 0
    for text in texts:
        size = count(text) + 2
        if group and held + size > room:
            yield group
            group, held = [], 0
        group.append(text)
        held += size
    if group:
        yield group


def final(question: str, kind: Kind) -> str:
    """What is asked of the notes in the end."""
    return _REDUCE[kind].format(question=question)


def items(notes: Sequence[Note], documents: Sequence[Document]) -> tuple[list[str], int]:
    """The different items of all lists, in order, and how many were left out: those their part does not have.

    Joined without the model: nothing is lost and nothing is added.
    """
    found: dict[str, str] = {}
    strange = set()
    for note in notes:
        part = Checker([_alone(note.part, documents)])
        for line in note.text.splitlines():
            item = re.sub(r"^\s*(?:[-*•+]|\(?\d{1,3}[.)])\s*", "", line).strip().rstrip(".,;")
            same = re.sub(r"\W+", " ", item.casefold()).strip()
            if not same or NOTHING.fullmatch(item) or same.isdigit() or same.split()[-1] in _LOOSE:
                continue
            if all(_has(citation, item) for citation in part.check(item)):
                found.setdefault(same, item)
            else:
                strange.add(same)
    return list(found.values()), len(strange - found.keys())


def _has(citation: Citation, item: str) -> bool:
    """A quote; or a mention, of a name or a term: a sentence's words stand together by chance."""
    return citation.verdict == "verified" or (citation.verdict == "mentions" and len(item.split()) <= TERM)


def _alone(part: Part, documents: Sequence[Document]) -> Document:
    document = documents[part.document]
    return Document(document.name, document.text[part.begin : part.end])
