"""Any transformers decoder under a method. The only importer of transformers internals; pinned to 5.24.

Nothing is patched: attention modules call `cache.update(k, v, layer, kwargs=kwargs)` and hand the same kwargs
to the attention function. Our cache slot leaves itself in them, and the function registered here asks the
slot's layer for its spans. Layers that are not plain full attention (sliding, conv, linear) keep the cache
the model gave them.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import (
    Cache as TransformersCache,
)
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
)

from longchat_cli import kernels
from longchat_cli.attention.full import Full
from longchat_cli.attention.layer import Cache, Layer, Method
from longchat_cli.attention.positions import make_exact
from longchat_cli.attention.rope import Rope, default_frequencies, probe
from longchat_cli.errors import BadInput, UsageError
from longchat_cli.kernels import Span

NAME = "longchat"


class Slot(CacheLayerMixin):
    """Stands in a transformers cache for one of our layers and passes it on to the attention function."""

    is_sliding = False

    def __init__(self, layer: Layer, decoding: bool | None) -> None:
        super().__init__()
        self.layer, self.decoding = layer, decoding

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any):
        if "kwargs" in kwargs:
            kwargs["kwargs"]["slot"] = self
        else:  # gpt_neox keeps its arguments to itself, but hands on the very keys it gets back
            key_states.slot = self  # type: ignore[attr-defined]
        return key_states, value_states

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, **extra: Any) -> Tensor:
        # `generate` does not say whether it reads or decodes: a lone token after others is decoding.
        lone = q.shape[1] == 1 and self.layer.seen > 0
        decoding = lone if self.decoding is None else self.decoding
        return self.layer.attend(q, k, v, scale, decoding, **extra)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.layer.seen + query_length, 0

    def get_seq_length(self) -> int:
        return self.layer.seen

    def get_max_length(self) -> int:
        return -1


class ForeignLayers(dict[int, Any]):
    """The model's own cache layers by index; a copy shares tensors unless they are written in place."""

    def copy(self) -> ForeignLayers:
        return ForeignLayers({index: _copy_layer(layer) for index, layer in self.items()})


def _copy_layer(layer: Any) -> Any:
    # Key and value tensors of sliding layers are replaced on update; conv and recurrent states are written.
    return copy.copy(layer) if isinstance(layer, DynamicLayer) else copy.deepcopy(layer)


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    slot: Slot | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The registered attention function: [1, heads, rows, dim] in, [1, rows, heads, dim] out.

    Raises UsageError for batches: without a mask padding cannot be honoured.
    """
    if query.shape[0] != 1:
        raise UsageError("batches are not supported", "", "run one sequence at a time")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    q, k, v = query[0], key[0], value[0]
    slot = slot or getattr(key, "slot", None)
    if slot is not None:
        out = slot.attend(q, k, v, scale, softcap=softcap, sinks=s_aux)
    else:
        out, _ = kernels.attend(q, [_own_span(q, k, v, sliding_window)], scale, softcap, s_aux)
    return out.transpose(0, 1).unsqueeze(0), None


def _own_span(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Span:
    """What a layer with the model's own cache sees: its last keys, causally, within its window."""
    rows, keys = q.shape[1], k.shape[1]
    stop = torch.arange(keys - rows + 1, keys + 1, device=q.device)
    return Span(k, v, 0 if window is None else (stop - window).clamp(min=0), stop)


AttentionInterface.register(NAME, attention)


