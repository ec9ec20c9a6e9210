"""A chat that turns to something else: how that is judged, and what is out of sight then."""

from __future__ import annotations

import json
import random
import sqlite3
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from fakes import FakeEngine
from test_methods import assert_close, layer_of, run, tensors
from test_resume import agrees, leave, loaded, logits, say, sessions, start  # noqa: F401
from test_sink_turns import LENGTH, Pins, kept

from longchat_cli import subjects
from longchat_cli.chat import Conversation
from longchat_cli.errors import UsageError
from longchat_cli.exchange import as_json, from_json
from longchat_cli.local import LocalEngine, open_engine, with_method
from longchat_cli.pages import Store
from longchat_cli.prompt import Message
from longchat_cli.prose import prose
from longchat_cli.repl import commands
from longchat_cli.repl.loop import Repl
from longchat_cli.sampling import Sampling
from longchat_cli.sessions import Sessions
from longchat_cli.terminal import Console
from longchat_cli.tokens import Tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")

SUBJECT = 30
OPTIONS = {"sinks": 30, "window": 200, "evict": "subjects"}
Start = Callable[..., Conversation]


def seen(t: int, window: int, pins: Pins = ()) -> list[int]:
    """What row t sees of a text whose subject changes at SUBJECT, written down anew."""
    row = kept(t, 3, window, [], pins)
    if t < SUBJECT - 1:
        return row
    stay = [range(3), *(range(a, b) for a, b in pins)]
    return [j for j in row if j >= min(SUBJECT, t) or any(j in span for span in stay)]


@pytest.mark.parametrize("pins", [[], [(9, 14), (24, 28)]])
@pytest.mark.parametrize("window", [200, 16])
def test_what_was_said_before_a_subject_is_out_of_sight(window: int, pins: Pins) -> None:
    turn = oracle.Turn(8)
    q, k, v = tensors(4, 2, 16, LENGTH)
    rows = [seen(t, window, pins) for t in range(LENGTH)]
    keys: list = [[(j, place, len(row) - 1) for place, j in enumerate(row)] for row in rows]
    wanted = oracle.dense(q, k, v, turn, 0.25, keys)
    rotated_q, rotated_k = (turn(x, range(LENGTH)).float() for x in (q, k))
    for after in ([30], [8] * 4, [1] * 33):
        told = layer_of("sink", {"sinks": 3, "window": window, "evict": "subjects"}, turn)
        out, at = [], 0
        for size in [14, 13, 33] if after == [30] else [14, 13, *after]:
            if at == 27:  # three tokens ahead of it: what closes an answer
                told.begin_turn(SUBJECT, forget=True)
            part = slice(at, at + size)
            out.append(told.attend(rotated_q[:, part], rotated_k[:, part], v[:, part], 0.25, False))
            at = min(part.stop, LENGTH)
            for begin, end in pins:
                if begin < at:
                    assert told.pin(begin, end)
        assert_close(torch.cat(out, dim=1), wanted[:, :at])
        left = max(at + 1 - window, SUBJECT)
        assert told.recent() == left
        assert told.visible() == min(at, 3 + sum(b - a for a, b in pins) + at + 1 - left)


def test_turns_without_subjects_change_nothing() -> None:
    turn = oracle.Turn(8)
    q, k, v = tensors(4, 2, 16, LENGTH)
    one, other = (
        layer_of("sink", {"sinks": 3, "window": 16, "evict": evict}, turn) for evict in ("tokens", "subjects")
    )
    other.begin_turn(9)
    splits = [[20, 30, 10]] * 2
    a, b = (run(told, q, k, v, turn, chunks) for told, chunks in zip((one, other), splits, strict=True))
    assert torch.equal(a, b)


