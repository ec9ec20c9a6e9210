"""Planted facts: one in a text, look-alikes, differently worded ones, and facts asked in other words."""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from longchat_cli.evaluation.cases import Case, Query, Setting
from longchat_cli.evaluation.haystack import plant
from longchat_cli.evaluation.reworded import REWORDED
from longchat_cli.prose import words

_KEYS = words(
    """
    anchor apron badge balcony barrel basket beacon blanket bottle bracelet bridge broom bucket butter
    button cabin candle canvas carpet castle cellar chimney circus cottage cradle cushion desert dragon
    drawer eagle engine falcon feather fiddle forest fountain garden glacier goblet hammer harbour helmet
    hollow island ivory jacket jungle kettle kitten ladder lantern lemon lizard locket magnet marble meadow
    mirror monkey mountain needle oyster paddle palace parcel pebble pepper pillow pirate planet pocket
    pumpkin puppet quarry rabbit ribbon river rocket saddle sandal shadow shovel silver spider spring statue
    summit sunset tablet temple thimble thunder ticket timber tobacco trumpet tunnel turtle valley vessel
    violet walnut whistle window winter
    """
)
_NAMES = words(
    """
    Alder Bramwell Corbett Dunmore Ellery Farrow Gilroy Hathaway Ingram Jessop Kendrick Lorimer Marlowe
    Norbury Oakley Penrose Quimby Radcliffe Selwyn Thackeray Upton Vickers Wetherby Yardley
    """
)

# (fact, question); {k} is a key word or a name of its own, {v} a number of four to six digits.
VARIED = [
    ("The {k} hotel has room {v} reserved for the inspector.", "Which room does the {k} hotel reserve?"),
    ("To open the {k} safe, one has to dial {v}.", "What must be dialled to open the {k} safe?"),
    ("Flight {v} to {k} was cancelled because of snow.", "Which flight to {k} was cancelled?"),
    ("Professor {k} measured a depth of {v} metres.", "How many metres of depth did Professor {k} measure?"),
    ("The ship {k} carried {v} sacks of rice.", "How many sacks of rice did the ship {k} carry?"),
    ("Captain {k} was paid {v} crowns for the voyage.", "How many crowns was Captain {k} paid?"),
    ("The telephone number of the {k} bakery is {v}.", "What is the telephone number of the {k} bakery?"),
    ("Exactly {v} people live in the town of {k}.", "How many people live in the town of {k}?"),
    ("The {k} library owns {v} books in all.", "How many books does the {k} library own?"),
    ("Lady {k} planted {v} roses in her park.", "How many roses did Lady {k} plant?"),
    ("The password of the {k} laboratory is {v}.", "What is the password of the {k} laboratory?"),
    ("Mount {k} is {v} feet high.", "How many feet high is Mount {k}?"),
    ("The {k} factory made {v} clocks last year.", "How many clocks did the {k} factory make?"),
    ("Doctor {k} wrote {v} letters during the war.", "How many letters did Doctor {k} write during the war?"),
    ("The {k} painting was sold for {v} dollars.", "For how many dollars was the {k} painting sold?"),
    ("The locker of the {k} club bears the number {v}.", "What number does the locker of the {k} club bear?"),
    ("There are {v} steps up to the {k} tower.", "How many steps lead up to the {k} tower?"),
    ("The {k} mine lies under file {v} in the archive.", "Under which file is the {k} mine in the archive?"),
    ("Old {k} bequeathed {v} silver coins to the church.", "How many silver coins did old {k} bequeath?"),
    ("The serial number of the {k} engine is {v}.", "What is the serial number of the {k} engine?"),
    ("The {k} orchard gave {v} pears this summer.", "How many pears did the {k} orchard give?"),
    ("The comet {k} comes back every {v} days.", "After how many days does the comet {k} come back?"),
]

Fact = tuple[str, str, str]
"""A sentence to be planted, its question and its answer."""


def single(setting: Setting) -> Iterator[Case]:
    """One magic number in each text."""
    for size in setting.groups(1):
        yield _case(setting, magic(size, setting.rng))


def lookalike(setting: Setting) -> Iterator[Case]:
    """Ten magic numbers of different keys in one text, each asked."""
    for size in setting.groups(10):
        asked = magic(max(size, setting.per_text or 10), setting.rng)
        yield _case(setting, asked, asking=size)


