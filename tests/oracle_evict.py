"""Methods that evict, cut, or look at a fixed part, a second time by their papers' rules: float64, one query
of one head at a time.

As in `oracle`: everything starts from unrotated queries and keys, and no code is shared with the package.
A conversation is a list of turns, (tokens of the prompt, tokens decoded after it).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from oracle import Key, Turn
from torch import Tensor

Turns = Sequence[tuple[int, int]]
Kept = list[list[int]]
"""Text positions of the entries that each KV head has, oldest first."""


@dataclass
class Text:
    """Queries q [heads, L, dim], keys and values k, v [KV heads, L, dim], and what shapes the logits."""

    q: Tensor
    k: Tensor
    v: Tensor
    turn: Turn
    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None

    def __post_init__(self) -> None:
        self.q, self.k = (self.turn(x, range(x.shape[1])) for x in (self.q, self.k))
        self.v = self.v.double()
        self.groups = self.k.shape[0]
        self.share = self.q.shape[0] // self.groups

    def heads_of(self, group: int) -> range:
        return range(group * self.share, (group + 1) * self.share)

    def look(self, t: int, head: int, kept: Sequence[int]) -> list[float]:
        """How much query t of a head attends to each of `kept`."""
        logits = self.k[head // self.share, list(kept)] @ self.q[head, t] * self.scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        if self.sinks is not None:
            logits = torch.cat([logits, self.sinks[head].double().view(1)])
        return torch.softmax(logits, 0)[: len(kept)].tolist()

    def output(self, t: int, kept: Kept) -> Tensor:
        """[heads, dim]"""
        rows = []
        for head in range(len(self.q)):
            group = head // self.share
            weights = torch.tensor(self.look(t, head, kept[group]), dtype=torch.float64)
            rows.append(weights @ self.v[group, kept[group]])
        return torch.stack(rows)


def highest(scores: dict[int, float], count: int) -> list[int]:
    """The `count` positions of the highest scores, the earlier of equals first, in order."""
    return sorted(sorted(scores, key=lambda j: (-scores[j], j))[:count])


class SnapKV:
    """Window w, at most the budget: each KV head keeps the best B - w older entries, and the last w."""

    def __init__(self, budget: int, window: int, pool: int, pooling: str, heads: str) -> None:
        self.budget, self.window = budget, min(window, budget)
        self.pool, self.pooling, self.heads = pool, pooling, heads

    def saw(self, text: Text, t: int, kept: Kept) -> None:
        pass

    def after_step(self, text: Text, t: int, kept: Kept) -> Kept:
        return kept

    def after_prompt(self, text: Text, first: int, end: int, kept: Kept) -> Kept:
        return [
            self.choose(text, g, range(max(end - self.window, first), end), kept[g])
            for g in range(text.groups)
        ]

    def choose(self, text: Text, group: int, queries: range, kept: list[int]) -> list[int]:
        if len(kept) <= self.budget:
            return kept
        older = kept[: len(kept) - self.window]
        sums = [[0.0] * len(older) for _ in text.heads_of(group)]
        for row, head in zip(sums, text.heads_of(group), strict=True):
            for t in queries:
                seen = [j for j in kept if j <= t]
                for place, weight in enumerate(text.look(t, head, seen)[: len(older)]):
                    row[place] += weight
        join = max if self.heads == "max" else lambda column: sum(column) / len(column)
        joined = [join(column) for column in zip(*sums, strict=True)]
        scores = {}
        for place, j in enumerate(older):
            low, high = place - (self.pool - 1) // 2, place + self.pool // 2
            near = [joined[i] for i in range(max(low, 0), min(high, len(older) - 1) + 1)]
            scores[j] = max(near) if self.pooling == "max" else sum(near) / self.pool
        return highest(scores, self.budget - self.window) + kept[len(older) :]


class H2O:
    """Attention summed over all queries; B // 2 of the entries are the last, the others the heaviest."""

    def __init__(self, budget: int) -> None:
        self.budget, self.recent = budget, budget // 2
        self.mass: dict[tuple[int, int], float] = {}

    def saw(self, text: Text, t: int, kept: Kept) -> None:
        for group, positions in enumerate(kept):
            for head in text.heads_of(group):
                for j, weight in zip(positions, text.look(t, head, positions), strict=True):
                    self.mass[group, j] = self.mass.get((group, j), 0.0) + weight

    def after_step(self, text: Text, t: int, kept: Kept) -> Kept:
        return [self.choose(group, positions) for group, positions in enumerate(kept)]

    def after_prompt(self, text: Text, first: int, end: int, kept: Kept) -> Kept:
        return self.after_step(text, end, kept)

    def choose(self, group: int, positions: list[int]) -> list[int]:
        if len(positions) <= self.budget:
            return positions
        older = positions[: len(positions) - self.recent]
        heavy = highest({j: self.mass[group, j] for j in older}, self.budget - self.recent)
        return heavy + positions[len(older) :]


