"""The ready form of a GGUF file: a directory in Hugging Face's layout that loads by memory-mapping.

Llama-like architectures are converted here, without transformers; others once, by transformers' own loader.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import itertools
import json
import logging
import math
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, LlamaFileType

from longchat_cli.config import format_bytes, private
from longchat_cli.errors import BadInput
from longchat_cli.kernels import native
from longchat_cli.models import catalog, tiles, vocabulary
from longchat_cli.models.fetch import Say, to_stderr
from longchat_cli.models.files import (
    install_directory,
    lock,
    read_json,
    remembered_sha256,
    scratch,
    sha256,
    storage_errors,
    write_json,
)
from longchat_cli.models.gguf import Gguf
from longchat_cli.models.lean import FAMILIES, FULL, SLIDING
from longchat_cli.models.native import HEAD, REST, TILES

FORMAT = 3
RECORD = "longchat.json"
ALIGNMENT = 64
"""Bytes at whose multiples the tensors of a file begin, as far as their sizes allow: a cache line."""
GROUP = 32
"""Weights per scale of Q4_0 and Q4_1, and the group size of torch's packed int4 product."""

Json = dict[str, Any]
_LLAMA_LIKE = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA3 = _IN_BLOCK | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_HEAD_NORMS = {"attn_q_norm": "head_dim", "attn_k_norm": "head_dim"}
_MORE_NORMS = {
    "qwen3": _HEAD_NORMS,
    "gemma3_text": _HEAD_NORMS | {"post_attention_norm": "hidden_size", "post_ffw_norm": "hidden_size"},
}
"""Norms of a decoder layer beside Llama's, and the size of each, by model_type."""
_PACKED = {
    "qkv": ("attn_q", "attn_k", "attn_v"),
    "o": ("attn_output",),
    "gate_up": ("ffn_gate", "ffn_up"),
    "down": ("ffn_down",),
}
_FOUR_BIT = {GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1}


def ready(path: Path, say: Say = to_stderr) -> Path:
    """The ready form of the GGUF file `path`; made on first use, atomically, one process at a time.

    Raises MissingInput, BadInput (damaged, unknown architecture) and StorageError.
    """
    gguf = None if is_gguf(path) else Gguf(path)  # a file of another kind is refused before it is hashed
    digest = remembered_sha256(path, catalog.hashes_dir())
    fingerprint = hashlib.sha256(f"{digest}:{FORMAT}".encode()).hexdigest()
    target = catalog.ready_dir() / fingerprint
    if intact(target) and not _lacks_low_bit(target):
        return target
    with lock(catalog.ready_dir() / f".{fingerprint}.lock"):
        gguf = gguf or Gguf(path)
        if not intact(target):
            say(f"converting {path.name} ({format_bytes(path.stat().st_size)}), once; it may take a minute")
            with scratch(catalog.ready_dir()) as work:
                _convert(gguf, private(work / "ready"), {"sha256": digest, "fingerprint": fingerprint})
                install_directory(work / "ready", target)
        if _lacks_low_bit(target):
            _add_low_bit(gguf, target)
    return target


def intact(directory: Path) -> bool:
    """Whether a ready form is complete: every file has its recorded size, small ones the recorded bytes."""
    record = read_json(directory / RECORD)
    if not isinstance(record, dict) or record.get("format") != FORMAT or "packable" not in record:
        return False
    files, sums = record.get("files"), record.get("sums", {})
    if not isinstance(files, dict) or not isinstance(sums, dict):
        return False
    whole = all(_size(directory / name) == size for name, size in files.items())
    return whole and all(sha256(directory / name) == digest for name, digest in sums.items())


def low_bit_file(directory: Path) -> Path:
    """The file of low-bit weights that decoding uses here: tiles for the native library, else torch's int4.

    The layout of the latter depends on the CPU's vector instructions.
    """
    if native.missing() is None:
        return directory / TILES
    return directory / f"packed-{torch.backends.cpu.get_cpu_capability()}.safetensors"


