"""Slash commands: a function each, and its line in COMMANDS."""

from __future__ import annotations

import difflib
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from longchat_cli import config
from longchat_cli.attention import METHODS
from longchat_cli.chat import Context
from longchat_cli.documents.names import printable
from longchat_cli.errors import UsageError
from longchat_cli.pinned import open_pinned
from longchat_cli.repl import chats, clipboard, settings
from longchat_cli.repl.bar import Part, bar, legend
from longchat_cli.sessions import Turn
from longchat_cli.terminal import coloured
from longchat_cli.terminal_text import Sanitizer, brief

if TYPE_CHECKING:
    from longchat_cli.ask import Open
    from longchat_cli.repl.loop import Repl


class Left(Exception):
    """The user asked to leave."""


@dataclass(frozen=True)
class Command:
    """A slash command: what it `takes`, its line in /help, and what it does with what follows its name."""

    takes: str
    help: str
    run: Callable[[Repl, str], None]


def take(repl: Repl, text: str) -> None:
    """One input: a command, or a turn (`//` begins a turn that starts with a slash).

    Raises Left, KeyboardInterrupt at two Ctrl-C, and LongchatError for what cannot be done.
    """
    if text.startswith("/") and not text.startswith("//"):
        name, argument = [*text[1:].split(maxsplit=1), "", ""][:2]
        command, argument = _find(name), argument.strip()
        if argument and not command.takes:
            raise UsageError(f"/{name} takes nothing behind it", f"this is {printable(argument)}")
        command.run(repl, argument)
    elif text.strip():
        repl.send(text.removeprefix("/") if text.startswith("//") else text)


def choices(repl: Repl, name: str | None) -> Iterable[tuple[str, str]] | str:
    """What completion offers: the commands, or what the command `name` takes."""
    if name is None:
        return [(name, command.help) for name, command in COMMANDS.items()]
    takes = COMMANDS[name].takes if name in COMMANDS else ""
    kind = takes.strip("[").partition(" ")[0].partition(".")[0].rstrip("]")
    if kind in ("FILE", "DOC"):
        return "file"
    return _WORDS[kind](repl) if kind in _WORDS else []


def _find(name: str) -> Command:
    """The command of that name. Raises UsageError."""
    if name not in COMMANDS:
        close = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f"did you mean /{close[0]}?" if close else "/help lists them"
        raise UsageError(
            f"no command /{printable(name)}", "", f"{hint} (//{printable(name)} sends it as text)"
        )
    return COMMANDS[name]


def _help(repl: Repl, argument: str) -> None:
    shown = {argument.removeprefix("/"): _find(argument.removeprefix("/"))} if argument else COMMANDS
    width = max(len(f"{name} {command.takes}") for name, command in shown.items())
    for name, command in shown.items():
        repl.console.say(f"/{name} {command.takes}".ljust(width + 3) + command.help)
    if not argument:
        repl.console.say(_KEYS)


_KEYS = """\
Alt-Enter adds a line, Ctrl-R searches the history, Ctrl-X Ctrl-E opens $EDITOR, Tab completes,
Ctrl-C stops an answer and twice leaves, Ctrl-D leaves, Ctrl-Z suspends; //x sends the words /x"""


def _context(repl: Repl, argument: str) -> None:
    info, seen = repl.conversation.engine.info, repl.conversation.context()
    total = seen.visible + seen.forgotten
    width = min(shutil.get_terminal_size().columns, 100) - 4
    colours, parts = coloured(sys.stderr), context_parts(seen, info.options.get("sinks", 0))
    speed = f", {repl.speed:,.0f} tok/s" if repl.speed else ""
    about = f"{printable(info.model)}, {info.method}, window {info.window:,}"
    since = f", about one subject since turn {seen.subject:,}" if seen.subject else ""
    repl.console.say(
        f"{about}: {_turns(seen.turns)}, {total:,} tokens seen{since}\n"
        f"{bar(parts, width, colours)}\n{legend(parts, colours)}\n"
        f"{config.format_bytes(seen.bytes)} held{speed}"
    )


def context_parts(seen: Context, sinks: int) -> list[Part]:
    """What was said, by how the next turn sees it, under a method that keeps so many first tokens (`sinks`).

    The parts add up to the tokens seen: what is retrieved was read again, behind what was forgotten.
    """
    opening = min(seen.opening, sinks) if seen.forgotten else seen.opening
    parts, rest = [], seen.visible
    for tokens in (opening + seen.pinned, seen.sinks, seen.retrieved):
        parts.append(min(tokens, rest))
        rest -= parts[-1]
    pinned, first, retrieved = parts
    return [
        Part("pinned", pinned, "#", "35", "system prompt, documents, /pin" if pinned else ""),
        Part("sinks", first, "=", "33"),
        Part("visible", rest, "|", "32", _turns(seen.turns - seen.forgotten_turns)),
        Part("retrieved", retrieved, "+", "36"),
        Part("forgotten", seen.forgotten, ".", "90", _turns(seen.forgotten_turns) if seen.forgotten else ""),
    ]


