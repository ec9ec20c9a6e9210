"""The command `longchat`: runs `cli`, turns every failure into one line on stderr and an exit code.

click is imported once the signals are handled, so that the earliest Ctrl-C finds that in place.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from longchat_cli.errors import LongchatError, OutOfMemory, StorageError, one_line

_STORAGE = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, errno.EROFS}


class Terminated(BaseException):
    """Signal `number` arrived: SIGTERM, or SIGHUP (the terminal was closed)."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class _Signals:
    """SIGTERM and SIGHUP end the command through its `finally` clauses; SIGINT is remembered.

    Imports and C extensions may turn a KeyboardInterrupt into another error: `interrupted` tells. A signal
    raises once: what cleans up after it is not cut by a key held down, only by one pressed REPEAT later.
    While torch sets itself up it comes again AGAIN later: raised inside that, it would abort the process.
    """

    REPEAT = 1.0
    AGAIN = 0.05

    def __init__(self) -> None:
        self.interrupted = False
        self._deaf_until = {KeyboardInterrupt: 0.0, Terminated: 0.0}
        for name in ("SIGTERM", "SIGHUP"):
            self._handle(name, self._terminate)
        self._handle("SIGINT", self._interrupt)

    def finish(self) -> None:
        """Nothing raises from here on."""
        self._deaf_until = dict.fromkeys(self._deaf_until, float("inf"))

    def unraisable(self, unraisable: Any) -> None:
        """For sys.unraisablehook: what arrived inside a finalizer, where raising is in vain, comes again."""
        error = unraisable.exc_value
        if not isinstance(error, KeyboardInterrupt | Terminated):
            sys.__unraisablehook__(unraisable)
        elif self._deaf_until[type(error)] != float("inf"):
            self._deaf_until[type(error)] = 0.0
            signal.raise_signal(error.number if isinstance(error, Terminated) else signal.SIGINT)

    def _handle(self, name: str, handler: Callable[[int, Any], None]) -> None:
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        # A background job ignores Ctrl-C, one under nohup the end of its terminal.
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)

    def _terminate(self, number: int, _: object) -> None:
        self._raise(number, Terminated(number))

    def _interrupt(self, number: int, _: object) -> None:
        self.interrupted = True
        self._raise(number, KeyboardInterrupt())

    def _raise(self, number: int, error: KeyboardInterrupt | Terminated) -> None:
        if _is_being_imported("torch.autograd"):  # C++ that imports Python and cannot hand its errors on
            again = threading.Timer(self.AGAIN, signal.raise_signal, [number])
            again.daemon = True
            again.start()
            return
        now = time.monotonic()
        if now >= self._deaf_until[type(error)]:
            self._deaf_until[type(error)] = now + self.REPEAT
            raise error


def _is_being_imported(name: str) -> bool:
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return getattr(spec, "_initializing", False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `arguments` and return the exit code; None: run the process's own, then leave the process."""
    # Spinning OpenMP threads slow a shared machine down many times; must be set before torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given or bool(os.environ.get("LONGCHAT_DEBUG"))
    if not _open_streams():
        return StorageError.exit_code
    if not debug:
        import warnings

        warnings.simplefilter("ignore")  # libraries warn about what the user cannot change
    signals = _Signals()
    if arguments is None:
        sys.unraisablehook = signals.unraisable
    try:
        code = _run(given)
        sys.stdout.flush()
    except BaseException as error:
        signals.finish()
        debug = debug or bool(os.environ.get("LONGCHAT_DEBUG"))  # a configuration file may have said so
        code = _explain(error, signals.interrupted, debug)
        _abandon_stdout()
    if arguments is None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a key still held down must not kill the exit
    if arguments is None and "torch" in sys.modules:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.flush()
        os._exit(code)  # nothing is left to save, and taking torch down costs most of a second
    return code


def _run(arguments: list[str]) -> int:
    import click

    from longchat_cli.cli import cli

    if "_LONGCHAT_COMPLETE" in os.environ:
        from click.shell_completion import shell_complete

        return shell_complete(cli, {}, "longchat", "_LONGCHAT_COMPLETE", os.environ["_LONGCHAT_COMPLETE"])
    # Not `cli.main`: it has answers of its own to a closed pipe and to Ctrl-C.
    try:
        with cli.make_context("longchat", arguments) as context:
            cli.invoke(context)
    except click.exceptions.Exit as leave:
        return leave.exit_code
    return 0


def _explain(error: BaseException, interrupted: bool, debug: bool) -> int:
    """Say on stderr what went wrong; returns the exit code."""
    import click

    if isinstance(error, BrokenPipeError):
        return 141
    if isinstance(error, Terminated):
        return 128 + error.number
    if isinstance(error, KeyboardInterrupt | click.Abort) or interrupted:
        return 130
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    if isinstance(error, click.exceptions.NoArgsIsHelpError):  # `longchat`, `longchat models`
        with contextlib.suppress(OSError, ValueError):
            print(error.format_message(), file=sys.stderr, flush=True)
        return error.exit_code
    if debug:
        traceback.print_exception(error)
    expected = _expected(error)
    if expected is None:
        kind, text = type(error).__name__, str(error)
        _complain(f"internal error: {kind}{f': {text}' if text else ''}; run again with --debug")
        return 1
    line, code = expected
    _complain(line)
    return code


def _expected(error: BaseException) -> tuple[str, int] | None:
    """The line and exit code of a failure that is not a bug."""
    import click

    if isinstance(error, click.ClickException):
        hint = ""
        if isinstance(error, click.UsageError) and error.ctx:
            hint = f"; `{error.ctx.command_path} --help` shows the usage"
        return error.format_message().strip().removesuffix(".") + hint, error.exit_code
    if isinstance(error, LongchatError):
        return str(error), error.exit_code
    if isinstance(error, MemoryError) or _is_torch_oom(error):
        short = OutOfMemory("out of memory", "", "use a smaller model, --quantize int8 or --method sink")
        return str(short), short.exit_code
    if isinstance(error, OSError) and error.errno in _STORAGE:
        place = f" {error.filename}" if error.filename else ""
        return str(StorageError(f"writing{place} failed", os.strerror(error.errno))), StorageError.exit_code
    return None


def _is_torch_oom(error: BaseException) -> bool:
    torch = sys.modules.get("torch")
    on_device = torch is not None and isinstance(error, torch.OutOfMemoryError)
    return on_device or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))


def _complain(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print("longchat: error: " + one_line(line), file=sys.stderr, flush=True)


def _open_streams() -> bool:
    """Make the three streams usable; False when there is no stdout to answer on."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115, PTH123
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123
    if sys.stdout is None:
        _complain("there is nowhere to write: standard output is closed")
        return False
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    return True


def _abandon_stdout() -> None:
    """Print what is buffered if that is possible; if not, keep the interpreter's last flush silent."""
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
