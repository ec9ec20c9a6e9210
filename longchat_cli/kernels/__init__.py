"""Attention kernels over spans. Dispatch is an ordered list: the first that accepts the inputs serves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from torch import Tensor

from longchat_cli.errors import UsageError
from longchat_cli.kernels import flash, gpu, launch, reference, sdpa
from longchat_cli.kernels.span import Bound, Observe, Rotation, Span

__all__ = ["Bound", "Observe", "Rotation", "Span", "attend", "force", "report", "served"]

Accepts = Callable[[Tensor, Sequence[Span], float | None, Tensor | None], str | None]

KERNELS: dict[str, tuple[Accepts, Callable]] = {
    "flash": (flash.accepts, flash.attend),
    "triton": (gpu.accepts, gpu.attend),
    "sdpa": (sdpa.accepts, sdpa.attend),
    "reference": (lambda q, spans, softcap, sinks: None, reference.attend),
}
DESCRIPTIONS = {
    "flash": "flash-attn, for plain full attention on a GPU",
    "triton": "Triton, for every method on a GPU",
    "sdpa": "torch's fused CPU attention, one log-sum-exp merge over spans",
    "reference": "dense float32; serves whatever no other kernel accepts",
}

served: Counter[str] = Counter()
"""How often each kernel served in this process; `--verbose` prints it."""

_forced: str | None = None


def force(name: str | None) -> None:
    """Use one kernel for everything (None: the ordered list again). Raises UsageError for an unknown name."""
    global _forced
    if name is not None and name not in KERNELS:
        raise UsageError(f"no kernel '{name}'", "", f"choose from {', '.join(KERNELS)}")
    _forced = name


def attend(
    q: Tensor,
    spans: Sequence[Span],
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, list[Tensor | None]]:
    """Attention of q [heads, rows, dim] over all spans in one softmax; see `reference.attend`.

    Raises UsageError when a forced kernel does not accept the inputs.
    """
    for name in [_forced] if _forced else _candidates(q):
        accepts, kernel = KERNELS[name]
        reason = accepts(q, spans, softcap, sinks)
        if reason is None:
            served[name] += 1
            return kernel(q, spans, scale, softcap, sinks)
    raise UsageError(f"kernel '{_forced}' cannot serve this model", reason or "", "leave --kernel out")


def _candidates(q: Tensor) -> list[str]:
    """Kernels in dispatch order; interpreted on the CPU, Triton serves only whoever forces it."""
    return [name for name in KERNELS if name != "triton" or q.is_cuda]


def report() -> list[tuple[str, bool, str]]:
    """(name, serves on this machine, what it is or why not) for `longchat doctor`."""
    import torch

    cuda = torch.cuda.is_available()
    reasons = {
        "flash": flash.missing(),
        "triton": launch.missing(),
        "sdpa": "a GPU is in use" if cuda else None,
        "reference": None,
    }
    return [(name, reason is None, reason or DESCRIPTIONS[name]) for name, reason in reasons.items()]
