"""Questions about the whole: which they are, how a text is cut, what becomes of notes and of an interrupt."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeEngine, Opener

from longchat_cli import whole
from longchat_cli.ask import Answer, Request, ask
from longchat_cli.documents import Collection, Document
from longchat_cli.documents.document import Mark
from longchat_cli.errors import UsageError
from longchat_cli.pages import Store
from longchat_cli.prompt import Text
from longchat_cli.sampling import Sampling
from longchat_cli.terminal import Console, Interrupts
from longchat_cli.tokens import Tokenizer
from longchat_cli.whole import Note, Notes, Part

TOWNS = ["Alder", "Bergen", "Cadiz", "Dover", "Essen"]
BOOK = Document(
    "book.txt", "".join(f"Line {i}: the miller went to {TOWNS[i % 5]} by cart.\n\n" for i in range(150))
)


@pytest.mark.parametrize(
    ("question", "kind"),
    [
        ("Summarise the book.", "summary"),
        ("Give me a summary of chapter two and the rest", "summary"),
        ("What is this book about?", "summary"),
        ("What are the main themes?", "summary"),
        ("List all characters.", "list"),
        ("Please list the places they visit", "list"),
        ("Which towns are all mentioned?", "list"),
        ("How does Ahab change?", "change"),
        ("How did the price of oil develop over the years?", "change"),
        ("Who is the captain of the Pequod?", None),
        ("How did the plant grow so tall?", None),
        ("How much change did he get?", None),
        ("What did Elijah say about all this?", None),
        ("How many sails does the mill have?", None),
        ("What does the function parse_args return?", None),
        ("Where is the list of members kept?", None),
    ],
)
def test_questions_about_the_whole_are_told_from_those_about_a_place(question: str, kind: str | None) -> None:
    assert whole.kind(question) == kind


def count(text: str) -> int:
    return len(text.split())


def test_parts_hold_everything_once_and_within_the_limit() -> None:
    documents = [BOOK, Document("empty.txt", ""), Document("short.txt", "One line.")]
    cut = whole.parts(documents, count, 60)
    assert [part.document for part in cut] == sorted(part.document for part in cut)
    assert all(0 < part.tokens <= 60 for part in cut)
    for number, document in enumerate(documents):
        texts = [document.text[p.begin : p.end] for p in cut if p.document == number]
        assert " ".join(" ".join(texts).split()) == " ".join(document.text.split())


def test_parts_end_with_places_from_half_full_on() -> None:
    text = "one two three four five.\n\n" * 12
    marks = tuple(Mark(26 * i, f"page {i // 3 + 1}", 1) for i in range(12))
    cut = whole.parts([Document("paper.pdf", text, marks=marks)], count, 30)
    assert [(part.begin // 26, (part.end + 25) // 26) for part in cut] == [(0, 3), (3, 6), (6, 9), (9, 12)]


def test_items_of_all_lists_are_joined_and_strange_ones_left_out() -> None:
    cut = whole.parts([BOOK], count, 60)
    lists = ["- Dover\n- Essen.\n- Madrid\n- Dover by cart of the miller", "1. dover\n2. Cadiz", "none"]
    notes = [Note(part, text) for part, text in zip(cut, lists, strict=False)]
    assert whole.items(whole.useful(notes), [BOOK]) == (["Dover", "Essen", "Cadiz"], 2)


def test_numbers_pronouns_and_what_was_cut_off_are_no_items() -> None:
    part = whole.parts([BOOK], count, 60)[0]
    note = Note(part, "1\nHe\nthe miller\nthe miller went to\nDover\n- 2.")
    assert whole.items([note], [BOOK])[0] == ["the miller", "Dover"]


@pytest.mark.parametrize("text", ["none", "None.", "- nothing", "", "N/A", "No"])
def test_empty_notes_are_left_out(text: str) -> None:
    assert whole.useful([Note(Part(0, 0, 1, 1), text)]) == []
    kept = Note(Part(0, 0, 1, 1), "Nobody went to Dover.")
    assert whole.useful([kept]) == [kept]


def test_sentences_said_again_or_cut_off_are_left_out_of_notes() -> None:
    part = whole.parts([BOOK], count, 60)[0]
    said = "He went to Dover. He\nwent to Dover. It rained. He went to"
    (note,) = whole.read_all([BOOK], [part], "Summarise.", "summary", lambda *_: said, Notes(None))
    assert note.text == "He went to Dover. It rained."
    (note,) = whole.read_all([BOOK], [part], "Summarise.", "summary", lambda *_: "unfinished", Notes(None))
    assert note.text == "unfinished"


def test_notes_beyond_the_room_are_read_in_groups() -> None:
    asked: list[str] = []

    def say(texts: Sequence[Text], question: str, tokens: int) -> str:
        asked.append(texts[0].text)
        return "short note"

    notes = [f"note {i} has five words" for i in range(20)]
    condensed = whole.condense(notes, "Summarise.", "summary", 30, count, say)
    assert condensed is not None
    assert sum(map(count, condensed)) <= 30
    assert all(note in "\n\n".join(asked) for note in notes)
    assert whole.condense(notes[:2], "Summarise.", "summary", 30, count, say) == notes[:2]


def test_notes_that_never_get_shorter_come_to_an_end() -> None:
    long = "word " * 40
    assert whole.condense([long] * 3, "?", "summary", 30, count, lambda *_: long) == [long.strip()]


def test_notes_are_sealed_pages_and_a_damaged_one_is_made_anew(tmp_path: Path) -> None:
    first = Notes(Store(tmp_path), "model", "Summarise.")
    first.add("part one", "a note")
    first.add("part two", "another — näher")
    for entry in Store(tmp_path).entries():
        assert entry.path.stat().st_mode & 0o777 == 0o600
    again = Notes(Store(tmp_path), "model", "Summarise.")
    assert (again.get("part one"), again.get("part two")) == ("a note", "another — näher")
    assert Notes(Store(tmp_path), "model", "List all.").get("part one") is None
    assert Notes(Store(tmp_path), "other model", "Summarise.").get("part one") is None
    one = next(path for path in tmp_path.iterdir() if b"a note" in path.read_bytes())
    one.write_bytes(one.read_bytes().replace(b"a note", b"a vote"))
    changed = Notes(Store(tmp_path), "model", "Summarise.")
    assert (changed.get("part one"), changed.get("part two")) == (None, "another — näher")


def test_notes_count_in_the_budget_of_what_is_kept(tmp_path: Path) -> None:
    notes = Notes(Store(tmp_path, budget=1500), "model")
    for number in range(20):
        notes.add(f"part {number}", "a note of " + "many words " * 20)
    assert 0 < sum(entry.bytes for entry in Store(tmp_path).entries()) <= 1500
    assert notes.get("part 19") is not None  # for the answer that is being made
    unkept = Notes(None, "model")
    unkept.add("part one", "a note")
    assert unkept.get("part one") == "a note"


class Run:
    """`ask` over a fake engine that notes the towns it reads of, each run with the cache of its test."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.notes = 0
        self.found: list[str] = []

    def __call__(
        self, *questions: str, interrupts: Interrupts | None = None, window: int = 640, **request: Any
    ) -> list[Answer]:
        made = Opener(self.tokenizer, window)

        def opener(method: str, options: Any) -> FakeEngine:
            engine = made(method, options)
            engine.reply = lambda said: self._reply(engine)
            return engine

        def make_finder(engine: Any, documents: Any, options: Any) -> Any:
            self.found.append("made")
            raise AssertionError("no passages are to be found")

        self.notes, self.said = 0, ""
        settings = {"mode": "auto", "sampling": Sampling(max_tokens=64), "store": Store(), **request}
        asked = Request(questions, **settings)
        emit: list[str] = []
        answers = list(
            ask(
                opener,
                make_finder,
                Collection([BOOK], []),
                asked,
                emit.append,
                Console(),
                interrupts or Interrupts(),
            )
        )
        self.said = "".join(emit)
        return answers

    def _reply(self, engine: FakeEngine) -> str:
        self.notes += 1
        text = engine.assembler.show(type(engine.render([]))(engine.ids))
        assert len(engine.ids) < engine.info.window
        return "\n".join(f"- {town}" for town in TOWNS if f"to {town} by" in text) or "all notes read"


