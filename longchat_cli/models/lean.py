"""A lean forward for Llama-like decoders: torch alone, no transformers, straight from the ready form.

Serves RMSNorm, rotary positions, grouped queries, a gated MLP, optional biases and QK-norm (Llama, SmolLM,
Mistral, Qwen2, Qwen3) and with them what Gemma 3 adds: norms of each branch, scaled embeddings, layers that
see a sliding window whatever the method is. What sets an architecture apart is data, see `FAMILIES`.
Prompts run on bfloat16 weights, decoding on packed low-bit ones if present.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional as F

from longchat_cli.attention.layer import Cache, Method, places
from longchat_cli.attention.rope import Rope, default_frequencies
from longchat_cli.attention.window import Window
from longchat_cli.errors import BadInput
from longchat_cli.kernels import Rotation

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Family:
    """What an architecture does in its own way; names are those of its tensors in transformers."""

    mlp_norm: str = "post_attention_layernorm"
    after_attention: str | None = None  # norms of a branch before it joins the residual
    after_mlp: str | None = None
    norm_offset: float = 0.0  # norms multiply by this + their weight
    scaled_embedding: bool = False  # by the square root of the width
    slides: bool = False  # layers of sliding attention are served
    defaults: Mapping[str, Any] = field(default_factory=dict)  # what its config.json may leave out


GEMMA3 = Family(
    mlp_norm="pre_feedforward_layernorm",
    after_attention="post_attention_layernorm",
    after_mlp="post_feedforward_layernorm",
    norm_offset=1.0,
    scaled_embedding=True,
    slides=True,
    defaults={
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "rope_theta": 1_000_000.0,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "tie_word_embeddings": True,
    },
)
FAMILIES = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(),
    "qwen3": Family(),
    "gemma3_text": GEMMA3,
}
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
PACKED_GROUP = 32
CANDIDATES = 256
PACKED_ROWS = 4
"""Up to this many rows the packed low-bit products are faster than the bfloat16 ones."""


def refuses(config: dict[str, Any]) -> str | None:
    """None when the lean forward serves a model of this config.json, else why not."""
    family = FAMILIES.get(config.get("model_type", ""))
    if family is None:
        return f"architecture {config.get('model_type')}"
    config = {**family.defaults, **config}
    if _activation(config) not in ACTIVATIONS:
        return f"activation {_activation(config)}"
    kinds = set(layer_kinds(config))
    if not family.slides and (SLIDING in kinds or _slides(config)):
        return "sliding-window layers"
    if FULL not in kinds:
        return "no layer with full attention"
    if config.get("use_bidirectional_attention"):
        return "attention to later tokens"
    if config.get("quantization_config"):
        return "quantized weights"
    return next(filter(None, (_refuses_rope(_rope_parameters(config, kind)) for kind in kinds)), None)


def _refuses_rope(parameters: dict[str, Any]) -> str | None:
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        return "partial rotary positions"
    kind = parameters["rope_type"]
    return None if kind in ("default", "linear", "llama3") else f"rotary scaling {kind}"


def _slides(config: dict[str, Any]) -> bool:
    default = config["model_type"] == "mistral"
    return bool(config.get("sliding_window")) and config.get("use_sliding_window", default)


def _activation(config: dict[str, Any]) -> str:
    return config.get("hidden_activation") or config.get("hidden_act") or "silu"


def layer_kinds(config: dict[str, Any]) -> list[str]:
    """What each layer's attention is, as transformers says it; older files say that every n-th is full."""
    layers, every = int(config.get("num_hidden_layers", 1)), config.get("sliding_window_pattern") or 1
    return config.get("layer_types") or [FULL if i % every == 0 else SLIDING for i in range(1, layers + 1)]


def _rope_parameters(config: dict[str, Any], kind: str) -> dict[str, Any]:
    """transformers 5 writes `rope_parameters`, perhaps for each kind of layer; older files `rope_theta`,
    `rope_scaling` and, for sliding layers, `rope_local_base_freq`."""
    new = config.get("rope_parameters") or {}
    if FULL in new or SLIDING in new:
        new = new.get(kind) or {}
    if kind == SLIDING:
        old = {"rope_theta": config.get("rope_local_base_freq", 10_000.0)}
    else:
        old = {"rope_theta": config.get("rope_theta", 10_000.0), **(config.get("rope_scaling") or {})}
    parameters = {**old, **new}
    parameters.setdefault("rope_type", parameters.get("type", "default"))
    return parameters


