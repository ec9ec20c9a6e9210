"""`eval finders` and `eval book`: what is planted, how it is judged, what a rerun measures again."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from longchat_cli.cli import cli
from longchat_cli.errors import BadInput, LongchatError, UsageError
from longchat_cli.evaluation import finders
from longchat_cli.evaluation.book import book
from longchat_cli.evaluation.cases import Setting
from longchat_cli.evaluation.finders import FINDERS, KINDS, Plan
from longchat_cli.prose import prose


def count(text: str) -> int:
    return len(re.findall(r"\w+|[^\w\s]", text))


@pytest.fixture
def records(tmp_path: Path) -> Path:
    path = tmp_path / "natural.jsonl"
    rows = [
        {
            "question": f"who owns farm {i}",
            "answers": [f"Owner{i}"],
            "passage": f"Farm {i} is old. Owner{i} has it.",
        }
        for i in range(30)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def setting(records: Path, length: int, n: int = 3) -> Setting:
    return Setting(length, n, count, random.Random(0), (records,))


def test_everything_is_planted_once_with_its_look_alikes(records: Path) -> None:
    what = finders.planted(setting(records, 0))
    text = finders.text(setting(records, 2000), what)
    assert 1800 < count(text) <= 2000
    assert [kind for kind, _ in what.queries] == [kind for kind in KINDS for _ in range(3)]
    for kind, query in what.queries:
        assert text.count(query.evidence) == 1, kind
    assert text.count("REGISTER_CONTENT") == 12 and text.count("special magic numbers") == 3
    assert len(re.findall(r"Farm \d+ is old", text)) == 6


def test_more_questions_than_records_are_refused(records: Path) -> None:
    with pytest.raises(UsageError, match="30 natural questions"):
        finders.planted(setting(records, 0, n=20))


@dataclass(frozen=True)
class Found:
    begin: int
    end: int
    focus: tuple[int, int] = (0, 0)


class Index:
    """Finds what was planted as passage number `place`, behind the text's beginning; none where it is 0."""

    def __init__(self, document: str, evidence: Mapping[str, str], place: int) -> None:
        self.document, self.evidence, self.place = document, evidence, place

    def rank(self, question: str, k: int) -> list[Found]:
        begin = self.document.index(self.evidence[question])
        right = Found(begin, begin + len(self.evidence[question]))
        return [right if number == self.place else Found(0, number) for number in range(1, k + 1)]

    def find(self, question: str, budget: int) -> list[Found]:
        return self.rank(question, 1)


class Searcher:
    """Answers with what it is given to read; counts what it is asked."""

    places: Mapping[str, int] = {"lexical": 1, "semantic": 2, "attention": 9, "fused": 1}

    def __init__(self, records: Path) -> None:
        queries = finders.planted(setting(records, 0)).queries
        self.evidence = {query.question: query.evidence for _, query in queries}
        self.read: list[str] = []
        self.asked: list[str] = []

    def count(self, text: str) -> int:
        return count(text)

    def about(self) -> dict[str, Any]:
        return {"model": "none"}

    def indexes(self, document: str, names: Sequence[str]) -> Mapping[str, Index]:
        return {name: Index(document, self.evidence, self.places[name]) for name in names}

    def from_passages(self, document: str, asked: Sequence[tuple[str, Any]]) -> list[str]:
        self.asked += [question for question, _ in asked]
        return [document[passages[0].begin : passages[0].end] for _, passages in asked]

    def from_text(self, method: str, document: str, questions: Sequence[str]) -> list[str]:
        self.read.append(method)
        return [document if method == "full" else "I do not know." for _ in questions]


def plan(records: Path, *lengths: int) -> Plan:
    return Plan(lengths, 3, 0, (records,))


def compared(records: Path, output: Path | None = None, *lengths: int) -> tuple[Searcher, dict[str, Any]]:
    searcher = Searcher(records)
    searcher.evidence = {
        query.question: query.evidence
        for _, query in finders.planted(plan(records).setting(count, 0)).queries
    }
    result = finders.compare(searcher, plan(records, *(lengths or (2000,))), output, lambda done, total: None)
    return searcher, result


def test_places_and_answers_are_counted(records: Path) -> None:
    searcher, result = compared(records)
    totals = {(total["kind"], total["finder"]): total for total in result["totals"]}
    for kind in KINDS:
        assert totals[kind, "gold"] == {"kind": kind, "finder": "gold", "length": 0, "n": 3, "correct": 3}
        counts = {
            name: [totals[kind, name][key] for key in ("first", "found", "correct")] for name in FINDERS
        }
        assert counts == {
            "lexical": [3, 3, 3], "semantic": [0, 3, 0], "attention": [0, 0, 0], "fused": [3, 3, 3]
        }  # fmt: skip
        assert totals[kind, "infllm"]["n"] == 2 and totals[kind, "infllm"]["correct"] == 0
    # Two finders found the right passages and two the same wrong ones: each is read once.
    assert len(searcher.asked) == 2 * 3 * len(KINDS)
    shown = finders.show(result)
    assert "3 3 3" in shown and "0 3 0" in shown and "0 of 2" in shown


