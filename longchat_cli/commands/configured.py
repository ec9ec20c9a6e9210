"""What configuration files mean to the commands: their keys are the long options, without the dashes.

Flags win over LONGCHAT_* variables, those over the project file, that over the user file. Within a file, a
key under `[ask]` wins over the same key at the top, which is for every command.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import click

from longchat_cli import settings
from longchat_cli.attention import METHODS
from longchat_cli.errors import BadConfig
from longchat_cli.settings import File

Path = tuple[str, ...]
"""Names of commands, ("models", "list"); () is the top of a file."""
_ONLY_READ = {"data", "peer-models", "schema"}
"""Options that name files and write none."""
_LESS = {"no-log": True, "no-save": True, "no-cache": True, "cache": False}
"""What a project may say of what is kept: less."""
_ARGUMENTS = {"question", "all", "resume", "fork"}
"""Options that say what is asked, gone on with or deleted, not how: they belong to a single call."""
_OWN = {"offline", "with", "cache-size"}
"""Options that are their user's alone: what may be reached, is put in front of the model, or is deleted."""


@dataclass(frozen=True)
class Value:
    """A value as it was written, and where."""

    value: Any
    origin: str


def key_of(option: click.Option) -> str:
    """`--max-tokens` -> max-tokens."""
    return max(option.opts, key=len).lstrip("-")


def options_of(command: click.Command) -> dict[str, click.Option]:
    """A command's options by key, without those that only show something (--help, --version) or ask."""
    options = (param for param in command.params if isinstance(param, click.Option))
    keys = {key_of(option): option for option in options if not option.is_eager}
    return {key: option for key, option in keys.items() if key not in _ARGUMENTS}


def commands(group: click.Group, path: Path = ()) -> Iterator[tuple[Path, click.Command]]:
    """The commands that can be configured, with their names."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        elif getattr(command, "configurable", True):
            yield (*path, name), command


class Settings:
    """The configuration files that apply here; the first one wins."""

    def __init__(self, files: Iterable[File]) -> None:
        self.files = [file for file in files if file.table]

    def find(self, path: Path, key: str) -> Value | None:
        """The value of a command's option, as it was written. Raises BadConfig."""
        for file in self.files:
            for section in dict.fromkeys((path, ())):
                value = file.section(section).get(key)
                if value is not None and not isinstance(value, dict):
                    return Value(value, str(file))
        return None

    def method(self, path: Path, method: str) -> dict[str, Value]:
        """The options set for a method, under `[sink]` or `[ask.sink]`."""
        found: dict[str, Value] = {}
        for file in reversed(self.files):
            for section in dict.fromkeys(((), path)):
                table = file.section((*section, method))
                found |= {key: Value(value, str(file)) for key, value in table.items()}
        return found

    def check(self, root: click.Group) -> None:
        """Raises BadConfig for the first unknown key or value that no command takes; methods' own aside."""
        for file in self.files:
            _check(file, file.table, root, ())

    def defaults(self, path: Path, command: click.Command) -> dict[str, Any]:
        """click's default map of a command. Raises BadConfig."""
        found = {option: self.find(path, key) for key, option in options_of(command).items()}
        return {str(option.name): convert(option, value) for option, value in found.items() if value}


def load(root: click.Group, warn: Any) -> Settings:
    """The settings of this user in this directory, checked. Raises BadConfig."""
    project = settings.project_file()
    if project and settings.is_foreign(project):
        warn(f"{project.path} is not read: it belongs to somebody else")
        project = None
    found = Settings(file for file in (project, settings.user_file()) if file)
    found.check(root)
    return found