def test_a_new_subject_is_read_as_in_a_fresh_chat(loaded: LocalEngine) -> None:  # noqa: F811
    """The logits behind it are those of a chat that begins with it, whatever was said before."""
    engine = with_method(loaded, "sink", OPTIONS)
    opening = engine.render([Message.of("user", "x")]).ids
    opening = opening[: opening.index(engine.encode("x")[-1])]
    engine = with_method(loaded, "sink", {**OPTIONS, "sinks": len(opening)})
    first, words = ([*opening, *engine.encode(text)] for text in ("the mill", "the river ran past the town"))
    fresh = with_method(loaded, "full")
    fresh.prefill(words)
    assert fresh.logits is not None
    engine.prefill(first)
    turn = engine.render_turn(Message.of("user", "the river ran past the town")).ids
    closing = engine._closing(turn)
    text = turn[: closing + len(words) - len(opening)]
    mark = engine.snapshot()
    for forget, agree in ((True, True), (False, False)):
        engine.restore(mark)
        engine.begin_turn(turn, forget)
        engine.prefill(text)
        assert engine.logits is not None
        assert torch.allclose(engine.logits, fresh.logits, atol=1e-4) is agree
    engine.restore(mark)
    engine.begin_turn(turn, forget=True)
    alone = engine.weigh(text)
    likely = torch.cat([loaded_logits(loaded, words)]).log_softmax(-1)
    for place in range(closing + 1, len(text)):  # the first token is foretold from behind one newline more
        wanted = float(likely[len(opening) + place - closing - 1, text[place]])
        assert alone[place - 1] == pytest.approx(wanted, abs=1e-4)
    assert engine.cache.seen == len(first)  # the state stays


def loaded_logits(loaded: LocalEngine, ids: Sequence[int]) -> torch.Tensor:  # noqa: F811
    """Of every token of a text, under full attention."""
    cache = loaded.decoder.new_cache(with_method(loaded, "full").method)
    return loaded.decoder.forward(torch.tensor(ids), cache, logits=len(ids))


class Judged(FakeEngine):
    """Under sink, with a made up judgement: words with "new" in them gain nothing behind what was said."""

    forgets = False

    def __init__(self, tokenizer: Tokenizer, method: str = "sink", **options: Any) -> None:
        super().__init__(tokenizer, method, {"sinks": 40, "window": 900, "evict": "subjects", **options})
        self.subject = 0

    def begin_turn(self, ids: Sequence[int], forget: bool = False) -> None:
        self.forgets = forget
        self.subject = len(self.ids) if forget else self.subject

    def weigh(self, ids: Sequence[int]) -> list[float]:
        new = "new" in self.tokenizer.decode(ids)
        return [-3.0 if self.forgets or new else -1.0] * (len(ids) - 1)

    def coverage(self) -> Any:
        state = super().coverage()
        gone = max(self.subject - 40, 0)
        return type(state)(state.seen, state.seen - gone, gone, 8 * state.seen, self.subject)

    def snapshot(self) -> Any:
        return super().snapshot(), self.subject

    def restore(self, mark: Any) -> None:
        ids, self.subject = mark
        self.forgets = False
        super().restore(ids)


def test_words_that_gain_nothing_begin_a_subject(tokenizer: Tokenizer) -> None:
    engine = Judged(tokenizer)
    engine.prefill(range(60))
    for text, begun in (
        ("something new altogether", True),
        ("and what about the mill", False),
        ("new", False),
    ):
        assert subjects.begins(engine, engine.render_turn(Message.of("user", text))) is begun
        assert engine.subject == 0 and len(engine.ids) == 60
    long = "word " * 200  # the first tokens decide: what comes later is not even read
    turn, read = engine.render_turn(Message.of("user", long)), []
    weigh = engine.weigh
    engine.weigh = lambda ids: read.append(len(ids)) or weigh(ids)  # type: ignore[method-assign, func-returns-value]
    assert not subjects.begins(engine, turn)
    assert max(read) <= subjects.LOOKED + len(turn.ids) - engine.count(long)


def test_what_becomes_less_likely_does_not_count(tokenizer: Tokenizer) -> None:
    engine = Judged(tokenizer)
    engine.prefill(range(60))

    def weigh(ids: Sequence[int]) -> list[float]:
        """One token is likelier behind the conversation, all others are less likely."""
        return [-4.0] * (len(ids) - 1) if engine.forgets else [-9.0] * (len(ids) - 2) + [-1.0]

    engine.weigh = weigh  # type: ignore[method-assign]
    turn = engine.render_turn(Message.of("user", "the river ran past the old mill"))
    count = engine.count("the river ran past the old mill")
    assert subjects.gain(engine, turn) == pytest.approx(3 / count)


