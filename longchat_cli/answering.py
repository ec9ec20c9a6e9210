"""How an answer of a chat is made: the room that is left for it, and thoughts, told from it and cut short."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from longchat_cli import attention
from longchat_cli.engine import Engine, Piece
from longchat_cli.errors import ContextOverflow
from longchat_cli.sampling import Sampling
from longchat_cli.thinking import Thoughts


def answer(
    engine: Engine,
    sampling: Sampling,
    think: int | None = None,
    said: Sequence[Sequence[int]] = (),
    cancel: Callable[[], bool] | None = None,
) -> Iterator[Piece]:
    """Generate behind what `engine` has read: pieces of thoughts, `think` tokens of them at most, and of the
    answer. `said`: the tokens of earlier answers."""
    thinking, left = engine.thinking, sampling.max_tokens
    if thinking is None:
        yield from engine.generate(_within_room(engine, sampling), cancel, said)
        return
    # What thoughts begin and end with is said again each time.
    said = [[id for id in ids if id not in (thinking.begin, thinking.end)] for ids in said]
    sampling = replace(sampling, start_penalty=0)
    thoughts, most = Thoughts(thinking), think
    if thinking.dropped and thinking.opened:  # which no earlier turn has: it is not part of the user's
        yield _put(engine, thinking.opened)
    if most == 0:
        yield _put(engine, thinking.closing if thoughts.inside else thinking.skipping)
        thoughts.close()
        most = None
    while True:
        for piece in engine.generate(_within_room(engine, replace(sampling, max_tokens=left)), cancel, said):
            left -= len(piece.ids)
            yield from thoughts.feed(piece)
            too_long = most is not None and thoughts.inside and thoughts.count >= most
            if too_long and left and not piece.stop:
                break
        else:
            return
        yield _put(engine, thinking.closing)
        thoughts.close()


def require_room(engine: Engine, new: int, seen: int | None = None) -> None:
    """For `new` tokens behind those seen, or behind `seen`. Raises ContextOverflow."""
    seen = engine.coverage().seen if seen is None else seen
    if _room(engine, seen) <= new:
        info = engine.info
        raise ContextOverflow(
            f"{info.method} is at its end",
            f"{seen:,} tokens so far and {new:,} new ones do not fit the {info.window:,} of {info.model}",
            "start anew (/new), or use --method sink, which goes on without end",
        )


def _put(engine: Engine, ids: Sequence[int]) -> Piece:
    """Tokens that the model did not write itself, as part of its thoughts."""
    engine.prefill(ids)
    return Piece("", tuple(ids), thought=True)


def _within_room(engine: Engine, sampling: Sampling) -> Sampling:
    room = _room(engine, engine.coverage().seen)
    return replace(sampling, max_tokens=int(max(min(sampling.max_tokens, room), 1)))


def _room(engine: Engine, seen: int) -> float:
    """Tokens that still fit; infinite for methods that forget."""
    info = engine.info
    return float("inf") if attention.method_class(info.method).unlimited else info.window - seen