def test_a_rerun_measures_what_is_missing(records: Path, tmp_path: Path) -> None:
    output = tmp_path / "finders.jsonl"
    first, _ = compared(records, output, 2000)
    assert first.read.count("full") == 3 * len(KINDS) and first.read.count("infllm") == 1
    again, _ = compared(records, output, 2000, 20_000)
    assert again.read == [] and len(again.asked) == 2 * 3 * len(KINDS)
    lines = output.read_text().splitlines()
    output.write_text("\n".join(line for line in lines if '"semantic"' not in line) + "\n")
    third, result = compared(records, output, 2000)
    assert len(third.asked) == 3 * len(KINDS)
    assert {total["length"] for total in result["totals"]} == {0, 2000, 20_000}


def test_longer_texts_are_no_matter_for_infllm(records: Path) -> None:
    searcher, _ = compared(records, None, finders.INFLLM_MOST + 1)
    assert "infllm" not in searcher.read


def test_finders_over_a_model(tiny_model: Callable[..., Path], records: Path) -> None:
    from longchat_cli.ask import Request
    from longchat_cli.evaluation.subject import subject
    from longchat_cli.local import open_engine
    from longchat_cli.sampling import Sampling
    from longchat_cli.terminal import Console, Interrupts

    def opener(method: str, options: Mapping[str, Any]) -> Any:
        return open_engine(str(tiny_model()), method, options)

    request = Request((), None, "recall", {}, "error", Sampling(max_tokens=2))
    who = subject(opener, request, Console(quiet=True), Interrupts(), rank_only=False)
    assert who.search is not None
    asked = Plan((1500,), 1, 0, (records,), ("attention",))
    searcher = who.search()
    result = finders.compare(Quick(searcher), asked, None, lambda done, total: None)
    totals = {(total["kind"], total["finder"]) for total in result["totals"]}
    assert totals == {(kind, name) for kind in KINDS for name in ("gold", "infllm", "attention")}


class Quick:
    """A searcher that answers nothing by InfLLM."""

    def __init__(self, searcher: Any) -> None:
        self.searcher = searcher

    def __getattr__(self, name: str) -> Any:
        return getattr(self.searcher, name)

    def from_text(self, method: str, document: str, questions: Sequence[str]) -> list[str]:
        return (
            [""] * len(questions)
            if method == "infllm"
            else self.searcher.from_text(method, document, questions)
        )


def asked_about_a_book(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, *method: str
) -> dict[str, Any]:
    """What `eval book` says of one fact in a short book."""
    monkeypatch.setenv("LONGCHAT_CACHE_DIR", str(folder / "cache"))
    path = folder / "book.txt"
    path.write_text(prose(12_000, random.Random(0)))
    words = ["eval", "book", "--data", str(path), "--n", "1", "--model", str(model), "--json"]
    return json.loads(CliRunner().invoke(cli, [*words, "--method", *method], catch_exceptions=False).stdout)


def test_a_book_is_read_once_and_asked_by_new_processes(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = asked_about_a_book(tiny_model(), tmp_path, monkeypatch, "sink", "--window", "64")
    (sample,), (total,) = result["samples"], result["totals"]
    assert total["reused"] == total["n"] == 1 and sample["reused_tokens"] >= sample["document_tokens"] > 2000
    assert total["kept_bytes"] > 0 and 0 < sample["first_token_s"] < sample["seconds"]
    assert total["first_to_later"] > 1
    assert not (tmp_path / "cache" / "pages").exists()


def test_what_the_book_says_counts_apart_from_the_model(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (total,) = asked_about_a_book(tiny_model(), tmp_path, monkeypatch, "recall", "--find", "lexical")[
        "totals"
    ]
    assert (total["found"], total["correct"], total["own"]) == (1, 1, 0)  # the model babbles


def test_a_book_task_needs_a_book_and_says_what_failed(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="needs a book"):
        book(1, 0, (), (), lambda done, total: None)
    path = tmp_path / "book.txt"
    for content in (b"", bytes(range(256)) * 9):
        path.write_bytes(content)
        with pytest.raises(BadInput):
            book(1, 0, (path,), (), lambda done, total: None)
    path.write_text(prose(2_000, random.Random(0)))
    with pytest.raises(LongchatError, match="ingest failed with exit code 2"):
        book(1, 0, (path,), ("--no-such-option",), lambda done, total: None)
