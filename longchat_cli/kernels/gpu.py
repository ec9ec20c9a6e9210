"""Attention over spans by the Triton kernels: split-K for few rows, all spans in one pass for many."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from types import ModuleType

from torch import Tensor

from longchat_cli.kernels.launch import unusable
from longchat_cli.kernels.span import Span


@functools.cache
def _kernels() -> list[ModuleType]:
    """In order of preference; imported once a GPU is at hand, because they import triton."""
    names = ("triton_decode", "triton_prefill")
    return [importlib.import_module(f"longchat_cli.kernels.{name}") for name in names]


def accepts(q: Tensor, spans: Sequence[Span], softcap: float | None, sinks: Tensor | None) -> str | None:
    """None when one of the kernels can serve, else why none can."""
    if reason := unusable(q):
        return reason
    refusals = [kernel.accepts(q, spans, softcap, sinks) for kernel in _kernels()]
    return None if None in refusals else "; ".join(refusals)


def attend(
    q: Tensor,
    spans: Sequence[Span],
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, list[Tensor | None]]:
    """As `reference.attend` for what `accepts` lets through."""
    kernel = next(kernel for kernel in _kernels() if kernel.accepts(q, spans, softcap, sinks) is None)
    return kernel.attend(q, spans, scale, softcap, sinks)