def is_gguf(path: Path) -> bool:
    """Whether `path` begins as GGUF files do."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        return file.read(4) == b"GGUF"
    return False


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _lacks_low_bit(directory: Path) -> bool:
    record = read_json(directory / RECORD)
    wanted = "tileable" if native.missing() is None else "packable"
    return bool(record.get(wanted)) and low_bit_file(directory).name not in record["files"]


def _convert(gguf: Gguf, target: Path, record: Json) -> None:
    """Write everything but the packed weights of `gguf` into the empty directory `target`."""
    with storage_errors(f"writing {target}"):
        _write_tokenizer(gguf, target)
        if gguf.architecture in _LLAMA_LIKE:
            config = llama_config(gguf)
            write_json(target / "config.json", config)
            _write_weights(gguf, config, target / "model.safetensors")
        else:
            _convert_with_transformers(gguf, target)
        _write_generation_config(gguf, target)
        record |= {
            "format": FORMAT,
            "source": str(gguf.path),
            "quantization": quantization(gguf),
            "architecture": gguf.architecture,
            "context_length": gguf.number("context_length"),
            "packable": gguf.architecture in _LLAMA_LIKE and any(_packable(gguf)),
            "tileable": gguf.architecture in _LLAMA_LIKE and any(_tileable(gguf)),
            "files": {file.name: file.stat().st_size for file in target.iterdir()},
            "sums": {file.name: sha256(file) for file in target.glob("*.json")},
        }
        for file in target.iterdir():
            file.chmod(0o600)
        write_json(target / RECORD, record)


def quantization(gguf: Gguf) -> str:
    """The file's type as GGUF names it, e.g. 'Q4_1', 'Q4_K_M'."""
    try:
        name = LlamaFileType(gguf.metadata.get("general.file_type", -1)).name
    except ValueError:
        return max(gguf.tensors.values(), key=lambda tensor: tensor.nbytes).type.name
    return name.removeprefix("MOSTLY_").removeprefix("ALL_")


def _write_tokenizer(gguf: Gguf, target: Path) -> None:
    import tokenizers

    content = json.dumps(vocabulary.tokenizer_json(gguf), ensure_ascii=False)
    try:
        tokenizers.Tokenizer.from_str(content)
    except Exception as error:  # the library raises bare Exception
        raise gguf.damaged(f"its vocabulary does not fit together: {str(error)[:120]}") from error
    (target / "tokenizer.json").write_text(content, encoding="utf-8")
    write_json(target / "tokenizer_config.json", vocabulary.tokenizer_config(gguf))


def _write_generation_config(gguf: Gguf, target: Path) -> None:
    ends = {vocabulary.token_id(gguf, name) for name in ("eos", "eot", "eom")}
    config = {
        "bos_token_id": vocabulary.token_id(gguf, "bos"),
        "eos_token_id": sorted(index for index in ends if index is not None),
    }
    write_json(target / "generation_config.json", config)