def rope_of(config: dict[str, Any], kind: str = FULL) -> Rope:
    """The rotation of layers of a kind; Llama 3 scaling stretches long wavelengths, linear scaling all."""
    parameters = _rope_parameters(config, kind)
    frequencies = default_frequencies(_head_dim(config), float(parameters["rope_theta"]))
    if parameters["rope_type"] == "default":
        return Rope(frequencies)
    factor = parameters["factor"]
    if parameters["rope_type"] == "linear":
        return Rope(frequencies / factor)
    trained = parameters["original_max_position_embeddings"]
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    turns = trained * frequencies / (2 * math.pi)
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return Rope(frequencies * ((1 - smooth) / factor + smooth))


def _head_dim(config: dict[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


@dataclass(frozen=True)
class Linear:
    """Weights [out, in] in the dense form, their bias, and the packed form for few rows."""

    weights: tuple[Tensor, ...]
    bias: Tensor | None = None
    packed: tuple[Tensor, Tensor] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, in] -> [rows, out]."""
        if self.packed is not None and x.shape[0] <= PACKED_ROWS:
            y = torch.ops.aten._weight_int4pack_mm_for_cpu(x, self.packed[0], PACKED_GROUP, self.packed[1])
        elif len(self.weights) == 1:
            y = x @ self.weights[0].t()
        else:
            y = torch.cat([x @ weight.t() for weight in self.weights], dim=-1)
        return y if self.bias is None else y + self.bias


@dataclass(frozen=True)
class Block:
    """One decoder layer's weights; norms are float32 factors."""

    attention_norm: Tensor
    qkv: Linear
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Linear
    after_attention: Tensor | None
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    after_mlp: Tensor | None


class LeanDecoder:
    """A Llama-like decoder over our caches, one sequence at a time."""

    notes: tuple[str, ...] = ()

    def __init__(
        self, config: dict[str, Any], tensors: dict[str, Tensor], packed: dict[str, Tensor] | None = None
    ) -> None:
        family = FAMILIES[config["model_type"]]
        config = {**family.defaults, **config}
        self.config = config
        self.layers = int(config["num_hidden_layers"])
        self.heads = int(config["num_attention_heads"])
        self.kv_heads = int(config.get("num_key_value_heads") or self.heads)
        self.dim = _head_dim(config)
        self.scale = float(config.get("query_pre_attn_scalar", self.dim)) ** -0.5
        self.softcap = config.get("final_logit_softcapping")
        self.vocab_size = int(config["vocab_size"])
        self.window = int(config.get("max_position_embeddings") or 2048)
        self.width, self.hidden = int(config["hidden_size"]), int(config["intermediate_size"])
        self.eps = float(config.get("rms_norm_eps", 1e-6))
        self.activation = _activation(config)
        self.embedding = _take(tensors, "model.embed_tokens.weight")
        self.device, self.dtype = self.embedding.device, self.embedding.dtype
        scale = self.width**0.5 if family.scaled_embedding else 1.0
        self.embedding_scale = torch.tensor(scale, dtype=self.dtype).item()  # rounded as in transformers
        self.norm = _norm(tensors, "model.norm", family)
        self.head = self.embedding if config.get("tie_word_embeddings") else _take(tensors, "lm_head.weight")
        self.blocks = [_block(tensors, packed or {}, index, family) for index in range(self.layers)]
        self.kinds = layer_kinds(config)
        self.ropes = {kind: rope_of(config, kind).to(self.device) for kind in set(self.kinds)}
        self.packed = packed is not None
        self.products = Products(self)

    @classmethod
    def from_dir(
        cls, path: Path, dtype: torch.dtype = torch.bfloat16, device: str = "cpu", packed: bool = True
    ) -> LeanDecoder:
        """Memory-map a ready form. Raises BadInput when it lacks weights or the lean forward refuses it."""
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        reason = refuses(config)
        if reason:
            raise BadInput(f"{path} is not a model of the lean forward", reason)
        tensors = {
            name: tensor.to(device=device, dtype=dtype)
            for file in sorted(path.glob("model*.safetensors"))
            for name, tensor in _mapped(file).items()
        }
        low_bit = path / f"packed-{torch.backends.cpu.get_cpu_capability()}.safetensors"
        use = packed and dtype == torch.bfloat16 and device == "cpu" and low_bit.exists()
        return cls(config, tensors, _mapped(low_bit) if use else None)

    def new_cache(self, method: Method) -> Cache:
        """An empty state under `method`; layers of sliding attention keep their window whatever it is."""
        methods = {FULL: method}
        if SLIDING in self.kinds:
            methods[SLIDING] = Window(window=self.config["sliding_window"])
        layers = [
            methods[kind].layer(index, self.layers, self.ropes[kind]) for index, kind in enumerate(self.kinds)
        ]
        return Cache(method, layers)

    @torch.inference_mode()
    def forward(self, ids: Tensor, cache: Cache, logits: int = 1) -> Tensor:
        """Read token ids int64 [rows] after what `cache` holds; float32 logits [min(logits, rows), vocab]."""
        return cache.method.forward(self._run, ids, cache, logits)

    def _run(self, ids: Tensor, cache: Cache, logits: int) -> Tensor:
        found = self.products.step(ids, cache, logits)
        if found is None:
            # Rows that a method gives up between layers are computed only where their logits are asked for.
            x = self.read(ids, cache, self.layers, every=logits > 1)
            found = self.products.logits(x[len(x) - min(logits, len(x)) :])
        return found if self.softcap is None else self.softcap * torch.tanh(found / self.softcap)

    def begin(self, ids: Tensor, cache: Cache) -> tuple[Tensor, dict[str, Rotation]]:
        """What the first layer takes, float32 [rows, width], and the rotations of each kind of layer."""
        x = self.embedding[ids.to(self.device)] * self.embedding_scale
        at, rows = cache.position, len(ids)
        if rows == 1 and isinstance(at, int):
            rotations = {kind: rope.shift(at) for kind, rope in self.ropes.items()}
        else:
            rotations = {
                kind: rope.rotation(places(at, rows, self.device)) for kind, rope in self.ropes.items()
            }
        return x.float(), rotations  # the residual stream stays in float32

    @torch.inference_mode()
    def read(self, ids: Tensor, cache: Cache, depth: int, every: bool = False) -> Tensor:
        """Run the first `depth` layers over ids [rows]; states float32 [rows, width] before the last norm.

        Of a method that drops rows on the way only the states left come back, unless `every` one is wanted.
        """
        products = self.products
        x, rotations = self.begin(ids, cache)
        every = every or SLIDING in self.ropes  # whose windows have no gaps
        for index, (layer, kind) in enumerate(zip(cache.layers[:depth], self.kinds, strict=False)):
            assert layer is not None
            q, k, v = products.enter(index, x, rotations[kind])
            x = products.leave(index, x, layer.attend(q, k, v, self.scale, cache.decoding))
            if layer.onward is not None and not every:
                x = x[layer.onward]
                rotations = {kind: rotation.take(layer.onward) for kind, rotation in rotations.items()}
        cache.position = cache.position + len(ids)  # a tensor stays as it is
        return x


class Products:
    """What a decoder layer does before and after its attention, in torch."""

    def __init__(self, decoder: LeanDecoder) -> None:
        self.decoder = decoder

    def enter(self, index: int, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """States x float32 [rows, width] -> q [heads, rows, dim], k, v [KV heads, rows, dim], rotated."""
        d, block, rows = self.decoder, self.decoder.blocks[index], x.shape[0]
        qkv = block.qkv(self._normed(x, block.attention_norm))
        qkv = qkv.view(rows, d.heads + 2 * d.kv_heads, d.dim).transpose(0, 1)
        qk, v = qkv[: d.heads + d.kv_heads], qkv[d.heads + d.kv_heads :]
        if block.q_norm is not None and block.k_norm is not None:
            q, k = qk[: d.heads], qk[d.heads :]
            qk = torch.cat([self._normed(q, block.q_norm), self._normed(k, block.k_norm)])
        qk = rotation.apply(qk)
        return qk[: d.heads], qk[d.heads :], v

    def leave(self, index: int, x: Tensor, out: Tensor) -> Tensor:
        """States x and what attention gave, [heads, rows, dim] -> states after the layer, perhaps in x."""
        block = self.decoder.blocks[index]
        x = x + self._branch(block.o(out.transpose(0, 1).reshape(x.shape[0], -1)), block.after_attention)
        gate, up = block.gate_up(self._normed(x, block.mlp_norm)).chunk(2, dim=-1)
        gated = ACTIVATIONS[self.decoder.activation](gate) * up
        return x + self._branch(block.down(gated), block.after_mlp)

    def step(self, ids: Tensor, cache: Cache, logits: int) -> Tensor | None:
        """A whole decoding step at once, as `LeanDecoder.forward`; None where it goes layer by layer."""
        return None

    def logits(self, x: Tensor) -> Tensor:
        """float32 logits of states x float32 [rows, width] after the last layer.

        bfloat16 products round logits near 25 to steps of 0.125, enough to tie the best ones: for few rows
        the leading candidates are computed again in float32, for many everything is.
        """
        head, dtype = self.decoder.head, self.decoder.dtype
        x = F.rms_norm(x, x.shape[-1:], self.decoder.norm, self.decoder.eps)
        if dtype == torch.float32 or x.shape[0] > PACKED_ROWS:
            return x @ head.float().t()
        rough = (x.to(dtype) @ head.t()).float()
        best = rough.topk(min(CANDIDATES, rough.shape[-1]), dim=-1).indices
        exact = torch.einsum("rcw,rw->rc", head[best].float(), x)
        return rough.scatter(-1, best, exact)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x.float(), x.shape[-1:], weight, self.decoder.eps).to(self.decoder.dtype)

    def _branch(self, x: Tensor, after: Tensor | None) -> Tensor:
        """What a branch gave, as it joins the residual."""
        return x if after is None else F.rms_norm(x.float(), x.shape[-1:], after, self.decoder.eps)


def _mapped(file: Path) -> dict[str, Tensor]:
    try:
        with safe_open(file, framework="pt") as handle:
            return {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
    except Exception as error:  # safetensors raises its own error type for damaged files
        raise BadInput(f"{file} is damaged", str(error), "remove it and pull the model again") from error


def _take(tensors: dict[str, Tensor], name: str) -> Tensor:
    if name not in tensors:
        raise BadInput("the model's weights are incomplete", f"no tensor {name}", "pull the model again")
    return tensors[name]


def _norm(tensors: dict[str, Tensor], name: str, family: Family) -> Tensor:
    """A norm's factors, float32."""
    return _take(tensors, f"{name}.weight").float() + family.norm_offset


def _block(tensors: dict[str, Tensor], packed: dict[str, Tensor], index: int, family: Family) -> Block:
    prefix = f"model.layers.{index}."

    def linear(name: str, *parts: str) -> Linear:
        weights = tuple(_take(tensors, f"{prefix}{part}.weight") for part in parts)
        biases = [tensors[f"{prefix}{part}.bias"] for part in parts if f"{prefix}{part}.bias" in tensors]
        low_bit = f"layers.{index}.{name}"
        pair = (
            (packed[f"{low_bit}.weight"], packed[f"{low_bit}.scales"])
            if f"{low_bit}.weight" in packed
            else None
        )
        return Linear(weights, torch.cat(biases) if biases else None, pair)

    def norm(name: str) -> Tensor:
        return _norm(tensors, prefix + name, family)

    normed = f"{prefix}self_attn.q_norm.weight" in tensors
    return Block(
        attention_norm=norm("input_layernorm"),
        qkv=linear("qkv", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        q_norm=norm("self_attn.q_norm") if normed else None,
        k_norm=norm("self_attn.k_norm") if normed else None,
        o=linear("o", "self_attn.o_proj"),
        after_attention=norm(family.after_attention) if family.after_attention else None,
        mlp_norm=norm(family.mlp_norm),
        gate_up=linear("gate_up", "mlp.gate_proj", "mlp.up_proj"),
        down=linear("down", "mlp.down_proj"),
        after_mlp=norm(family.after_mlp) if family.after_mlp else None,
    )
