"""GGUF files: written with the reference writer from tiny models, read back, damaged, packed, tokenized."""

from __future__ import annotations

import json
import multiprocessing
import random
import re
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from conftest import TEXT, write_tiny_tokenizer
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file

from longchat_cli.attention import method_class
from longchat_cli.errors import BadInput, LongchatError
from longchat_cli.kernels import native
from longchat_cli.models import catalog, convert, load, vocabulary
from longchat_cli.models.gguf import Gguf
from longchat_cli.models.lean import LeanDecoder
from longchat_cli.models.native import TILES, NativeProducts, Tiles
from longchat_cli.tokens import Tokenizer

NAMES = {hf: name for name, hf in convert._IN_BLOCK.items()} | {
    hf.removesuffix(".weight"): name.removesuffix(".weight") for name, hf in convert._TOP.items()
}
NAMES |= {"post_attention_layernorm": "ffn_norm"}
GEMMA = NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
Edit = Callable[[dict[str, np.ndarray], dict[str, Any]], None]
Stored = Callable[[str, np.ndarray], tuple[np.ndarray, Type]]


def gguf_name(name: str, table: dict[str, str]) -> str:
    name, _, suffix = name.rpartition(".")
    if not name.startswith("model.layers."):
        return f"{table[name]}.{suffix}"
    block, _, part = name.removeprefix("model.layers.").partition(".")
    return f"blk.{block}.{table[part]}.{suffix}"


def write_gguf(
    path: Path,
    directory: Path,
    kind: Type | Stored = Type.F32,
    *,
    arch: str | None = None,
    edit: Edit | None = None,
) -> Path:
    """Write the model in `directory` as llama.cpp's converter does: Q, K permuted, Gemma's norms plus one.

    `kind`: of every matrix, or what gives a matrix's stored rows and their type.
    """
    config = json.loads((directory / "config.json").read_text())
    arch = arch or {"gemma3_text": "gemma3"}.get(config["model_type"], config["model_type"])
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors: dict[str, np.ndarray] = {}
    for hf, tensor in load_file(directory / "model.safetensors").items():
        name, values = gguf_name(hf, GEMMA if arch == "gemma3" else NAMES), tensor.float().numpy()
        part = name.split(".")[-2]
        if arch == "llama" and part in heads:
            values = (
                values.reshape(heads[part], 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
            )
        tensors[name] = values + 1 if arch == "gemma3" and "norm" in part else values
    rope = config["rope_parameters"]
    metadata: dict[str, Any] = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(rope.get("full_attention", rope)["rope_theta"]),
    }
    if arch == "gemma3":
        metadata["attention.sliding_window"] = config["sliding_window"]
    metadata = {f"{arch}.{key}": value for key, value in metadata.items()} | vocabulary_of(directory)
    if edit:
        edit(tensors, metadata)
    write(path, arch, tensors, metadata, kind)
    return path


def vocabulary_of(directory: Path) -> dict[str, Any]:
    """GGUF's keys for a byte-level tokenizer.json."""
    model = json.loads((directory / "tokenizer.json").read_text())
    tokens = sorted(model["model"]["vocab"], key=model["model"]["vocab"].__getitem__)
    added = {token["id"] for token in model["added_tokens"]}
    tokens += [f"<pad{i}>" for i in range(400 - len(tokens))]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if i in added else 1 for i in range(len(tokens))],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": "{{ messages[0]['content'] }}",
    }


