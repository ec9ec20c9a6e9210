"""The commands. Only click and the standard library are imported here: `--help` must answer at once."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, get_type_hints

import click

from longchat_cli import __version__
from longchat_cli.attention import METHODS, method_class
from longchat_cli.errors import InputsSkipped, UsageError
from longchat_cli.terminal import Console, Interrupts, is_tty, open_output

if TYPE_CHECKING:
    from longchat_cli.ask import Answer, MakeFinder, Open, Request
    from longchat_cli.documents import Collection, Options

EPILOG = """\b
Exit codes:
  0 ok                                74 input or output failed, disk full
  1 other                             75 out of memory
  2 usage                             78 configuration
  3 context overflow refused         129 terminal closed (SIGHUP)
  4 inputs skipped under --strict    130 interrupted (Ctrl-C)
  6 over --token-budget              141 reader went away (pipe closed)
 65 bad input data                   143 terminated
 66 input missing, model unknown
 69 model unavailable
 73 output cannot be created

\b
Every option can be set in the environment: LONGCHAT_ASK_MODEL for `ask --model`,
LONGCHAT_MODEL for every command. The command line wins over LONGCHAT_ASK_MODEL,
that over LONGCHAT_MODEL, that over the default.
"""
CUT = {"loop": "the answer repeated itself and was ended", "length": "the answer was cut at --max-tokens"}
MOST = 5
"""Notices of one kind that are shown before the rest is counted."""
GLOBAL_OPTIONS = ("debug", "offline", "verbose", "quiet")


class Size(click.ParamType):
    """A count that may be written 32k or 4GiB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from longchat_cli.config import parse_size

        try:
            return int(value)
        except ValueError:
            pass
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


