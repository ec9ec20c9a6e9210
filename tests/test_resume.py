"""Going on with a chat: its state is taken from pages, agrees with what was said, and survives kill -9."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TEXT

from longchat_cli import local
from longchat_cli.chat import Conversation
from longchat_cli.local import LocalEngine
from longchat_cli.pages import Store
from longchat_cli.sampling import Sampling
from longchat_cli.sessions import Chat, Session, Sessions
from longchat_cli.terminal import Console
from longchat_cli.terminal_text import Sanitizer

pytestmark = pytest.mark.usefixtures("one_thread")

SAMPLING = Sampling(max_tokens=12, temperature=1.0, seed=3)
METHODS: dict[str, dict[str, Any]] = {
    "full": {},
    "sink": {"sinks": 30, "window": 60},
    "cca": {"group": 4, "local": 20, "sinks": 6},
    "h2o": {"budget": 80},
}
KILLS = 3
"""Times a chat is killed in the default run; 20 in the slow one."""
LAST = 1.0
"""Seconds that a chat may lose when it is killed."""


@pytest.fixture(scope="module")
def loaded(tiny_model: Callable[..., Path]) -> LocalEngine:
    return local.open_engine(str(tiny_model()), "full", {}, "cpu", "float32")


@pytest.fixture
def sessions(tmp_path: Path) -> Sessions:
    return Sessions(tmp_path / "sessions" / "sessions.db")


Start = Callable[..., Conversation]


@pytest.fixture
def start(loaded: LocalEngine, sessions: Sessions, tmp_path: Path) -> Start:
    """`start(method)`: a new chat; `start(method, kept)`: one that goes on. Both have begun."""

    def made(
        method: str = "sink", kept: Chat | None = None, options: Any = None, **more: Any
    ) -> Conversation:
        engine = local.with_method(loaded, method, METHODS[method] if options is None else options)
        session, store = Session(sessions, Console(quiet=True), kept), Store(tmp_path / "pages")
        system = kept.about.system if kept else "Be brief."
        conversation = Conversation(engine, system, [], session, store, kept)
        assert conversation.begin(**more)
        return conversation

    return made


def say(conversation: Conversation, *texts: str) -> None:
    for text in texts:
        for _ in conversation.send(text, SAMPLING):
            pass


def leave(conversation: Conversation) -> Chat:
    """End the chat; what is kept of it."""
    session = conversation.session
    assert session is not None and session.id is not None
    session.close()
    return session.sessions.load(session.id)


def logits(conversation: Conversation) -> torch.Tensor:
    """What the model makes of a further turn."""
    engine = conversation.engine
    assert isinstance(engine, LocalEngine)
    mark = engine.snapshot()
    engine.prefill(conversation._user_turn("and now?", ()).ids)
    found = engine.logits
    engine.restore(mark)
    assert found is not None
    return found


def ids_of(conversation: Conversation) -> list[int]:
    return [*conversation.opening, *(id for turn in conversation.turns for id in turn.ids)]


def agrees(conversation: Conversation) -> bool:
    """Whether transcript and state are of the same tokens."""
    engine = conversation.engine
    assert isinstance(engine, LocalEngine)
    return engine.ids.tolist() == ids_of(conversation) and engine.cache.seen == len(engine.ids)


def fresh(conversation: Conversation, method: str) -> torch.Tensor:
    """The same logits of an engine that reads all ids anew."""
    engine = conversation.engine
    assert isinstance(engine, LocalEngine)
    other = local.with_method(engine, method, conversation.engine.info.options)
    other.prefill(ids_of(conversation))
    other.prefill(conversation._user_turn("and now?", ()).ids)
    assert other.logits is not None
    return other.logits


@pytest.mark.parametrize("method", METHODS)
def test_nothing_is_read_again(start: Start, method: str) -> None:
    first = start(method)
    say(first, "hello", "the river ran past the old mill", "and you?", "who walked along the river?")
    expected = logits(first)
    again = start(method, leave(first))
    assert again.reused == again.coverage().seen == len(ids_of(again))
    assert agrees(again)
    assert torch.equal(logits(again), expected), "bit for bit"
    if method != "h2o":  # whose choice depends on what was read at once
        assert (fresh(again, method) - expected).abs().max() < 1e-3
    say(again, "go on")
    assert agrees(again)
    assert start(method, leave(again)).reused == again.coverage().seen


def test_what_was_said_last_is_taken_back_without_reading(start: Start) -> None:
    first = start()
    say(first, "one", "two", "three")
    first.undo()
    expected = logits(first)
    say(first, "3")
    again = start("sink", leave(first))
    steps: list[int] = []
    assert again.undo(lambda done, total: steps.append(done))
    assert again.reused == again.coverage().seen and len(steps) == 1
    assert agrees(again)
    assert torch.equal(logits(again), expected)


@pytest.mark.parametrize("method", ["full", "sink", "cca"])
def test_lost_and_damaged_pages_are_read_again(start: Start, tmp_path: Path, method: str) -> None:
    random.seed(method)
    first = start(method)
    say(first, *(f"the miller counted {number} sacks" for number in range(6)))
    expected, kept = logits(first), leave(first)
    for lost in (1, 3, 99):
        pages = sorted((tmp_path / "pages").iterdir())
        for path in random.sample(pages, min(lost, len(pages))):
            path.write_bytes(path.read_bytes()[:-9]) if lost == 3 else path.unlink()
        steps: list[tuple[int, int]] = []
        again = start(method, kept, progress=lambda *step: steps.append(step))  # noqa: B023
        assert agrees(again)
        assert steps[-1] == (again.coverage().seen,) * 2, "it is seen how far it is"
        assert (logits(again) - expected).abs().max() < 1e-3
        leave(again)
        again = start(method, kept)
        assert again.reused == again.coverage().seen, "it is there again"
        leave(again)


def test_reading_again_can_be_stopped_and_goes_on(
    start: Start, loaded: LocalEngine, sessions: Sessions, tmp_path: Path
) -> None:
    first = start("full")
    say(first, *(f"the miller counted {number} sacks" for number in range(6)))
    kept = leave(first)
    for path in (tmp_path / "pages").iterdir():
        path.unlink()
    engine = local.with_method(loaded, "full", {})
    store = Store(tmp_path / "pages")
    stopped = Conversation(engine, "Be brief.", [], Session(sessions, Console(), kept), store, kept)
    calls = iter([False] * 5 + [True] * 99)
    assert not stopped.begin(cancel=lambda: next(calls))
    assert leave(stopped).turns == kept.turns
    again = start("full", kept)
    assert 0 < again.reused < again.coverage().seen
    assert agrees(again)


def test_another_method_is_kept_as_well(start: Start, loaded: LocalEngine) -> None:
    conversation = start("sink")
    say(conversation, "hello", "the river")
    full = local.with_method(loaded, "full", {})
    assert conversation.rebuild(full)
    say(conversation, "and now?")
    kept = leave(conversation)
    assert (kept.about.method, kept.about.options["kv_dtype"]) == ("full", "auto")
    again = start("full", kept)
    assert again.reused == again.coverage().seen
    assert agrees(again)


def test_pinned_turns_stay_pinned(start: Start) -> None:
    first = start("sink")
    say(first, "the number is 42")
    assert first.pin(1)
    say(first, "the river is wide")
    kept = leave(first)
    again = start("sink", kept)
    say(again, *(f"they walked {number} miles along the river" for number in range(4)))
    for conversation in (again, start("sink", leave(again))):
        state = conversation.coverage()
        pinned = sum(len(turn.ids) for turn in conversation.turns[:2])
        assert state.visible > 90 and state.visible >= 90 + pinned - 10
        assert conversation.turns[0].pinned


def test_a_stopped_turn_leaves_nothing_to_disagree(start: Start) -> None:
    conversation = start("sink")
    say(conversation, "hello")
    calls = iter([False, True, True, True])
    list(conversation.send("word " * 900, SAMPLING, cancel=lambda: next(calls)))
    assert len(conversation.turns) == 2 and agrees(conversation)
    left = iter(range(7))
    list(conversation.send("go on", SAMPLING, cancel=lambda: next(left, None) is None))
    assert conversation.turns[-1].stop == "cancelled" and agrees(conversation)
    stream = conversation.send("and now?", SAMPLING)
    next(stream)
    stream.close()
    assert agrees(conversation)
    again = start("sink", leave(conversation))
    assert agrees(again)
    assert [turn.text for turn in again.turns] == [turn.text for turn in conversation.turns]
    say(again, "well")
    again = start("sink", leave(again))
    assert again.reused == again.coverage().seen and agrees(again)


def test_an_interrupt_inside_a_step_is_mended(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C held down cuts through everything: a token may be in the state and not in the transcript."""
    conversation = start("sink")
    say(conversation, "hello")
    engine = conversation.engine
    assert isinstance(engine, LocalEngine)
    feed = engine.feed

    def cut(ids: Any, decoding: bool) -> None:
        feed(ids, decoding)
        if decoding:
            raise KeyboardInterrupt

    monkeypatch.setattr(engine, "feed", cut)
    with pytest.raises(KeyboardInterrupt):
        say(conversation, "go on")
    monkeypatch.undo()
    assert not agrees(conversation)
    say(conversation, "again")
    assert agrees(conversation)
    assert len(conversation.turns) == 6
    again = start("sink", leave(conversation))
    assert again.reused == again.coverage().seen and agrees(again)


