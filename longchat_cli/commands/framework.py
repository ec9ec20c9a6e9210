"""click commands with global options, environment variables and the options of a method."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import click

from longchat_cli.attention import METHODS
from longchat_cli.commands import configured
from longchat_cli.commands.method_options import PREFIX, method_options, remembered_options
from longchat_cli.terminal import Console


def _set_global(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and param.name:
        ctx.find_root().meta[param.name] = True
        if param.name in ("offline", "debug"):  # where they are looked at there is no context
            os.environ[f"LONGCHAT_{param.name.upper()}"] = "1"


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
    """A command with the global options, whose options have two environment variables and two files."""

    configurable = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params += global_options(hidden=True)
        for param in self.params:
            if isinstance(param, click.Option) and param.name and param.envvar is None:
                name = param.name.upper()
                param.envvar = [f"LONGCHAT_{str(self.name).upper()}_{name}", f"LONGCHAT_{name}"]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        self.prepare(ctx, args)
        return super().parse_args(ctx, args)

    def prepare(self, ctx: click.Context, args: Sequence[str]) -> configured.Settings:
        """Take the defaults of the configuration files, and return what is in these. Raises BadConfig."""
        # Help and completion show what is built in, and come whatever the files are like.
        shows_help = bool(set(ctx.help_option_names) & set(_before_dashes(args)))
        applies = self.configurable and not ctx.resilient_parsing and not shows_help
        root = ctx.find_root().command
        settings = configured.Settings(())
        if applies and isinstance(root, click.Group):
            settings = configured.load(root, Console().warn)
        ctx.default_map = settings.defaults(path_of(ctx), self)
        return settings


def path_of(ctx: click.Context) -> configured.Path:
    """("models", "list") for `longchat models list`."""
    above = path_of(ctx.parent) if ctx.parent else ()
    return (*above, str(ctx.info_name)) if ctx.parent else ()


_SYNONYMS = {"ls": "list", "list": "ls", "rm": "remove", "remove": "rm"}


class Group(click.Group):
    """Commands in the order they were written, each a `Command`."""

    command_class = Command
    group_class = type

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command of this name, or of the name that other groups have for it."""
        other = _SYNONYMS.get(args[0], args[0])
        if args[0] not in self.commands and other in self.commands:
            args = [other, *args[1:]]
        return super().resolve_command(ctx, args)


class MethodCommand(Command):
    """A command with `--method`: the chosen method's dataclass fields become options.

    The method is imported, and torch with it, only when an argument or variable is not one of the command's
    own, or its help is asked for. Options that were given arrive in the parameter `method_options`.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given: dict[str, Any] = {}
        ctx.params["method_options"] = given
        rest = super().parse_args(ctx, args)
        for param in ctx.meta[__name__]:
            value = ctx.params.pop(param.name)
            if value is not None:
                given[param.name.removeprefix(PREFIX)] = value
        return rest

    def prepare(self, ctx: click.Context, args: Sequence[str]) -> configured.Settings:
        settings = super().prepare(ctx, args)
        named = self._named_method(args)
        default = next(param.default for param in self.params if param.name == "method")
        method = str(named or ctx.lookup_default("method") or default)
        method = "recall" if method == "auto" else method  # what auto adds to full has the options
        written = settings.method(path_of(ctx), method)
        shown = named and "--help" in _before_dashes(args)
        wanted = method in METHODS and (written or shown or self._has_foreign(args))
        ctx.meta[__name__] = method_options(method, self._prefix) if wanted else []
        if ctx.resilient_parsing and method in METHODS:
            ctx.meta[__name__] = remembered_options(method)
        ctx.default_map = {**(ctx.default_map or {}), **configured.convert_all(ctx.meta[__name__], written)}
        return settings

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        return super().get_params(ctx) + ctx.meta.get(__name__, [])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if not ctx.meta[__name__]:
            formatter.write_paragraph()
            command = f"{ctx.command_path} --method sink --help"
            formatter.write_text(f"Each method has options of its own: `{command}` shows them.")
        super().format_epilog(ctx, formatter)

    @property
    def _prefix(self) -> str:
        return configured.prefix((str(self.name),))

    def _has_foreign(self, args: Sequence[str]) -> bool:
        """Whether there is a flag or a variable that none of the command's own options takes."""
        own = {flag for param in self.params for flag in (*param.opts, *param.secondary_opts)} | {"--help"}
        flags = {arg.split("=")[0] for arg in _before_dashes(args) if arg.startswith("--")}
        names = {name.removeprefix(self._prefix) for name in os.environ if name.startswith(self._prefix)}
        variables = {f"--{name.lower().replace('_', '-')}" for name in names}
        return bool(flags - own or variables - own)

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


def _before_dashes(args: Sequence[str]) -> Sequence[str]:
    return args[: list(args).index("--")] if "--" in args else args


def command(name: str, cls: type[Command] = Command) -> Callable[[Callable[..., None]], Command]:
    """Decorator: a command of `longchat`."""
    return click.command(name, cls=cls)
