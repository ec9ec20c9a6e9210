"""Run a task at several lengths: per-sample results and totals, as plain data for JSON."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from longchat_cli.engine import Engine
from longchat_cli.errors import BadInput, LongchatError, UsageError
from longchat_cli.evaluation import conversation as talking
from longchat_cli.evaluation import facts, finders, lines, naturalqa
from longchat_cli.evaluation import streameval as streaming
from longchat_cli.evaluation.book import book
from longchat_cli.evaluation.cases import Case, Generator, Query, Setting
from longchat_cli.evaluation.citing import citing
from longchat_cli.evaluation.haystack import Count, load_text
from longchat_cli.evaluation.journal import Journal
from longchat_cli.evaluation.perplexity import Forward, by_position, losses
from longchat_cli.evaluation.repository import Find, repository
from longchat_cli.evaluation.score import grade, interval, rank, reached
from longchat_cli.evaluation.stream import stream
from longchat_cli.prose import prose

CHANCES = ("temperature", "top_p", "repetition_penalty", "start_penalty", "seed")
"""Of the samplers, those that a task of a chat takes from its user."""
Progress = Callable[[int, int], None]
"""Called with (questions or tokens done, in all)."""


@dataclass(frozen=True)
class Answer:
    """What came back for a question: the text, the passages read (best first), what was visible, and the
    model's own `words` where the text has more."""

    text: str
    passages: tuple[str, ...] = ()
    coverage: dict[str, Any] | None = None
    words: str | None = None


@dataclass(frozen=True)
class Subject:
    """What is evaluated. Question tasks need `answer(document, questions)`, one reading and an answer each;
    `perplexity` needs `encode` and `forward`, which gives a decoder with an empty state; `stream` needs
    `engine` and `encode`, `repository` needs `find`, `finders` needs `search`, `book` the
    `options` of the commands that it runs, tasks of a chat `talk`."""

    count: Count
    answer: Callable[[str, Sequence[str]], Sequence[Answer]] | None = None
    encode: Callable[[str], Sequence[int]] | None = None
    forward: Callable[[], Forward] | None = None
    engine: Engine | None = None
    find: Find | None = None
    search: Callable[[], finders.Searcher] | None = None
    options: Sequence[str] = ()
    talk: talking.Bench | None = None


@dataclass(frozen=True)
class Options:
    """How much of a task: `n` questions at each of `lengths` (tokens), `per_text` of them over one text (the
    task's own number by default), texts and records from `data`; `output` keeps what some tasks measure.
    `gold`: each question is asked of its planted text alone, too."""

    lengths: tuple[int, ...] = (2000,)
    n: int = 20
    seed: int = 0
    data: tuple[Path, ...] = ()
    per_text: int | None = None
    output: Path | None = None
    gold: bool = False


@dataclass(frozen=True)
class Task:
    """`run(subject, options, progress)` gives {"samples": [...], "totals": [...]}; `generate` makes the texts
    of a task that asks questions, `answer_tokens` is room for its right answers and some words around them.
    Without `needs_model` there is no subject. `show`: the totals as a table."""

    help: str
    run: Callable[[Subject, Options, Progress], dict[str, Any]] = field(repr=False)
    generate: Generator | None = field(default=None, repr=False)
    needs_model: bool = True
    show: Callable[[dict[str, Any]], str] | None = field(default=None, repr=False)
    answer_tokens: int = 32


def run(
    name: str, subject: Subject, options: Options = Options(), progress: Progress = lambda done, total: None
) -> dict[str, Any]:
    """Run the task `name` of TASKS. The same options and subject give the same result, times apart.

    Raises UsageError for an unknown task, impossible options or a text that is too short.
    """
    task = find(name)
    if (
        options.n < 1
        or min(options.lengths, default=0) < 1
        or (options.per_text is not None and options.per_text < 1)
    ):
        raise UsageError("lengths, n and questions per text must be at least 1")
    about = {"task": name, "seed": options.seed, "n": options.n, "lengths": list(options.lengths)}
    return {**about, **task.run(subject, options, progress)}


def find(name: str) -> Task:
    """Raises UsageError for an unknown name."""
    if name not in TASKS:
        raise UsageError(f"there is no task '{name}'", "", f"choose from {', '.join(TASKS)}")
    return TASKS[name]


