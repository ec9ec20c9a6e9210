"""stdout carries answers, stderr all the rest; Ctrl-C is a flag while a model works."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

try:
    import termios
except ImportError:  # Windows
    termios = None  # type: ignore[assignment]

from longchat_cli.errors import DISK_FULL, CannotCreate, StorageError

PATIENCE = 2.0
"""Seconds within which a second Ctrl-C leaves."""
DELAY = 0.5
"""Seconds before there is a progress bar."""


@dataclass(frozen=True)
class Console:
    """What is said on stderr. `quiet` silences notices and progress but no warning; `verbose` adds detail."""

    quiet: bool = False
    verbose: bool = False

    def notice(self, text: str) -> None:
        """A short remark."""
        if not self.quiet:
            self.say(text)

    def say(self, text: str) -> None:
        """What the user asked to see."""
        with contextlib.suppress(OSError, ValueError):  # a closed stderr must not end the work
            if "tqdm" in sys.modules:
                sys.modules["tqdm"].tqdm.write(text, file=sys.stderr)  # above a bar that is on the screen
            else:
                print(text, file=sys.stderr)
            sys.stderr.flush()

    def detail(self, text: str) -> None:
        """A remark for `--verbose`."""
        if self.verbose:
            self.say(text)

    def warn(self, text: str) -> None:
        """Something the user should know before trusting the answer."""
        self.say(f"longchat: warning: {text}")

    @contextlib.contextmanager
    def progress(self, label: str) -> Iterator[Any]:
        """A bar with tokens per second and time left, on a terminal; yields an engine `Progress` or None."""
        if self.quiet or not is_tty(sys.stderr) or os.environ.get("TERM") == "dumb":
            yield None
            return
        begun, bars = time.monotonic(), contextlib.ExitStack()
        bar: Any = None

        def update(done: int, total: int) -> None:
            nonlocal bar
            if bar is not None:
                bar.total = total
                bar.update(done - bar.n)
            elif time.monotonic() - begun > DELAY:  # what is quick needs no bar
                from tqdm import tqdm

                look = {"unit": "tok", "unit_scale": True, "leave": False, "dynamic_ncols": True}
                bar = bars.enter_context(tqdm(None, label, total, file=sys.stderr, **look))
                bar.last_print_t = bar.start_t = bar.start_t - DELAY  # its speed is that of the whole
                bar.update(done)

        with bars:
            yield update


def is_tty(stream: IO[Any] | None) -> bool:
    """True when `stream` is an open terminal."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:
        return False


def coloured(stream: IO[Any] | None) -> bool:
    """Whether colours may go to `stream`: NO_COLOR forbids them, FORCE_COLOR wants them, else a terminal that
    is not dumb has them."""
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR", "") not in ("", "0"):
        return True
    return is_tty(stream) and os.environ.get("TERM") != "dumb"


@contextlib.contextmanager
def echo(stream: IO[Any], on: bool) -> Iterator[None]:
    """Whether the terminal `stream` shows keys that are typed while the body runs."""
    if termios is None or not is_tty(stream):
        yield
        return
    handle = stream.fileno()
    before = termios.tcgetattr(handle)
    local = before[3] | termios.ECHO if on else before[3] & ~termios.ECHO
    try:
        termios.tcsetattr(handle, termios.TCSANOW, [*before[:3], local, *before[4:]])
        yield
    finally:
        with contextlib.suppress(OSError, ValueError, termios.error):  # it may be gone
            termios.tcsetattr(handle, termios.TCSANOW, before)


@contextlib.contextmanager
def left_as_found(stream: IO[Any]) -> Iterator[None]:
    """Give the terminal `stream` its modes back, its cursor, and pastes without marks whatever ends the body.

    A Ctrl-C that is held down may end whoever else was about to.
    """
    if termios is None or not is_tty(stream):
        yield
        return
    before = termios.tcgetattr(stream.fileno())
    try:
        yield
    finally:
        pressed = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            with contextlib.suppress(OSError, ValueError, termios.error):  # it may be gone
                termios.tcsetattr(stream.fileno(), termios.TCSANOW, before)
                if is_tty(sys.stdout) and os.environ.get("TERM") != "dumb":
                    sys.stdout.write("\x1b[?2004l\x1b[?25h")
                    sys.stdout.flush()
        finally:
            signal.signal(signal.SIGINT, pressed)


class Interrupts:
    """Ctrl-C, counted. Inside `catching` the first one sets `stop`, and nothing cuts through a forward pass;
    a second one within PATIENCE sets `leave` and is raised.
    """

    def __init__(self) -> None:
        self.stop = False
        self.leave = False
        self._last = float("-inf")

    def press(self) -> None:
        """Count one Ctrl-C."""
        now = time.monotonic()
        self.leave = now - self._last < PATIENCE
        self._last = now

    def stopped(self) -> bool:
        """The `cancel` argument of an engine."""
        return self.stop

    @contextlib.contextmanager
    def catching(self) -> Iterator[None]:
        """Turn SIGINT into the flags while the body runs; where it is ignored, it stays ignored."""
        self.stop = False
        here = threading.current_thread() is threading.main_thread()
        if not here or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            yield
            return
        before = signal.signal(signal.SIGINT, self._on_signal)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _on_signal(self, *_: object) -> None:
        self.stop = True
        self.press()
        if self.leave:
            raise KeyboardInterrupt


class Output:
    """Where answers go: stdout piece by piece, or a file that gets its name only when it is complete."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self.written: list[str] = []

    def write(self, text: str) -> None:
        self.written.append(text)
        self._file.write(text)
        self._file.flush()


@contextlib.contextmanager
def open_output(path: str | None) -> Iterator[Output]:
    """stdout for None or '-', else `path`, replaced atomically when the body ends well.

    When it does not, or the disk is full, what the file would have held is printed.
    Raises CannotCreate before any work is done, and StorageError.
    """
    if path is None or path == "-":
        yield Output(sys.stdout)
        return
    if not path:
        raise CannotCreate("cannot create a file", "its name is empty")
    with _creating(path):
        target = Path(os.path.realpath(path))
        if target.is_symlink():  # to itself, in the end
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        special = target.exists() and not target.is_file()
    if special:  # a device or a pipe: nothing to replace
        with _creating(path):
            device = target.open("w", encoding="utf-8")
        with device:
            yield Output(device)
        return
    import tempfile

    with _creating(path):  # the name may be as long as names can be
        handle, name = tempfile.mkstemp(prefix=f".{target.name[:50]}.", dir=target.parent, text=True)
    partial = Path(name)
    file = os.fdopen(handle, "w", encoding="utf-8", errors="replace")
    output = Output(file)
    try:
        with file:
            yield output
        partial.chmod(_mode(target))
        partial.replace(target)
    except BaseException as error:
        sys.stdout.write("".join(output.written))
        if isinstance(error, OSError) and error.errno in DISK_FULL:
            do = "free some space; what was written so far is on standard output" if output.written else ""
            raise StorageError(f"writing {path} failed", os.strerror(error.errno), do) from error
        raise
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def _creating(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CannotCreate(f"cannot create {path}", error.strerror or "") from error


def _mode(target: Path) -> int:
    """The mode of the file that is replaced, else what the umask leaves of 0666."""
    if target.exists():
        return target.stat().st_mode & 0o7777
    umask = os.umask(0)
    os.umask(umask)
    return 0o666 & ~umask