# kill -9 of the real program.


class Killed:
    """`longchat chat` over a pipe that never ends, killed at some moment; what it had printed, and when."""

    def __init__(self, command: list[str], lines: list[str], environment: dict[str, str]) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            env=environment,
            cwd=Path(environment["LONGCHAT_DATA_DIR"]).parent,  # not where sources without a library may be
        )
        self.printed: list[tuple[float, bytes]] = []
        self._lines = lines
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._type, self._read)]
        for thread in self._threads:
            thread.start()

    def _type(self) -> None:
        assert self.process.stdin is not None
        try:
            for line in self._lines:
                self.process.stdin.write(f"{line}\n".encode())
            self.process.stdin.flush()
        except OSError:
            pass

    def _read(self) -> None:
        assert self.process.stdout is not None
        while data := os.read(self.process.stdout.fileno(), 1 << 16):
            self.printed.append((time.monotonic(), data))

    def wait_for_words(self) -> None:
        deadline = time.monotonic() + 280
        while not self.printed:
            assert self.process.poll() is None, self.process.stderr and self.process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def kill(self) -> tuple[str, str]:
        """What it had printed a second before, and all that it had."""
        when = time.monotonic()
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        for thread in self._threads:
            thread.join(20)
        before = b"".join(data for at, data in self.printed if at < when - LAST)
        everything = b"".join(data for _, data in self.printed)
        return before.decode("utf-8", "ignore"), everything.decode("utf-8", "ignore")


