"""Thinking models: thoughts told from the answer token by token, cut short, and not fed back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import CHATML, VOCABULARY, write_tiny_model

from longchat_cli import local
from longchat_cli.chat import Conversation
from longchat_cli.engine import Piece
from longchat_cli.local import LocalEngine
from longchat_cli.pages import Store
from longchat_cli.prompt import Message
from longchat_cli.sampling import Sampling
from longchat_cli.sessions import Session, Sessions
from longchat_cli.terminal import Console

pytestmark = pytest.mark.usefixtures("one_thread")

# As Qwen 3 does: thoughts of answers before the last question are left out.
QWEN3 = (
    "{%- set ns = namespace(last=messages|length) %}"
    "{%- for m in messages[::-1] %}{%- if m.role == 'user' and ns.last == messages|length %}"
    "{%- set ns.last = messages|length - 1 - loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}{%- set content = m.content %}"
    "{%- if m.role == 'assistant' and loop.index0 < ns.last and '</think>' in content %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
    "{{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
R1 = QWEN3.replace("assistant\\n' }}", "assistant\\n<think>\\n' }}")
"""The prompt itself begins the thoughts, as DeepSeek R1 has it."""
KEEPS = CHATML + "{# <think></think> #}"
END = "<|im_end|>"


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], LocalEngine]:
    """An engine over a tiny random model with that template, and the two tokens around thoughts."""
    made: dict[str, LocalEngine] = {}

    def make(template: str) -> LocalEngine:
        if template not in made:
            directory = tmp_path_factory.mktemp("thinking")
            write_tiny_model(directory, "qwen3", vocab_size=VOCABULARY + 2)
            tokens = json.loads((directory / "tokenizer.json").read_text())
            for id, text in enumerate(("<think>", "</think>"), len(tokens["model"]["vocab"])):
                flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
                tokens["added_tokens"].append({"id": id, "content": text, **flags})
            (directory / "tokenizer.json").write_text(json.dumps(tokens))
            settings = json.loads((directory / "tokenizer_config.json").read_text())
            settings["chat_template"] = template
            (directory / "tokenizer_config.json").write_text(json.dumps(settings))
            made[template] = local.open_engine(str(directory), "full", {}, "cpu", "float32")
        return local.with_method(made[template], "full")

    return make


Talk = Callable[..., Conversation]


@pytest.fixture
def talk(engines: Callable[[str], LocalEngine], monkeypatch: pytest.MonkeyPatch) -> Talk:
    """`talk(template, *replies)`: a conversation whose model writes these, control tokens included."""

    def start(template: str, *replies: str, **more: object) -> Conversation:
        engine = engines(template)
        script = iter([id for reply in replies for id in ids_of(engine, reply)])
        monkeypatch.setattr(local, "choose", lambda *_: (next(script), 0.0))
        conversation = Conversation(engine, "Be brief.", **more)  # type: ignore[arg-type]
        assert conversation.begin()
        return conversation

    return start


def ids_of(engine: LocalEngine, text: str) -> Iterator[int]:
    for part in engine.tokenizer.split_control(text):
        yield from [part] if isinstance(part, int) else engine.encode(part)


def send(conversation: Conversation, text: str = "why?", tokens: int = 99) -> list[Piece]:
    return list(conversation.send(text, Sampling(max_tokens=tokens)))


def words(pieces: Sequence[Piece], thought: bool) -> str:
    return "".join(piece.text for piece in pieces if piece.thought == thought)


def rendered(conversation: Conversation) -> list[int]:
    """The ids of the whole transcript, as the template has it when the next turn begins."""
    engine = conversation.engine
    assert isinstance(engine, LocalEngine)
    said = [Message.of("system", "Be brief.")]
    said += [Message.of(turn.role, turn.text) for turn in conversation.turns]  # type: ignore[arg-type]
    ids = engine.render([*said, Message.of("user", "next")]).ids
    turn = engine.render_turn(Message.of("user", "next")).ids
    assert ids[-len(turn) :] == turn
    return ids[: -len(turn)]


def agrees(conversation: Conversation) -> bool:
    engine = conversation.engine
    assert isinstance(engine, LocalEngine)
    ids = [*conversation.opening, *(id for turn in conversation.turns for id in turn.ids)]
    return engine.ids.tolist() == ids and engine.cache.seen == len(ids)


def test_thoughts_are_told_and_not_fed_back(talk: Talk) -> None:
    conversation = talk(
        QWEN3,
        f"<think>\nThe miller counted.\n</think>\n\nIt is 42.{END}",
        f"<think>\nhm\n</think>\n\nIt is.{END}",
        f"No thoughts.{END}",
    )
    pieces = send(conversation)
    assert words(pieces, True) == "\nThe miller counted.\n"
    assert words(pieces, False) == "It is 42."
    answer = conversation.turns[-1]
    assert (answer.text, answer.thoughts, answer.stop) == ("It is 42.", "\nThe miller counted.\n", "eos")
    for _ in range(2):
        assert agrees(conversation)
        assert conversation.engine.ids.tolist() == rendered(conversation)  # type: ignore[attr-defined]
        send(conversation)
    assert conversation.turns[-1].text == "No thoughts."
    assert agrees(conversation)
    engine = conversation.engine
    assert isinstance(engine, LocalEngine)
    begun, ids = engine.logits, engine.ids.tolist()
    engine.reset()
    engine.prefill(ids)
    assert begun is not None and engine.logits is not None
    assert (begun - engine.logits).abs().max() < 1e-3


def test_thoughts_that_the_prompt_begins(talk: Talk) -> None:
    conversation = talk(R1, f"The miller counted.\n</think>\n\nIt is 42.{END}", f"hm</think>Yes.{END}")
    assert conversation.engine.thinking and conversation.engine.thinking.opened
    pieces = send(conversation)
    assert (words(pieces, True), words(pieces, False)) == ("The miller counted.\n", "It is 42.")
    assert agrees(conversation)
    shown = conversation.engine.assembler.show(conversation.engine.render([]))  # type: ignore[attr-defined]
    assert shown is not None
    send(conversation)
    assert agrees(conversation)
    begin = conversation.engine.thinking.begin
    assert begin not in conversation.engine.ids  # type: ignore[attr-defined]
    assert [turn.text for turn in conversation.turns[1::2]] == ["It is 42.", "Yes."]


def test_a_template_that_keeps_thoughts_keeps_them(talk: Talk) -> None:
    conversation = talk(KEEPS, f"<think>hm</think>Yes.{END}")
    send(conversation)
    thinking = conversation.engine.thinking
    assert thinking and not thinking.dropped
    assert (conversation.turns[-1].thoughts, conversation.turns[-1].text) == ("hm", "Yes.")
    assert {thinking.begin, thinking.end} <= set(conversation.turns[-1].ids)
    assert agrees(conversation)


def test_what_thoughts_begin_and_end_with_is_under_no_penalty(
    talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation = talk(KEEPS, *[f"<think>hm</think>Yes.{END}"] * 2)
    scripted, seen = local.choose, []

    def looking(logits: object, sampling: Sampling, recent: Sequence[int], *rest: Any) -> tuple[int, float]:
        seen.append((sampling.start_penalty, list(recent)))
        return scripted(logits, sampling, recent, *rest)

    monkeypatch.setattr(local, "choose", looking)
    for _ in range(2):
        list(conversation.send("why?", Sampling(max_tokens=99, start_penalty=5.0)))
    thinking = conversation.engine.thinking
    assert thinking and {penalty for penalty, _ in seen} == {0}
    assert seen[len(seen) // 2][1] == [
        *conversation.engine.encode("hm"),
        *conversation.engine.encode("Yes."),
    ], "what the second answer begins with"


@pytest.mark.parametrize("template", [QWEN3, R1, KEEPS], ids=["qwen3", "r1", "keeps"])
@pytest.mark.parametrize("most", [0, 1, 5])
def test_a_budget_of_thoughts(talk: Talk, template: str, most: int) -> None:
    begin = "" if template == R1 or not most else "<think>"
    thoughts = "the miller counted sacks before the rain"
    conversation = talk(template)
    engine = conversation.engine
    assert isinstance(engine, LocalEngine) and engine.thinking
    cut = engine.encode(thoughts)[:most]
    decoder = engine.tokenizer.decoder()
    written = "".join(map(decoder.push, cut))
    conversation = talk(template, begin + written, f"It is 42.{END}")
    conversation.think = most
    fed: list[list[int]] = []
    prefill = conversation.engine.prefill

    def watched(ids: Sequence[int], *rest: object) -> int:
        fed.append(list(ids))
        return prefill(ids, *rest)  # type: ignore[arg-type]

    conversation.engine.prefill = watched  # type: ignore[method-assign]
    pieces = send(conversation)
    assert (words(pieces, True), words(pieces, False)) == (written, "It is 42.")
    skipped = not most and template != R1
    assert list(engine.thinking.skipping if skipped else engine.thinking.closing) in fed
    assert agrees(conversation)


def test_thoughts_longer_than_the_answer_may_be(talk: Talk) -> None:
    conversation = talk(QWEN3, "<think>" + "hm " * 50)
    conversation.think = 20
    pieces = send(conversation, tokens=12)
    assert pieces[-1].stop == "length" and not words(pieces, False)
    assert conversation.turns[-1].stop == "length" and agrees(conversation)
    conversation = talk(QWEN3, "<think>" + "hm " * 50)
    conversation.think = 11
    assert send(conversation, tokens=12)[-1].stop == "length"
    assert agrees(conversation)


def test_stopped_while_it_thinks(talk: Talk) -> None:
    conversation = talk(QWEN3, "<think>" + "hm " * 50, f"Yes.{END}")
    calls = iter([False] * 6 + [True] * 9)
    list(conversation.send("why?", Sampling(max_tokens=99), cancel=lambda: next(calls)))
    answer = conversation.turns[-1]
    assert (answer.text, answer.stop) == ("", "cancelled") and answer.thoughts
    assert agrees(conversation)


def test_hidden_thoughts_are_kept_all_the_same(talk: Talk, tmp_path: Path) -> None:
    sessions = Sessions(tmp_path / "sessions.db")
    more = {"session": Session(sessions, Console()), "store": Store(tmp_path / "pages")}
    conversation = talk(QWEN3, f"<think>\nhm\n</think>\n\nYes.{END}", **more)
    conversation.shows_thoughts = False
    pieces = send(conversation)
    assert not any(piece.thought for piece in pieces) and words(pieces, False) == "Yes."
    kept = sessions.load(1)
    assert (kept.turns[-1].text, kept.turns[-1].thoughts) == ("Yes.", "\nhm\n")
    assert conversation.session
    conversation.session.close()
    engine = local.with_method(conversation.engine, "full")  # type: ignore[arg-type]
    again = Conversation(
        engine, "Be brief.", [], Session(sessions, Console(), kept), Store(tmp_path / "pages"), kept
    )
    assert again.begin() and agrees(again)
    assert again.reused == again.coverage().seen
    assert torch.equal(torch.tensor(engine.ids), torch.tensor(conversation.engine.ids))  # type: ignore[attr-defined]


def test_words_are_no_thoughts(talk: Talk, engines: Callable[[str], LocalEngine]) -> None:
    engine = engines(QWEN3)
    assert engine.thinking
    assert engine.thinking.begin not in engine.encode("<think>hm</think>")
    conversation = talk(QWEN3, f"Say <think>hm</think>.{END}".replace("<think>", "<thin").replace("k>", ""))
    assert not any(piece.thought for piece in send(conversation, "<think>hm</think>"))
    assert conversation.turns[0].text == "<think>hm</think>"
    assert engine.thinking.begin not in conversation.turns[0].ids


def test_models_that_do_not_think(tiny_model: Callable[..., Path]) -> None:
    engine = local.open_engine(str(tiny_model()), "full", {}, "cpu", "float32")
    assert engine.thinking is None
