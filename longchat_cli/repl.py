"""The chat at a terminal (prompt-toolkit, history, streaming, slash commands) and over a pipe."""

from __future__ import annotations

import contextlib
import difflib
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

from longchat_cli import config
from longchat_cli.ask import Open
from longchat_cli.chat import Conversation, open_conversation
from longchat_cli.documents import Document
from longchat_cli.errors import CannotCreate, ContextOverflow, UsageError
from longchat_cli.sampling import Sampling
from longchat_cli.terminal import Console, Interrupts, is_tty
from longchat_cli.terminal_text import Sanitizer

if TYPE_CHECKING:
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import History

PROMPT = "> "
Record = Callable[[str, str, str, str, str], None]
"""Called with model, method, question, answer and why it ended."""


def run(
    open_engine: Open,
    *,
    method: str,
    options: Mapping[str, Any],
    system: str | None,
    documents: Sequence[Document],
    sampling: Sampling,
    console: Console,
    keyboard: str | None = None,
    record: Record | None = None,
) -> None:
    """Chat until the end of input; `keyboard` names a terminal to read from instead of standard input.

    Raises KeyboardInterrupt when the user left by Ctrl-C.
    """
    source = _keyboard(keyboard) if keyboard else sys.stdin
    conversation = open_conversation(open_engine, method, options, system, documents)
    chat = Repl(conversation, sampling, console, record)
    chat.open()
    if is_tty(source):
        chat.converse(_session(source))
    else:
        chat.answer_lines(source.buffer)


def _keyboard(path: str) -> TextIO:
    try:
        return open(path, encoding="utf-8")  # noqa: SIM115, PTH123
    except OSError as error:
        why = "standard input is the document and there is no terminal"
        raise UsageError("nobody can type", why, "name the document, or use `longchat ask`") from error


class Left(Exception):
    """The user asked to leave."""


class Repl:
    """A conversation on a screen. Slash commands are the entries of COMMANDS."""

    def __init__(
        self, conversation: Conversation, sampling: Sampling, console: Console, record: Record | None = None
    ) -> None:
        self.conversation, self.sampling, self.console = conversation, sampling, console
        self.record = record
        self.interrupts = Interrupts()

    def open(self) -> None:
        """Read system prompt and documents. Raises KeyboardInterrupt when Ctrl-C stops that."""
        with self._working("reading") as (bar, cancel):
            done = self.conversation.open(bar, cancel)
        if not done:
            raise KeyboardInterrupt
        forgotten = self.conversation.coverage().forgotten
        if forgotten and self.conversation.documents:
            method, read = self.conversation.engine.info.method, len(self.conversation.opening)
            self.console.warn(
                f"{method} has already forgotten {forgotten:,} of the text's {read:,} tokens; "
                "`longchat ask` finds passages anywhere"
            )

    def converse(self, session: PromptSession[str]) -> None:
        """Prompt, answer, repeat. Ends at Ctrl-D and /quit; raises KeyboardInterrupt after two Ctrl-C."""
        info = self.conversation.engine.info
        self.console.notice(f"{info.model}, {info.method}. /help lists commands, Ctrl-D leaves.")
        while (text := self._prompt(session)) is not None:
            try:
                self._take(text)
            except ContextOverflow as error:
                self.console.warn(str(error))
            except Left:
                return

    def answer_lines(self, lines: Iterator[bytes] | Any) -> None:
        """Each line that is not blank is a turn; what it says is never a command."""
        for line in lines:
            if text := line.decode("utf-8", "replace").strip():
                self.answer(text)
                if self.interrupts.stop:
                    raise KeyboardInterrupt

    def answer(self, text: str) -> None:
        """Send one turn and print the answer as it comes, made safe for the terminal."""
        sanitizer, printed, before = Sanitizer(), "", len(self.conversation.turns)
        with self.interrupts.catching():
            with self.console.progress("reading") as bar:  # gone before the first word stands in its place
                pieces = self.conversation.send(text, self.sampling, bar, self.interrupts.stopped)
                first = list(itertools.islice(pieces, 1))
            for piece in itertools.chain(first, pieces):
                shown = sanitizer.feed(piece.text)
                sys.stdout.write(shown)
                sys.stdout.flush()
                printed = shown or printed
        if not printed.endswith("\n"):
            sys.stdout.write("\n")
        sys.stdout.flush()
        if self.record and len(self.conversation.turns) > before:
            info, answer = self.conversation.engine.info, self.conversation.turns[-1]
            self.record(info.model, info.method, text, Sanitizer().feed(answer.text), answer.stop or "")

    def _prompt(self, session: PromptSession[str]) -> str | None:
        """What was typed; None at Ctrl-D. The first Ctrl-C clears the line."""
        while True:
            try:
                return session.prompt(PROMPT)
            except EOFError:
                return None
            except KeyboardInterrupt:
                self.interrupts.press()
                if self.interrupts.leave:
                    raise
                self.console.notice("Ctrl-C again or Ctrl-D leaves")

    def _take(self, text: str) -> None:
        """One input: a command, or a turn (`//` begins a turn that starts with a slash)."""
        if text.startswith("/") and not text.startswith("//"):
            self._command(*text[1:].split(maxsplit=1))
        elif text.strip():
            self.answer(text.removeprefix("/") if text.startswith("//") else text)
            if self.interrupts.leave:
                raise KeyboardInterrupt
            if self.interrupts.stop:
                self.console.notice("stopped; what was said is kept, Ctrl-C again leaves")

    def _command(self, name: str = "", argument: str = "") -> None:
        if name in COMMANDS:
            COMMANDS[name].run(self, argument.strip())
            return
        close = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f"did you mean /{close[0]}?" if close else "/help lists them"
        self.console.warn(f"no command /{name}; {hint} (//{name} sends it as text)")

    @contextlib.contextmanager
    def _working(self, label: str) -> Iterator[tuple[Any, Callable[[], bool]]]:
        """A progress bar and the cancel flag, while the model works."""
        with self.console.progress(label) as bar, self.interrupts.catching():
            yield bar, self.interrupts.stopped