def test_how_words_begin_counts_little(tokenizer: Tokenizer) -> None:
    engine = Judged(tokenizer)
    engine.prefill(range(60))
    text = "the river ran past the old mill"
    turn, count = engine.render_turn(Message.of("user", text)), engine.count(text)
    first = turn.ids.index(engine.encode(text)[0])
    for place, counted in ((first, subjects.FIRST), (first + 1, 5.0), (len(turn.ids) - 1, 5.0)):
        likelier = [-1.0 if at == place else -6.0 for at in range(1, len(turn.ids))]
        engine.weigh = lambda ids, seen=likelier: [-6.0] * len(seen) if engine.forgets else seen  # type: ignore[method-assign, misc]
        assert subjects.gain(engine, turn) == pytest.approx(counted / count)


def test_a_chat_says_so_and_takes_it_back(tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]) -> None:
    told: list[str] = []
    chat = Conversation(Judged(tokenizer))
    chat.notice = told.append  # type: ignore[method-assign]
    chat.begin()
    said: list[Any] = []
    generate = chat.engine.generate
    chat.engine.generate = lambda s, c=None, said_=(): said.append(list(said_)) or generate(s, c, said_)  # type: ignore[method-assign, misc, func-returns-value]
    for text in (
        "something new altogether",
        "the mill",
        "more on the mill",
        "a new thing to talk about",
        "why?",
    ):
        list(chat.send(text, Sampling(max_tokens=40)))
    assert told == ["new subject: 3 turns out of sight"]
    assert [turn.subject for turn in chat.turns[::2]] == [False, False, False, True, False]
    assert (chat.context().forgotten_turns, chat.context().subject) == (3, 4)
    commands.take(Repl((chat, None, {}), Sampling(), Console(), None), "/context")  # type: ignore[arg-type]
    assert "tokens seen, about one subject since turn 4" in capsys.readouterr().err
    answers = [turn.ids for turn in chat.turns[1::2]]
    assert said == [[], answers[:1], answers[:2], [], answers[3:4]]  # what is out of sight is not said again
    chat.undo()
    chat.undo()
    assert chat.context().forgotten_turns == 0 and len(chat.turns) == 6
    list(chat.send("a new thing to talk about", Sampling(max_tokens=40)))
    assert chat.turns[-2].subject
    list(chat.edit(4, "back to the mill then", Sampling(max_tokens=40)))
    assert not chat.turns[-2].subject and chat.context().forgotten_turns == 0
    assert len(told) == 2


def test_other_ways_of_forgetting_ask_nobody(tokenizer: Tokenizer) -> None:
    chat = Conversation(Judged(tokenizer, evict="tokens"))
    chat.begin()
    for text in ("something new altogether", "a new thing to talk about"):
        list(chat.send(text, Sampling(max_tokens=40)))
    assert not any(turn.subject for turn in chat.turns)


def test_memory_finds_what_is_out_of_sight(tokenizer: Tokenizer) -> None:
    told: list[str] = []
    chat = Conversation(Judged(tokenizer, "recall", find="lexical", window=9000))
    chat.notice = told.append  # type: ignore[method-assign]
    chat.begin()
    chat.engine.reply = lambda said: "Well."  # type: ignore[attr-defined]
    for text in (
        "The gardener keeps a green bicycle in the shed.",
        *prose(400, random.Random(1)).split("\n\n"),
    ):
        list(chat.send(text, Sampling(max_tokens=40)))
    list(chat.send("A new one: which bicycle does the gardener keep in the shed?", Sampling(max_tokens=40)))
    assert told[-2].startswith("new subject: ") and told[-2].endswith("out of sight")
    assert told[-1].startswith("recalled 1 passage") and told[-1].endswith("from turn 1")


