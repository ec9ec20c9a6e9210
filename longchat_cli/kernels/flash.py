"""Plain causal attention by flash-attn (Dao, 2023), where its extra is installed and a GPU is at hand."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor

from longchat_cli.kernels.packed import Packed, dense
from longchat_cli.kernels.span import Span


@functools.cache
def missing() -> str | None:
    """Why flash-attn cannot serve on this machine; None when it can."""
    if importlib.util.find_spec("flash_attn") is None:
        return "flash-attn is not installed (pip install 'longchat-cli[flash]', needs nvcc)"
    return None if torch.cuda.is_available() else "no CUDA device"


def accepts(q: Tensor, spans: Sequence[Span], softcap: float | None, sinks: Tensor | None) -> str | None:
    """None when this kernel can serve, else why not: one causal span, half precision, nothing asked back."""
    if not q.is_cuda or q.dtype not in (torch.float16, torch.bfloat16):
        return f"{q.dtype} on {q.device.type}"
    if reason := missing():
        return reason
    if len(spans) != 1 or sinks is not None or not plain(spans[0]):
        return "more than one plain span"
    return None if plain_causal(spans[0], q.shape[1]) else "not causal over all keys"


def plain(span: Span) -> bool:
    """Whether a span has nothing that flash-attn lacks: few bits, lists, turned queries, scores."""
    packed = isinstance(span.k, Packed) or isinstance(span.v, Packed)
    return not packed and span.turn is None and span.observe is None and span.index is None


def plain_causal(span: Span, rows: int) -> bool:
    """Whether the last of `rows` query rows sees every key, and each row before it one key less."""
    start, stop = span.limits()
    keys = span.k.shape[1]
    if not isinstance(start, int) or start != 0:
        return False
    if rows == 1:  # a tensor is not looked at: a captured step must not wait for it
        return isinstance(stop, int) and stop == keys
    if isinstance(stop, int):
        return False
    return bool((stop == torch.arange(keys - rows + 1, keys + 1, device=stop.device)).all())


def attend(
    q: Tensor,
    spans: Sequence[Span],
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, list[Tensor | None]]:
    """As `reference.attend` for what `accepts` lets through. Grouped keys are read in place."""
    from flash_attn import flash_attn_func

    query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (q, dense(spans[0].k), dense(spans[0].v)))
    # Causal masks of flash-attn are aligned at the last key, as ours are.
    out = flash_attn_func(query, key, value, softmax_scale=scale, causal=True, softcap=softcap or 0.0)
    return out[0].transpose(0, 1), [None]
