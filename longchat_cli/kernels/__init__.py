"""Attention kernels over spans. Dispatch is an ordered list: the first that accepts the inputs serves."""

from __future__ import annotations

import functools
import importlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from longchat_cli.errors import UsageError
from longchat_cli.kernels import flash, launch, native, reference, sdpa
from longchat_cli.kernels.span import Bound, Observe, Rotation, Span

__all__ = ["Bound", "Observe", "Rotation", "Span", "attend", "force", "forced", "report", "served"]


@dataclass(frozen=True)
class Kernel:
    """A way to attend. Kernels of one `name`, which is what --kernel takes, share the work between them.

    `accepts`: None when it can serve these inputs, else why not; `attend`: as `reference.attend`;
    `missing`: None when it can serve on this machine, else why not; `about`: what it is for.
    """

    name: str
    accepts: Callable[[Tensor, Sequence[Span], float | None, Tensor | None], str | None]
    attend: Callable[..., tuple[Tensor, list[Tensor | None]]]
    missing: Callable[[], str | None]
    about: str


def _triton(module: str) -> Kernel:
    """A kernel of a module that imports triton and therefore is imported only where it can serve."""
    load = functools.partial(importlib.import_module, f"longchat_cli.kernels.{module}")
    return Kernel(
        "triton",
        lambda *inputs: launch.missing() or load().accepts(*inputs),
        lambda *inputs: load().attend(*inputs),
        launch.missing,
        "Triton, for every method on a GPU",
    )


_NATIVE = "longchat's own library: decoding on a CPU, and prompts where it has tile instructions (AMX)"

KERNELS = (
    Kernel(
        "flash", flash.accepts, flash.attend, flash.missing, "flash-attn, for plain full attention on a GPU"
    ),
    Kernel("native", native.accepts_few, native.attend, native.missing, _NATIVE),
    Kernel("native", native.accepts_many, native.attend_many, native.missing, _NATIVE),
    _triton("triton_decode"),
    _triton("triton_prefill"),
    Kernel(
        "sdpa",
        sdpa.accepts,
        sdpa.attend,
        sdpa.missing,
        "torch's fused CPU attention, one log-sum-exp merge over spans",
    ),
    Kernel("native", native.accepts, native.attend, native.missing, _NATIVE),
    Kernel(
        "reference",
        lambda *inputs: None,
        reference.attend,
        lambda: None,
        "dense float32; serves whatever no other kernel accepts",
    ),
)
"""In order of preference."""

served: Counter[str] = Counter()
"""How often each kernel served in this process; `--verbose` prints it."""

_forced: str | None = None


def names() -> list[str]:
    """What --kernel takes."""
    return list(dict.fromkeys(kernel.name for kernel in KERNELS))


def force(name: str | None) -> None:
    """Use one kernel for everything (None: the ordered list again). Raises UsageError for an unknown name."""
    global _forced
    if name is not None and name not in names():
        raise UsageError(f"no kernel '{name}'", "", f"choose from {', '.join(names())}")
    _forced = name


def forced() -> str | None:
    """The kernel that `force` chose."""
    return _forced


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
    reasons = []
    for kernel in KERNELS:
        if not _asked(kernel, q):
            continue
        reason = kernel.accepts(q, spans, softcap, sinks)
        if reason is None:
            served[kernel.name] += 1
            return kernel.attend(q, spans, scale, softcap, sinks)
        reasons.append(reason)
    why = "; ".join(dict.fromkeys(reversed(reasons)))  # the last one takes most, and what it lacks matters
    raise UsageError(f"kernel '{_forced}' cannot serve this model", why, "leave --kernel out")


def _asked(kernel: Kernel, q: Tensor) -> bool:
    """Whether to try a kernel; interpreted on the CPU, Triton serves only whoever forces it."""
    return kernel.name == _forced if _forced else q.is_cuda or kernel.name != "triton"


def report() -> list[tuple[str, bool, str]]:
    """(name, serves on this machine, what it is or why not) for `longchat doctor`."""
    found = {kernel.name: (kernel.missing(), kernel.about) for kernel in KERNELS}
    return [(name, reason is None, reason or about) for name, (reason, about) in found.items()]