def _set_global(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and param.name:
        ctx.find_root().meta[param.name] = True
        if param.name == "offline":
            os.environ["LONGCHAT_OFFLINE"] = "1"


def _global_options(hidden: bool) -> list[click.Parameter]:
    helps = {
        "debug": "Show tracebacks.",
        "offline": "Never use the network.",
        "verbose": "Say more on stderr.",
        "quiet": "No notices and no progress on stderr.",
    }
    return [
        click.Option(
            [f"--{name}"], is_flag=True, expose_value=False, callback=_set_global, help=text, hidden=hidden
        )
        for name, text in helps.items()
    ]


class Command(click.Command):
    """A command that also takes the global options, and whose options have two environment variables."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params += _global_options(hidden=True)
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


Decorator = Callable[[Any], Any]


def _stack(*decorators: Decorator) -> Decorator:
    def apply(function: Any) -> Any:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return apply


model_options = _stack(
    click.option(
        "--model", metavar="NAME", help="Catalogue name, path or hub id. [default: smollm2, see `models`]"
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
        "--kernel", metavar="NAME", help="Force one attention kernel: reference, triton, flash, sdpa."
    ),
    click.option(
        "--compile",
        is_flag=True,
        help="Decode window, sink or lm-infinite in one step of fixed shapes: a CUDA graph on a GPU.",
    ),
)


def sampling_options(temperature: float, top_p: float, max_tokens: int) -> Decorator:
    """The samplers, with the defaults of a command."""
    return _stack(
        click.option(
            "--max-tokens", type=Size(), default=max_tokens, show_default=True, help="Longest answer."
        ),
        click.option(
            "--temperature",
            type=float,
            default=temperature,
            show_default=True,
            help="0: the likeliest token.",
        ),
        click.option("--top-p", type=float, default=top_p, show_default=True, help="1: off."),
        click.option("--top-k", type=int, default=0, show_default=True, help="0: off."),
        click.option("--min-p", type=float, default=0.0, show_default=True, help="0: off."),
        click.option("--repetition-penalty", type=float, default=1.0, show_default=True, help="1: off."),
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
SAMPLERS = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "stop", "seed")
MODEL = ("model", "device", "dtype", "quantize", "kernel", "compile")


@click.group(
    cls=Group,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="longchat", message="%(prog)s %(version)s")
def cli() -> None:
    """Chat without end and ask whole books, with a local model and a small KV cache."""


cli.params += _global_options(hidden=False)
for _option in cli.params:
    if _option.name in GLOBAL_OPTIONS:
        _option.envvar = f"LONGCHAT_{_option.name.upper()}"


@cli.command("chat", cls=MethodCommand)
@click.option(
    "--method",
    "-m",
    type=Name([name for name in METHODS if name != "recall"]),
    default="sink",
    show_default=True,
    help="Attention method; `longchat methods` explains them.",
)
@click.option("--with", "documents", multiple=True, metavar="DOC", help="Start from a document; repeatable.")
@click.option("--system", metavar="TEXT", help="System prompt; it is never forgotten.")
@model_options
@sampling_options(temperature=0.2, top_p=0.9, max_tokens=1024)
def chat(documents: tuple[str, ...], method: str, method_options: dict[str, Any], **params: Any) -> None:
    """Talk with a model, without end.

    Text piped in is a turn a line, and the chat ends with it. `--with -` reads a document from standard
    input and the keyboard from the terminal. Ctrl-C stops an answer, twice leaves, Ctrl-D leaves.
    """
    from longchat_cli import repl
    from longchat_cli.sampling import Sampling

    console = _console()
    sampling = Sampling(**_take(params, SAMPLERS))
    collection = _read(documents, console) if documents else None
    repl.run(
        _opener(_take(params, MODEL), console),
        method=method,
        options=method_options,
        system=params["system"],
        documents=collection.documents if collection else [],
        sampling=sampling,
        console=console,
        keyboard="/dev/tty" if "-" in documents else None,
    )


@cli.command("ask", cls=MethodCommand)
@click.argument("words", nargs=-1, metavar="DOC... QUESTION")
@click.option(
    "--question", "-q", "questions", multiple=True, metavar="TEXT", help="A question; repeatable, read once."
)
@click.option(
    "--method",
    "-m",
    type=Name(["auto", *METHODS]),
    default="auto",
    show_default=True,
    help="auto: full if everything fits the window, else recall.",
)
@click.option(
    "--overflow",
    type=Name(["error", "force"]),
    default="error",
    show_default=True,
    help="What to do when the text does not fit the method.",
)
@click.option("--system", metavar="TEXT", help="System prompt.")
@click.option("--output", "-o", metavar="FILE", help="Write the answer to FILE, atomically.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per question, a line each.")
@click.option("--show-prompt", is_flag=True, help="Print the prompt on stderr, control tokens marked.")
@reading_options
@model_options
@sampling_options(temperature=0.0, top_p=1.0, max_tokens=256)
def ask(
    words: tuple[str, ...],
    questions: tuple[str, ...],
    method: str,
    method_options: dict[str, Any],
    output: str | None,
    as_json: bool,
    **params: Any,
) -> None:
    """Ask about files, folders or standard input.

    The last argument is the question; with -q every argument is a document. Standard input is read for '-',
    or when no document is named and something is piped in.
    """
    from longchat_cli.ask import Request, split_arguments
    from longchat_cli.sampling import Sampling

    console = _console()
    names, asked = split_arguments(words, questions, is_tty(sys.stdin))
    sampling = Sampling(**_take(params, SAMPLERS))
    request = Request(tuple(asked), params["system"], method, method_options, params["overflow"], sampling)
    collection = _read(names, console, _options(params))
    _require_all(collection, params["strict"])
    opener = _opener(_take(params, MODEL), console)
    _answer_all(opener, collection, request, console, output, as_json, params["show_prompt"])


def _answer_all(
    opener: Open,
    collection: Collection,
    request: Request,
    console: Console,
    output: str | None,
    as_json: bool,
    show_prompt: bool,
) -> None:
    from longchat_cli import ask as asking
    from longchat_cli.config import format_bytes

    interrupts = Interrupts()
    show = (
        (lambda engine, prompt: click.echo(engine.assembler.show(prompt), err=True)) if show_prompt else None
    )
    with open_output(output) as out:
        emit = (lambda text: None) if as_json else out.write
        answers = asking.ask(
            opener, _finder_maker(console), collection, request, emit, console, interrupts, show
        )
        for index, answer in enumerate(answers):
            if as_json:
                out.write(json.dumps(answer.as_json(), ensure_ascii=False) + "\n")
            else:
                out.write(_ending(answer, last=index == len(request.questions) - 1))
            console.notice(answer.evidence())
            if answer.stop in CUT:
                console.notice(CUT[answer.stop])
            held = format_bytes(answer.coverage["bytes"])
            console.detail(f"{answer.usage} {answer.timings}, {held} of keys and values held")
            if answer.cancelled:
                raise KeyboardInterrupt


def _ending(answer: Answer, last: bool) -> str:
    """A newline behind the answer, and an empty line between two."""
    end = "" if answer.answer.endswith("\n") else "\n"
    return end if last else end + "\n"


@cli.command("inspect")
@click.argument("names", nargs=-1, metavar="DOC...", required=True)
@click.option("--model", metavar="NAME", help="Whose tokens are counted. [default: smollm2, see `models`]")
@click.option("--token-budget", type=Size(), metavar="N", help="Exit 6 when there are more tokens.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@reading_options
def inspect(
    names: tuple[str, ...], model: str | None, token_budget: int | None, as_json: bool, **params: Any
) -> None:
    """What would be read of files, folders, archives: tokens, encodings, skips and why, memory.

    The model's tokenizer counts; its weights are not loaded.
    """
    from longchat_cli import documents, inspection
    from longchat_cli.models import load
    from longchat_cli.tokens import Tokenizer

    console = _console()
    collection = documents.read(names, stdin=sys.stdin.buffer, options=_options(params))
    ready = load.find(model, console.notice)
    tokenizer = Tokenizer.from_dir(ready.path)
    with console.progress("counting") as bar:
        report = inspection.inspect(
            collection, ready.name, ready.window, ready.config, lambda text: len(tokenizer.encode(text)), bar
        )
    click.echo(json.dumps(report, ensure_ascii=False, indent=2) if as_json else inspection.show(report))
    _require_all(collection, params["strict"])
    inspection.require_budget(report, token_budget)


@cli.command("methods")
@click.argument("name", required=False)
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.option("--measure", is_flag=True, help="Measure the methods side by side at the same bytes held.")
@click.option(
    "--methods", "chosen", metavar="NAMES", help="full,sink,recycled stride=5,... [default: all of them]"
)
@click.option(
    "--columns",
    metavar="NAMES",
    help="stream, question tasks of `eval`, TASK@LENGTH, TASK:later (question after the text is compressed). "
    "[default: stream,needle,needle:later,lines@4k]",
)
@click.option("--budget", default="1/8", show_default=True, help="Share of --length that methods may hold.")
@click.option("--length", type=Size(), default="6k", show_default=True, help="Tokens of a text.")
@click.option("--stream", type=Size(), default="8k", show_default=True, help="Tokens of the stream.")
@click.option("--n", type=int, default=20, show_default=True, help="Questions in each column.")
@click.option("--seed", type=int, default=0, show_default=True, help="The same seed gives the same texts.")
@click.option("--data", multiple=True, metavar="FILE", help="A book, LongEval records; repeatable.")
@click.option("--max-tokens", type=Size(), default=32, show_default=True, help="Longest answer.")
@click.option("--output", "-o", metavar="FILE", help="Keep measurements in FILE; a rerun goes on from there.")
@model_options
def methods(name: str | None, as_json: bool, measure: bool, **params: Any) -> None:
    """What each attention method keeps, forgets and costs; with --measure, how well each does.

    The table gives bytes held after a text, step time and perplexity at the end of a stream against full
    attention's, and questions answered.
    """
    if measure:
        _measure(params, as_json)
        return
    classes = {key: method_class(key) for key in ([name] if name else METHODS)}
    rows = {key: _about(cls) for key, cls in classes.items()}
    if as_json:
        click.echo(json.dumps(rows, ensure_ascii=False, indent=2))
        return
    for key, row in rows.items():
        click.echo(f"{key}: {row['summary']}")
        for heading in ("keeps", "forgets", "cost", "reach"):
            click.echo(f"  {heading + ':':<9}{row[heading]}")
        if name:
            for option in row["options"]:
                click.echo(f"  --{option['name'].replace('_', '-')}  {option['help']} [{option['default']}]")


def _measure(params: dict[str, Any], as_json: bool) -> None:
    from pathlib import Path

    from longchat_cli.evaluation import measure as measuring

    console = _console()
    chosen = params["chosen"]
    plan = measuring.Plan(
        methods=tuple(METHODS) if chosen is None else measuring.names(chosen),
        columns=measuring.names(params["columns"]) if params["columns"] else measuring.COLUMNS,
        budget=measuring.share(params["budget"]),
        data=tuple(map(Path, params["data"])),
        **_take(params, ("length", "stream", "n", "seed", "max_tokens")),
    )
    output = Path(params["output"]) if params["output"] else None
    result = measuring.measure(_opener(_take(params, MODEL), console), plan, output, console)
    click.echo(json.dumps(result, ensure_ascii=False, indent=2) if as_json else measuring.show(result))


def _about(cls: Any) -> dict[str, Any]:
    options = [
        {"name": field.name, "default": field.default, "help": field.metadata.get("help", "")}
        for field in cls.options()
    ]
    return {
        "summary": cls.summary,
        "keeps": cls.keeps,
        "forgets": cls.forgets,
        "cost": cls.cost,
        "reach": "texts of any length" if cls.unlimited else "the model's trained window",
        "options": options,
    }


@cli.group("models", cls=Group)
def models() -> None:
    """List, pull and choose models."""


@models.command("list")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def models_list(as_json: bool) -> None:
    """Every model longchat knows, and which are here."""
    from longchat_cli.config import format_bytes
    from longchat_cli.models import catalog

    entries = catalog.entries()
    if as_json:
        rows = [{**dataclasses.asdict(e), "path": str(e.path) if e.path else None} for e in entries]
        click.echo(json.dumps(rows, ensure_ascii=False, indent=2))
        return
    for entry in entries:
        mark = "*" if entry.default else " "
        state = "installed" if entry.installed else "not pulled"
        size = format_bytes(entry.size) if entry.size else ""
        click.echo(f"{mark} {entry.name:<14} {size:>10}  {state:<10}  {entry.title}, {entry.licence}")


@models.command("pull")
@click.argument("name")
def models_pull(name: str) -> None:
    """Fetch a model, verify it and keep it."""
    from longchat_cli.models import fetch

    console = _console()
    path = fetch.pull(name, console.notice)
    console.notice(f"{name} is at {path}")


@models.command("info")
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def models_info(name: str, as_json: bool) -> None:
    """What is known about a model."""
    from longchat_cli.models import catalog

    about = catalog.info(name)
    if as_json:
        click.echo(json.dumps(about, ensure_ascii=False, indent=2))
        return
    for key, value in about.items():
        if value not in ("", None):
            click.echo(f"{key.replace('_', ' ') + ':':<16}{_plain(value)}")


def _plain(value: Any) -> Any:
    """A value of `models info` as a person reads it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{name} {text}" for name, text in value.items())
    return ", ".join(value) if isinstance(value, list) else value


@models.command("remove")
@click.argument("name")
def models_remove(name: str) -> None:
    """Delete a pulled model and what was made of it."""
    from longchat_cli.config import format_bytes
    from longchat_cli.models import catalog

    removed = catalog.remove(name)
    console = _console()
    console.notice(f"removed {name}, {format_bytes(removed.bytes)} freed")
    if removed.note:
        console.notice(removed.note)


@models.command("default")
@click.argument("name", required=False)
def models_default(name: str | None) -> None:
    """Show the default model, or choose it."""
    from longchat_cli.models import catalog

    if name is None:
        click.echo(catalog.default())
        return
    catalog.set_default(name)
    _console().notice(f"the default model is {catalog.default()}")


@cli.command("eval", cls=MethodCommand)
@click.argument("task")
@click.option(
    "--method",
    "-m",
    type=Name(["auto", *METHODS]),
    default="auto",
    show_default=True,
    help="What is evaluated.",
)
@click.option("--lengths", type=Sizes(), default="2k", show_default=True, help="Tokens per text: 4k,16k,64k.")
@click.option("--n", type=int, default=20, show_default=True, help="Questions at each length.")
@click.option("--per-text", type=int, help="Questions over one text. [default: the task's own number]")
@click.option("--data", multiple=True, metavar="FILE", help="Books or records to use; repeatable.")
@click.option(
    "--overflow", type=Name(["error", "force"]), default="error", show_default=True, help="As for `ask`."
)
@click.option("--max-tokens", type=Size(), default=32, show_default=True, help="Longest answer.")
@click.option(
    "--seed", type=int, default=0, show_default=True, help="The same seed gives the same questions."
)
@click.option("--rank-only", is_flag=True, help="Find passages and write no answers (recall).")
@click.option("--json", "as_json", is_flag=True, help="Every sample and the totals, as JSON.")
@model_options
def evaluate(task: str, method: str, method_options: dict[str, Any], as_json: bool, **params: Any) -> None:
    """Measure a method on a task whose answers are known.

    \b
    needle      one magic number in each text
    lookalike   ten magic numbers of different keys in one text
    values      four magic numbers of one key in each text, asked together
    uuid        one magic value of 32 hexadecimal digits in each text
    digits      one magic number of 64 digits in each text
    varied      twenty differently worded facts in one text
    reworded    ten facts in one text, asked in other words
    lines       the value of one line among many
    naturalqa   natural questions, passages planted in a book (--data)
    perplexity  perplexity by position of a book (--data)
    stream      step time and bytes held along one stream
    """
    from pathlib import Path

    from longchat_cli.ask import Request
    from longchat_cli.evaluation import run as running
    from longchat_cli.evaluation import subject as evaluated
    from longchat_cli.sampling import Sampling

    console = _console()
    options = running.Options(
        lengths=params["lengths"],
        n=params["n"],
        seed=params["seed"],
        data=tuple(map(Path, params["data"])),
        per_text=params["per_text"],
    )
    request = Request(
        (), None, method, method_options, params["overflow"], Sampling(max_tokens=params["max_tokens"])
    )
    opener = _opener(_take(params, MODEL), console)
    subject = evaluated.subject(opener, request, Console(quiet=True), Interrupts(), params["rank_only"])
    with console.progress(task) as bar:
        result = running.run(task, subject, options, bar or (lambda done, total: None))
    result |= {"method": method, "options": method_options}
    if as_json:
        click.echo(json.dumps(result, ensure_ascii=False))
        return
    for total in result["totals"]:
        shown = {key: round(value, 4) if isinstance(value, float) else value for key, value in total.items()}
        click.echo("  ".join(f"{key} {value}" for key, value in shown.items() if not isinstance(value, list)))


@cli.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.option("--kernels", is_flag=True, help="Compile the GPU kernels (no GPU needed) and show their costs.")
def doctor(as_json: bool, kernels: bool) -> None:
    """What runs here: device, kernels, model, directories, versions."""
    from longchat_cli import doctor as diagnosis

    report: Any = diagnosis.kernel_costs() if kernels else diagnosis.examine()
    show: Any = diagnosis.show_costs if kernels else diagnosis.show
    click.echo(json.dumps(report, ensure_ascii=False, indent=2) if as_json else show(report))


def _console() -> Console:
    meta = click.get_current_context().find_root().meta
    return Console(quiet=bool(meta.get("quiet")), verbose=bool(meta.get("verbose")))


def _take(params: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: params[name] for name in names}


def _options(params: dict[str, Any]) -> Options:
    from longchat_cli.documents import Options

    return Options(**_take(params, ("boilerplate", "include", "exclude")))


def _read(names: Sequence[str], console: Console, options: Options | None = None) -> Collection:
    """The documents, with a notice of what was skipped or changed."""
    from longchat_cli import documents

    collection = documents.read(names, stdin=sys.stdin.buffer, options=options)
    notes = [f"{document.name}: {note}" for document in collection.documents for note in document.notes]
    for note in notes[:MOST]:
        console.notice(note)
    if len(notes) > MOST:
        console.notice(f"and {len(notes) - MOST} more such notes: `longchat inspect` lists all")
    if collection.skips:
        shown = ", ".join(f"{skip.name} ({skip.reason})" for skip in collection.skips[:MOST])
        more = len(collection.skips) - MOST
        console.notice(f"skipped {shown}{f' and {more} more' if more > 0 else ''}")
    return collection


def _require_all(collection: Collection, strict: bool) -> None:
    if strict and collection.skips:
        first, count = collection.skips[0], len(collection.skips)
        what = f"{count} input{'s were' if count > 1 else ' was'} skipped"
        raise InputsSkipped(what, f"{first.name}: {first.reason}", "leave --strict out to go on without")


def _opener(settings: dict[str, Any], console: Console) -> Open:
    """Opens the model at the first call; later ones share its weights under another method."""
    loaded: list[Any] = []

    def open_engine(method: str, options: Any) -> Any:
        from longchat_cli import local

        if loaded:
            return local.with_method(loaded[0], method, options)
        start = time.perf_counter()
        if not click.get_current_context().find_root().meta.get("debug"):
            import logging

            logging.disable(logging.WARNING)  # libraries log a line per layer and token
        if settings["kernel"]:
            from longchat_cli import kernels

            kernels.force(settings["kernel"])
        quantize = None if settings["quantize"] == "none" else settings["quantize"]
        chosen = _take(settings, ("model", "device", "dtype", "compile"))
        engine = local.open_engine(method=method, options=options, quantize=quantize, **chosen)
        console.detail(f"loaded {engine.info.model} in {time.perf_counter() - start:.1f} s")
        for note in engine.info.notes:
            console.detail(note)
        if engine.static is not None:
            console.detail(f"decoding: {engine.static.about}")
        click.get_current_context().call_on_close(lambda: console.detail(_kernels_served()))
        loaded.append(engine)
        return engine

    return open_engine


def _kernels_served() -> str:
    from longchat_cli import kernels

    calls = ", ".join(f"{name} {count:,}" for name, count in kernels.served.items())
    return f"attention calls served by: {calls or 'no kernel'}"


def _finder_maker(console: Console) -> MakeFinder:
    from longchat_cli import ask as asking

    def make(engine: Any, documents: Any, options: Any) -> Any:
        return asking.local_finder(engine, documents, options, console)

    return make
