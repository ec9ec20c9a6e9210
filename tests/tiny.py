"""Tiny random decoders of many architectures, built from configs in code; nothing is read or fetched."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedModel

VOCABULARY = 97
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": None,
}
BASE = {"rope_type": "default", "rope_theta": 10_000.0}
FAST = {**BASE, "rope_theta": 100.0}
"""For few planes: with a base of 10,000 all but the first hardly turn."""

LLAMA3 = {
    **BASE,
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {**BASE, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
TEMPERATURE = {**YARN, "factor": 32.0, "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.5}
"""Queries grow by 1 + 0.5 ln(1 + floor(position / 16)): two steps within the tests' 44 tokens."""

DYNAMIC = {**BASE, "rope_type": "dynamic", "factor": 2.0}


def longrope(planes: int, trained: int, **more: Any) -> dict[str, Any]:
    """Options of a Phi 3 whose frequencies are others as soon as a text is longer than `trained` tokens."""
    parameters = {
        **BASE,
        "rope_type": "longrope",
        "short_factor": [1.0 + i / 8 for i in range(planes)],
        "long_factor": [4.0] * planes,
    }
    return {"original_max_position_embeddings": trained, "rope_parameters": parameters | more}


def _hybrid(*kinds: str, window: int = 16) -> dict[str, Any]:
    return {
        "num_hidden_layers": len(kinds),
        "layer_types": [f"{kind}_attention" for kind in kinds],
        "sliding_window": window,
    }


@dataclass(frozen=True)
class Architecture:
    """`rope`: what probing must find in each layer: planes and pairing, None for NoPE, 'own' for the model's
    own sliding or linear layers; 'no' where keys are not rotations of one another."""

    config: str
    options: dict[str, Any]
    rope: tuple[str | None, ...]

    @property
    def hybrid(self) -> bool:
        return "own" in self.rope


def _plain(config: str, rope: str | None = "half 4", **options: Any) -> Architecture:
    return Architecture(config, options, (rope,) * 2)


ARCHITECTURES: dict[str, Architecture] = {
    "llama": _plain("Llama"),
    "llama2": _plain("Llama", num_key_value_heads=4),
    "llama3-rope": _plain("Llama", rope_parameters=LLAMA3),
    "yarn": _plain("Llama", rope_parameters=YARN),
    "dynamic": _plain("Llama", "no", rope_parameters=DYNAMIC),
    "qwen2": _plain("Qwen2"),
    "qwen2.5": _plain("Qwen2", tie_word_embeddings=True, rope_parameters={**BASE, "rope_theta": 1e6}),
    "qwen3": _plain("Qwen3"),
    "qwen3-moe": _plain(
        "Qwen3Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, decoder_sparse_step=1
    ),
    "mistral": _plain("Mistral", sliding_window=None),
    "mixtral": _plain("Mixtral", num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "ministral3": _plain("Ministral3", rope_parameters=TEMPERATURE),
    "starcoder2": _plain("Starcoder2", sliding_window=None),
    "phi3": _plain("Phi3", "half 2", partial_rotary_factor=0.5),
    "phi3-longrope": _plain("Phi3", "no", **longrope(2, 128, partial_rotary_factor=0.5)),
    "stablelm": _plain("StableLm", "half 1", partial_rotary_factor=0.25),
    "glm4": _plain("Glm4", "interleaved 2", partial_rotary_factor=0.5),
    "olmo2": _plain("Olmo2"),
    "granite": _plain("Granite", attention_multiplier=0.2, logits_scaling=2.0, residual_multiplier=0.7),
    "smollm3": Architecture("SmolLM3", {"no_rope_layers": [1, 0]}, ("half 4", None)),
    "gpt-neox": _plain("GPTNeoX", "half 2", rope_parameters={**FAST, "partial_rotary_factor": 0.5}),
    "opt": _plain("OPT", "no", ffn_dim=40, word_embed_proj_dim=32),
    "gemma2": Architecture(
        "Gemma2", {**_hybrid("sliding", "full"), "attn_logit_softcapping": 2.0}, ("own", "half 4")
    ),
    "gemma3": Architecture("Gemma3Text", _hybrid("sliding", "full", "full"), ("own", "half 4", "half 4")),
    "cohere2": Architecture("Cohere2", _hybrid("sliding", "full"), ("own", None)),
    "gpt-oss": Architecture(
        "GptOss",
        {
            **_hybrid("full", "sliding"),
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": BASE,
        },
        ("half 4", "own"),
    ),
    "exaone4": Architecture("Exaone4", _hybrid("sliding", "full"), ("own", None)),
    "lfm2": Architecture(
        "Lfm2",
        {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
        ("own", "half 4"),
    ),
    "qwen3.5": Architecture(
        "Qwen3_5Text",
        {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "rope_parameters": {**FAST, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]},
        },
        ("own", "half 2"),
    ),
    "hunyuan": _plain("HunYuanDenseV1", "no"),
}  # fmt: skip


@functools.cache
def model(name: str) -> PreTrainedModel:
    """A stock float32 model with eager attention. Shared: never change it."""
    return fresh(name)


def fresh(name: str) -> PreTrainedModel:
    """The same model again, for whoever takes it over."""
    architecture = ARCHITECTURES[name]
    return build(architecture.config, **architecture.options)


def build(config: str, **options: Any) -> PreTrainedModel:
    """A random float32 model of transformers' `<config>Config`, eager; an option of `...` is left out."""
    given = {name: value for name, value in {**SIZES, **options}.items() if value is not ...}
    made = getattr(transformers, f"{config}Config")(**given)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        built = AutoModelForCausalLM.from_config(made, dtype=torch.float32, attn_implementation="eager")
        for key, weight in built.named_parameters():
            if weight.dim() == 1 or "sinks" in key:  # norms, biases and learned sinks start at 0 or 1
                weight.data += torch.randn_like(weight) * 0.2
    return built.eval()


def tokens(length: int, seed: int = 0) -> torch.Tensor:
    """Random token ids int64 [length]; 0 to 2 are left out."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (length,), generator=generator)


@torch.no_grad()
def stock_logits(name: str, ids: torch.Tensor) -> torch.Tensor:
    """Logits [length, vocab] of the stock model in eager attention."""
    return model(name)(input_ids=ids.unsqueeze(0), use_cache=False).logits[0]
