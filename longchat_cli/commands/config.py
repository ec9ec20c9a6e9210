"""`longchat config`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import click
from click.shell_completion import CompletionItem

from longchat_cli import settings
from longchat_cli.attention import METHODS
from longchat_cli.commands import configured
from longchat_cli.commands.configured import Settings, Value
from longchat_cli.commands.context import current_console
from longchat_cli.commands.framework import Command, Group
from longchat_cli.commands.method_options import method_options
from longchat_cli.errors import UsageError
from longchat_cli.settings import File
from longchat_cli.terminal_text import Sanitizer, json_text


class Plain(Command):
    """A command that works whatever the configuration is like."""

    configurable = False


class PlainGroup(Group):
    """A group of such commands."""

    command_class = Plain


for_project = click.option("--project", is_flag=True, help="The project file instead of the user file.")
with_origin = click.option("--origin", is_flag=True, help="Say where each value comes from.")


@click.group("config", cls=PlainGroup)
def config() -> None:
    """Show and change what options are when they are not given.

    Every option of every command is a key: `model` for all commands, `ask.model` for one, `sink.window` or
    `ask.sink.window` for a method's options. Flags win over LONGCHAT_* variables, these over the project file
    (longchat.toml in this directory or above), that over the user file.
    """


def complete_keys(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Keys of commands' options."""
    keys = (
        (".".join((*path, key)), option)
        for path, command in configured.commands(_root(ctx))
        for key, option in configured.options_of(command).items()
    )
    return [CompletionItem(key, help=option.help) for key, option in keys if key.startswith(incomplete)]


