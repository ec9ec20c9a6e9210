"""The evaluations of endless chats: what they ask, count and keep."""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from fakes import FakeEngine

from longchat_cli.chat import Conversation
from longchat_cli.cli import cli
from longchat_cli.errors import LongchatError, UsageError
from longchat_cli.evaluation import conversation as talking
from longchat_cli.evaluation import run as running
from longchat_cli.evaluation import streameval as streaming
from longchat_cli.evaluation.journal import Journal
from longchat_cli.evaluation.typed import Typed
from longchat_cli.prompt import Prompt
from longchat_cli.sampling import Sampling
from longchat_cli.tokens import Tokenizer


class Reader(FakeEngine):
    """Finds the value of the line asked for where it is visible: a model that can do the task."""

    def said(self) -> str:
        shown = self.assembler.show(Prompt(self.ids))
        if self.info.method == "sink":
            shown = self.assembler.show(Prompt(self.ids[-self.options["window"] :]))
        question = shown.split("user\n")[-1].split("⟦")[0].removeprefix("Question: ").strip()
        key = question.removesuffix("?").split()[-1]
        found = [line for line in shown.split("\n") if f" for {key} is: " in line]
        if not found or not question.endswith("?"):
            return "this, and it is noted down, line by line"
        return found[0].split("is: ")[1].rstrip(".")


def converse(tokenizer: Tokenizer, made: list[str]) -> streaming.Converse:
    def open_chat(method: str | None) -> Conversation:
        made.append(method or "sink")
        options = {"sinks": 4, "window": 1000} if method is None else {}
        chat = Conversation(Reader(tokenizer, made[-1], options, window=6000))
        chat.open()
        return chat

    return open_chat


def test_streameval_asks_further_and_further_back(tokenizer: Tokenizer, tmp_path: Path) -> None:
    made: list[str] = []
    plan = streaming.Plan(tokens=16_000, own=2)
    path = tmp_path / "rows.jsonl"
    result = streaming.streameval(
        converse(tokenizer, made), plan, Journal(path, {"a": 1}), lambda done, total: None
    )
    assert made == ["sink", "full"] or made == ["full", "sink"]
    own = [total for total in result["totals"] if total["method"] == "the model itself"]
    assert own and all(total["score"] == 1 for total in own)  # everything is visible there
    stream = [total for total in result["totals"] if total["method"].startswith("sink")]
    assert len(stream) >= 3 and stream[-1]["caches"] > 2
    assert stream[-1]["score"] == 0 == stream[-1]["share"]  # beyond the cache nothing is left
    (row,) = (row for row in result["samples"] if row["kind"] == "stream")
    for answer in row["answers"]:
        # A line is told in about 40 of these tokens.
        assert answer["back"] > 20 * answer["distance"] and answer["reference"].isdigit()
    assert row["tokens"] >= 16_000 and len(row["steps"]) == 9
    text = streaming.show(result)
    assert "own score, full attention" in text and "a step's time" in text
    again = streaming.streameval(
        converse(tokenizer, made), plan, Journal(path, {"a": 1}), lambda done, total: None
    )
    assert again["totals"] == result["totals"] and made.count("full") == 1  # nothing is asked again


def test_wordings_have_their_lines() -> None:
    for name, wording in streaming.WORDINGS.items():
        turns = wording.turns(200, random.Random(1))
        assert [len(turn) for turn in turns] == [streaming.LINES] * 200
        lines = [line for turn in turns for line in turn if line.value]
        assert len(lines) == (200 if name == "facts" else 2000)
        assert len({line.question for line in lines}) == len(lines)
        assert all(line.value in line.text for line in lines)
    assert turns[1][1].text.startswith("line 12: REGISTER_CONTENT is <")


Open = Callable[[], Typed]


