"""Prefix caching on disk: what is taken equals what reading gives, bit for bit, under every method."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import VOCABULARY

from longchat_cli import local, prefix
from longchat_cli.attention import METHODS, method_class
from longchat_cli.attention.buffer import Storage
from longchat_cli.engine import EngineInfo
from longchat_cli.local import LocalEngine
from longchat_cli.models.lean import LeanDecoder
from longchat_cli.pages import Store
from longchat_cli.tokens import Tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")

PAGE, CHUNK = 32, 16
OPTIONS: dict[str, dict[str, Any]] = {
    "window": {"window": 20},
    "sink": {"sinks": 3, "window": 20},
    "sink++": {"sinks": 3, "window": 20},
    "lm-infinite": {"sinks": 3, "window": 20},
    "cca": {"group": 4, "local": 20, "sinks": 6},
    "infllm": {"init": 3, "local": 24, "block": 8, "topk": 2},
    "recycled": {"fraction": 4, "stride": 5},
    "tova": {"budget": 40},
    "h2o": {"budget": 40},
}
QUESTION = [7, 8, 9, 10, 11]


@pytest.fixture(scope="module")
def decoder(tiny_model: Callable[..., Path]) -> LeanDecoder:
    return LeanDecoder.from_dir(tiny_model(), dtype=torch.float32)


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Callable[..., Path]) -> Tokenizer:
    return Tokenizer.from_dir(tiny_model())


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "PAGE", PAGE)


Make = Callable[..., LocalEngine]


@pytest.fixture
def make(decoder: LeanDecoder, tokenizer: Tokenizer) -> Make:
    def engine(method: str = "full", fingerprint: str = "f" * 64, **options: Any) -> LocalEngine:
        kind = method_class(method)
        built = kind.build({**(OPTIONS.get(method) or kind.at_budget(40, 200)), **options})
        info = EngineInfo("tiny", 512, method, "cpu", "float32", fingerprint)
        return LocalEngine(decoder, tokenizer, built, info, chunk=CHUNK)

    return engine


def text(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(5, VOCABULARY - 100) for _ in range(length)]


def answer(engine: LocalEngine) -> torch.Tensor:
    """Logits of a question behind what was read, and of a few decoded tokens."""
    engine.prefill(QUESTION)
    logits = [engine.logits]
    for _ in range(4):
        engine.feed([int(engine.logits.argmax())], decoding=True)
        logits.append(engine.logits)
    return torch.stack(logits)


def through(make: Make, root: Path, ids: list[int], method: str = "full", **options: Any) -> int:
    """Read `ids` through the pages in `root` and compare with plain reading; tokens that were taken."""
    engine, fresh = make(method, **options), make(method, **options)
    done, reused = engine.read(ids, Store(root))
    assert done == len(ids) == len(engine.ids)
    fresh.prefill(ids)
    assert engine.cache.seen == fresh.cache.seen and engine.cache.visible() == fresh.cache.visible()
    assert torch.equal(answer(engine), answer(fresh))
    return reused


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "pages"


EVERY = [(name, "auto") for name in METHODS] + [(name, "int8") for name in ("full", "cca", "infllm", "sink")]
EVERY += [("full", kind) for kind in ("bf16", "fp8", "int4")]


@pytest.mark.parametrize(("method", "kv_dtype"), EVERY)
def test_every_method(make: Make, root: Path, method: str, kv_dtype: str) -> None:
    ids = text(5 * PAGE + 13)
    assert through(make, root, ids, method, kv_dtype=kv_dtype) == 0
    assert through(make, root, ids, method, kv_dtype=kv_dtype) == len(ids)
    longer = ids + text(PAGE + 5, 1)
    whole = make(method).method.whole
    assert through(make, root, longer, method, kv_dtype=kv_dtype) == (0 if whole else 5 * PAGE)
    assert through(make, root, longer, method, kv_dtype=kv_dtype) == len(longer)


@pytest.mark.parametrize("method", ["full", "sink", "cca", "infllm"])
def test_an_edit_reuses_what_precedes_it(make: Make, root: Path, method: str) -> None:
    ids = text(6 * PAGE)
    through(make, root, ids, method)
    ids[3 * PAGE + 4] += 1
    expected = 3 * PAGE if method == "full" else 0  # heavy tips are thinned out
    assert through(make, root, ids, method) == expected
    assert through(make, root, ids, method) == len(ids)


def test_what_decides_a_state_is_in_its_name(make: Make, root: Path) -> None:
    ids = text(2 * PAGE)
    through(make, root, ids, "sink")
    for options in ({"window": 21}, {"sinks": 4}, {"kv_dtype": "bf16"}, {"fingerprint": "0" * 64}):
        assert through(make, root, ids, "sink", **options) == 0
    assert through(make, root, ids, "full") == 0
    assert through(make, root, ids, "sink") == len(ids)


def test_what_grows_is_kept_once_and_a_bounded_state_stays_small(make: Make, root: Path) -> None:
    ids = text(35 * PAGE)
    for method in ("full", "sink", "cca", "infllm"):
        place = root / method
        make(method).read(ids, Store(place))
        held = make(method)
        held.prefill(ids)
        buffers = [b for layer in held.cache.own() for b in vars(layer).values() if isinstance(b, Storage)]
        live = sum(x.nbytes for buffer in buffers for x in buffer.live())
        size = sum(entry.bytes for entry in Store(place).entries())
        headers = 6_000 * len(Store(place).entries())
        tips = live * 5 if method in ("sink", "cca", "infllm") else 0
        assert size < live + tips + headers, method
    names = [path.name for path in (root / "sink").iterdir()]
    assert len([name for name in names if "-tip" in name]) == 5, "the 16th, the 32nd and the last three"


@pytest.mark.parametrize("name", ["gemma3", "lfm2", "qwen3.5", "gpt-oss"])
def test_layers_that_the_model_keeps_itself(tokenizer: Tokenizer, root: Path, name: str) -> None:
    """Sliding, convolutional and linear ones beside full attention."""
    import tiny

    from longchat_cli.attention.hf import HFDecoder

    decoder = HFDecoder(tiny.fresh(name))
    info = EngineInfo("tiny", 512, "full", "cpu", "float32", name)
    ids = tiny.tokens(3 * PAGE + 9).tolist()
    answers = []
    for expected in (0, len(ids), None):
        engine = LocalEngine(decoder, tokenizer, method_class("full").build({}), info, chunk=CHUNK)
        if expected is None:
            engine.prefill(ids)
        else:
            assert engine.read(ids, Store(root)) == (len(ids), expected)
        answers.append(answer(engine))
    assert torch.equal(answers[0], answers[2]) and torch.equal(answers[1], answers[2])


def damage(path: Path) -> None:
    with path.open("r+b") as file:
        at = random.randrange(path.stat().st_size)
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << random.randrange(8)]))


def test_damaged_pages_of_the_middle_alone_are_made_anew(make: Make, root: Path) -> None:
    ids = text(8 * PAGE + 3)
    engine = make()
    engine.read(ids, Store(root))
    names = names_of(make, root, ids)
    shutil.copytree(root, root.parent / "first", copy_function=os.link)  # so that no inode is given again
    before = {path.name: path.stat().st_ino for path in root.iterdir()}
    for number in (3, 4):
        damage(root / f"{names[number]}.safetensors")
    assert through(make, root, ids) == len(ids) - 2 * PAGE
    after = {path.name: path.stat().st_ino for path in root.iterdir()}
    assert before.keys() == after.keys()
    changed = {name for name in after if after[name] != before[name] and "-tip" not in name}
    assert changed == {f"{names[number]}.safetensors" for number in (3, 4)}
    assert through(make, root, ids) == len(ids)


def names_of(make: Make, root: Path, ids: list[int]) -> list[str]:
    engine = make()
    identity = {**engine._identity(), "chunk": CHUNK, "device": "cpu"}
    return prefix.Prefix(Store(root), identity, ids, PAGE, engine.decoder.device)._names


@pytest.mark.parametrize("method", ["full", "cca", "infllm", "sink"])
def test_any_damage_anywhere(make: Make, root: Path, method: str) -> None:
    random.seed(method)
    ids = text(6 * PAGE + 5)
    through(make, root, ids, method)
    shutil.copytree(root, root.parent / "whole")
    for _ in range(4):
        shutil.rmtree(root)
        shutil.copytree(root.parent / "whole", root)
        for path in random.sample(sorted(root.iterdir()), random.choice([1, 2, 3])):
            if random.random() < 0.5:
                damage(path)
            else:
                path.unlink()
        through(make, root, ids, method)
        assert through(make, root, ids, method) == len(ids)


def test_cancelled_reading_goes_on(make: Make, root: Path) -> None:
    ids = text(7 * PAGE)
    for method in ("full", "sink", "infllm"):
        calls = iter([False] * 11 + [True] * 9)
        done, reused = make(method).read(ids, Store(root), None, lambda: next(calls))  # noqa: B023
        assert 3 * PAGE <= done < 5 * PAGE and reused == 0
        assert through(make, root, ids, method) == done // PAGE * PAGE


def test_progress_counts_what_is_taken_too(make: Make, root: Path) -> None:
    ids = text(3 * PAGE + 2)
    for _ in range(2):
        steps: list[tuple[int, int]] = []
        make().read(ids, Store(root), lambda *step: steps.append(step))  # noqa: B023
        assert steps[-1] == (len(ids), len(ids)) and steps == sorted(steps)


def test_a_budget_too_small_keeps_the_beginning(make: Make, root: Path) -> None:
    ids = text(8 * PAGE)
    make().read(ids, Store(root))
    size = sum(entry.bytes for entry in Store(root).entries())
    shutil.rmtree(root)
    engine = make()
    assert engine.read(ids, Store(root, budget=size // 2)) == (len(ids), 0)
    assert 2 * PAGE <= through(make, root, ids) < 6 * PAGE


READER = """
    import sys
    from pathlib import Path
    import torch
    torch.set_num_threads(1)
    from longchat_cli import local
    from longchat_cli.attention import method_class
    from longchat_cli.engine import EngineInfo
    from longchat_cli.models.lean import LeanDecoder
    from longchat_cli.pages import Store
    from longchat_cli.tokens import Tokenizer
    local.PAGE = {page}
    model, root, method = Path({model!r}), Path({root!r}), {method!r}
    decoder = LeanDecoder.from_dir(model, dtype=torch.float32)
    info = EngineInfo("tiny", 512, method, "cpu", "float32", "f" * 64)
    built = method_class(method).build({options!r})
    engine = local.LocalEngine(decoder, Tokenizer.from_dir(model), built, info, chunk={chunk})
    print("go", flush=True)
    print(engine.read({ids!r}, Store(root))[1], flush=True)
