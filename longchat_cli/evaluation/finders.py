"""Ways to find side by side: the same questions over texts of 1 to 64 windows, one reading for all of them.

What is planted is the same at every length: only the haystack grows. Beside recall's ways stand InfLLM as
published, as far as it can be had on a CPU, and the model given nothing but the planted passage.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from longchat_cli.evaluation.cases import Query, Setting
from longchat_cli.evaluation.facts import magic, worded
from longchat_cli.evaluation.haystack import Count, load_records, plant
from longchat_cli.evaluation.journal import Journal
from longchat_cli.evaluation.lines import record
from longchat_cli.evaluation.naturalqa import as_query, with_answers
from longchat_cli.evaluation.reworded import REWORDED
from longchat_cli.evaluation.score import contains, rank
from longchat_cli.terminal_text import table

KINDS = {
    "needle": "facts, each in words of its own",
    "reworded": "facts asked in other words",
    "lookalike": "look-alike facts",
    "lines": "lines of a record",
    "naturalqa": "natural questions",
}
FINDERS = ("lexical", "semantic", "attention", "fused")
GOLD, INFLLM = "gold", "infllm"
INFLLM_MOST = 16_000
"""Tokens up to which InfLLM reads: it takes minutes a text here, and as many for its answers."""
INFLLM_N = 2
"""Questions of each kind that InfLLM is asked."""
COMPANY = 4
"""Lines of the record for each one asked; half as many natural passages."""
READ = 4096
"""Tokens of passages that are read for one question at most."""
RANKED = 8
"""Passages looked at to say where the finder put the right one; fewer are read."""

Progress = Callable[[int, int], None]

Row = dict[str, Any]


@dataclass(frozen=True)
class Planted:
    """What goes into every text: `pieces`, and a query by kind on some of them."""

    pieces: tuple[str, ...]
    queries: tuple[tuple[str, Query], ...]


def planted(setting: Setting) -> Planted:
    """`n` questions of each kind with their facts and look-alikes. Raises UsageError without questions."""
    rng, n = setting.rng, setting.n
    pieces: list[str] = []
    queries: list[tuple[str, Query]] = []
    for kind, facts in (
        ("needle", worded(n, rng)),
        ("reworded", rng.sample(REWORDED, n)),
        ("lookalike", magic(n, rng)),
    ):
        pieces += [fact for fact, _, _ in facts]
        queries += [(kind, Query(question, (answer,), fact, 0.0)) for fact, question, answer in facts]
    rows, lines = record(COMPANY * n, n, rng)
    pieces.append(f"\n\n{rows}\n\n")
    queries += [("lines", query) for query in lines]
    records = with_answers(load_records(setting.data, "passage"), COMPANY // 2 * n)
    natural = [as_query(chosen, 0.0) for chosen in rng.sample(records, COMPANY // 2 * n)]
    pieces += [query.evidence for query in natural]
    queries += [("naturalqa", query) for query in natural[:n]]
    return Planted(tuple(pieces), tuple(queries))


def text(setting: Setting, what: Planted) -> str:
    """A text of the setting's length with all that is planted."""
    room = setting.length - setting.count(" ".join(what.pieces))
    return plant(setting.haystack(room), what.pieces, setting.rng)[0]


class Searcher(Protocol):
    """What is compared; `evaluation.subject.Searcher`."""

    def count(self, text: str) -> int:
        """Tokens by the model's tokenizer."""

    def about(self) -> Row:
        """What the journal's measurements share."""

    def indexes(self, document: str, finders: Sequence[str]) -> Mapping[str, Any]:
        """Each of `finders` over one reading of a document: `find(question, budget)`, `rank(question, k)`."""

    def from_passages(self, document: str, asked: Sequence[tuple[str, Any]]) -> list[str]:
        """Answers to questions from the passages beside them."""

    def from_text(self, method: str, document: str, questions: Sequence[str]) -> list[str]:
        """Answers to questions on a document that a method reads whole."""


@dataclass(frozen=True)
class Plan:
    """What is compared: `n` questions of each kind, at each of `lengths`, by each of `finders`."""

    lengths: tuple[int, ...]
    n: int
    seed: int
    data: tuple[Path, ...]
    finders: tuple[str, ...] = FINDERS

    def setting(self, count: Count, length: int) -> Setting:
        return Setting(length, self.n, count, random.Random(f"{self.seed}/{length}"), self.data)


