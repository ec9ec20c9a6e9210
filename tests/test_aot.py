"""Triton kernels compiled for A100 and H100 without a GPU: no spills, little shared memory, tensor cores.

Compiling needs kernels that are not interpreted, so it runs in processes of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from longchat_cli import doctor
from longchat_cli.cli import cli
from longchat_cli.errors import Unavailable
from longchat_cli.kernels import aot

needs_triton = pytest.mark.skipif(aot.missing() == aot.NOT_INSTALLED, reason=aot.NOT_INSTALLED)
EXAMINE = """
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
compiled = [aot.compile(case, capability) for case in cases for capability in aot.TARGETS]
print(json.dumps({
    "samples": [asdict(built) | {"faults": built.faults(dot=True)} for built in compiled],
    "listed": [(c.kernel.__name__, c.quick, c.name, c.targets) for c in aot.configurations()],
    "quick": aot.report(quick=True),
}))
"""


def compiled(code: str) -> Any:
    """JSON printed by a Python process in which nothing is interpreted."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")  # Triton reads its kernels' source from a file
        script.write_text(code, encoding="utf-8")
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def found() -> Any:
    return compiled(EXAMINE)


def check(rows: list[dict[str, Any]]) -> None:
    wrong = [f"{row['kernel']} {row['target']}: {row['faults']}" for row in rows if row["faults"]]
    assert not wrong, "\n".join(wrong)
    assert {row["target"] for row in rows} == {"sm_80", "sm_90"}
    for row in rows:
        assert 16 <= row["registers"] <= 255 and 0 < row["occupancy"] <= 1
        assert row["target"] == "sm_90" or row["instruction"] in (None, "mma.sync")


@needs_triton
def test_each_kernel_for_both_targets(found):
    check(found["quick"])


@needs_triton
@pytest.mark.slow
def test_every_configuration():
    check(compiled("import json; from longchat_cli.kernels import aot; print(json.dumps(aot.report()))"))


@needs_triton
def test_every_kernel_is_in_the_quick_run(found):
    """For both targets, though not in every configuration."""
    every, quick = set(), set()
    for kernel, in_quick, _, targets in found["listed"]:
        every |= {(kernel, target) for target in aot.TARGETS}
        quick |= {(kernel, target) for target in targets if in_quick}
    assert quick == every
    names = [(name, target) for *_, name, targets in found["listed"] for target in targets]
    assert len(set(names)) == len(names)


@needs_triton
def test_waste_is_found(found):
    """The checks can fail."""
    good_80, good_90, *bad = found["samples"]
    assert (good_80["faults"], good_80["instruction"]) == ([], "mma.sync")
    assert (good_90["faults"], good_90["instruction"]) == ([], "wgmma.mma_async")
    for large in bad[:2]:
        assert large["faults"] == ["131072 bytes of shared memory, the limit is 101376"]
    for spilling in bad[2:]:
        assert spilling["spills"] > 0
        assert spilling["faults"] == [f"{spilling['spills']} bytes spilled", "no tensor-core instruction"]


@needs_triton
def test_doctor_shows_a_line_for_each(found):
    header, _, *lines = doctor.show_costs(found["quick"]).splitlines()
    assert [cell.strip() for cell in header.strip("|").split("|")][:4] == [
        "kernel", "target", "registers", "shared KiB",
    ]  # fmt: skip
    assert len(lines) == len(found["quick"])
    for line, row in zip(lines, found["quick"], strict=True):
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert cells[:3] == [row["kernel"], row["target"], str(row["registers"])]
        assert float(cells[3]) == pytest.approx(row["shared_bytes"] / 1024, abs=0.06)
        assert cells[-1] == "ok"


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
    assert isinstance(CliRunner().invoke(cli, ["doctor", "--kernels"]).exception, Unavailable)
    monkeypatch.undo()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    if aot.missing() != aot.NOT_INSTALLED:
        with pytest.raises(Unavailable, match="TRITON_INTERPRET is set"):
            aot.report()
