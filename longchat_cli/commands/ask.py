"""`longchat ask`."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from longchat_cli.commands.context import (
    current_console,
    engine_opener,
    estimate,
    finder_maker,
    page_store,
    read,
    reading,
    require_all,
)
from longchat_cli.commands.framework import MethodCommand, command
from longchat_cli.commands.options import (
    MODEL,
    SAMPLERS,
    Name,
    Words,
    cache_options,
    complete_files,
    estimate_option,
    log_option,
    method_option,
    model_options,
    overflow_option,
    reading_options,
    sampling_options,
    take,
)
from longchat_cli.errors import LongchatError, UsageError
from longchat_cli.sampling import CUT
from longchat_cli.terminal import Interrupts, is_tty, open_output
from longchat_cli.terminal_text import Sanitizer, json_text, replace_surrogates

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from longchat_cli.ask import Answer, Open, Request
    from longchat_cli.documents import Collection
    from longchat_cli.logs import Entry, Recorder
    from longchat_cli.terminal import Console, Output


@command("ask", cls=MethodCommand)
@click.argument("words", nargs=-1, metavar="DOC... QUESTION", shell_complete=complete_files)
@click.option(
    "--question", "-q", "questions", multiple=True, metavar="TEXT", help="A question; repeatable, read once."
)
@method_option("auto: full if everything fits the window, else recall.")
@overflow_option
@click.option(
    "--mode",
    type=Name(["auto", "find", "whole"]),
    default="auto",
    show_default=True,
    help="Longer than the window: find passages, or read the whole in parts; auto: by the question.",
)
@click.option(
    "--system",
    type=Words(),
    metavar="TEXT",
    help="System prompt. [default: to answer with words of the text]",
)
@click.option(
    "--output",
    "-o",
    metavar="FILE",
    shell_complete=complete_files,
    help="Write the answer to FILE, atomically.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object per question, a line each.")
@click.option(
    "--schema",
    metavar="FILE",
    shell_complete=complete_files,
    help="Answer in JSON by the JSON Schema in FILE, and nothing else.",
)
@click.option(
    "--cite/--no-cite",
    default=None,
    help="Footnotes: where the documents say each sentence, and what was read. [default: on a terminal]",
)
@click.option("--strict-cite", is_flag=True, help="Exit 5 unless every sentence is at least a near quote.")
@click.option("--quote", is_flag=True, help="Print the best matching passages themselves, no answer.")
@click.option("--show-prompt", is_flag=True, help="Print the prompt on stderr, control tokens marked.")
@log_option
@reading_options
@cache_options
@estimate_option
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
    """Ask about files, folders, URLs or standard input.

    The last argument is the question; with -q every argument is a document. Standard input is read for '-',
    or when no document is named and something is piped in. An https:// URL is fetched, a git one cloned:
    https://host/name.git#branch, git+https://..., https://github.com/owner/name.
    """
    from longchat_cli.ask import Request, split_arguments
    from longchat_cli.logs import Recorder
    from longchat_cli.sampling import Sampling

    console = current_console()
    names, asked = split_arguments(words, questions, is_tty(sys.stdin))
    footnotes = params["cite"]
    schema = _schema(params)
    if params["quote"] and params["mode"] == "whole":
        raise UsageError("--quote does not go with --mode whole", "passages are found, not read in parts")
    if params["estimate"] and as_json:
        raise UsageError("--estimate does not go with --json", "it prints a table")
    if footnotes is None:
        footnotes = not schema and is_tty(sys.stdout) and output in (None, "-")
    cite = params["strict_cite"] or footnotes or (as_json and params["cite"] is None)
    sampling = Sampling(**take(params, SAMPLERS), schema=schema)
    request = Request(
        tuple(map(replace_surrogates, asked)),
        _system(params["system"], schema),
        method,
        method_options,
        params["overflow"],
        sampling,
        cite,
        "find" if schema else params["mode"],
        page_store(params, names, console),
    )
    collection = read(names, console, reading(params))
    require_all(collection, params["strict"])
    opener = engine_opener(take(params, MODEL), console)
    if params["estimate"]:
        estimate(opener, collection, (method, method_options), sampling.max_tokens, params, console)
        return
    if params["quote"]:
        _quote_all(opener, collection, request, console, output, as_json)
        return
    shown = _Shown(output, as_json, bool(footnotes), bool(schema), params["show_prompt"])
    answers = _answer_all(opener, collection, request, console, shown, Recorder(params["no_log"], console))
    if params["strict_cite"]:
        _require_support(answers)


@dataclass(frozen=True)
class _Shown:
    """What is printed, and where to. With `json` or a `schema` an answer is not printed as it comes."""

    output: str | None
    json: bool
    footnotes: bool
    schema: bool
    prompt: bool

    def piece(self, out: Output) -> Callable[[str], None]:
        """Takes the pieces of an answer."""
        return (lambda text: None) if self.json or self.schema else out.write

    def whole(self, out: Output, answer: Answer, last: bool) -> None:
        """Print what is not there yet. Raises LongchatError for half a JSON value."""
        if self.json:
            out.write(json_text(answer.as_json()) + "\n")
        if self.schema and answer.stop not in ("eos", "cancelled"):
            ended = CUT.get(answer.stop, "--stop ended it")
            more = "raise it" if answer.stop == "length" else ""
            raise LongchatError("the answer is no complete JSON", ended, more)
        if not self.json:
            out.write(answer.answer if self.schema and not answer.cancelled else "")
            out.write(_ending(answer, self.footnotes, last))


def _answer_all(
    opener: Open,
    collection: Collection,
    request: Request,
    console: Console,
    shown: _Shown,
    record: Recorder,
) -> list[Answer]:
    from longchat_cli import ask as asking

    answers = []
    prompt = _show_prompt if shown.prompt else None
    finders = finder_maker(console, request.store)
    with open_output(shown.output) as out:
        for answer in asking.ask(
            opener, finders, collection, request, shown.piece(out), console, Interrupts(), prompt, _weigh
        ):
            answers.append(answer)
            try:
                shown.whole(out, answer, last=len(answers) == len(request.questions))
            finally:  # behind the answer's last line, and whether or not that could be printed
                record(_entry(answer))
            _remark(answer, console)
            if answer.cancelled:
                raise KeyboardInterrupt
    return answers


def _show_prompt(engine: Any, prompt: Any) -> None:
    click.echo(Sanitizer().feed(engine.assembler.show(prompt)), err=True)


def _entry(answer: Answer) -> Entry:
    from longchat_cli.logs import Entry

    said = (answer.question, answer.answer, answer.stop, tuple(answer.documents))
    return Entry("ask", answer.model, answer.method, *said)


def _remark(answer: Answer, console: Console) -> None:
    """What an answer rests on, how it ended, and what it took."""
    from longchat_cli.config import format_bytes

    console.notice(answer.evidence())
    if answer.stop in CUT:
        console.notice(CUT[answer.stop])
    held = format_bytes(answer.coverage["bytes"])
    console.detail(f"{answer.usage} {answer.timings}, {held} of keys and values held")


def _schema(params: dict[str, Any]) -> str:
    """The JSON Schema of --schema, checked before a model is loaded; "" without one."""
    if params["schema"] is None:
        return ""
    if params["mode"] == "whole" or params["quote"]:
        other = "--quote" if params["quote"] else "--mode whole"
        raise UsageError(f"--schema does not go with {other}", "a schema is for one answer")
    from longchat_cli.constrain import read_schema

    return read_schema(params["schema"])


def _system(text: str | None, schema: str) -> str | None:
    """The system prompt; with a schema it says so."""
    if not schema:
        return text
    from longchat_cli.constrain import instruction

    return "\n".join(filter(None, (text, instruction(schema))))


def _weigh(engine: Any, mark: Any, ids: Sequence[int]) -> Sequence[float]:
    from longchat_cli.attribution import attention_paid

    return attention_paid(engine, mark, ids)


def _quote_all(
    opener: Open,
    collection: Collection,
    request: Request,
    console: Console,
    output: str | None,
    as_json: bool,
) -> None:
    from longchat_cli.ask import quote

    with open_output(output) as out:
        finders = finder_maker(console, request.store)
        for index, quotes in enumerate(quote(opener, finders, collection.documents, request)):
            if as_json:
                out.write(json_text(quotes.as_json()) + "\n")
            else:
                out.write("\n" * (index > 0) + quotes.as_text() + "\n")


def _require_support(answers: Sequence[Answer]) -> None:
    """Raises Unsupported for sentences that the documents do not say."""
    from longchat_cli.errors import Unsupported

    cited = [citation for answer in answers for citation in answer.citations]
    missing = [citation for citation in cited if citation["verdict"] != "verified"]
    if missing:
        what = f"{len(missing)} of {len(cited)} sentence{'s' if len(cited) > 1 else ''} not in the documents"
        raise Unsupported(what, f"{missing[0]['verdict']}: “{missing[0]['sentence']}”")


def _ending(answer: Answer, footnotes: bool, last: bool) -> str:
    """A newline behind the answer, its footnotes, and an empty line between two answers."""
    from longchat_cli.sources import footnotes as show

    end = "" if answer.answer.endswith("\n") else "\n"
    notes = show(answer.citations, answer.rested) if footnotes else ""
    end += f"\n{notes}\n" if notes else ""
    return end if last else end + "\n"
