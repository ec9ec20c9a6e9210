"""StreamEval (Xiao et al., ICLR 2024, section 4.4): lines without end, and questions about one far back.

One conversation, one state: the user tells ten lines a turn, and every second time then asks for the value of
a line that is so many lines back. What the model can do at all is measured first, with full attention inside
its window.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from longchat_cli.chat import Conversation
from longchat_cli.evaluation import facts
from longchat_cli.evaluation.journal import Journal, Row
from longchat_cli.evaluation.score import contains
from longchat_cli.evaluation.stream import STEPS, timed
from longchat_cli.prose import prose
from longchat_cli.sampling import Sampling
from longchat_cli.sessions import Turn
from longchat_cli.terminal_text import table

LINES = 10
"""Lines that are told in a turn."""
EVERY = 2
"""Turns of lines to a question."""
DISTANCES = (20, 50, 100, 200, 300, 500, 1000, 2000)
OWN = 300
"""Most lines back where the model itself is measured, as far as they fit its window."""
OWN_METHOD = "full"
TOLD = Sampling(max_tokens=1)
"""What is answered to lines, and is not looked at."""

ANSWER = Sampling(max_tokens=32, stop=("\n",))


@dataclass(frozen=True)
class Line:
    """A line that is told; where it holds a `value`, the `question` about it."""

    text: str
    question: str = ""
    value: str = ""


Converse = Callable[[str | None], Conversation]
"""A conversation, opened, under the method named; None: under the one that is evaluated."""


@dataclass(frozen=True)
class Wording:
    """How a line that holds a value, and a question about it, are put. Placeholders: {key} and {value}.

    `numbered`: keys are the lines' numbers. `among`: of the lines told in a turn one holds a value, the rest
    is prose.
    """

    line: str
    question: str
    numbered: bool = False
    among: bool = False

    def turns(self, size: int, rng: random.Random) -> list[list[Line]]:
        """`size` turns of LINES different lines each."""
        lines = self._lines(size * (1 if self.among else LINES), rng)
        if not self.among:
            return [lines[i : i + LINES] for i in range(0, len(lines), LINES)]
        others = _sentences(size * (LINES - 1), rng)
        turns = [others[i : i + LINES - 1] for i in range(0, len(others), LINES - 1)]
        for turn, line in zip(turns, lines, strict=True):
            turn.insert(rng.randrange(LINES), line)
        return turns

    def _lines(self, size: int, rng: random.Random) -> list[Line]:
        keys = facts.keys(size, rng)
        values = [str(value) for value in rng.sample(range(1_000_000, 10_000_000), size)]
        if self.numbered:
            keys = [str(number) for number in range(1, size + 1)]
            values = [str(rng.randint(1, 50_000)) for _ in keys]
        return [
            Line(self.line.format(key=k, value=v), self.question.format(key=k), v)
            for k, v in zip(keys, values, strict=True)
        ]


def _sentences(size: int, rng: random.Random) -> list[Line]:
    text = prose(120 * size, rng).replace("\n\n", " ")
    return [Line(f"{sentence.rstrip('.')}.") for sentence in text.split(". ")][:size]


_LINE = "The special magic number for {key} is: {value}."
_QUESTION = "What is the special magic number for {key}?"
WORDINGS = {
    "facts": Wording(_LINE, _QUESTION, among=True),
    "alike": Wording(_LINE, _QUESTION),
    "register": Wording(
        "line {key}: REGISTER_CONTENT is <{value}>",
        "What is the <REGISTER_CONTENT> in line {key}? I need the number.",
        numbered=True,
    ),
}
"""RULER's words, in one line of ten among prose or in every line; LongEval's numbered lines. The smallest
models can do the first now and then."""


@dataclass(frozen=True)
class Plan:
    """A stream of `tokens` in this `wording`; `own` questions at each distance measure the model itself."""

    tokens: int = 100_000
    own: int = 20
    seed: int = 0
    wording: str = "facts"
    answer: Sampling = ANSWER


def streameval(
    converse: Converse, plan: Plan, journal: Journal, progress: Callable[[int, int], None]
) -> dict[str, Any]:
    """{"samples": [...], "totals": [...]}: the model's own score by distance, then the method's.

    A stream that `journal` has whole is not read again.
    """
    if plan.own and not journal.where(kind="own"):
        journal.add({"kind": "own", "answers": list(_own(converse, plan))})
    chat = converse(None)
    method = _named(chat)
    if not journal.where(kind="stream", method=method):
        journal.add({"kind": "stream", "method": method, **_stream(chat, plan, progress)})
    return {"samples": journal.rows, "totals": totals(journal.rows)}


def _named(chat: Conversation) -> str:
    info = chat.engine.info
    shown = {name: info.options[name] for name in ("sinks", "window", "evict") if name in info.options}
    return " ".join([info.method, *(f"{name}={value}" for name, value in shown.items())])


def _own(converse: Converse, plan: Plan) -> Iterator[Row]:
    """Answers under full attention: lines are told until the window is full, then the state serves all."""
    chat = converse(OWN_METHOD)
    rng = random.Random(f"{plan.seed}/own")
    turns = WORDINGS[plan.wording].turns(OWN // LINES + plan.own, rng)
    room = chat.engine.info.window - 256
    told = 0
    while told < len(turns):
        text = _text(turns[told])
        if chat.coverage().seen + chat.engine.count(text) + 32 > room:
            break
        _say(chat, text, TOLD)
        told += 1
    mark, before = chat.engine.snapshot(), list(chat.turns)
    for distance in DISTANCES:
        for number in range(plan.own):
            at = told - distance // LINES - number  # others near it do as well
            if distance > OWN or at < 0:
                continue
            yield {"distance": distance, **_ask(chat, _pick(turns[at], rng), plan)}
            chat.engine.restore(mark)
            chat.turns = list(before)


def _stream(chat: Conversation, plan: Plan, progress: Callable[[int, int], None]) -> Row:
    rng = random.Random(f"{plan.seed}/stream")
    turns = WORDINGS[plan.wording].turns(plan.tokens // 100 + 2, rng)  # none is shorter
    answers: list[Row] = []
    starts: list[int] = []  # of the turns in the stream
    marks: dict[int, Any] = {}
    asked = dict.fromkeys(DISTANCES, 0)
    while (seen := chat.coverage().seen) < plan.tokens:
        progress(seen, plan.tokens)
        starts.append(seen)
        _say(chat, _text(turns[len(starts) - 1]), TOLD)
        if seen >= plan.tokens * (len(marks) + 1) / 10 and _goes_on(chat):
            marks[chat.coverage().seen] = chat.engine.snapshot()
        possible = [distance for distance in DISTANCES if distance // LINES <= len(starts)]
        if not possible or len(starts) % EVERY:
            continue
        distance = min(possible, key=lambda d: asked[d])
        asked[distance] += 1
        at = len(starts) - distance // LINES
        back = chat.coverage().seen - starts[at]
        answers.append({"distance": distance, "back": back, **_ask(chat, _pick(turns[at], rng), plan)})
    progress(plan.tokens, plan.tokens)
    state = chat.coverage()
    return {
        "answers": answers,
        "tokens": state.seen,
        "lines": len(starts) * LINES,
        "visible": state.visible,
        "bytes": state.bytes,
        "find_s": _find_seconds(chat, answers),
        "steps": timed(chat.engine, marks),
    }


def _goes_on(chat: Conversation) -> bool:
    """Whether the answer that was cut short has steps to be timed."""
    mark = chat.engine.snapshot()
    tokens = sum(len(piece.ids) for piece in chat.engine.generate(Sampling(max_tokens=STEPS)))
    chat.engine.restore(mark)
    return tokens == STEPS


def _find_seconds(chat: Conversation, answers: Sequence[Row]) -> float | None:
    """Median seconds of looking for a passage when all is indexed; None without memory."""
    if chat.memory is None:
        return None
    seconds = []
    for answer in answers[-9:]:
        begun = time.perf_counter()
        coming = Turn("user", answer["question"], start=chat.coverage().seen)
        chat.memory.recall([*chat.turns, coming], chat.coverage().recent)
        seconds.append(time.perf_counter() - begun)
    return round(statistics.median(seconds), 4)


def _text(lines: Sequence[Line]) -> str:
    return "\n".join(line.text for line in lines)


def _pick(lines: Sequence[Line], rng: random.Random) -> Line:
    return rng.choice([line for line in lines if line.value])


def _say(chat: Conversation, text: str, sampling: Sampling) -> tuple[str, int]:
    pieces = list(chat.send(text, sampling))
    return "".join(piece.text for piece in pieces), sum(len(piece.ids) for piece in pieces)


def _ask(chat: Conversation, line: Line, plan: Plan) -> Row:
    told: list[str] = []
    chat.notice = told.append
    begun = time.perf_counter()
    answer, _ = _say(chat, line.question, plan.answer)
    return {
        "correct": contains(answer, [line.value]),
        "seconds": round(time.perf_counter() - begun, 3),
        "question": line.question,
        "reference": line.value,
        "answer": answer,
        "recalled": list(told),
    }


def totals(rows: Sequence[Row]) -> list[Row]:
    """A row for each method and distance; `share` is of the model's own mean score."""
    own = [answer for row in rows if row["kind"] == "own" for answer in row["answers"]]
    score = _score(own) if own else None
    made = [_total("the model itself", d, of, None) for d, of in _by_distance(own)]
    for row in rows:
        if row["kind"] == "stream":
            made += [_total(row["method"], d, of, score, row) for d, of in _by_distance(row["answers"])]
    return made


