"""Triton kernels in Triton's interpreter: in a process of its own, because kernels that were defined under
TRITON_INTERPRET cannot be compiled, and others cannot be interpreted."""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from typing import Any

import pytest

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


def interpreted(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of a test module where kernels are interpreted; what it raises is raised here."""
    return _process().submit(function, *arguments).result(timeout=280)


@functools.cache
def _process() -> ProcessPoolExecutor:
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _prepare)
    atexit.register(pool.shutdown, cancel_futures=True)
    return pool


def _prepare() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    import torch

    torch.set_num_threads(1)
    # numpy warns of infinity minus infinity where kernels choose the other branch.
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton")
