"""Triton kernels compiled for A100 and H100 without a GPU: no spills, little shared memory, tensor cores.

Compiling needs kernels that are not interpreted, so it runs in processes of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from longchat_cli.errors import Unavailable
from longchat_cli.kernels import aot

needs_triton = pytest.mark.skipif(aot.missing() == aot.NOT_INSTALLED, reason=aot.NOT_INSTALLED)
WASTEFUL = """
import json, triton, triton.language as tl
from dataclasses import asdict
from longchat_cli.kernels import aot

@triton.jit
def product(a, b, c, K: tl.constexpr):
    i, k = tl.arange(0, 64), tl.arange(0, K)
    left, right = tl.load(a + i[:, None] * K + k[None, :]), tl.load(b + k[:, None] * 64 + i[None, :])
    tl.store(c + i[:, None] * 64 + i[None, :], tl.dot(left, right))

@triton.jit
def softmax(a, N: tl.constexpr):
    i = tl.arange(0, N)
    x = tl.load(a + i)
    e = tl.exp(x - tl.max(x, 0))
    tl.store(a + i, e / tl.sum(e, 0))

types = {"a": "*bf16", "b": "*bf16", "c": "*fp32"}
cases = [
    aot.Configuration("good", product, types, {"K": 64}),
    aot.Configuration("too much shared memory", product, types, {"K": 512}),
    aot.Configuration("spilling, without a dot", softmax, {"a": "*fp32"}, {"N": 8192}, warps=1),
]
rows = []
for case in cases:
    for capability in aot.TARGETS:
        built = aot.compile(case, capability)
        rows.append({**asdict(built), "faults": built.faults(True)})
print(json.dumps(rows))
"""


def compiled(*arguments: str) -> Any:
    """JSON printed by a Python process in which nothing is interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check(rows: list[dict[str, Any]]) -> None:
    wrong = [f"{row['kernel']} {row['target']}: {row['faults']}" for row in rows if row["faults"]]
    assert not wrong, "\n".join(wrong)
    targets = defaultdict(set)
    for row in rows:
        targets[row["kernel"]].add(row["target"])
        assert 16 <= row["registers"] <= 255 and 0 < row["occupancy"] <= 1
        assert row["target"] == "sm_90" or row["instruction"] in (None, "mma.sync")
    assert all(found == {"sm_80", "sm_90"} for found in targets.values())


@needs_triton
def test_each_kernel_for_both_targets():
    check(compiled("-m", "longchat_cli", "doctor", "--kernels", "--json"))


@needs_triton
@pytest.mark.slow
def test_every_configuration():
    code = "import json; from longchat_cli.kernels import aot; print(json.dumps(aot.report()))"
    check(compiled("-c", code))


@needs_triton
def test_every_kernel_is_in_the_quick_run():
    code = (
        "import json; from longchat_cli.kernels import aot; "
        "print(json.dumps([(c.kernel.__name__, c.name, c.quick, c.dot) for c in aot.configurations()]))"
    )
    listed = compiled("-c", code)
    assert {kernel for kernel, _, quick, _ in listed if quick} == {kernel for kernel, *_ in listed}
    names = [name for _, name, *_ in listed]
    assert len(set(names)) == len(names)


@needs_triton
def test_waste_is_found(tmp_path: Path):
    """The checks can fail."""
    script = tmp_path / "wasteful.py"
    script.write_text(WASTEFUL, encoding="utf-8")
    good_80, good_90, *bad = compiled(str(script))
    assert (good_80["faults"], good_80["instruction"]) == ([], "mma.sync")
    assert (good_90["faults"], good_90["instruction"]) == ([], "wgmma.mma_async")
    for large in bad[:2]:
        assert large["faults"] == ["131072 bytes of shared memory, the limit is 101376"]
    for spilling in bad[2:]:
        assert spilling["spills"] > 0
        assert spilling["faults"] == [f"{spilling['spills']} bytes spilled", "no tensor-core instruction"]


@pytest.mark.parametrize(
    ("registers", "shared", "warps", "capability", "expected"),
    # NVIDIA's occupancy calculator for these rows.
    [
        (32, 0, 8, 80, 1.0),
        (80, 16_384, 4, 80, 0.375),
        (128, 16_384, 8, 90, 0.25),
        (255, 0, 4, 90, 0.125),
        (64, 98_304, 4, 80, 0.0625),
        (64, 98_304, 4, 90, 0.125),
        (16, 0, 1, 80, 0.5),
    ],
)
def test_occupancy(registers: int, shared: int, warps: int, capability: int, expected: float):
    assert aot.SMS[capability].occupancy(registers, shared, warps) == expected


def test_says_why_it_cannot(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(aot.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Unavailable, match="triton is not installed"):
        aot.report()
    monkeypatch.undo()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    if aot.missing() != aot.NOT_INSTALLED:
        with pytest.raises(Unavailable, match="TRITON_INTERPRET is set"):
            aot.report()
