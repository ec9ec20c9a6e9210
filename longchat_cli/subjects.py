"""Where a chat turns to something else, by the model's own judgement.

Words that go on with a conversation are likelier behind it than where it is out of sight; words that begin
something else are not. The measure is the part of their pointwise mutual information (Church and Hanks, 1990)
that speaks for the conversation: that it makes some tokens less likely does not speak against it.
"""

from __future__ import annotations

from collections.abc import Sequence

from longchat_cli.engine import Engine

LEAST = 8
"""Tokens of words that can begin a subject: "why?" and "make it shorter" never do."""
LOOKED = 48
"""Tokens that are looked at, the first ones: what a message is about stands there."""
GAIN = 0.42
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
    return sum(max(a - b, 0.0) for a, b in zip(seen, alone, strict=True)) / min(count, LOOKED)