def llama_config(gguf: Gguf) -> Json:
    """config.json of a Llama-like model. Raises BadInput for what the Llama family does not have."""
    if gguf.get("expert_count", 0):
        raise BadInput(f"{gguf.path} is a mixture of experts", "not served from a GGUF file of this kind")
    heads, width = gguf.number("attention.head_count"), gguf.number("embedding_length")
    dim = gguf.number("attention.key_length", gguf.number("rope.dimension_count", width // heads))
    if gguf.number("rope.dimension_count", dim) != dim or gguf.number("attention.value_length", dim) != dim:
        raise BadInput(f"{gguf.path} rotates only a part of each head", "not served for this architecture")
    bias = "blk.0.attn_q.bias" in gguf.tensors
    config = {
        "architectures": [_LLAMA_LIKE[gguf.architecture]],
        "model_type": gguf.architecture,
        "dtype": "bfloat16",
        "vocab_size": _embedding(gguf)[0],
        "hidden_size": width,
        "intermediate_size": gguf.number("feed_forward_length"),
        "num_hidden_layers": gguf.number("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": gguf.number("attention.head_count_kv", heads),
        "head_dim": dim,
        "hidden_act": "silu",
        "rms_norm_eps": float(gguf.get("attention.layer_norm_rms_epsilon", 1e-6)),
        "max_position_embeddings": gguf.number("context_length"),
        "rope_parameters": _rope(gguf, dim),
        "attention_bias": bias,
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "bos_token_id": vocabulary.token_id(gguf, "bos"),
        "eos_token_id": vocabulary.token_id(gguf, "eos"),
    }
    if gguf.architecture == "gemma3":
        return config | _gemma3(gguf, config)
    if gguf.get("attention.sliding_window"):
        if gguf.architecture != "llama":
            raise BadInput(
                f"{gguf.path} has sliding-window layers", "not served from a GGUF file of this kind"
            )
        window = gguf.number("attention.sliding_window")
        config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    return config


def _gemma3(gguf: Gguf, config: Json) -> Json:
    """What config.json of Gemma 3 has beside a Llama-like one, or otherwise."""
    layers = config["num_hidden_layers"]
    every = gguf.number("attention.sliding_window_pattern", 6)
    # Files do not say what queries are divided by; of the sizes published only 27B, of 62 layers, differs.
    divisor = config["head_dim"]
    if layers == 62:
        divisor = config["hidden_size"] // config["num_attention_heads"]
    local = float(gguf.get("rope.freq_base_swa", 10_000.0))
    return {
        "model_type": "gemma3_text",
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": [FULL if i % every == 0 else SLIDING for i in range(1, layers + 1)],
        "sliding_window": gguf.number("attention.sliding_window"),
        "query_pre_attn_scalar": divisor,
        "final_logit_softcapping": gguf.get("final_logit_softcapping"),
        "rope_parameters": {
            FULL: config["rope_parameters"],
            SLIDING: {"rope_type": "default", "rope_theta": local},
        },
    }


def _embedding(gguf: Gguf) -> tuple[int, ...]:
    if "token_embd.weight" not in gguf.tensors:
        raise gguf.damaged("tensor token_embd.weight is missing")
    return gguf.tensors["token_embd.weight"].shape


def _rope(gguf: Gguf, dim: int) -> Json:
    """rope_parameters of config.json: the base and the context-extension rule."""
    base = float(gguf.get("rope.freq_base", 10_000.0))
    kind = gguf.get("rope.scaling.type", "linear" if gguf.get("rope.scale_linear") else "none")
    factor = float(gguf.get("rope.scaling.factor", gguf.get("rope.scale_linear", 1.0)))
    if "rope_freqs.weight" in gguf.tensors:
        return {"rope_theta": base} | _llama3_rope(gguf, base, dim)
    if kind == "none" or factor == 1.0:
        return {"rope_type": "default", "rope_theta": base}
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": base, "factor": factor}
    if kind == "yarn" and gguf.get("rope.scaling.attn_factor", 1.0) == 1.0:
        trained = gguf.number("rope.scaling.original_context_length")
        return {
            "rope_type": "yarn",
            "rope_theta": base,
            "factor": factor,
            "original_max_position_embeddings": trained,
        }
    raise BadInput(f"{gguf.path} extends its context by '{kind}'", "not served from a GGUF file")


def _llama3_rope(gguf: Gguf, base: float, dim: int) -> Json:
    """Recover Llama 3's rule from the factors stored in its place; refuse factors that it does not give."""
    stored = gguf.dequantized("rope_freqs.weight").reshape(-1)
    factor = round(float(stored.max()), 4)
    rule = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    turns = 8192 * base ** (-np.arange(0, dim, 2) / dim) / (2 * math.pi)
    smooth = np.clip((turns - 1) / 3, 0, 1)
    given = 1 / ((1 - smooth) / factor + smooth)
    if stored.shape != given.shape or not np.allclose(stored, given, rtol=1e-3):
        raise BadInput(f"{gguf.path} stores its own rotary factors", "only Llama 3's rule is served")
    return rule


def tensor_names(gguf: Gguf, config: Json) -> dict[str, tuple[str, tuple[int, ...]]]:
    """GGUF name -> (Hugging Face name, shape) of every tensor a model of `config` has.

    Raises BadInput when the file lacks one, has another, or has one in another shape.
    """
    expected = {name: (hf, _embedding(gguf)) for name, hf in _TOP.items()}
    expected["output_norm.weight"] = (_TOP["output_norm.weight"], (config["hidden_size"],))
    if config["tie_word_embeddings"]:
        del expected["output.weight"]
    shapes = _block_shapes(config)
    table = _GEMMA3 if gguf.architecture == "gemma3" else _IN_BLOCK
    for block in range(config["num_hidden_layers"]):
        for name, shape in shapes.items():
            part, suffix = name.split(".")
            expected[f"blk.{block}.{name}"] = (f"model.layers.{block}.{table[part]}.{suffix}", shape)
    _compare(gguf, expected)
    return expected


def _block_shapes(config: Json) -> dict[str, tuple[int, ...]]:
    """The tensors of one decoder layer by their GGUF names without `blk.N.`."""
    width, hidden, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    products = {"attn_q": (q, width), "attn_k": (kv, width), "attn_v": (kv, width), "attn_output": (width, q)}
    products |= {"ffn_gate": (hidden, width), "ffn_up": (hidden, width), "ffn_down": (width, hidden)}
    norms = {"attn_norm": width, "ffn_norm": width}
    norms |= {name: config[size] for name, size in _MORE_NORMS.get(config["model_type"], {}).items()}
    biased = ["attn_q", "attn_k", "attn_v"] if config["attention_bias"] else []
    biased += ["attn_output"] if biased and config["model_type"] != "qwen2" else []
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": shape for name, shape in products.items()}
    shapes |= {f"{name}.weight": (size,) for name, size in norms.items()}
    return shapes | {f"{name}.bias": products[name][:1] for name in biased}


def _compare(gguf: Gguf, expected: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    found = gguf.tensors.keys() - {"rope_freqs.weight"}
    if missing := expected.keys() - found:
        raise gguf.damaged(f"tensor {min(missing)} is missing")
    if extra := found - expected.keys():
        raise BadInput(f"{gguf.path} is not a plain {gguf.architecture} model", f"tensor {min(extra)[:80]}")
    for name, (_, shape) in expected.items():
        if gguf.tensors[name].shape != shape:
            raise gguf.damaged(f"tensor {name} has the shape {gguf.tensors[name].shape}, not {shape}")


def _rows(gguf: Gguf, name: str, config: Json) -> np.ndarray:
    """The stored rows of a tensor in Hugging Face's order, uint8 [rows, bytes].

    Files of the `llama` architecture pair neighbouring rows of each query and key head for the rotation;
    Hugging Face pairs row i with row i + dim / 2.
    """
    rows = gguf.rows(name)
    part = name.split(".")[-2]
    if gguf.architecture != "llama" or part not in ("attn_q", "attn_k"):
        return rows
    heads = config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
    if name.endswith(".bias"):
        rows = rows.reshape(heads * config["head_dim"], -1)
    order = np.arange(heads * config["head_dim"]).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
    return rows[order]


def _write_weights(gguf: Gguf, config: Json, target: Path) -> None:
    """model.safetensors in bfloat16, one tensor at a time."""
    names = tensor_names(gguf, config)
    offset = FAMILIES[config["model_type"]].norm_offset  # GGUF files hold norms' factors as they are

    def tensors() -> Iterator[torch.Tensor]:
        for name, (_, shape) in names.items():
            rows = _rows(gguf, name, config).reshape(gguf.rows(name).shape)
            values = torch.from_numpy(gguf.values(rows, name))
            values = values - offset if name.endswith("norm.weight") else values
            yield values.to(torch.bfloat16).reshape(shape)

    _write_safetensors(target, "BF16", dict(names.values()), tensors(), {"format": "pt"})


def _write_safetensors(
    target: Path,
    dtype: str,
    shapes: dict[str, tuple[int, ...]],
    tensors: Iterator[torch.Tensor],
    metadata: dict[str, str],
) -> None:
    """A safetensors file, streamed: the library's writer wants all tensors in memory."""
    header: Json = {"__metadata__": metadata}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + {"BF16": 2, "U8": 1}[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    with target.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors:
            out.write(tensor.contiguous().view(torch.uint8).numpy().data)


def _packable(gguf: Gguf) -> Iterator[tuple[str, list[str]]]:
    """(packed name, GGUF names) of the products whose weights are all four-bit and fit torch's kernel."""
    for block in range(gguf.number("block_count")):
        for name, parts in _PACKED.items():
            tensors = [gguf.tensors[f"blk.{block}.{part}.weight"] for part in parts]
            rows = sum(tensor.shape[0] for tensor in tensors)
            if all(tensor.type in _FOUR_BIT for tensor in tensors) and rows % 16 == 0:
                yield f"layers.{block}.{name}", [tensor.name for tensor in tensors]


def _tileable(gguf: Gguf) -> Iterator[tuple[str, list[str]]]:
    """(product's part, GGUF names) of all products in tiles; rows of one type are a part together."""
    products = [
        (f"layers.{block}.{name}", [f"blk.{block}.{part}.weight" for part in parts])
        for block in range(gguf.number("block_count"))
        for name, parts in _PACKED.items()
    ]
    head = "output.weight" if "output.weight" in gguf.tensors else "token_embd.weight"
    for product, names in [*products, ("head", [head])]:
        if not tiles.served([gguf.tensors[name].type for name in names]):
            continue
        runs = itertools.groupby(names, key=lambda name: gguf.tensors[name].type)
        yield from ((f"{product}.{index}", list(run)) for index, (_, run) in enumerate(runs))


def _add_low_bit(gguf: Gguf, target: Path) -> None:
    """Write the low-bit weights for this machine next to a ready form and record them."""
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    file = low_bit_file(target)
    with storage_errors(f"writing {file}"), scratch(target.parent) as work:
        write = _write_tiles if native.missing() is None else _write_packed
        write(gguf, config, work / file.name)
        (work / file.name).chmod(0o600)
        size = (work / file.name).stat().st_size
        (work / file.name).replace(file)
    record = read_json(target / RECORD)
    record["files"][file.name] = size
    write_json(target / RECORD, record)


def _write_tiles(gguf: Gguf, config: Json, file: Path) -> None:
    """Tiles of every part; the file's metadata says what form each has."""
    made: dict[str, np.ndarray] = {}
    forms: dict[str, str] = {}
    for name, some in _tileable(gguf):
        codes = [tiles.decode(_rows(gguf, part, config), gguf.tensors[part].type) for part in some]
        if name == HEAD and codes[0].bits == 8:
            codes[0], made[REST] = tiles.split(codes[0])
        form, made[name] = tiles.pack(codes)
        forms[name] = json.dumps(dataclasses.asdict(form))
    shapes = {name: x.shape for name, x in made.items()}
    _write_safetensors(file, "U8", shapes, (torch.from_numpy(x) for x in made.values()), forms)


def _write_packed(gguf: Gguf, config: Json, file: Path) -> None:
    """torch's int4 form of every product that fits it."""
    from safetensors.torch import save_file

    tensors: dict[str, torch.Tensor] = {}
    for packed, names in _packable(gguf):
        parts = [four_bit(_rows(gguf, name, config), gguf.tensors[name].type) for name in names]
        codes, scales = (
            torch.cat(part, dim=axis) for part, axis in zip(zip(*parts, strict=True), (0, 1), strict=True)
        )
        tensors[f"{packed}.weight"] = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        tensors[f"{packed}.scales"] = scales
    save_file(tensors, file)


def four_bit(rows: np.ndarray, kind: GGMLQuantizationType) -> tuple[torch.Tensor, torch.Tensor]:
    """Stored rows of Q4_0 or Q4_1, uint8 [N, bytes], as torch's int4 product wants them.

    Returns codes int32 [N, K] in 0..15 and bfloat16 [K / 32, N, 2] of scale and zero: the product computes
    (code - 8) * scale + zero; Q4_0 means d * (code - 8), Q4_1 means d * code + m, so its zero is m + 8 d.
    """
    size = 18 if kind == GGMLQuantizationType.Q4_0 else 20
    blocks = rows.reshape(len(rows), -1, size)
    scale = torch.from_numpy(blocks[..., :2].copy().view(np.float16)[..., 0].astype(np.float32))
    zero = torch.zeros_like(scale)
    if kind == GGMLQuantizationType.Q4_1:
        zero = (
            torch.from_numpy(blocks[..., 2:4].copy().view(np.float16)[..., 0].astype(np.float32)) + 8 * scale
        )
    nibbles = blocks[..., size - GROUP // 2 :]
    codes = np.concatenate([nibbles & 15, nibbles >> 4], axis=-1).reshape(len(rows), -1).astype(np.int32)
    return torch.from_numpy(codes), torch.stack([scale, zero], -1).transpose(0, 1).to(
        torch.bfloat16
    ).contiguous()


def _convert_with_transformers(gguf: Gguf, target: Path) -> None:
    """Weights and config of an architecture that transformers' own GGUF loader knows."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    model: Any
    report: Any
    try:
        with quiet(), _own_bar():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                gguf.path.parent, gguf_file=gguf.path.name, dtype=torch.bfloat16, output_loading_info=True
            )
        model, report = loaded
    except OSError:
        raise
    except Exception as error:  # the loader raises what its parts raise
        why = f"transformers cannot read it: {(str(error).splitlines() or [repr(error)])[0][:160]}"
        raise BadInput(f"{gguf.path}: architecture '{gguf.architecture}' is not served", why) from error
    if missing := sorted(report["missing_keys"]):
        raise gguf.damaged(f"{len(missing)} weights are missing, {missing[0]} first")
    tensors = {tensor.data_ptr(): (name, tensor) for name, tensor in reversed(model.state_dict().items())}
    save_file(  # tied weights once, under the name that comes first
        {name: tensor.contiguous() for name, tensor in tensors.values()},
        target / "model.safetensors",
        metadata={"format": "pt"},
    )
    config = model.config.to_dict()
    config.pop("quantization_config", None)
    write_json(target / "config.json", config)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No advice of transformers; its progress bars only on a terminal."""
    from transformers.utils import logging as transformers_logging

    level = transformers_logging.get_verbosity()
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(logging.ERROR)
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if shown:
            transformers_logging.enable_progress_bar()


def _own_bar() -> contextlib.AbstractContextManager[Any]:
    """The GGUF loader's bar ignores transformers' switch: without a terminal, drop what it writes."""
    return contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO())
