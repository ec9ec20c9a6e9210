"""What a chat remembers beyond its cache: what is indexed, found, read again and said."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from fakes import FakeEngine

from longchat_cli.attention import method_class
from longchat_cli.attention.recall import Recall, Remembering
from longchat_cli.attention.sink import SinkLayer
from longchat_cli.chat import Conversation
from longchat_cli.documents import Document
from longchat_cli.memory import LONGEST, Memory, asked, local_encoder
from longchat_cli.pages import Store
from longchat_cli.prompt import Message, Prompt
from longchat_cli.prose import prose
from longchat_cli.recall import kept
from longchat_cli.recall.find import Finder
from longchat_cli.recall.growing import GrowingBM25, GrowingFinder
from longchat_cli.recall.lexical import BM25
from longchat_cli.sampling import Sampling
from longchat_cli.sessions import Turn
from longchat_cli.tokens import Tokenizer

SAMPLING = Sampling(max_tokens=64)
OPTIONS = {"find": "lexical", "passages": 0, "sinks": 40, "window": 300}


class Words:
    """An encoder: a sentence is the words it has, of which a few mean the same."""

    width = 256
    identity = "words"
    same = {"hound": "dog", "named": "called"}

    def __init__(self) -> None:
        self.encoded: list[str] = []

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        self.encoded += texts
        rows = np.zeros((len(texts), self.width), np.float32)
        for row, text in zip(rows, texts, strict=True):
            for word in text.casefold().replace(".", "").replace("?", "").split():
                row[sum(map(ord, self.same.get(word, word))) % self.width] += 1
        return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-9)


class Forgetful(FakeEngine):
    """A fake under recall that sees its first 40 and last 300 tokens."""

    def __init__(self, tokenizer: Tokenizer, window: int = 300) -> None:
        super().__init__(tokenizer, "recall", {**OPTIONS, "window": window})
        self.reply = lambda said: "Well."

    def coverage(self):
        from longchat_cli.engine import Coverage

        seen, kept = len(self.ids), self.options["sinks"] + self.options["window"]
        forgotten = max(seen - kept, 0)
        recent = forgotten + self.options["sinks"] if forgotten else 0
        return Coverage(seen, seen - forgotten, forgotten, 8 * kept, recent)

    def pin(self, start: int, stop: int, on: bool = True) -> bool:
        return True

    def said(self) -> str:
        return ""  # to look it up takes longer the longer the chat is


@pytest.fixture
def chat(tokenizer: Tokenizer) -> Conversation:
    made = Conversation(Forgetful(tokenizer))
    assert made.open()
    return made


def say(chat: Conversation, text: str) -> list[str]:
    """Send, and what was said about memory."""
    told: list[str] = []
    chat.notice = told.append
    list(chat.send(text, SAMPLING))
    return told


def read(chat: Conversation) -> str:
    """The last user's turn as the model reads it."""
    return chat.engine.assembler.show(Prompt(list(chat.turns[-2].ids)))  # type: ignore[attr-defined]


def fill(chat: Conversation, turns: int = 12) -> None:
    """Say unlike things until what came before is forgotten."""
    rng = random.Random(0)
    for _ in range(turns):
        say(chat, prose(120, rng))


def test_what_is_forgotten_is_read_again(chat: Conversation) -> None:
    say(chat, "My sister keeps bees near Lisbon. Her best friend paints lighthouses.")
    assert say(chat, "Who keeps bees near Lisbon?") == []  # it is visible
    fill(chat)
    assert chat.context().forgotten_turns > 1
    (told,) = say(chat, "Who keeps bees near Lisbon?")
    assert told.startswith("recalled 1 passage, ") and told.endswith(" tokens, from turn 1")
    text = read(chat)
    assert "Earlier in this conversation, the user said:\nMy sister keeps bees near Lisbon." in text
    assert text.index("My sister") < text.index("Question: Who keeps bees near Lisbon?")
    assert text.count("My sister keeps bees near Lisbon.") == 2  # once more, the nearest sentence
    assert chat.turns[-2].text == "Who keeps bees near Lisbon?"  # the words are the user's own
    assert 0 < chat.context().retrieved < 60
    # What was read again is visible; once that is forgotten, it is read again.
    assert say(chat, "Who keeps bees near Lisbon?") == []
    fill(chat)
    assert chat.context().retrieved == 0
    (told,) = say(chat, "Who keeps bees near Lisbon?")
    assert told.endswith("from turn 1")


