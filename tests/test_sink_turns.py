"""Attention sinks of a chat: whole turns are forgotten, pinned ones stay; against the oracle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import oracle
import pytest
import torch
from test_methods import assert_close, layer_of, rope_of, run, splits, tensors

from longchat_cli import state
from longchat_cli.attention import method_class
from longchat_cli.attention.layer import Cache
from longchat_cli.attention.sink import SinkLayer
from longchat_cli.engine import EngineInfo
from longchat_cli.errors import ContextOverflow, UsageError
from longchat_cli.local import LocalEngine, with_method
from longchat_cli.models.lean import LeanDecoder
from longchat_cli.prompt import Message
from longchat_cli.tokens import Tokenizer

LENGTH = 60
TURNS = [3, 9, 20, 24, 50]


Pins = Sequence[tuple[int, int]]


def kept(t: int, sinks: int, window: int, turns: list[int], pins: Pins = ()) -> list[int]:
    """What row t sees, written down anew: a turn goes when its first token leaves the window, unless less
    than half a window is left behind it."""
    left = max(t + 1 - window, 0)
    later = [turn for turn in turns if turn >= left]
    if left and later and later[0] - left <= window // 2:
        left = later[0]
    stay = [(0, sinks), *pins]
    return [j for j in range(t + 1) if j >= left or any(a <= j < b for a, b in stay)]


def keys(sinks: int, window: int, turns: list[int], pins: Pins = ()) -> list:
    rows = [kept(t, sinks, window, turns, pins) for t in range(LENGTH)]
    return [[(j, place, len(row) - 1) for place, j in enumerate(row)] for row in rows]


def layer(sinks: int, window: int, turn: oracle.Turn, evict: str = "turns") -> SinkLayer:
    made = layer_of("sink", {"sinks": sinks, "window": window, "evict": evict}, turn)
    assert isinstance(made, SinkLayer)
    return made


@pytest.mark.parametrize(("sinks", "window"), [(3, 16), (0, 16), (3, 9), (5, 40), (3, 2), (3, 1)])
def test_whole_turns_are_forgotten(sinks: int, window: int) -> None:
    turn = oracle.Turn(8)
    q, k, v = tensors(4, 2, 16, LENGTH)
    wanted = oracle.dense(q, k, v, turn, 0.25, keys(sinks, window, TURNS))
    for chunks, decode in splits(LENGTH, 15):
        told = layer(sinks, window, turn)
        for begin in TURNS:
            told.turns = (*told.turns, begin)
        assert_close(run(told, q, k, v, turn, chunks, decode), wanted)
        # As the next query at LENGTH will: itself and what is kept of the others.
        assert told.visible() == min(LENGTH, len(kept(LENGTH, sinks, window, TURNS)))


def test_a_whole_turn_differs_from_its_tokens() -> None:
    """So the test above can fail."""
    q, k, v = tensors(4, 2, 16, LENGTH)
    turn = oracle.Turn(8)
    a, b = (oracle.dense(q, k, v, turn, 0.25, keys(3, 16, turns)) for turns in (TURNS, []))
    assert (a - b).abs().max() > 0.1
    assert keys(3, 16, []) == oracle.sink_keys(LENGTH, 3, 16)


def test_turns_are_told_as_they_come() -> None:
    """One by one, ahead of what is read, as an engine does; those that are out of sight are not kept."""
    turn = oracle.Turn(8)
    q, k, v = tensors(4, 2, 16, LENGTH)
    wanted = oracle.dense(q, k, v, turn, 0.25, keys(3, 16, TURNS))
    told, out, at = layer(3, 16, turn), [], 0
    rotated_q, rotated_k = (turn(x, range(LENGTH)).float() for x in (q, k))
    for begin, end in zip(TURNS, [*TURNS[1:], LENGTH], strict=True):
        told.begin_turn(begin)
        while at < end:
            rows = slice(at, min(at + 7, end))
            out.append(told.attend(rotated_q[:, rows], rotated_k[:, rows], v[:, rows], 0.25, False))
            at = rows.stop
    assert_close(torch.cat(out, dim=1), wanted)
    assert told.turns == (50,)
    for at in range(60, 6000, 10):  # thousands of turns: nothing grows
        told.begin_turn(at)
        told.attend(q[:, :10], k[:, :10], v[:, :10], 0.25, False)
    assert len(told.turns) <= 3 and told.seen == 6000


@pytest.mark.parametrize("evict", ["tokens", "turns"])
@pytest.mark.parametrize("pins", [[(9, 20)], [(9, 14), (24, 31)], [(2, 6), (20, 24)]])
def test_what_is_pinned_stays(evict: str, pins: Pins) -> None:
    turn = oracle.Turn(8)
    q, k, v = tensors(4, 2, 16, LENGTH)
    turns = TURNS if evict == "turns" else []
    wanted = oracle.dense(q, k, v, turn, 0.25, keys(3, 16, turns, pins))
    for chunks in ([8] * 7 + [4], [12, 16, 22, 10], [1] * LENGTH):
        told, out, at = layer(3, 16, turn, evict), [], 0
        told.turns = tuple(turns)
        rotated_q, rotated_k = (turn(x, range(LENGTH)).float() for x in (q, k))
        for size in chunks:
            rows = slice(at, at + size)
            out.append(told.attend(rotated_q[:, rows], rotated_k[:, rows], v[:, rows], 0.25, False))
            at += size
            for start, stop in pins:
                if start < at <= stop + 7:  # for some before all of it is read
                    assert told.pin(start, stop)
        assert_close(torch.cat(out, dim=1), wanted)
        assert told.pinned() == sum(stop - max(start, 3) for start, stop in pins)
        for start, _ in pins:
            told.unpin(start)
        assert told.pinned() == 0


def test_what_is_gone_cannot_be_pinned() -> None:
    turn = oracle.Turn(8)
    q, k, v = tensors(4, 2, 16, LENGTH)
    told = layer(3, 16, turn)
    run(told, q, k, v, turn, [20, 30, 10])
    assert not told.pin(9, 12) and told.pin(0, 3) and told.pinned() == 0
    assert not layer_of("window", {"window": 9}, turn).pin(0, 3)
    assert not layer_of("lm-infinite", {"window": 9}, turn).pin(0, 3)


def test_marks_and_files_hold_turns_and_pins(tmp_path: Path) -> None:
    turn = oracle.Turn(8)
    method = method_class("sink").build({"sinks": 3, "window": 16, "evict": "turns"})
    cache = Cache(method, [method.layer(0, 1, rope_of(turn))])
    q, k, v = tensors(4, 2, 16, LENGTH)
    rotated_q, rotated_k = (turn(x, range(LENGTH)).float() for x in (q, k))

    def read(cache: Cache, begin: int, end: int) -> torch.Tensor:
        rows = slice(begin, end)
        out = cache.layers[0].attend(rotated_q[:, rows], rotated_k[:, rows], v[:, rows], 0.25, False)  # type: ignore[union-attr]
        cache.position = end
        return out

    for begin in (3, 9, 20):
        cache.begin_turn(begin)
    read(cache, 0, 21)
    assert cache.pin(9, 20)
    mark = cache.snapshot()
    state.save(tmp_path / "state", cache, {}, {})
    cache.begin_turn(40)
    wanted = [read(cache, 21, 45), read(cache, 45, 60)]
    other = Cache(method, [method.layer(0, 1, rope_of(turn))])
    state.load(tmp_path / "state", other, {})
    cache.restore(mark)
    for again in (cache, other):
        again.begin_turn(40)
        assert torch.equal(read(again, 21, 45), wanted[0]) and torch.equal(read(again, 45, 60), wanted[1])
        assert again.pinned() == 11 and again.recent() == 45


def test_an_engine_knows_where_turns_begin(tiny_model: Callable[..., Path]) -> None:
    """What closes an answer belongs to the turn before, so that what is visible begins with a text."""
    path = tiny_model("llama")
    method = method_class("sink").build({"sinks": 8, "window": 60, "evict": "turns"})
    info = EngineInfo("tiny", 256, "sink", "cpu", "float32", "0")
    decoder = LeanDecoder.from_dir(path, dtype=torch.float32)
    engine = LocalEngine(decoder, Tokenizer.from_dir(path), method, info)
    turn = engine.render_turn(Message.of("user", "hello there")).ids
    engine.prefill(list(range(20, 28)))
    engine.begin_turn(list(range(30, 40)))  # the first turn: nothing to close
    engine.prefill(list(range(30, 40)))
    for _ in range(6):
        engine.begin_turn(turn)
        engine.prefill(turn)
    plain = engine.render_turn(Message.of("user", "other words")).ids
    closes = next(i for i, (a, b) in enumerate(zip(turn, plain, strict=False)) if a != b)
    assert 0 < closes < len(turn)
    starts = [18 + number * len(turn) + closes for number in range(6)]
    assert engine.coverage().recent in starts
    assert engine.coverage().recent >= engine.coverage().seen + 1 - 60
    # The last turn but one is pinned with what closes it, and what the other methods say to that.
    assert engine.pin(18 + 4 * len(turn), 18 + 5 * len(turn))
    for _ in range(6):
        engine.begin_turn(turn)
        engine.prefill(turn)
    assert engine.cache.pinned() == len(turn)
    assert engine.coverage().visible == 8 + len(turn) + engine.coverage().seen + 1 - engine.coverage().recent
    assert not engine.pin(18, 18 + len(turn))  # it is gone
    with pytest.raises(ContextOverflow, match="pinned"):
        engine.pin(18, 400)
    assert engine.pin(18 + 4 * len(turn), 18 + 5 * len(turn), on=False) and not engine.cache.pinned()
    assert with_method(engine, "full").pin(0, 9)


def test_what_goes_at_a_time_has_two_names() -> None:
    with pytest.raises(UsageError, match="evict"):
        layer_of("sink", {"evict": "words"}, None)
