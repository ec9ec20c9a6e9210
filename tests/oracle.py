"""Attention methods written a second time, from their papers: float64, one query and one key at a time.

Everything starts from UNROTATED queries q [heads, L, dim] and keys k [KV heads, L, dim]; a visible key is
(index, apparent key position, apparent query position). Shares no code with the package.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Key = tuple[int, int, int]


@dataclass(frozen=True)
class Turn:
    """Rotary positions: `planes` rotated pairs, (0, 1), (2, 3) ... if interleaved, else (i, i + planes)."""

    planes: int
    base: float = 100.0
    interleaved: bool = False

    def frequencies(self) -> list[float]:
        return [self.base ** (-i / self.planes) for i in range(self.planes)]

    def __call__(self, x: Tensor, positions: Iterable[int]) -> Tensor:
        """x [heads, n, dim] with row i at positions[i], float64: each plane a complex number."""
        x = x.double().clone()
        places = list(range(2 * self.planes))
        a, b = (
            (places[::2], places[1::2])
            if self.interleaved
            else (places[: self.planes], places[self.planes :])
        )
        angles = torch.tensor([[p * f for f in self.frequencies()] for p in positions], dtype=torch.float64)
        turned = torch.complex(x[..., a], x[..., b]) * torch.polar(torch.ones_like(angles), angles)
        x[..., a], x[..., b] = turned.real, turned.imag
        return x


def softmax_over(logits: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """logits [heads, n], values [KV heads or heads, n, dim] -> (out [heads, dim], probabilities)."""
    probabilities = torch.softmax(logits, dim=-1)
    values = values.double().repeat_interleave(logits.shape[0] // values.shape[0], dim=0)
    return torch.einsum("hn,hnd->hd", probabilities, values), probabilities


def logits_of(
    q: Tensor, k: Tensor, turn: Turn, scale: float, visible: Sequence[Key], t: int
) -> tuple[Tensor, list[int]]:
    """Scores [heads, n] of query t with each visible key."""
    index, key_positions, query_positions = (list(x) for x in zip(*visible, strict=True))
    queries = turn(q[:, [t] * len(index)], query_positions)
    keys = turn(k[:, index], key_positions).repeat_interleave(q.shape[0] // k.shape[0], dim=0)
    return (queries * keys).sum(-1) * scale, index


def dense(
    q: Tensor, k: Tensor, v: Tensor, turn: Turn, scale: float, visible: Sequence[Sequence[Key]]
) -> Tensor:
    """Every query over its own visible keys; [heads, L, dim]."""
    rows = []
    for t, keys in enumerate(visible):
        logits, index = logits_of(q, k, turn, scale, keys, t)
        rows.append(softmax_over(logits, v[:, index])[0])
    return torch.stack(rows, dim=1)


def full_keys(length: int) -> list[list[Key]]:
    return [[(j, j, t) for j in range(t + 1)] for t in range(length)]


def window_keys(length: int, window: int) -> list[list[Key]]:
    return [[(j, j, t) for j in range(t + 1) if t - j < window] for t in range(length)]


def sink_keys(length: int, sinks: int, window: int) -> list[list[Key]]:
    """StreamingLLM as published: keys rotated at their index in the cache, the query at the last."""
    rows = []
    for t in range(length):
        kept = [j for j in range(t + 1) if j < sinks or t - j < window]
        rows.append([(j, place, len(kept) - 1) for place, j in enumerate(kept)])
    return rows


def cca(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    turn: Turn,
    scale: float,
    g: int,
    s: int,
    sinks: int,
    per_head: bool,
    pool: str,
) -> Tensor:
    """CCA-Attention in the paper's 1-based terms: cores i <= (t - s) / g, raw j > t - s - (t - s) mod g."""
    heads, length, _ = q.shape
    r = heads // k.shape[0]
    q, k = turn(q, range(length)), turn(k, range(length))
    v = v.double()
    cores: dict[int, tuple[Tensor, Tensor]] = {}
    for i in range(1, length // g + 1):
        members = [j for j in range((i - 1) * g + 1, i * g + 1) if j > sinks]
        if not members:
            continue
        index = [j - 1 for j in members]
        per_query = []
        for h in range(heads):
            keys, values = k[h // r, index], v[h // r, index]
            if pool == "max":
                per_query.append((keys.amax(0), values.amax(0)))
                continue
            w = torch.full((len(index),), 1 / len(index), dtype=torch.float64)
            if pool == "attention":
                w = torch.softmax(keys @ q[h, i * g - 1] * scale, dim=0)
            per_query.append((w @ keys, w @ values))
        core_k, core_v = (torch.stack([pair[n] for pair in per_query]) for n in (0, 1))
        if not per_head:
            # Averaging the weights of a group's query heads is averaging their cores.
            core_k, core_v = (x.view(-1, r, x.shape[-1]).mean(1) for x in (core_k, core_v))
        if core_k.shape[0] != heads:
            core_k, core_v = (x.repeat_interleave(r, dim=0) for x in (core_k, core_v))
        cores[i] = core_k, core_v
    rows = []
    for t in range(1, length + 1):
        m = max((t - s) // g, 0)
        raw = [j - 1 for j in range(1, t + 1) if j > m * g or j <= sinks]
        far = [cores[i] for i in sorted(cores) if i <= m]
        keys = torch.cat(
            [k[:, raw].repeat_interleave(r, dim=0)] + [core[0].unsqueeze(1) for core in far], dim=1
        )
        values = torch.cat(
            [v[:, raw].repeat_interleave(r, dim=0)] + [core[1].unsqueeze(1) for core in far], dim=1
        )
        rows.append(softmax_over(torch.einsum("hd,hnd->hn", q[:, t - 1], keys) * scale, values)[0])
    return torch.stack(rows, dim=1)


def infllm(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    turn: Turn,
    scale: float,
    chunks: Sequence[int],
    init: int,
    local: int,
    block: int,
    topk: int,
    representatives: int,
) -> tuple[Tensor, list[list[int]]]:
    """InfLLM by its published rules, `chunks` query rows at a time; also which blocks each chunk fetched."""
    heads, groups = q.shape[0], k.shape[0]
    weight = torch.zeros(groups, k.shape[1], dtype=torch.float64)
    stands_for: list[Tensor] = []  # indices [KV heads, representatives] of each frozen block
    rows: list[Tensor] = []
    fetched = []
    first = 0
    for size in chunks:
        while init + (len(stands_for) + 1) * block <= first + 1 - local:
            low = init + len(stands_for) * block
            stands_for.append(weight[:, low : low + block].topk(min(representatives, block)).indices + low)
        scores = []
        for marks in stands_for:
            far = turn(q[:, first : first + size], [local] * size).mean(1)
            of_head = [
                k[h // (heads // groups), marks[h // (heads // groups)]].double() for h in range(heads)
            ]
            scores.append(sum(float((keys @ far[h]).sum()) for h, keys in enumerate(of_head)))
        order = sorted(range(len(scores)), key=lambda b: -scores[b])[:topk]
        fetched.append(sorted(order))
        frozen = init + len(stands_for) * block
        for t in range(first, first + size):
            near = [(j, j, t) for j in range(max(t + 1 - local, 0), t + 1)]
            far = [
                (j, 0, local)
                for j in range(max(t + 1 - local, 0))
                if j < init or j >= frozen or (j - init) // block in order
            ]
            logits, index = logits_of(q, k, turn, scale, near + far, t)
            out, probabilities = softmax_over(logits, v[:, index])
            rows.append(out)
            mass = probabilities[:, : len(near)].view(groups, -1, len(near)).sum(1)
            for column, (j, _, _) in enumerate(near):
                weight[:, j] += mass[:, column]
        first += size
    return torch.stack(rows, dim=1), fetched


def recycled(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    turn: Turn,
    scale: float,
    prompt: int,
    share: int,
    stride: int,
    tau: float,
    kernel: int,
) -> tuple[Tensor, list[bool]]:
    """Recycled Attention: full prefill, then small-cache steps; also which decode steps were full."""
    heads, length, _ = q.shape
    groups = k.shape[0]
    out = [*dense(q, k, v, turn, scale, full_keys(prompt)).unbind(1)]

    def top(t: int) -> tuple[list[list[int]], int]:
        """Per KV head the keys, lowest score first, that query t weighs most."""
        logits, _ = logits_of(q, k, turn, scale, full_keys(t + 1)[t], t)
        weights = torch.softmax(logits, -1).view(groups, -1, t + 1).amax(1)
        pooled = torch.stack(
            [weights[:, max(j - (kernel - 1) // 2, 0) : j + kernel // 2 + 1].amax(-1) for j in range(t + 1)],
            dim=-1,
        )
        count = max((t + 1) // share, 1)
        return [
            sorted(range(t + 1), key=lambda j: (float(pooled[g, j]), -j))[-count:] for g in range(groups)
        ], count

    small, count = top(prompt - 1)
    last_full, steps, was_full = prompt - 1, 0, []
    for t in range(prompt, length):
        steps += 1
        due = steps % stride == 0
        if due and tau > 0:
            a, b = (turn(q[:, i : i + 1], [i]).mean((0, 1)) for i in (t, last_full))
            due = float(a @ b / (a.norm() * b.norm())) <= tau
        was_full.append(due)
        if due:
            logits, index = logits_of(q, k, turn, scale, full_keys(length)[t], t)
            out.append(softmax_over(logits, v[:, index])[0])
            small, count = top(t)
            last_full, steps = t, 0
            continue
        parts = []
        for g in range(groups):
            mine = slice(g * heads // groups, (g + 1) * heads // groups)
            keys = [(j, j, t) for j in [*small[g], t]]
            logits, index = logits_of(q[mine], k[g : g + 1], turn, scale, keys, t)
            parts.append(softmax_over(logits, v[g : g + 1, index])[0])
            small[g] = [*small[g], t][-count:]
        out.append(torch.cat(parts))
    return torch.stack(out, dim=1), was_full
