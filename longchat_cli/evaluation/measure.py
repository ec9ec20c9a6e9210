"""Methods side by side at the same bytes held: answers, perplexity and step time, from shared readings.

Every method gets the options that `Method.at_budget` names for a share of the text. A text is read once for
all methods whose prompts are full attention; answers, decoding and bytes are each method's own.
"""

from __future__ import annotations

import dataclasses
import math
import random
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, get_type_hints

import torch

from longchat_cli import ask
from longchat_cli.attention import method_class
from longchat_cli.config import format_bytes, parse_size
from longchat_cli.documents import Document
from longchat_cli.errors import LongchatError, UsageError
from longchat_cli.evaluation.cases import Case, Setting
from longchat_cli.evaluation.chorus import read
from longchat_cli.evaluation.haystack import load_text
from longchat_cli.evaluation.journal import Journal, Row
from longchat_cli.evaluation.run import TASKS
from longchat_cli.evaluation.score import grade
from longchat_cli.evaluation.subject import subject
from longchat_cli.local import LocalEngine
from longchat_cli.sampling import Sampling
from longchat_cli.terminal import Console, Interrupts
from longchat_cli.terminal_text import table

REFERENCE = "full"
"""Measured beside whatever is measured: the others are compared with it."""
STREAM = "stream"
"""The column of step time and perplexity."""
COLUMNS = (STREAM, "needle", "needle:later", "lines@4k")
"""Lines at 4k: the length of LongEval's shortest cases."""
DECODED, ROUND = 256, 16
"""Tokens decoded one by one at the end of the stream, in rounds of so many under each method in turn."""


def names(text: str) -> tuple[str, ...]:
    """The parts between commas; a comma before `name=` belongs to a value. Raises UsageError for none."""
    parts = tuple(part.strip() for part in re.split(r",(?![\w-]+=)", text) if part.strip())
    if not parts:
        raise UsageError(f"'{text}' names nothing", "", "write names with commas between them")
    return parts


def named(method: str) -> tuple[str, dict[str, Any]]:
    """The name and options of "NAME option=value ..." or "NAME:option=value,...". Raises UsageError."""
    name = re.split(r"[\s:]", method.strip())[0]
    rest = method.strip().removeprefix(name)
    cls = method_class(name)
    given = rest[1:].split(",") if rest.startswith(":") else rest.split()
    return name, dict(_parsed(cls, text) for text in given)


def share(text: str) -> Fraction:
    """A share of one, as 1/8 or 0.125. Raises UsageError."""
    try:
        value = Fraction(text)
    except (ValueError, ZeroDivisionError):
        value = Fraction(0)
    if not 0 < value <= 1:
        raise UsageError(f"--budget is {text}", "it must be a share of the text", "write 1/8 or 0.125")
    return value