def _new(repl: Repl, argument: str) -> None:
    with repl.working("reading") as (progress, cancel):
        repl.conversation.open(progress, cancel)  # stopped: the next turn reads what was not read
    repl.outcome(True, "a new conversation")


def _undo(repl: Repl, argument: str) -> None:
    taken = repl.conversation.turns[-2:]
    if not taken:
        raise UsageError("there is nothing to take back")
    with repl.working("reading") as (progress, cancel):
        done = repl.conversation.undo(progress, cancel)
    repl.outcome(done, f"taken back: {brief(taken[0].text)}")


def _retry(repl: Repl, argument: str) -> None:
    repl.show(lambda *watching: repl.conversation.retry(repl.sampling, *watching))


def _edit(repl: Repl, argument: str) -> None:
    first, _, text = argument.partition(" ")
    number, text = (repl.turn(first), text.strip()) if first.isdecimal() else (repl.turn(""), argument)
    words = repl.conversation.turns[2 * number - 2].text
    if not text and repl.prompt:
        text = repl.prompt.edit(words)
    if text in ("", words):
        repl.console.notice("nothing was changed")
        return
    repl.show(lambda *watching: repl.conversation.edit(number, text, repl.sampling, *watching))


def _file(repl: Repl, argument: str) -> None:
    added = repl.conversation.added
    if argument == "off":
        added.clear()
    elif argument:
        whole = os.path.exists(os.path.expanduser(argument))  # noqa: PTH110, PTH111
        names = [os.path.expanduser(name) for name in ([argument] if whole else _split(argument))]  # noqa: PTH111
        repl.conversation.add(repl.workbench.documents(names).documents)
    for document in added:
        count = repl.conversation.engine.count(document.text)
        repl.console.say(f"{printable(document.name)}: {count:,} tokens go with your next words")
    if not added:
        repl.console.say("nothing goes with your next words; /file DOC... adds to them")


def _system(repl: Repl, argument: str) -> None:
    if not argument:
        now = repl.conversation.system
        repl.console.say(Sanitizer().feed(now) if now else "no system prompt; /system TEXT sets one")
        return
    system = None if argument == "off" else argument
    _rebuild(repl, system=system)


def _method(repl: Repl, argument: str) -> None:
    info = repl.conversation.engine.info
    if not argument:
        own = ", ".join(f"{name}={value}" for name, value in info.options.items())
        repl.console.say(f"{info.method}: {own}" if own else info.method)
        return
    words = argument.replace(":", " ", 1).replace(",", " ").split()
    if not words:
        raise UsageError("which method?", "", f"choose from {', '.join(METHODS)}")
    from longchat_cli.evaluation.measure import named

    name, *given = words
    method, options = named(f"{name}:{','.join(given)}" if given else name)
    _rebuild(repl, method=method, options=options)


def _model(repl: Repl, argument: str) -> None:
    if not argument:
        info = repl.conversation.engine.info
        repl.console.say(f"{printable(info.model)}: window {info.window:,}, {info.dtype} on {info.device}")
        return
    _rebuild(repl, open_engine=repl.workbench.model(argument))


def _rebuild(
    repl: Repl,
    *,
    open_engine: Open | None = None,
    method: str | None = None,
    options: Mapping[str, Any] | None = None,
    system: Any = ...,
) -> bool:
    """Read the conversation anew under what is given; False when that was stopped, with all as before."""
    conversation = repl.conversation
    open_engine, options = open_engine or repl.open_engine, repl.options if options is None else options
    method = method or conversation.engine.info.method
    system = conversation.system if system is ... else system
    engine = open_pinned(open_engine, method, options, system, conversation.documents)
    with repl.working("reading anew") as (progress, cancel):
        done = conversation.rebuild(engine, system, progress, cancel)
    if done:
        repl.open_engine, repl.options = open_engine, options
    seen = conversation.coverage().seen
    repl.outcome(done, f"{printable(engine.info.model)}, {engine.info.method}: {seen:,} tokens read anew")
    return done


def _set(repl: Repl, argument: str) -> None:
    name, _, value = argument.partition(" ")
    if value.strip():
        settings.put(repl, name, value.strip())
    for known in [settings.known(name)] if name else settings.NAMES:
        repl.console.say(f"{known:<19}{settings.get(repl, known)}")


def _tokens(repl: Repl, argument: str) -> None:
    conversation = repl.conversation
    if argument:
        repl.console.say(f"{conversation.engine.count(argument):,} tokens")
        return
    repl.console.say(f"   0  {len(conversation.opening):>9,}  system prompt and documents")
    for number, (user, answer) in enumerate(_exchanges(repl), 1):
        mark = "#" if user.pinned else " "
        repl.console.say(f"{number:>4}{mark} {len(user.ids) + len(answer.ids):>9,}  {brief(user.text)}")