def _asking(help: str, generate: Generator, answer_tokens: int = 32) -> Task:
    """A task of questions about texts."""

    def work(subject: Subject, options: Options, progress: Progress) -> dict[str, Any]:
        samples: list[dict[str, Any]] = []
        expected = options.n * len(options.lengths)
        for case in _cases(generate, subject, options):
            samples += _ask(case, subject, options.gold)
            progress(len(samples), max(expected, len(samples)))
        if all(sample["error"] for sample in samples):
            raise BadInput("no question could be asked", samples[0]["error"] if samples else "")
        return {"samples": samples, "totals": _totals(samples)}

    return Task(help, work, generate, answer_tokens=answer_tokens)


def _cases(generate: Generator, subject: Subject, options: Options) -> Iterator[Case]:
    for length in options.lengths:
        # A seed of its own for each length: adding a length leaves the other texts as they were.
        rng = random.Random(f"{options.seed}/{length}")
        yield from generate(Setting(length, options.n, subject.count, rng, options.data, options.per_text))


def _ask(case: Case, subject: Subject, gold: bool) -> list[dict[str, Any]]:
    assert subject.answer is not None, "this task needs a subject that answers"
    begun = time.perf_counter()
    error = ""
    try:
        answers = subject.answer(case.document, [query.question for query in case.queries])
    except LongchatError as failure:  # of one text, e.g. longer than the window; a long run goes on
        error = str(failure)
        answers = [Answer("")] * len(case.queries)
    shared = {
        "length": case.length,
        "tokens": subject.count(case.document),
        "seconds": round((time.perf_counter() - begun) / len(case.queries), 3),
        "error": error,
    }
    samples = [
        {**shared, **_judge(query, answer)} for query, answer in zip(case.queries, answers, strict=True)
    ]
    return (
        [sample | _gold(query, subject) for sample, query in zip(samples, case.queries, strict=True)]
        if gold
        else samples
    )


def _gold(query: Query, subject: Subject) -> dict[str, Any]:
    """What is answered from nothing but the planted text."""
    assert subject.search is not None, "this subject reads no other texts"
    (answer,) = subject.search().from_text("full", query.evidence, [query.question])
    return {"gold_answer": answer, "gold": grade(answer, query.references, query.every)}


def _judge(query: Query, answer: Answer) -> dict[str, Any]:
    return {
        **asdict(query),
        "references": list(query.references),
        "answer": answer.text,
        "correct": grade(answer.text, query.references, query.every),
        "own": grade(answer.text if answer.words is None else answer.words, query.references, query.every),
        "rank": rank(answer.passages, query),
        "reached": reached(answer.passages, query),
        "passages": len(answer.passages),
        "coverage": answer.coverage,
    }


def _totals(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        _total(length, [sample for sample in samples if sample["length"] == length])
        for length in dict.fromkeys(sample["length"] for sample in samples)
    ]


def _total(length: int, samples: list[dict[str, Any]]) -> dict[str, Any]:
    n, correct = len(samples), sum(sample["correct"] for sample in samples)
    low, high = interval(correct, n)
    total = {"length": length, "n": n, "correct": correct, "accuracy": correct / n, "low": low, "high": high}
    total["own"] = sum(sample["own"] for sample in samples)
    total["errors"] = sum(bool(sample["error"]) for sample in samples)
    if all("gold" in sample for sample in samples):
        total["gold"] = sum(sample["gold"] for sample in samples)
    if any(sample["passages"] for sample in samples):
        ranks = [sample["rank"] for sample in samples if sample["rank"]]
        total |= {"found_first": ranks.count(1), "found": len(ranks)}
        total["reached"] = sum(sample["reached"] is not None for sample in samples)
    return total


