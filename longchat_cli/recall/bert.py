"""The forward of a BERT encoder (Devlin et al., NAACL 2019) with torch alone: transformers takes seconds."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F


class Bert:
    """The encoder in `directory` (config.json, model.safetensors in Hugging Face's names).

    Raises whatever a damaged file raises.
    """

    def __init__(self, directory: Path, dtype: torch.dtype, device: str) -> None:
        config = json.loads((directory / "config.json").read_bytes())
        self.width, self.heads = int(config["hidden_size"]), int(config["num_attention_heads"])
        self.layers, self.epsilon = int(config["num_hidden_layers"]), float(config["layer_norm_eps"])
        if config["hidden_act"] != "gelu":
            raise ValueError(f"activation {config['hidden_act']}")
        self.device, self.dtype = torch.device(device), dtype
        self._weights = {
            name: weight.to(self.device, dtype)
            for name, weight in load_file(directory / "model.safetensors").items()
        }
        self(torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1, dtype=torch.bool))  # every weight is there

    @torch.inference_mode()
    def __call__(self, ids: Tensor, mask: Tensor) -> Tensor:
        """ids int64 [rows, n] and mask bool [rows, n] -> the last layer's output [rows, n, width]."""
        rows, count = ids.shape
        visible = mask.to(self.device)[:, None, None]
        w = self._weights
        x = F.embedding(ids.to(self.device), w["embeddings.word_embeddings.weight"])
        x = x + w["embeddings.position_embeddings.weight"][:count]
        x = self._norm(x + w["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
        for index in range(self.layers):
            layer = f"encoder.layer.{index}"
            q, k, v = (
                self._linear(x, f"{layer}.attention.self.{name}")
                .view(rows, count, self.heads, -1)
                .transpose(1, 2)
                for name in ("query", "key", "value")
            )
            seen = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
            seen = self._linear(seen.transpose(1, 2).flatten(2), f"{layer}.attention.output.dense")
            x = self._norm(x + seen, f"{layer}.attention.output.LayerNorm")
            hidden = F.gelu(self._linear(x, f"{layer}.intermediate.dense"))
            x = self._norm(x + self._linear(hidden, f"{layer}.output.dense"), f"{layer}.output.LayerNorm")
        return x

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self._weights[f"{name}.weight"], self._weights[f"{name}.bias"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight, bias = self._weights[f"{name}.weight"], self._weights[f"{name}.bias"]
        return F.layer_norm(x, (self.width,), weight, bias, self.epsilon)