def write(
    path: Path, arch: str, tensors: dict[str, np.ndarray], metadata: dict[str, Any], kind: Type | Stored
) -> None:
    writer = gguf.GGUFWriter(path, arch)
    add: dict[type, Callable[[str, Any], None]] = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    for key, value in metadata.items():
        if value is not None:
            add[type(value)](key, value)
    for name, values in tensors.items():
        if values.ndim == 1 or kind == Type.F32:
            writer.add_tensor(name, np.ascontiguousarray(values, dtype=np.float32))
        elif isinstance(kind, Type):
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        else:
            rows, own = kind(name, values)
            writer.add_tensor(name, rows, raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LONGCHAT_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without the native library: torch's int4 products decode."""
    monkeypatch.setattr(native, "load", lambda: "it was not built")


@pytest.fixture
def llama(tiny_model: Callable[..., Path], tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", tiny_model("llama"))


def silent(_: str) -> None:
    pass


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("options", [{}, {"tie_word_embeddings": True}])
def test_a_converted_model_is_the_original(
    tiny_model: Callable[..., Path], tmp_path: Path, fresh_cache: Path, arch: str, options: dict[str, Any]
) -> None:
    from transformers import AutoModelForCausalLM

    origin = tiny_model(arch, **options)
    ready = convert.ready(write_gguf(tmp_path / "m.gguf", origin), silent)
    weights, expected = load_file(ready / "model.safetensors"), load_file(origin / "model.safetensors")
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(weights[name], tensor.to(torch.bfloat16)), name
    ids = torch.arange(3, 60)[None]
    with torch.no_grad():
        ours = AutoModelForCausalLM.from_pretrained(ready, dtype=torch.float32)(ids).logits
        model = AutoModelForCausalLM.from_pretrained(origin, dtype=torch.bfloat16).float()
        theirs = model(ids).logits
    assert torch.allclose(ours, theirs, atol=1e-4)


def test_llama_with_biases(tiny_model: Callable[..., Path], tmp_path: Path, fresh_cache: Path) -> None:
    origin = tiny_model("llama", attention_bias=True)
    tensors = load_file(origin / "model.safetensors")
    generator = torch.Generator().manual_seed(1)
    biased = tmp_path / "biased"
    biased.mkdir()
    tensors = {
        name: torch.randn(t.shape, generator=generator) if name.endswith("bias") else t
        for name, t in tensors.items()
    }
    save_file(tensors, biased / "model.safetensors")
    (biased / "config.json").write_text((origin / "config.json").read_text())
    write_tiny_tokenizer(biased)
    weights = load_file(convert.ready(write_gguf(tmp_path / "m.gguf", biased), silent) / "model.safetensors")
    assert all(torch.equal(weights[name], tensor.bfloat16()) for name, tensor in tensors.items())


def test_gemma_norms_lose_their_one(
    tiny_model: Callable[..., Path], tmp_path: Path, fresh_cache: Path
) -> None:
    origin = tiny_model("gemma3_text", tie_word_embeddings=True, sliding_window=32)
    ready = convert.ready(write_gguf(tmp_path / "m.gguf", origin), silent)
    weights, expected = load_file(ready / "model.safetensors"), load_file(origin / "model.safetensors")
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.allclose(weights[name].float(), tensor, rtol=1e-2, atol=1e-3), name
    config = json.loads((ready / "config.json").read_text())
    assert config["model_type"] == "gemma3_text"
    assert "quantization_config" not in config
    assert not json.loads((ready / convert.RECORD).read_text())["packable"]


GEMMA_METADATA = {
    "gemma3.attention.sliding_window_pattern": 3,
    "gemma3.final_logit_softcapping": 20.0,
    "gemma3.rope.scaling.type": "linear",
    "gemma3.rope.scaling.factor": 8.0,
}
GEMMA_OPTIONS = {
    "tie_word_embeddings": True,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "query_pre_attn_scalar": 16,
    "final_logit_softcapping": 20.0,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    },
}


def logits_of(decoder: LeanDecoder, ids: torch.Tensor, decode: bool = False) -> torch.Tensor:
    cache = decoder.new_cache(method_class("full").build({}))
    cache.decoding = decode
    return torch.cat([decoder.forward(part, cache, len(part)) for part in ids.split(1 if decode else 30)])


def test_a_gemma_file_becomes_the_model_it_was(
    tiny_model: Callable[..., Path], tmp_path: Path, fresh_cache: Path
) -> None:
    """In stock transformers and in the lean forward, over three times its sliding window."""
    from transformers import AutoModelForCausalLM

    origin = tiny_model("gemma3_text", **GEMMA_OPTIONS)
    path = write_gguf(tmp_path / "m.gguf", origin, edit=lambda _, metadata: metadata.update(GEMMA_METADATA))
    ready = convert.ready(path, silent)
    ids = torch.arange(3, 60)
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(origin, dtype=torch.bfloat16).float()
        wanted = model(ids[None]).logits[0]
        found = AutoModelForCausalLM.from_pretrained(ready, dtype=torch.float32)(ids[None]).logits[0]
    lean = logits_of(LeanDecoder.from_dir(ready, dtype=torch.float32), ids)
    # Origin's norms are rounded to bfloat16 without their one, the file's with it taken off again.
    assert torch.allclose(found, lean, atol=1e-4)
    assert torch.allclose(found, wanted, atol=0.02)


def test_the_largest_gemma_divides_queries_by_another_number(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    gguf = Gguf(write_gguf(tmp_path / "m.gguf", tiny_model("gemma3_text", **GEMMA_OPTIONS)))
    assert convert.llama_config(gguf)["query_pre_attn_scalar"] == 16
    gguf.metadata |= {"gemma3.block_count": 62, "gemma3.attention.head_count": 2}
    assert convert.llama_config(gguf)["query_pre_attn_scalar"] == 64 // 2


def mixed(name: str, values: np.ndarray) -> tuple[np.ndarray, Type]:
    """As Q4_K_M files have it: values and embeddings in more bits than the rest."""
    kind = Type.Q8_0 if "attn_v" in name or "token_embd" in name else Type.Q5_0
    return gguf.quants.quantize(values, kind), kind


@pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
def test_products_of_mixed_types_are_tiles_in_parts(
    tiny_model: Callable[..., Path], tmp_path: Path, fresh_cache: Path
) -> None:
    origin = tiny_model("gemma3_text", **GEMMA_OPTIONS)
    path = tmp_path / "m.gguf"
    write_gguf(path, origin, mixed, edit=lambda _, metadata: metadata.update(GEMMA_METADATA))
    ready = convert.ready(path, silent)
    tiles = Tiles(ready / TILES)
    found = {name: form.bits for name, form in tiles.forms.items() if name.startswith("layers.1.")}
    one = dict.fromkeys(("qkv.0", "o.0", "gate_up.0", "down.0"), 5)
    assert found == {f"layers.1.{name}": bits for name, bits in (one | {"qkv.1": 8}).items()}
    plain, tiled = LeanDecoder.from_dir(ready), LeanDecoder.from_dir(ready)
    tiled.products = NativeProducts(tiled, tiles)
    a, b = (logits_of(decoder, torch.arange(3, 60), decode=True) for decoder in (plain, tiled))
    assert (a - b).norm() <= 0.05 * a.norm()


@pytest.mark.parametrize("kind", [Type.Q4_0, Type.Q4_1])
def test_packed_products_equal_the_dequantized_ones(
    tiny_model: Callable[..., Path], tmp_path: Path, fresh_cache: Path, no_library: None, kind: Type
) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model("llama"), kind)
    ready = convert.ready(path, silent)
    dense, packed = load_file(ready / "model.safetensors"), load_file(convert.low_bit_file(ready))
    assert len(packed) == 3 * 4 * 2
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    for block in range(3):
        parts = [dense[f"model.layers.{block}.self_attn.{part}_proj.weight"] for part in "qkv"]
        expected = x.float() @ torch.cat(parts).float().t()
        weight, scales = packed[f"layers.{block}.qkv.weight"], packed[f"layers.{block}.qkv.scales"]
        assert scales.shape == (2, 128, 2)
        found = torch.ops.aten._weight_int4pack_mm_for_cpu(x, weight, 32, scales).float()
        assert torch.allclose(found, expected, atol=0.03 * expected.abs().max().item())


def test_four_bit_codes_mean_what_the_reference_decodes() -> None:
    values = np.random.default_rng(0).normal(size=(32, 96)).astype(np.float32)
    for kind in (Type.Q4_0, Type.Q4_1):
        rows = gguf.quants.quantize(values, kind)
        codes, scales = convert.four_bit(rows, kind)
        scale, zero = (scales[..., i].float().t().repeat_interleave(32, dim=1) for i in (0, 1))
        expected = torch.from_numpy(gguf.quants.dequantize(rows, kind))
        assert torch.allclose((codes - 8) * scale + zero, expected, atol=0.02)


def test_mixed_quantization_packs_what_it_can(
    tiny_model: Callable[..., Path], tmp_path: Path, fresh_cache: Path, no_library: None
) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model("llama"), Type.Q8_0)
    ready = convert.ready(path, silent)
    assert not convert.low_bit_file(ready).exists()
    record = json.loads((ready / convert.RECORD).read_text())
    assert (record["packable"], record["tileable"]) == (False, True)


