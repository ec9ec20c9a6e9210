"""What keys and values weigh, from a model's config.json alone, and what memory is free."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

BYTES_PER_VALUE = 2
"""bfloat16 and float16."""


def kv_bytes(config: Mapping[str, Any], tokens: int) -> int:
    """Bytes of the keys and values of `tokens` tokens: layers x KV heads x head size x 2 (key and value) x 2.

    A layer of sliding attention holds its window at most; layers without attention hold none.
    """
    text = config.get("text_config") or config
    layers = _first(text, "num_hidden_layers", "n_layer")
    heads = _first(text, "num_attention_heads", "n_head")
    size = text.get("head_dim") or _first(text, "hidden_size", "n_embd") // heads
    per_token = (text.get("num_key_value_heads") or heads) * size * 2 * BYTES_PER_VALUE
    held = {"full_attention": tokens, "sliding_attention": min(tokens, text.get("sliding_window") or tokens)}
    kinds = text.get("layer_types") or ["full_attention"] * layers
    return per_token * sum(held.get(kind, 0) for kind in kinds)


def free_bytes() -> int:
    """Bytes of main memory that can be had without swapping; where nobody says, all there are."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        available = next(line for line in lines if line.startswith("MemAvailable:"))
        return int(available.split()[1]) * 1024
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def give_back() -> None:
    """Let the system have what was freed; glibc keeps what temporaries took, of a prompt some 60 MiB."""
    with contextlib.suppress(OSError, TypeError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _first(config: Mapping[str, Any], *names: str) -> int:
    return int(next(config[name] for name in names if config.get(name)))