def test_answers_from_passages_are_under_no_penalty(chat: Conversation) -> None:
    seen: list[tuple[float, float]] = []
    generate = chat.engine.generate

    def listening(sampling: Sampling, *rest: object) -> object:
        seen.append((sampling.repetition_penalty, sampling.start_penalty))
        return generate(sampling)

    chat.engine.generate = listening  # type: ignore[method-assign, assignment]
    say(chat, "My sister keeps bees near Lisbon.")
    fill(chat)
    sampling = Sampling(max_tokens=9, repetition_penalty=1.1, start_penalty=0.5)
    seen.clear()
    for text in ("Who keeps bees near Lisbon?", "Thank you."):
        list(chat.send(text, sampling))
    assert seen == [(1.0, 0.0), (1.1, 0.5)]


def test_tokens_are_read_once_and_appended(chat: Conversation) -> None:
    engine = chat.engine
    assert isinstance(engine, Forgetful)
    say(chat, "My sister keeps bees near Lisbon.")
    for number in range(40):
        before = list(engine.ids)
        say(chat, "Who keeps bees near Lisbon?" if number % 5 == 4 else f"Tell me of the number {number}.")
        assert engine.ids[: len(before)] == before
    said = sum(len(turn.ids) for turn in chat.turns if turn.role == "user")
    assert engine.prefilled == len(chat.opening) + said
    assert [turn.start for turn in chat.turns[1:]] == [turn.end for turn in chat.turns[:-1]]


def test_a_forgotten_text_is_no_control_token(chat: Conversation) -> None:
    special = next(iter(chat.engine.tokenizer.special))  # type: ignore[attr-defined]
    say(chat, f"The harbour code is {special} seven {special}.")
    fill(chat)
    assert say(chat, "The harbour code is what?")
    plain = chat.engine.render_turn(Message.of("user", "x")).ids
    special_id = chat.engine.tokenizer.special[special]  # type: ignore[attr-defined]
    assert list(chat.turns[-2].ids).count(special_id) == plain.count(special_id)
    assert special in chat.memory.entries[0].text  # type: ignore[union-attr]


def test_each_turn_is_indexed_once(tokenizer: Tokenizer) -> None:
    encoder = Words()
    memory = Memory(FakeEngine(tokenizer), lambda: encoder)
    engine = Forgetful(tokenizer)
    engine.info = engine.info.__class__("fake", 512, "sink", "cpu", "float32", "0")
    chat = Conversation(engine)
    chat.open()
    said = []
    for number in range(20):
        list(chat.send(f"Fact {number} is told.", SAMPLING))
        said += [f"Fact {number} is told.", "Well."]
        memory.update((), chat.turns)
        assert encoder.encoded == said
    assert len(memory.entries) == 40


def test_turns_that_are_taken_back_are_not_remembered(chat: Conversation) -> None:
    say(chat, "The vault opens with seven turns.")
    fill(chat)
    assert say(chat, "How does the vault open with turns?")
    list(chat.edit(1, "The sky is grey.", SAMPLING))
    fill(chat)
    assert say(chat, "How does the vault open with turns?") == []
    assert all("vault opens" not in entry.text for entry in chat.memory.entries)  # type: ignore[union-attr]


def test_what_is_pinned_is_not_read_again(chat: Conversation) -> None:
    say(chat, "The vault opens with seven turns.")
    chat.pin(1)
    fill(chat)
    assert say(chat, "How does the vault open with turns?") == []
    chat.pin(1, False)
    assert say(chat, "How does the vault open with seven turns?")


def test_documents_are_remembered(tokenizer: Tokenizer) -> None:
    rng = random.Random(1)
    book = Document("book.txt", prose(1500, rng) + " The comet returns in 2061. " + prose(1500, rng))
    chat = Conversation(Forgetful(tokenizer), documents=[book])
    chat.open()
    say(chat, "hello")
    (told,) = say(chat, "The comet returns when?")
    assert told.endswith("from book.txt")
    assert "The comet returns in 2061." in read(chat)
    chat.add([Document("note.txt", "The ferry leaves at noon from pier nine.")])
    say(chat, "Here is a note.")
    fill(chat)
    assert say(chat, "From which pier leaves the ferry at noon?")
    assert "Earlier in this conversation, note.txt said:\nThe ferry leaves" in read(chat)


def test_a_file_is_remembered_for_the_very_words_that_it_comes_with(chat: Conversation) -> None:
    rng = random.Random(2)
    first = Document("first.txt", "The comet returns in 2061. " + prose(1500, rng))
    chat.add([first, Document("second.txt", prose(1500, rng))])
    (told,) = say(chat, "The comet returns when?")
    assert told.endswith(" tokens, from first.txt")
    text = read(chat)
    assert text.index("Earlier in this conversation, first.txt said:\nThe comet returns in 2061.") > 3000
    assert text.rindex("The comet returns in 2061.") < text.index("Question: The comet returns when?")
    assert 0 < chat.context().retrieved < 60
    entries = list(chat.memory.entries)  # type: ignore[union-attr]
    assert [entry.name for entry in entries] == ["first.txt", "second.txt"]
    say(chat, "Thank you.")
    assert chat.memory.entries[:2] == entries  # type: ignore[union-attr]  # what is indexed stays
    chat.add([Document("short.txt", "The ferry leaves at noon.")])
    assert say(chat, "When leaves the ferry?") == []  # it is visible


