"""How sure `verified` is: true and altered statements about a text, put before the citation checker.

Facts are planted in generated prose; with a book, its own sentences are altered as well. A true statement is
a fact quoted or lightly paraphrased; an altered one differs in a number, a name, a negation, who did it to
whom, a unit, a date or a quantity, and is not to be verified.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from longchat_cli.citations import Checker
from longchat_cli.documents import Document
from longchat_cli.evaluation.haystack import load_text, plant
from longchat_cli.evaluation.score import interval
from longchat_cli.prose import prose, words
from longchat_cli.recall.passages import split_sentences

_LINES = words(
    """
    {p} sold {n} barrels of {good} to {q} on {date}.
    {p} never sold {n} barrels of {good} to {q} on {date}.
    {p} was the guardian of {q} until {year}.
    {p} was not the guardian of {q} until {year}.
    The {thing} of {p} is {n} {unit} long.
    The {thing} of {p} is not {n} {unit} long.
    {p} paid {q} the {n} crowns that were due in {place}.
    {p} did not pay {q} the {n} crowns that were due in {place}.
    In {year}, {p} defeated {q} near {place}.
    In {year}, {p} could not defeat {q} near {place}.
    {p} wrote {n} letters to {q} from {place} before {date}.
    {p} wrote no letters to {q} from {place} before {date}.
    The well-known merchant {p} lived in {place} with {q}.
    The well-known merchant {p} no longer lived in {place} with {q}.
    All the windows of the {thing} were broken when {p} met {q}.
    None of the windows of the {thing} were broken when {p} met {q}.
    {p} told {q} that the {thing} weighed {n} {unit}.
    {p} told {q} that the {thing} hardly weighed {n} {unit}.
    “The {thing} is yours,” said {p} to {q} on {date}.
    “The {thing} isn’t yours,” said {p} to {q} on {date}.
    {p} owes {n} crowns to {q}, who lent them at {m} percent.
    {p} owes nothing to {q}, who lent them at {m} percent.
    The {thing} was built by {p} and sold to {q} for {n} dollars.
    The {thing} was not built by {p} and sold to {q} for {n} dollars.
    At {m} o’clock {p} followed {q} from {place} to the {thing}.
    At {m} o’clock nobody followed {q} from {place} to the {thing}.
    Every sailor of the {thing} trusted {p}, but {q} feared her.
    No sailor of the {thing} trusted {p}, but {q} feared her.
    """,
    "\n",
)
FACTS = list(zip(_LINES[1:-1:2], _LINES[2:-1:2], strict=True))
"""(as it is, denied): {p} and {q} are people, {n} and {m} numbers, the others what their names say."""
_SLOTS: dict[str, list[str]] = {
    "p": words("Alder Bramwell Corbett Dunmore Ellery Farrow Gilroy Hathaway Ingram Jessop Kendrick Lorimer"),
    "q": words("Marlowe Norbury Oakley Penrose Quimby Radcliffe Selwyn Thackeray Upton Vickers Wetherby"),
    "n": words("12 15 24 37 48 120 365 900 1,250 4,800 17,500 3.5"),
    "m": words("two three four seven eight ten"),
    "unit": words("metres feet miles kilograms pounds tons yards inches"),
    "date": words("3 May, 4 May, 17 June, 21 June, 9 October 1851, 9 October 1857, Christmas Eve", ","),
    "year": words("1815 1816 1848 1905 1951"),
    "place": words("Leipzig Bristol Cadiz Odessa Galway Trieste Bergen"),
    "good": words("wine salt tar herring flour vinegar"),
    "thing": words("lighthouse chapel bridge windmill schooner library"),
}  # fmt: skip
_CHANGED = {"number": "nm", "name": "pq", "unit": ("unit",), "date": ("date", "year"), "place": ("place",)}
_QUANTITIES = {
    "All the": "Some of the",
    "Every sailor": "One sailor",
    "to": "for",
    "before": "after",
    "until": "since",
}
_TENSE = {
    "sold": "sells", "was": "is", "paid": "pays", "defeated": "defeats", "wrote": "writes", "lived": "lives",
    "told": "tells", "weighed": "weighs", "said": "says", "owes": "owed", "followed": "follows", "is": "was",
    "barrels": "barrel", "letters": "letter", "windows": "window", "trusted": "trusts", "feared": "fears",
}  # fmt: skip
_NEGATED = re.compile(r"\b(not|never)\s+|n[’']t\b")
_AUXILIARY = re.compile(r"\b(is|was|were|had|has|have|could|would|will|can|should|must)\b(?! not\b|n)")
_PRONOUNS = {"he": "she", "she": "he", "his": "her", "him": "her", "I": "you", "you": "I", "we": "they"}


@dataclass(frozen=True)
class Statement:
    """What is put before the checker, and the characters [begin, end) of the text it was made from."""

    text: str
    kind: str
    true: bool
    begin: int
    end: int


def citing(n: int, length: int, seed: int, data: Sequence[Path]) -> dict[str, Any]:
    """Statements about `n` facts in prose of about `length` tokens, and about `n` sentences of a book."""
    rng = random.Random(f"{seed}/citing")
    texts = {"facts": planted(n, length * 5, rng)}
    book = load_text(data)
    if book is not None:
        texts["book"] = (book, list(_from_book(book, n, rng)))
    samples, totals = [], []
    for name, (text, statements) in texts.items():
        judged, seconds = _judged(text, statements)
        samples += [{"text": name, **sample} for sample in judged]
        totals += [{"text": name, **total} for total in _totals(judged)]
        totals[-1] |= {"characters": len(text), "seconds": round(seconds, 3)}
    return {"samples": samples, "totals": totals}


def planted(n: int, characters: int, rng: random.Random) -> tuple[str, list[Statement]]:
    """Prose with `n` facts in it, set in lines, and the statements about them."""
    facts: dict[str, _Fact] = {}
    while len(facts) < n:
        fact = _Fact.draw(rng, len(facts))
        facts[fact.text] = fact
    printed = [_set_in_lines(text, rng) for text in facts]
    text, _ = plant(prose(max(characters, 200 * n), rng), printed, rng)
    statements = []
    for fact, line in zip(facts.values(), printed, strict=True):
        begin = text.index(line)
        place = (begin, begin + len(line))
        statements += [Statement(s, kind, True, *place) for kind, s in _paraphrases(fact.text, rng)]
        altered = ((kind, s) for kind, s in fact.altered(rng) if s not in facts)
        statements += [Statement(s, kind, False, *place) for kind, s in altered]
    return text, statements


@dataclass(frozen=True)
class _Fact:
    """One of FACTS filled in; `slots` are sorted pairs."""

    number: int
    denied: bool
    slots: tuple[tuple[str, str], ...]

    @classmethod
    def draw(cls, rng: random.Random, number: int) -> _Fact:
        slots = tuple((name, rng.choice(values)) for name, values in _SLOTS.items())
        return cls(number % len(FACTS), rng.random() < 0.3, slots)

    @property
    def text(self) -> str:
        return self._with(self.denied, dict(self.slots))

    def _with(self, denied: bool, slots: dict[str, str]) -> str:
        return FACTS[self.number][denied].format(**slots)

    def altered(self, rng: random.Random) -> Iterator[tuple[str, str]]:
        """(kind, false statement), for each kind that changes something."""
        slots = dict(self.slots)
        for kind, names in _CHANGED.items():
            for name in names:
                other = rng.choice([value for value in _SLOTS[name] if value != slots[name]])
                yield from self._changed(kind, self._with(self.denied, slots | {name: other}))
        yield "negation", self._with(not self.denied, slots)
        yield from self._changed("roles", self._with(self.denied, slots | {"p": slots["q"], "q": slots["p"]}))
        for old, new in _QUANTITIES.items():
            yield from self._changed("quantity", re.sub(rf"\b{old}\b", new, self.text, count=1))

    def _changed(self, kind: str, text: str) -> Iterator[tuple[str, str]]:
        if text != self.text:
            yield kind, text


def _set_in_lines(text: str, rng: random.Random) -> str:
    """Some spaces become line ends and a long word is hyphenated over one, as in print."""
    text = re.sub(" ", lambda _: "\n" if rng.random() < 0.15 else " ", text)
    long = [match for match in re.finditer(r"[a-z]{7,}", text) if rng.random() < 0.3]
    if long:
        middle = (long[0].start() + long[0].end()) // 2
        text = f"{text[:middle]}-\n{text[middle:]}"
    return text


def _paraphrases(text: str, rng: random.Random) -> Iterator[tuple[str, str]]:
    """(kind, true statement): the text as it is, in every kind of light paraphrase, and in three at once."""
    text = " ".join(text.split())
    yield "quote", text
    for kind, change in _LIGHT.items():
        if (changed := change(text)) != text:
            yield kind, changed
    mixed = text
    for change in rng.sample(list(_LIGHT.values()), 3):
        mixed = change(mixed)
    yield "mixed", mixed


def _sub(pattern: str, new: str | Callable[[re.Match[str]], str], count: int = 0) -> Callable[[str], str]:
    return lambda text: re.sub(pattern, new, text, count=count)


_LIGHT: dict[str, Callable[[str], str]] = {
    "case": str.lower,
    "capitals": str.upper,
    "punctuation": _sub(r"(?<!\d)[,;:](?!\d)|[.!]$|[“”\"]", ""),
    "quotes": lambda text: f'"{text.translate(str.maketrans("“”’", "``" + chr(39)))}"',
    "hyphens": _sub(r"(?<=[a-z])-(?=[a-z])", " "),
    "articles": _sub(r"\b(the|a|an) ", "", 2),
    "small words": _sub(r"\bthat (?=were|was|had|he|she)", "which "),
    "no preposition": _sub(r"\bon (?=\d)", ""),
    "inflection": _sub(rf"\b({'|'.join(_TENSE)})\b", lambda m: _TENSE[m[0]], 1),
    "contraction": _sub(r"\b(did|was|is|could|had|would|were) not\b", r"\1n't"),
    "lead-in": lambda text: f"According to the text, {text}",
}  # fmt: skip


def _from_book(book: str, n: int, rng: random.Random) -> Iterator[Statement]:
    """Statements about `n` whole sentences of a book."""
    bounds, _ = split_sentences(book)
    flat = " ".join(book.split())
    spans = [(i, j) for i, j in bounds.tolist() if _whole(book[i:j])]
    names = sorted({name for i, j in rng.sample(spans, min(400, len(spans))) for name in _names(book[i:j])})
    for begin, end in rng.sample(spans, min(n, len(spans))):
        text = " ".join(book[begin:end].split())
        for kind, true in _paraphrases(text, rng):
            yield Statement(true, kind, True, begin, end)
        for kind, false in _alterations(text, names, rng):
            if false != text and false not in flat:
                yield Statement(false, kind, False, begin, end)


def _whole(sentence: str) -> bool:
    return 8 <= len(sentence.split()) <= 40 and sentence[0].isupper() and sentence[-1] in ".!"


def _names(sentence: str) -> list[str]:
    return re.findall(r"(?<=[a-z,] )[A-Z][a-z]{3,}", " ".join(sentence.split()))


def _alterations(text: str, names: Sequence[str], rng: random.Random) -> Iterator[tuple[str, str]]:
    """(kind, false statement) of a sentence that nobody has taken apart."""
    yield "number", re.sub(r"\d+", lambda m: str(int(m[0]) + rng.randint(1, 9)), text, count=1)
    yield "number", re.sub(r"\b(two|three|four|five|ten|twenty)\b", "six", text, count=1)
    own = _names(text)
    if own and names:
        other = rng.choice([name for name in names if name not in own] or ["Nobody"])
        yield "name", re.sub(rf"\b{own[0]}\b", other, text)
    if len(set(own)) > 1:
        first, second = list(dict.fromkeys(own))[:2]
        yield "roles", re.sub(rf"\b({first}|{second})\b", lambda m: first if m[0] == second else second, text)
    if _NEGATED.search(text):
        yield "negation", _NEGATED.sub("", text, count=1)
    yield "negation", _AUXILIARY.sub(r"\1 not", text, count=1)
    pronoun = re.compile(rf"\b({'|'.join(_PRONOUNS)})\b")
    yield "roles", pronoun.sub(lambda m: _PRONOUNS[m[0]], text, count=1)


def _judged(text: str, statements: Sequence[Statement]) -> tuple[list[dict[str, Any]], float]:
    """Each statement with its verdict and whether the place is the one it was made from; seconds in all."""
    begun = time.perf_counter()
    checker = Checker([Document("text", text)])
    judged = []
    for statement in statements:
        citations = checker.check(statement.text)
        verified = bool(citations) and all(citation.verdict == "verified" for citation in citations)
        placed = verified and all(
            statement.begin < citation.source_end and citation.source_begin < statement.end
            for citation in citations
        )
        judged.append({**asdict(statement), "verified": verified, "placed": placed})
    return judged, time.perf_counter() - begun


def _totals(judged: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row per kind of statement, and one for all: precision (95 % interval) and recall of `verified`."""
    rows = []
    for true, kind in dict.fromkeys((sample["true"], sample["kind"]) for sample in judged):
        of_kind = [s for s in judged if s["true"] == true and s["kind"] == kind]
        count = sum(sample["verified"] for sample in of_kind)
        rows.append({"kind": kind, "true": true, "n": len(of_kind), "verified": count})
    true = [sample for sample in judged if sample["true"]]
    right = sum(sample["verified"] for sample in true)
    verified = sum(sample["verified"] for sample in judged)
    low, high = interval(right, verified) if verified else (0.0, 1.0)
    return [
        *rows,
        {
            "kind": "all",
            "n": len(judged),
            "precision": right / verified if verified else 0.0,
            "low": low,
            "high": high,
            "recall": right / len(true),
            "placed": sum(sample["placed"] for sample in true) / max(right, 1),
        },
    ]