@pytest.fixture
def run(tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("LONGCHAT_CACHE_DIR", str(tmp_path / "cache"))
    return Run(tokenizer)


def test_a_list_is_gathered_from_every_part(run: Run) -> None:
    (answer,) = run("List all towns.", cite=True)
    assert answer.answer == run.said == "\n".join(f"- {town}" for town in TOWNS)
    assert answer.method == "whole"
    assert answer.coverage["read"] == answer.usage["document_tokens"]
    assert run.notes == answer.coverage["parts"] == len(answer.notes) > 3
    assert f"read {answer.coverage['read']:,} of {answer.coverage['read']:,} tokens" in answer.evidence()
    assert all(BOOK.text[n["begin"] : n["end"]] for n in answer.notes)


def test_a_summary_is_made_of_all_notes(run: Run) -> None:
    (answer,) = run("Summarise the book.")
    assert answer.answer == run.said == "all notes read"
    assert run.notes > answer.coverage["parts"]
    assert answer.timings["reading_s"] > 0


def test_mode_whole_reads_all_for_any_question(run: Run) -> None:
    (answer,) = run("Where did the miller go?", mode="whole")
    assert answer.method == "whole"
    with pytest.raises(AssertionError, match="no passages"):
        run("Where did the miller go?")
    with pytest.raises(AssertionError, match="no passages"):
        run("List all towns.", mode="find")


def test_a_text_that_fits_the_window_is_read_at_once(run: Run) -> None:
    (answer,) = run("List all towns.", mode="whole", window=8192, store=None)
    assert answer.method == "full"


def test_other_methods_cannot_read_the_whole(run: Run) -> None:
    with pytest.raises(UsageError, match="full attention"):
        run("List all towns.", mode="whole", method="sink")


class Pressed(Interrupts):
    """Ctrl-C after so many questions whether to stop."""

    def __init__(self, calls: int, leave: bool = False) -> None:
        super().__init__()
        self.calls, self.leaves = calls, leave

    def stopped(self) -> bool:
        self.calls -= 1
        if self.calls == 0:
            self.stop, self.leave = True, self.leaves
        return self.stop


def test_an_interrupt_answers_from_what_was_read_and_the_next_run_goes_on(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    (cut,) = run("List all towns.", interrupts=Pressed(150))
    parts = cut.coverage["parts"]
    assert 0 < len(cut.notes) < parts
    assert cut.coverage["read"] < cut.usage["document_tokens"]
    assert f"stopped after {len(cut.notes)} of {parts} parts" in capsys.readouterr().err
    (again,) = run("List all towns.")
    assert run.notes == parts - len(cut.notes)
    assert again.answer == "\n".join(f"- {town}" for town in TOWNS)
    assert f"{len(cut.notes)} of them noted before" in again.evidence()


def test_a_second_interrupt_leaves_but_keeps_the_notes(run: Run) -> None:
    with pytest.raises(KeyboardInterrupt):
        run("List all towns.", interrupts=Pressed(150, leave=True))
    (again,) = run("List all towns.")
    assert sum(note["kept"] for note in again.notes) > 0


def test_without_a_store_nothing_is_kept(run: Run, tmp_path: Path) -> None:
    run("List all towns.", store=None)
    assert not (tmp_path / "cache").exists()
