"""Answer sentences against document text: an exact or near quote, its terms alone, or nothing.

A near quote has the same words in the same order, one after the other, as `wording` compares them: a changed
number, name, negation or order of words is none. Where the document denies, doubts or asks what it is quoted
for, there is no quote either.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from longchat_cli import wording
from longchat_cli.documents import Document
from longchat_cli.recall.passages import ABBREVIATION, split_sentences
from longchat_cli.wording import Word

Verdict = Literal["verified", "mentions", "not found"]
Range = tuple[int, int, int]
"""Number of a document, begin and end in characters."""

WINDOW = 40
"""Terms are mentioned where they stand within about this many words of each other."""
SHARE = 0.6
"""Of a sentence's different words that a mention has at least, names and numbers all."""
TELLING = 8
"""Of a sentence's words so many of the rarest are looked for together."""
TRIED = 200
"""Places looked at for one sentence: more than this many equal quotes are not compared."""
RARE = 64
"""Places of a word up to which joined and parted compounds are looked for around it."""
LOOK_BACK = 8
"""Words before a quote, within its clause, among which a negation counts."""

_LEAD = re.compile(
    r"(?:[-*•+]\s+|\(?\d{1,2}[.)]\s+|#+\s+|>\s+)*[\"“'*_]*"
    r"(?:(?:yes|no)[,.:]\s+)?"
    r"(?:(?:according to|based on) (?:(?:the|this) )?(?:text|passage|document|book|context)[,:]?\s+"
    r"|in (?:the|this) (?:text|passage|document|book|context)[,:]\s+"
    r"|(?:the )?(?:text|passage|document|book|author) (?:says|states|mentions)(?: that|:|,)?\s+"
    r"|the answer is:?\s+)?",
    re.IGNORECASE,
)
"""What an answer puts before the statement: a list's marks, yes or no, who says it."""
_CLAUSE = re.compile(r"[,.;:!?()\[\]{}“”\"…—|]|--|\n[ \t]*\n")
_STOP = re.compile(r"[.!?…]+[\"'”’)\]_*]*\s|\n[ \t]*\n|[。！？]")
_BLANK = re.compile(r"\n[ \t]*\n")
_ROW = re.compile(r"\n[ \t]*[-*•+|][ \t]|\|[ \t]*\n")
"""Where an item of a list or a row of a table ends."""


@dataclass(frozen=True)
class Citation:
    """What the documents have for the characters [begin, end) of an answer.

    `source_begin`, `source_end` are characters of document number `document`'s text; None: nothing found.
    `exact` is a quote to the letter, case, quotes and line ends apart.
    """

    begin: int
    end: int
    verdict: Verdict
    exact: bool = False
    document: int | None = None
    source_begin: int = 0
    source_end: int = 0

    def as_json(self, answer: str, documents: Sequence[Document]) -> dict[str, Any]:
        """Plain values for `ask --json`: the sentence, its verdict, and where it stands."""
        about = {"begin": self.begin, "end": self.end, "sentence": answer[self.begin : self.end]}
        found: dict[str, Any] = {"verdict": self.verdict, "exact": self.exact, "quote": None}
        if self.document is not None:
            document = documents[self.document]
            found["quote"] = {
                **asdict(document.locate(self.source_begin, self.source_end)),
                "begin": self.source_begin,
                "end": self.source_end,
                "text": document.text[self.source_begin : self.source_end],
            }
        return about | found


@dataclass(frozen=True)
class _Statement:
    """A sentence of an answer: its `words`, and per key that must match the word it comes from."""

    text: str
    words: list[Word]
    keys: list[str]
    at: list[int]
    names: frozenset[str]

    @classmethod
    def of(cls, text: str) -> _Statement:
        pieces = wording.SPLIT.split(text)[1::2]
        words = [wording.word(piece) for piece in pieces]
        keys = [(key, index) for index, word in enumerate(words) for key in word.keys]
        names = {
            key
            for index, (piece, word) in enumerate(zip(pieces, words, strict=True))
            for key in word.keys
            if word.number or (piece[0].isupper() and (index or len(pieces) == 1) and piece != "I")
        }
        return cls(text, words, [key for key, _ in keys], [index for _, index in keys], frozenset(names))

    def of_keys(self, first: int, last: int) -> list[Word]:
        """The words of the keys [first, last)."""
        return [self.words[index] for index in self.at[first:last]]

    @property
    def clause(self) -> bool:
        return any(word.verbal for word in self.words)