def test_the_reader_agrees_with_the_reference(llama: Path) -> None:
    ours, theirs = Gguf(llama), gguf.GGUFReader(llama)
    fields = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert ours.metadata == fields
    for tensor in theirs.tensors:
        assert ours.tensors[tensor.name].shape == tuple(int(n) for n in reversed(tensor.shape))
        assert np.array_equal(ours.dequantized(tensor.name), tensor.data)


@pytest.mark.parametrize(
    "content",
    [
        b"GGUF",
        b"GGUF" + struct.pack("<IQQ", 3, 2**60, 2**60),
        b"GGUF" + struct.pack("<IQQ", 1, 0, 0),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**63) + b"x" * 64,
        b"GGUF"
        + struct.pack("<IQQ", 3, 0, 1)
        + struct.pack("<Q", 1)
        + b"k"
        + struct.pack("<IIQ", 9, 9, 2**50),
        b"GGUF"
        + struct.pack("<IQQ", 3, 0, 1)
        + struct.pack("<Q", 1)
        + b"k"
        + struct.pack("<IIQ", 9, 4, 2**62),
        b"GGUF" + struct.pack("<IQQ", 3, 0, 0),
        b"just text, not a model at all",
        b"",
    ],
)
def test_hostile_headers_are_refused_in_one_line(tmp_path: Path, fresh_cache: Path, content: bytes) -> None:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(content)
    with pytest.raises(BadInput) as refused:
        convert.ready(path, silent)
    assert "\n" not in str(refused.value)


