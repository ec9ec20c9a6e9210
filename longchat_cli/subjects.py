"""Where a chat turns to something else, by the model's own judgement.

Words that go on with a conversation are likelier behind it than where it is out of sight; words that begin
something else are not. The measure is the part of their pointwise mutual information (Church and Hanks, 1990)
that speaks for the conversation: that it makes some tokens less likely does not speak against it.
"""

from __future__ import annotations

from longchat_cli.engine import Engine
from longchat_cli.prompt import Prompt

LEAST = 8
"""Tokens of words that can begin a subject: "why?" and "make it shorter" never do."""
LOOKED = 48
"""Tokens that are looked at, the first ones: what a message is about stands there."""
GAIN = 0.4
"""Nats a token that words on the same subject gain at least. Measured (docs/endless.md): hiding what a
follow-up needs is far worse than showing what it does not."""
FIRST = 2.0
"""Nats that the first token gains at most: "Explain" behind "Describe" tells of the form alone."""


def begins(engine: Engine, turn: Prompt) -> bool:
    """Whether a user's `turn` begins a new subject."""
    words = _words(turn)
    return len(words) >= LEAST and gain(engine, turn) < GAIN


def gain(engine: Engine, turn: Prompt) -> float:
    """What the visible conversation adds to the log-probability of each token of the turn's words.

    They are read twice, as far as they are looked at; the engine's state is as before.
    """
    words = _words(turn)
    left = len(words) - LOOKED
    ids = turn.ids[: len(turn.ids) - max(left, 0)]
    mark = engine.snapshot()
    try:
        seen = engine.weigh(ids)
        engine.begin_turn(ids, forget=True)
        alone = engine.weigh(ids)
    finally:
        engine.restore(mark)
    gains = [max(a - b, 0.0) for a, b in zip(seen, alone, strict=True)]  # of ids[1:]
    gains[words.start - 1] = min(gains[words.start - 1], FIRST)
    return sum(gains) / min(len(words), LOOKED)


def _words(turn: Prompt) -> range:
    """Where the words' tokens are."""
    return next((range(r.start, r.stop) for r in turn.regions if r.kind == "text"), range(0))
