"""A model state on disk: one safetensors file, tensors beside a JSON skeleton of what each layer keeps.

Never pickle. The file names the model and method it belongs to, and is refused for any other.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from longchat_cli.attention.buffer import KVBuffer, PackedBuffer, Recent, Storage
from longchat_cli.attention.layer import Cache
from longchat_cli.errors import BadInput, MissingInput, StorageError

FORMAT = 3


def save(path: Path, cache: Cache, about: dict[str, Any], extra: dict[str, Tensor]) -> None:
    """Write `cache` with `about` (JSON: model, method, token ids ...) and `extra` tensors, atomically, 0600.

    Raises StorageError when the disk is full or the file cannot be written, BadInput for a model whose own
    layers keep a state that cannot be saved.
    """
    if cache.foreign:
        raise BadInput("this state cannot be saved", "the model keeps layers of its own (sliding or linear)")
    tensors: dict[str, Tensor] = dict(extra)
    layers = [_pack(layer.state(), tensors) for layer in cache.own()]
    counters = {"position": cache.position, "skipped": cache.skipped, "text": cache.text.tolist()}
    header = {"format": FORMAT, "about": about, "layers": layers, **counters}
    try:
        handle, name = tempfile.mkstemp(prefix=path.name, dir=path.parent)
        os.close(handle)
        try:
            save_file(tensors, name, metadata={"longchat": json.dumps(header)})
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except (OSError, SafetensorError) as error:
        raise StorageError(f"cannot save the state to {path}", str(error)) from error


def load(path: Path, cache: Cache, about: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Fill an empty `cache`; returns what was saved as `about` and the extra tensors.

    Every key of `about` given here must equal the saved one. Raises MissingInput, or BadInput when the file
    is damaged or belongs to something else.
    """
    if not path.exists():
        raise MissingInput(f"no state at {path}")
    try:
        with safe_open(path, framework="pt") as handle:
            header = json.loads((handle.metadata() or {})["longchat"])
            tensors = {name: handle.get_tensor(name).clone() for name in handle.keys()}  # noqa: SIM118
        if header["format"] != FORMAT:
            raise BadInput(f"{path} is of state format {header['format']}", f"this version reads {FORMAT}")
        for key, value in about.items():
            if header["about"][key] != value:
                raise BadInput(f"{path} does not fit", f"{key} is {header['about'][key]!r}, not {value!r}")
        for layer, saved in zip(cache.own(), header["layers"], strict=True):
            state = {name: _unpack(value, tensors) for name, value in saved.items()}
            if state.keys() != layer.state().keys():
                raise KeyError("layer fields")
            vars(layer).update(state)
        cache.position, cache.skipped = int(header["position"]), int(header["skipped"])
        cache.text = torch.tensor(header["text"], dtype=torch.int64)
    except _DAMAGE as error:
        raise BadInput(f"{path} is damaged or not a state", str(error), "remove it") from error
    return header["about"], {name: x for name, x in tensors.items() if not name.startswith(_PREFIX)}


_PREFIX = "layer."
# A header of the wrong shape fails in any of these ways while it is taken apart.
_DAMAGE = (SafetensorError, LookupError, ValueError, TypeError, AttributeError, RuntimeError, OSError)


def _pack(value: Any, tensors: dict[str, Tensor]) -> Any:
    """JSON for `value`, its tensors put aside under running names."""
    if isinstance(value, dict):
        return {name: _pack(item, tensors) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return {"list": [_pack(item, tensors) for item in value]}
    if isinstance(value, (Storage, PackedBuffer)):
        return {type(value).__name__: _pack(value.state(), tensors)}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, Tensor):
        return {"tensor": _put(value, tensors)}
    return {"plain": value}


def _put(tensor: Tensor, tensors: dict[str, Tensor]) -> str:
    name = f"{_PREFIX}{len(tensors)}"
    tensors[name] = tensor.contiguous().clone()
    return name


def _unpack(saved: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
    ((kind, value),) = saved.items()
    if kind == "list":
        return [_unpack(item, tensors) for item in value]
    if kind == "tensor":
        return tensors[value]
    if kind == "plain":
        return value
    if kind == "dtype":
        return _DTYPES[value]
    return _BUFFERS[kind].of(**{name: _unpack(item, tensors) for name, item in value.items()})


_DTYPES = {name: x for name, x in vars(torch).items() if isinstance(x, torch.dtype)}
_BUFFERS: dict[str, Any] = {kind.__name__: kind for kind in (Storage, KVBuffer, Recent, PackedBuffer)}