def _by_distance(answers: Sequence[Row]) -> Iterator[tuple[int, list[Row]]]:
    for distance in sorted({answer["distance"] for answer in answers}):
        yield distance, [answer for answer in answers if answer["distance"] == distance]


def _score(answers: Sequence[Row]) -> float:
    return sum(answer["correct"] for answer in answers) / len(answers)


def _total(
    method: str, distance: int, answers: Sequence[Row], own: float | None, row: Row | None = None
) -> Row:
    total: Row = {"method": method, "distance": distance, "n": len(answers), "score": _score(answers)}
    if row:
        total["back"] = int(statistics.median(answer["back"] for answer in answers))
        total["caches"] = round(total["back"] / row["visible"], 1)
    if own:
        total["share"] = total["score"] / own
    return total


def show(result: dict[str, Any]) -> str:
    """A line for each method, a column for each distance; below, what a step costs along the stream."""
    made = result["totals"]
    distances = sorted({total["distance"] for total in made})
    rows: list[list[str]] = []
    for method in dict.fromkeys(total["method"] for total in made):
        of = {total["distance"]: total for total in made if total["method"] == method}
        rows.append(
            [method, *(f"{of[d]['score']:.0%} of {of[d]['n']}" if d in of else "" for d in distances)]
        )
        if "back" in next(iter(of.values())):
            rows.append(["  tokens back", *(f"{of[d]['back']:,}" if d in of else "" for d in distances)])
            rows.append(["  in caches", *(f"{of[d]['caches']:.1f}" if d in of else "" for d in distances)])
    text = table(["lines back", *map(str, distances)], rows)
    own = [answer for row in result["samples"] if row["kind"] == "own" for answer in row["answers"]]
    if own:
        text += f"\n\nthe model's own score, full attention up to {OWN} lines back: {_score(own):.0%}"
    for row in result["samples"]:
        if row["kind"] == "stream":
            steps = [f"{step['ratio']:.2f} at {step['length']:,}" for step in row["steps"]]
            text += (
                f"\n{row['method']}: {row['tokens']:,} tokens, {row['lines']:,} lines, "
                f"{row['visible']:,} visible, {row['bytes']:,} bytes; "
                + (f"{row['find_s'] * 1000:.0f} ms to look for a passage; " if row["find_s"] else "")
                + f"a step's time: {', '.join(steps)} tokens"
            )
    return text
