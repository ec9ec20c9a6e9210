"""`longchat chat`."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from longchat_cli.attention import METHODS
from longchat_cli.commands.context import current_console, engine_opener, known_as, read
from longchat_cli.commands.framework import MethodCommand, command
from longchat_cli.commands.options import (
    MODEL,
    SAMPLERS,
    Name,
    Size,
    Words,
    cache_size_option,
    complete_files,
    log_option,
    model_options,
    sampling_options,
    take,
)
from longchat_cli.commands.sessions import complete_chats
from longchat_cli.config import config_dir
from longchat_cli.errors import BadInput, MissingInput, StorageError, UsageError
from longchat_cli.terminal import Console, Interrupts
from longchat_cli.terminal_text import json_text

if TYPE_CHECKING:
    from longchat_cli.ask import Open
    from longchat_cli.chat import Conversation
    from longchat_cli.pages import Store
    from longchat_cli.sampling import Sampling
    from longchat_cli.sessions import About, Chat, Session, Sessions


LEAST = 64
"""Tokens of a window in which a question and a short answer have room."""


def complete_resume(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The kept chats, and `last`."""
    last = [CompletionItem("last", help="the latest one")] if "last".startswith(incomplete) else []
    return last + complete_chats(ctx, param, incomplete)


def complete_roles(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The roles there are."""
    return [CompletionItem(name) for name in sorted(_roles()) if name.startswith(incomplete)]


class Think(click.ParamType):
    """show, hide, or a count."""

    name = "think"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value in ("show", "hide") or isinstance(value, int):
            return value
        try:
            return Size().convert(value, param, ctx)
        except click.BadParameter:
            self.fail(f"'{value}' is neither show nor hide nor a number of tokens", param, ctx)


@command("chat", cls=MethodCommand)
@click.option(
    "--method",
    "-m",
    type=Name(METHODS),
    default="recall",
    show_default=True,
    help="Attention method; `longchat methods` explains them.",
)
@click.option(
    "--with",
    "documents",
    multiple=True,
    metavar="DOC",
    shell_complete=complete_files,
    help="Start from a document; repeatable.",
)
@click.option("--system", type=Words(), metavar="TEXT", help="System prompt; it is never forgotten.")
@click.option("--system-file", metavar="FILE", shell_complete=complete_files, help="The same from a file.")
@click.option(
    "--role",
    metavar="NAME",
    shell_complete=complete_roles,
    help="The same from the file NAME.md in the folder roles beside the user's configuration file.",
)
@click.option(
    "--think",
    type=Think(),
    metavar="show|hide|N",
    default="show",
    show_default=True,
    help="Thoughts of models that think first: show, hide, or how many tokens of them at most.",
)
@click.option(
    "--resume",
    is_flag=False,
    flag_value="last",
    metavar="[ID]",
    shell_complete=complete_resume,
    help="Go on with a chat that was kept, the last one by default; `longchat sessions ls` shows them.",
)
@click.option("--fork", is_flag=True, help="Go on with a copy of it; the chat itself stays as it is.")
@click.option("--no-save", is_flag=True, help="Keep neither what is said nor the model's state.")
@click.option("--no-cache", is_flag=True, help="Keep no state: to go on with the chat all is read again.")
@click.option("--json", "as_json", is_flag=True, help="A JSON object for each turn.")
@cache_size_option
@click.option(
    "--keys", type=Name(["emacs", "vi"]), default="emacs", show_default=True, help="How lines are edited."
)
@click.option("--plain", is_flag=True, help="Show answers as they are: no colours for their Markdown.")
@log_option
@model_options
@sampling_options(temperature=0.2, top_p=0.9, max_tokens=1024, repetition_penalty=1.1, start_penalty=0.5)
def chat(documents: tuple[str, ...], method: str, method_options: dict[str, Any], **params: Any) -> None:
    """Talk with a model, without end.

    Text piped in is a turn a line, and the chat ends with it. `--with -` reads a document from standard
    input and the keyboard from the terminal. Ctrl-C stops an answer, twice leaves, Ctrl-D leaves.

    Every turn is on disk before the next one: `--resume` goes on where the last chat ended, however it did.
    """
    from longchat_cli import repl
    from longchat_cli.logs import Entry, Recorder
    from longchat_cli.sampling import Sampling

    console = current_console()
    sampling = Sampling(**take(params, SAMPLERS))
    record = Recorder(params["no_log"], console)
    params["system"] = _system(params)
    if params["fork"] and params["resume"] is None:
        params["resume"] = "last"

    def keep(model: str, method: str, question: str, answer: str, stop: str) -> None:
        record(Entry("chat", model, method, question, answer, stop, documents))

    bench = _Bench(method, method_options, documents, params, console)
    click.get_current_context().call_on_close(bench.close)
    conversation, opener, options = bench.resume(params["resume"]) if params["resume"] else bench.new()
    if params["as_json"]:
        _answer_as_json(conversation, sampling, console, keep)
        return
    repl.run(
        conversation,
        opener,
        options,
        sampling=sampling,
        console=console,
        keyboard="/dev/tty" if "-" in documents else None,
        record=keep,
        workbench=repl.Workbench(bench.opener, lambda names: read(names, console), bench.load),
        keys=params["keys"],
        plain=params["plain"],
    )


def _roles() -> dict[str, Path]:
    """Files with system prompts, by the names of roles."""
    return {path.stem: path for path in (config_dir() / "roles").glob("*.md")}


def _system(params: dict[str, Any]) -> str | None:
    """The system prompt, wherever it is said. Raises UsageError, MissingInput, BadInput."""
    from longchat_cli.documents.names import printable

    given = [name for name in ("system", "system_file", "role") if params[name] is not None]
    if len(given) > 1:
        first, second = (f"--{name.replace('_', '-')}" for name in given[:2])
        raise UsageError(f"{first} and {second} are both system prompts", "", "name one")
    if given in ([], ["system"]):
        return params["system"]
    if given == ["system_file"]:
        return _text(Path(params["system_file"]))
    roles = _roles()
    if params["role"] not in roles:
        known = f"there are {', '.join(sorted(roles))}" if roles else "there are none"
        do = f"write {config_dir() / 'roles' / 'NAME.md'}"
        raise MissingInput(f"no role {printable(params['role'])}", known, do)
    return _text(roles[params["role"]])


_LONGEST = 1 << 24
"""Characters of a system prompt."""


def _text(path: Path) -> str:
    from longchat_cli.documents.names import printable

    try:
        with path.open(encoding="utf-8") as file:  # a device may never end
            text = file.read(_LONGEST + 1)
    except UnicodeDecodeError as error:
        raise BadInput(f"{printable(path)} is no text", "it is not UTF-8") from error
    except OSError as error:
        raise MissingInput(f"cannot read {printable(path)}", error.strerror or str(error)) from error
    if len(text) > _LONGEST:
        raise BadInput(f"{printable(path)} is no system prompt", f"it has more than {_LONGEST:,} characters")
    return text.strip()


Made = tuple["Conversation", "Open", dict[str, Any]]
"""A conversation, what opens its model under other methods, and the options of its method."""


class _Bench:
    """Makes conversations as the command line has it."""

    def __init__(
        self,
        method: str,
        options: Mapping[str, Any],
        names: tuple[str, ...],
        params: dict[str, Any],
        console: Console,
    ) -> None:
        self.method, self.options, self.params, self.console = method, dict(options), params, console
        self.names = names
        self.documents = read(names, console).documents if names else []
        self._openers: dict[str, Open] = {}
        self._made: list[Conversation] = []

    def close(self) -> None:
        """Others may write the chats."""
        for conversation in self._made:
            if conversation.session:
                conversation.session.close()

    def opener(self, model: str | None) -> Open:
        """What opens that model, loaded once."""
        from longchat_cli.chat import lasting
        from longchat_cli.models import catalog

        name = lasting(model or catalog.default())
        if name not in self._openers:
            wanted = {**take(self.params, MODEL), "model": model}
            self._openers[name] = engine_opener(wanted, self.console)
        return self._openers[name]

    def new(self) -> Made:
        """A new chat."""
        from longchat_cli.chat import Conversation
        from longchat_cli.pinned import open_pinned
        from longchat_cli.sessions import Session, Sessions

        opener, system = self.opener(self.params["model"]), self.params["system"]
        engine = open_pinned(opener, self.method, self.options, system, self.documents)
        session = None if self.params["no_save"] else Session(Sessions(), self.console)
        store = self._store(session is not None, engine.info.model, self.method)
        made = Conversation(engine, system, self.documents, session, store)
        return self._ready(made), opener, self.options

    def resume(self, name: str) -> Made:
        """As `load`; what the command line names wins over what the chat is with."""
        said = any(map(self._given, ("system", "system_file", "role")))
        made = self.load(name, self.params["fork"], self._given("model"), self._given("method"), said)
        for option in self.options.keys() - made[2].keys():
            why = f"the chat goes on under {made[0].engine.info.method}"
            raise UsageError(f"--{option.replace('_', '-')} is not an option of this method", why)
        made[0].add(self.documents)
        return made

    def load(
        self, name: str, fork: bool = False, model: bool = False, method: bool = False, system: bool = False
    ) -> Made:
        """The chat of that number, or the `last` one, or a copy of it; with what is said here of the model,
        method and system prompt where these are true. Raises MissingInput and UsageError."""
        from longchat_cli.chat import Conversation
        from longchat_cli.pinned import open_pinned
        from longchat_cli.sessions import Sessions

        sessions = Sessions()
        kept = sessions.load(sessions.find(name))
        about, documents = kept.about, kept.documents
        hearsay = model or not about.fingerprint
        opener = self.opener(self.params["model"] if hearsay else about.model)
        prompt = self.params["system"] if system else about.system
        options = self._options(about, self.method if method else about.method)
        if method or system or hearsay:
            own = self.options  # sinks for another opening are another number
            options = {key: value for key, value in options.items() if key in own or key != "sinks"}
            engine = open_pinned(opener, self.method if method else about.method, options, prompt, documents)
        else:
            engine = opener(about.method, options)
        session = None if self.params["no_save"] else self._session(sessions, kept, fork)
        store = self._store(session is not None, engine.info.model, engine.info.method)
        made = Conversation(engine, prompt, documents, session, store, kept)
        return self._ready(made), opener, options

    def _ready(self, conversation: Conversation) -> Conversation:
        window = conversation.engine.info.options.get("window", LEAST)
        if window < LEAST:
            self.console.warn(f"with --window {window:,} the model forgets words as they are said")
        think = self.params["think"]
        conversation.think = think if isinstance(think, int) else None
        conversation.shows_thoughts = think != "hide"
        self._made.append(conversation)
        return conversation

    def _options(self, about: About, method: str) -> dict[str, Any]:
        """Those of a chat and those of the command line, as far as the chat's method has them."""
        from longchat_cli.attention import method_class

        if method != about.method:
            return dict(self.options)
        known = {field.name for field in dataclasses.fields(method_class(method))}
        return {key: value for key, value in {**about.options, **self.options}.items() if key in known}

    def _session(self, sessions: Sessions, kept: Chat, fork: bool) -> Session:
        """The kept chat itself, or a copy of it: where that is wanted, and where another process has it."""
        from longchat_cli.sessions import InUse, Session

        if not fork:
            try:
                return Session(sessions, self.console, kept)
            except InUse as error:
                self.console.warn(f"{error}; this is a copy of it")
            except StorageError as error:
                do = "make it writable, or go on without keeping what is said: --no-save"
                raise StorageError(error.what, error.why, do) from error
        return Session(sessions, self.console, None, kept.about.id, kept.about.exchanges)

    def _store(self, saved: bool, model: str, method: str) -> Store | None:
        """Where the state is kept; never of what is not to be kept itself."""
        from longchat_cli.pages import Store
        from longchat_cli.sessions import OPENING

        if not saved or self.params["no_cache"]:
            return None
        names = [known_as(name) for name in self.names] or [OPENING]
        about = {"documents": names, "model": model, "method": method}
        return Store(budget=self.params["cache_size"], console=self.console, about=about)

    def _given(self, name: str) -> bool:
        """Whether the command line says it, and not a file or a variable."""
        return click.get_current_context().get_parameter_source(name) == ParameterSource.COMMANDLINE


def _answer_as_json(
    conversation: Conversation, sampling: Sampling, console: Console, record: Callable[..., None]
) -> None:
    """Each line of standard input that is not blank is a turn. Raises KeyboardInterrupt at Ctrl-C."""
    interrupts = Interrupts()
    conversation.notice = console.notice
    with interrupts.catching(), console.progress("reading") as bar:
        if not conversation.begin(bar, interrupts.stopped):
            raise KeyboardInterrupt
    if conversation.turns:
        console.notice(f"reused {conversation.reused:,} of {conversation.coverage().seen:,} tokens")
    for line in sys.stdin.buffer:
        if text := line.decode("utf-8", "replace").strip():
            before, times = conversation.exchanges, [time.perf_counter()]
            with interrupts.catching(), console.progress("reading") as bar:
                for _ in conversation.send(text, sampling, bar, interrupts.stopped):
                    times.append(time.perf_counter())
            if conversation.exchanges > before:
                told = _told(conversation, times)
                click.echo(json_text(told))
                record(told["model"], told["method"], text, told["answer"], told["stop"])
            if interrupts.stop:
                raise KeyboardInterrupt


def _told(conversation: Conversation, times: Sequence[float]) -> dict[str, Any]:
    """The last exchange as `chat --json` prints it; `times` are when it was sent and each piece came."""
    user, answer = conversation.turns[-2:]
    info, state = conversation.engine.info, conversation.coverage()
    first, last = times[min(1, len(times) - 1)], times[-1]
    speed = (len(answer.ids) - 1) / (last - first) if len(answer.ids) > 1 and last > first else 0.0
    timings = {"prefill_s": first - times[0], "decode_s": last - first, "tokens_per_s": speed}
    return {
        "session": conversation.session.id if conversation.session else None,
        "turn": conversation.exchanges,
        "user": user.text,
        "answer": answer.text,
        "thoughts": answer.thoughts,
        "stop": answer.stop,
        "model": info.model,
        "method": info.method,
        "usage": {"prompt_tokens": len(user.ids), "answer_tokens": len(answer.ids)},
        "timings": {name: round(seconds, 4) for name, seconds in timings.items()},
        "coverage": {
            "seen": state.seen,
            "visible": state.visible,
            "forgotten": state.forgotten,
            "bytes": state.bytes,
        },
    }
