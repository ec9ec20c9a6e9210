"""Line retrieval in the form of LongEval: `line torpid-kid: REGISTER_CONTENT is <24169>`."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterator

from longchat_cli.errors import UsageError
from longchat_cli.evaluation.cases import Case, Query, Setting
from longchat_cli.evaluation.haystack import load_records

_ADJECTIVES = [
    "amber",
    "brisk",
    "calm",
    "daring",
    "eager",
    "faint",
    "gentle",
    "hasty",
    "icy",
    "jolly",
    "keen",
    "lively",
    "mellow",
    "narrow",
    "odd",
    "plain",
    "quaint",
    "rapid",
    "shy",
    "tidy",
    "upbeat",
    "vivid",
    "wary",
    "young",
    "zesty",
    "bitter",
    "cosy",
    "dusty",
    "early",
    "fancy",
    "grim",
    "humble",
    "idle",
    "lean",
    "merry",
    "noble",
]
_NOUNS = [
    "anvil",
    "badger",
    "cactus",
    "donkey",
    "ember",
    "ferret",
    "gravel",
    "hedge",
    "inkwell",
    "jigsaw",
    "kiosk",
    "lobster",
    "muffin",
    "nutmeg",
    "otter",
    "parsnip",
    "quiver",
    "raisin",
    "sponge",
    "teacup",
    "urchin",
    "velour",
    "wombat",
    "yoghurt",
    "zipper",
    "acrobat",
    "biscuit",
    "compass",
    "dolphin",
    "elbow",
    "fender",
    "gondola",
    "hammock",
    "iceberg",
    "juniper",
    "knapsack",
    "lettuce",
    "mitten",
    "napkin",
    "orchid",
    "pretzel",
    "racket",
    "sardine",
    "toffee",
    "vulture",
]
_INTRODUCTION = "Below is a record of lines. Each gives the REGISTER_CONTENT of one line index.\n\n"
_QUESTION = "What is the <REGISTER_CONTENT> in line {key}? I need the number."
_RECORD_START, _RECORD_END = "Now the record start:\n\n", "\n\nNow the record is over."


def lines(setting: Setting) -> Iterator[Case]:
    """One line of many is asked for. With LongEval files in `data`: their cases within a quarter of the
    length. Raises UsageError when they have none."""
    records = load_records(setting.data, "correct_line")
    if not records:
        yield from (_generate(setting) for _ in range(setting.n))
        return
    cases = [_from_record(record, setting.length) for record in records]
    sizes = [setting.count(case.document) for case in cases]
    near = [case for case, size in zip(cases, sizes, strict=True) if 0.8 < size / setting.length < 1.25]
    if not near:
        why = f"the files have cases of {min(sizes):,} to {max(sizes):,} tokens"
        raise UsageError(f"no case has about {setting.length:,} tokens", why, "choose other lengths")
    yield from near[: setting.n]


def record(size: int, n: int, rng: random.Random) -> tuple[str, list[Query]]:
    """A record of `size` lines and a query on each of `n` of them."""
    rows = [_line(key, rng) for key in _keys(size, rng)]
    return "".join(rows).strip(), [_query(row, 0.0) for row in rng.sample(rows, n)]


def _query(row: str, depth: float) -> Query:
    key, value = row.split()[1].rstrip(":"), row.split("<")[1].rstrip(">\n")
    return Query(_QUESTION.format(key=key), (value,), row.strip(), depth)


def _generate(setting: Setting) -> Case:
    rng, count = setting.rng, setting.count
    each = count("".join(_line(key, rng) for key in _keys(50, rng))) / 50
    room = setting.length - count(_INTRODUCTION)
    rows = [_line(key, rng) for key in _keys(max(int(room / each), 1), rng)]
    fitting = bisect_right(range(len(rows) + 1), room, key=lambda size: count("".join(rows[:size]))) - 1
    rows = rows[: max(fitting, 1)]
    place = rng.randrange(len(rows))
    query = _query(rows[place], place / len(rows))
    return Case(_INTRODUCTION + "".join(rows), (query,), setting.length)


def _keys(size: int, rng: random.Random) -> list[str]:
    """Different line indices: adjective-noun, with more adjectives in front when those run out."""
    stems = [f"{adjective}-{noun}" for adjective in _ADJECTIVES for noun in _NOUNS]
    while len(stems) < size:
        stems = [f"{adjective}-{stem}" for adjective in _ADJECTIVES for stem in stems]
    return rng.sample(stems, size)


def _line(key: str, rng: random.Random) -> str:
    return f"line {key}: REGISTER_CONTENT is <{rng.randint(1, 50_000)}>\n"


def _from_record(record: dict, length: int) -> Case:
    document = record["prompt"].partition(_RECORD_START)[2].partition(_RECORD_END)[0]
    evidence = record["correct_line"].strip()
    query = Query(
        _QUESTION.format(key=record["random_idx"][0]),
        (str(record["expected_number"]),),
        evidence,
        document.find(evidence) / max(len(document), 1),
    )
    return Case(document, (query,), length)
