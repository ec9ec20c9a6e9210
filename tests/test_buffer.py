"""Buffers: what was appended is found again, in every branch, and memory is given back."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import Tensor

from longchat_cli.attention.buffer import Buffer, KVBuffer, PackedBuffer
from longchat_cli.errors import UsageError
from longchat_cli.kernels.packed import RUN, Packed

pytestmark = pytest.mark.usefixtures("one_thread")
KINDS = ("int8", "fp8", "int4")


def numbered(first: int, count: int) -> Tensor:
    return torch.arange(first, first + count, dtype=torch.float32).view(1, -1, 1).expand(2, -1, 3).clone()


def content(buffer: Buffer) -> list[int]:
    return [int(x) for x in buffer.k[0, :, 0]]


def test_appends_and_drops_through_every_reallocation():
    buffer, held = KVBuffer(), []
    for size in itertools.islice(itertools.cycle([1, 300, 2, 40, 1000]), 60):
        buffer.append(numbered(buffer.end, size), -numbered(buffer.end, size))
        buffer.drop_before(buffer.end - 100)
        assert len(buffer) == min(buffer.end, 100)
        assert content(buffer) == list(range(buffer.first, buffer.end))
        assert torch.equal(buffer.v, -buffer.k)
        held.append(buffer.tensors()[0].shape[1])
    assert max(held[20:]) <= 1000 + 100 + 512, "storage is given back"


def test_dropping_more_than_it_holds_leaves_it_empty():
    buffer = KVBuffer()
    buffer.append(numbered(0, 5), numbered(0, 5))
    buffer.drop_before(99)
    assert (len(buffer), buffer.first, buffer.end) == (0, 5, 5)
    buffer.append(numbered(5, 2), numbered(5, 2))
    assert content(buffer) == [5, 6]


def test_marks_survive_each_other():
    """Branches from one mark, and marks taken in a branch: none overwrites what another one sees."""
    buffer = KVBuffer()
    buffer.append(numbered(0, 4), numbered(0, 4))
    root = buffer.copy()
    buffer.append(numbered(10, 3), numbered(10, 3))
    first = buffer.copy()
    buffer = root.copy()
    buffer.append(numbered(20, 2), numbered(20, 2))
    second = buffer.copy()
    buffer = first.copy()
    buffer.append(numbered(30, 1), numbered(30, 1))
    assert content(root) == [0, 1, 2, 3]
    assert content(first) == [0, 1, 2, 3, 10, 11, 12]
    assert content(second) == [0, 1, 2, 3, 20, 21]
    assert content(buffer) == [0, 1, 2, 3, 10, 11, 12, 30]


def test_rolling_back_copies_nothing():
    """Restoring a mark and going on writes behind it in the same storage when nobody else looks there."""
    buffer = KVBuffer()
    buffer.append(numbered(0, 4), numbered(0, 4))
    mark = buffer.copy()
    for _ in range(5):
        buffer = mark.copy()
        buffer.append(numbered(4, 3), numbered(4, 3))
        assert buffer.tensors()[0].data_ptr() == mark.tensors()[0].data_ptr()


def test_kept_in_another_dtype_and_read_as_it_came():
    buffer = KVBuffer(0, torch.bfloat16)
    k, v = torch.randn(2, 30, 4), torch.randn(2, 30, 4)
    buffer.append(k, v)
    assert buffer.tensors()[0].dtype == torch.bfloat16
    for kept in (buffer, buffer.copy(), buffer.take(torch.arange(30).expand(2, -1))):
        assert torch.equal(kept.k, k.bfloat16().float()) and torch.equal(kept.v, v.bfloat16().float())


# --- packed


def noise(tokens: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(2, tokens, 8, generator=generator) for _ in "kv")
    return k.to(dtype), v.to(dtype)


def filled(kind: str, k: Tensor, v: Tensor, chunk: int) -> PackedBuffer:
    buffer = PackedBuffer(kind)
    for at in range(0, k.shape[1], chunk):
        buffer.append(k[:, at : at + chunk], v[:, at : at + chunk])
    return buffer


def exact(buffer: PackedBuffer) -> int:
    """Tokens at the end that are kept as they came."""
    return sum(k.shape[1] for k, _, _ in buffer.parts() if isinstance(k, Tensor))


STEP = {"int8": 1 / 127, "fp8": 32 / 448, "int4": 2 / 15}
"""The coarsest spacing of a kind, of the largest magnitude."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("chunk", [1, 7, 64, 100, 500])
def test_packed_runs_do_not_depend_on_chunks(kind, chunk):
    """What stands before the last call's begin is packed alike however it came."""
    k, v = noise(1000)
    buffer = filled(kind, k, v, chunk)
    buffer.append(*noise(1, seed=1))
    once = PackedBuffer(kind)
    once.append(k, v)
    once.append(*noise(1, seed=1))
    for found, wanted in zip(buffer._packed(), once._packed(), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found.tensors(), wanted.tensors(), strict=True))
    assert RUN <= exact(buffer) - 1 < 2 * RUN
    assert torch.equal(buffer.k[:, -exact(buffer) : -1], k[:, -exact(buffer) + 1 :])
    assert torch.equal(buffer.v[:, -exact(buffer) : -1], v[:, -exact(buffer) + 1 :])
    assert (buffer.k[:, :-1] - k).abs().max() <= STEP[kind] / 2 * k.abs().max() * 1.01


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_is_exact_and_the_run_before_it(kind):
    k, v = noise(700)
    buffer = PackedBuffer(kind)
    begin = 0
    for size in (300, 1, 1, 64, 63, 130, 2, 139):
        at = slice(begin, begin + size)
        buffer.append(k[:, at], v[:, at])
        assert exact(buffer) >= min(size + RUN, buffer.end)
        begin += size
    assert content_close(buffer, k, v, kind)


