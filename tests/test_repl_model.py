"""The real chat in a real terminal, over a small random model: methods, models, documents, what is kept."""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import TEXT
from screen import Screen

from longchat_cli.sessions import Chat, Sessions

LOADING = 120.0
"""Seconds for a model to be there on a busy machine."""
Start = Callable[..., Screen]


@pytest.fixture
def start(
    tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Start]:
    """`start(*arguments)`: `longchat chat` with a tiny model, all that it keeps in `tmp_path`."""
    for name in ("state", "data", "cache", "config"):
        monkeypatch.setenv(f"LONGCHAT_{name.upper()}_DIR", str(tmp_path / name))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    screens: list[Screen] = []

    def spawn(*arguments: str) -> Screen:
        options = [
            "--model",
            str(tiny_model()),
            "--device",
            "cpu",
            "--dtype",
            "float32",
            "--max-tokens",
            "20",
        ]
        command = [sys.executable, "-m", "longchat_cli", "chat", *options, *arguments]
        screens.append(Screen(command, tmp_path, size=(40, 150)))
        return screens[-1]

    yield spawn
    for screen in screens:
        screen.close()


def kept(home: Path) -> Chat:
    """The last chat as it is on disk."""
    sessions = Sessions(home / "data" / "sessions" / "sessions.db")
    return sessions.load(sessions.find("last"))


def test_methods_models_and_system_prompts_change(
    start: Start, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    other = tiny_model("qwen3")
    (tmp_path / "book.txt").write_text(TEXT * 300)
    screen = start("--window", "64")
    screen.prompt(LOADING)
    screen.say("hello")
    assert "window: " in screen.say("/method window:window=80")
    assert (kept(tmp_path).about.method, kept(tmp_path).about.options["window"]) == ("window", 80)
    assert "window: " in screen.say("/method")
    assert "error: no method 'sinc'; did you mean 'sink'?" in screen.say("/method sinc")
    assert "error: --wndow is not an option of this method" in screen.say("/method sink wndow=3")
    assert "error: unknown model 'nosuchmodel'" in screen.say("/model nosuchmodel")
    assert f"{other.name}, window: " in screen.say(f"/model {other}", LOADING)
    assert kept(tmp_path).about.model == str(other)
    assert "tokens read anew" in screen.say("/system Be brief.")
    assert kept(tmp_path).about.system == "Be brief."
    assert "\n/method window" not in screen.text()
    # Reading a book anew is stopped: everything is as before, on the screen and on disk.
    screen.say("/file book.txt")
    screen.say("what is it about?", 120)
    before = kept(tmp_path)
    screen.write("/method sink\r")
    screen.until("reading anew: ")
    screen.write("\x03")
    assert "stopped; everything is as before" in screen.prompt()
    assert f"{other.name}, window, " in screen.say("/context")
    assert kept(tmp_path) == before
    assert [turn.text for turn in before.turns[::2]] == ["hello", "what is it about?"]
    screen.write("/quit\r")
    assert (screen.ended(), screen.restored()) == (0, True)


def test_a_forgotten_turn_is_pinned_by_reading_it_again(start: Start, tmp_path: Path) -> None:
    screen = start("--window", "64", "--seed", "0")  # as long answers each time
    screen.prompt(LOADING)
    for number in range(4):
        screen.say(f"the river ran past mill {number}")
    assert re.search(r" \.  forgotten +\d+ tokens  [23] turns", screen.say("/context"))
    shown = screen.say("/pin 1")
    assert re.search(r"recall: [\d,]+ tokens read anew\nturn 1 is pinned\n", shown)
    assert [turn.pinned for turn in kept(tmp_path).turns] == [True, True] + [False] * 6
    before = screen.text().count("forgotten")
    shown = screen.say("/context")
    assert shown.count("forgotten") > before
    assert re.findall(r" #  pinned +(\d+) tokens", shown)[-1] != "5", "more than the opening"
    assert "turn 1 is pinned already" in screen.say("/pin 1")
    assert "turn 1 is no longer pinned" in screen.say("/pin 1 off")
    screen.say("/method window window=64")
    assert "error: window cannot keep a turn" in screen.say("/pin 1")
    assert not any(turn.pinned for turn in kept(tmp_path).turns)


def test_kill_9_in_a_terminal_and_resume(start: Start, tmp_path: Path) -> None:
    _killed_and_resumed(start, tmp_path, 2, random.Random(1))


@pytest.mark.slow
def test_kill_9_in_a_terminal_twenty_times(start: Start, tmp_path: Path) -> None:
    _killed_and_resumed(start, tmp_path, 20, random.Random())


def _killed_and_resumed(start: Start, home: Path, times: int, rng: random.Random) -> None:
    """What was on the screen a second before is in the chat that goes on."""
    said: list[str] = []
    for number in range(times):
        screen = start("--max-tokens", "400", "--temperature", "1", *(["--resume"] if number else []))
        screen.prompt(LOADING)
        said.append(f"turn {number}")
        screen.write(said[-1] + "\r")
        end = time.monotonic() + rng.uniform(0.3, 2)
        while time.monotonic() < end:
            screen.read(0.02)
        os.kill(screen.child.pid, signal.SIGKILL)
        screen.ended()
        turns = kept(home).turns
        assert [turn.text for turn in turns[::2]] == said
        assert turns[-1].stop in ("cancelled", "eos", "length", "loop")
    screen = start("--resume")
    screen.until(f"turn {times}: turn {times - 1}", LOADING)
    screen.prompt()
    assert screen.text().count("reused ") == 1
    screen.say("and now?")
    assert [turn.text for turn in kept(home).turns[::2]] == [*said, "and now?"]


def test_what_the_command_line_says_of_another_method_does_not_shut_a_chat_out(
    start: Start, tmp_path: Path
) -> None:
    screen = start("--window", "64")
    screen.prompt(LOADING)
    screen.say("the mill has seven sails")
    screen.say("/method full")
    screen.say("/branch")
    assert "turn 1: the mill has seven sails" in screen.say("/load 1")
    screen.write("/quit\r")
    assert screen.ended() == 0
    refused = start("--resume", "1", "--window", "64")
    assert refused.ended() == 2
    assert "--window is not an option of this method: the chat goes on under full" in refused.text()
