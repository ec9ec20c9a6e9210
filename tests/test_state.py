"""States on disk: what was saved comes back, nothing else is accepted, nothing is half written."""

from __future__ import annotations

import errno
import json
import random
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from longchat_cli import state
from longchat_cli.attention import METHODS, method_class
from longchat_cli.attention.layer import Cache
from longchat_cli.attention.rope import Rope, default_frequencies
from longchat_cli.errors import BadInput, LongchatError, MissingInput, StorageError
from longchat_cli.pages import write_sealed

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS = {
    "window": {"window": 300},
    "sink": {"sinks": 3, "window": 300},
    "cca": {"group": 4, "local": 50, "sinks": 6},
    "infllm": {"init": 3, "local": 60, "block": 16, "topk": 2},
    "recycled": {"fraction": 4, "stride": 5},
    "tova": {"budget": 300},
}
ABOUT = {"model": "abc", "options": {"window": 3, "tau": 0.5, "cores": "kv"}}


def new_cache(name: str, layers: int = 2, **options: Any) -> Cache:
    kind = method_class(name)
    method = kind.build({**(OPTIONS.get(name) or kind.at_budget(300, 600)), **options})
    rope = Rope(default_frequencies(16, 100.0))
    return Cache(method, [method.layer(index, layers, rope) for index in range(layers)])


