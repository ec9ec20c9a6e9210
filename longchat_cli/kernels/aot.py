"""Ahead-of-time compilation of the Triton kernels: what each costs on an SM, without a GPU.

A kernel that spills, that does not fit the shared memory, or whose products miss the tensor cores shows here,
in the test suite and in `longchat doctor --kernels`, before it ever runs.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from longchat_cli.errors import Unavailable

MODULES = ("triton_decode", "triton_prefill", "triton_pool")
"""Modules of this package with Triton kernels; each has `configurations()`, what its launcher can choose."""

TARGETS = (80, 90)
"""Compute capabilities that are checked: A100, and H100 and H200."""

SHARED_LIMIT = 99 * 1024
"""Bytes of shared memory that a block may use on every GPU from Ampere on (sm_86 and sm_89 have least)."""

Type = str | tuple["Type", ...]


@dataclass(frozen=True)
class Configuration:
    """One way in which a launcher calls `kernel` (a @triton.jit function).

    `signature` gives every argument's type in Triton's notation: "*bf16", "fp32", "i32", with ":16" after a
    number that is always a multiple of 16 (pointers are taken to be), a tuple of types for a tuple. What is
    in `constants` needs no type; a constant within a tuple has the type "constexpr" there, and its path of
    numbers (argument, place) for a name. `dot`: the kernel has matrix products. `quick`: checked in every
    test run. `targets`: where the launcher would choose it.
    """

    name: str
    kernel: Any
    signature: Mapping[str, Type]
    constants: Mapping[Any, Any] = field(default_factory=dict)
    warps: int = 4
    stages: int = 2
    dot: bool = True
    quick: bool = False
    targets: tuple[int, ...] = TARGETS


@dataclass(frozen=True)
class Compiled:
    """What one block of a compiled kernel takes: registers a thread, bytes spilled a thread, bytes of shared
    memory; `occupancy`, the share of an SM's warps that can be resident; the tensor-core `instruction`."""

    registers: int
    spills: int
    shared_bytes: int
    occupancy: float
    instruction: str | None

    def faults(self, dot: bool) -> list[str]:
        """What is wrong with it, empty when nothing is."""
        found = [f"{self.spills} bytes spilled"] if self.spills else []
        if self.shared_bytes > SHARED_LIMIT:
            found.append(f"{self.shared_bytes} bytes of shared memory, the limit is {SHARED_LIMIT}")
        return [*found, "no tensor-core instruction"] if dot and not self.instruction else found


@dataclass(frozen=True)
class SM:
    """A streaming multiprocessor (CUDA programming guide, technical specifications per capability)."""

    shared_bytes: int
    registers: int = 65536
    warps: int = 64
    blocks: int = 32

    def occupancy(self, registers: int, shared_bytes: int, warps: int) -> float:
        """Share of resident warps with blocks of `warps` warps; registers come by 256 a warp, and each block
        takes 1 KiB of shared memory for the system."""
        per_block = warps * _up(registers * 32, 256)
        fit = [self.blocks, self.warps // warps, self.registers // max(per_block, 1)]
        fit.append(self.shared_bytes // _up(shared_bytes + 1024, 128))
        return min(fit) * warps / self.warps


SMS = {80: SM(164 * 1024), 90: SM(228 * 1024)}

NOT_INSTALLED = "triton is not installed (pip install triton, on Linux)"


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter: on the CPU, in numpy, for tests."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def missing() -> str | None:
    """Why nothing can be compiled here; None when it can."""
    if importlib.util.find_spec("triton") is None:
        return NOT_INSTALLED
    return "TRITON_INTERPRET is set: interpreted kernels cannot be compiled" if interpreted() else None


def configurations() -> Iterator[Configuration]:
    """Every configuration of every kernel that the dispatcher can choose."""
    for module in MODULES:
        yield from importlib.import_module(f"longchat_cli.kernels.{module}").configurations()


def report(quick: bool = False) -> list[dict[str, Any]]:
    """A row for each configuration (`quick`: those of every test run) and target, ready for JSON: `kernel`,
    `target`, the fields of `Compiled` and `faults`. Raises Unavailable where triton
    is not installed or interprets."""
    if reason := missing():
        raise Unavailable("kernels cannot be compiled ahead of time", reason)
    rows = []
    for chosen in configurations():
        for capability in chosen.targets if chosen.quick or not quick else ():
            built = compile(chosen, capability)
            names = {"kernel": chosen.name, "target": f"sm_{capability}"}
            rows.append({**names, **asdict(built), "faults": built.faults(chosen.dot)})
    return rows


def compile(configuration: Configuration, capability: int) -> Compiled:
    """Compile for compute capability 80 or 90; takes about a second. A kernel that is wrong raises Triton's
    own errors."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    chosen = configuration
    options = {"num_warps": chosen.warps, "num_stages": chosen.stages, "enable_fp_fusion": True}
    built = triton.compile(
        ASTSource(chosen.kernel, *_arguments(chosen)), GPUTarget("cuda", capability, 32), options
    )
    ptx, shared = built.asm["ptx"], built.metadata.shared
    registers, spills = _assemble(ptx, capability)
    occupancy = SMS[capability].occupancy(registers, shared, chosen.warps)
    return Compiled(registers, spills, shared, occupancy, _instruction(ptx))


def _arguments(
    chosen: Configuration,
) -> tuple[dict[str, Type], Mapping[Any, Any], dict[tuple[int, ...], Any]]:
    """Signature, constants and attributes in the kernel's own order, as ASTSource takes them."""
    multiples: dict[tuple[int, ...], Any] = {}

    def bare(kind: Type, path: tuple[int, ...]) -> Type:
        if isinstance(kind, tuple):
            kinds = (bare(inner, (*path, place)) for place, inner in enumerate(kind))
            return tuple.__new__(type(kind), kinds)  # a NamedTuple stays one
        kind, _, multiple = kind.partition(":")
        if multiple or kind.startswith("*"):
            multiples[path] = [["tt.divisibility", 16]]
        return kind

    kinds = dict.fromkeys(chosen.constants, "constexpr") | dict(chosen.signature)
    names = chosen.kernel.arg_names
    return (
        {name: bare(kinds[name], (place,)) for place, name in enumerate(names)},
        chosen.constants,
        multiples,
    )


def _assemble(ptx: str, capability: int) -> tuple[int, int]:
    """Registers and spilled bytes a thread, as ptxas reports them."""
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        # The flags that Triton itself assembles with: others allocate registers differently.
        command = [get_ptxas(capability).path, "-v", "-lineinfo", "--regAllocOptLevel=2"]
        command += [f"--gpu-name={sm_arch_from_capability(capability)}", str(source), "-o", f"{source}.o"]
        log = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    stores, loads = (int(_find(rf"(\d+) bytes spill {kind}", log)) for kind in ("stores", "loads"))
    return int(_find(r"Used (\d+) registers", log)), max(stores, loads)


def _find(pattern: str, log: str) -> str:
    found = re.search(pattern, log)
    if found is None:
        raise ValueError(f"ptxas does not report /{pattern}/: {log}")
    return found[1]


def _instruction(ptx: str) -> str | None:
    """The tensor-core instruction of sm_90 (a whole warp group) or of sm_80 (one warp), if any."""
    return next((name for name in ("wgmma.mma_async", "mma.sync") if name in ptx), None)


def _up(number: int, step: int) -> int:
    return -(-number // step) * step
