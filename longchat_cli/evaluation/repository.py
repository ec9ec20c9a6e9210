"""Questions about Python code, made from its syntax trees: where is X defined, what does Y return.

Right is a citation in the file and the lines of the definition itself; uses, imports and mentions are not.
"""

from __future__ import annotations

import ast
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from longchat_cli import documents
from longchat_cli.documents import Document
from longchat_cli.errors import UsageError
from longchat_cli.evaluation.score import interval

WHERE = (
    "Where is {name} defined?",
    "In which file is {name} defined?",
    "Where can I find the definition of {name}?",
)
RETURNS = (
    "What does {name} return?",
    "What is the return value of {name}?",
    "What does the function {name} return?",
)

Place = tuple[str, int, int]
"""A file, its first and last line."""
Find = Callable[[Sequence[Document], Sequence[str]], Sequence[Sequence[Place]]]
"""The places found for each question, best first."""


@dataclass(frozen=True)
class Definition:
    """A function, method or class that is defined once; `returns` are the lines of its return statements."""

    name: str
    source: str
    line: int
    end_line: int
    returns: tuple[int, ...]


def repository(n: int, seed: int, data: Sequence[Path], find: Find) -> dict[str, Any]:
    """`n` names of each kind of question, asked about the folder in `data`. Raises UsageError.

    Totals: citations first and among all found that point at the definition; for returns also those with
    the return statement.
    """
    folders = [str(path) for path in data if path.is_dir()]
    if not folders:
        raise UsageError("this task needs a folder of Python code", "", "name one with --data")
    texts = documents.read(folders, stdin=None).documents
    known = definitions(texts)
    rng = random.Random(f"{seed}/repository")
    asked = [*_asked(known, WHERE, n, rng), *_asked([d for d in known if d.returns], RETURNS, n, rng)]
    if not asked:
        raise UsageError(
            "there is no definition to ask about", "", "name a folder of Python code with --data"
        )
    found = find(texts, [question for _, question, _ in asked])
    samples = [
        {"kind": kind, "question": question, **asdict(definition), **_judged(definition, places)}
        for (kind, question, definition), places in zip(asked, found, strict=True)
    ]
    return {"samples": samples, "totals": [_total(kind, samples) for kind in ("where", "returns")]}


def definitions(texts: Sequence[Document]) -> list[Definition]:
    """What the Python files among `texts` define under a name that no other definition has."""
    found = [definition for text in texts if text.name.endswith(".py") for definition in _defined(text)]
    counts = Counter(definition.name for definition in found)
    return [d for d in found if counts[d.name] == 1 and len(d.name) > 3 and not d.name.startswith("__")]


def _defined(text: Document) -> Iterator[Definition]:
    try:
        tree = ast.parse(text.text[text.header :])
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            returns = () if isinstance(node, ast.ClassDef) else tuple(_returns(node))
            yield Definition(node.name, text.name, node.lineno, node.end_lineno or node.lineno, returns)


def _returns(function: ast.AST) -> Iterator[int]:
    """Lines of the return statements of a function, not of those inside it."""
    for node in ast.iter_child_nodes(function):
        if isinstance(node, ast.Return) and node.value is not None:
            yield node.lineno
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield from _returns(node)


def _asked(
    known: Sequence[Definition], forms: Sequence[str], n: int, rng: random.Random
) -> Iterator[tuple[str, str, Definition]]:
    kind = "where" if forms is WHERE else "returns"
    for definition in rng.sample(known, min(n, len(known))):
        yield kind, rng.choice(forms).format(name=definition.name), definition


def _judged(definition: Definition, places: Sequence[Place]) -> dict[str, Any]:
    """The rank of the first citation of the definition's first line, of its lines, of a return statement."""

    def rank(lines: Sequence[int]) -> int | None:
        hits = (
            number
            for number, (source, first, last) in enumerate(places, 1)
            if source == definition.source and any(first <= line <= last for line in lines)
        )
        return next(hits, None)

    body = range(definition.line, definition.end_line + 1)
    return {"rank": rank([definition.line]), "body_rank": rank(body), "return_rank": rank(definition.returns)}


def _total(kind: str, samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Right: the definition's first line for `where`, any of its lines for `returns`."""
    own = [sample for sample in samples if sample["kind"] == kind]
    ranks = [sample["rank" if kind == "where" else "body_rank"] for sample in own]
    first = ranks.count(1)
    low, high = interval(first, len(own))
    total = {
        "kind": kind,
        "n": len(own),
        "correct": first,
        "accuracy": first / len(own),
        "low": low,
        "high": high,
    }
    total["found"] = sum(rank is not None for rank in ranks)
    if kind == "returns":
        total["statement_first"] = [sample["return_rank"] for sample in own].count(1)
    return total
