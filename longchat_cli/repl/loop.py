"""The chat's loop: prompt, answer, repeat, at a terminal; a turn a line, over a pipe."""

from __future__ import annotations

import contextlib
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from longchat_cli import attention
from longchat_cli.ask import Open
from longchat_cli.chat import Conversation
from longchat_cli.documents import Collection
from longchat_cli.documents.names import printable
from longchat_cli.engine import Piece, Progress
from longchat_cli.errors import LongchatError, UsageError
from longchat_cli.repl import bar, commands
from longchat_cli.repl.answer import Printer
from longchat_cli.repl.prompt import Prompt
from longchat_cli.sampling import CUT, Sampling
from longchat_cli.terminal import Console, Interrupts, coloured, echo, is_tty, left_as_found
from longchat_cli.terminal_text import Sanitizer, brief

Record = Callable[[str, str, str, str, str], None]
"""Called with model, method, question, answer and why it ended."""
Answering = Callable[[Progress | None, Callable[[], bool]], Iterator[Piece]]
"""Begins an answer, given the progress of reading and the cancel flag."""


Made = tuple[Conversation, Open, Mapping[str, Any]]
"""A conversation, what opens its model under other methods, and the options of its method."""


@dataclass(frozen=True)
class Workbench:
    """What commands may open: another model and documents by their names, a kept chat by its number."""

    model: Callable[[str], Open]
    documents: Callable[[Sequence[str]], Collection]
    chat: Callable[[str], Made]


def run(
    conversation: Conversation,
    open_engine: Open,
    options: Mapping[str, Any],
    *,
    sampling: Sampling,
    console: Console,
    workbench: Workbench,
    keyboard: str | None = None,
    record: Record | None = None,
    keys: str = "emacs",
    plain: bool = False,
) -> None:
    """Chat until the end of input; `keyboard` names a terminal to read from instead of standard input.

    `keys`: emacs or vi; `plain`: no colours in answers. Raises KeyboardInterrupt when Ctrl-C ended it.
    """
    source = _keyboard(keyboard) if keyboard else sys.stdin
    chat = Repl((conversation, open_engine, options), sampling, console, workbench, record)
    chat.keys, chat.styled = keys, not plain and coloured(sys.stdout)
    if not chat.begin(conversation):
        raise KeyboardInterrupt
    if is_tty(source):
        with left_as_found(source):
            chat.converse(Prompt(source, lambda name: commands.choices(chat, name)))
    else:
        chat.answer_lines(source.buffer)


def _keyboard(path: str) -> TextIO:
    try:
        return open(path, encoding="utf-8")  # noqa: SIM115, PTH123
    except OSError as error:
        why = "standard input is the document and there is no terminal"
        raise UsageError("nobody can type", why, "name the document, or use `longchat ask`") from error


