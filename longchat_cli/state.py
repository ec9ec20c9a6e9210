"""A model state as tensors beside a JSON skeleton of what each layer keeps: in one file, or page by page.

Never pickle. A file is sealed with a checksum, names the model and method it belongs to, and is refused for
any other.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from longchat_cli.attention.buffer import KVBuffer, PackedBuffer, Recent, Storage
from longchat_cli.attention.layer import Cache
from longchat_cli.errors import BadInput, MissingInput, StorageError
from longchat_cli.pages import Damaged, read_sealed, write_sealed

FORMAT = 8
CPU = torch.device("cpu")


def save(path: Path, cache: Cache, about: dict[str, Any], extra: dict[str, Tensor]) -> None:
    """Write `cache` with `about` (JSON: model, method, token ids ...) and `extra` tensors, atomically, 0600.

    Raises StorageError when the disk is full or the file cannot be written, BadInput for a model whose own
    layers keep something that cannot be saved.
    """
    parts = take_apart(cache)
    header = {"format": FORMAT, "about": about, **parts.skeleton}
    try:
        write_sealed(path, writer({**extra, **parts.whole}), {"longchat": json.dumps(header)})
    except (OSError, SafetensorError) as error:
        raise StorageError(f"cannot save the state to {path}", str(error)) from error


def load(
    path: Path, cache: Cache, about: dict[str, Any], device: torch.device = CPU
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Fill an empty `cache`; returns what was saved as `about` and the extra tensors.

    Every key of `about` given here must equal the saved one. Raises MissingInput, or BadInput when the file
    is damaged or belongs to something else.
    """
    if not path.exists():
        raise MissingInput(f"no state at {path}")
    try:
        header = json.loads(read_sealed(path)["longchat"])
        if header["format"] != FORMAT:
            raise BadInput(f"{path} is of state format {header['format']}", f"this version reads {FORMAT}")
        for key, value in about.items():
            if header["about"][key] != value:
                raise BadInput(f"{path} does not fit", f"{key} is {header['about'][key]!r}, not {value!r}")
        with safe_open(path, framework="pt") as file:
            put_together(cache, header, file, (), device)
            extra = {name: file.get_tensor(name).clone() for name in file.keys() if _is_extra(name)}  # noqa: SIM118
    except DAMAGE as error:
        raise BadInput(f"{path} is damaged or not a state", str(error), "remove it") from error
    return header["about"], extra


DAMAGE = (Damaged, SafetensorError, LookupError, ValueError, TypeError, AttributeError, RuntimeError, OSError)
"""A skeleton of the wrong shape fails in any of these ways while a state is put together."""


@dataclass(frozen=True)
class Parts:
    """A state taken apart: its JSON `skeleton`, tensors that are `whole`, and what `grew` on an earlier one.

    `paths` names what stands in `grew` and in the pages before it.
    """

    skeleton: dict[str, Any]
    whole: dict[str, Tensor]
    grew: dict[str, Tensor]
    paths: frozenset[str]


def take_apart(cache: Cache, before: Any = None, paths: frozenset[str] = frozenset()) -> Parts:
    """The state of `cache`, or what came to it since the snapshot `before`, whose `paths` are in pages.

    Layers that the model keeps itself (sliding, linear) are whole. Raises BadInput where they hold something
    that cannot be written.
    """
    packer = _Packer(paths)
    marks = [None] * len(cache.own()) if before is None else before[1]
    layers = [
        packer.fields(layer.state(), str(index), mark)
        for index, (layer, mark) in enumerate(zip(cache.own(), marks, strict=True))
    ]
    foreign = [packer.fields(vars(layer), f"foreign.{index}") for index, layer in _foreign(cache)]
    counters = {"position": cache.position, "skipped": cache.skipped, "text": cache.text.tolist()}
    skeleton = {"layers": layers, "foreign": foreign, **counters}
    return Parts(skeleton, packer.whole, packer.grew, frozenset(packer.paths))


def put_together(
    cache: Cache, skeleton: Mapping[str, Any], whole: Any, grew: Sequence[Any], device: torch.device = CPU
) -> None:
    """Make `cache` the state that `skeleton` tells; `whole` and `grew` are open safetensors files.

    What grew is added to what `cache` holds now. Raises one of DAMAGE, and then `cache` is as it was.
    """
    unpacker = _Unpacker(whole, grew, device)
    states: list[tuple[Any, dict[str, Any]]] = []
    for layer, saved in zip(cache.own(), skeleton["layers"], strict=True):
        now = layer.state()
        state = {name: unpacker.unpack(value, now[name]) for name, value in saved.items()}
        if state.keys() != now.keys():
            raise KeyError("layer fields")
        states.append((layer, state))
    for (_, layer), saved in zip(_foreign(cache), skeleton["foreign"], strict=True):
        states.append((layer, {name: unpacker.unpack(value) for name, value in saved.items()}))
    position, skipped = int(skeleton["position"]), int(skeleton["skipped"])
    text = torch.tensor(skeleton["text"], dtype=torch.int64)
    for layer, state in states:
        vars(layer).update(state)
    cache.position, cache.skipped, cache.text = position, skipped, text


def writer(tensors: dict[str, Tensor]) -> Callable[[str, dict[str, str]], None]:
    """How pages are told to write tensors."""
    return lambda name, metadata: save_file(tensors, name, metadata)


