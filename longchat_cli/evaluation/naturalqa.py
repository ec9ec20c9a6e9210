"""Natural questions whose passages are planted in a book (records with question, answers, passage)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from longchat_cli.errors import UsageError
from longchat_cli.evaluation.cases import Case, Query, Setting
from longchat_cli.evaluation.haystack import load_records, plant
from longchat_cli.evaluation.score import contains


def naturalqa(setting: Setting) -> Iterator[Case]:
    """Twenty passages in one text, a question on each; passages that lack the answer are left out."""
    chosen = setting.rng.sample(with_answers(load_records(setting.data, "passage"), setting.n), setting.n)
    for size in setting.groups(20):
        yield _case(setting, chosen[:size])
        chosen = chosen[size:]


def with_answers(records: Sequence[dict], wanted: int) -> list[dict]:
    """The records whose passage has the answer. Raises UsageError where they are fewer than `wanted`."""
    usable = [record for record in records if contains(record["passage"], record["answers"])]
    if len(usable) < wanted:
        raise UsageError(
            f"there are {len(usable)} natural questions, {wanted} are wanted",
            "",
            "name a file of records with question, answers and passage with --data",
        )
    return usable


def as_query(record: dict, depth: float) -> Query:
    """A record's question on its passage."""
    passage = " ".join(record["passage"].split())
    return Query(record["question"].rstrip("?") + "?", tuple(record["answers"]), passage, depth)


def _case(setting: Setting, records: list[dict]) -> Case:
    passages = [as_query(record, 0.0).evidence for record in records]
    room = setting.length - setting.count(" ".join(passages))
    text, depths = plant(setting.haystack(room), passages, setting.rng)
    queries = (as_query(record, depth) for record, depth in zip(records, depths, strict=True))
    return Case(text, tuple(queries), setting.length)