def test_truncated_files_are_refused(llama: Path, tmp_path: Path, fresh_cache: Path) -> None:
    content = llama.read_bytes()
    for keep in (3, 20, 100, 5000, len(content) // 2, len(content) - 40):
        path = tmp_path / "cut.gguf"
        path.write_bytes(content[:keep])
        with pytest.raises(BadInput):
            convert.ready(path, silent)
    assert [path for path in catalog.ready_dir().iterdir() if path.is_dir()] == []


def test_flipped_header_bytes_never_escape_as_another_error(
    llama: Path, tmp_path: Path, fresh_cache: Path
) -> None:
    content = llama.read_bytes()
    header = Gguf(llama).tensors["token_embd.weight"].begin
    source = random.Random(0)
    for trial in range(150):
        damaged = bytearray(content)
        for _ in range(source.choice((1, 4))):
            # half of the flips into the first kilobyte, where counts, lengths and types are
            at = source.randrange(4, 1024 if trial % 2 else header)
            damaged[at] ^= 1 << source.randrange(8)
        path = tmp_path / "flipped.gguf"
        path.write_bytes(damaged)
        try:
            opened = Gguf(path)
            if opened.architecture == "llama":
                convert.tensor_names(opened, convert.llama_config(opened))
                vocabulary.tokenizer_json(opened)
        except LongchatError:
            pass


def _remove(name: str) -> Edit:
    return lambda tensors, metadata: (tensors | metadata).pop(name) is None or _drop(tensors, metadata, name)


def _drop(tensors: dict[str, np.ndarray], metadata: dict[str, Any], name: str) -> None:
    tensors.pop(name, None)
    metadata.pop(name, None)


def _set(**values: Any) -> Edit:
    return lambda tensors, metadata: metadata.update({k.replace("__", "."): v for k, v in values.items()})


def _tensor(name: str, values: np.ndarray) -> Edit:
    return lambda tensors, metadata: tensors.update({name: values})


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (_remove("blk.1.attn_q.weight"), "blk.1.attn_q.weight is missing"),
        (_remove("tokenizer.ggml.tokens"), "no vocabulary"),
        (_remove("llama.block_count"), "block_count"),
        (_set(tokenizer__ggml__pre="martian"), "martian"),
        (_set(tokenizer__ggml__merges=["a b", "nothere x"]), "does not fit"),
        (_set(tokenizer__ggml__model="bert"), "bert"),
        (_set(llama__expert_count=8), "mixture of experts"),
        (_set(llama__rope__dimension_count=8), "part of each head"),
        (_set(llama__rope__scaling__type="longrope", llama__rope__scaling__factor=2.0), "longrope"),
        (_tensor("blk.0.extra.weight", np.ones((4, 4))), "not a plain llama"),
        (_tensor("blk.0.attn_q.weight", np.ones((32, 64))), "shape"),
        (_tensor("output_norm.weight", np.full(64, np.nan)), "not numbers"),
        (_tensor("rope_freqs.weight", np.linspace(1, 3, 8)), "rotary factors"),
    ],
)
def test_unusable_models_are_refused(
    tiny_model: Callable[..., Path], tmp_path: Path, fresh_cache: Path, edit: Edit, says: str
) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model("llama"), edit=edit)
    with pytest.raises(BadInput, match=says):
        convert.ready(path, silent)
    assert [path for path in catalog.ready_dir().iterdir() if path.is_dir()] == []


