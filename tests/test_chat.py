"""Conversations: append-only, cancellable, transcript and state in agreement."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from fakes import FakeEngine, Opener

from longchat_cli.chat import Conversation, open_conversation
from longchat_cli.documents import Document
from longchat_cli.errors import ContextOverflow, UsageError
from longchat_cli.pinned import pin
from longchat_cli.prompt import Message, Prompt
from longchat_cli.sampling import Sampling
from longchat_cli.tokens import Tokenizer

SAMPLING = Sampling(max_tokens=64)
NOTE = Document("note.txt", "The mill has seven sails.\n")


@pytest.fixture
def engine(tokenizer: Tokenizer) -> FakeEngine:
    return FakeEngine(tokenizer)


def say(conversation: Conversation, text: str, cancel: Callable[[], bool] | None = None) -> str:
    return "".join(piece.text for piece in conversation.send(text, SAMPLING, cancel=cancel))


def rendered(conversation: Conversation) -> list[int]:
    """The ids that the transcript would render to, up to the last answer's end."""
    messages = [Message.of("system", conversation.system)] if conversation.system else []
    messages += [Message.of(turn.role, turn.text) for turn in conversation.turns]  # type: ignore[arg-type]
    ids = conversation.engine.render(messages, answer=False).ids
    return ids[: len(conversation.engine.ids)]  # type: ignore[attr-defined]


def after(calls: int) -> Callable[[], bool]:
    """A cancel that becomes true at its call number `calls` + 1."""
    left = iter(range(calls))
    return lambda: next(left, None) is None


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_turns_are_appended_and_agree_with_the_transcript(engine: FakeEngine, system: str | None) -> None:
    conversation = Conversation(engine, system)
    assert conversation.open()
    for text in ("hello", "and you?", "the river is wide"):
        before = len(engine.ids)
        assert say(conversation, text) == f"You said: {text}"
        assert len(engine.ids) > before
        assert engine.ids == rendered(conversation)
    answers = sum(engine.count(turn.text) for turn in conversation.turns if turn.role == "assistant")
    assert engine.prefilled + answers == len(engine.ids), "a token was read twice"
    assert [turn.stop for turn in conversation.turns] == [None, "eos"] * 3


