"""The line editor: keys, history, completion, editor, suspension. prompt-toolkit does the work."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TextIO

from longchat_cli import config
from longchat_cli.errors import CannotCreate, UsageError
from longchat_cli.repl.completion import Choices, completer
from longchat_cli.terminal import echo, is_tty
from longchat_cli.terminal_text import replace_surrogates

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.buffer import Buffer
    from prompt_toolkit.history import History

PROMPT = "> "
Edit = Callable[[str], str]
"""Lets the user change a text. Raises UsageError."""
_REMEMBERED = 1 << 16
"""Characters of an input that the history file keeps; a pasted book is not typed again."""


class Prompt:
    """Asks for input on the terminal `source`. `choices` completes slash commands.

    A dumb terminal (TERM) gets a plain line.
    """

    def __init__(self, source: TextIO, choices: Choices) -> None:
        self.source = source
        self._multiline = False
        dumb = os.environ.get("TERM") == "dumb"
        self._session = None if dumb else _session(source, choices, lambda: self._multiline, self.edit)

    def ask(self, toolbar: str, keys: str, multiline: bool) -> str:
        """What was typed, with `toolbar` below and emacs or vi `keys`; Enter sends, or adds a line where
        `multiline`, and Alt-Enter the other. Raises EOFError at Ctrl-D, KeyboardInterrupt at Ctrl-C."""
        if self._session is None:
            return self._plain()
        from prompt_toolkit.enums import EditingMode

        self._multiline = multiline
        self._session.editing_mode = EditingMode.VI if keys == "vi" else EditingMode.EMACS
        with _signals() as begin:
            # The toolbar is a text, no function: it is not made anew at every key.
            return self._session.prompt(PROMPT, bottom_toolbar=toolbar, pre_run=begin)

    def _plain(self) -> str:
        shown = sys.stdout if is_tty(sys.stdout) else sys.stderr
        shown.write(PROMPT)
        shown.flush()
        with echo(self.source, True):
            line = self.source.buffer.readline()
        if not line:
            raise EOFError
        return line.decode("utf-8", "replace").rstrip("\n")

    def edit(self, text: str) -> str:
        """`text` as $VISUAL or $EDITOR leaves it. Raises UsageError when that fails."""
        import click

        for name in ("VISUAL", "EDITOR"):
            if not os.environ.get(name, "x").strip():  # click would run the file itself
                del os.environ[name]
        try:
            with echo(self.source, True):
                changed = click.edit(text, extension=".md")
        except (click.ClickException, OSError, ValueError) as error:  # the file is gone, or no UTF-8
            raise UsageError("the editor failed", str(error), "set $VISUAL or $EDITOR") from error
        return text if changed is None else changed.rstrip("\n")


def _session(
    source: TextIO, choices: Choices, multiline: Callable[[], bool], edit: Edit
) -> PromptSession[str]:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.application import get_app
    from prompt_toolkit.filters import Condition
    from prompt_toolkit.input import create_input
    from prompt_toolkit.output import create_output

    several = Condition(multiline)
    command = Condition(lambda: get_app().current_buffer.document.text.startswith("/"))
    # A prompt on stdout that goes to a file would end up in it.
    output = None if is_tty(sys.stdout) else create_output(always_prefer_tty=True)
    reading = None if source is sys.stdin else create_input(source)
    session: PromptSession[str] = PromptSession(
        history=_history(),
        key_bindings=_bindings(several, edit),
        multiline=several,
        prompt_continuation=lambda width, line, wraps: "  " if wraps else ". ",
        completer=completer(choices),
        complete_while_typing=command,
        reserve_space_for_menu=6,
        input=reading,
        output=output,
    )
    session.default_buffer.on_text_insert += _replace_surrogates
    return session


def _replace_surrogates(buffer: Buffer) -> None:
    """Bytes that are no UTF-8: prompt-toolkit makes surrogates of them, which nothing could encode."""
    if (text := replace_surrogates(buffer.text)) != buffer.text:
        buffer.text = text


def _bindings(several: Any, edit: Edit) -> Any:
    from prompt_toolkit.application import get_app
    from prompt_toolkit.filters import emacs_mode, has_selection, vi_navigation_mode
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("escape", "enter", filter=~several)
    def _(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-z")
    def _(event: Any) -> None:
        _suspend(get_app())

    @keys.add("c-x", "c-e", filter=emacs_mode & ~has_selection)
    @keys.add("v", filter=vi_navigation_mode & ~has_selection)
    def _(event: Any) -> None:
        event.app.create_background_task(_edit_and_send(event.current_buffer, edit))

    return keys


async def _edit_and_send(buffer: Buffer, edit: Edit) -> None:
    """Send what the editor leaves. prompt-toolkit's own key ends in a traceback when that fails."""
    from prompt_toolkit.application import run_in_terminal
    from prompt_toolkit.document import Document

    try:
        text = await run_in_terminal(lambda: edit(buffer.text), in_executor=True)
    except UsageError as error:
        message = f"longchat: error: {error}"
        await run_in_terminal(lambda: print(message, file=sys.stderr))
        return
    buffer.document = Document(text, len(text))
    buffer.validate_and_handle()


@contextlib.contextmanager
def _signals() -> Iterator[Callable[[], None]]:
    """SIGTERM and SIGHUP end the prompt, SIGTSTP suspends it, with the terminal as it was before: raised in
    the middle of drawing they would leave it otherwise. Yields what the prompt calls as it begins."""
    names = ("SIGTERM", "SIGHUP", "SIGTSTP")
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name) and os.name == "posix"]
    before = {number: signal.getsignal(number) for number in numbers}
    came: list[int] = []

    def begin() -> None:
        from prompt_toolkit.application import get_app

        app, loop = get_app(), asyncio.get_running_loop()

        def leave(number: int) -> None:
            came.append(number)
            if not app.is_done:
                app.exit(exception=EOFError())

        for number, handler in before.items():
            if number == signal.SIGTSTP:
                loop.add_signal_handler(number, _suspend, app)
            elif handler is not signal.SIG_IGN:
                loop.add_signal_handler(number, leave, number)

    try:
        yield begin
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in came:
            signal.raise_signal(number)


def _suspend(app: Any) -> None:
    """Give the terminal back, stop, and draw the prompt anew when the shell says `fg`."""
    from prompt_toolkit.application import run_in_terminal

    def stop() -> None:
        before = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(0, signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, before)

    if hasattr(signal, "SIGTSTP"):
        run_in_terminal(stop)


def _history() -> History:
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class Bounded(FileHistory):
        def store_string(self, string: str) -> None:
            if len(string) <= _REMEMBERED:
                with contextlib.suppress(OSError):  # a full disk must not forbid talking
                    super().store_string(string)

    try:
        path = config.private(config.state_dir()) / "chat_history"
        os.close(os.open(path, os.O_CREAT | os.O_APPEND, 0o600))
        return Bounded(path)
    except (OSError, CannotCreate):  # a read-only home must not forbid talking
        return InMemoryHistory()