def test_an_unknown_architecture_is_refused(
    tiny_model: Callable[..., Path], tmp_path: Path, fresh_cache: Path
) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model("llama"), arch="martian")
    with pytest.raises(BadInput, match="martian"):
        convert.ready(path, silent)


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({}, {"rope_type": "default", "rope_theta": 10000.0}),
        (
            {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
            {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        ),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 128,
            },
            {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
            },
        ),
    ],
)
def test_rope_scaling(
    tiny_model: Callable[..., Path], tmp_path: Path, metadata: dict[str, Any], expected: dict[str, Any]
) -> None:
    keys = {f"llama.{key}": value for key, value in metadata.items()}
    path = write_gguf(
        tmp_path / "m.gguf", tiny_model("llama"), edit=lambda _, all_keys: all_keys.update(keys)
    )
    assert convert.llama_config(Gguf(path))["rope_parameters"] == expected


def test_llama3_factors_are_recovered(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rule = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, head_dim=16, rope_parameters=rule)
    scaled = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0]
    factors = (500000.0 ** -(torch.arange(0, 16, 2) / 16) / scaled).numpy()

    def edit(tensors: dict[str, np.ndarray], metadata: dict[str, Any]) -> None:
        tensors["rope_freqs.weight"] = factors
        metadata["llama.rope.freq_base"] = 500000.0

    path = write_gguf(tmp_path / "m.gguf", tiny_model("llama"), edit=edit)
    assert convert.llama_config(Gguf(path))["rope_parameters"] == rule


def tokenizer(path: Path, pre: str, tiny: Path) -> Tokenizer:
    edit = _set(tokenizer__ggml__pre=pre)
    return Tokenizer.from_dir(convert.ready(write_gguf(path / f"{pre}.gguf", tiny, edit=edit), silent))


def test_the_pre_tokenizer_is_honoured(
    tiny_model: Callable[..., Path], tmp_path: Path, fresh_cache: Path
) -> None:
    tiny = tiny_model("llama")
    for pre, words in {
        "smollm": ["x", "Ġ=", "ĠĠĠ", "4", "2", "3", "5"],
        "gpt-2": ["x", "Ġ=", "ĠĠ", "Ġ4235"],
        "llama-bpe": ["x", "Ġ=", "ĠĠ", "Ġ", "423", "5"],
        "qwen2": ["x", "Ġ=", "ĠĠ", "Ġ", "4", "2", "3", "5"],
        "tekken": ["x", "Ġ=", "ĠĠ", "Ġ", "4", "2", "3", "5"],
    }.items():
        import tokenizers

        ours = tokenizer(tmp_path, pre, tiny)
        path = convert.ready(tmp_path / f"{pre}.gguf", silent) / "tokenizer.json"
        library = tokenizers.Tokenizer.from_file(str(path))
        assert [word for word, _ in library.pre_tokenizer.pre_tokenize_str("x =   4235")] == words, pre
        assert ours.decode(ours.encode(TEXT)) == TEXT
        assert ours.encode("<|im_end|>") != [2]
        assert ours.encode_control("<|im_end|>") == [2]
        assert ours.eos_ids >= {2}
        assert ours.chat_template == "{{ messages[0]['content'] }}"


