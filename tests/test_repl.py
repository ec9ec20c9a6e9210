"""The chat in a terminal, driven through a pseudo-terminal."""

from __future__ import annotations

import io
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pexpect
import pytest
from conftest import write_tiny_tokenizer

FAKES = Path(__file__).with_name("fakes.py")
PROMPT = "\x1b[?2004h"  # bracketed paste goes on with each prompt
TIMEOUT = 20

Start = Callable[..., pexpect.spawn]


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(directory)
    return directory


@pytest.fixture
def start(tokenizer_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """`start(*arguments)`: `longchat` over the fake engine in a terminal, its state in `tmp_path`."""
    monkeypatch.setenv("LONGCHAT_STATE_DIR", str(tmp_path / "state"))
    children: list[pexpect.spawn] = []

    def spawn(*arguments: str, delay: str = "0,0", shell: str = "{}", term: str = "xterm") -> pexpect.spawn:
        command = " ".join([sys.executable, str(FAKES), str(tokenizer_dir), delay, *arguments])
        child = pexpect.spawn(
            "bash",
            ["-c", "exec " + command if shell == "{}" else shell.format(command)],
            encoding="utf-8",
            timeout=TIMEOUT,
            cwd=str(tmp_path),
            env={**os.environ, "TERM": term, "PROMPT_TOOLKIT_NO_CPR": "1"},
            dimensions=(40, 120),
        )
        children.append(child)
        return child

    yield spawn
    for child in children:
        child.close(force=True)


def ended(child: pexpect.spawn) -> int:
    """The exit code, once the program has ended."""
    child.expect(pexpect.EOF)
    child.wait()
    return child.exitstatus if child.exitstatus is not None else -child.signalstatus


def test_session(start: Start, tmp_path: Path) -> None:
    """Commands, turns, pasted lines, the history file, and Ctrl-D."""
    child = start("chat")
    child.expect_exact("/help lists commands")
    child.expect_exact(PROMPT)
    child.send("hello\r")
    child.expect_exact("You said: hello")
    child.expect_exact(PROMPT)
    child.send("/help\r")
    for name in ("/help", "/context", "/new", "/quit"):
        child.expect_exact(name)
    child.expect_exact(PROMPT)
    child.send("/context\r")
    child.expect(r"1 turns, (\d+) tokens seen")
    child.expect_exact(PROMPT)
    child.send("/contxt\r")
    child.expect_exact("did you mean /context?")
    child.expect_exact(PROMPT)
    child.send("//etc is a folder\r")
    child.expect_exact("You said: /etc is a folder")
    child.expect_exact(PROMPT)
    child.send("\x1b[200~first line\nsecond line\x1b[201~")  # bracketed paste
    child.send("\r")
    child.expect_exact("You said: first line\r\nsecond line")
    child.expect_exact(PROMPT)
    child.send("/new\r")
    child.expect_exact("a new conversation")
    child.expect_exact(PROMPT)
    child.send("/context\r")
    child.expect_exact("0 turns")
    child.expect_exact(PROMPT)
    child.send("\x12hello")  # Ctrl-R
    child.expect_exact("reverse-i-search")
    child.send("\r\r")
    child.expect_exact("You said: hello")
    child.expect_exact(PROMPT)
    child.send("\x04")
    assert ended(child) == 0
    history = tmp_path / "state" / "chat_history"
    assert "+hello" in history.read_text()
    assert history.stat().st_mode & 0o777 == 0o600
    assert history.parent.stat().st_mode & 0o777 == 0o700


def test_ctrl_c_stops_the_answer_and_keeps_the_part(start: Start) -> None:
    child = start("chat", delay="0.1,0")
    child.expect_exact(PROMPT)
    child.send("a long story about the river\r")
    child.expect_exact("You ")
    child.send("\x03")
    child.expect_exact("what was said is kept")
    child.expect_exact(PROMPT)
    time.sleep(2.1)
    child.send("\x03")
    child.expect_exact("Ctrl-C again or Ctrl-D leaves")
    child.expect_exact(PROMPT)
    time.sleep(2.1)
    child.send("\x03")
    child.expect_exact("Ctrl-C again or Ctrl-D leaves")
    child.send("\x03")
    assert ended(child) == 130


def test_two_ctrl_c_leave_while_answering(start: Start) -> None:
    child = start("chat", delay="0.3,0")
    child.expect_exact(PROMPT)
    child.send("hello\r")
    child.expect_exact("Yo")
    begun = time.monotonic()
    child.send("\x03")
    child.send("\x03")
    assert ended(child) == 130
    assert time.monotonic() - begun < 3
    assert "Traceback" not in child.before


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_while_loading(start: Start, number: signal.Signals, code: int) -> None:
    child = start("chat", delay="0,60")
    child.expect_exact("loading")
    begun = time.monotonic()
    child.kill(number)
    assert ended(child) == code
    assert "Traceback" not in child.before
    assert time.monotonic() - begun < 3


def test_quit_and_full_at_its_end(start: Start) -> None:
    child = start("chat", "--method", "full", "--max-tokens", "4k")
    child.expect_exact(PROMPT)
    child.send("word " * 300 + "\r")
    child.expect_exact(PROMPT)
    child.send("\x1b[200~" + "word " * 1500 + "\x1b[201~\r")
    child.expect_exact("full is at its end")
    child.expect_exact(PROMPT)
    child.send("/quit\r")
    assert ended(child) == 0


def test_document_from_stdin_and_keyboard_from_the_terminal(start: Start) -> None:
    child = start("chat", "--with", "-", shell="printf 'The mill has seven sails.\\n' | {}")
    child.expect_exact(PROMPT)
    child.send("how many?\r")
    child.expect_exact("You said: how many?")
    child.expect_exact(PROMPT)
    child.send("\x04")
    assert ended(child) == 0


def test_answers_to_a_file_prompt_on_the_terminal(start: Start, tmp_path: Path) -> None:
    child = start("chat", shell="{} > out.txt")
    child.expect_exact(PROMPT)
    child.send("hello\r")
    child.expect_exact(PROMPT)
    child.send("\x04")
    assert ended(child) == 0
    assert (tmp_path / "out.txt").read_text() == "You said: hello\n"


def test_dumb_terminal(start: Start) -> None:
    child = start("chat", term="dumb")
    child.expect_exact("> ")
    child.send("hello\r")
    child.expect_exact("You said: hello")
    child.expect_exact("> ")
    assert "\x1b[" not in child.before
    child.send("\x04")
    assert ended(child) == 0


def test_progress_bar_is_gone_before_the_answer(start: Start) -> None:
    child = start("chat", "--max-tokens", "3", delay="0.4,0")
    child.expect_exact(PROMPT)
    child.sendline("a turn long enough to be read in several steps, so that there is a bar to be seen")
    child.expect("reading: .*You")
    bar, _, cleared = child.after.rpartition("tok/s]")
    assert bar
    assert cleared.startswith("\r  "), "the line of the bar is wiped"
    assert "You" not in bar


def test_warnings_stand_above_the_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    from longchat_cli.terminal import Console

    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    console = Console()
    with console.progress("reading") as bar:
        time.sleep(0.6)
        bar(1, 3)
        console.warn("it forgets")
        bar(3, 3)
    before, _, after = screen.getvalue().partition("longchat: warning: it forgets")
    assert "reading:  33%" in before
    assert before.endswith("\r")
    assert after.startswith("\n")
    assert "reading:" in after


def test_interrupts_count(monkeypatch: pytest.MonkeyPatch) -> None:
    from longchat_cli.terminal import Interrupts

    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    interrupts = Interrupts()
    with interrupts.catching():
        os.kill(os.getpid(), signal.SIGINT)
        assert (interrupts.stop, interrupts.leave) == (True, False)
        now[0] += 3
        os.kill(os.getpid(), signal.SIGINT)
        assert not interrupts.leave
        now[0] += 1
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupts.leave
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            _wait()


def _wait() -> Any:
    """A place for the signal's handler to run."""
    return sum(range(1000))
