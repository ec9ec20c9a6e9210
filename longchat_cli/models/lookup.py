"""Prompt-lookup decoding: several tokens a step where the answer repeats what was read (A. Saxena, 2023).

What followed the last occurrence of the newest three tokens is read along with the next one. A row of a step
gets the logits it would have got alone, bit for bit, and the tokens that were not chosen after all are taken
back: the answer is the one of plain decoding, greedy or sampled. It serves only where that holds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from longchat_cli.attention.layer import Cache, Method
from longchat_cli.kernels import native
from longchat_cli.models.lean import SLIDING, LeanDecoder
from longchat_cli.models.native import NativeProducts

GRAM = 3
"""Tokens that must have occurred before."""
MOST = native.ROWS - 1
"""Most tokens read ahead of the next one."""
REST = 24
"""Steps without reading ahead after GUESSES in a row whose first token was not chosen."""
GUESSES = 4


class Lookup:
    """Decodes from a cache that may be some tokens ahead of what was chosen, until `settle`."""

    about = "tokens that repeat what was read are read ahead and checked (prompt lookup)"

    def __init__(self, decoder: Any, ids: Callable[[], Sequence[int]]) -> None:
        """`ids()`: every token that was read and chosen; the same object as long as it only grows."""
        self.decoder, self.ids = decoder, ids
        self.ahead: deque[tuple[int, Tensor]] = deque()  # read, not chosen yet: token, logits behind it
        self.grams: dict[tuple[int, ...], int] = {}  # the last place behind every three tokens
        self._indexed: tuple[Any, int] = None, 0  # whose, and how many tokens
        self.missed = self.pause = 0
        self.steps = self.read = 0  # forwards that read ahead, and tokens of them that were chosen

    def feed(self, token: int, cache: Cache) -> Tensor | None:
        """Logits float32 [vocab] behind `token`; None where nothing suggests what comes after it."""
        if self.ahead and self.ahead[0][0] == token:
            self.read += 1
            self.missed = 0
            return self.ahead.popleft()[1]
        self.settle(cache)
        guess = self._guess(token)
        if not guess:
            return None
        mark = cache.snapshot()
        cache.decoding = True
        try:
            rows = self.decoder.forward(torch.tensor([token, *guess]), cache, logits=1 + len(guess))
        except BaseException:
            cache.restore(mark)
            raise
        self.ahead.extend(zip(guess, rows[1:], strict=True))
        self.steps += 1
        self.missed += 1
        return rows[0]

    def settle(self, cache: Cache) -> None:
        """Take back what was read and not chosen."""
        if self.ahead:
            cache.rewind(cache.position - len(self.ahead))
            self.ahead.clear()

    def forget(self) -> None:
        """Begin from a cache again."""
        self.ahead.clear()

    def bytes(self) -> int:
        """Bytes held beside the cache."""
        return 0

    def _guess(self, token: int) -> list[int]:
        """What followed the newest three tokens the last time."""
        ids = self.ids()
        self._index(ids)
        place = self.grams.get((*ids[len(ids) - GRAM + 1 :], token))
        if place is None or self._tired():
            return []
        return list(ids[place : place + MOST])

    def _tired(self) -> bool:
        """Whether guesses went wrong of late."""
        if self.missed >= GUESSES:
            self.missed, self.pause = 0, REST
        self.pause = max(self.pause - 1, 0)
        return self.pause > 0

    def _index(self, ids: Sequence[int]) -> None:
        whose, known = self._indexed
        if whose is not ids or known > len(ids):
            self.grams, known = {}, 0
        for end in range(max(known + 1, GRAM), len(ids) + 1):
            self.grams[tuple(ids[end - GRAM : end])] = end
        self._indexed = ids, len(ids)


def serves(decoder: Any, method: Method) -> bool:
    """Whether a step of several rows gives each what it would get alone, to the last bit."""
    return (
        method.exact_rows
        and method.kv_dtype in ("auto", "bf16")
        and isinstance(decoder, LeanDecoder)
        and isinstance(decoder.products, NativeProducts)
        and SLIDING not in decoder.kinds  # sums over a window are cut where it begins, which moves
    )
