"""click commands with global options, environment variables and the options of a method."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, get_type_hints

import click

from longchat_cli.attention import METHODS, method_class
from longchat_cli.commands.options import Name, Size


def _set_global(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and param.name:
        ctx.find_root().meta[param.name] = True
        if param.name == "offline":
            os.environ["LONGCHAT_OFFLINE"] = "1"


def global_options(hidden: bool) -> list[click.Parameter]:
    """Options of `longchat` itself; every command takes them, too, and does not show them in its help."""
    helps = {
        "debug": "Show tracebacks.",
        "offline": "Never use the network.",
        "verbose": "Say more on stderr.",
        "quiet": "No notices and no progress on stderr.",
    }
    return [
        click.Option(
            [f"--{name}"],
            is_flag=True,
            expose_value=False,
            callback=_set_global,
            help=text,
            hidden=hidden,
            envvar=None if hidden else f"LONGCHAT_{name.upper()}",
        )
        for name, text in helps.items()
    ]


class Command(click.Command):
    """A command that also takes the global options, and whose options have two environment variables."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params += global_options(hidden=True)
        for param in self.params:
            if isinstance(param, click.Option) and param.name and param.envvar is None:
                name = param.name.upper()
                param.envvar = [f"LONGCHAT_{str(self.name).upper()}_{name}", f"LONGCHAT_{name}"]


class Group(click.Group):
    """Commands in the order they were written, each a `Command`."""

    command_class = Command
    group_class = type

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


class MethodCommand(Command):
    """A command with `--method`: the chosen method's dataclass fields become options.

    The method is imported, and torch with it, only when an argument or variable is not one of the command's
    own, or its help is asked for. Options that were given arrive in the parameter `method_options`.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[__name__] = self._method_params(args)
        given: dict[str, Any] = {}
        ctx.params["method_options"] = given
        rest = super().parse_args(ctx, args)
        for param in ctx.meta[__name__]:
            value = ctx.params.pop(param.name)
            if value is not None:
                given[param.name.removeprefix(_METHOD_PREFIX)] = value
        return rest

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return super().get_params(ctx) + ctx.meta.get(__name__, [])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if not ctx.meta[__name__]:
            formatter.write_paragraph()
            command = f"{ctx.command_path} --method sink --help"
            formatter.write_text(f"Each method has options of its own: `{command}` shows them.")
        super().format_epilog(ctx, formatter)

    def _method_params(self, args: Sequence[str]) -> list[click.Parameter]:
        own = {flag for param in self.params for flag in (*param.opts, *param.secondary_opts)} | {"--help"}
        flags = {arg.split("=")[0] for arg in _before_dashes(args) if arg.startswith("--")}
        prefix = f"LONGCHAT_{str(self.name).upper()}_"
        variables = {
            name.removeprefix(prefix).lower().replace("_", "-")
            for name in os.environ
            if name.startswith(prefix)
        }
        named = self._named_method(args)
        foreign = flags - own or {f"--{name}" for name in variables} - own
        if not foreign and not (named and "--help" in flags):
            return []
        default = next(param.default for param in self.params if param.name == "method")
        method = named or str(default)
        method = "recall" if method == "auto" else method  # what auto adds to full has the options
        return _method_options(method, prefix) if method in METHODS else []

    def _named_method(self, args: Sequence[str]) -> str | None:
        args = list(_before_dashes(args))
        for index, arg in enumerate(args):
            if arg in ("--method", "-m"):
                return args[index + 1] if index + 1 < len(args) else None
            if arg.startswith("--method="):
                return arg.partition("=")[2]
            if arg.startswith("-m") and not arg.startswith("--"):
                return arg[2:].removeprefix("=")
        upper = str(self.name).upper()
        return os.environ.get(f"LONGCHAT_{upper}_METHOD") or os.environ.get("LONGCHAT_METHOD")


_METHOD_PREFIX = "method_"


def _before_dashes(args: Sequence[str]) -> Sequence[str]:
    return args[: list(args).index("--")] if "--" in args else args


def _method_options(method: str, prefix: str) -> list[click.Parameter]:
    """The fields of a method as click options; a test keeps their names apart from the commands' own."""
    cls = method_class(method)
    types = get_type_hints(cls)
    options: list[click.Parameter] = []
    for field in cls.options():
        flag = "--" + field.name.replace("_", "-")
        yes_no = types[field.name] is bool
        default = ("on" if field.default else "off") if yes_no else field.default
        options.append(
            click.Option(
                [f"{flag}/--no-{flag[2:]}" if yes_no else flag, _METHOD_PREFIX + field.name],
                default=None,
                type=None if yes_no else _click_type(types[field.name], field.metadata.get("choices")),
                help=f"[{method}] {field.metadata.get('help', '')} [default: {default}]",
                envvar=prefix + field.name.upper(),
            )
        )
    return options


def _click_type(kind: Any, choices: Sequence[str] | None) -> click.ParamType:
    if choices:
        return Name(list(choices))
    return {int: Size(), float: click.FLOAT}.get(kind, click.STRING)


def command(name: str, cls: type[Command] = Command) -> Callable[[Callable[..., None]], Command]:
    """Decorator: a command of `longchat`."""
    return click.command(name, cls=cls)