"""


def reader(model: Path, root: Path, ids: list[int], method: str) -> subprocess.Popen[str]:
    code = READER.format(
        page=PAGE,
        chunk=CHUNK,
        model=str(model),
        root=str(root),
        method=method,
        options=OPTIONS.get(method, {}),
        ids=ids,
    )
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def kill_while_reading(make: Make, model: Path, root: Path, method: str, times: int) -> None:
    ids = text(60 * PAGE + 7)
    for _ in range(times):
        process = reader(model, root, ids, method)
        assert process.stdout and process.stdout.readline() == "go\n"
        time.sleep(random.random() * 0.3)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not Store(root).verify()[1]
        part = ids[: random.randrange(1, 10) * PAGE]
        through(make, root, part, method)
    through(make, root, ids, method)
    assert through(make, root, ids, method) == len(ids)


@pytest.mark.parametrize("method", ["full", "sink"])
def test_killed_while_reading(make: Make, tiny_model: Callable[..., Path], root: Path, method: str) -> None:
    kill_while_reading(make, tiny_model(), root, method, 1)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "sink", "cca", "infllm"])
def test_killed_while_reading_many_times(
    make: Make, tiny_model: Callable[..., Path], root: Path, method: str
) -> None:
    kill_while_reading(make, tiny_model(), root, method, 20)


def test_two_processes_at_once(make: Make, tiny_model: Callable[..., Path], root: Path) -> None:
    ids = text(24 * PAGE)
    both = [reader(tiny_model(), root, ids, "full") for _ in range(2)]
    for process in both:
        process.communicate(timeout=120)
        assert process.returncode == 0
    assert not Store(root).verify()[1]
    assert through(make, root, ids) == len(ids)
    assert not list(root.glob(".tmp-*"))


def talk(engine: LocalEngine, turns: int, seed: int = 5) -> list[list[int]]:
    """Read and decode by turns, each kept; the ids of each."""
    said = []
    for number in range(turns):
        begin = len(engine.ids)
        engine.prefill(text(9 + number % 5, seed + number))
        for _ in range(6 + number % 3):
            engine.feed([int(engine.logits.argmax())], decoding=True)
        engine.keep()
        said.append(engine.ids[begin:].tolist())
    return said


@pytest.mark.parametrize(("method", "kv_dtype"), EVERY)
def test_a_conversation_goes_on_as_if_it_had_not_ended(
    make: Make, root: Path, method: str, kv_dtype: str
) -> None:
    """Bit for bit, since the very state is kept: nothing is read, whatever was decoded."""
    first, opening = make(method, kv_dtype=kv_dtype), text(PAGE + 9)
    first.read(opening, Store(root))
    turns = talk(first, 6)
    total = len(opening) + sum(map(len, turns))
    again = make(method, kv_dtype=kv_dtype)
    assert again.read(opening, Store(root), turns=turns) == (total, total)
    assert again.ids == first.ids
    assert torch.equal(answer(again), answer(first))


@pytest.mark.parametrize("method", ["full", "sink", "cca"])
def test_a_conversation_is_kept_behind_what_was_taken_back(make: Make, root: Path, method: str) -> None:
    engine, opening = make(method), text(40)
    engine.read(opening, Store(root))
    turns = talk(engine, 3)
    mark = engine.snapshot()
    talk(engine, 2, seed=50)
    engine.restore(mark)
    turns += talk(engine, 2, seed=70)
    again = make(method)
    total = len(opening) + sum(map(len, turns))
    assert again.read(opening, Store(root), turns=turns) == (total, total)
    assert torch.equal(answer(again), answer(engine))
    turns[-1] = turns[-1][:-3]  # as after a crash: the newest words were not kept
    done, reused = make(method).read(opening, Store(root), turns=turns)
    assert (done, reused) == (total - 3, total - 3 - len(turns[-1]))


@pytest.mark.parametrize("method", ["full", "sink", "cca"])
def test_lost_pages_of_a_conversation_are_read_anew(make: Make, root: Path, method: str) -> None:
    random.seed(method)
    first, opening = make(method), text(70)
    first.read(opening, Store(root))
    turns = talk(first, 8)
    ids = [*opening, *(id for turn in turns for id in turn)]
    expected = answer(first)
    for path in random.sample(sorted(root.iterdir()), 6):
        path.unlink()
    again = make(method)
    done, reused = again.read(opening, Store(root), turns=turns)
    assert done == len(ids) > reused
    assert (answer(again) - expected).abs().max() < 1e-3
    again = make(method)
    assert again.read(opening, Store(root), turns=turns) == (len(ids), len(ids))
    assert (answer(again) - expected).abs().max() < 1e-3


def test_a_copy_leaves_the_states_of_the_first_conversation(make: Make, root: Path) -> None:
    first, opening = make("sink"), text(10)
    first.read(opening, Store(root))
    turns = talk(first, 4)
    copy = make("sink")
    copy.read(opening, Store(root), turns=turns)
    for number in range(5):
        copy.prefill(text(9, 90 + number))
        copy.keep(shared=len(turns))
    total = len(opening) + sum(map(len, turns))
    assert make("sink").read(opening, Store(root), turns=turns) == (total, total)


def test_a_bounded_state_needs_only_what_never_changes(make: Make, root: Path) -> None:
    engine, opening = make("sink"), text(10)
    engine.read(opening, Store(root))
    turns = talk(engine, 6)
    total = len(opening) + sum(map(len, turns))
    for path in sorted(root.iterdir(), key=lambda path: path.stat().st_mtime_ns)[2:-2]:
        path.unlink()
    assert make("sink").read(opening, Store(root), turns=turns) == (total, total)


def test_a_long_conversation_keeps_few_heavy_states(make: Make, root: Path) -> None:
    engine, opening = make("sink"), text(10)
    engine.read(opening, Store(root))
    talk(engine, 37)
    tips = [path for path in root.iterdir() if "-tip" in path.name]
    assert len(tips) == 1 + 2 + 2, "the opening, every 16th, the last two"