@config.command("show")
@click.argument("command", required=False)
@with_origin
@click.option("--all", "everything", is_flag=True, help="Defaults, too.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def show(command: str | None, origin: bool, everything: bool, as_json: bool) -> None:
    """What is set, for all commands or one."""
    rows = [
        (key, value)
        for key, value in _effective(_root(), _loaded(), everything)
        if command is None or key.startswith(f"{command}.")
    ]
    if command is not None and command not in _root().commands:
        raise UsageError(f"there is no command '{command}'", "", configured.meant(command, _root().commands))
    if as_json:
        listed = [{"key": key, "value": value.value, "origin": value.origin} for key, value in rows]
        click.echo(json_text(listed, indent=2, default=str))
        return
    for key, value in rows:
        line = f"# {key} is not set" if value.value is None else f"{key} = {_toml(value.value)}"
        click.echo(Sanitizer().feed(line + (f"  # {value.origin}" if origin else "")))


@config.command("get")
@click.argument("key", shell_complete=complete_keys)
@with_origin
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def get(key: str, origin: bool, as_json: bool) -> None:
    """The value of one key, as it counts here."""
    path, options, names = _target(key)
    found = configured.variable(options[0], path) or _written(_loaded(), path, names)
    value = found or Value(_default(options[0]), "default")
    if as_json:
        click.echo(json_text({"key": key, "value": value.value, "origin": value.origin}, default=str))
        return
    shown = value.value or "" if isinstance(value.value, str | None) else _toml(value.value)
    click.echo(Sanitizer().feed(shown + (f"  # {value.origin}" if origin else "")))


@config.command("set")
@click.argument("key", shell_complete=complete_keys)
@click.argument("values", nargs=-1, required=True)
@for_project
def set_(key: str, values: tuple[str, ...], project: bool) -> None:
    """Set a key; several values for an option that can be repeated."""
    file = _file(project)
    path, options, names = _target(key)
    value = _parsed(options[0], values)
    if project and not all(configured.for_projects(option, value) for option in options):
        raise UsageError(f"{key} cannot be set so for a project", "", "set it in the user file")
    configured.convert(options[0], Value(value, "config set"))
    if configured.key_of(options[0]) == "model":
        from longchat_cli.models import catalog

        catalog.resolve(str(value))  # what would not be found when it is wanted is not written
    file.put([*path, *names], value)
    current_console().notice(f"{key} = {_toml(value)} in {file.path}")


@config.command("unset")
@click.argument("key", shell_complete=complete_keys)
@for_project
def unset(key: str, project: bool) -> None:
    """Remove a key from a file."""
    file = _file(project)
    if not file.drop(key.split(".")):
        raise UsageError(f"{key} is not set in {file.path}", "", "see `longchat config show --origin`")


@config.command("edit")
@for_project
def edit(project: bool) -> None:
    """Open a file in $VISUAL or $EDITOR, and check what was written."""
    file = _file(project)
    if not file.path.exists():
        file.create("# Options of longchat: `longchat config show --all` lists the keys.\n")
    click.edit(filename=str(file.path))
    Settings([File(file.kind, file.path)]).check(_root())


@config.command("path")
@for_project
def path(project: bool) -> None:
    """Where the file is, whether or not it exists."""
    click.echo(_file(project).path)


def _root(ctx: click.Context | None = None) -> click.Group:
    root = (ctx or click.get_current_context()).find_root().command
    assert isinstance(root, click.Group)
    return root


def _loaded() -> Settings:
    return configured.load(_root(), current_console().warn)


def _file(project: bool) -> File:
    return (settings.project_file() or settings.new_project_file()) if project else settings.user_file()


def _target(key: str) -> tuple[configured.Path, list[click.Option], list[str]]:
    """The command's path, the options that the key sets, and the rest of the key behind the path."""
    names = key.split(".")
    command: click.Command = _root()
    path: list[str] = []
    while isinstance(command, click.Group) and names and names[0] in command.commands:
        command = command.commands[names[0]]
        path.append(names.pop(0))
    takers = [command] if path else [command for _, command in configured.commands(_root())]
    known = [configured.options_of(taker) for taker in takers]
    found = [options[names[0]] for options in known if names[:1] == names and names[0] in options]
    if len(names) == 2 and names[0] in METHODS and any("method" in options for options in known):
        fields = method_options(names[0], configured.prefix(tuple(path)))
        of_method = {configured.key_of(option): option for option in fields}
        found = [of_method[names[1]]] if names[1] in of_method else []
        known = [of_method]
    if not found:
        everything = {name for options in known for name in options}
        hint = configured.meant(names[-1], everything) if names else "name one of its options"
        if len(names) == 1 and "method" in everything:
            hint = _of_method(tuple(path), names[0], takers) or hint
        raise UsageError(f"there is no setting {key}", "", hint or "`longchat config show --all` lists them")
    return tuple(path), found, names


def _of_method(path: configured.Path, name: str, takers: list[click.Command]) -> str:
    """Where the method's option `name` is set: of the method that is the default, else of the first one."""
    defaults = [param.default for taker in takers for param in taker.params if param.name == "method"]
    for method in (*(default for default in defaults if default in METHODS), *METHODS):
        if name in {configured.key_of(option) for option in method_options(method, "")}:
            return f"it is an option of methods: {'.'.join((*path, method, name))}"
    return ""


def _written(loaded: Settings, path: configured.Path, names: list[str]) -> Value | None:
    if len(names) == 2:
        return loaded.method(path, names[0]).get(names[1])
    return loaded.find(path, names[0])


def _effective(root: click.Group, loaded: Settings, everything: bool) -> Iterator[tuple[str, Value]]:
    """Key and value of each command's options, then of the methods' options."""
    for path, command in configured.commands(root):
        options = configured.options_of(command)
        for key, option in options.items():
            value = configured.variable(option, path) or loaded.find(path, key)
            if value is None and everything and not option.hidden:
                value = Value(_default(option), "default")
            if value is not None:
                yield ".".join((*path, key)), value
        for method in METHODS if "method" in options else ():
            for key, value in loaded.method(path, method).items():
                name = configured.prefix(path) + key.upper().replace("-", "_")
                value = Value(os.environ[name], name) if os.environ.get(name) else value
                yield ".".join((*path, method, key)), value


def _parsed(option: click.Option, values: tuple[str, ...]) -> Any:
    """The words of a command line as a TOML value."""
    if option.multiple:
        return list(values)
    if len(values) > 1:
        raise UsageError(f"--{configured.key_of(option)} has one value", "", "quote it if it has blanks")
    (value,) = values
    if option.is_flag:
        return click.BOOL.convert(value, option, None)
    if isinstance(option.type, click.types.StringParamType | click.Choice):
        return value
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value


def _default(option: click.Option) -> Any:
    """An option's default as a value; click has a sentinel for none."""
    known = isinstance(option.default, str | int | float | bool | list | tuple)
    return option.default if known else False if option.is_flag else None


def _toml(value: Any) -> str:
    import tomlkit

    return tomlkit.item(list(value) if isinstance(value, tuple) else value).as_string()
