"""The matrix on real weights: the default model through both forwards, Gemma 3 270M where it is pulled.

Tolerances belong to a path: bounds on a row's mean error of logits (their standard deviation is about 5),
against stock transformers in eager attention and float32 on the same ready form.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from test_architectures import CHUNKS, DECODE, METHODS, UNDEFINED, WIDE, read, small
from torch import Tensor
from transformers import AutoModelForCausalLM

from longchat_cli.attention import method_class
from longchat_cli.models import catalog, load
from longchat_cli.prose import prose
from longchat_cli.tokens import Tokenizer

LENGTH = 48


@dataclass(frozen=True)
class Path:
    """A way through a model; `stock` and `self` bound the error of its logits against stock and itself."""

    model: str
    dtype: str
    lean: bool
    stock: float
    self: float
    packed: bool = False


PATHS = {
    "lean-float32": Path("smollm2", "float32", True, 1e-4, 1e-4),
    "lean-bfloat16": Path("smollm2", "bfloat16", True, 0.3, 0.3),
    "lean-low-bit": Path("smollm2", "bfloat16", True, 0.5, 0.5, packed=True),
    "transformers-float32": Path("smollm2", "float32", False, 1e-4, 1e-4),
    "transformers-bfloat16": Path("smollm2", "bfloat16", False, 0.6, 0.6),
    "gemma-float32": Path("gemma3-270m", "float32", False, 1e-4, 1e-4),
    "gemma-bfloat16": Path("gemma3-270m", "bfloat16", False, 1.0, 1.0),
}
QUICK = {"lean-low-bit", "transformers-bfloat16"}
"""The paths of a default run: low-bit weights decode, the same file's bfloat16 ones read."""

SELECTION = {"full", "sink"}
"""In bfloat16 methods that select keys by score may choose others for a rounding: they run in float32."""


@functools.cache
def ready(model: str) -> load.ReadyModel:
    entry = catalog.MODELS[model]
    if entry.terms and not entry.installed():
        pytest.skip(f"{model} is not pulled (it has terms to accept): longchat models pull {model}")
    return load.find(model)


@functools.cache
def decoder(path: str) -> load.Decoder:
    way = PATHS[path]
    return load.load_decoder(ready(way.model), "cpu", way.dtype, packed=way.packed, lean=way.lean)


@functools.cache
def tokens(model: str) -> Tensor:
    """Prose, int64 [LENGTH]."""
    tokenizer = Tokenizer.from_dir(ready(model).path)
    return torch.tensor(tokenizer.encode(prose(1000, random.Random(0)))[:LENGTH])


@functools.cache
def stock_logits(model: str) -> Tensor:
    """Logits [LENGTH, vocab] of stock transformers, eager, float32."""
    stock = AutoModelForCausalLM.from_pretrained(
        ready(model).path, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    with torch.no_grad():
        return stock(input_ids=tokens(model).unsqueeze(0), use_cache=False).logits[0]


def worst(a: Tensor, b: Tensor) -> float:
    """The mean absolute difference over a row's tokens that may be chosen, of the row where it is largest.

    Of the others, which have e^-10 of the likeliest one's probability, the native library knows less.
    """
    assert a.shape == b.shape
    near = torch.stack([x >= x.amax(-1, keepdim=True) - 10 for x in (a, b)]).any(0)
    apart = (a - b).abs() * near
    return float((apart.sum(-1) / near.sum(-1)).nan_to_num(torch.inf).max())


def cells(invariant: str = "") -> Any:
    found = []
    for path, way in PATHS.items():
        for name in METHODS:
            if (name, invariant) in UNDEFINED or not (way.dtype == "float32" or name in SELECTION):
                continue
            rare = path not in QUICK or name not in SELECTION
            found.append(pytest.param(path, name, id=f"{path}-{name}", marks=[pytest.mark.slow] * rare))
    return pytest.mark.parametrize(("path", "name"), found)


@cells()
def test_within_the_budget_it_is_the_stock_model(models_home, path, name):
    model, ids = decoder(path), tokens(PATHS[path].model)
    cache = model.new_cache(method_class(name).build(WIDE.get(name, {})))
    found = [read(model, cache, ids, [LENGTH - 6]), read(model, cache, ids[-6:], [1] * 6, decode=True)]
    error = worst(torch.cat(found), stock_logits(PATHS[path].model))
    print(f"stock {path} {name}: {error:.2g}")
    assert error <= PATHS[path].stock


@functools.cache
def read_whole(path: str, name: str) -> Tensor:
    """Logits [LENGTH, vocab] of one call, beyond the method's budget."""
    model, ids = decoder(path), tokens(PATHS[path].model)
    return read(model, model.new_cache(small(name)), ids, [LENGTH])


@cells(CHUNKS)
def test_chunks_do_not_matter(models_home, path, name):
    model, ids = decoder(path), tokens(PATHS[path].model)
    found = read(model, model.new_cache(small(name)), ids, [7, 1, 20, LENGTH - 28])
    error = worst(found, read_whole(path, name))
    print(f"chunks {path} {name}: {error:.2g}")
    assert error <= PATHS[path].self


@cells(DECODE)
def test_decoding_equals_reading(models_home, path, name):
    model, ids = decoder(path), tokens(PATHS[path].model)
    cache = model.new_cache(small(name))
    found = [read(model, cache, ids, [LENGTH - 6]), read(model, cache, ids[-6:], [1] * 6, decode=True)]
    error = worst(torch.cat(found), read_whole(path, name))
    print(f"decode {path} {name}: {error:.2g}")
    assert error <= PATHS[path].self