class Checker:
    """Documents indexed by their words, once; `check` then takes time by the answer's length.

    Holds about 40 bytes per word of text.
    """

    def __init__(self, documents: Sequence[Document]) -> None:
        self.documents = documents
        self._text = "\n\n".join(document.text for document in documents)
        sizes = [len(document.text) + 2 for document in documents]
        self._starts = np.cumsum([0, *sizes])[:-1].tolist()
        pieces = wording.SPLIT.split(self._text)
        ends = np.cumsum(np.fromiter(map(len, pieces), np.int64, len(pieces)))
        self._begins, self._ends = ends[:-1:2], ends[1::2]
        vocabulary: dict[str, int] = {}
        surfaces = np.array([vocabulary.setdefault(p, len(vocabulary)) for p in pieces[1::2]], np.int32)
        self._surfaces = surfaces
        self._words = [wording.word(surface) for surface in vocabulary]
        self._index(vocabulary)

    def _index(self, vocabulary: dict[str, int]) -> None:
        """`_keys`: the keys of all words in order, `_at` the word of each; `_order` sorts them by key."""
        self._ids: dict[str, int] = {}
        per_word = [[self._ids.setdefault(k, len(self._ids)) for k in word.keys] for word in self._words]
        counts = np.array([len(ids) for ids in per_word], np.int64)
        flat = np.array([id for ids in per_word for id in ids], np.int32)
        firsts = np.cumsum(counts) - counts
        held = counts[self._surfaces]
        self._at = np.repeat(np.arange(len(self._surfaces)), held)
        inside = np.arange(len(self._at)) - np.repeat(np.cumsum(held) - held, held)
        self._keys = flat[np.repeat(firsts[self._surfaces], held) + inside] if len(flat) else flat
        self._order = np.argsort(self._keys, kind="stable")
        self._first = np.searchsorted(self._keys[self._order], np.arange(len(self._ids) + 1))

    def check(self, answer: str, read: Sequence[Range] = ()) -> list[Citation]:
        """One citation per sentence of `answer` that says anything, in order.

        Of several equal places the first in `read` is taken, the passages that were read.
        """
        bounds, _ = split_sentences(answer)
        found = []
        for begin, end in bounds.tolist():
            begin += _LEAD.match(answer[begin:end]).end()  # type: ignore[union-attr]
            statement = _Statement.of(answer[begin:end])
            if statement.keys:
                found.append(self._judge(statement, begin, end, read))
        return found

    def _judge(self, statement: _Statement, begin: int, end: int, read: Sequence[Range]) -> Citation:
        quotes = [self._place(first, last) for first, last in self._quotes(statement)]
        if quotes:
            inside = (
                q for q in quotes for d, low, high in read if q[0] == d and low <= q[1] and q[2] <= high
            )
            number, low, high = next(inside, quotes[0])
            exact = _plain(self.documents[number].text[low:high]) == _plain(statement.text)
            return Citation(begin, end, "verified", exact, number, low, high)
        mention = self._mention(statement, read)
        if mention is None:
            return Citation(begin, end, "not found")
        return Citation(begin, end, "mentions", False, *self._place(*mention))

    def _place(self, first: int, last: int) -> tuple[int, int, int]:
        """Document, begin and end of words `first` to `last`."""
        begin = int(self._begins[first])
        number = bisect_right(self._starts, begin) - 1
        start = self._starts[number]
        return number, begin - start, int(self._ends[last]) - start

    # Quotes

    def _quotes(self, statement: _Statement) -> Iterator[tuple[int, int]]:
        """First and last word of each place that says what the statement says."""
        keys = statement.keys
        if len(keys) == 1 and len(self._postings(keys[0])) != 1:
            return  # a single word is a quote only where the documents have it once
        places = self._runs(keys)
        straight = [(start, range(start, start + len(keys))) for start in places[:TRIED].tolist()]
        for _, matched in straight or self._compounds(statement):
            at = [int(self._at[index]) for index in matched]
            first = self._lead_in(statement, at[0])
            if self._same_meaning(statement, at, first):
                yield first, at[-1]

    def _postings(self, key: str) -> np.ndarray:
        id = self._ids.get(key)
        return self._order[:0] if id is None else self._order[self._first[id] : self._first[id + 1]]

    def _runs(self, keys: Sequence[str]) -> np.ndarray:
        """Where the documents' keys are `keys`, one after the other: indices of the first, ascending."""
        postings = [self._postings(key) for key in keys]
        rarest = min(range(len(keys)), key=lambda index: len(postings[index]))
        starts = postings[rarest] - rarest
        starts = starts[(starts >= 0) & (starts <= len(self._keys) - len(keys))]
        for offset, key in enumerate(keys):
            if not len(starts):
                break
            starts = starts[self._keys[starts + offset] == self._ids[key]]
        return starts

    def _compounds(self, statement: _Statement) -> Iterator[tuple[int, list[int]]]:
        """Runs in which a compound is one word on one side and two on the other (sea shore, sea-shore)."""
        by_rarity = sorted((len(self._postings(key)), at) for at, key in enumerate(statement.keys))
        rare = [(size, at) for size, at in by_rarity if 0 < size <= RARE][:3]
        tried: set[int] = set()
        for _, anchor in rare:
            for place in self._postings(statement.keys[anchor]).tolist():
                for start in range(max(place - anchor - 2, 0), place - anchor + 3):
                    if start not in tried:
                        tried.add(start)
                        matched = self._follow(statement, start)
                        if matched:
                            yield start, matched

    def _follow(self, statement: _Statement, index: int) -> list[int]:
        """The index of the documents' key for each of the statement's from `index` on; empty: they differ."""
        keys, matched, i = statement.keys, [], 0
        while i < len(keys) and index < len(self._keys):
            here = self._word(int(self._at[index]))
            if self._ids.get(keys[i]) == self._keys[index]:
                matched.append(index)
            elif _joined(statement.of_keys(i, i + 2), here):
                matched += [index, index]
                i += 1
            elif _joined([here, *self._after(index)], statement.of_keys(i, i + 1)[0]):
                index += 1
                matched.append(index)
            else:
                return []
            i, index = i + 1, index + 1
        return matched if i == len(keys) else []

    def _after(self, index: int) -> list[Word]:
        """The word of the key after key `index`, if there is one."""
        return [self._word(at) for at in self._at[index + 1 : index + 2].tolist()]

    def _word(self, index: int) -> Word:
        return self._words[self._surfaces[index]]

    def _gap(self, index: int) -> str:
        """What stands between word `index` and the next."""
        after = int(self._begins[index + 1]) if index + 1 < len(self._begins) else len(self._text)
        return self._text[int(self._ends[index]) : after]

    # Meaning

    def _lead_in(self, statement: _Statement, index: int) -> int:
        """The first of the small words that stand before word `index` in the statement, too."""
        for word in reversed(statement.words[: statement.at[0]]):
            before = index
            while before and not _CLAUSE.search(self._gap(before - 1)):
                before -= 1
                if self._word(before).text == word.text:
                    index = before
                    break
                if self._word(before).keys or self._word(before).soft:
                    break
        return index

    def _same_meaning(self, statement: _Statement, at: Sequence[int], first: int) -> bool:
        """Whether the documents' words `at` say what the statement's do, given that their keys are equal."""
        return (
            self._same_between(statement, at)
            and self._in_one_sentence(at)
            and self._same_edges(statement, at)
            and not self._turned(statement, first, at[-1])
        )

    def _same_between(self, statement: _Statement, at: Sequence[int]) -> bool:
        """Small words between the keys: left out or put in, a few, but not exchanged, and no passive made."""
        changes = 0
        for (i, j), (m, n) in zip(pairwise(statement.at), pairwise(at), strict=True):
            ours = _small(statement.words[i : j + 1])
            theirs = _small([self._word(index) for index in range(m, n + 1)])
            if ours - theirs and theirs - ours:
                return False
            passive = statement.words[j].participle or self._word(n).participle
            if passive and ("be" in ours) != ("be" in theirs):
                return False
            changes += len(ours ^ theirs)
        return changes <= max(1, len(at) // 4)

    def _in_one_sentence(self, at: Sequence[int]) -> bool:
        return not any(self._ends_sentence(index) for index in range(at[0], at[-1]))

    def _ends_sentence(self, index: int) -> bool:
        gap = self._gap(index)
        if _ROW.search(gap):
            return True
        if not _STOP.search(gap):
            return False
        after = self._text[int(self._begins[index + 1])] if index + 1 < len(self._begins) else "A"
        if after.islower():
            return False
        return bool(_BLANK.search(gap)) or not ABBREVIATION.fullmatch(self._word(index).text)

    def _same_edges(self, statement: _Statement, at: Sequence[int]) -> bool:
        """The quote is not cut out of a larger number, and ends on what it names."""
        first, last = self._word(at[0]), self._word(at[-1])
        if last.possessive and not statement.words[statement.at[-1]].possessive:
            return False
        beside = [self._word(at[-1] + 1)] if at[-1] + 1 < len(self._surfaces) else []
        if last.number and beside and self._gap(at[-1]).isspace() and beside[0].text in wording.SCALES:
            return False
        if at[0] and (first.number or first.text in wording.SCALES) and self._gap(at[0] - 1).isspace():
            return not self._word(at[0] - 1).number
        return True

    def _turned(self, statement: _Statement, first: int, last: int) -> bool:
        """The words around the quote deny or doubt it, ask it, or say it of somebody else."""
        before = list(self._before(first))
        if any(word.text in wording.NEGATIONS | wording.DOUBTS or "not" in word.keys for word in before):
            return True
        head = next((word for word in before if word.keys or word.soft in wording.SOFT), None)
        if head and statement.clause and (head.possessive or head.text in wording.PREPOSITIONS):
            return True
        if last + 1 < len(self._surfaces) and not _CLAUSE.search(self._gap(last)):
            after = self._word(last + 1)
            if after.text in wording.NEGATIONS or "not" in after.keys:
                return True
        return self._asked(last) and not statement.text.rstrip("\"'”’)* ").endswith("?")

    def _before(self, index: int) -> Iterator[Word]:
        """The words before word `index` in its clause, the nearest first."""
        for before in range(index - 1, max(index - 1 - LOOK_BACK, -1), -1):
            if _CLAUSE.search(self._gap(before)):
                return
            yield self._word(before)

    def _asked(self, index: int) -> bool:
        for after in range(index, min(index + 4 * LOOK_BACK, len(self._surfaces))):
            stop = re.search(r"[.;:!?]", self._gap(after))
            if stop:
                return stop[0] == "?"
        return False

    # Mentions

    def _mention(self, statement: _Statement, read: Sequence[Range]) -> tuple[int, int] | None:
        """First and last word where most of the statement's stand together, names and numbers all.

        What was `read` is looked at first.
        """
        keys = list(dict.fromkeys(statement.keys))
        known = [key for key in keys if len(self._postings(key))]
        if not known or not statement.names <= set(known):
            return None
        wanted = np.array([self._ids[key] for key in known])
        names = {self._ids[name] for name in statement.names}
        for low, high in [*map(self._within, read), self._densest(known)]:
            hits = np.flatnonzero(np.isin(self._keys[low:high], wanted)) + low
            seen = {int(id) for id in self._keys[hits]}
            if len(seen) >= SHARE * len(keys) and names <= seen:
                return int(self._at[hits[0]]), int(self._at[hits[-1]])
        return None

    def _within(self, place: Range) -> tuple[int, int]:
        """The keys of a range of a document, from and to."""
        number, begin, end = place
        words = np.searchsorted(self._begins, [self._starts[number] + begin, self._starts[number] + end])
        low, high = np.searchsorted(self._at, words).tolist()
        return low, high

    def _densest(self, keys: Sequence[str]) -> tuple[int, int]:
        """From and to of twice `WINDOW` keys that have most of the rarest of `keys`, weighed by rarity."""
        score = np.zeros(len(self._keys) // WINDOW + 2)
        for key in sorted(keys, key=lambda key: len(self._postings(key)))[:TELLING]:
            postings = self._postings(key)
            buckets = np.unique(postings // WINDOW)
            score[np.union1d(buckets, buckets + 1)] += np.log1p(len(self._keys) / len(postings))
        best = int(score.argmax())
        return max(best - 1, 0) * WINDOW, min((best + 1) * WINDOW, len(self._keys))


def _small(words: Sequence[Word]) -> set[str]:
    """The classes of small words between the first and last of `words`, parts of contractions among them."""
    if len(words) == 1:
        return set()
    first, *inner, last = words
    found = {word.soft for word in inner}
    found |= {first.soft} if first.keys[-1:] != ("not",) else set()  # he's: behind; isn't: before
    found |= {last.soft} if last.keys[:1] == ("not",) else set()
    return found - {""}


def _joined(pair: Sequence[Word], whole: Word) -> bool:
    """Two words written as one: per cent and percent."""
    return len(pair) == 2 and wording.key("".join(word.text for word in pair)) in whole.keys


def _plain(text: str) -> str:
    """Text to be equal to the letter: white space, case, kinds of quotes and the ends' punctuation aside."""
    text = " ".join(text.casefold().translate(_QUOTES).split())
    return text.strip(" .,;:!?\"'*_")


_QUOTES = str.maketrans("‘’“”", "''\"\"")
