"""Quest, MInference and PyramidInfer a second time, by their papers: float64, one query at a time.

As in `oracle`: everything starts from unrotated queries and keys, and no code is shared with the package.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from oracle import Turn, dense, full_keys, softmax_over
from torch import Tensor


def by_group(q: Tensor, k: Tensor, v: Tensor, scale: float, t: int, chosen: list) -> Tensor:
    """Query t over chosen[g], the keys that KV head g sees; q and k rotated; [heads, dim]."""
    r = q.shape[0] // k.shape[0]
    parts = []
    for g, keys in enumerate(chosen):
        logits = q[g * r : g * r + r, t] @ k[g, sorted(keys)].T * scale
        parts.append(softmax_over(logits, v[g : g + 1, sorted(keys)])[0])
    return torch.cat(parts)


def quest(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    turn: Turn,
    scale: float,
    prompt: int,
    budget: int,
    page: int,
    heads: str,
) -> tuple[Tensor, list[int]]:
    """Full prefill, then steps over chosen pages and the unfinished one; also how many keys each step saw."""
    length, r = q.shape[1], q.shape[0] // k.shape[0]
    out = [*dense(q, k, v, turn, scale, full_keys(prompt)).unbind(1)]
    rotated_q, rotated_k = turn(q, range(length)), turn(k, range(length))
    seen = []
    for t in range(prompt, length):
        chosen = []
        for g in range(k.shape[0]):
            scores = []
            for p in range((t + 1) // page):
                keys = rotated_k[g, p * page : (p + 1) * page]
                least, most = keys.min(0).values, keys.max(0).values
                of_heads = [
                    float(torch.maximum(query * least, query * most).sum())
                    for query in rotated_q[g * r : (g + 1) * r, t]
                ]
                scores.append(max(of_heads) if heads == "max" else sum(of_heads) / r)
            best = sorted(range(len(scores)), key=lambda p: -scores[p])[: max(3, budget // page)]
            tail = range((t + 1) // page * page, t + 1)
            chosen.append([j for p in best for j in range(p * page, (p + 1) * page)] + list(tail))
        seen.append(len(chosen[0]))
        out.append(by_group(rotated_q, rotated_k, v, scale, t, chosen))
    return torch.stack(out, dim=1), seen


def top(scores: dict[int, float], count: int, forced: int = 0) -> set[int]:
    ranked = sorted(scores, key=lambda x: (x >= forced, -scores[x]))
    return set(ranked[: max(count, forced)])


def minference(
    q: Tensor, k: Tensor, v: Tensor, turn: Turn, scale: float, calls: Sequence[int], **options: int
) -> tuple[Tensor, float]:
    """Prompts read in calls of these sizes; also the share of earlier keys that the rows saw.

    `vertical` and `slash`, or `sinks` and `window`, or `blocks` say which pattern.
    """
    groups, r = k.shape[0], q.shape[0] // k.shape[0]
    q, k = turn(q, range(q.shape[1])), turn(k, range(k.shape[1]))
    out, saw, first = [], 0, 0
    for size in calls:
        stop = first + size
        runs = [range(low, min(low + 64, stop)) for low in range(first, stop, 64)]
        visible: list[list[set[int]]] = []  # per KV head and run
        for g in range(groups):
            mine = q[g * r : (g + 1) * r], k[g : g + 1]
            if size <= 64:
                visible.append([set(range(stop)) for _ in runs])
            elif "vertical" in options:
                visible.append(vertical_slash(*mine, scale, runs, stop, **options))
            elif "window" in options:
                visible.append([set(range(stop)) for _ in runs])
            else:
                visible.append(block_sparse(*mine, scale, runs, stop, **options))
        for t in range(first, stop):
            chosen = [[j for j in part[(t - first) // 64] if j <= t] for part in visible]
            if size > 64 and "window" in options:
                chosen = [
                    [j for j in keys if j < options["sinks"] or t - j < options["window"]] for keys in chosen
                ]
            saw += sum(len(keys) for keys in chosen)
            out.append(by_group(q, k, v, scale, t, chosen))
        first = stop
    return torch.stack(out, dim=1), saw / (groups * first * (first + 1) / 2)


def vertical_slash(
    q: Tensor,
    k: Tensor,
    scale: float,
    runs: list[range],
    stop: int,
    vertical: int,
    slash: int,
) -> list[set[int]]:
    columns, distances = (dict.fromkeys(range(stop), 0.0) for _ in range(2))
    for t in range(stop - 64, stop):
        weights = torch.softmax(q[:, t] @ k[0, : t + 1].T * scale, dim=-1)
        for j, weight in enumerate(weights.sum(0).tolist()):
            columns[j] += weight
            distances[t - j] += weight
    chosen, near = top(columns, vertical, 30), top(distances, slash, 100)
    return [chosen | {t - distance for t in run for distance in near if distance <= t} for run in runs]


def block_sparse(
    q: Tensor, k: Tensor, scale: float, runs: list[range], stop: int, blocks: int
) -> list[set[int]]:
    means = [k[0, low : min(low + 64, stop)].mean(0) for low in range(0, stop, 64)]
    visible = []
    for run in runs:
        within = [b for b in range(len(means)) if b * 64 <= run[-1]]
        scores = dict.fromkeys(within, 0.0)
        for head in q[:, list(run)].mean(1):
            weights = torch.softmax(torch.stack([head @ means[b] for b in within]) * scale, dim=0).tolist()
            scores = {b: scores[b] + weight for b, weight in zip(within, weights, strict=True)}
        own = {b for b in within if b * 64 + 63 >= run[0]}
        others = sorted((b for b in within if b not in own), key=lambda b: -scores[b])
        chosen = own | set(others[: max(blocks - len(own), 0)])
        visible.append({j for b in chosen for j in range(b * 64, b * 64 + 64)})
    return visible


def share(layer: int, layers: int, ratio: float, decay: float) -> float:
    return decay + (ratio - decay) * (1 + math.cos(math.pi * layer / layers)) / 2


def pyramid_choice(
    weights: Tensor,
    reached: list[int],
    call: int,
    share: float,
    recent: float,
    sinks: int,
    least: int,
    first: int,
) -> list[int]:
    """Which of the rows that reached a layer go on. weights [heads, rows, keys]: attention of these rows, the
    last keys being the rows themselves. Rows are numbered within the call, which starts at `first`."""
    late = 1 + int(call * recent)
    context = len(reached) - late
    count = int(max(context, 0) * share)
    if count >= context or count <= least:
        return reached
    scores = []
    for place in range(context):
        column = weights.shape[-1] - len(reached) + place
        total = 0.0
        for row in range(late):
            weight = 1 + 0.2 * row / (late - 1) if late > 1 else 1.0
            total += weight * float(weights[:, context + row, column].mean())
        scores.append(math.inf if first + reached[place] < sinks else total)
    kept = sorted(sorted(range(context), key=lambda place: -scores[place])[:count])
    return [reached[place] for place in kept] + reached[context:]


def pyramid(
    tensors: Sequence[tuple[Tensor, Tensor, Tensor]],
    turn: Turn,
    scale: float,
    calls: Sequence[int],
    decode: int,
    ratio: float = 1.0,
    decay: float = 0.9,
    recent: float = 0.2,
    sinks: int = 4,
    least: int = 64,
) -> tuple[list[list[Tensor]], list[list[int]]]:
    """PyramidInfer over layers of given queries, keys and values: prompts of these sizes, then single tokens.

    Returns per layer the output of every row and the keys it holds at the end.
    """
    tensors = [(turn(q, range(q.shape[1])), turn(k, range(k.shape[1])), v) for q, k, v in tensors]
    layers = len(tensors)
    held: list[list[int]] = [[] for _ in tensors]
    out: list[list[Tensor]] = [[] for _ in tensors]
    first = 0
    for size in [*calls, *[1] * decode]:
        reached = list(range(size))
        for index, (q, k, v) in enumerate(tensors):
            old = list(held[index])
            held[index] += [first + i for i in reached]
            rows = []
            for t in range(first, first + size):
                visible = [j for j in held[index] if j <= t]
                keys = k[:, visible].repeat_interleave(len(q) // len(k), dim=0)
                logits = torch.einsum("hd,hnd->hn", q[:, t], keys) * scale
                result, weights = softmax_over(logits, v[:, visible])  # zeros where nothing is visible
                out[index].append(result)
                padded = torch.zeros(len(q), len(held[index]), dtype=torch.float64)
                padded[:, : len(visible)] = weights
                rows.append(padded)
            assert held[index][: len(old)] == old
            if size > 1 and index < layers - 1:
                among = torch.stack([rows[i] for i in reached], dim=1)
                part = share(index, layers, ratio, decay)
                reached = pyramid_choice(among, reached, size, part, recent, sinks, least, first)
        first += size
    return out, held