@pytest.fixture
def typed(tokenizer_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Open:
    """Opens a chat in a terminal over the fake engine, which says what it is told."""
    monkeypatch.setenv("LONGCHAT_DATA_DIR", str(tmp_path / "data"))
    program = [sys.executable, str(Path(__file__).with_name("fakes.py")), str(tokenizer_dir), "0,0"]
    return lambda: Typed(["--max-tokens=99", "--method=sink"], program)


def bench(tokenizer: Tokenizer, typed: Open) -> talking.Bench:
    def open_chat(method: str | None) -> Conversation:
        engine = FakeEngine(tokenizer, method or "sink", {"sinks": 4, "window": 64})
        engine.reply = lambda said: "abcdefghij"  # alone it says each thing once
        chat = Conversation(engine)
        chat.open()
        return chat

    def forward() -> Any:
        return lambda ids: torch.zeros(len(ids), 64 * 8)

    return talking.Bench(open_chat, typed, forward, Sampling(max_tokens=30))


def test_what_is_typed_arrives(typed: Open, tmp_path: Path) -> None:
    words = ["hello", "/etc is a folder", "one\n\ntwo\n    three\tand four", "long " * 3000, "wide 漢字 🎉"]
    with typed() as chat:
        said = [chat.say(text) for text in words]
        process = chat._chat
    answers = [given.answer.text for given in said]
    assert answers[:3] == [
        "You said: hello",
        "You said: /etc is a folder",
        "You said: two\n    three\tand four",
    ]
    seen = [given.seen for given in said]
    assert seen == sorted(seen) and seen[3] > 3000
    assert all(given.bytes > 0 and given.answer.stop == "eos" for given in said[:3])
    assert process.returncode is not None
    assert not (tmp_path / "data").exists()  # nothing of it is among the user's chats


def test_a_chat_that_cannot_be_typed_to_says_why(typed: Open) -> None:
    broken = typed()
    broken._command.append("--top-p=7")
    with pytest.raises(LongchatError, match="the chat has ended: .*--top-p is 7"), broken:
        pass
    with typed() as chat, pytest.raises(LongchatError, match="the chat has ended"):
        chat._shown("\x04")


def test_conversation_is_compared_with_fresh_chats(tokenizer: Tokenizer, typed: Open, tmp_path: Path) -> None:
    data, path = tmp_path / "prompts.jsonl", tmp_path / "rows.jsonl"
    told = ["ab" * 20, "cd" * 20]  # the answers in the terminal say it again
    data.write_text("".join(json.dumps({"turns": told}) + "\n" for i in range(6)))

    def measure() -> dict[str, Any]:
        talk, journal = bench(tokenizer, typed), Journal(path, {"a": 1})
        return talking.conversation(talk, [data], journal, lambda done, total: None)

    result = measure()
    assert [row["method"] for row in result["samples"]].count(talking.FRESH) == 12
    assert [total["part"] for total in result["totals"]] == [1, 2, 3, 4]
    for total in result["totals"]:
        assert total["answers"] == 3
        assert total["repeated"] > 0.5 > total["repeated_fresh"] == 0
        assert {"copied", "copied_fresh"} <= total.keys()
        assert math.isclose(total["perplexity"], 512, rel_tol=1e-3)  # every token as likely as any other
    assert result["totals"][-1]["seen"] > result["totals"][0]["seen"]
    assert "fresh" in talking.show(result)
    held = path.read_text()
    measure()
    assert path.read_text() == held
    with pytest.raises(UsageError, match="prompts"):
        talking.conversation(bench(tokenizer, typed), [], Journal(None, {}), lambda done, total: None)


def test_the_command_types_to_a_real_chat(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    data = tmp_path / "prompts.jsonl"
    data.write_text(json.dumps({"turns": ["The river ran\npast the old mill.", "/and the miller"]}) + "\n")
    words = ["eval", "conversation", "--data", str(data), "--max-tokens", "9", "--method", "sink", "--json"]
    tiny = ["--model", str(tiny_model()), "--dtype", "float32", "--window", "200"]
    result = json.loads(CliRunner().invoke(cli, [*words, *tiny], catch_exceptions=False).stdout)
    fresh, long = result["samples"][:2], result["samples"][2:]
    assert [row["method"] for row in long] == ["sink window=200 evict=tokens"] * 2
    assert [row["answer"] for row in long] == [row["answer"] for row in fresh]  # nothing was said before
    assert math.isclose(long[0]["loss"], fresh[0]["loss"], rel_tol=1e-3)
    assert result["totals"][-1]["seen"] == long[1]["seen"] > 40 and long[1]["bytes"] > 0


def test_measurements_of_other_samplers_are_not_mixed(
    tokenizer: Tokenizer, typed: Open, tmp_path: Path
) -> None:
    data, path = tmp_path / "prompts.jsonl", tmp_path / "rows.jsonl"
    data.write_text(json.dumps({"turns": ["Say it.", "Again."]}) + "\n")

    def measure(penalty: float) -> None:
        talk = replace(bench(tokenizer, typed), sampling=Sampling(max_tokens=30, repetition_penalty=penalty))
        subject = running.Subject(len, engine=FakeEngine(tokenizer), talk=talk)
        running.run("conversation", subject, running.Options(data=(data,), output=path))

    measure(1.1)
    assert json.loads(path.read_text().splitlines()[0])["repetition_penalty"] == 1.1
    with pytest.raises(UsageError, match="holds other measurements") as caught:
        measure(1.2)
    assert caught.value.why == "it differs in repetition_penalty"


def test_copies_are_of_answers_to_other_prompts() -> None:
    answers = [
        (0, "one two three four five"),
        (0, "One two three four"),
        (1, "two three four five six"),
        (2, "a"),
    ]
    rows = [{"number": number, "answer": answer} for number, answer in answers]
    assert talking.copied(rows) == [0, 0, 0.5, 0]
    assert talking.copied([*rows, {"number": 3, "answer": "and one two three four"}])[-1] == 0.5
    assert talking.copied([]) == []


def test_repetition_is_counted_in_phrases() -> None:
    assert talking.repeated([]) == talking.repeated([1, 2, 3]) == 0
    assert talking.repeated(list(range(20))) == 0
    assert talking.repeated([1, 2, 3, 4] * 5) == 1 - 4 / 17
