"""Which kernel serves: the dispatch order, what flash-attn is spared, and Triton interpreted on request."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch

from longchat_cli import kernels
from longchat_cli.errors import UsageError
from longchat_cli.kernels import Observe, Rotation, Span, flash
from longchat_cli.kernels.packed import pack

KEYS = torch.zeros(2, 64, 16)


@pytest.fixture
def unforced() -> Iterator[None]:
    yield
    kernels.force(None)


def test_order():
    assert kernels.names() == ["flash", "native", "triton", "sdpa", "reference"]
    assert [name for name, *_ in kernels.report()] == kernels.names()


def test_forced_kernel_says_why_it_cannot_serve(unforced):
    kernels.force("triton")
    with pytest.raises(
        UsageError, match="kernel 'triton' cannot serve.*(not installed|no CUDA|not on a GPU)"
    ):
        kernels.attend(torch.zeros(4, 1, 16), [Span(KEYS, KEYS)], 0.25)


@pytest.mark.parametrize(
    ("span", "plain"),
    [
        (Span(KEYS, KEYS), True),
        (Span(pack(KEYS, "int8", True), pack(KEYS, "int8", False)), False),
        (Span(KEYS, pack(KEYS, "fp8", False)), False),
        (Span(KEYS, KEYS, index=torch.zeros(2, 1, 1, dtype=torch.int64)), False),
        (Span(KEYS, KEYS, observe=Observe()), False),
        (Span(KEYS, KEYS, turn=Rotation(torch.ones(1, 8), torch.zeros(1, 8))), False),
    ],
)
def test_flash_attn_gets_plain_spans_only(span, plain):
    assert flash.plain(span) == plain


INTERPRETED = """
import torch
from longchat_cli import kernels
from longchat_cli.kernels import Span, reference

def normal(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))

spans = [Span(normal(2, 5, 16), normal(2, 5, 16)), Span(normal(2, 33, 16), normal(2, 33, 16))]
for rows in (1, 40):
    stop = torch.arange(rows) % 33
    spans[1] = Span(spans[1].k, spans[1].v, 0, stop if rows > 1 else 20)
    q = normal(4, rows, 16)
    wanted = reference.attend(q, spans, 0.25)[0]
    for forced, server in ((None, "sdpa"), ("triton", "triton")):
        kernels.force(forced)
        kernels.served.clear()
        found = kernels.attend(q, spans, 0.25)[0]
        assert dict(kernels.served) == {server: 1}, kernels.served
        assert (found - wanted).abs().max() < 1e-4
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_interpreted_kernels_serve_on_cpu_when_forced():
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_verbose_says_which_served(tiny_model, tmp_path):
    (tmp_path / "note.txt").write_text("The mill has four sails.")
    asked = ["ask", "--verbose", "--kernel", "reference", "--max-tokens", "3", "--model"]
    done = subprocess.run(
        [sys.executable, "-m", "longchat_cli", *asked, tiny_model("llama"), "note.txt", "how many sails?"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"attention calls served by: reference \d", done.stderr)
