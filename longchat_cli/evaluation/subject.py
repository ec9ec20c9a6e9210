"""What `longchat eval` evaluates: the engine and the `ask` flow as users run them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from longchat_cli import ask
from longchat_cli.attention.layer import Method
from longchat_cli.documents import Collection, Document
from longchat_cli.engine import Engine
from longchat_cli.evaluation.perplexity import Forward
from longchat_cli.evaluation.repository import Place
from longchat_cli.evaluation.run import Answer, Subject
from longchat_cli.terminal import Console, Interrupts

READ = 4096
"""Tokens of passages that are read for one question at most."""
RANKED = 8
"""Passages looked at to say where the finder put the right one; fewer are read."""


def subject(
    open_engine: ask.Open, request: ask.Request, console: Console, interrupts: Interrupts, rank_only: bool
) -> Subject:
    """A subject over one loaded model. `rank_only` finds passages and writes no answer (recall)."""
    engine: Any = open_engine(*request.opened())

    def answer(document: str, questions: Sequence[str]) -> list[Answer]:
        finders: list[Any] = []

        def make(engine: Engine, documents: Sequence[Document], options: Mapping[str, Any]) -> ask.Finder:
            finders.append(ask.local_finder(engine, documents, options, console))
            return finders[0]

        collection = Collection([Document("text", document, "utf-8")], [])
        if rank_only:
            make(engine, collection.documents, request.options)
            return [Answer("", _ranked(finders, document, question)) for question in questions]
        answers = []
        asked = replace(request, questions=tuple(questions))
        for got in ask.ask(open_engine, make, collection, asked, lambda text: None, console, interrupts):
            answers.append(Answer(got.answer, _ranked(finders, document, got.question), got.coverage))
        return answers

    def forward() -> Forward:
        method: Method = engine.method
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

    return Subject(engine.count, answer, engine.tokenizer.encode, forward, engine, find)


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
