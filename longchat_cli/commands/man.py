"""`longchat man`: the manual page, made of the help of every command and method."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import click

from longchat_cli import __version__
from longchat_cli.attention import METHODS, method_class
from longchat_cli.commands.framework import command
from longchat_cli.commands.method_options import method_options

FILES = {
    "~/.config/longchat/config.toml": "Options, for every directory ($LONGCHAT_CONFIG_DIR).",
    "longchat.toml": "Options for a project, in its folder or above.",
    "~/.local/share/longchat": "Models, and the log of answers ($LONGCHAT_DATA_DIR).",
    "~/.cache/longchat": "Converted weights and KV states; safe to delete ($LONGCHAT_CACHE_DIR).",
    "~/.local/state/longchat": "Histories ($LONGCHAT_STATE_DIR).",
}


@command("man")
def man() -> None:
    """Print the manual page; `longchat man > ~/.local/share/man/man1/longchat.1` installs it."""
    root = click.get_current_context().find_root().command
    assert isinstance(root, click.Group)
    for line in page(root):
        click.echo(line)


def page(root: click.Group) -> Iterator[str]:
    """The lines of longchat(1) in man(7) macros."""
    context = click.Context(root, info_name="longchat")
    about = root.get_short_help_str(200).removesuffix(".")
    yield f'.TH LONGCHAT 1 "" "longchat {__version__}" "User Commands"'
    yield from (".SH NAME", f"longchat \\- {_escaped(about)}")
    yield from (".SH SYNOPSIS", _synopsis(context), ".SH OPTIONS")
    yield from _options(root.get_params(context), context)
    yield ".SH COMMANDS"
    yield from _commands(root, context)
    yield ".SH METHODS"
    for name in METHODS:
        cls = method_class(name)
        yield from (
            f".SS {_escaped(name)}",
            _escaped(f"{cls.summary}. Keeps {cls.keeps}. Forgets {cls.forgets}."),
        )
        yield from _options(method_options(name, ""), context)
    for title, text in _sections(root.epilog or ""):
        yield from (f".SH {title}", *_paragraphs(text))
    yield ".SH FILES"
    for path, text in FILES.items():
        yield from (".TP", f"\\fI{_escaped(path)}\\fR", _escaped(text))


def _commands(group: click.Group, above: click.Context) -> Iterator[str]:
    for name in group.list_commands(above):
        command = group.commands[name]
        context = click.Context(command, info_name=name, parent=above)
        if isinstance(command, click.Group):
            yield from _commands(command, context)
            continue
        yield from (f".SS {_escaped(context.command_path)}", _synopsis(context), ".PP")
        yield from _paragraphs(command.help or "")
        yield from _options(command.params, context)


def _synopsis(context: click.Context) -> str:
    pieces = " ".join(context.command.collect_usage_pieces(context))
    return f"\\fB{_escaped(context.command_path)}\\fR {_escaped(pieces)}"


def _options(params: Iterable[click.Parameter], context: click.Context) -> Iterator[str]:
    for param in params:
        record = param.get_help_record(context)
        if record:
            yield from (".TP", f"\\fB{_escaped(record[0])}\\fR", _escaped(record[1]))


def _sections(epilog: str) -> Iterator[tuple[str, str]]:
    """The help's last part has two: exit codes, and where options come from."""
    for block in epilog.split("\n\n"):
        first, _, rest = block.removeprefix("\b\n").partition("\n")
        if first.endswith(":"):
            yield first.removesuffix(":").upper(), f"\b\n{rest}"
        else:
            yield "ENVIRONMENT", f"{first}\n{rest}"


def _paragraphs(text: str) -> Iterator[str]:
    """click's help: paragraphs, and behind \\b lines that stay as they are."""
    for paragraph in re.split(r"\n\s*\n", text.strip("\n")):
        as_it_is = paragraph.lstrip().startswith("\b")
        lines = [line for line in paragraph.replace("\b", "").splitlines() if line.strip()]
        if as_it_is:
            yield from (".PP", ".nf", *map(_escaped, lines), ".fi")
        else:
            yield from (".PP", _escaped(" ".join(line.strip() for line in lines)))


def _escaped(text: str) -> str:
    text = text.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq").replace("`", "\\(ga")
    return f"\\&{text}" if text.startswith(".") else text