def printed(answers: list[str]) -> str:
    """What the program prints of answers."""
    shown = [Sanitizer().feed(answer) for answer in answers]
    return "".join(text if text.endswith("\n") else f"{text}\n" for text in shown if text)


def killed_again_and_again(model: Path, home: Path, times: int, seed: int) -> Iterator[int]:
    """Kill a chat at random moments and go on with it; yields the exchanges that were kept each time."""
    rng = random.Random(seed)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment |= {f"LONGCHAT_{kind}_DIR": str(home / kind.lower()) for kind in ("DATA", "CACHE")}
    sessions = Sessions(home / "data" / "sessions" / "sessions.db")
    options = ("--model", str(model), "--device", "cpu", "--dtype", "float32", "--window", "60")
    command = [
        sys.executable,
        "-m",
        "longchat_cli",
        "chat",
        *options,
        "--temperature",
        "1",
        "--max-tokens",
        "80",
    ]
    lines = [f"the miller counted {number} sacks {TEXT * (40 * (number % 3 == 1))}" for number in range(3000)]
    lines = [" ".join(line.split()) for line in lines]
    for number in range(times):
        before = sum(about.exchanges for about in sessions.ls(1))
        resume = ["--resume"] if before else []
        running = Killed([*command, *resume], lines, environment)
        if number % 4 == 3:  # at any moment, loading included
            time.sleep(rng.uniform(0, 6))
        else:
            running.wait_for_words()
            time.sleep(rng.uniform(0, 1.5))
        earlier, everything = running.kill()
        kept = sessions.load(sessions.find("last"))
        answers = [turn.text for turn in kept.turns[1::2]][before:]
        words = printed(answers)
        assert words.startswith(earlier.rstrip("\n")), "more than the last second is lost"
        shorter = min(len(words.rstrip("\n")), len(everything.rstrip("\n")))
        assert words[:shorter] == everything[:shorter]
        said = [turn.text for turn in kept.turns[::2]][before:]
        assert said == lines[: len(said)]
        yield kept.about.exchanges


