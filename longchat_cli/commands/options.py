"""Parameter types, and the options that several commands have."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from typing import Any

import click
from click.shell_completion import CompletionItem

from longchat_cli.attention import METHODS
from longchat_cli.errors import UsageError
from longchat_cli.terminal_text import replace_surrogates


def complete_files(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The shell completes names of files."""
    return [CompletionItem(incomplete, type="file")]


def complete_models(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of models, and files: a path is a model, too."""
    from longchat_cli.models import catalog

    known = [entry for entry in catalog.entries() if entry.name.startswith(incomplete)]
    return [CompletionItem(entry.name, help=entry.title) for entry in known] or complete_files(
        ctx, param, incomplete
    )


def complete_methods(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of methods."""
    return [CompletionItem(name) for name in METHODS if name.startswith(incomplete)]


class Words(click.ParamType):
    """Words for a model; bytes of the command line that are no UTF-8 become replacement characters."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return replace_surrogates(str(value))


class Size(click.ParamType):
    """A count that may be written 32k or 4GiB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from longchat_cli.config import parse_size

        if isinstance(value, int):
            return value
        try:
            return parse_size(value)
        except UsageError as error:
            self.fail(str(error), param, ctx)


class Sizes(Size):
    """Counts with commas between: 4k,16k,64k."""

    name = "sizes"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, tuple):
            return value
        return tuple(super(Sizes, self).convert(part, param, ctx) for part in value.split(","))


class Name(click.Choice):
    """A choice that says which one was probably meant."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value in self.choices:
            return value
        close = difflib.get_close_matches(str(value), self.choices, 1)
        hint = f"did you mean '{close[0]}'?" if close else f"choose from {', '.join(self.choices)}"
        return self.fail(f"there is no '{value}'; {hint}", param, ctx)


Decorator = Callable[[Any], Any]


def _stack(*decorators: Decorator) -> Decorator:
    def apply(function: Any) -> Any:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return apply


model_options = _stack(
    click.option(
        "--model",
        metavar="NAME",
        shell_complete=complete_models,
        help="Catalogue name, path or hub id. [default: smollm2, see `models`]",
    ),
    click.option("--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:1, mps."),
    click.option(
        "--dtype",
        default="auto",
        show_default=True,
        type=Name(["auto", "bfloat16", "float16", "float32"]),
        help="Number format of weights and cache.",
    ),
    click.option(
        "--quantize",
        default="none",
        show_default=True,
        type=Name(["none", "int8", "nf4"]),
        help="Quantize weights while loading.",
    ),
    click.option(
        "--kernel",
        metavar="NAME",
        help="Force one attention kernel: native, sdpa, flash, triton, reference.",
    ),
    click.option(
        "--compile",
        is_flag=True,
        help="Decode window, sink or lm-infinite in one step of fixed shapes: a CUDA graph on a GPU.",
    ),
)


def method_option(about: str) -> Decorator:
    """--method with `auto`, where a command chooses by the text."""
    return click.option(
        "--method",
        "-m",
        type=Name(["auto", *METHODS]),
        default="auto",
        show_default=True,
        help=about,
    )


def chance_options(
    temperature: float, top_p: float, repetition_penalty: float, start_penalty: float
) -> Decorator:
    """What a next token's chance is, with the defaults of a command."""
    return _stack(
        click.option(
            "--temperature",
            type=float,
            default=temperature,
            show_default=True,
            help="0: the likeliest token.",
        ),
        click.option("--top-p", type=float, default=top_p, show_default=True, help="1: off."),
        click.option(
            "--repetition-penalty",
            type=float,
            default=repetition_penalty,
            show_default=True,
            help="On what the model itself said last; 1: off.",
        ),
        click.option(
            "--start-penalty",
            type=float,
            default=start_penalty,
            show_default=True,
            help="On beginning as earlier answers of the chat did; 0: off.",
        ),
    )


def sampling_options(
    temperature: float,
    top_p: float,
    max_tokens: int,
    repetition_penalty: float = 1.0,
    start_penalty: float = 0.0,
) -> Decorator:
    """The samplers, with the defaults of a command."""
    return _stack(
        click.option(
            "--max-tokens", type=Size(), default=max_tokens, show_default=True, help="Longest answer."
        ),
        chance_options(temperature, top_p, repetition_penalty, start_penalty),
        click.option("--top-k", type=int, default=0, show_default=True, help="0: off."),
        click.option("--min-p", type=float, default=0.0, show_default=True, help="0: off."),
        click.option("--stop", multiple=True, metavar="TEXT", help="End the answer at TEXT; repeatable."),
        click.option("--seed", type=int, help="Repeat the same sampling."),
    )


reading_options = _stack(
    click.option(
        "--include", multiple=True, metavar="GLOB", help="Of folders and archives only these; repeatable."
    ),
    click.option(
        "--exclude", multiple=True, metavar="GLOB", help="Of folders and archives not these; repeatable."
    ),
    click.option(
        "--boilerplate",
        default="drop",
        show_default=True,
        type=Name(["drop", "keep"]),
        help="Licences, navigation, running heads.",
    ),
    click.option("--strict", is_flag=True, help="Exit 4 when anything had to be skipped."),
)
cache_size_option = click.option(
    "--cache-size",
    type=Size(),
    default="10GiB",
    show_default=True,
    help="Most that is kept, of all texts.",
)
cache_options = _stack(
    click.option(
        "--cache/--no-cache",
        default=None,
        help="Keep what reading leaves behind, of standard input and short texts, too; or keep and use "
        "nothing. [default: kept of documents of 2,000 tokens or more]",
    ),
    cache_size_option,
)
overflow_option = click.option(
    "--overflow",
    type=Name(["error", "force"]),
    default="error",
    show_default=True,
    help="What to do when the text does not fit the method.",
)
log_option = click.option("--no-log", is_flag=True, help="Keep no copy of the answer for `longchat logs`.")
estimate_option = click.option(
    "--estimate", is_flag=True, help="Say what reading will cost in time, memory and disk, and end there."
)
SAMPLERS = (
    *("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "start_penalty"),
    *("stop", "seed"),
)
MODEL = ("model", "device", "dtype", "quantize", "kernel", "compile")


def take(params: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Those of a command's parameters."""
    return {name: params[name] for name in names}
