"""Positions stay exact in endless streams: a step at token 5,000,000 is the same step at token 20."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
from torch import Tensor, nn

from longchat_cli.attention import hf, method_class, positions, rope
from longchat_cli.attention.hf import HFDecoder
from longchat_cli.attention.layer import Cache, Method
from longchat_cli.models.lean import LeanDecoder

pytestmark = pytest.mark.usefixtures("one_thread")
FAR = 5_000_001
TOLERANCE = 1e-5
"""On logits of about 5, in float32; float32 angles are off by more than a hundred times that."""

METHODS: dict[str, dict[str, Any]] = {"window": {"window": 9}, "sink": {"sinks": 3, "window": 9}}
TURNING = {
    "llama": "halves",
    "llama3-rope": "scaled frequencies",
    "yarn": "scaled cos and sin",
    "glm4": "pairs, partial",
    "phi3": "halves, partial",
    "cohere2": "pairs, in layers of the model's own",
    "gpt-oss": "once",
    "gemma3": "a set of frequencies per type of layer",
    "gpt-neox": "halves, partial, through the keys alone",
    "qwen3.5": "an axis of positions more",
    "smollm3": "one layer without",
}


def lean(name: str) -> LeanDecoder:
    model = tiny.fresh(name)
    return LeanDecoder(model.config.to_dict(), dict(model.state_dict()))


def stream(decoder: Any, method: Method, far: int) -> Tensor:
    """Logits [30, vocab] of tokens read and decoded from position `far` on, after nothing but the sinks."""
    cache = decoder.new_cache(method)
    decoder.forward(tiny.tokens(20), cache)
    jump(cache, far, decoder.new_cache(method))
    ids = tiny.tokens(30, seed=1)
    out = [decoder.forward(ids[:13], cache, 13)]
    cache.decoding = True
    return torch.cat(out + [decoder.forward(token.view(1), cache) for token in ids[13:]])


def jump(cache: Cache, to: int, fresh: Cache) -> None:
    """Forget the recent tokens and go on at position `to`; the model's own layers start afresh."""
    for layer in cache.own():
        layer.kv = layer.buffer(to)  # type: ignore[attr-defined]
        layer.seen = to
    cache.position, cache.foreign = to, fresh.foreign


def drift(decoder: Any, name: str) -> float:
    method = method_class(name).build(METHODS[name])
    here, there = stream(decoder, method, 20), stream(decoder, method, FAR)
    assert there.isfinite().all()
    return float((here - there).abs().max())


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("architecture", TURNING)
def test_a_step_far_out_is_the_same_step(architecture, name):
    decoder = HFDecoder(tiny.fresh(architecture))
    assert decoder.inexact == []
    assert drift(decoder, name) <= TOLERANCE


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("architecture", ["llama", "llama3-rope", "qwen3", "gemma3"])
def test_a_step_far_out_is_the_same_step_in_the_lean_forward(architecture, name):
    assert drift(lean(architecture), name) <= TOLERANCE


def in_float32(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    angles = positions.float().unsqueeze(-1) * frequencies.float()
    return angles.cos(), angles.sin()


@pytest.mark.parametrize(
    ("architecture", "name"), [("lean", "window"), ("lean", "sink"), *((a, "window") for a in TURNING)]
)
def test_float32_angles_would_fail(monkeypatch, architecture, name):
    """The stock rotary modules, and the lean forward with angles in float32."""
    monkeypatch.setattr(hf, "make_exact", lambda model: [])
    if architecture == "lean":
        monkeypatch.setattr(rope, "cos_sin", in_float32)
        decoder: Any = lean("llama")
    else:
        decoder = HFDecoder(tiny.fresh(architecture))
    assert drift(decoder, name) > 100 * TOLERANCE


# --- the hook


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_every_rotary_module_is_recognised_and_nearby_unchanged(architecture):
    model, ids = tiny.fresh(architecture), tiny.tokens(44)
    assert positions.make_exact(model) == []
    with torch.no_grad():
        found = model(input_ids=ids.unsqueeze(0), use_cache=False).logits[0]
    assert (found - tiny.stock_logits(architecture, ids)).abs().max() <= TOLERANCE


class Sines(nn.Module):
    """A rotary module of no known layout: sine before cosine."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.tensor([1.0, 0.1]))

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None] * self.inv_freq
        return angles.sin(), angles.cos()


class Lengths(Sines):
    """A rotary module called in another way."""

    def forward(self, length: int) -> Tensor:  # type: ignore[override]
        return torch.arange(length)[:, None] * self.inv_freq


@pytest.mark.parametrize("module", [Sines(), Lengths()], ids=["layout", "call"])
def test_modules_not_recognised_are_named_and_left_alone(module):
    model = nn.ModuleDict({"rotary": module, "other": nn.Linear(2, 2)})
    assert positions.make_exact(model) == ["rotary"]
    assert not module._forward_hooks


def test_a_decoder_names_modules_not_recognised(monkeypatch):
    monkeypatch.setattr(hf, "make_exact", lambda model: ["model.rotary_emb"])
    assert "model.rotary_emb keeps float32 angles" in HFDecoder(tiny.fresh("llama")).notes[0]
    assert lean("llama").notes == ()


def test_cos_and_sin_keep_the_dtype_of_the_module():
    model = tiny.fresh("llama").to(torch.bfloat16)
    plain = model.model.rotary_emb(torch.zeros(1, 1, 1, dtype=torch.bfloat16), torch.arange(8)[None])
    positions.make_exact(model)
    exact = model.model.rotary_emb(
        torch.zeros(1, 1, 1, dtype=torch.bfloat16), position_ids=torch.arange(8)[None]
    )
    assert [x.dtype for x in exact] == [torch.bfloat16] * 2
    assert all(torch.equal(a, b) for a, b in zip(plain, exact, strict=True))
