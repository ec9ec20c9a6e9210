"""Where a chat turns to something else, by the model's own judgement.

Words that go on with a conversation are likelier behind it than where it is out of sight; words that begin
something else are not. The measure is the part of their pointwise mutual information (Church and Hanks, 1990)
that speaks for the conversation, a token's share of it bounded, so that one name said again does not decide.
"""

from __future__ import annotations

from collections.abc import Sequence

from longchat_cli.engine import Engine

LEAST = 8
"""Tokens of words that can begin a subject: "why?" and "make it shorter" never do."""
LOOKED = 64
"""Tokens that are looked at, the first ones."""
MOST = 4.0
"""What a token can say for the conversation at most, in nats."""
GAIN = 0.3
"""Nats a token that words on the same subject gain at least. Measured (docs/endless.md): hiding what a
follow-up needs is far worse than showing what it does not."""


def begins(engine: Engine, ids: Sequence[int], count: int) -> bool:
    """Whether a user's turn, `ids` with `count` tokens of words among them, begins a new subject."""
    return count >= LEAST and gain(engine, ids, count) < GAIN


def gain(engine: Engine, ids: Sequence[int], count: int) -> float:
    """What the visible conversation adds to the log-probability of each token of the words.

    They are read twice, as far as they are looked at; the engine's state is as before.
    """
    ids = ids[: len(ids) - max(count - LOOKED, 0)]
    mark = engine.snapshot()
    try:
        seen = engine.weigh(ids)
        engine.begin_turn(ids, forget=True)
        alone = engine.weigh(ids)
    finally:
        engine.restore(mark)
    gains = (min(max(a - b, 0.0), MOST) for a, b in zip(seen, alone, strict=True))
    return sum(gains) / min(count, LOOKED)