@dataclass(frozen=True)
class Command:
    """A slash command: its line in /help and what it does with what follows its name."""

    help: str
    run: Callable[[Repl, str], None]


def _help(repl: Repl, argument: str) -> None:
    for name, command in COMMANDS.items():
        repl.console.say(f"/{name:<9}{command.help}")
    repl.console.say("Alt-Enter adds a line, Ctrl-R searches the history, // begins a turn with a slash")


def _context(repl: Repl, argument: str) -> None:
    info, state = repl.conversation.engine.info, repl.conversation.coverage()
    answers = sum(turn.role == "assistant" for turn in repl.conversation.turns)
    repl.console.say(
        f"{info.model}, {info.method}, window {info.window:,}: {answers} turns, {state.seen:,} tokens seen, "
        f"{state.visible:,} visible, {state.forgotten:,} forgotten; "
        f"{len(repl.conversation.opening):,} in the opening; {config.format_bytes(state.bytes)} held"
    )


def _new(repl: Repl, argument: str) -> None:
    repl.open()
    repl.console.notice("a new conversation")


def _quit(repl: Repl, argument: str) -> None:
    raise Left


COMMANDS: dict[str, Command] = {
    "help": Command("list the commands", _help),
    "context": Command("what the model still sees and what it has forgotten", _context),
    "new": Command("start a new conversation", _new),
    "quit": Command("leave", _quit),
}


def _session(source: TextIO) -> PromptSession[str]:
    """A prompt on the terminal `source`, with the history kept in the state directory (0600)."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.input import create_input
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.output import create_output

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    # A prompt on stdout that goes to a file would end up in it; None lets TERM=dumb have its plain prompt.
    output = None if is_tty(sys.stdout) else create_output(always_prefer_tty=True)
    reading = None if source is sys.stdin else create_input(source)
    return PromptSession(history=_history(), key_bindings=keys, input=reading, output=output)


def _history() -> History:
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    try:
        path = config.private(config.state_dir()) / "chat_history"
        os.close(os.open(path, os.O_CREAT | os.O_APPEND, 0o600))
        return FileHistory(path)
    except (OSError, CannotCreate):  # a read-only home must not forbid talking
        return InMemoryHistory()
