"""GGUF weights as the native library takes them: 16 rows interleaved, numbers as they are in the file.

The layout is that of csrc/native.h. It is the same for every CPU, so a ready form holds it once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from gguf import GGMLQuantizationType as Type

TILE, RECORD = 16, 32
"""Rows of a tile, columns of a record."""


@dataclass(frozen=True)
class Codes:
    """Weights [rows, cols] as numbers: scale x code + minimum, with a scale for each `group` columns.

    codes uint8 [rows, cols] below 2 ** bits; scales float16 [rows, cols / group]; `minima` alike, or None
    where every minimum is -offset x scale.
    """

    bits: int
    group: int
    codes: np.ndarray
    scales: np.ndarray
    minima: np.ndarray | None
    offset: float

    def take(self, order: np.ndarray) -> Codes:
        """The same weights with rows in another order."""
        minima = None if self.minima is None else self.minima[order]
        return Codes(self.bits, self.group, self.codes[order], self.scales[order], minima, self.offset)


@dataclass(frozen=True)
class Form:
    """What a product needs to know of its tiles; `offset` -1: minima are stored."""

    rows: int
    cols: int
    bits: int
    group: int
    offset: float

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the tiles in bytes. Raises KeyError where there are none of this form."""
        numbers = {16: 2, 32: 1}[self.group] * (2 if self.offset < 0 else 1)
        record = {4: 256, 5: 320, 8: 512}[self.bits] + numbers * TILE * 2
        return -(-self.rows // TILE), -(-self.cols // RECORD), record

    @property
    def rest(self) -> tuple[int, int, int]:
        """The shape of what `split` left of these weights."""
        return self.rows, self.cols // RECORD, RECORD // 2 + RECORD // self.group * 2


def served(kinds: Sequence[Type]) -> bool:
    """Whether weights of all these types have tiles."""
    return all(kind in _READ for kind in kinds)


def decode(rows: np.ndarray, kind: Type) -> Codes:
    """Stored rows of a tensor, uint8 [rows, bytes], as codes. `kind` is one that `served` knows."""
    return _READ[kind](rows)


def pack(parts: Sequence[Codes]) -> tuple[Form, np.ndarray]:
    """The rows of `parts` below one another, of one type, as tiles: uint8 [tiles, records, bytes]."""
    first = parts[0]
    codes = np.concatenate([part.codes for part in parts])
    rows, cols = codes.shape
    form = Form(rows, cols, first.bits, first.group, -1 if first.minima is not None else first.offset)
    fields = [_interleaved(codes, first.bits), _by_row(np.concatenate([p.scales for p in parts]), form)]
    if first.minima is not None:
        fields.append(_by_row(np.concatenate([p.minima for p in parts if p.minima is not None]), form))
    return form, np.ascontiguousarray(np.concatenate(fields, axis=-1))


def split(codes: Codes) -> tuple[Codes, np.ndarray]:
    """The upper four bits of eight-bit codes without minima, and the rest, uint8 as `Form.rest` has it.

    A weight is what the upper bits make of it, wrong by half their step at most, + scale x (rest - 8): for
    most rows of the last product the former will do (csrc/native.h, LongchatHead).
    """
    bits = (int(codes.offset) * 2).bit_length() - 5
    upper = Codes(4, codes.group, codes.codes >> bits, codes.scales * np.float16(2**bits), None, 7.5)
    rest = (codes.codes & (1 << bits) - 1) + np.uint8(8 - (1 << bits >> 1))
    halves = rest.reshape(len(rest), -1, 2, RECORD // 2)
    scales = codes.scales.reshape(len(rest), -1, RECORD // codes.group)
    scales = np.ascontiguousarray(scales).view(np.uint8)
    return upper, np.concatenate([halves[:, :, 0] | halves[:, :, 1] << 4, scales], axis=-1)


def _interleaved(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes [rows, cols] -> uint8 [tiles, records, bytes]: four columns of every row in turn."""
    rows, cols = codes.shape
    codes = np.pad(codes, ((0, -rows % TILE), (0, -cols % RECORD)))
    quads = codes.reshape(len(codes) // TILE, TILE, -1, 8, 4).transpose(0, 2, 3, 1, 4)
    shape = (*quads.shape[:2], -1)
    if bits == 8:
        return quads.reshape(shape)
    low = quads & 15
    pairs = (low[:, :, :4] | low[:, :, 4:] << 4).reshape(shape)
    if bits == 4:
        return pairs
    fifth = np.packbits((quads >> 4).reshape(*quads.shape[:3], TILE * 4), axis=-1, bitorder="little")
    return np.concatenate([pairs, fifth.reshape(shape)], axis=-1)


def _by_row(scales: np.ndarray, form: Form) -> np.ndarray:
    """float16 [rows, groups] -> uint8 [tiles, records, bytes]: the 16 rows of a group in turn."""
    groups = RECORD // form.group
    missing = -(-form.cols // RECORD) * groups - scales.shape[1]
    scales = np.pad(scales, ((0, -form.rows % TILE), (0, missing)))
    turned = scales.reshape(len(scales) // TILE, TILE, -1, groups).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(turned).view(np.uint8).reshape(*turned.shape[:2], -1)


def _halves(blocks: np.ndarray, at: int) -> np.ndarray:
    """The float16 at byte `at` of every block."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)[..., 0]


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """Blocks of n bytes -> 2 n codes: first the low halves."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _flat(codes: np.ndarray) -> np.ndarray:
    return codes.reshape(len(codes), -1)


def _q4(size: int) -> Callable[[np.ndarray], Codes]:
    def read(rows: np.ndarray) -> Codes:
        blocks = rows.reshape(len(rows), -1, size)
        minima = _halves(blocks, 2) if size == 20 else None
        return Codes(4, 32, _flat(_nibbles(blocks[..., -16:])), _halves(blocks, 0), minima, 8)

    return read


def _q5(size: int) -> Callable[[np.ndarray], Codes]:
    def read(rows: np.ndarray) -> Codes:
        blocks = rows.reshape(len(rows), -1, size)
        fifth = np.unpackbits(blocks[..., -20:-16], axis=-1, bitorder="little")
        codes = _nibbles(blocks[..., -16:]) | fifth << 4
        minima = _halves(blocks, 2) if size == 24 else None
        return Codes(5, 32, _flat(codes), _halves(blocks, 0), minima, 16)

    return read


def _q8_0(rows: np.ndarray) -> Codes:
    blocks = rows.reshape(len(rows), -1, 34)
    return Codes(8, 32, _flat(blocks[..., 2:] ^ 128), _halves(blocks, 0), None, 128)


def _q6_k(rows: np.ndarray) -> Codes:
    blocks = rows.reshape(len(rows), -1, 210)
    low = blocks[..., :128].reshape(*blocks.shape[:2], 2, 64)
    high = blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 32)
    quarters = np.stack([high >> shift & 3 for shift in (0, 2, 4, 6)], axis=-2)
    codes = _nibbles(low) | quarters.reshape(*blocks.shape[:2], 2, 128) << 4
    scales = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8)
    found = _halves(blocks, 208)[..., None].astype(np.float32) * scales
    return Codes(8, 16, _flat(codes), _flat(found.astype(np.float16)), None, 32)


def _k_quants(size: int) -> Callable[[np.ndarray], Codes]:
    def read(rows: np.ndarray) -> Codes:
        """Q4_K and Q5_K: 8 groups of 32 whose scales and minima are 6-bit multiples of two numbers."""
        blocks = rows.reshape(len(rows), -1, size)
        packed = blocks[..., 4:16]
        a, b, c = packed[..., :4], packed[..., 4:8], packed[..., 8:]
        scale = np.concatenate([a & 63, c & 15 | a >> 6 << 4], axis=-1)
        least = np.concatenate([b & 63, c >> 4 | b >> 6 << 4], axis=-1)
        codes = _nibbles(blocks[..., -128:].reshape(*blocks.shape[:2], 4, 32))
        codes = codes.reshape(*blocks.shape[:2], 8, 32)
        if size == 176:
            bits = np.stack([blocks[..., 16:48] >> shift & 1 for shift in range(8)], axis=-2)
            codes = codes | bits << 4
        scales = _halves(blocks, 0)[..., None].astype(np.float32) * scale
        minima = _halves(blocks, 2)[..., None].astype(np.float32) * -least.astype(np.float32)
        kind = 4 if size == 144 else 5
        return Codes(
            kind, 32, _flat(codes), _flat(scales.astype(np.float16)), _flat(minima.astype(np.float16)), 0
        )

    return read


_READ: dict[Type, Callable[[np.ndarray], Codes]] = {
    Type.Q4_0: _q4(18),
    Type.Q4_1: _q4(20),
    Type.Q5_0: _q5(22),
    Type.Q5_1: _q5(24),
    Type.Q8_0: _q8_0,
    Type.Q4_K: _k_quants(144),
    Type.Q5_K: _k_quants(176),
    Type.Q6_K: _q6_k,
}