class HFDecoder:
    """A transformers causal language model as a decoder: `forward` over our caches, one sequence at a time.

    Raises BadInput for models that do not use transformers' attention interface.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        if not model._can_set_attn_implementation():
            raise BadInput(
                f"{type(model).__name__} is not supported",
                "it does not use transformers' attention interface",
                "choose another model",
            )
        config = model.config.get_text_config(decoder=True)
        if any(str(mode).startswith("reuse") for mode in getattr(config, "kv_sharing_modes", None) or ()):
            raise BadInput(
                f"{type(model).__name__} is not supported",
                "its layers share their keys with other layers",
                "choose another model",
            )
        self.model = model.eval()
        model.set_attn_implementation(NAME)
        self.config = config
        self.layers = self.config.num_hidden_layers
        self.vocab_size = self.config.vocab_size
        self.window = int(getattr(self.config, "max_position_embeddings", 0) or 2048)
        self.inexact = make_exact(model)  # rotary modules whose angles stay float32
        self.switch = _switch(self.config)  # a longer text turns at other rates
        self.device = model.device
        self.dtype = model.dtype

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user may want to know of this model."""
        rounded = [f"{name} keeps float32 angles, rounded far into a stream" for name in self.inexact]
        again = f"a text is read once more when it outgrows {self.switch:,} tokens" if self.switch else ""
        return (*rounded, *filter(None, [again]))

    def new_cache(self, method: Method) -> Cache:
        """An empty state under `method`. Raises UsageError where the method cannot serve this model."""
        foreign = ForeignLayers(
            {
                index: layer
                for index, layer in enumerate(DynamicCache(config=self.model.config).layers)
                if type(layer) is not DynamicLayer
            }
        )
        if len(foreign) == self.layers:
            raise UsageError("no attention method applies to this model", "no layer has full attention")
        ropes = self.ropes if method.needs_rope else [None] * self.layers
        layers = [
            None if index in foreign else method.layer(index, self.layers, _usable(rope))
            for index, rope in enumerate(ropes)
        ]
        return Cache(method, layers, foreign)

    def forward(self, ids: Tensor, cache: Cache, logits: int = 1) -> Tensor:
        """Read token ids int64 [rows] after what `cache` holds; float32 logits [min(logits, rows), vocab]."""
        return cache.method.forward(self._run, ids, cache, logits)

    def _run(self, ids: Tensor, cache: Cache, logits: int) -> Tensor:
        new = len(ids)
        if self.switch and type(cache.method).forward is Method.forward:
            ids = self._at_one_rate(self.switch, ids, cache)
        view = transformers_cache(cache, cache.decoding and len(ids) == new)
        positions = torch.arange(cache.position, cache.position + len(ids), device=self.device).unsqueeze(0)
        # Not inference mode: `generate` may go on with this cache outside of it.
        with torch.no_grad():
            out = self.model(
                input_ids=ids.to(self.device).unsqueeze(0),
                position_ids=positions,
                cache=view,
                use_cache=True,
                logits_to_keep=max(logits, 1),
            )
        cache.position += len(ids)
        if any(layer.seen != cache.position for layer in cache.own()):
            raise BadInput(
                f"{type(self.model).__name__} is not supported",
                "not every layer's attention goes through its own cache",
                "choose another model",
            )
        return out.logits[0, -logits:].float() if logits else out.logits[0, :0].float()

    @staticmethod
    def _at_one_rate(switch: int, ids: Tensor, cache: Cache) -> Tensor:
        """What to read for new ids: when the text outgrows `switch`, all of it again, as stock `generate`."""
        if cache.position > switch:
            return ids
        text = torch.cat([cache.text, ids.cpu()])
        cache.text = text if len(text) <= switch else text[:0]
        if len(text) <= switch or not cache.position:
            return ids
        cache.restart(0)
        return text

    def read(self, ids: Tensor, cache: Cache, depth: int) -> None:
        """Read ids for their keys alone; every layer runs, whatever `depth` asks."""
        self.forward(ids, cache)

    @functools.cached_property
    def ropes(self) -> list[Rope | None | str]:
        """Each layer's rotation, found by probing the model; a string says why none fits."""
        if _stretches(getattr(self.config, "rope_parameters", None) or {}):
            return ["keys turn at other rates the longer the text is"] * self.layers
        return probe(self._keys_at, self._candidates())

    def _keys_at(self, position: int) -> list[Tensor | None]:
        cache = self.new_cache(Full())
        view = transformers_cache(cache)
        token = torch.tensor([[self.vocab_size // 2]], device=self.device)
        with torch.no_grad():
            self.model(
                input_ids=token,
                position_ids=torch.tensor([[position]], device=self.device),
                cache=view,
                use_cache=True,
            )
        return [None if layer is None else layer.kv.k for layer in cache.layers]  # type: ignore[attr-defined]

    def _candidates(self) -> list[Rope]:
        tables = [
            buffer.double().cpu()
            for name, buffer in self.model.named_buffers()
            if name.endswith("inv_freq") and buffer.dim() == 1
        ]
        if not tables:
            dim = getattr(self.config, "head_dim", None) or self.config.hidden_size // max(
                self.config.num_attention_heads, 1
            )
            tables = [default_frequencies(dim, 10_000.0)]
        return [Rope(table, interleaved) for interleaved in (False, True) for table in tables]


def transformers_cache(cache: Cache, decoding: bool | None = None) -> TransformersCache:
    """Our state as a transformers cache; `decoding` None leaves it to be guessed, as `generate` needs.

    Raises UsageError then for a method whose own reading `generate` would pass by.
    """
    if decoding is None and type(cache.method).forward is not Method.forward:
        raise UsageError("transformers' generate cannot serve this method", "it reads the text anew")
    foreign = cache.foreign or {}
    return TransformersCache(
        layers=[
            foreign[index] if layer is None else Slot(layer, decoding)
            for index, layer in enumerate(cache.layers)
        ]
    )


def _stretches(parameters: dict[str, Any]) -> bool:
    """Whether a model's rotary frequencies depend on the length so far, which no single token shows."""
    groups = [parameters, *(part for part in parameters.values() if isinstance(part, dict))]
    return any(group.get("rope_type") in ("dynamic", "longrope") for group in groups)


def _switch(config: Any) -> int | None:
    """The length past which a longrope model (Phi 3) turns all keys at other rates, the first ones too."""
    parameters = getattr(config, "rope_parameters", None) or {}
    longrope = parameters.get("rope_type") == "longrope"
    return int(parameters["original_max_position_embeddings"]) if longrope else None


def _usable(rope: Rope | None | str) -> Rope | None:
    if isinstance(rope, str):
        raise UsageError(
            "this method cannot serve this model",
            f"it moves keys, and the model's {rope}",
            "choose another method",
        )
    return rope
