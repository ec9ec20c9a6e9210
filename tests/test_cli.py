"""The command line: help without weight, arguments, exit codes, streams, signals."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import pytest
from fakes import FakeEngine, Opener, install

from longchat_cli import errors
from longchat_cli.__main__ import main
from longchat_cli.attention import METHODS
from longchat_cli.cli import cli
from longchat_cli.tokens import Tokenizer

FAKES = Path(__file__).with_name("fakes.py")


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


class Terminal(io.StringIO):
    """A stdin that is a terminal nobody types at."""

    buffer = io.BytesIO()

    def isatty(self) -> bool:
        return True


@pytest.fixture
def opener(tokenizer_dir: Path) -> Opener:
    return Opener(Tokenizer.from_dir(tokenizer_dir), window=512)


@pytest.fixture
def run(
    opener: Opener, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Iterator[Callable[..., Result]]:
    """`run(*arguments, stdin=...)`: `main` in this process over the fake engine, in an empty directory."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    install(opener, monkeypatch.setattr)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.setenv("LONGCHAT_OFFLINE", "")
    monkeypatch.setenv("LONGCHAT_DEBUG", "")

    def call(*arguments: str, stdin: bytes | None = None) -> Result:
        source: Any = Terminal() if stdin is None else io.TextIOWrapper(io.BytesIO(stdin))
        monkeypatch.setattr(sys, "stdin", source)
        code = main(arguments)
        return Result(code, *capsys.readouterr())

    yield call
    logging.disable(logging.NOTSET)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def note(tmp_path: Path) -> str:
    (tmp_path / "note.txt").write_text("The mill has seven sails.\n", encoding="utf-8")
    return "note.txt"


def spawn(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "longchat_cli", *arguments], text=True, capture_output=True, **options
    )