def values(setting: Setting) -> Iterator[Case]:
    """Four magic numbers of one key in each text, asked for together."""
    for size in setting.groups(1):
        (key,) = _keys(_KEYS, size, setting.rng)
        facts = [_number(key, value) for value in _numbers(4, setting.rng)]
        case = _case(setting, facts, asking=1)
        question = f"What are all the special magic numbers for {key} mentioned in the provided text?"
        references = tuple(answer for _, _, answer in facts)
        yield replace(
            case, queries=(replace(case.queries[0], question=question, references=references, every=True),)
        )


def uuids(setting: Setting) -> Iterator[Case]:
    """One magic value of 32 hexadecimal digits in each text."""
    for size in setting.groups(1):
        yield _case(setting, magic(size, setting.rng, _uuids))


def digits(setting: Setting) -> Iterator[Case]:
    """One magic number of 64 digits in each text: an answer too long to be kept by luck."""
    for size in setting.groups(1):
        yield _case(setting, magic(size, setting.rng, _long_numbers))


def varied(setting: Setting) -> Iterator[Case]:
    """Twenty facts in one text, each in words of its own."""
    for size in setting.groups(20):
        yield _case(setting, worded(size, setting.rng))


def worded(size: int, rng: random.Random) -> list[Fact]:
    """Facts of different keys, in words of their own as far as VARIED goes."""
    templates = [VARIED[i % len(VARIED)] for i in rng.sample(range(max(size, len(VARIED))), size)]
    keys = _keys(_NAMES, size, rng)
    values = rng.sample(range(1000, 1_000_000), size)
    return [
        (fact.format(k=k, v=v), question.format(k=k), str(v))
        for (fact, question), k, v in zip(templates, keys, values, strict=True)
    ]


def reworded(setting: Setting) -> Iterator[Case]:
    """Ten facts in one text; the questions share no content word with them."""
    pool: list = []
    for size in setting.groups(10):
        if len(pool) < size:
            pool = setting.rng.sample(REWORDED, len(REWORDED))
        yield _case(setting, pool[:size])
        pool = pool[size:]


def _numbers(size: int, rng: random.Random) -> list[str]:
    return [str(value) for value in rng.sample(range(1_000_000, 10_000_000), size)]


def _long_numbers(size: int, rng: random.Random) -> list[str]:
    return [str(rng.randrange(10**63, 10**64)) for _ in range(size)]


def _uuids(size: int, rng: random.Random) -> list[str]:
    # A digit first: small models drop a letter there whatever they see.
    made = (str(uuid.UUID(int=rng.getrandbits(128), version=4)) for _ in range(size))
    return [f"{rng.randint(1, 9)}{value[1:]}" for value in made]


def magic(
    size: int, rng: random.Random, values: Callable[[int, random.Random], list[str]] = _numbers
) -> list[Fact]:
    """Facts that differ in key and value alone."""
    keys = _keys(_KEYS, size, rng)
    return [_number(key, value) for key, value in zip(keys, values(size, rng), strict=True)]


def _number(key: str, value: str) -> Fact:
    """A fact in RULER's words."""
    return (
        f"One of the special magic numbers for {key} is: {value}.",
        f"What is the special magic number for {key} mentioned in the provided text?",
        value,
    )


def keys(size: int, rng: random.Random) -> list[str]:
    """Different keys for magic numbers."""
    return _keys(_KEYS, size, rng)


def _keys(words: list[str], size: int, rng: random.Random) -> list[str]:
    """Different keys: single words, and pairs of them when more are needed."""
    if size <= len(words):
        return rng.sample(words, size)
    pairs = rng.sample(range(len(words) ** 2), size)
    return [f"{words[pair // len(words)]}-{words[pair % len(words)]}" for pair in pairs]


def _case(setting: Setting, facts: Sequence[Fact], asking: int | None = None) -> Case:
    """A text of the setting's length holding all `facts`, with questions on the first `asking` of them."""
    sentences = [fact for fact, _, _ in facts]
    room = setting.length - setting.count(" ".join(sentences))
    text, depths = plant(setting.haystack(room), sentences, setting.rng)
    queries = [
        Query(question, (answer,), fact, depth)
        for (fact, question, answer), depth in zip(facts, depths, strict=True)
    ]
    return Case(text, tuple(queries[:asking]), setting.length)
