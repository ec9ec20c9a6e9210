"""The lean forward against stock transformers in eager attention, on the same files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from longchat_cli import state
from longchat_cli.attention import METHODS, method_class
from longchat_cli.attention.hf import HFDecoder
from longchat_cli.attention.layer import Cache
from longchat_cli.errors import BadInput
from longchat_cli.models.lean import FULL, SLIDING, LeanDecoder, refuses

pytestmark = pytest.mark.usefixtures("one_thread")

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama-mha-wide-heads": ("Llama", {"num_key_value_heads": 4, "head_dim": 16}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3-rope": ("Llama", {"rope_parameters": tiny.LLAMA3}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "linear-rope": ("Llama", {"rope_parameters": {**tiny.BASE, "rope_type": "linear", "factor": 4.0}}),
    "gemma3": ("Gemma3Text", tiny.ARCHITECTURES["gemma3"].options),
    "gemma3-untied-softcap": (
        "Gemma3Text",
        {
            **tiny.ARCHITECTURES["gemma3"].options,
            "layer_types": [SLIDING, FULL, SLIDING],
            "tie_word_embeddings": False,
            "final_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 5,
            "rope_parameters": {
                FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                SLIDING: {"rope_type": "default", "rope_theta": 100.0},
            },
        },
    ),
}
SMALL = {
    "window": {"window": 9},
    "sink": {"sinks": 3, "window": 9},
    "cca": {"group": 4, "local": 6, "sinks": 3},
    "infllm": {"init": 3, "local": 8, "block": 4, "topk": 2, "representatives": 2},
    "recycled": {"fraction": 4, "stride": 5},
    "quest": {"budget": 12, "page": 4, "dense": 0},
    "pyramidinfer": {"ratio": 0.5, "recent": 0.1, "least": 3},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    made: dict[str, tuple[Path, Any]] = {}

    def save(name: str) -> tuple[Path, Any]:
        if name not in made:
            config, options = MODELS[name]
            model = tiny.build(config, **options)
            path = tmp_path_factory.mktemp(name)
            model.save_pretrained(path)
            made[name] = path, model
        return made[name]

    return save


@pytest.mark.parametrize("name", MODELS)
def test_equals_transformers(saved, name):
    path, stock = saved(name)
    ids = tiny.tokens(90)
    with torch.no_grad():
        wanted = stock(input_ids=ids.unsqueeze(0), use_cache=False).logits[0]
    model = LeanDecoder.from_dir(path, dtype=torch.float32)
    assert (model.dtype, model.vocab_size, model.window) == (torch.float32, tiny.VOCABULARY, 512)
    cache = model.new_cache(method_class("full").build({}))
    found = [model.forward(ids[:50], cache, 50), model.forward(ids[50:80], cache, 30)]
    cache.decoding = True
    found += [model.forward(token.view(1), cache) for token in ids[80:]]
    assert (torch.cat(found) - wanted).abs().max() <= 1e-4
    assert cache.seen == 90


def test_only_the_last_logits(saved):
    model = LeanDecoder.from_dir(saved("llama")[0], dtype=torch.float32)
    every = model.forward(tiny.tokens(9), model.new_cache(method_class("full").build({})), 9)
    for count in (0, 1, 4, 99):
        found = model.forward(tiny.tokens(9), model.new_cache(method_class("full").build({})), count)
        assert torch.allclose(found, every[9 - min(count, 9) :], atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["llama3-rope", "gemma3"])
def test_both_decoders_agree_under_every_method(saved, name, method):
    path, _ = saved(name)
    lean = LeanDecoder.from_dir(path, dtype=torch.float32)
    built = method_class(method).build(SMALL.get(method, {}))
    ids = tiny.tokens(40)
    outs, visible = [], []
    for model in (lean, HFDecoder(tiny.build(MODELS[name][0], **MODELS[name][1]))):
        cache = model.new_cache(built)
        # A last chunk of one token is reading, not decoding, in both.
        parts = [model.forward(ids[:27], cache, 27), model.forward(ids[27:28], cache)]
        cache.decoding = True
        parts += [model.forward(token.view(1), cache) for token in ids[28:]]
        outs.append(torch.cat(parts))
        visible.append((cache.seen, cache.visible()))
    assert (outs[0] - outs[1]).abs().max() <= 1e-4
    assert visible[0] == visible[1]


@pytest.mark.parametrize("method", METHODS)
def test_states_with_sliding_layers_are_rolled_back_and_saved(saved, tmp_path, method):
    """From a mark and from a file, beyond the sliding window of 16."""
    model = LeanDecoder.from_dir(saved("gemma3")[0], dtype=torch.float32)
    built = method_class(method).build(SMALL.get(method, {}))
    ids, cache = tiny.tokens(40), model.new_cache(built)
    model.forward(ids[:20], cache)
    cache.decoding = True
    mark = cache.snapshot()
    state.save(tmp_path / "state", cache, {}, {})
    visible = cache.visible()

    def go_on(cache: Cache) -> Tensor:
        cache.decoding = True
        return torch.cat([model.forward(token.view(1), cache) for token in ids[20:]])

    wanted = go_on(cache)
    cache.restore(mark)
    model.forward(tiny.tokens(9, seed=1), cache)
    cache.restore(mark)
    assert torch.equal(go_on(cache), wanted)
    again = model.new_cache(built)
    state.load(tmp_path / "state", again, {})
    assert (again.seen, again.visible()) == (20, visible)
    assert torch.equal(go_on(again), wanted)


def test_sliding_layers_keep_their_window_and_no_more(saved):
    """Two layers of three grow with the text; the first is bounded, and not what `visible` speaks of."""
    model = LeanDecoder.from_dir(saved("gemma3")[0], dtype=torch.float32)
    cache = model.new_cache(method_class("full").build({}))
    held = []
    for step in range(40):
        model.forward(tiny.tokens(50, seed=step), cache)
        first, *others = (sum(x.untyped_storage().nbytes() for x in layer.held()) for layer in cache.own())
        held.append(first)
        assert cache.bytes() == first + sum(others)
        assert cache.visible() == cache.seen == 50 * (step + 1)
    assert max(held[20:]) <= max(held[:20])
    windowed = model.new_cache(method_class("window").build({"window": 9}))
    model.forward(tiny.tokens(50), windowed)
    assert windowed.visible() == 9, "the method's window, though the model's own is wider"


def test_all_layers_see_every_row_where_some_slide(saved):
    """A method that drops rows between layers would leave gaps in the windows."""
    built = method_class("pyramidinfer").build(SMALL["pyramidinfer"])
    for name, rows in (("gemma3", 30), ("llama", None)):
        model = LeanDecoder.from_dir(saved(name)[0], dtype=torch.float32)
        left = len(model.read(tiny.tokens(30), model.new_cache(built), model.layers))
        assert left == rows if rows else left < 30


def test_files_of_transformers_4_say_the_same_of_gemma(saved, tmp_path):
    """Bases by name, every third layer full, and what is the default left out."""
    layers = {"num_hidden_layers": 4, "layer_types": [SLIDING, SLIDING, FULL, SLIDING], "sliding_window": 9}
    stock = tiny.build("Gemma3Text", **layers, rope_parameters={
        FULL: {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e6},
        SLIDING: {"rope_type": "default", "rope_theta": 100.0},
    })  # fmt: skip
    stock.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for name in ("rope_parameters", "layer_types", "tie_word_embeddings", "query_pre_attn_scalar"):
        config.pop(name, None)
    config |= {"rope_local_base_freq": 100.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    config |= {"sliding_window_pattern": 3}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ids = tiny.tokens(40)
    with torch.no_grad():
        wanted = stock(input_ids=ids.unsqueeze(0)).logits[0]
    model = LeanDecoder.from_dir(tmp_path, dtype=torch.float32)
    assert (
        model.forward(ids, model.new_cache(method_class("full").build({})), 40) - wanted
    ).abs().max() <= 1e-4


def test_bfloat16_stays_near_and_leading_logits_are_not_tied(saved):
    path, stock = saved("llama")
    ids = tiny.tokens(40)
    with torch.no_grad():
        wanted = stock(input_ids=ids.unsqueeze(0), use_cache=False).logits[0]
    model = LeanDecoder.from_dir(path)
    assert model.dtype == torch.bfloat16
    found = model.forward(ids, model.new_cache(method_class("full").build({})), 40)
    assert found.dtype == torch.float32
    assert (found - wanted).abs().max() <= 0.25
    assert (found - wanted).abs().mean() <= 0.03


def test_old_rope_keys_mean_the_same(saved, tmp_path):
    """transformers 4 wrote rope_theta and rope_scaling, 5 writes rope_parameters."""
    path, _ = saved("llama3-rope")
    config = json.loads((path / "config.json").read_text())
    new = LeanDecoder.from_dir(path).ropes[FULL].frequencies
    config.pop("rope_parameters")
    scaling = {name: value for name, value in tiny.LLAMA3.items() if name != "rope_theta"}
    config |= {"rope_theta": 10_000.0, "rope_scaling": scaling}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(path / "model.safetensors")
    assert torch.equal(LeanDecoder.from_dir(tmp_path).ropes[FULL].frequencies, new)


LLAMA = {"model_type": "llama", "hidden_act": "silu"}
GEMMA = {"model_type": "gemma3_text", "num_hidden_layers": 6}


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"model_type": "gemma2"}, "architecture gemma2"),
        ({}, "architecture None"),
        ({**LLAMA, "hidden_act": "gelu"}, "activation gelu"),
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding"),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": True}, "sliding"),
        ({**LLAMA, "layer_types": ["full_attention", "sliding_attention"]}, "sliding"),
        ({**GEMMA, "layer_types": ["sliding_attention"] * 2}, "no layer with full attention"),
        ({**GEMMA, "hidden_activation": "gelu"}, "activation gelu"),
        ({**GEMMA, "use_bidirectional_attention": True}, "later tokens"),
        ({**GEMMA, "rope_parameters": {"sliding_attention": {"rope_type": "yarn"}}}, "yarn"),
        ({**LLAMA, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ({**LLAMA, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({**LLAMA, "rope_parameters": {"rope_type": "longrope"}}, "longrope"),
        ({**LLAMA, "rope_parameters": {"partial_rotary_factor": 0.5}}, "partial"),
        ({**LLAMA, "quantization_config": {"quant_method": "fp8"}}, "quantized"),
        (LLAMA, None),
        (GEMMA, None),
        ({**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0}}, None),
        ({"model_type": "mistral", "sliding_window": None}, None),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}, None),
        ({"model_type": "qwen2", "sliding_window": 4096}, None),
        ({"model_type": "qwen3", "rope_scaling": None}, None),
    ],
)
def test_refuses_what_it_would_get_wrong(config, why):
    reason = refuses(config)
    assert reason is None if why is None else why in reason


def test_damaged_and_incomplete_files(saved, tmp_path):
    path, _ = saved("llama")
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    with pytest.raises(BadInput, match="incomplete"):
        LeanDecoder.from_dir(tmp_path)
    data = (path / "model.safetensors").read_bytes()
    for damaged in (data[:-100], data[: len(data) // 2], b"", b"\xff" * 64):
        (tmp_path / "model.safetensors").write_bytes(damaged)
        with pytest.raises(BadInput, match="damaged"):
            LeanDecoder.from_dir(tmp_path)
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(BadInput, match=r"layers\.1\.mlp\.down_proj"):
        LeanDecoder.from_dir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma2"}))
    with pytest.raises(BadInput, match="gemma2"):
        LeanDecoder.from_dir(tmp_path)


# --- packed low-bit weights


def four_bit(weight: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Random codes around `weight` [N, K]: packed, scales bf16 [K / 32, N, 2], and what they stand for."""
    rows, width = weight.shape
    codes = torch.randint(0, 16, (rows, width), generator=generator, dtype=torch.int32)
    scale = (torch.rand(width // 32, rows, generator=generator) * 0.03 + 0.01).bfloat16()
    zero = (torch.randn(width // 32, rows, generator=generator) * 0.02).bfloat16()
    wide = (x.float().t().repeat_interleave(32, dim=1) for x in (scale, zero))
    s, z = wide
    stands_for = (codes - 8) * s + z
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    return packed, torch.stack([scale, zero], dim=-1), stands_for


def test_packed_weights_equal_the_dequantised_ones(tmp_path):
    """Decoding over int4 codes agrees with the same values in bfloat16 to 2 % of the logits' spread."""
    model = tiny.build(
        "Llama", hidden_size=64, intermediate_size=64, head_dim=16, num_attention_heads=4, vocab_size=96
    )
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    low_bit: dict[str, Tensor] = {}
    parts = {
        "qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
        "o": ["self_attn.o_proj"],
        "gate_up": ["mlp.gate_proj", "mlp.up_proj"],
        "down": ["mlp.down_proj"],
    }
    for index in range(2):
        for name, sources in parts.items():
            names = [f"model.layers.{index}.{source}.weight" for source in sources]
            packed, scales, dense = four_bit(torch.cat([tensors[n] for n in names]), generator)
            low_bit[f"layers.{index}.{name}.weight"] = packed
            low_bit[f"layers.{index}.{name}.scales"] = scales
            for n, part in zip(names, dense.split([len(tensors[n]) for n in names]), strict=True):
                tensors[n] = part.contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    save_file(low_bit, tmp_path / f"packed-{torch.backends.cpu.get_cpu_capability()}.safetensors")
    packed = LeanDecoder.from_dir(tmp_path)
    plain = LeanDecoder.from_dir(tmp_path, packed=False)
    exact = LeanDecoder.from_dir(tmp_path, dtype=torch.float32)
    assert (packed.packed, plain.packed, exact.packed) == (True, False, False)
    ids = tiny.tokens(24)
    outs = []
    for decoder in (packed, plain, exact):
        cache = decoder.new_cache(method_class("full").build({}))
        parts_out = [decoder.forward(ids[:8], cache, 8)]
        cache.decoding = True
        parts_out += [decoder.forward(token.view(1), cache) for token in ids[8:]]
        outs.append(torch.cat(parts_out))
    spread = float(outs[2].std())
    assert (outs[0] - outs[1]).abs().max() <= 0.1 * spread
    assert (outs[0] - outs[2]).abs().mean() <= 0.02 * spread
    assert not torch.equal(outs[0][8:], outs[1][8:]), "decoding must have used the packed weights"
