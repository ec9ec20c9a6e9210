"""How many threads decode, by simulated times of steps."""

from __future__ import annotations

from collections.abc import Callable

from longchat_cli.models.pace import REST, WINDOW, Pace

ALONE = 10.0
"""Milliseconds of a step by one thread that nobody disturbs; two take 6."""


def quiet(threads: int) -> tuple[float, float]:
    """Seconds of a step, and of processors."""
    seconds = {1: ALONE, 2: 6.0}[threads] / 1000
    return seconds, seconds * threads


def crowded(threads: int) -> tuple[float, float]:
    """Two other programs on two processors."""
    return (0.02, 0.01) if threads == 1 else (0.1, 0.1)


def run(pace: Pace, steps: int, times: Callable[[int], tuple[float, float]]) -> list[int]:
    """The threads of every step."""
    taken = []
    for _ in range(steps):
        taken.append(1 if pace.alone else 2)
        pace.took(*times(taken[-1]), taken[-1], 2)
    return taken


def test_all_threads_decode_where_nobody_else_wants_the_processors():
    assert set(run(Pace(), 1000, quiet)) == {2}


def test_one_thread_decodes_while_others_want_them():
    taken = run(Pace(), 1000, crowded)
    assert taken[:WINDOW] == [2] * WINDOW
    assert taken.count(2) < 50


def test_all_threads_are_back_when_the_others_have_gone():
    pace = Pace()
    run(pace, 200, crowded)
    assert pace.alone
    taken = run(pace, 1000, quiet)
    assert set(taken[(REST + 3) * WINDOW :]) == {2}


def test_one_thread_is_left_again_where_it_is_no_faster():
    """Waiting for something else than a processor, for a disk perhaps."""

    def waiting(threads: int) -> tuple[float, float]:
        return (0.02, 0.002) if threads == 2 else (0.03, 0.002)

    taken = run(Pace(), 1000, waiting)
    assert taken.count(1) < 1000 / REST + WINDOW


def test_one_processor_is_all_there_is():
    pace = Pace()
    for _ in range(100):
        with pace.step(1) as threads:
            assert threads == 1
    assert not pace.alone
