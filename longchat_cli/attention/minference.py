"""MInference (Jiang et al., NeurIPS 2024): prompts are read through a sparse pattern, decoding is dense.

As published, one pattern for every head; here a KV head's query heads choose together, and a prompt that is
read in several calls gets a pattern of each call's own last queries. `--prefill minference` lends the pattern
to the methods whose prompts are read by plain full attention.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from longchat_cli.attention.full import Full
from longchat_cli.attention.layer import Method, Step, at_most, option
from longchat_cli.attention.probabilities import probabilities
from longchat_cli.errors import UsageError
from longchat_cli.kernels import Span
from longchat_cli.kernels.packed import dense
from longchat_cli.kernels.span import INDEX_ROWS

LAST = 64
"""Queries at the end of a call that choose columns and diagonals."""
COLUMNS, DIAGONALS = 30, 100
"""First columns and nearest diagonals that are always chosen, the least of both: so each row sees itself."""
BLOCK = INDEX_ROWS
"""Keys per block of the block-sparse pattern: as many as rows that choose together."""


@dataclass(frozen=True)
class MInference(Full):
    """MInference section 3 and its public defaults."""

    summary = "MInference: prompts are read through the columns and diagonals that matter, decoding is full"
    keeps = "every token"
    forgets = "nothing; reading misses what its pattern leaves out"
    cost = "memory and step time as full; reading grows with length times the pattern's width"
    dense_prompts = False
    pattern: str = option(
        "vertical-slash", "what a prompt's queries see", choices=("vertical-slash", "a-shape", "block-sparse")
    )
    vertical: int = option(
        1000, "vertical-slash: columns, keys that all queries see", low=0, budget=1000 / 7096
    )
    slash: int = option(
        6096, "vertical-slash: diagonals, distances at which all queries see", low=0, budget=6096 / 7096
    )
    sinks: int = option(128, "a-shape: first tokens that all queries see", low=0)
    window: int = option(3968, "a-shape: last tokens that each query sees, itself included", low=1)
    blocks: int = option(100, "block-sparse: blocks of 64 keys that each 64 queries see", low=1)

    def narrow(self, spans: list[Span], new: Step) -> list[Span]:
        """What is left of the spans of plain causal attention, which hold all keys in order."""
        if self.pattern == "a-shape":
            return self._a_shape(spans, new)
        keys = torch.cat([dense(span.k) for span in spans], dim=1)
        first = torch.arange(keys.shape[1] - new.rows, keys.shape[1], INDEX_ROWS, device=keys.device)
        last = (first + INDEX_ROWS - 1).clamp(max=keys.shape[1] - 1)
        runs = Runs(first.view(-1, 1), last.view(-1, 1), torch.arange(keys.shape[1], device=keys.device))
        pattern = self._vertical_slash if self.pattern == "vertical-slash" else self._block_sparse
        seen = pattern(keys, new, runs)
        future = runs.keys > runs.last
        if bool((seen | future).all()):
            return spans
        parts = (seen & ~future).split([span.k.shape[1] for span in spans], dim=-1)
        narrowed = [replace(span, index=listing(part)) for span, part in zip(spans, parts, strict=True)]
        return [span for span in narrowed if span.index is not None and span.index.shape[-1]]

    def _a_shape(self, spans: list[Span], new: Step) -> list[Span]:
        """Two ranges of each span, so that no index is needed: first tokens and a window."""
        keys = sum(span.k.shape[1] for span in spans)
        window = torch.arange(keys - new.rows, keys, device=new.q.device) + 1 - self.window
        if int(window[-1]) <= self.sinks:
            return spans
        narrowed, first = [], 0
        for span in spans:
            _, stop = span.limits()
            narrowed.append(replace(span, stop=at_most(stop, max(self.sinks - first, 0))))
            narrowed.append(replace(span, start=(window.clamp(min=self.sinks) - first).clamp(min=0)))
            first += span.k.shape[1]
        return narrowed

    def _vertical_slash(self, keys: Tensor, new: Step, runs: Runs) -> Tensor:
        weights = probabilities(new.q[:, -LAST:], keys, new).sum(1)  # [KV heads, LAST, keys]
        columns = _top(weights.sum(1), self.vertical, COLUMNS)
        # A diagonal crosses a run where a row of it stands at the diagonal's distance: count those in reach.
        before = F.pad(_top(diagonals(weights), self.slash, DIAGONALS).cumsum(-1), (1, 0))
        near, far = ((end - runs.keys).clamp(min=0) for end in (runs.first, runs.last + 1))
        return columns.unsqueeze(1) | (before[:, far] > before[:, near])

    def _block_sparse(self, keys: Tensor, new: Step, runs: Runs) -> Tensor:
        queries, means = (_means(x) for x in (new.q, keys))  # [heads, runs, dim], [KV heads, blocks, dim]
        grouped = queries.reshape(keys.shape[0], -1, *queries.shape[1:])
        logits = grouped @ means.transpose(1, 2).unsqueeze(1) * new.scale
        start = runs.keys[::BLOCK]
        weights = logits.masked_fill(start > runs.last, -torch.inf).softmax(-1).sum(1)
        own = (start <= runs.last) & (start > runs.first - BLOCK)
        chosen = own | _top(weights.masked_fill(own, torch.inf), self.blocks)
        return chosen.repeat_interleave(BLOCK, dim=-1)[..., : keys.shape[1]]


@dataclass(frozen=True)
class Runs:
    """Places of the keys, [keys], and of the first and last row of every run of rows, [runs, 1]."""

    first: Tensor
    last: Tensor
    keys: Tensor


def diagonals(weights: Tensor) -> Tensor:
    """Sums of weights [KV heads, n, keys] of the last n queries by distance: [KV heads, keys]."""
    _, rows, keys = weights.shape
    # Row i of the reversed weights moves i to the right, so that a distance becomes a column.
    padded = F.pad(weights.flip(-1), (0, rows)).flatten(1)
    skewed = padded[:, : rows * (keys + rows - 1)].unflatten(1, (rows, -1))
    return skewed.sum(1)[:, rows - 1 :]


def listing(seen: Tensor) -> Tensor:
    """The index of a span whose runs see the keys marked in seen, bool [KV heads, runs, keys]."""
    place = seen.cumsum(-1)
    index = place.new_full((*seen.shape[:2], int(place[..., -1].max()) + 1), -1)
    # Keys that are not seen all land in the first column, which is left out.
    keys = torch.arange(seen.shape[-1], device=seen.device).expand_as(place)
    return index.scatter_(-1, place * seen, keys)[..., 1:]


def parse(text: str) -> MInference:
    """The method that `minference[:option=value,...]` names. Raises UsageError."""
    name, _, rest = text.partition(":")
    if name != "minference":
        raise UsageError(f"there is no prefill '{text}'", "", "choose own or minference[:option=value,...]")
    try:
        return MInference.build(dict(_option(pair) for pair in filter(None, rest.split(","))))  # type: ignore[return-value]
    except UsageError as error:
        raise UsageError(f"--prefill is {text}", str(error)) from None


def _option(pair: str) -> tuple[str, int | str]:
    """An option of the pattern from `name=value`; those that every method has are none. Raises UsageError."""
    flag, _, value = pair.partition("=")
    name = flag.replace("-", "_")
    own = {field.name: field.default for field in dataclasses.fields(MInference)}
    if name not in own or name in {field.name for field in dataclasses.fields(Method)}:
        raise UsageError(f"there is no option '{flag}'", "", "`longchat methods minference` shows them")
    try:
        return name, value if isinstance(own[name], str) else int(value)
    except ValueError:
        raise UsageError(f"'{pair}' is no option", f"{flag} takes a number", "write name=value") from None


def _top(scores: Tensor, count: int, forced: int = 0) -> Tensor:
    """Which of scores [KV heads, ..., n] are the `count` highest, the first `forced` ones always: bool."""
    scores = scores.clone()
    scores[..., :forced] = torch.inf
    best = scores.topk(min(max(count, forced), scores.shape[-1]), dim=-1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True)


def _means(x: Tensor) -> Tensor:
    """Means of x [heads, n, dim] over successive blocks, float32 [heads, blocks, dim]."""
    return torch.stack([part.float().mean(1) for part in x.split(BLOCK, dim=1)], dim=1)