def _copy(repl: Repl, argument: str) -> None:
    answer = next((turn.text for turn in reversed(repl.conversation.turns) if turn.role == "assistant"), None)
    if answer is None:
        raise UsageError("there is no answer to copy")
    if argument == "code":
        blocks = _BLOCK.findall(answer)
        if not blocks:
            raise UsageError("there is no code in the last answer")
        answer = blocks[-1]
    text = Sanitizer().feed(answer)
    repl.console.notice(f"{len(text):,} characters copied through {clipboard.copy(text)}")


_BLOCK = re.compile(r"^ {0,3}(?:```|~~~)[^\n]*\n(.*?)^ {0,3}(?:```|~~~)", re.MULTILINE | re.DOTALL)


def _multiline(repl: Repl, argument: str) -> None:
    repl.multiline = not repl.multiline
    repl.console.notice("Enter adds a line, Alt-Enter sends" if repl.multiline else "Enter sends")


def _pin(repl: Repl, argument: str) -> None:
    number, on = repl.turn(argument.removesuffix("off").strip()), not argument.endswith("off")
    conversation = repl.conversation
    if conversation.turns[2 * number - 2].pinned == on:
        repl.console.notice(f"turn {number} is {'pinned already' if on else 'not pinned'}")
        return
    if not conversation.pin(number, on):  # some of it is forgotten: it is read again
        store, conversation.store = conversation.store, None  # what is kept was made without the pin
        try:
            done = _rebuild(repl)
        finally:
            conversation.store = store
        if not done:
            conversation.pin(number, False)
            return
        if not conversation.pin(number):
            conversation.pin(number, False)
            method = conversation.engine.info.method
            raise UsageError(f"{method} cannot keep a turn", "", "/method sink and /method recall can")
    repl.console.notice(f"turn {number} is {'pinned' if on else 'no longer pinned'}")


def _quit(repl: Repl, argument: str) -> None:
    raise Left


def _exchanges(repl: Repl) -> Iterable[tuple[Turn, Turn]]:
    turns = repl.conversation.turns
    return zip(turns[::2], turns[1::2], strict=True)


def _turns(count: int) -> str:
    return f"{count:,} turn{'' if count == 1 else 's'}"


def _split(argument: str) -> list[str]:
    """Words as in a shell. Raises UsageError."""
    try:
        return shlex.split(argument)
    except ValueError as error:
        raise UsageError(f"cannot read {printable(argument)}", str(error)) from error


_WORDS: dict[str, Callable[[Repl], Iterable[tuple[str, str]]]] = {
    "COMMAND": lambda repl: [(name, command.help) for name, command in COMMANDS.items()],
    "METHOD": lambda repl: [(name, "") for name in METHODS],
    "CHAT": chats.known,
    "MODEL": lambda repl: [(entry.name, entry.title) for entry in _models()],
    "SETTING": lambda repl: [(name, str(settings.get(repl, name))) for name in settings.NAMES],
    "TURN": lambda repl: [(str(n), brief(user.text)) for n, (user, _) in enumerate(_exchanges(repl), 1)],
}
"""What completion offers for what a command takes."""


def _models() -> Iterable[Any]:
    from longchat_cli.models import catalog

    return (entry for entry in catalog.entries() if entry.kind == "decoder")


COMMANDS: dict[str, Command] = {
    "help": Command("[COMMAND]", "list the commands", _help),
    "context": Command("", "what the model still sees and what it has forgotten", _context),
    "new": Command("", "start a new conversation", _new),
    "undo": Command("", "take the last turn and its answer back", _undo),
    "retry": Command("", "answer the last turn again", _retry),
    "edit": Command("[TURN [TEXT]]", "change a turn (in $EDITOR) and go on from there", _edit),
    "branch": Command("[TURN]", "go on in a copy of the chat, from behind a turn", chats.branch),
    "save": Command("[TITLE]", "name the chat; every turn is kept as it is said", chats.save),
    "load": Command("CHAT", "go on with another chat", chats.load),
    "export": Command("FILE [--force]", "write the chat to FILE.md or FILE.json", chats.export),
    "sessions": Command("", "list the chats that are kept", chats.sessions),
    "search": Command("WORDS", "find turns of any chat by their words", chats.search),
    "file": Command("[DOC...|off]", "what goes with your next words: files, folders, URLs", _file),
    "system": Command("[TEXT|off]", "show or change the system prompt; all is read anew", _system),
    "set": Command(
        "[SETTING [VALUE]]", "show or change how answers are made and shown, until you leave", _set
    ),
    "method": Command(
        "[METHOD [NAME=VALUE]...]", "show or change the attention method; all is read anew", _method
    ),
    "model": Command("[MODEL]", "show or change the model; all is read anew", _model),
    "tokens": Command("[TEXT]", "count the tokens of a text, or of every turn", _tokens),
    "copy": Command("[code]", "copy the last answer, or its last code block", _copy),
    "multiline": Command("", "Enter adds a line and Alt-Enter sends, or back", _multiline),
    "pin": Command("[TURN] [off]", "never forget a turn, or no longer", _pin),
    "quit": Command("", "leave", _quit),
}
