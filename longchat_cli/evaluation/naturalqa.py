"""Natural questions whose passages are planted in a book (records with question, answers, passage)."""

from __future__ import annotations

from collections.abc import Iterator

from longchat_cli.errors import UsageError
from longchat_cli.evaluation.cases import Case, Query, Setting
from longchat_cli.evaluation.haystack import load_records, plant
from longchat_cli.evaluation.score import contains


def naturalqa(setting: Setting) -> Iterator[Case]:
    """Twenty passages in one text, a question on each; passages that lack the answer are left out."""
    records = [r for r in load_records(setting.data, "passage") if contains(r["passage"], r["answers"])]
    if len(records) < setting.n:
        raise UsageError(
            f"there are {len(records)} natural questions, {setting.n} are wanted",
            "",
            "name a file of records with question, answers and passage with --data",
        )
    chosen = setting.rng.sample(records, setting.n)
    for size in setting.groups(20):
        yield _case(setting, chosen[:size])
        chosen = chosen[size:]


def _case(setting: Setting, records: list[dict]) -> Case:
    passages = [" ".join(record["passage"].split()) for record in records]
    room = setting.length - setting.count(" ".join(passages))
    text, depths = plant(setting.haystack(room), passages, setting.rng)
    queries = (
        Query(record["question"].rstrip("?") + "?", tuple(record["answers"]), passage, depth)
        for record, passage, depth in zip(records, passages, depths, strict=True)
    )
    return Case(text, tuple(queries), setting.length)
