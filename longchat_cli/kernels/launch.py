"""What the launchers of Triton kernels share. Does not import triton."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longchat_cli.kernels.aot import NOT_INSTALLED, Configuration, Type, interpreted
from longchat_cli.kernels.packed import Keys

TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
"""torch's types in Triton's notation."""


@functools.cache
def missing() -> str | None:
    """Why Triton kernels cannot serve on this machine; None when they can."""
    if importlib.util.find_spec("triton") is None:
        return NOT_INSTALLED
    return None if torch.cuda.is_available() or interpreted() else "no CUDA device"


def unusable(q: Tensor) -> str | None:
    """Why no Triton kernel can serve queries like q here; None when one can."""
    if reason := missing():
        return reason
    if not (q.is_cuda or interpreted()):
        return "not on a GPU"
    # The interpreter's products of bfloat16 are wrong, and it says nothing.
    known = (
        (torch.float32, torch.float16) if interpreted() else (torch.float32, torch.float16, torch.bfloat16)
    )
    return None if q.dtype in known else f"dtype {q.dtype}"


def learning(*numbers: Keys | None) -> bool:
    """Whether gradients are wanted, which most kernels lack."""
    tensors = (x for x in numbers if isinstance(x, Tensor))
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def processors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; elsewhere a few, so that tests split and loop."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@dataclass(frozen=True)
class Launch:
    """One call of a @triton.jit kernel with all its arguments by name."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: Mapping[str, Any]
    warps: int = 4
    stages: int = 3

    def run(self) -> None:
        if all(self.grid):
            self.kernel[self.grid](**self.arguments, num_warps=self.warps, num_stages=self.stages)

    def configuration(self, name: str, dot: bool = True, quick: bool = False) -> Configuration:
        """What Triton would compile for this call, by its own rules of specialisation."""
        signature: dict[str, Type] = {}
        constants: dict[Any, Any] = {}
        for place, parameter in enumerate(self.kernel.params):
            value = self.arguments[parameter.name]
            if parameter.is_constexpr:
                constants[parameter.name] = value
            else:
                signature[parameter.name] = _type(value, not parameter.do_not_specialize, (place,), constants)
        return Configuration(name, self.kernel, signature, constants, self.warps, self.stages, dot, quick)


def _type(value: Any, specialized: bool, path: tuple[int, ...], constants: dict[Any, Any]) -> Type:
    """The type of the argument at `path`; what Triton makes a constant goes into `constants`."""
    if isinstance(value, tuple):
        kinds = (_type(x, specialized, (*path, place), constants) for place, x in enumerate(value))
        return tuple.__new__(type(value), kinds)  # a NamedTuple stays one: its kernel knows its names
    if value is None or (specialized and isinstance(value, int) and value == 1):
        constants[path] = value
        return "constexpr"
    if isinstance(value, Tensor):
        return TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32:16" if specialized and value % 16 == 0 else "i32"