def check_what_is_left(model: Path, home: Path) -> None:
    """The chat goes on in this process: state and transcript agree, and with a run from the beginning."""
    sessions = Sessions(home / "data" / "sessions" / "sessions.db")
    kept = sessions.load(sessions.find("last"))
    engine = local.open_engine(str(model), kept.about.method, kept.about.options, "cpu", "float32")
    store = Store(home / "cache" / "pages")
    again = Conversation(engine, kept.about.system, [], Session(sessions, Console(), kept), store, kept)
    assert again.begin()
    assert agrees(again)
    unkept = sum(len(turn.ids) for turn in again.turns[-2:])
    assert again.reused >= again.coverage().seen - unkept, "all but the exchange that was cut"
    found = logits(again)
    assert (fresh(again, kept.about.method) - found).abs().max() < 2e-3
    say(again, "and now?")
    assert agrees(again)
    leave(again)


@pytest.mark.timeout(900)
def test_kill_9(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny_model()
    counts = list(killed_again_and_again(model, tmp_path, KILLS, seed=1))
    assert counts == sorted(counts) and counts[-1] >= 1
    check_what_is_left(model, tmp_path)


@pytest.mark.slow
def test_kill_9_twenty_times(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    model = tiny_model()
    for _ in killed_again_and_again(model, tmp_path, 20, seed=random.randrange(1 << 30)):
        check_what_is_left(model, tmp_path)


@pytest.mark.slow
def test_fifty_thousand_tokens_go_on_at_once(
    default_model_dir: Path, tmp_path: Path, sessions: Sessions
) -> None:
    """Under two seconds once the model is there, whatever was said before."""
    torch.set_num_threads(2)
    first = local.open_engine(None, "sink", {"sinks": 24})
    store = Store(tmp_path / "pages")
    conversation = Conversation(first, None, [], Session(sessions, Console(quiet=True)), store)
    conversation.begin()
    while conversation._end < 50_000:
        say(conversation, TEXT * 20)
    kept = leave(conversation)
    engine = local.with_method(first, "sink", {"sinks": 24})
    begun = time.perf_counter()
    kept = sessions.load(kept.about.id)
    session, store = Session(sessions, Console(quiet=True), kept), Store(tmp_path / "pages")
    again = Conversation(engine, None, [], session, store, kept)
    assert again.begin()
    assert time.perf_counter() - begun < 2
    assert again.reused == again.coverage().seen >= 50_000
    assert torch.equal(logits(again), logits(conversation))
