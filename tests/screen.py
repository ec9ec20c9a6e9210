"""A terminal with a screen: a program in a pseudo-terminal and what a user would see (pyte)."""

from __future__ import annotations

import os
import signal
import termios
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pexpect
import pyte

PASTE_ON, PASTE_OFF = "\x1b[?2004h", "\x1b[?2004l"
TIMEOUT = 30.0


class Screen:
    """`command` in a terminal of `size` (rows, columns). What it wrote is `raw`, what is seen `text()`."""

    def __init__(
        self,
        command: Sequence[str],
        cwd: Path,
        env: Mapping[str, str] | None = None,
        size: tuple[int, int] = (30, 100),
    ) -> None:
        environment = {**os.environ, "TERM": "xterm-256color", **(env or {})}
        self.child = pexpect.spawn(
            command[0], list(command[1:]), cwd=str(cwd), env=environment, dimensions=size, timeout=TIMEOUT
        )
        self.child.delaybeforesend = None
        self.raw = b""
        self.screen = pyte.HistoryScreen(size[1], size[0], history=20_000, ratio=1)
        self.screen.write_process_input = self.child.send  # it asks where the cursor is
        self._stream = pyte.ByteStream(self.screen)
        self._written = 0  # bytes of `raw` when the last key was typed

    def write(self, text: str) -> None:
        """Keys, as a terminal sends them."""
        self._written = len(self.raw)
        if len(text) < 1024:
            self.child.send(text)
        else:  # more than a terminal takes before somebody reads
            threading.Thread(target=self.child.send, args=(text,), daemon=True).start()

    def read(self, seconds: float) -> bool:
        """Take what the program writes within so many seconds; False once it has ended."""
        try:
            data = self.child.read_nonblocking(1 << 16, seconds)
        except pexpect.TIMEOUT:
            return True
        except pexpect.EOF:
            return False
        self.raw += data
        self._stream.feed(data)
        return True

    def until(self, seen: str | Callable[[], bool], seconds: float = TIMEOUT) -> str:
        """Wait until `seen` is on the screen (or true); returns what is on it then."""
        end = time.monotonic() + seconds
        shown = (lambda: seen in self.text()) if isinstance(seen, str) else seen
        while not shown():
            going = self.read(0.05)
            assert (going or shown()) and time.monotonic() < end, f"no {seen!r} on\n{self.text()}"
        return self.text()

    def prompt(self, seconds: float = TIMEOUT) -> str:
        """Wait for a prompt that comes after the last key, or after the last one waited for; the screen."""
        ready = PASTE_ON.encode()
        self.until(lambda: ready in self.raw[self._written :], seconds)
        self._written = self.raw.index(ready, self._written) + len(ready)
        return self.text()

    def say(self, text: str, seconds: float = TIMEOUT) -> str:
        """Type a line and wait for the prompt after it; returns the screen."""
        self.write(text + "\r")
        return self.prompt(seconds)

    def lines(self) -> list[str]:
        """The lines on the screen."""
        return [line.rstrip() for line in self.screen.display]

    def text(self) -> str:
        """What went over the screen and what is on it."""
        above = [
            "".join(line[x].data for x in range(self.screen.columns)) for line in self.screen.history.top
        ]
        return "\n".join([*(line.rstrip() for line in above), *self.lines()])

    def resize(self, rows: int, columns: int) -> None:
        self.screen.resize(rows, columns)
        self.child.setwinsize(rows, columns)

    def echoes(self) -> bool:
        """Whether the terminal shows what is typed, line by line, as a shell leaves it."""
        local = termios.tcgetattr(self.child.child_fd)[3]
        return bool(local & termios.ECHO and local & termios.ICANON)

    def restored(self) -> bool:
        """Whether echo, cursor and paste mode are as a shell wants them."""
        last = self.raw.rfind(b"\x1b[?2004")
        cursor = self.raw.rfind(b"\x1b[?25")
        paste_off = last < 0 or self.raw[last:].startswith(PASTE_OFF.encode())
        return paste_off and (cursor < 0 or self.raw[cursor:].startswith(b"\x1b[?25h"))

    def ended(self, seconds: float = TIMEOUT) -> int:
        """The exit code, once the program has ended; -N for signal N."""
        end = time.monotonic() + seconds
        while self.read(0.05):
            assert time.monotonic() < end, f"it goes on\n{self.text()}"
        self.child.wait()
        return self.child.exitstatus if self.child.exitstatus is not None else -self.child.signalstatus

    def hang_up(self, seconds: float = TIMEOUT) -> int:
        """Close the terminal under the program; its exit code."""
        self.child.ptyproc.fileobj.close()
        self.child.closed = self.child.ptyproc.closed = True
        end = time.monotonic() + seconds
        while (done := os.waitpid(self.child.pid, os.WNOHANG))[0] == 0:
            assert time.monotonic() < end, "it goes on without a terminal"
            time.sleep(0.02)
        self.child.terminated = self.child.ptyproc.terminated = True
        return os.waitstatus_to_exitcode(done[1])

    def close(self) -> None:
        if self.child.closed:
            return
        if self.child.isalive():
            os.kill(self.child.pid, signal.SIGKILL)
        self.child.close(force=True)