@pytest.mark.parametrize("keeps", [True, False])
def test_a_chat_goes_on_behind_its_subject(
    start: Start,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    keeps: bool,
) -> None:
    monkeypatch.setattr(subjects, "begins", lambda engine, turn: len(subjects._words(turn)) < 5)
    chat = start("sink", None, OPTIONS)
    say(
        chat,
        "the miller counted his sacks of grain",
        "and then the rain came down",
        "town",
        "they walked along",
    )
    assert [turn.subject for turn in chat.turns[::2]] == [False, False, True, False]
    hidden = chat.coverage()
    assert hidden.recent == chat.turns[4].start + chat.engine._closing(chat.turns[4].ids)  # type: ignore[attr-defined]
    wanted, kept_chat = logits(chat), leave(chat)
    if not keeps:
        for page in (tmp_path / "pages").iterdir():
            page.unlink()
    again = start("sink", kept_chat, OPTIONS)
    # What was decoded and what is read differ in their last bits.
    assert torch.allclose(logits(again), wanted, atol=0 if keeps else 1e-3)
    assert agrees(again) and again.coverage() == hidden
    assert again.reused == (hidden.seen if keeps else 0)
    again.rebuild(with_method(again.engine, "sink", {**OPTIONS, "evict": "tokens"}))  # type: ignore[arg-type]
    assert again.coverage().recent == again.context().subject == 0
    again.rebuild(with_method(again.engine, "sink", OPTIONS))  # type: ignore[arg-type]
    assert again.coverage() == hidden and again.context().subject == 3
    assert again.undo() and again.undo() and again.coverage().recent == 0


def test_layers_that_would_go_on_seeing_are_refused(tiny_model: Callable[..., Path]) -> None:
    model = str(tiny_model("gemma3_text"))
    open_engine(model, "sink", {"evict": "turns"}, "cpu", "float32")
    with pytest.raises(UsageError, match="--evict subjects cannot serve here: some layers"):
        open_engine(model, "recall", {"evict": "subjects", "window": 60}, "cpu", "float32")


def test_pages_of_a_subject_are_its_own(loaded: LocalEngine, tmp_path: Path) -> None:  # noqa: F811
    """The same tokens with a subject elsewhere are another state."""
    engine = with_method(loaded, "sink", OPTIONS)
    turns = [[*range(40, 60)], [*range(60, 80)], [*range(80, 100)]]
    opening, found = list(range(3, 33)), []
    for begun, reused in (({1}, 0), ({1}, 90), (set(), 50), ({2}, 70)):
        engine.reset()
        store = Store(tmp_path / "pages")
        assert engine.read(opening, store, turns=turns, subjects=begun) == (90, reused)
        engine.prefill([5])
        found.append((engine.coverage().recent, engine.logits))
    assert [place for place, _ in found] == [50, 50, 0, 70]
    assert torch.equal(found[0][1], found[1][1])
    assert not torch.allclose(found[0][1], found[2][1], atol=1e-3)


def test_subjects_are_kept(sessions: Sessions, tokenizer: Tokenizer) -> None:  # noqa: F811
    from test_sessions import chat, same

    made = chat("one", "1", "two", "2")
    made.turns[2].subject = True
    number = sessions.add(made)
    assert [turn.subject for turn in sessions.load(number).turns] == [False, False, True, False]
    assert same(sessions.load(number), made)
    assert from_json(json.dumps(as_json(made)).encode(), "x").turns[2].subject


def test_a_file_of_an_older_longchat_learns_of_subjects(sessions: Sessions) -> None:  # noqa: F811
    from test_sessions import chat

    number = sessions.add(chat("one", "1"))
    with sqlite3.connect(sessions.path) as database:
        database.execute("ALTER TABLE turns DROP COLUMN subject")
        database.execute("PRAGMA user_version = 1")
    database.close()
    held = sessions.load(number)
    assert [turn.text for turn in held.turns] == ["one", "1"] and not held.turns[0].subject
    held.turns[0].ids = array("I", [7])
    held.turns[0].subject = True
    assert sessions.load(sessions.add(held)).turns[0].subject