def _foreign(cache: Cache) -> list[tuple[int, Any]]:
    return sorted((cache.foreign or {}).items())


_PREFIX = "layer."


def _is_extra(name: str) -> bool:
    return not name.startswith(_PREFIX)


class _Packer:
    """JSON for values, their tensors put aside: in `grew` by their path what an earlier state continues in,
    all others in `whole` under running names."""

    def __init__(self, earlier: frozenset[str]) -> None:
        self.earlier, self.paths = earlier, set[str]()
        self.whole: dict[str, Tensor] = {}
        self.grew: dict[str, Tensor] = {}

    def fields(
        self, values: dict[str, Any], path: str, before: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Of an object: `before` are those it had."""
        older = before or {}
        return {name: self.pack(item, f"{path}.{name}", older.get(name)) for name, item in values.items()}

    def pack(self, value: Any, path: str, before: Any = None) -> Any:
        if isinstance(value, dict):
            return {"map": [[key, self.pack(item, f"{path}.{key}")] for key, item in value.items()]}
        if isinstance(value, (list, tuple)):
            if self._continues(value, path, before):
                new = range(len(before), len(value))
                self.grew |= {f"{path}.{index}": value[index].contiguous() for index in new}
                return {"longer": [path, len(value)]}
            return {"list": [self.pack(item, f"{path}.{index}") for index, item in enumerate(value)]}
        if isinstance(value, (Storage, PackedBuffer)):
            return {type(value).__name__: self._buffer(value, path, before)}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"device": None}
        if isinstance(value, Tensor):
            name = f"{_PREFIX}{len(self.whole)}"
            self.whole[name] = value.contiguous().clone()
            return {"tensor": name} if value.device == CPU else {"on device": name}
        if value is not None and not isinstance(value, (bool, int, float, str)):
            raise BadInput("this state cannot be saved", f"the model keeps a {type(value).__name__} in it")
        return {"plain": value}

    def _buffer(self, value: Storage | PackedBuffer, path: str, before: Any) -> dict[str, Any]:
        older = before.state() if type(before) is type(value) else None
        if not (isinstance(value, Storage) and self._continues(value, path, before)):
            return self.fields(value.state(), path, older)
        state, held = value.state(), len(before)
        live = state.pop("tensors")
        if len(value) > held:
            self.grew |= {f"{path}.{index}": x[:, held:].contiguous() for index, x in enumerate(live)}
        grown = {"grown": [path, len(live), len(value), live[0].device != CPU]}
        return {**self.fields(state, path), "tensors": grown}

    def _continues(self, value: Any, path: str, before: Any) -> bool:
        """Whether `value` is `before` and what came since, if anything, and all of `before` is in pages."""
        if before is None or not len(value) or (len(before) and path not in self.earlier):
            return False
        if isinstance(value, Storage):
            more = value.extends(before)
        else:
            same = len(value) >= len(before) and all(a is b for a, b in zip(before, value, strict=False))
            more = same and all(isinstance(item, Tensor) for item in value)
        if more:
            self.paths.add(path)
        return more


class _Unpacker:
    """Values of a packed state, from the file of its whole tensors and those of what grew, in order."""

    def __init__(self, whole: Any, grew: Sequence[Any], device: torch.device) -> None:
        self.whole, self.device = whole, device
        self.grew: dict[str, list[Any]] = {}
        for file in grew:
            for name in file.keys():  # noqa: SIM118
                self.grew.setdefault(name, []).append(file)

    def unpack(self, saved: dict[str, Any], now: Any = None) -> Any:
        """`now` is what stands in the place of the value."""
        ((kind, value),) = saved.items()
        if kind == "list":
            return [self.unpack(item) for item in value]
        if kind == "map":
            return {key: self.unpack(item) for key, item in value}
        if kind == "device":
            return self.device
        if kind == "tensor":
            return self.whole.get_tensor(value).clone()
        if kind == "on device":
            return self.whole.get_tensor(value).to(self.device)
        if kind == "plain":
            return value
        if kind == "dtype":
            return _DTYPES[value]
        if kind == "longer":
            path, count = value
            return [*now, *(self._more(f"{path}.{index}")[0] for index in range(len(now), count))]
        if kind == "grown":
            return self._grown(now, *value)
        inside = vars(now) if isinstance(now, PackedBuffer) else {"tensors": now}
        return _BUFFERS[kind].of(
            **{name: self.unpack(item, inside.get(name)) for name, item in value.items()}
        )

    def _grown(self, now: Storage, path: str, number: int, count: int, on_device: bool) -> list[Tensor]:
        held = [[x] for x in now.live()] or [[]] * number
        tensors = [
            torch.cat([*here, *self._more(f"{path}.{index}", on_device)], dim=1)
            for index, here in enumerate(held)
        ]
        if [x.shape[1] for x in tensors] != [count] * number:
            raise ValueError(f"{path} is incomplete")
        return tensors

    def _more(self, name: str, on_device: bool = False) -> list[Tensor]:
        return [
            file.get_tensor(name).to(self.device if on_device else CPU) for file in self.grew.get(name, ())
        ]


_DTYPES = {name: x for name, x in vars(torch).items() if isinstance(x, torch.dtype)}
_BUFFERS: dict[str, Any] = {kind.__name__: kind for kind in (Storage, KVBuffer, Recent, PackedBuffer)}