def content_close(buffer: Buffer, k: Tensor, v: Tensor, kind: str) -> bool:
    """Whether a buffer holds k, v from its `first` on, as far as its precision goes."""
    at = slice(buffer.first, buffer.end)
    pairs = ((buffer.k, k), (buffer.v, v))
    return all(bool(((a - b[:, at]).abs() <= STEP[kind] * 0.51 * b.abs().max()).all()) for a, b in pairs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", [0, 37])
def test_packed_appends_drops_and_branches(kind, first):
    """Any sequence of appends, drops and branches against plain slices; marks see what they saw."""
    rng = random.Random(first)
    k, v = noise(6000, seed=first)
    buffer = PackedBuffer(kind, first)
    marks: list[tuple[PackedBuffer, int, int, Tensor]] = []
    for step in range(120):
        size = rng.choice([1, 1, 3, 64, 65, 200])
        buffer.append(k[:, buffer.end : buffer.end + size], v[:, buffer.end : buffer.end + size])
        if rng.random() < 0.4:
            index = buffer.end - rng.randrange(-2, 500)
            wanted = max(buffer.first, min(buffer.end, index))
            buffer.drop_before(index)
            assert buffer.first == wanted
        if not len(buffer):
            continue
        assert content_close(buffer, k, v, kind), step
        assert buffer.parts()[0][2] > buffer.first - RUN, "whole runs are freed"
        if rng.random() < 0.2:
            marks.append((buffer.copy(), buffer.first, buffer.end, buffer.k.clone()))
        if marks and rng.random() < 0.2:
            buffer = rng.choice(marks)[0].copy()
        if buffer.end > 5700:
            break
    for mark, low, high, keys in marks:
        assert (mark.first, mark.end) == (low, high)
        assert torch.equal(mark.k, keys)


@pytest.mark.parametrize("kind", KINDS)
def test_branches_of_a_packed_buffer_stay_apart(kind):
    k, v = noise(400)
    root = filled(kind, k, v, 50)
    first, second = root.copy(), root.copy()
    a, b = noise(300, seed=1), noise(300, seed=2)
    for at in range(0, 300, 30):  # in turns, each packing runs of its own behind the shared ones
        first.append(*(x[:, at : at + 30] for x in a))
        second.append(*(x[:, at : at + 30] for x in b))
    for branch, tail in ((first, a), (second, b)):
        joined = [torch.cat(pair, dim=1) for pair in zip((k, v), tail, strict=True)]
        assert content_close(branch, *joined, kind)
    assert content_close(root, k, v, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_window_gives_its_memory_back(kind):
    buffer, held = PackedBuffer(kind), []
    k, v = noise(64)
    for _ in range(200):
        buffer.append(k, v)
        buffer.drop_before(buffer.end - 1000)
        held.append(sum(x.untyped_storage().nbytes() for x in buffer.tensors()))
    assert held[-1] == max(held[100:]) < 0.6 * 2 * 2 * 1000 * 8 * 4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dropped", [0, 100])
def test_gather_reads_what_the_buffer_holds(kind, dropped):
    buffer = filled(kind, *noise(500), 30)
    buffer.drop_before(dropped)
    generator = torch.Generator().manual_seed(0)
    index = torch.stack([torch.randperm(len(buffer), generator=generator)[:170] for _ in range(2)])
    gathered = buffer.gather(index)
    assert (gathered.end, len(gathered)) == (buffer.end, 170)
    for found, held in ((gathered.k, buffer.k), (gathered.v, buffer.v)):
        wanted = torch.stack([held[head, index[head]] for head in range(2)])
        assert torch.allclose(found, wanted, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_taking_over_and_over_does_not_wear_entries_out(kind, dtype):
    """As H2O and TOVA do: at each step one entry comes and each head drops one; 400 steps round once."""
    k, v = noise(700, dtype=dtype)
    buffer: Buffer = filled(kind, k[:, :300], v[:, :300], 300)
    kept = [list(range(300)), list(range(300))]
    rng = random.Random(0)
    for t in range(300, 700):
        dropped = [rng.randrange(300 - RUN) for _ in kept]
        index = torch.tensor([[i for i in range(300) if i != out] for out in dropped])
        for entries, out in zip(kept, dropped, strict=True):
            entries[out : out + 1] = []
            entries.append(t)
        buffer = buffer.take(index)
        buffer.append(k[:, t : t + 1], v[:, t : t + 1])
    for found, came in ((buffer.k, k), (buffer.v, v)):
        wanted = torch.stack([came[head, kept[head]] for head in range(2)]).float()
        # A grid that grows rounds its entries once more.
        assert (found.float() - wanted).abs().max() <= STEP[kind] * 1.1 * wanted.abs().max()
    held = sum(x.untyped_storage().nbytes() for x in buffer.tensors())
    assert held < (0.75 if kind != "int4" else 0.65) * 2 * 2 * 300 * 8 * dtype.itemsize + 4 * 2 * 2 * 64 * 8


def test_four_bits_need_an_even_width():
    with pytest.raises(UsageError, match="odd"):
        PackedBuffer("int4").append(torch.zeros(2, 1, 7), torch.zeros(2, 1, 7))
    PackedBuffer("int8").append(torch.zeros(2, 1, 7), torch.zeros(2, 1, 7))


def test_packed_parts_are_views():
    """Reading what is packed copies nothing before a kernel asks for it."""
    buffer = filled("int4", *noise(500), 100)
    (k, v, first), _ = buffer.parts()
    assert isinstance(k, Packed) and isinstance(v, Packed) and first == 0
    held = {x.untyped_storage().data_ptr() for x in buffer.tensors()}
    assert {x.untyped_storage().data_ptr() for x in (*k.tensors(), *v.tensors())} <= held