def test_the_beginning_of_long_words_is_read_again_in_front_of_what_they_ask(chat: Conversation) -> None:
    told = say(chat, f"The comet returns in 2061. {prose(1500, random.Random(3))}\n\nThe comet returns when?")
    assert [line.endswith("from turn 1") for line in told] == [True]
    text = read(chat)
    again = text.index("Earlier in this conversation, the user said:\nThe comet returns in 2061.")
    assert 1500 < again < text.index("Question: The comet returns when?")
    assert 0 < chat.context().retrieved < 60
    assert say(chat, "The comet returns when?") == []  # it is visible


def test_questions_are_no_evidence(chat: Conversation) -> None:
    say(chat, "Which colour has the northern lighthouse?")
    fill(chat)
    assert say(chat, "Which colour has the northern lighthouse?") == []


def test_no_memory_without_recall(tokenizer: Tokenizer) -> None:
    chat = Conversation(FakeEngine(tokenizer, "sink"))
    assert chat.memory is None and chat.context().retrieved == 0


def test_meaning_finds_other_words_and_its_lack_is_said_once(tokenizer: Tokenizer) -> None:
    made: list[Words] = []
    memory = Memory(FakeEngine(tokenizer), lambda: made.append(Words()) or made[-1])
    engine = Forgetful(tokenizer)
    chat = Conversation(engine)
    chat.open()
    say(chat, "My dog is called Biscuit.")
    fill(chat)
    memory.update((), chat.turns)
    memory.update((), chat.turns)
    assert len(made) == 1
    coming = Turn("user", "Hound named how?", start=chat.coverage().seen)
    found = memory.recall([*chat.turns, coming], chat.coverage().recent)
    assert [passage.entry.text for passage in found.passages] == ["My dog is called Biscuit."]
    by_words = Memory(FakeEngine(tokenizer), lambda: None)
    by_words.update((), chat.turns)
    assert not by_words.recall([*chat.turns, coming], chat.coverage().recent).passages


def test_cancelled_indexing_goes_on(chat: Conversation) -> None:
    say(chat, "The vault opens with seven turns.")
    fill(chat, 40)
    encoder, left = Words(), iter(range(2))
    memory = Memory(chat.engine, lambda: encoder)
    assert not memory.update((), chat.turns, None, lambda: next(left, None) is None)
    begun = len(encoder.encoded)
    seen: list[tuple[int, int]] = []
    assert memory.update((), chat.turns, lambda done, total: seen.append((done, total)))
    sentences = sum(len(outline.sentences) for outline in memory._finder.outlines)
    assert 0 < begun < len(encoder.encoded) == len(set(encoder.encoded) - {"Well."}) + 41 == sentences
    assert seen[-1][0] == seen[-1][1]
    assert memory.update((), chat.turns) and len(encoder.encoded) == sentences


def test_of_a_long_message_the_end_is_looked_up() -> None:
    assert asked("short words") == "short words"
    long = "A line about nothing.\n" * 60
    assert asked(long + "\n\nWhere is the key?") == "Where is the key?"
    tail = asked("One sentence after another. " * 40)
    assert 0 < len(tail) <= LONGEST and tail.startswith("One")
    assert 0 < len(asked("x" * 5000)) <= LONGEST


def test_growing_bm25_is_bm25() -> None:
    rng = random.Random(3)
    texts = [prose(rng.randrange(40, 200), rng) for _ in range(60)]
    grown = GrowingBM25()
    for text in texts:
        grown.add([text])
    for question in ("the old judge waited by the fire", "oak", "nothing of it", ""):
        assert np.allclose(grown.score(question), BM25(texts).score(question), atol=1e-5)
    grown.keep(25)
    assert np.allclose(grown.score("the old judge"), BM25(texts[:25]).score("the old judge"), atol=1e-5)
    assert GrowingBM25().score("words").shape == (0,)


def test_growing_finder_is_the_finder(tokenizer: Tokenizer) -> None:
    rng = random.Random(4)
    documents = [Document(f"{i}", prose(rng.randrange(100, 900), rng)) for i in range(12)]
    documents.insert(5, Document("empty", " \n"))
    encoder = Words()
    whole = Finder(documents, tokenizer, encoder)  # type: ignore[arg-type]
    grown = GrowingFinder(tokenizer, encoder)
    for document in [*documents, Document("gone", "The colonel laughed by the fire. " * 9)]:
        grown.add(document)
    grown.keep(len(documents))
    for question in ("the colonel laughed by the fire", "a young widow closed the window"):
        wanted, found = whole.rank(question, 6), grown.rank(question, 6)
        assert [(p.document, p.begin, p.end, p.focus) for p in found] == [
            (p.document, p.begin, p.end, p.focus) for p in wanted
        ]
        assert np.allclose([p.score for p in found], [p.score for p in wanted], atol=2e-3)  # float16


