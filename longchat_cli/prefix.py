"""Prefix caching on disk: a text that begins as an earlier one did is read from where they part.

At fixed places of a text, its boundaries, the model's state is kept: what it grew by since the boundary
before as a page, everything else as its tip. Both are named by a chain of hashes over the token ids up to the
boundary. Where a method's state only grows (full attention), its pages are the state and a tip weighs
nothing; where it is bounded (attention sinks), tips are the state but for what never changes, and most tips
are thinned out. A conversation has a boundary at the end of each turn behind its opening.
"""

from __future__ import annotations

import array
import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from longchat_cli import state
from longchat_cli.attention.layer import Cache
from longchat_cli.errors import BadInput
from longchat_cli.pages import Store, digest

HEAVY = 1 / 8
"""A tip that weighs more than this share of its page is thinned out ..."""
KEPT = 16
"""... to every KEPT-th boundary, the last two (a longer text may part between them) and the text's end."""


class Prefix:
    """The boundaries of one text: after every `page` tokens, and its end.

    `identity` is everything but the tokens that decides a state, as JSON values.
    """

    def __init__(
        self, store: Store, identity: Mapping[str, Any], ids: Sequence[int], page: int, device: torch.device
    ) -> None:
        self.store, self.device = store, device
        self.ends = [*range(page, len(ids), page), len(ids)]
        self._names: list[str] = []
        name = digest("", state.FORMAT, dict(identity))
        for begin, end in zip([0, *self.ends], self.ends, strict=False):
            name = digest(name, array.array("I", ids[begin:end]).tobytes())
            self._names.append(name)
        self._pages: dict[str, list[int]] = {}  # what only grew, by its path, and the boundaries that hold it
        self.text = len(self.ends)
        """Boundaries of the text; those of turns are behind."""

    def turn(self, ids: Sequence[int], subject: bool = False) -> Prefix:
        """The same and one boundary more: where a turn of `ids` ends, which begins a new `subject` or not.

        Part of it was decoded, and not read: what is kept there is never taken for a text's.
        """
        longer = copy.copy(self)
        longer.ends = [*self.ends, self.ends[-1] + len(ids)]
        name = digest(self._names[-1], "subject" if subject else "turn", array.array("I", ids).tobytes())
        longer._names = [*self._names, name]
        return longer

    def advance(self, cache: Cache, at: int) -> int:
        """Bring `cache`, at boundary number `at` (0: empty), as far as what is kept allows; the new number.

        A damaged or missing page ends the way there; it goes on once that page has been read anew, since the
        same steps give the same bits.
        """
        limit = len(self.ends)
        for goal in range(limit, at, -1):
            if goal > limit or (tip := self._tip(goal)) is None:
                continue
            skeleton, file = tip
            pages: list[Any] = []
            for number in sorted(
                {number for held, _ in skeleton["pages"] for number in held if number >= at}
            ):
                page = self.store.open(self._names[number], "pt")
                if page is None:
                    limit = number
                    break
                pages.append(page)
            if goal > limit:
                continue
            try:
                state.put_together(cache, skeleton, file, pages, self.device)
            except state.DAMAGE as error:  # cannot be, but is not trusted
                self.store.console.detail(f"a kept state is not used: {error}")
                continue
            self._pages = {path: held for held, paths in skeleton["pages"] for path in paths}
            return goal
        return at

    def keep(self, cache: Cache, before: Any, at: int, shared: int = 0) -> None:
        """Keep the state at boundary `at` + 1; `before` is the snapshot at boundary `at`. The first `shared`
        turns are another conversation's, too: their states stay."""
        if self.store.stopped:
            return
        try:
            parts = state.take_apart(cache, before, frozenset(self._pages))
        except BadInput as error:
            self.store.console.detail(f"what was read is not kept: {error}")
            self.store.stopped = True
            return
        grown = {key.rpartition(".")[0] for key in parts.grew}
        self._pages = {
            path: [*self._pages.get(path, ()), *([at] if path in grown else ())] for path in parts.paths
        }
        name = self._names[at]
        if parts.grew and self.store.find(name) is None:
            self.store.put(name, state.writer(parts.grew))
        told = json.dumps({**parts.skeleton, "pages": _grouped(self._pages)})
        self.store.put(_tip(name), state.writer(parts.whole), {"longchat": told})
        older = at - 1  # the boundary before the one before
        first = 0 if at < self.text else self.text + shared
        if older > first and older % KEPT and at + 1 != self.text and _heavy(parts, told):
            self.store.discard(_tip(self._names[older - 1]))

    def _tip(self, number: int) -> tuple[dict[str, Any], Any] | None:
        name = _tip(self._names[number - 1])
        if not self.store.has(name) or (file := self.store.open(name, "pt")) is None:
            return None
        return json.loads(file.metadata()["longchat"]), file


def _grouped(pages: dict[str, list[int]]) -> list[tuple[list[int], list[str]]]:
    """The paths of the same boundaries together: most are."""
    groups: dict[tuple[int, ...], list[str]] = {}
    for path, held in sorted(pages.items()):
        groups.setdefault(tuple(held), []).append(path)
    return [(list(held), paths) for held, paths in groups.items()]


def _tip(name: str) -> str:
    return f"{name}-tip"


def _heavy(parts: state.Parts, told: str) -> bool:
    weight = len(told) + sum(x.nbytes for x in parts.whole.values())
    return weight > HEAVY * sum(x.nbytes for x in parts.grew.values())