def feed(cache: Cache, count: int, decoding: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(cache.seen)
    q, k, v = (torch.randn(n, count, 16, generator=generator) for n in (4, 2, 2))
    out = [layer.attend(q + index, k, v, 0.25, decoding) for index, layer in enumerate(cache.own())]
    cache.position += count
    return torch.stack(out)


def filled(name: str, **options: Any) -> Cache:
    cache = new_cache(name, **options)
    feed(cache, 400)
    for _ in range(7):
        feed(cache, 1, decoding=True)
    return cache


@pytest.mark.parametrize("name", METHODS)
def test_round_trip(name, tmp_path):
    cache, path = filled(name), tmp_path / "s"
    state.save(path, cache, ABOUT, {"logits": torch.arange(5.0)})
    again = new_cache(name)
    about, extra = state.load(path, again, ABOUT)
    assert about == ABOUT
    assert list(extra) == ["logits"]
    assert again.seen == cache.seen == 407
    assert again.visible() == cache.visible()
    for count, decoding in ((1, True), (1, True), (30, False), (1, True)):
        assert torch.equal(feed(again, count, decoding), feed(cache, count, decoding))


@pytest.mark.parametrize("name", METHODS)
def test_empty_state(name, tmp_path):
    state.save(tmp_path / "s", new_cache(name), {}, {})
    again = new_cache(name)
    state.load(tmp_path / "s", again, {})
    assert torch.equal(feed(again, 40), feed(new_cache(name), 40))


def test_saving_changes_nothing(tmp_path):
    saved, plain = filled("sink"), filled("sink")
    state.save(tmp_path / "s", saved, {}, {})
    assert torch.equal(feed(saved, 9), feed(plain, 9))


def test_bounded_states_are_small_files(tmp_path):
    cache = new_cache("sink")
    for _ in range(30):
        feed(cache, 200)
    state.save(tmp_path / "s", cache, {}, {})
    live = 2 * 2 * 2 * 16 * 4 * (3 + 300 + 200)
    assert (tmp_path / "s").stat().st_size <= live + 4096, "unused room is not written"


def test_private_and_atomic(tmp_path, monkeypatch):
    path, cache = tmp_path / "s", filled("full")
    state.save(path, cache, {"turn": 1}, {})
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    before = path.read_bytes()

    def full_disk(tensors, name, metadata):
        Path(name).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(state, "save_file", full_disk)
    with pytest.raises(StorageError, match="No space left"):
        state.save(path, cache, {"turn": 2}, {})
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_interrupted_saving_leaves_nothing(tmp_path, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(state, "save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        state.save(tmp_path / "s", filled("full"), {}, {})
    assert not list(tmp_path.iterdir())


def test_no_such_directory(tmp_path):
    with pytest.raises(LongchatError):
        state.save(tmp_path / "no" / "s", filled("full"), {}, {})
    with pytest.raises(MissingInput):
        state.load(tmp_path / "s", new_cache("full"), {})
    with pytest.raises(LongchatError):
        state.load(tmp_path, new_cache("full"), {})


@pytest.mark.parametrize("change", [{"model": "xyz"}, {"options": {"window": 4}}, {"more": 1}])
def test_another_model_or_method_is_refused(tmp_path, change):
    state.save(tmp_path / "s", filled("full"), ABOUT, {})
    with pytest.raises(BadInput):
        state.load(tmp_path / "s", new_cache("full"), {**ABOUT, **change})


def test_layers_must_fit(tmp_path):
    state.save(tmp_path / "s", filled("full"), {}, {})
    for other in (new_cache("full", 3), new_cache("sink"), new_cache("recycled")):
        with pytest.raises(BadInput):
            state.load(tmp_path / "s", other, {})


def test_truncated_files(tmp_path):
    path = tmp_path / "s"
    state.save(path, filled("sink"), ABOUT, {})
    data = path.read_bytes()
    for length in (0, 1, 7, 8, 9, 100, 1000, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(BadInput, match="damaged"):
            state.load(path, new_cache("sink"), ABOUT)
    path.write_bytes(b"\x80\x04" + data)  # what a pickle begins with
    with pytest.raises(BadInput):
        state.load(path, new_cache("sink"), ABOUT)


def test_any_flipped_byte_is_seen(tmp_path):
    path = tmp_path / "s"
    state.save(path, filled("sink"), ABOUT, {})
    data, rng = path.read_bytes(), random.Random(0)
    for at in [*range(0, 600, 3), *rng.sample(range(len(data)), 40), len(data) - 1]:
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :])
        with pytest.raises(BadInput, match="damaged"):
            state.load(path, new_cache("sink"), ABOUT)


@pytest.mark.parametrize(("name", "kind"), [("infllm", "auto"), ("window", "int4"), ("tova", "int8")])
def test_damaged_headers(name, kind, tmp_path):
    """Any JSON in place of any part of the header is an error of ours, never a traceback."""
    path = tmp_path / "s"
    state.save(path, filled(name, kv_dtype=kind), ABOUT, {})
    with safe_open(path, framework="pt") as handle:
        tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
        header = handle.metadata()["longchat"]
    rng = random.Random(0)
    junk = [None, 3, -1, 1e99, "x", [], {}, [1, 2], {"tensor": "no"}, {"buffer": [0, 5]}, {"list": 3}, True]
    refused = 0
    for _ in range(80):
        value = json.loads(header)
        parent, key = rng.choice(list(places(value)))
        parent[key] = rng.choice(junk)
        write_sealed(path, state.writer(tensors), {"longchat": json.dumps(value)})
        try:
            state.load(path, new_cache(name, kv_dtype=kind), ABOUT)
        except LongchatError:
            refused += 1
    assert refused > 40
    for text in ("", "[]", "3", "null", "{"):
        write_sealed(path, state.writer(tensors), {"longchat": text})
        with pytest.raises(BadInput):
            state.load(path, new_cache(name, kv_dtype=kind), {})
    save_file(tensors, path)
    with pytest.raises(BadInput):
        state.load(path, new_cache(name, kv_dtype=kind), {})


def places(value):
    """Every (container, key) of a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        yield value, key
        if isinstance(item, (dict, list)):
            yield from places(item)


def test_another_format_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(state, "FORMAT", 99)
    state.save(tmp_path / "s", filled("full"), {}, {})
    monkeypatch.undo()
    with pytest.raises(BadInput, match="format 99"):
        state.load(tmp_path / "s", new_cache("full"), {})