def _perplexity(subject: Subject, options: Options, progress: Progress) -> dict[str, Any]:
    assert subject.encode is not None and subject.forward is not None, "this task needs a decoder"
    text = load_text(options.data)
    if text is None:
        raise UsageError("perplexity needs a text", "", "name a book with --data")
    samples, totals = [], []
    for length in options.lengths:
        ids = subject.encode(text[: length * 12])[:length]
        if len(ids) < max(length, 2):
            raise UsageError(f"the text has {len(ids):,} tokens, {length:,} are wanted")
        values: list[float] = []
        for part in losses(subject.forward(), ids):
            values += part
            progress(len(values), length - 1)
        samples.append({"length": length, "losses": [round(value, 4) for value in values]})
        whole, parts = by_position(values, length)[0], by_position(values, max(length // 8, 256))
        totals.append({"length": length, "perplexity": whole["perplexity"], "positions": parts})
    return {"samples": samples, "totals": totals}


def _stream(subject: Subject, options: Options, progress: Progress) -> dict[str, Any]:
    assert subject.engine is not None and subject.encode is not None, "this task needs an engine"
    text = load_text(options.data) or prose(200_000, random.Random(options.seed))
    return {"samples": [], "totals": stream(subject.engine, subject.encode(text), options.lengths, progress)}


def _citing(subject: Subject, options: Options, progress: Progress) -> dict[str, Any]:
    return citing(options.n, options.lengths[0], options.seed, options.data)


def _finders(subject: Subject, options: Options, progress: Progress) -> dict[str, Any]:
    assert subject.search is not None, "this task needs a subject that searches"
    plan = finders.Plan(options.lengths, options.n, options.seed, options.data)
    return finders.compare(subject.search(), plan, options.output, progress)


def _book(subject: Subject, options: Options, progress: Progress) -> dict[str, Any]:
    return book(options.n, options.seed, options.data, subject.options, progress)


def _streameval(wording: str) -> Callable[[Subject, Options, Progress], dict[str, Any]]:
    def work(subject: Subject, options: Options, progress: Progress) -> dict[str, Any]:
        bench, about = _bench(subject, options)
        assert subject.talk is not None
        chances = {name: getattr(subject.talk.sampling, name) for name in CHANCES}
        answer = replace(streaming.ANSWER, **chances)
        plan = streaming.Plan(options.lengths[0], options.n, options.seed, wording, answer)
        shared = {"tokens": plan.tokens, "n": plan.own, "seed": plan.seed, "wording": wording}
        journal = Journal(options.output, {"task": "streameval", **shared, **about})
        return streaming.streameval(bench.converse, plan, journal, progress)

    return work


def _conversation(subject: Subject, options: Options, progress: Progress) -> dict[str, Any]:
    bench, about = _bench(subject, options)
    journal = Journal(options.output, {"task": "conversation", "typed": True, **about})
    return talking.conversation(bench, options.data, journal, progress)


def _bench(subject: Subject, options: Options) -> tuple[talking.Bench, dict[str, Any]]:
    """What chats are held with, and what all measurements of it share."""
    assert subject.talk is not None and subject.engine is not None, "this task needs a subject that talks"
    info = subject.engine.info
    about = {"model": info.model, "fingerprint": info.fingerprint, "dtype": info.dtype}
    sampling, data = asdict(subject.talk.sampling), [path.name for path in options.data]
    told = {name: sampling[name] for name in ("max_tokens", *CHANCES)}
    return subject.talk, {**about, **told, "data": data}


def _repository(subject: Subject, options: Options, progress: Progress) -> dict[str, Any]:
    assert subject.find is not None, "this task needs a subject that finds"
    return repository(options.n, options.seed, options.data, subject.find)


TASKS: dict[str, Task] = {
    "needle": _asking("one magic number in each text", facts.single),
    "lookalike": _asking("ten magic numbers of different keys in one text", facts.lookalike),
    "values": _asking("four magic numbers of one key in each text, asked together", facts.values, 96),
    "uuid": _asking("one magic value of 32 hexadecimal digits in each text", facts.uuids, 96),
    "digits": _asking("one magic number of 64 digits in each text", facts.digits, 128),
    "varied": _asking("twenty differently worded facts in one text", facts.varied),
    "reworded": _asking("ten facts in one text, asked in other words", facts.reworded),
    "lines": _asking("the value of one line among many (LongEval)", lines.lines),
    "naturalqa": _asking("natural questions, passages planted in a book (--data)", naturalqa.naturalqa, 64),
    "perplexity": Task("perplexity by position of a book (--data)", _perplexity),
    "stream": Task("step time and bytes held along one stream", _stream),
    "repository": Task("where names of a repository are defined, what they return (--data)", _repository),
    "streameval": Task(
        "a chat of lines without end, asked for lines further and further back",
        _streameval("facts"),
        show=streaming.show,
    ),
    "streameval-alike": Task(
        "the same, every line a magic number", _streameval("alike"), show=streaming.show
    ),
    "streameval-register": Task(
        "the same with LongEval's numbered lines", _streameval("register"), show=streaming.show
    ),
    "conversation": Task(
        "two-turn prompts (--data) typed to one chat, beside fresh chats", _conversation, show=talking.show
    ),
    "finders": Task("ways to find side by side, by length (--data)", _finders, show=finders.show),
    "book": Task(
        "facts in a whole book (--data), each asked in a process of its own", _book, needs_model=False
    ),
    "citations": Task("true and altered statements before the citation checker", _citing, needs_model=False),
}