def sentencepiece(prefix: bool) -> Edit:
    """A SentencePiece vocabulary: control, bytes, letters, scored pieces, user-defined runs."""
    pieces = [("<unk>", 2, 0.0), ("<s>", 3, 0.0), ("</s>", 3, 0.0)]
    pieces += [(f"<0x{i:02X}>", 6, 0.0) for i in range(256)]
    pieces += [("▁▁", 4, 0.0), ("▁▁▁", 4, 0.0), ("\n\n", 4, 0.0)]
    words = ["th", "he", "the", "▁the", "▁t", "in"]
    pieces += [(word, 1, -float(i)) for i, word in enumerate(words, 1)]
    pieces += [(letter, 1, -100.0 - i) for i, letter in enumerate("▁abcdefghijklmnopqrstuvwxyz")]
    pieces += [(f"<pad{i}>", 5, -1000.0) for i in range(400 - len(pieces))]

    def edit(tensors: dict[str, np.ndarray], metadata: dict[str, Any]) -> None:
        for key in [key for key in metadata if key.startswith("tokenizer.")]:
            del metadata[key]
        names, types, scores = (list(column) for column in zip(*pieces, strict=True))
        metadata |= {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": names,
            "tokenizer.ggml.token_type": types,
            "tokenizer.ggml.scores": scores,
            "tokenizer.ggml.unknown_token_id": 0,
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.add_space_prefix": prefix,
        }

    return edit


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_vocabularies(
    tiny_model: Callable[..., Path], tmp_path: Path, fresh_cache: Path, prefix: bool
) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model("llama"), edit=sentencepiece(prefix))
    ours = Tokenizer.from_dir(convert.ready(path, silent))
    text = "the   cat\n\nin   Äthe </s> <0x41>"
    ids = ours.encode(text)
    assert ours.decode(ids) in (text, " " + text)
    assert not {0, 1, 2} & set(ids)
    pieces = [ours.token_bytes(i) for i in ids]
    assert pieces[0] == (b" the" if prefix else b"the")
    assert pieces[1] == b"   "
    assert b"\n\n" in pieces
    assert ours.add_bos
    assert ours.bos_id == 1


def test_conversion_is_kept_repaired_and_private(llama: Path, fresh_cache: Path) -> None:
    said: list[str] = []
    ready = convert.ready(llama, said.append)
    assert len(said) == 1
    assert convert.ready(llama, said.append) == ready
    assert len(said) == 1
    assert ready.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in ready.iterdir()} == {0o600}
    whole = (ready / "model.safetensors").read_bytes()
    for damage in (
        lambda: (ready / "model.safetensors").write_bytes(whole[:-1]),
        lambda: (ready / "tokenizer.json").unlink(),
        lambda: (ready / convert.RECORD).write_text("{"),
        lambda: (ready / convert.RECORD).write_text('{"format": 1, "files": {}}'),
        lambda: (ready / "config.json").write_bytes(b" " * (ready / "config.json").stat().st_size),
    ):
        damage()
        assert convert.ready(llama, silent) == ready
        assert (ready / "model.safetensors").read_bytes() == whole


def test_missing_low_bit_weights_are_added(
    tiny_model: Callable[..., Path], tmp_path: Path, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model("llama"), Type.Q4_1)
    ready = convert.ready(path, silent)
    files = [convert.low_bit_file(ready)]
    for change in (
        lambda: monkeypatch.setattr(native, "load", lambda: "it was not built"),
        lambda: monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "OTHER"),
    ):
        change()
        assert convert.ready(path, silent) == ready
        files.append(convert.low_bit_file(ready))
    assert files[-1].name == "packed-OTHER.safetensors"
    assert all(file.exists() for file in files)
    assert convert.intact(ready)


def _convert_in_child(path: str, results: Any) -> None:
    results.put(str(convert.ready(Path(path), silent)))


