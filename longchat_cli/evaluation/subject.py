"""What `longchat eval` evaluates: the engine and the `ask` flow as users run them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from longchat_cli import ask
from longchat_cli.attention.full import Full
from longchat_cli.attention.layer import Method
from longchat_cli.chat import Conversation, open_conversation
from longchat_cli.documents import Collection, Document
from longchat_cli.engine import Engine
from longchat_cli.evaluation.conversation import Bench
from longchat_cli.evaluation.finders import RANKED, READ
from longchat_cli.evaluation.perplexity import Forward
from longchat_cli.evaluation.repository import Place
from longchat_cli.evaluation.run import CHANCES, Answer, Subject
from longchat_cli.evaluation.typed import Typed
from longchat_cli.terminal import Console, Interrupts


class Searcher:
    """`evaluation.finders.Searcher` over one loaded model; indexes are kept in `store`."""

    def __init__(
        self, open_engine: ask.Open, request: ask.Request, console: Console, interrupts: Interrupts
    ) -> None:
        self.open_engine, self.request = open_engine, request
        self.console, self.interrupts = console, interrupts
        self._engine: Any = open_engine("recall", request.options)

    def count(self, text: str) -> int:
        return self._engine.count(text)

    def about(self) -> dict[str, Any]:
        info = self._engine.info
        return {"model": info.model, "fingerprint": info.fingerprint, "options": dict(self.request.options)}

    def indexes(self, document: str, finders: Sequence[str]) -> Mapping[str, Any]:
        shared: dict[str, Any] = {}  # words and meaning are in the index of both
        made = {}
        for name in finders:
            kind = "attention" if name == "attention" else "fused"
            if kind not in shared:
                shared[kind] = self._index(document, kind)
            made[name] = shared[kind].by(name)
        return made

    def _index(self, document: str, kind: str) -> Any:
        options = {**self.request.options, "find": kind}
        store = self.request.store
        return ask.local_finder(self._engine, _alone(document).documents, options, self.console, store)

    def from_passages(self, document: str, asked: Sequence[tuple[str, Any]]) -> list[str]:
        questions = tuple(question for question, _ in asked)
        given = _Given([passages for _, passages in asked])
        return self._answers("recall", document, questions, lambda *_: given)

    def from_text(self, method: str, document: str, questions: Sequence[str]) -> list[str]:
        def none(*_: Any) -> ask.Finder:
            raise AssertionError(f"{method} finds no passages")

        return self._answers(method, document, tuple(questions), none)

    def _answers(
        self, method: str, document: str, questions: tuple[str, ...], make: ask.MakeFinder
    ) -> list[str]:
        options = self.request.options if method == "recall" else {}
        request = replace(self.request, questions=questions, method=method, options=options, store=None)
        found = ask.ask(
            self.open_engine, make, _alone(document), request, lambda _: None, self.console, self.interrupts
        )
        return [got.answer for got in found]


class _Given:
    """A finder that has found already: passages for one question after the other."""

    reused = 0

    def __init__(self, passages: Sequence[Any]) -> None:
        self._passages = iter(passages)

    def find(self, question: str, budget: int) -> Any:
        return next(self._passages)


def _alone(text: str) -> Collection:
    return Collection([Document("text", text, "utf-8")], [])


def subject(
    open_engine: ask.Open,
    request: ask.Request,
    console: Console,
    interrupts: Interrupts,
    rank_only: bool,
    words: Sequence[str] = (),
) -> Subject:
    """A subject over one loaded model. `rank_only` finds passages and writes no answer (recall); `words` name
    model and method to other commands of longchat."""
    engine: Any = open_engine(*request.opened())

    def answer(document: str, questions: Sequence[str]) -> list[Answer]:
        finders: list[Any] = []

        def make(engine: Engine, documents: Sequence[Document], options: Mapping[str, Any]) -> ask.Finder:
            finders.append(ask.local_finder(engine, documents, options, console))
            return finders[0]

        collection = _alone(document)
        if rank_only:
            make(engine, collection.documents, request.options)
            return [Answer("", _ranked(finders, document, question)) for question in questions]
        answers = []
        asked = replace(request, questions=tuple(questions))
        for got in ask.ask(open_engine, make, collection, asked, lambda text: None, console, interrupts):
            ranked = _ranked(finders, document, got.question)
            answers.append(Answer(got.answer, ranked, got.coverage, got.words))
        return answers

    def forward(method: Method | None = None) -> Forward:
        method = method or engine.method
        cache = engine.decoder.new_cache(method)

        def step(ids: Sequence[int]) -> Any:
            from torch import cat, tensor

            size = method.chunk or len(ids)
            parts = [ids[start : start + size] for start in range(0, len(ids), size)]
            return cat([engine.decoder.forward(tensor(list(p)), cache, logits=len(p)) for p in parts])

        return step

    def find(documents: Sequence[Document], questions: Sequence[str]) -> list[list[Place]]:
        finder = ask.local_finder(engine, documents, request.options, console)
        return [[_place(documents, p) for p in _read_first(finder, question)] for question in questions]

    @cache
    def search() -> Searcher:
        return Searcher(open_engine, request, console, interrupts)

    def converse(method: str | None) -> Conversation:
        name, options = request.opened() if method is None else (method, {})
        chat = open_conversation(open_engine, name, options)
        chat.open()
        return chat

    def typed() -> Typed:
        chances = {name: getattr(request.sampling, name) for name in ("max_tokens", *CHANCES)}
        given = [f"--{name.replace('_', '-')}={value}" for name, value in chances.items()]
        return Typed([*words, f"--method={request.opened()[0]}", *given])

    talk = Bench(converse, typed, lambda: forward(Full()), request.sampling)
    return Subject(engine.count, answer, engine.tokenizer.encode, forward, engine, find, search, talk=talk)


def _read_first(finder: Any, question: str) -> list[Any]:
    """The passages that would be read, the best first, and then others that come near."""
    read = sorted(finder.find(question, READ), key=lambda passage: -passage.score)
    return [*read, *finder.rank(question, RANKED)[len(read) :]]


def _place(documents: Sequence[Document], passage: Any) -> Place:
    where = documents[passage.document].locate(passage.begin, passage.end)
    return where.source, where.line, where.end_line


def _ranked(finders: Sequence[Any], document: str, question: str) -> tuple[str, ...]:
    if not finders:
        return ()
    return tuple(document[p.begin : p.end] for p in finders[0].rank(question, RANKED))
