"""How many threads decode: all there are, or one while other programs keep the processors busy.

The threads of a step wait for one another some 200 times. Where one of them waits for a processor, so do all:
on two processors that three other programs want, a step by two threads took three to eight times as long as
one by a single thread. What a step computes does not depend on it.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator

WINDOW = 8
"""Steps that are timed together."""
BUSY = 0.8
"""The threads of a step spin while they wait: with less than this share of the processor time that they could
have had, somebody else had it."""
REST = 8
"""Windows before the other number of threads is tried again."""
HOPELESS = 3
"""A step that takes so many times as long as before ends a trial at once."""


class Pace:
    """Chooses the threads of the next step by the time that the last ones took."""

    def __init__(self) -> None:
        self.alone = False
        self._trying = False
        self._other = 0.0  # seconds of a step with the other number of threads, when that was last in use
        self._rest = 0
        self._seconds: list[float] = []
        self._had = 0.0  # processor seconds

    @contextlib.contextmanager
    def step(self, most: int) -> Iterator[int]:
        """Time a step; the number of threads, up to `most`, that it is to take."""
        threads = 1 if self.alone else most
        had, begun = time.process_time(), time.perf_counter()
        yield threads
        self.took(time.perf_counter() - begun, time.process_time() - had, threads, most)

    def took(self, seconds: float, had: float, threads: int, most: int) -> None:
        """A step of `threads` threads took `seconds`, and `had` seconds of processors."""
        if most == 1:
            return
        self._seconds.append(seconds)
        self._had += had
        if len(self._seconds) < WINDOW and not (self._trying and seconds > HOPELESS * self._other):
            return
        busy = self._had < BUSY * threads * sum(self._seconds)
        self._decide(statistics.median(self._seconds), busy)
        self._seconds, self._had = [], 0.0

    def _decide(self, seconds: float, busy: bool) -> None:
        if self._trying:
            self._trying, self._rest = False, REST
            if seconds >= self._other:
                self.alone = not self.alone
        elif self._rest:
            self._rest -= 1
        elif self.alone or busy:
            self._other, self.alone, self._trying = seconds, not self.alone, True