def test_two_processes_convert_at_once(llama: Path, fresh_cache: Path) -> None:
    context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
    results = context.Queue()
    children = [context.Process(target=_convert_in_child, args=(str(llama), results)) for _ in range(2)]
    for child in children:
        child.start()
    found = {results.get(timeout=60) for _ in children}
    for child in children:
        child.join(60)
    assert len(found) == 1
    assert convert.intact(Path(found.pop()))
    assert [path.name for path in catalog.ready_dir().iterdir() if path.name.startswith(".tmp")] == []


def test_a_failed_conversion_leaves_nothing(
    llama: Path, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(convert, "_write_weights", full)
    with pytest.raises(LongchatError) as failed:
        convert.ready(llama, silent)
    assert failed.value.exit_code == 74
    assert [path for path in catalog.ready_dir().iterdir() if path.is_dir()] == []


# The real default model.


@pytest.fixture(scope="session")
def default_tokenizer(default_model_dir: Path) -> Iterator[Tokenizer]:
    yield Tokenizer.from_dir(default_model_dir)


def test_the_default_model_tokenizes_digits_and_blanks(default_tokenizer: Tokenizer) -> None:
    pieces = [default_tokenizer.decode([i]) for i in default_tokenizer.encode("x =   42")]
    assert pieces == ["x", " =", "   ", "4", "2"]
    assert default_tokenizer.eos_ids == {0, 2}
    assert "<|im_start|>" in (default_tokenizer.chat_template or "")


def test_the_default_model_starts_fast_and_without_transformers(default_model_dir: Path) -> None:
    code = (
        "import sys; from longchat_cli.models import load; r = load.find('smollm2');"
        "d = load.load_decoder(r, device='cpu'); print(r.window, r.quantization, d.notes);"
        "assert 'transformers' not in sys.modules"
    )
    # Elsewhere than in the sources: there the installed package is found, library and all.
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=default_model_dir)
    served = (
        r"native library \(\w+\) on low-bit tiles" if native.missing() is None else "not the native library"
    )
    assert re.search(rf"8192 Q4_1 .*{served}", done.stdout)
    assert done.stderr == ""
    begin = time.perf_counter()
    load.find("smollm2")
    assert time.perf_counter() - begin < 0.5


@pytest.mark.slow
@pytest.mark.skipif(native.missing() is not None, reason=str(native.missing()))
def test_gemma_writes_the_same_through_the_native_library(models_home: Path) -> None:
    """Greedy answers, or a first difference where two tokens are nearly as likely."""
    ready = load.find("gemma3-270m")
    tokens = Tokenizer.from_dir(ready.path)
    decoders = [load.load_decoder(ready, "cpu"), LeanDecoder.from_dir(ready.path, packed=False)]
    assert any("tiles" in note for note in decoders[0].notes)
    for prompt in ("The capital of France is", TEXT, "def fibonacci(n):\n", TEXT * 12):
        ids = [tokens.bos_id or 0, *tokens.encode(prompt)]
        caches = [decoder.new_cache(method_class("full").build({})) for decoder in decoders]
        step = torch.tensor(ids)
        for _ in range(20):
            logits = [d.forward(step, cache)[-1] for d, cache in zip(decoders, caches, strict=True)]
            best = [int(found.argmax()) for found in logits]
            if best[0] != best[1]:
                assert all(float(found[best].max() - found[best].min()) < 0.5 for found in logits)
                break
            step = torch.tensor(best[:1])
            for cache in caches:
                cache.decoding = True


@pytest.mark.slow
def test_gemma_reads_sense(models_home: Path) -> None:
    """Perplexity of plain English: far above 100 when the norms keep their one or the rope base is wrong."""
    from transformers import AutoModelForCausalLM

    ready = load.find("gemma3-270m").path
    tokens = Tokenizer.from_dir(ready)
    text = "Call me Ishmael. Some years ago—never mind how long precisely.   日本語, café 🙂\n\n\n\tx =   42"
    assert tokens.decode(tokens.encode(text)) == text
    ids = torch.tensor([[tokens.bos_id, *tokens.encode(TEXT * 2)]])
    model = AutoModelForCausalLM.from_pretrained(ready, dtype=torch.bfloat16)
    with torch.no_grad():
        assert model(ids, labels=ids).loss.exp() < 60