def compare(searcher: Searcher, plan: Plan, output: Path | None, progress: Progress) -> Row:
    """{"samples": [...], "totals": [...]}; what is in the journal `output` is not measured again.

    A total is of one finder, kind and length: `first` and `found` (in the top eight) count passages that
    hold the answer within what was planted, `correct` answers.
    """
    about = {"task": "finders", "n": plan.n, "seed": plan.seed, "data": [path.name for path in plan.data]}
    journal = Journal(output, about | searcher.about())
    what = planted(plan.setting(searcher.count, 0))
    if not journal.where(finder=GOLD):
        _keep(journal, GOLD, 0, what.queries, [_gold(searcher, query) for _, query in what.queries])
    for done, length in enumerate(plan.lengths):
        names = [name for name in plan.finders if not journal.where(finder=name, length=length)]
        slow = length <= INFLLM_MOST and not journal.where(finder=INFLLM, length=length)
        if names or slow:
            document = text(plan.setting(searcher.count, length), what)
            _find(searcher, journal, document, length, names, what)
            if slow:
                few = [asked for kind in KINDS for asked in _of(kind, what.queries)[:INFLLM_N]]
                answers = searcher.from_text(INFLLM, document, [query.question for _, query in few])
                _keep(journal, INFLLM, length, few, answers)
        progress(done + 1, len(plan.lengths))
    return {"samples": journal.rows, "totals": _totals(journal, (GOLD, INFLLM, *plan.finders))}


def show(result: Row) -> str:
    """The table in Markdown: passage first, in the top eight, answers right."""
    totals = result["totals"]
    lengths = sorted({total["length"] for total in totals} - {0})
    rows = []
    for kind, name in dict.fromkeys((total["kind"], total["finder"]) for total in totals):
        cells = {t["length"]: _cell(t) for t in totals if (t["kind"], t["finder"]) == (kind, name)}
        rows.append([KINDS[kind], name, *(cells.get(length, cells.get(0, "-")) for length in lengths)])
    return table(["questions", "finder", *(f"{length // 1000}k" for length in lengths)], rows)


def _cell(total: Row) -> str:
    right = f"{total['correct']}" + (f" of {total['n']}" if total["finder"] == INFLLM else "")
    return f"{total['first']} {total['found']} {right}" if "first" in total else right


def _of(kind: str, queries: Sequence[tuple[str, Query]]) -> list[tuple[str, Query]]:
    return [asked for asked in queries if asked[0] == kind]


def _gold(searcher: Searcher, query: Query) -> str:
    return searcher.from_text("full", query.evidence, [query.question])[0]


def _find(
    searcher: Searcher, journal: Journal, document: str, length: int, names: Sequence[str], what: Planted
) -> None:
    """Rank and answer by each finder; the same passages are read once for all who found them."""
    indexes = searcher.indexes(document, names)
    known: dict[Any, str] = {}
    for name in names:
        found = [indexes[name].find(query.question, READ) for _, query in what.queries]
        keys = [
            (query.question, tuple((p.begin, p.end, p.focus) for p in passages))
            for (_, query), passages in zip(what.queries, found, strict=True)
        ]
        asked = {key: (key[0], got) for key, got in zip(keys, found, strict=True) if key not in known}
        known |= zip(asked, searcher.from_passages(document, list(asked.values())), strict=True)
        ranks = [
            rank([document[p.begin : p.end] for p in indexes[name].rank(query.question, RANKED)], query)
            for _, query in what.queries
        ]
        _keep(journal, name, length, what.queries, [known[key] for key in keys], ranks)


def _keep(
    journal: Journal,
    finder: str,
    length: int,
    queries: Sequence[tuple[str, Query]],
    answers: Sequence[str],
    ranks: Sequence[int | None] | None = None,
) -> None:
    rows: list[Row] = [
        {"kind": kind, "question": query.question, "references": list(query.references), "answer": answer}
        | {"correct": contains(answer, query.references)}
        for (kind, query), answer in zip(queries, answers, strict=True)
    ]
    if ranks is not None:
        rows = [row | {"rank": place} for row, place in zip(rows, ranks, strict=True)]
    journal.add({"finder": finder, "length": length, "answers": rows})


def _totals(journal: Journal, finders: Sequence[str]) -> list[Row]:
    order = {name: number for number, name in enumerate(finders)}
    measured = sorted(
        (row for row in journal.rows if row["finder"] in order), key=lambda row: order[row["finder"]]
    )
    return [_total(kind, row) for kind in KINDS for row in measured]


def _total(kind: str, row: Row) -> Row:
    own = [answer for answer in row["answers"] if answer["kind"] == kind]
    correct = sum(answer["correct"] for answer in own)
    total = {
        "kind": kind,
        "finder": row["finder"],
        "length": row["length"],
        "n": len(own),
        "correct": correct,
    }
    if all("rank" in answer for answer in own):
        ranks = [answer["rank"] for answer in own if answer["rank"]]
        total |= {"first": ranks.count(1), "found": len(ranks)}
    return total
