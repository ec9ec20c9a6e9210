"""Generated English to hide facts in where no book is at hand: evaluation, and self-tests of a model."""

from __future__ import annotations

import random


def words(text: str, separator: str | None = None) -> list[str]:
    """A word list as written in a source file: separated by white space, or by `separator`."""
    return [" ".join(word.split()) for word in text.split(separator)]


_PEOPLE = words(
    """
    the clerk, a sailor, the old judge, my neighbour, the innkeeper, her cousin, the surveyor, a young
    widow, the stranger, his partner, a farmer, the colonel, the housekeeper, our guide, the tall boy, a
    merchant
    """,
    ",",
)
_DOINGS = words(
    """
    walked slowly, spoke of the harvest, waited, laughed, looked back, told a long story, asked for water,
    wrote a letter, closed the window, counted the coins, fell asleep, went home, shook hands, listened
    """,
    ",",
)
_PLACES = words(
    """
    along the canal, near the market, under the oak, at the far end of the hall, by the fire, behind the
    stable, on the hill, across the bridge, in the empty street, beside the mill
    """,
    ",",
)
_TIMES = words(
    """
    that evening, before dawn, after the rain, in the first week of autumn, when the bells had stopped, for
    the third time, without a word, a little later, as the fog lifted, long after supper
    """,
    ",",
)
_FORMS = (
    "{p} {d} {l}, and {q} {e} {t}.",
    "{t}, {p} {d} {l}.",
    "{p}, who had seen {q} {l}, {d} {t}.",
    "Nobody knew why {p} {d} {t}.",
    "It was {l} that {p} {d}; {q} {e}.",
    "If {p} {d} {t}, said {q}, then no one else would.",
    "{p} and {q} {d} {l} {t}.",
)


def prose(characters: int, rng: random.Random) -> str:
    """Grammatical, varied and meaningless English of at least `characters` characters, in paragraphs."""
    parts: list[str] = []
    size = 0
    while size < characters:
        p, q = rng.sample(_PEOPLE, 2)
        d, e = rng.sample(_DOINGS, 2)
        sentence = rng.choice(_FORMS).format(p=p, q=q, d=d, e=e, l=rng.choice(_PLACES), t=rng.choice(_TIMES))
        parts.append(sentence[0].upper() + sentence[1:] + ("\n\n" if rng.random() < 0.12 else " "))
        size += len(parts[-1])
    return "".join(parts)