def every_command(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield path
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from every_command(command, (*path, name))
        else:
            yield (*path, name)


def test_help_of_every_command_imports_nothing_heavy() -> None:
    script = (
        "import sys, contextlib, io\n"
        "from longchat_cli.__main__ import main\n"
        f"for path in {list(every_command(cli))!r}:\n"
        "    out = io.StringIO()\n"
        "    with contextlib.redirect_stdout(out):\n"
        "        assert main([*path, '--help']) == 0, path\n"
        "    assert 'Usage: longchat' in out.getvalue(), path\n"
        "light = {'click', 'longchat_cli'} | set(sys.stdlib_module_names)\n"
        "loaded = {name.split('.')[0] for name in sys.modules}\n"
        "print(sorted(n for n in loaded - light if not n.startswith('_')))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    heavy = {"torch", "transformers", "numpy", "tokenizers", "prompt_toolkit", "tqdm", "platformdirs"}
    assert not heavy & set(eval(done.stdout)), done.stdout


def test_help_answers_at_once() -> None:
    """By processor time, the best of five, so that a busy machine does not fail it."""
    times = []
    for _ in range(5):
        begun = os.times()
        assert spawn("ask", "--help").returncode == 0
        ended = os.times()
        times.append(
            ended.children_user + ended.children_system - begun.children_user - begun.children_system
        )
    assert min(times) < 0.2


def test_help_lists_exit_codes_and_commands(run: Callable[..., Result]) -> None:
    text = run("--help").out
    for part in ("3 context overflow", "130 interrupted", "ask", "chat", "models", "LONGCHAT_ASK_MODEL"):
        assert part in text
    assert run("-h").out == text


@pytest.mark.parametrize("group", [[], ["models"]])
def test_a_group_alone_shows_its_help(run: Callable[..., Result], group: list[str]) -> None:
    done = run(*group)
    assert (done.code, done.out) == (2, "")
    assert done.err == run(*group, "--help").out


def test_help_names_the_exit_codes_that_exist(run: Callable[..., Result]) -> None:
    listed = run("--help").out.partition("Exit codes:")[2].partition("Every option")[0]
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    raised = {kind.exit_code for kind in kinds if issubclass(kind, errors.LongchatError)}
    codes = {int(word) for word in listed.split() if word.isdigit()}
    assert codes == raised | {0, 129, 130, 141, 143}


def test_version(run: Callable[..., Result]) -> None:
    assert run("--version").out.startswith("longchat 0.")


def test_method_help_shows_the_methods_options(run: Callable[..., Result]) -> None:
    assert "--sinks" not in run("ask", "--help").out
    assert "--method sink --help" in " ".join(run("ask", "--help").out.split())
    for arguments in (["--method", "sink", "--help"], ["--help", "--method=sink"], ["-msink", "--help"]):
        assert "--sinks" in run("ask", *arguments).out
    shown = run("ask", "--method", "sink", "--help").out
    own = {"--no-cite", "--no-cache", "--no-log"}
    assert not {word.strip(",") for word in shown.split() if word.startswith("--no-")} - own


def test_every_method_can_be_asked_for_help(run: Callable[..., Result]) -> None:
    for name in METHODS:
        assert run("eval", "--method", name, "--help").code == 0


def test_ask(run: Callable[..., Result], note: str) -> None:
    done = run("ask", note, "how many sails?")
    assert (done.code, done.out) == (0, "You said: how many sails?\n")
    assert "all visible" in done.err
    assert run("--quiet", "ask", note, "how many sails?").err == ""
    assert run("ask", note, "how many sails?", "--quiet").err == ""
    assert "loaded fake" in run("ask", "--verbose", note, "how many sails?").err


def test_words_that_are_no_utf_8_are_replaced(
    run: Callable[..., Result], note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONGCHAT_NO_LOG", "0")
    for words in (("what \udcff?",), ("-q", "what \udcff?")):
        done = run("ask", note, *words, "--system", "be \udcff brief", "--show-prompt", "--json")
        assert done.code == 0 and json.loads(done.out)["question"] == "what \ufffd?"
        assert "be \ufffd brief" in done.err and "warning" not in done.err  # the log has it, too
    assert "what \ufffd?" in run("logs", "list").out


def test_a_notice_of_the_log_begins_a_line(tokenizer_dir: Path, note: str, tmp_path: Path) -> None:
    program = [sys.executable, str(Path(__file__).with_name("fakes.py")), str(tokenizer_dir), "0,0"]
    one: dict[str, Any] = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "stdin": subprocess.DEVNULL,
    }
    own = os.environ | {"LONGCHAT_DATA_DIR": str(tmp_path / "data"), "LONGCHAT_NO_LOG": "0"}
    done = subprocess.run([*program, "ask", note, "q?"], cwd=tmp_path, env=own, text=True, **one)
    assert "You said: q?\nanswers are logged in " in done.stdout


def test_lists_are_called_by_either_name(run: Callable[..., Result]) -> None:
    for group in ("models", "logs", "cache", "sessions"):
        assert run(group, "ls").code == run(group, "list").code == 0
    assert run("logs", "remove", "99").code == 66 and run("config", "ls").code == 2


def test_ask_stdin(run: Callable[..., Result], note: str) -> None:
    text = b"The river is wide.\n"
    assert "stdin" in run("ask", "-", "q?", stdin=text).err
    assert "stdin" in run("ask", "q?", stdin=text).err
    assert "stdin" in run("ask", "-q", "q?", stdin=text).err
    assert "stdin" not in run("ask", note, "q?", stdin=text).err
    assert run("ask", note, "q?", stdin=text).out == "You said: q?\n"


def test_ask_many(run: Callable[..., Result], note: str) -> None:
    done = run("ask", note, "-q", "one?", "-q", "two?")
    assert done.out == "You said: one?\n\nYou said: two?\n"
    assert "reused" in done.err
    rows = [
        json.loads(line) for line in run("ask", note, "-q", "one?", "-q", "two?", "--json").out.splitlines()
    ]
    assert [row["question"] for row in rows] == ["one?", "two?"]
    assert set(rows[0]) >= {"answer", "usage", "timings", "method", "coverage", "passages", "model"}


def test_output_file(run: Callable[..., Result], note: str, tmp_path: Path) -> None:
    target = tmp_path / "out.txt"
    done = run("ask", note, "q?", "-o", "out.txt")
    assert (done.code, done.out, target.read_text()) == (0, "", "You said: q?\n")
    assert target.stat().st_mode & 0o777 == 0o666 & ~_umask()
    assert run("ask", note, "q?", "-o", "-").out == "You said: q?\n"
    assert run("ask", note, "q?", "-o", "nowhere/out.txt").code == 73
    assert run("ask", note, "q?", "-o", str(tmp_path)).code == 73
    assert sorted(path.name for path in tmp_path.iterdir()) == ["note.txt", "out.txt"]


def _umask() -> int:
    old = os.umask(0)
    os.umask(old)
    return old


def test_failed_run_keeps_the_old_output(run: Callable[..., Result], note: str, tmp_path: Path) -> None:
    (tmp_path / "out.txt").write_text("old")
    assert run("ask", note, "q " * 2000, "-o", "out.txt").code == 3
    assert (tmp_path / "out.txt").read_text() == "old"


def test_show_prompt_marks_control_tokens(run: Callable[..., Result], note: str) -> None:
    done = run("ask", note, "how many sails?", "--show-prompt")
    assert (
        "⟦<|im_start|>⟧user\nText:\nThe mill has seven sails.\n\nQuestion: how many sails?⟦<|im_end|>⟧"
        in done.err
    )
    assert done.out == "You said: how many sails?\n"
    done = run("ask", note, "how many sails?", "--show-prompt", "--system", "be\x1b[31m brief")
    assert "system\nbe brief⟦" in done.err


@pytest.mark.parametrize(
    ("arguments", "code", "part"),
    [
        (["aks"], 2, "Did you mean 'ask'?"),
        (["ask", "note.txt", "q", "--modle", "x"], 2, "--model"),
        (["ask", "note.txt", "q", "--method", "snik"], 2, "did you mean 'sink'?"),
        (["ask", "note.txt", "q", "--method", "sink", "--sinsk", "3"], 2, "--sinks"),
        (["ask", "note.txt", "q", "--method", "sink", "--sinks", "many"], 2, "not a size"),
        (["ask", "note.txt", "q", "--max-tokens", "0"], 2, "from 1 to 1,000,000,000"),
        (["ask", "note.txt", "q", "--top-p", "2"], 2, "--top-p is 2.0"),
        (["methods", "snik"], 2, "did you mean 'sink'?"),
        (["ask", "note.txt"], 2, "the question about note.txt is missing"),
        (["ask"], 2, "question is missing"),
        (["ask", "q?"], 2, "no document"),
        (["ask", "missing.txt", "q?"], 66, "missing.txt does not exist"),
        (["ask", "empty.txt", "q?"], 65, "empty.txt"),
        (["ask", "binary.bin", "q?"], 65, "binary.bin"),
        (["ask", "folder", "q?"], 65, "folder"),
        (
            ["ask", "note.txt", "q?", "--overflow", "error", "--method", "full", "--max-tokens", "2k"],
            3,
            "2,000",
        ),
        (["models", "info", "smolm2"], 66, "did you mean smollm2?"),
        (["chat", "--method", "recal"], 2, "there is no 'recal'"),
    ],
)
def test_errors_are_one_line(
    run: Callable[..., Result], note: str, tmp_path: Path, arguments: list[str], code: int, part: str
) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "binary.bin").write_bytes(bytes(range(256)) * 40)
    (tmp_path / "folder").mkdir()
    done = run(*arguments)
    assert done.code == code, done.err
    assert done.out == ""
    assert part in done.err
    (line,) = done.err.splitlines()
    assert line.startswith("longchat: error: ")


def test_sizes_and_method_options_reach_the_method(
    run: Callable[..., Result], note: str, opener: Opener, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("ask", note, "q?", "--method", "sink", "--window", "2k", "--sinks", "8")
    assert opener.last.options == {"window": 2000, "sinks": 8}
    monkeypatch.setenv("LONGCHAT_ASK_METHOD", "sink")
    monkeypatch.setenv("LONGCHAT_ASK_WINDOW", "1Ki")
    run("ask", note, "q?")
    assert (opener.last.info.method, opener.last.options) == ("sink", {"window": 1024})
    run("ask", note, "q?", "--window", "77")
    assert opener.last.options == {"window": 77}
    run("ask", note, "q?", "--method", "recycled", "--pool", "5")
    assert opener.last.options["pool"] == 5


def test_method_options_do_not_collide_silently() -> None:
    """No method has an option of a command's own name."""
    from longchat_cli.commands.framework import MethodCommand
    from longchat_cli.commands.method_options import method_options

    for command in (cli.commands["ask"], cli.commands["chat"], cli.commands["eval"]):
        assert isinstance(command, MethodCommand)
        own = {flag for param in command.params for flag in param.opts}
        for name in METHODS:
            extra = [flag for param in method_options(name, "LONGCHAT_ASK_") for flag in param.opts]
            assert not own & set(extra)
            assert len(extra) == len(set(extra))


def test_precedence_of_the_environment(
    run: Callable[..., Result], note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tokens(*more: str) -> int:
        return json.loads(run("ask", note, "q?", "--json", *more).out)["usage"]["answer_tokens"]

    assert tokens() > 4
    monkeypatch.setenv("LONGCHAT_MAX_TOKENS", "4")
    assert tokens() == 4
    monkeypatch.setenv("LONGCHAT_ASK_MAX_TOKENS", "3")
    assert tokens() == 3
    assert tokens("--max-tokens", "2") == 2


def test_offline_is_passed_on(run: Callable[..., Result], note: str) -> None:
    assert os.environ["LONGCHAT_OFFLINE"] == ""
    run("ask", note, "q?", "--offline")
    assert os.environ["LONGCHAT_OFFLINE"] == "1"


@pytest.mark.parametrize(
    ("failure", "code", "part"),
    [
        (MemoryError(), 75, "out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"), 75, "out of memory"),
        (OSError(errno.ENOSPC, "No space", "/x"), 74, "No space left on device"),
        (ValueError("odd\nthing"), 1, "internal error: ValueError: odd thing; run again with --debug"),
        (KeyboardInterrupt(), 130, ""),
        (BrokenPipeError(), 141, ""),
    ],
)
def test_failures_of_the_engine(
    run: Callable[..., Result], note: str, monkeypatch: pytest.MonkeyPatch, failure: Any, code: int, part: str
) -> None:
    def fail(*_: Any, **__: Any) -> int:
        raise failure

    monkeypatch.setattr(FakeEngine, "prefill", fail)
    done = run("ask", note, "q?")
    assert (done.code, done.out) == (code, "")
    assert part in done.err
    assert "Traceback" not in done.err
    assert len(done.err.splitlines()) == (1 if part else 0)


def test_ctrl_c_that_an_import_turned_into_another_error() -> None:
    from longchat_cli.__main__ import _explain

    assert _explain(SystemError("initialization raised unreported exception"), True, False) == 130


def test_debug_shows_the_traceback(
    run: Callable[..., Result], note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeEngine, "prefill", lambda *_: 1 // 0)
    assert "Traceback" in run("ask", note, "q?", "--debug").err
    assert "Traceback" in run("--debug", "ask", note, "q?").err


def test_models_and_methods(run: Callable[..., Result]) -> None:
    assert "smollm2" in run("models", "list").out
    rows = json.loads(run("models", "list", "--json").out)
    assert {"name", "licence", "installed", "default"} <= set(rows[0])
    assert json.loads(run("models", "info", "smollm2", "--json").out)["licence"] == "Apache-2.0"
    assert "\ndownload bytes: 9" in run("models", "info", "smollm2").out
    assert run("models", "default").out == "smollm2\n"
    text = run("methods").out
    for name in METHODS:
        assert f"\n{name}: " in f"\n{text}"
    assert "--sinks" in run("methods", "sink").out
    assert json.loads(run("methods", "sink", "--json").out)["sink"]["options"][0]["name"] == "sinks"


def test_eval_help_lists_every_task(run: Callable[..., Result]) -> None:
    from longchat_cli.evaluation.run import TASKS

    shown = run("eval", "--help").out
    assert [name for name in TASKS if f"\n  {name} " not in shown] == []


def test_eval(run: Callable[..., Result]) -> None:
    done = run("eval", "needle", "--lengths", "300", "--n", "2", "--json")
    result = json.loads(done.out)
    assert (result["task"], result["method"], len(result["samples"])) == ("needle", "auto", 2)
    assert run("eval", "neddle").code == 2


def test_doctor(run: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGCHAT_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("LONGCHAT_CACHE_DIR", str(tmp_path / "note.txt"))
    (tmp_path / "note.txt").touch()
    text = run("doctor").out
    for part in ("device: ", "reference", "smollm2 (not pulled yet)", "torch 2", "is not a directory"):
        assert part in text
    report = json.loads(run("doctor", "--json").out)
    assert report["kernels"][-1]["name"] == "reference"
    assert not (tmp_path / "data").exists(), "a report must change nothing"


def test_piped_chat(run: Callable[..., Result]) -> None:
    done = run("chat", stdin=b"hello\n\n/help me\nlast")
    assert done.code == 0
    assert done.out == "You said: hello\nYou said: /help me\nYou said: last\n"
    assert run("chat", stdin=b"").code == 0


def test_chat_with_documents(run: Callable[..., Result], note: str, opener: Opener) -> None:
    done = run("chat", "--with", note, stdin=b"hello\n")
    assert done.out == "You said: hello\n"
    assert opener.last.info.method == "recall"
    assert "seven sails" in opener.last.assembler.show(opener.last.render([])) or opener.last.ids
    assert run("chat", "--with", "missing.txt", stdin=b"hello\n").code == 66


def test_closed_and_full_stdout(tokenizer_dir: Path, tmp_path: Path, note: str) -> None:
    for redirect, code in ((">/dev/full", 74), (">&-", 74), ("| true", 141)):
        pipe = "set -o pipefail; " if "|" in redirect else ""
        command = f"{pipe}'{sys.executable}' -m longchat_cli models list {redirect}"
        done = subprocess.run(["bash", "-c", command], text=True, capture_output=True)
        # `true` may still be there when the answer is written.
        assert done.returncode in ((code, 0) if "|" in redirect else (code,)), done.stderr
        assert "Traceback" not in done.stderr
        assert len(done.stderr.splitlines()) == (0 if "|" in redirect else 1)


def test_broken_pipe_while_answering(tokenizer_dir: Path, tmp_path: Path, note: str) -> None:
    lines = ["-q", "one?", "-q", "two?"] * 4
    command = [sys.executable, str(FAKES), str(tokenizer_dir), "0.01,0", "ask", str(tmp_path / note), *lines]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout and process.stderr
    assert process.stdout.readline() == "You said: one?\n"
    process.stdout.close()
    assert process.wait(20) == 141
    assert "Traceback" not in process.stderr.read()
    process.stderr.close()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_in_the_middle_of_an_answer(
    tokenizer_dir: Path, tmp_path: Path, note: str, number: signal.Signals, code: int
) -> None:
    command = [sys.executable, str(FAKES), str(tokenizer_dir), "0.3,0", "ask", str(tmp_path / note), "q?"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout and process.stderr
    assert process.stdout.read(2) == "Yo"
    sent = time.monotonic()
    process.send_signal(number)
    assert process.wait(20) == code
    assert time.monotonic() - sent < 3
    rest = process.stdout.read()
    assert "u said: q?\n".startswith(rest.rstrip("\n"))
    assert rest.endswith("\n") == (number == signal.SIGINT), "Ctrl-C ends the part in order"
    assert "Traceback" not in process.stderr.read()
    process.stdout.close()
    process.stderr.close()


def test_pipes_over_a_real_tiny_model(tiny_model: Callable[..., Path], tmp_path: Path, note: str) -> None:
    """A loop over a list keeps its list, and only answers are on stdout."""
    (tmp_path / "list").write_text("note.txt\nnote.txt\n")
    command = f"'{sys.executable}' -m longchat_cli ask --model '{tiny_model()}' --max-tokens 4"
    loop = f'while read f; do {command} "$f" q; echo "[$f]"; done < list'
    done = subprocess.run(["bash", "-c", loop], cwd=tmp_path, text=True, capture_output=True)
    assert done.returncode == 0
    assert done.stdout.count("[note.txt]\n") == 2, done.stderr
    assert done.stderr.count("all visible") == 2
    done = subprocess.run(
        ["bash", "-c", f"{command} q? --json"], cwd=tmp_path, input="text", text=True, capture_output=True
    )
    answer = json.loads(done.stdout)
    assert (answer["documents"], answer["method"]) == (["stdin"], "full")
    assert answer["usage"]["answer_tokens"] <= 4


@pytest.fixture
def book(tmp_path: Path) -> Path:
    """About 12,000 tokens of prose with one fact planted in the middle."""
    from longchat_cli.prose import prose

    text = prose(50_000, random.Random(1))
    cut = text.index("\n\n", len(text) // 2)
    fact = "One of the special magic numbers for river is: 4152637."
    path = tmp_path / "book.txt"
    path.write_text(f"{text[:cut]} {fact}{text[cut:]}", encoding="utf-8")
    return path


def test_default_model_end_to_end(default_model_dir: Path, book: Path) -> None:
    """The real model over a pipe: passages of a long text, and the evidence for the answer."""
    question = "What is the special magic number for river?"
    command = [sys.executable, "-m", "longchat_cli", "--offline", "ask", question, "--max-tokens", "24"]
    with book.open("rb") as text:
        done = subprocess.run(command, stdin=text, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert "4152637" in done.stdout
    *notices, line = done.stderr.splitlines()
    expected = ("finding by words alone", "indexing")  # where no encoder is pulled / the machine is slow
    assert all(any(part in notice for part in expected) for notice in notices)
    assert line.startswith("recall: retrieved 1 passage")
    assert "stdin:" in line


def test_default_model_refuses_what_it_cannot_read(default_model_dir: Path, book: Path) -> None:
    done = spawn("ask", str(book), "What is the number?", "--method", "full")
    assert (done.returncode, done.stdout) == (3, "")
    assert "8,192" in done.stderr


def test_footnotes_are_for_terminals_and_on_request(
    run: Callable[..., Result], note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe gets the answer alone; what is asked for comes behind it."""
    question = "mill has seven sails"  # the fake engine says it
    plain = run("ask", note, question)
    assert plain.out == f"You said: {question}\n"
    asked = run("ask", note, question, "--cite")
    assert asked.out.startswith(plain.out + "\n[1] mentions  note.txt:1  You said")
    monkeypatch.setattr("longchat_cli.commands.ask.is_tty", lambda stream: True)
    assert run("ask", note, question).out == asked.out
    assert run("ask", note, question, "--no-cite").out == plain.out
    assert run("ask", note, question, "-o", "out.txt").out == ""
    assert Path("out.txt").read_text(encoding="utf-8") == plain.out


def test_json_has_citations_unless_they_are_declined(run: Callable[..., Result], note: str) -> None:
    answer = json.loads(run("ask", note, "mill has seven sails", "--json").out)
    (citation,) = answer["citations"]
    assert answer["answer"][citation["begin"] : citation["end"]] == citation["sentence"]
    assert citation["quote"]["text"] == "mill has seven sails"
    assert json.loads(run("ask", note, "why?", "--json", "--no-cite").out)["citations"] == []


def test_strict_cite_exits_5(run: Callable[..., Result], opener: Opener, note: str) -> None:
    done = run("ask", note, "why?", "--strict-cite")
    assert (done.code, done.out) == (5, "You said: why?\n")
    assert "1 of 1 sentence" in done.err