def convert(option: click.Option, given: Value) -> Any:
    """A value as click takes it from the command line. Raises BadConfig."""
    key, value = key_of(option), given.value
    what = f"{given.origin}: {key} = {value!r} will not do"
    if option.is_flag:
        if not isinstance(value, bool):
            raise BadConfig(what, "it is true or false")
        return value
    many = value if isinstance(value, list) else [value]
    if not all(isinstance(part, str | int | float) and not isinstance(part, bool) for part in many):
        raise BadConfig(what, "it is a text or a number")
    if isinstance(value, list) and not option.multiple:
        raise BadConfig(what, "it is a single value")
    texts = [str(part) for part in many]
    try:
        for text in texts:
            option.type.convert(text, option, None)
    except click.BadParameter as error:
        raise BadConfig(what, error.message) from error
    return texts if option.multiple else texts[0]


def convert_all(options: Iterable[click.Option], written: Mapping[str, Value]) -> dict[str, Any]:
    """click's defaults for a method's options of which some were `written`. Raises BadConfig."""
    known = {key_of(option): option for option in options}
    for key, given in written.items():
        if key not in known:
            raise BadConfig(f"{given.origin}: there is no method option {key}", "", meant(key, known))
    return {str(known[key].name): convert(known[key], given) for key, given in written.items()}


def _check(file: File, table: Mapping[str, Any], group: click.Group, path: Path) -> None:
    for key, value in table.items():
        where = (*path, key)
        command = group.commands.get(key)
        if not isinstance(value, dict):
            everywhere = [] if path else [options_of(command) for _, command in commands(group)]
            takers = [options[key] for options in everywhere if key in options]
            _check_value(file, where, value, takers, {name for options in everywhere for name in options})
        elif isinstance(command, click.Group):
            _check(file, value, command, where)
        elif command is not None:
            _check_command(file, value, command, where)
        elif path or key not in METHODS:
            sections = [*group.commands, *METHODS]
            raise BadConfig(f"{file}: there is no [{'.'.join(where)}]", "", meant(key, sections))


def _check_command(file: File, table: Mapping[str, Any], command: click.Command, path: Path) -> None:
    options = options_of(command)
    for key, value in table.items():
        if isinstance(value, dict) and "method" in options and key in METHODS:
            continue
        takers = [options[key]] if key in options else []
        _check_value(file, (*path, key), value, takers, options)


def _check_value(
    file: File, where: Path, value: Any, takers: list[click.Option], known: Iterable[str]
) -> None:
    key = ".".join(where)
    if not takers:
        raise BadConfig(f"{file}: there is no setting {key}", "", meant(where[-1], known))
    errors = []
    for option in takers:
        try:
            convert(option, Value(value, str(file)))
        except BadConfig as error:
            errors.append(error)
            continue
        if file.kind == "project" and not for_projects(option, value):
            raise BadConfig(f"{file}: {key} cannot be set so for a project", "", "set it in the user file")
    if len(errors) == len(takers):
        raise errors[0]


def for_projects(option: click.Option, value: Any) -> bool:
    """Whether a project file may set it so. That comes with a folder from who knows where, and must neither
    name a file that is written over or put in front of the model, nor keep or delete what its user would
    not."""
    key = key_of(option)
    writes = option.metavar in ("FILE", "DIR") and key not in _ONLY_READ
    return not writes and key not in _OWN and (key not in _LESS or _LESS[key] == value)


def meant(name: str, names: Iterable[str]) -> str:
    """Did you mean ...?"""
    close = difflib.get_close_matches(name.replace("_", "-"), list(names), 1)
    return f"did you mean {close[0]}?" if close else ""


def variable(option: click.Option, path: Path) -> Value | None:
    """What LONGCHAT_ASK_MODEL or LONGCHAT_MODEL gives an option; at the top only the latter."""
    names = [option.envvar] if isinstance(option.envvar, str) else list(option.envvar or ())
    name = next((name for name in (names if path else names[1:]) if os.environ.get(name)), None)
    return Value(os.environ[name], name) if name else None


def prefix(path: Path) -> str:
    """What the variables of a command's options begin with: LONGCHAT_ASK_."""
    return f"LONGCHAT_{path[-1].upper()}_" if path else "LONGCHAT_"