@dataclass(frozen=True)
class Plan:
    """What to measure: `methods` as "NAME option=value ...", `columns` as `Column.parse` reads them.

    `budget` is a share of `length` tokens, the stream has `stream` of them, a column has `n` questions, an
    answer `max_tokens` (None: as many as the task's answers need).
    """

    methods: tuple[str, ...]
    columns: tuple[str, ...] = COLUMNS
    budget: Fraction = Fraction(1, 8)
    length: int = 6000
    stream: int = 8000
    n: int = 20
    seed: int = 0
    data: tuple[Path, ...] = ()
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("n", "length", "max_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"--{name.replace('_', '-')} is {value}", "it must be at least 1")

    def about(self) -> Row:
        """What rows must share to stand in one table."""
        return {
            "budget": str(self.budget),
            "length": self.length,
            "stream": self.stream,
            "seed": self.seed,
            "data": [path.name for path in self.data],
            "max_tokens": self.max_tokens,
        }

    def options(self, method: str) -> tuple[str, dict[str, Any]]:
        """The name and options that one of `methods` stands for. Raises UsageError."""
        name, given = named(method)
        cls = method_class(name)
        options = cls.at_budget(max(int(self.length * self.budget), 1), self.length) | given
        cls.build(options)
        return name, options


@dataclass(frozen=True)
class Column:
    """Questions of a task at a length. `later`: they come token by token, as if written after the text, so
    that what a method keeps of it was chosen without knowing them; otherwise they end the prompt."""

    task: str
    length: int
    later: bool

    @classmethod
    def parse(cls, text: str, length: int) -> Column:
        """TASK, TASK@LENGTH, TASK:later or TASK@LENGTH:later. Raises UsageError."""
        rest, colon, when = text.partition(":")
        task, at, size = rest.partition("@")
        known = task in TASKS and TASKS[task].generate is not None
        if not known or bool(at) > bool(size) or when != ("later" if colon else ""):
            names = ", ".join(name for name, task in TASKS.items() if task.generate)
            raise UsageError(f"there is no column '{text}'", "", f"choose from {STREAM}, {names}; see --help")
        length = parse_size(size) if size else length
        if length < 1:
            raise UsageError(f"there is no column '{text}'", "its length must be at least 1")
        return cls(task, length, when == "later")


def measure(open_engine: ask.Open, plan: Plan, output: Path | None, console: Console) -> dict[str, Any]:
    """Everything of `plan` that is not in `output` yet; {"settings", "rows", "refused"} of all of it.

    A row is a method's line of the table. Methods that cannot serve the model are `refused`, with the reason.
    Raises UsageError for a plan that makes no sense, and as `Journal`.
    """
    methods = tuple(dict.fromkeys([REFERENCE, *plan.methods]))
    settings = {method: plan.options(method) for method in methods}
    columns = {text: Column.parse(text, plan.length) for text in plan.columns if text != STREAM}
    engines, refused = _open(open_engine, settings)
    info = engines[REFERENCE].info
    lengths = [column.length for column in columns.values()] + [plan.stream] * (STREAM in plan.columns)
    if max(lengths, default=0) > info.window:
        console.warn(f"past its window of {info.window:,} tokens full attention is no reference")
    about = {"model": info.model, "fingerprint": info.fingerprint, "dtype": info.dtype, **plan.about()}
    work = _Work(open_engine, plan, engines, Journal(output, about), console)
    if STREAM in plan.columns:
        work.stream()
    work.questions(columns)
    rows = [work.row(method, options) for method, (_, options) in settings.items() if method not in refused]
    return {
        "settings": about | {"n": plan.n, "columns": list(plan.columns)},
        "rows": rows,
        "refused": refused,
    }


def show(result: Mapping[str, Any]) -> str:
    """The table in Markdown."""
    settings = result["settings"]
    columns = [column for column in settings["columns"] if column != STREAM]
    length, stream = (_short(settings[name]) for name in ("length", "stream"))
    header = [
        "method",
        f"held at {length}",
        "of full",
        f"step at {stream}",
        f"perplexity at {stream}",
        *columns,
    ]
    lines = [
        [
            row["method"],
            format_bytes(row["bytes"]) if row["bytes"] else "-",
            _number(row["share"], "{:.1%}"),
            _number(row["step"], "{:.2f}"),
            _number(row["perplexity"], "{:.3f}"),
            *(_score(row["scores"].get(column)) for column in columns),
        ]
        for row in result["rows"]
    ]
    refused = [f"{method}: {reason}" for method, reason in result["refused"].items()]
    return "\n".join([table(header, lines), *refused])


def _parsed(cls: Any, text: str) -> tuple[str, Any]:
    """An option of a method from `name=value`. Raises UsageError."""
    flag, _, value = text.partition("=")
    name = flag.replace("-", "_")
    kind = get_type_hints(cls).get(name, str)
    try:
        return name, kind(value)
    except ValueError:
        raise UsageError(f"'{text}' is no option", f"{flag} takes a number", "write name=value") from None


def _short(count: int) -> str:
    """6000 -> '6k'."""
    return f"{count // 1000}k" if count % 1000 == 0 else str(count)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _score(found: Mapping[str, Any] | None) -> str:
    return "-" if found is None else f"{found['score']:g}/{found['n']}"


def _open(open_engine: ask.Open, settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    engines: dict[str, Any] = {}
    refused: dict[str, str] = {}
    for method, (name, options) in settings.items():
        try:
            engines[method] = open_engine(name, options)
        except LongchatError as error:
            if method == REFERENCE:
                raise
            refused[method] = str(error)
    return engines, refused


class _Work:
    """One run: `engines` by method, all of one model; finished measurements go to the journal."""

    def __init__(
        self,
        open_engine: ask.Open,
        plan: Plan,
        engines: Mapping[str, LocalEngine],
        journal: Journal,
        console: Console,
    ) -> None:
        self.open_engine, self.plan, self.engines = open_engine, plan, engines
        self.journal, self.console = journal, console
        self.sampling = Sampling()

    def stream(self) -> None:
        """Read all but the last tokens of a stretch of the book, then decode those, teacher-forced."""
        done = {row["method"] for row in self.journal.where(column=STREAM)}
        missing = [method for method in self.engines if method not in done and not self._finds(method)]
        if not missing:
            return
        engines = {method: self.engines[method] for method in dict.fromkeys([REFERENCE, *missing])}
        ids, begun = self._book(), time.perf_counter()
        read(list(engines.values()), ids[:-DECODED])
        self.console.notice(f"{STREAM}: read in {time.perf_counter() - begun:.0f} s")
        times, losses = _decode(engines, ids[-DECODED:])
        for method in missing:
            ratios = [own / full for own, full in zip(times[method], times[REFERENCE], strict=True)]
            self.journal.add(
                {
                    "column": STREAM,
                    "method": method,
                    "ratio": round(statistics.median(ratios), 4),
                    "step_s": round(statistics.median(times[method]) / ROUND, 5),
                    "bytes": engines[method].coverage().bytes,
                    "losses": losses[method],
                }
            )
        for engine in engines.values():
            engine.reset()
        self.console.notice(f"{STREAM}: {time.perf_counter() - begun:.0f} s")

    def questions(self, columns: Mapping[str, Column]) -> None:
        """Every column's texts; columns that differ in when they ask share them."""
        groups: dict[tuple[str, int], dict[str, Column]] = defaultdict(dict)
        for text, column in columns.items():
            groups[column.task, column.length][text] = column
        for (task, length), group in groups.items():
            self.sampling = Sampling(max_tokens=self.plan.max_tokens or TASKS[task].answer_tokens)
            for index, case in enumerate(self._cases(task, length)):
                self._ask_everyone(index, case, group)

    def row(self, method: str, options: Mapping[str, Any]) -> Row:
        """A method's line of the table, from the journal."""
        held, full = self._held(method), self._held(REFERENCE)
        streamed, reference = (self._streamed(name) for name in (method, REFERENCE))
        excess = None
        if streamed and reference:
            excess = statistics.fmean(streamed["losses"]) - statistics.fmean(reference["losses"])
        return {
            "method": method,
            "options": dict(options),
            "bytes": held,
            "share": held / full if held and full else None,
            "step": streamed and streamed["ratio"],
            "perplexity": None if excess is None else math.exp(excess),
            "scores": {
                column: score for column in self.plan.columns if (score := self._total(column, method))
            },
        }

    def _held(self, method: str) -> int | None:
        """Bytes held after a text of the plan's length and an answer."""
        held = [row["bytes"] for row in self.journal.where(method=method, length=self.plan.length)]
        return int(statistics.median(held)) if held else None

    def _streamed(self, method: str) -> Row | None:
        return next(iter(self.journal.where(column=STREAM, method=method)), None)

    def _total(self, column: str, method: str) -> Row | None:
        texts = {row.get("case", 0): row for row in self.journal.where(column=column, method=method)}
        answers = [answer for case in sorted(texts) for answer in texts[case].get("answers", ())]
        scores = [answer["score"] for answer in answers][: self.plan.n]
        return {"score": sum(scores), "n": len(scores)} if scores else None

    def _finds(self, method: str) -> bool:
        """Recall reads anew for each question: it has no state to ask later or to go on with."""
        return self.engines[method].info.method == "recall"

    def _book(self) -> list[int]:
        text, length = load_text(self.plan.data), self.plan.stream
        if text is None:
            raise UsageError("perplexity needs a text", "", "name a book with --data")
        ids = self.engines[REFERENCE].tokenizer.encode(text[: length * 12])[:length]
        if not DECODED < len(ids) == length:
            raise UsageError(f"a stream of {length:,} tokens cannot be read", f"the text has {len(ids):,}")
        return ids

    def _cases(self, task: str, length: int) -> Iterator[Case]:
        generate, plan = TASKS[task].generate, self.plan
        assert generate is not None
        rng = random.Random(f"{plan.seed}/{length}")
        return generate(Setting(length, plan.n, self.engines[REFERENCE].count, rng, plan.data))

    def _ask_everyone(self, index: int, case: Case, columns: Mapping[str, Column]) -> None:
        """Read a text under every method that lacks answers about it, and ask."""
        done = {
            (row["column"], row["method"])
            for row in self.journal.where(case=index)
            if len(row["answers"]) >= len(case.queries)  # with a larger --n the last text has more questions
        }
        wanted = {
            method: [
                text
                for text, column in columns.items()
                if (text, method) not in done and not (column.later and self._finds(method))
            ]
            for method in self.engines
        }
        methods = [method for method, texts in wanted.items() if texts]
        if not methods:
            return
        begun = time.perf_counter()
        opening, tails = self._prompts(case)
        read([self.engines[method] for method in methods if not self._finds(method)], opening)
        for method in methods:
            mark = self.engines[method].snapshot()
            for text in wanted[method]:
                if self._finds(method):
                    answers = self._found(method, case)
                else:
                    answers = self._answers(self.engines[method], mark, tails, columns[text].later)
                row = {"column": text, "method": method, "case": index, "length": case.length}
                graded = _graded(case, [answer for answer, _ in answers])
                self.journal.add({**row, "bytes": answers[-1][1], "answers": graded})
            self.engines[method].reset()
        self.console.notice(f"{', '.join(columns)}: text {index + 1}, {time.perf_counter() - begun:.0f} s")

    def _prompts(self, case: Case) -> tuple[list[int], list[list[int]]]:
        """The ids before the questions, and those of each question."""
        reader, documents = self.engines[REFERENCE], [Document("text", case.document, "utf-8")]
        opening = ask.opening(reader, None, documents)
        prompts = [reader.render([ask.compose(documents, query.question)]).ids for query in case.queries]
        return opening, [ids[len(opening) :] for ids in prompts]

    def _answers(
        self, engine: LocalEngine, mark: Any, questions: Sequence[Sequence[int]], later: bool
    ) -> list[tuple[str, int]]:
        """What the engine, after a text, answers to each question, and the bytes it then holds."""
        answers = []
        for ids in questions:
            engine.restore(mark)
            if later:
                for id in ids:
                    engine.feed([id], decoding=True)
            else:
                engine.prefill(ids)
            text = "".join(piece.text for piece in engine.generate(self.sampling))
            answers.append((text, engine.coverage().bytes))
        return answers

    def _found(self, method: str, case: Case) -> list[tuple[str, int]]:
        """As `_answers`, from the passages that recall finds."""
        options = dataclasses.asdict(self.engines[method].method)
        request = ask.Request((), None, "recall", options, "error", self.sampling)
        who = subject(self.open_engine, request, Console(quiet=True), Interrupts(), rank_only=False)
        assert who.answer is not None
        got = who.answer(case.document, [query.question for query in case.queries])
        return [(answer.text, (answer.coverage or {}).get("bytes", 0)) for answer in got]


def _graded(case: Case, answers: Sequence[str]) -> list[Row]:
    """A row of the journal for each question of the case."""
    return [
        {
            "question": query.question,
            "references": list(query.references),
            "answer": answer,
            "score": grade(answer, query.references, query.every),
            "depth": round(query.depth, 3),
        }
        for query, answer in zip(case.queries, answers, strict=True)
    ]


def _decode(
    engines: Mapping[str, LocalEngine], ids: Sequence[int]
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Feed ids one by one to every engine: seconds of each round, and -ln p of each id, by method.

    The rounds visit the engines in turn, so that a machine that slows down slows all of them.
    """
    times: dict[str, list[float]] = {method: [] for method in engines}
    losses: dict[str, list[float]] = {method: [] for method in engines}
    for start in range(0, len(ids), ROUND):
        for method, engine in engines.items():
            begun = time.perf_counter()
            for id in ids[start : start + ROUND]:
                assert engine.logits is not None
                losses[method].append(round(-float(torch.log_softmax(engine.logits.float(), -1)[id]), 5))
                engine.feed([id], decoding=True)
            times[method].append(time.perf_counter() - begun)
    return times, losses