def test_a_chat_that_goes_on_encodes_its_last_sentences_alone(tokenizer: Tokenizer, tmp_path: Path) -> None:
    engine = Forgetful(tokenizer)
    chat = Conversation(engine)
    chat.open()
    for number in range(150):
        say(chat, f"Fact {number}: the mill has {number} sails. It burned down in {1500 + number}.")
    first = Words()
    memory = Memory(engine, lambda: first, store=Store(tmp_path))
    for count in range(0, len(chat.turns) + 1, 2):
        memory.update((), chat.turns[:count])
    again = Words()
    resumed = Memory(engine, lambda: again, store=Store(tmp_path))
    resumed.update((), chat.turns)
    assert len(first.encoded) == 450
    assert 0 < len(again.encoded) <= kept.MOST
    assert again.encoded == first.encoded[-len(again.encoded) :]
    asked = "In which year burned the mill with 17 sails down?"
    by = [memory._finder.rank(asked, 3, "fused"), resumed._finder.rank(asked, 3, "fused")]
    assert by[0] == by[1] and memory.entries[by[0][0].document].text.startswith("Fact 17:")
    # Turns that are taken back and others in their place; a page that is damaged.
    turns = [*chat.turns[:100], *chat.turns[120:]]
    next(tmp_path.glob("*.safetensors")).write_bytes(b"damaged")
    whole, repaired = Words(), Words()
    for held in (memory, Memory(engine, lambda: repaired, store=Store(tmp_path))):
        held.update((), turns)
    fresh = Memory(engine, lambda: whole)
    fresh.update((), turns)
    assert memory._finder.rank(asked, 3, "fused") == fresh._finder.rank(asked, 3, "fused")
    assert len(whole.encoded) == 420 + 1 and len(repaired.encoded) < 300, "one is the question"
    plain = Words()
    Memory(engine, lambda: plain).update((), chat.turns)
    assert len(plain.encoded) == 450, "without a store nothing is kept"


def test_recall_with_a_window_is_attention_sinks() -> None:
    kind = method_class("recall")
    assert type(kind.build({})) is Recall and type(kind.build({"passages": 3})) is Recall
    built = kind.build({"window": 30, "sinks": 6, "evict": "turns", "find": "lexical"})
    assert isinstance(built, Remembering) and isinstance(built.layer(0, 1, None), SinkLayer)
    assert (built.window, built.sinks, built.evict) == (30, 6, "turns")


def test_a_thousand_turns_stay_flat(tokenizer: Tokenizer) -> None:
    """The assembler appends only, and what a turn costs does not grow with those before."""
    chat = Conversation(Forgetful(tokenizer, window=100), system="Be brief.")
    chat.open()
    chat.memory = None  # its text grows, and is measured elsewhere
    sizes = []
    for number in range(1000):
        list(chat.send(f"Number {number % 10}.", SAMPLING))
        sizes.append(len(chat.turns[-2].ids))
    engine = chat.engine
    assert isinstance(engine, Forgetful)
    assert set(sizes[1:]) == {sizes[-1]}
    assert engine.prefilled == len(chat.opening) + sum(sizes)
    assert chat.coverage().bytes == 8 * 140
    assert len(chat._marks) <= 4


def test_the_encoder_is_not_pulled_in_a_chat(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LONGCHAT_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    told: list[str] = []
    assert local_encoder(told.append)() is None
    assert len(told) == 1 and "longchat models pull minilm" in told[0]


def test_words_that_ask_nothing_need_a_surer_passage(chat: Conversation) -> None:
    say(chat, "Rewrite your previous response in the style of a pirate.")
    fill(chat)
    assert say(chat, "Give me the previous one in verse.") == []
    assert say(chat, "Is the previous response of a pirate?")
    fill(chat)
    assert say(chat, "Rewrite your previous response in the style of a pirate.")  # the very words


def test_how_to_answer_is_not_what_is_asked(chat: Conversation) -> None:
    say(chat, "Please give the numbers in a table with two columns.")
    say(chat, "The ferry leaves at noon.")
    fill(chat)
    assert say(chat, "Zebras? Please give the numbers in a list.") == []
    (told,) = say(chat, "When leaves the ferry? Please be brief.")
    assert told.endswith("from turn 2")
    fill(chat)
    assert say(chat, "Really? Please give the numbers in a table with two columns.")  # nearly the very words
