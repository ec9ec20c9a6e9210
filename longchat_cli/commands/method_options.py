"""The fields of a method's dataclass as click options."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import click

from longchat_cli import __version__, attention, config
from longchat_cli.attention import METHODS, method_class
from longchat_cli.commands.options import Name, Size

PREFIX = "method_"
"""Keeps the parameters of a method apart from those of a command."""


@dataclasses.dataclass(frozen=True)
class Field:
    """An option of a method: its `kind` is bool, int, float or str."""

    name: str
    kind: str
    default: Any
    help: str
    choices: Sequence[str] = ()

    def option(self, method: str, prefix: str) -> click.Option:
        """`prefix` begins its variable: LONGCHAT_ASK_."""
        flag = "--" + self.name.replace("_", "-")
        yes_no = self.kind == "bool"
        default = ("on" if self.default else "off") if yes_no else self.default
        return click.Option(
            [f"{flag}/--no-{flag[2:]}" if yes_no else flag, PREFIX + self.name],
            default=None,
            type=None if yes_no else self._type(),
            help=f"[{method}] {self.help} [default: {default}]",
            envvar=prefix + self.name.upper(),
        )

    def _type(self) -> click.ParamType:
        if self.choices:
            return Name(list(self.choices))
        return {"int": Size(), "float": click.FLOAT}.get(self.kind, click.STRING)


def fields(method: str) -> list[Field]:
    """The options of a method. Imports it, and torch with it."""
    cls = method_class(method)
    types = get_type_hints(cls)
    return [
        Field(
            field.name,
            types[field.name].__name__,
            field.default,
            field.metadata.get("help", ""),
            tuple(field.metadata.get("choices", ())),
        )
        for field in cls.options()
    ]


def method_options(method: str, prefix: str) -> list[click.Option]:
    """The options of a method; a test keeps their names apart from the commands' own."""
    return [field.option(method, prefix) for field in fields(method)]


def remembered_options(method: str) -> list[click.Option]:
    """The same for completion, which cannot wait for torch at every key: kept in the cache directory."""
    sources = Path(attention.__file__).parent.glob("*.py")
    file = (
        config.cache_dir() / f"options-{__version__}-{max(path.stat().st_mtime_ns for path in sources)}.json"
    )
    known: dict[str, Iterable[dict[str, Any]]]
    try:
        known = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        known = {name: [dataclasses.asdict(field) for field in fields(name)] for name in METHODS}
        with contextlib.suppress(OSError):
            config.private(file.parent)
            for old in file.parent.glob("options-*.json"):
                old.unlink()
            file.write_text(json.dumps(known), encoding="utf-8")
    return [
        Field(**{**about, "choices": tuple(about["choices"])}).option(method, "") for about in known[method]
    ]