class Repl:
    """A conversation on a screen. Slash commands are the entries of `commands.COMMANDS`."""

    def __init__(
        self,
        made: Made,
        sampling: Sampling,
        console: Console,
        workbench: Workbench,
        record: Record | None = None,
    ) -> None:
        self.conversation, self.open_engine, self.options = made
        self.sampling, self.console, self.workbench = sampling, console, workbench
        self.record = record
        self.interrupts = Interrupts()
        self.prompt: Prompt | None = None
        self.keys, self.multiline, self.styled = "emacs", False, False
        self.speed = 0.0  # tokens per second of the last answer

    def begin(self, conversation: Conversation) -> bool:
        """Read all that comes before the next words; False when Ctrl-C stopped that."""
        conversation.notice = self.console.notice
        with self.working("reading") as (progress, cancel):
            done = conversation.begin(progress, cancel)
        if not done:
            return False
        if conversation.turns:
            seen, (user, answer) = conversation.coverage().seen, conversation.turns[-2:]
            self.console.notice(f"reused {conversation.reused:,} of {seen:,} tokens")
            self.console.notice(
                f"turn {conversation.exchanges:,}: {brief(user.text)}\n{brief(answer.text, 90)}"
            )
        elif conversation.documents and (forgotten := conversation.coverage().forgotten):
            method, read = conversation.engine.info.method, len(conversation.opening)
            self.console.warn(
                f"{method} has already forgotten {forgotten:,} of the text's {read:,} tokens; "
                "`longchat ask` finds passages anywhere"
            )
        return True

    def converse(self, prompt: Prompt) -> None:
        """Prompt, answer, repeat. Ends at Ctrl-D and /quit; raises KeyboardInterrupt after two Ctrl-C."""
        self.prompt = prompt
        info = self.conversation.engine.info
        self.console.notice(f"{printable(info.model)}, {info.method}. /help lists commands, Ctrl-D leaves.")
        with echo(
            prompt.source, False
        ):  # what is typed during an answer stands in the next prompt, not in it
            try:
                while (text := self._ask(prompt)) is not None:
                    self._take(text)
            except commands.Left:
                pass
        session = self.conversation.session
        if session and session.id is not None:
            self.console.notice(f"`longchat chat --resume {session.id}` goes on from here")

    def _take(self, text: str) -> None:
        """One input; what cannot be done is told in a line."""
        try:
            commands.take(self, text)
        except LongchatError as error:
            self.console.say(f"longchat: error: {error}")
        except MemoryError:
            self.console.say("longchat: error: out of memory; everything is as before")
        except KeyboardInterrupt:
            self.pressed("stopped; Ctrl-C again leaves")

    def answer_lines(self, lines: Iterator[bytes] | Any) -> None:
        """Each line that is not blank is a turn; what it says is never a command."""
        for line in lines:
            if text := line.decode("utf-8", "replace").strip():
                self.send(text)
                if self.interrupts.stop:
                    raise KeyboardInterrupt

    def send(self, text: str) -> None:
        """Send one turn and print the answer as it comes."""
        self.show(lambda *watching: self.conversation.send(text, self.sampling, *watching))

    def show(self, begin: Answering) -> None:
        """Print an answer as it comes, made safe for the terminal. Raises KeyboardInterrupt at two Ctrl-C."""
        last = self.conversation.turns[-1:]
        with self.interrupts.catching():
            with self.console.progress("reading") as bar:  # gone before the first word stands in its place
                pieces = begin(bar, self.interrupts.stopped)
                first = list(itertools.islice(pieces, 1))
            with contextlib.closing(pieces):  # type: ignore[type-var]  # whatever happens, its end is now
                self._print(itertools.chain(first, pieces))
        answered = self.conversation.turns[-1:] != last
        if answered and self.record:
            info, (user, answer) = self.conversation.engine.info, self.conversation.turns[-2:]
            self.record(info.model, info.method, user.text, Sanitizer().feed(answer.text), answer.stop or "")
        if answered and (cut := CUT.get(self.conversation.turns[-1].stop or "")):
            self.console.notice(cut)
        if self.interrupts.leave:
            raise KeyboardInterrupt
        if self.interrupts.stop and self.prompt:
            what = "what was said is kept" if answered else "everything is as before"
            self.console.notice(f"stopped; {what}, Ctrl-C again leaves")

    def _print(self, pieces: Iterator[Piece]) -> None:
        printer, count, begun = Printer(self.styled), -1, time.perf_counter()
        try:
            for piece in pieces:
                if count < 0:  # reading is no part of the speed
                    begun = time.perf_counter()
                count += len(piece.ids)
                printer.write(piece)
        finally:
            printer.end()
        if count > 0:
            self.speed = count / (time.perf_counter() - begun)

    def outcome(self, done: bool, notice: str) -> None:
        """Say what became of something that Ctrl-C may stop."""
        if self.interrupts.leave:
            raise KeyboardInterrupt
        self.console.notice(notice if done else "stopped; everything is as before")

    def turn(self, text: str) -> int:
        """The number of a turn, by default of the last one. Raises UsageError when there is none."""
        last = self.conversation.exchanges
        if not text.isdecimal() and text:
            raise UsageError(f"{printable(text)} is no turn's number", "", "/tokens lists them")
        number = int(text) if 0 < len(text) < 20 else 0 if text else last  # int() refuses 4,301 digits
        if not 1 <= number <= last:
            why = f"they are 1 to {last:,}" if last else "nothing was said yet"
            raise UsageError(f"there is no turn {brief(text, 20)}".rstrip(), why)
        return number

    def pressed(self, notice: str) -> None:
        """Count a Ctrl-C; raises KeyboardInterrupt when it is the second."""
        self.interrupts.press()
        if self.interrupts.leave:
            raise KeyboardInterrupt
        self.console.notice(notice)

    @contextlib.contextmanager
    def working(self, label: str) -> Iterator[tuple[Any, Callable[[], bool]]]:
        """A progress bar and the cancel flag, while the model works."""
        with self.interrupts.catching(), self.console.progress(label) as progress:
            yield progress, self.interrupts.stopped

    def _ask(self, prompt: Prompt) -> str | None:
        """What was typed; None at Ctrl-D. The first Ctrl-C clears the line."""
        while True:
            try:
                return prompt.ask(self._toolbar(), self.keys, self.multiline)
            except EOFError:
                return None
            except KeyboardInterrupt:
                self.pressed("Ctrl-C again or Ctrl-D leaves")

    def _toolbar(self) -> str:
        """Made once for each prompt: typing costs nothing."""
        info, state = self.conversation.engine.info, self.conversation.coverage()
        if attention.method_class(info.method).unlimited:
            share, of = (
                state.visible / max(state.seen, 1),
                f"{state.visible:,} of {state.seen:,} tokens visible",
            )
        else:
            share, of = state.seen / info.window, f"{state.seen:,} of {info.window:,} tokens"
        speed = f"  {self.speed:,.0f} tok/s" if self.speed else ""
        several = "  Alt-Enter sends" if self.multiline else ""
        return f" {info.model}  {info.method}  {bar.gauge(share)} {of}{speed}{several}"
