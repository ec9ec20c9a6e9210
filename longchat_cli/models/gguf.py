"""Reading GGUF files: every length, count and offset is checked against the file before it is used.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from longchat_cli.errors import BadInput, MissingInput

MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_SMALLEST_ENTRY = 13  # bytes: key length, type, value of one byte
_SMALLEST_TENSOR = 32  # bytes: name length, dimensions, one dimension, type, offset


@dataclass(frozen=True)
class Tensor:
    """Where a tensor lies in the file. `shape` is torch's (rows first); `nbytes` from `begin`."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    begin: int
    nbytes: int


class Gguf:
    """An open GGUF file: `metadata` by key, `tensors` by name; weights are memory-mapped."""

    def __init__(self, path: Path) -> None:
        """Raises MissingInput (unreadable) and BadInput (not GGUF, damaged, truncated, unsupported)."""
        self.path = path
        try:
            with path.open("rb") as file:
                if file.read(4) != MAGIC:
                    raise BadInput(f"{path} is not a GGUF file", "it does not begin with GGUF")
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise MissingInput(f"{path} cannot be read", error.strerror or str(error)) from error
        try:
            self._parse(_Cursor(self._bytes, 4))
        except _Damaged as error:
            raise self.damaged(str(error)) from error

    @property
    def architecture(self) -> str:
        """`general.architecture`, e.g. 'llama'."""
        return str(self.metadata.get("general.architecture", ""))

    def get(self, key: str, default: Any = None) -> Any:
        """The metadata value `<architecture>.<key>`."""
        return self.metadata.get(f"{self.architecture}.{key}", default)

    def number(self, key: str, default: int | None = None) -> int:
        """`get` for a positive integer. Raises BadInput when it is absent or is none."""
        value = self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
            raise self.damaged(f"{self.architecture}.{key} is {str(value)[:40]}")
        return value

    def rows(self, name: str) -> np.ndarray:
        """The stored bytes of a tensor, uint8 [rows, bytes per row], memory-mapped."""
        tensor = self.tensors[name]
        data = np.frombuffer(self._bytes, np.uint8, tensor.nbytes, tensor.begin)
        return data.reshape(math.prod(tensor.shape[:-1]), -1)

    def dequantized(self, name: str) -> np.ndarray:
        """The values of a tensor, float32 in `shape`. Raises BadInput for a type without a decoder."""
        return self.values(self.rows(name), name)

    def values(self, rows: np.ndarray, name: str) -> np.ndarray:
        """Decode `rows` (all stored rows of tensor `name`, in any order) to float32 in its shape."""
        tensor = self.tensors[name]
        try:
            with np.errstate(all="ignore"):
                values = dequantize(np.array(rows), tensor.type)
                values = values.reshape(tensor.shape)
        except NotImplementedError as error:
            raise BadInput(f"{self.path} uses {tensor.type.name} weights", "no decoder for them") from error
        if not np.isfinite(values).all():
            raise self.damaged(f"tensor {name} holds values that are not numbers")
        return values

    def damaged(self, why: str) -> BadInput:
        """The error for a file whose content cannot be right."""
        return BadInput(f"{self.path} is damaged or not a usable GGUF model", why, "get the file again")

    def _parse(self, cursor: _Cursor) -> None:
        version = cursor.scalar("I")
        if version not in (2, 3):
            raise _Damaged(f"GGUF version {version} (2 and 3 can be read)")
        tensors, entries = cursor.scalar("Q"), cursor.scalar("Q")
        cursor.require(entries * _SMALLEST_ENTRY + tensors * _SMALLEST_TENSOR)
        self.metadata: dict[str, Any] = {}
        for _ in range(entries):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.scalar("I"))
        infos = [cursor.tensor() for _ in range(tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment > 1 << 20:
            raise _Damaged("general.alignment is wrong")
        start = -(-cursor.at // alignment) * alignment
        self.tensors: dict[str, Tensor] = {}
        for name, shape, kind, offset in infos:
            tensor = Tensor(name, shape, kind, start + offset, _stored_bytes(name, shape, kind))
            if name in self.tensors:
                raise _Damaged(f"two tensors are named {name[:80]}")
            if tensor.begin + tensor.nbytes > len(self._bytes):
                raise _Damaged(f"tensor {name[:80]} ends after the file: it is truncated")
            self.tensors[name] = tensor


class _Damaged(Exception):
    """The file contradicts itself; the message says how."""


class _Cursor:
    """Reads the header; nothing is allocated before its size was checked against the file."""

    def __init__(self, data: mmap.mmap, at: int) -> None:
        self.data, self.at = data, at

    def require(self, count: int) -> None:
        if self.at + count > len(self.data):
            raise _Damaged("its header ends after the file: it is truncated")

    def take(self, count: int) -> bytes:
        self.require(count)
        self.at += count
        return self.data[self.at - count : self.at]

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        return self.take(self.scalar("Q")).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array()
        return self.scalar(self.code(kind))

    def array(self) -> list[Any]:
        kind, count = self.scalar("I"), self.scalar("Q")
        if kind == _STRING:
            self.require(count * 8)
            return [self.string() for _ in range(count)]
        code = self.code(kind)
        data = self.take(count * struct.calcsize("<" + code))
        return list(struct.unpack(f"<{count}{code}", data))

    @staticmethod
    def code(kind: int) -> str:
        if kind not in _SCALARS:
            raise _Damaged(f"value type {kind}")
        return _SCALARS[kind]

    def tensor(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name, dimensions = self.string(), self.scalar("I")
        if not 1 <= dimensions <= 4:
            raise _Damaged(f"tensor {name[:80]} has {dimensions} dimensions")
        shape = tuple(self.scalar("Q") for _ in range(dimensions))[::-1]
        kind, offset = self.scalar("I"), self.scalar("Q")
        try:
            return name, shape, GGMLQuantizationType(kind), offset
        except ValueError:
            raise _Damaged(f"tensor {name[:80]} has the unknown type {kind}") from None


def _stored_bytes(name: str, shape: tuple[int, ...], kind: GGMLQuantizationType) -> int:
    block, size = GGML_QUANT_SIZES[kind]
    if 0 in shape or shape[-1] % block:
        raise _Damaged(f"tensor {name[:80]} has the shape {shape}, not whole blocks of {kind.name}")
    return math.prod(shape) // block * size