class TOVA:
    """The B entries that the last query weighs most: mean over a layer's heads, or over a KV head's."""

    def __init__(self, budget: int, share: str) -> None:
        self.budget, self.share = budget, share

    def saw(self, text: Text, t: int, kept: Kept) -> None:
        pass

    def after_step(self, text: Text, t: int, kept: Kept) -> Kept:
        if len(kept[0]) <= self.budget:
            return kept
        by_head = [text.look(t, head, kept[head // text.share]) for head in range(len(text.q))]
        chosen = []
        for group, positions in enumerate(kept):
            heads = range(len(text.q)) if self.share == "layer" else text.heads_of(group)
            scores = {j: sum(by_head[h][i] for h in heads) / len(heads) for i, j in enumerate(positions)}
            chosen.append(highest(scores, self.budget))
        return chosen

    def after_prompt(self, text: Text, first: int, end: int, kept: Kept) -> Kept:
        return self.after_step(text, end - 1, kept)


class KeyDiff:
    """The B entries whose keys have the smallest cosine with the mean of the keys at length one."""

    def __init__(self, budget: int) -> None:
        self.budget = budget

    def saw(self, text: Text, t: int, kept: Kept) -> None:
        pass

    def after_step(self, text: Text, t: int, kept: Kept) -> Kept:
        return kept

    def after_prompt(self, text: Text, first: int, end: int, kept: Kept) -> Kept:
        return [self.choose(text.k[group], positions) for group, positions in enumerate(kept)]

    def choose(self, keys: Tensor, positions: list[int]) -> list[int]:
        if len(positions) <= self.budget:
            return positions
        anchor = sum(keys[j] / keys[j].norm() for j in positions) / len(positions)
        cosines = {j: float(keys[j] @ anchor / (keys[j].norm() * anchor.norm())) for j in positions}
        return highest({j: -cosine for j, cosine in cosines.items()}, self.budget)


def converse(text: Text, turns: Turns, rule: SnapKV | H2O | TOVA | KeyDiff) -> tuple[Tensor, list[Kept]]:
    """Outputs [heads, L, dim], and what each KV head has after each turn.

    A prompt is read with full attention over what is there. When its first token is decoded, the rule evicts.
    """
    kept: Kept = [[] for _ in range(text.groups)]
    out: list[Tensor] = []
    after = []

    def see() -> int:
        t = len(out)
        for positions in kept:
            positions.append(t)
        out.append(text.output(t, kept))
        rule.saw(text, t, kept)
        return t

    for prompt, decoded in turns:
        first = len(out)
        for _ in range(prompt):
            see()
        if decoded:
            kept = [list(x) for x in rule.after_prompt(text, first, len(out), kept)]
        for _ in range(decoded):
            t = see()
            kept = [list(x) for x in rule.after_step(text, t, kept)]
        after.append([list(x) for x in kept])
    return torch.stack(out, dim=1), after


def pyramid_budgets(layers: int, budget: int, window: int, beta: float) -> list[float]:
    """PyramidKV: beside the window, 2 (B - w) - (B - w) / beta in layer 0, (B - w) / beta in the last, a
    straight line between; not rounded."""
    mean = budget - min(window, budget)
    top, bottom = 2 * mean - mean / beta, mean / beta
    if layers == 1:
        return [float(budget)]
    return [top + (bottom - top) * i / (layers - 1) + min(window, budget) for i in range(layers)]


# --- methods with a fixed visible part


def sink_plus_keys(turns: Turns, sinks: int, window: int, stride: int) -> list[list[Key]]:
    """StreamingLLM++: prompts and every `stride`-th decoding step see all, the others sinks and window."""
    rows: list[list[Key]] = []
    for prompt, decoded in turns:
        for step in range(-prompt + 1, decoded + 1):
            t = len(rows)
            every = step <= 0 or step % stride == 0
            rows.append([(j, j, t) for j in range(t + 1) if every or j < sinks or t - j < window])
    return rows


def lambda_keys(length: int, first: int, local: int) -> list[list[Key]]:
    """LM-Infinite: distances below `local` are true; `first` tokens further away stand at exactly `local`."""
    rows: list[list[Key]] = []
    for t in range(length):
        near = [(j, j, t) for j in range(t + 1) if t - j < local]
        rows.append([(j, 0, local) for j in range(min(first, t + 1)) if t - j >= local] + near)
    return rows


# --- methods that read text anew


def truncated(turns: Turns, budget: int) -> list[list[int]]:
    """For each decoded token, and the last of each prompt, the text positions that it is predicted from.

    A prompt that would make the text longer than the budget leaves its first and last half; what is decoded
    is added.
    """
    rows, text, t = [], [], 0
    for prompt, decoded in turns:
        text = text + list(range(t, t + prompt))
        t += prompt
        if t > budget and len(text) > budget:
            text = text[: budget // 2] + text[len(text) - (budget - budget // 2) :]
        rows.append(list(text))
        for _ in range(decoded):
            text = [*text, t]
            t += 1
            rows.append(list(text))
    return rows


def window_start(position: int, window: int, stride: int) -> int:
    """Where the reading that serves `position` begins: the first multiple of the stride at which it has at
    most `window` tokens."""
    start = 0
    while position + 1 - start > window:
        start += stride
    return start