def test_a_sampler_is_told_what_earlier_answers_said(
    engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[list[list[int]]] = []
    generate = engine.generate

    def listening(sampling: Sampling, cancel: object = None, said: Sequence[Sequence[int]] = ()) -> object:
        told.append([list(ids) for ids in said])
        return generate(sampling)

    monkeypatch.setattr(engine, "generate", listening)
    conversation = Conversation(engine)
    conversation.open()
    for text in ("hello", "and you?", "the river is wide"):
        say(conversation, text)
    list(conversation.retry(SAMPLING))
    first, second = (list(turn.ids) for turn in conversation.turns[1:4:2])
    assert told == [[], [first], [first, second], [first, second]]


def test_cancelled_prefill_leaves_no_trace(engine: FakeEngine) -> None:
    conversation = Conversation(engine)
    conversation.open()
    say(conversation, "hello")
    ids, turns = list(engine.ids), list(conversation.turns)
    pieces = list(conversation.send("long " * 40, SAMPLING, cancel=after(1)))
    assert [piece.stop for piece in pieces] == ["cancelled"]
    assert (engine.ids, conversation.turns) == (ids, turns)
    assert say(conversation, "again") == "You said: again"
    assert engine.ids == rendered(conversation)


def test_failed_prefill_leaves_no_trace(engine: FakeEngine) -> None:
    conversation = Conversation(engine)
    conversation.open()
    ids = list(engine.ids)
    engine.failure = MemoryError()
    with pytest.raises(MemoryError):
        say(conversation, "hello")
    assert (engine.ids, conversation.turns) == (ids, [])
    engine.failure = None
    assert say(conversation, "hello") == "You said: hello"


def test_cancelled_answer_is_kept_in_both(engine: FakeEngine) -> None:
    conversation = Conversation(engine)
    conversation.open()
    part = say(conversation, "hello there", cancel=after(6))
    assert part
    assert "You said: hello there".startswith(part)
    assert len(part) < len("You said: hello there")
    assert (conversation.turns[-1].text, conversation.turns[-1].stop) == (part, "cancelled")
    assert engine.ids == rendered(conversation)
    say(conversation, "go on")
    assert engine.ids == rendered(conversation)


def test_reader_that_stops_listening(engine: FakeEngine) -> None:
    conversation = Conversation(engine)
    conversation.open()
    stream = conversation.send("hello", SAMPLING)
    first = next(stream).text
    stream.close()
    assert (conversation.turns[-1].text, conversation.turns[-1].stop) == (first, "cancelled")
    say(conversation, "again")
    assert [turn.role for turn in conversation.turns] == ["user", "assistant"] * 2


def test_document_comes_first_and_is_read_before_the_first_turn(engine: FakeEngine) -> None:
    conversation = Conversation(engine, documents=[NOTE])
    conversation.open()
    before = engine.prefilled
    assert before > engine.count(NOTE.text)
    assert say(conversation, "how many sails?") == "You said: how many sails?"
    assert engine.prefilled - before < 40
    say(conversation, "sure?")
    shown = engine.assembler.show(type(engine.render([]))(engine.ids))
    assert shown.count("seven sails") == 1


def test_new_conversation(engine: FakeEngine) -> None:
    conversation = Conversation(engine, "Be brief.")
    conversation.open()
    opening = list(engine.ids)
    say(conversation, "hello")
    conversation.open()
    assert (engine.ids, conversation.turns) == (opening, [])


def test_undo_by_marks_and_by_reading_anew(engine: FakeEngine) -> None:
    conversation = Conversation(engine, "Be brief.")
    conversation.open()
    states = [list(engine.ids)]
    for number in range(8):
        say(conversation, f"the river is {number}")
        states.append(list(engine.ids))
    read = engine.prefilled
    for left in range(7, -1, -1):
        assert conversation.undo()
        assert engine.ids == states[left]
        assert conversation.exchanges == left
        assert (engine.prefilled == read) == (left > 3), "the newest few are taken back without reading"
    assert not conversation.undo()
    assert say(conversation, "again") == "You said: again"
    assert engine.ids == rendered(conversation)


def test_undo_cancelled_while_reading_changes_nothing(engine: FakeEngine) -> None:
    conversation = Conversation(engine)
    conversation.open()
    for number in range(8):
        say(conversation, f"the river is {number}")
    for _ in range(4):
        conversation.undo()
    ids, turns = list(engine.ids), list(conversation.turns)
    assert not conversation.undo(cancel=after(2))
    assert (engine.ids, conversation.turns) == (ids, turns)
    engine.failure = MemoryError()
    with pytest.raises(MemoryError):
        conversation.undo()
    assert (engine.ids, conversation.turns) == (ids, turns)


def test_retry_and_edit(engine: FakeEngine) -> None:
    conversation = Conversation(engine)
    conversation.open()
    for text in ("one", "two", "three"):
        say(conversation, text)
    engine.reply = lambda said: f"Again: {said}"
    assert "".join(piece.text for piece in conversation.retry(SAMPLING)) == "Again: three"
    assert [turn.text for turn in conversation.turns[::2]] == ["one", "two", "three"]
    ids, turns = list(engine.ids), list(conversation.turns)
    cancelled = list(conversation.edit(2, "long " * 40, SAMPLING, cancel=after(1)))
    assert [piece.stop for piece in cancelled] == ["cancelled"]
    assert (engine.ids, conversation.turns) == (ids, turns), "as before"
    assert "".join(piece.text for piece in conversation.edit(2, "2", SAMPLING)) == "Again: 2"
    assert [turn.text for turn in conversation.turns] == ["one", "You said: one", "2", "Again: 2"]
    assert engine.ids == rendered(conversation)
    for number in (0, 3):
        with pytest.raises(UsageError):
            conversation.edit(number, "x", SAMPLING)


def test_ids_of_turns_are_the_state(engine: FakeEngine) -> None:
    conversation = Conversation(engine, "Be brief.", [NOTE])
    conversation.open()
    say(conversation, "hello")
    say(conversation, "long story", cancel=after(6))
    conversation.add([Document("more.txt", "The wind turns them.\n")])
    say(conversation, "why?")
    ids = list(conversation.opening)
    for turn in conversation.turns:
        assert turn.start == len(ids)
        ids += turn.ids
    assert ids == engine.ids
    assert "The wind turns them." in engine.assembler.show(Prompt(list(conversation.turns[-2].ids)))
    say(conversation, "and now?")
    assert "wind" not in engine.assembler.show(Prompt(list(conversation.turns[-2].ids)))


def test_rebuild_under_another_method_and_system_prompt(tokenizer: Tokenizer) -> None:
    conversation = Conversation(FakeEngine(tokenizer, "sink", {"window": 60}, window=160), "Be brief.")
    conversation.open()
    for text in ("hello", "and you?"):
        say(conversation, text)
    before, turns = conversation.engine, list(conversation.turns)
    other = FakeEngine(tokenizer, "full")
    assert not conversation.rebuild(other, cancel=after(3))
    assert (conversation.engine, conversation.turns) == (before, turns)
    with pytest.raises(ContextOverflow):
        conversation.rebuild(FakeEngine(tokenizer, "full", window=40))
    assert conversation.rebuild(other, system="Be kind.")
    assert conversation.engine is other
    assert other.ids == rendered(conversation)
    assert "Be kind." in other.assembler.show(Prompt(other.ids))
    assert say(conversation, "still there?") == "You said: still there?"
    assert other.ids == rendered(conversation)
    assert [turn.text for turn in conversation.turns[:4]] == [turn.text for turn in turns]


def test_context_says_what_is_forgotten(tokenizer: Tokenizer) -> None:
    conversation = Conversation(FakeEngine(tokenizer, "sink", {"sinks": 10, "window": 60}, window=512))
    conversation.open()
    for _ in range(10):
        say(conversation, "the river is wide")
    context = conversation.context()
    assert context.visible == 70
    assert context.visible + context.forgotten == conversation.turns[-1].end
    seen = [turn for turn in conversation.turns[1::2] if turn.end > conversation.turns[-1].end - 60]
    assert context.forgotten_turns == 10 - len(seen)
    assert not conversation.pin(1)
    assert conversation.context().pinned == sum(len(turn.ids) for turn in conversation.turns[:2])


def test_full_says_that_it_is_at_its_end(tokenizer: Tokenizer) -> None:
    conversation = Conversation(FakeEngine(tokenizer, "full", window=160))
    conversation.open()
    with pytest.raises(ContextOverflow, match="--method sink"):
        for _ in range(20):
            say(conversation, "the river is wide")
    assert conversation.coverage().seen <= 160
    assert conversation.turns
    with pytest.raises(ContextOverflow):
        say(conversation, "long " * 200)
    assert conversation.coverage().seen <= 160


def test_sink_goes_on_past_the_window(tokenizer: Tokenizer) -> None:
    conversation = Conversation(FakeEngine(tokenizer, "sink", {"window": 60}, window=160))
    conversation.open()
    for _ in range(20):
        say(conversation, "the river is wide")
    assert conversation.coverage().seen > 320
    assert conversation.coverage().visible == 64


def test_system_prompt_and_document_are_pinned(tokenizer: Tokenizer) -> None:
    opener = Opener(tokenizer, window=512)
    conversation = open_conversation(opener, "sink", {"window": 100}, "Be brief.", [NOTE])
    assert opener.last is conversation.engine
    assert opener.last.options == {"window": 100, "sinks": len(conversation.opening)}


def test_only_the_system_prompt_is_pinned_when_the_document_is_long(tokenizer: Tokenizer) -> None:
    opener = Opener(tokenizer, window=512)
    book = Document("book.txt", NOTE.text * 100)
    conversation = open_conversation(opener, "sink", {"window": 100}, "Be brief.", [book])
    assert 4 < opener.last.options["sinks"] < 100 < len(conversation.opening)


@pytest.mark.parametrize(
    ("method", "options", "tokens", "pinned"),
    [
        ("sink", {}, 50, {"sinks": 50}),
        ("sink", {}, 2, {"sinks": 4}),
        ("sink", {"sinks": 1}, 50, None),
        ("sink", {"window": 480}, 50, None),
        ("full", {}, 50, None),
    ],
)
def test_pin(method: str, options: dict, tokens: int, pinned: dict | None) -> None:
    window = 512 if "window" in options else 8192
    assert pin(method, options, tokens, window) == pinned


def test_real_engine_appends_what_it_would_render(tiny_model: Callable[..., Path]) -> None:
    """The same over a real (tiny, random) model: state, transcript and logits agree with one rendering."""
    from longchat_cli.local import open_engine

    engine = open_engine(str(tiny_model()), "full", {}, "cpu", "float32")
    conversation = Conversation(engine, "Be brief.")
    conversation.open()
    for text, cancel in (("hello", after(5)), ("and you?", None)):
        for _ in conversation.send(text, Sampling(max_tokens=12), cancel=cancel):
            pass
    ids = engine.ids.tolist()
    assert conversation.coverage().seen == len(ids)
    assert sum(turn.role == "assistant" for turn in conversation.turns) == 2
    appended = engine.logits
    engine.reset()
    engine.prefill(ids)
    assert appended is not None
    assert (appended - engine.logits).abs().max() < 1e-3
