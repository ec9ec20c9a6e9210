"""Configuration files: precedence, origins, what is refused, and `longchat config`."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from longchat_cli import settings
from longchat_cli.attention import METHODS
from longchat_cli.cli import cli
from longchat_cli.commands import configured
from longchat_cli.config import data_dir
from longchat_cli.errors import BadConfig, UsageError

Run = Callable[..., Result]


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user file of an own configuration directory; the working directory is an empty one."""
    monkeypatch.setenv("LONGCHAT_CONFIG_DIR", str(tmp_path / "config"))
    for name in [
        name for name in os.environ if name.startswith(("LONGCHAT_ASK", "LONGCHAT_MODEL", "LONGCHAT_NO"))
    ]:
        monkeypatch.delenv(name)
    (tmp_path / "config").mkdir()
    (tmp_path / "work" / "below").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work" / "below")
    return tmp_path / "config" / "config.toml"


@pytest.fixture
def project(user: Path, tmp_path: Path) -> Path:
    return tmp_path / "work" / settings.PROJECT


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, arguments, catch_exceptions=True)


def parsed(*arguments: str) -> dict[str, object]:
    """The parameters a command gets."""
    with cli.make_context("longchat", list(arguments)) as root:
        name, command, rest = cli.resolve_command(root, list(arguments))
        assert command is not None
        return command.make_context(name, rest, parent=root).params


def test_each_layer_wins_over_the_next(user: Path, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def tokens(*more: str) -> object:
        return parsed("ask", "a", "b", *more)["max_tokens"]

    assert tokens() == 256
    user.write_text("max-tokens = 11\n")
    assert tokens() == 11
    user.write_text('max-tokens = 11\n[ask]\nmax-tokens = "1k"\n')
    assert tokens() == 1000
    project.write_text("max-tokens = 13\n")
    assert tokens() == 13, "any line of the project file comes before the user file"
    monkeypatch.setenv("LONGCHAT_MAX_TOKENS", "14")
    assert tokens() == 14
    monkeypatch.setenv("LONGCHAT_ASK_MAX_TOKENS", "15")
    assert tokens() == 15
    assert tokens("--max-tokens", "16") == 16


def test_options_of_a_method(user: Path, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user.write_text(
        '[ask]\nmethod = "sink"\n[sink]\nwindow = 700\nsinks = 5\n[ask.sink]\nwindow = "2k"\n'
        "[chat.recall]\nwindow = 900\n"
    )
    assert parsed("ask", "a", "b")["method_options"] == {"window": 2000, "sinks": 5}
    assert parsed("chat")["method_options"] == {"window": 900}, "recall is its default"
    assert parsed("chat", "-m", "sink")["method_options"] == {"window": 700, "sinks": 5}
    assert parsed("ask", "a", "b", "-m", "full")["method_options"] == {}
    assert parsed("ask", "a", "b", "--window", "9")["method_options"] == {"window": 9, "sinks": 5}
    monkeypatch.setenv("LONGCHAT_ASK_WINDOW", "8")
    assert parsed("ask", "a", "b")["method_options"] == {"window": 8, "sinks": 5}
    user.write_text("[recall]\nwindwo = 3\n")
    with pytest.raises(BadConfig, match="no method option windwo; did you mean window"):
        parsed("chat")


def test_flags_and_lists(user: Path) -> None:
    user.write_text(
        '[ask]\njson = true\ninclude = ["*.md", "*.py"]\nstop = "x"\n[models.list]\njson = true\n'
    )
    params = parsed("ask", "a", "b")
    assert (params["as_json"], params["include"], params["stop"]) == (True, ("*.md", "*.py"), ("x",))
    user.write_text("[models.list]\njson = true\n")
    assert json.loads(run("models", "list").output)


def test_global_options(user: Path) -> None:
    user.write_text("quiet = true\n")
    with cli.make_context("longchat", ["models", "list"]) as root:
        name, command, rest = cli.resolve_command(root, ["models", "list"])
        assert isinstance(command, click.Group)
        inner = command.make_context(name, rest, parent=root)
        command.commands["list"].make_context("list", [], parent=inner)
        assert root.meta["quiet"] is True


@pytest.mark.parametrize("text", ["debug = true", "[ask]\ndebug = true"])
def test_debug_shows_the_traceback(user: Path, text: str) -> None:
    user.write_text(text)
    command = [sys.executable, "-m", "longchat_cli", "ask", "none.txt", "q"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 66
    assert "Traceback" in done.stderr


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("[ask", "not valid TOML"),
        ("a = 1\na = 2", "not valid TOML"),
        ("x = " + "[" * 100_000, "not valid TOML"),
        ("temprature = 1", "no setting temprature; did you mean temperature?"),
        ("[aks]\nmodel = 'x'", "no [aks]; did you mean ask?"),
        ("[ask]\nmax_tokens = 3", "did you mean max-tokens?"),
        ("[ask]\nmax-tokens = 'many'", "not a size"),
        ("[eval]\nn = 1.5", "not a valid integer"),
        ("[ask]\nmethod = 'snik'", "did you mean 'sink'?"),
        ("[ask]\njson = 'yes'", "true or false"),
        ("[ask]\nsystem = true", "a text or a number"),
        ("[ask]\nsystem = ['a']", "a single value"),
        ("[ask]\nsystem = {a = 1}", "will not do"),
        ("[ask]\nversion = true", "no setting ask.version"),
        ("[models]\njson = true", "no setting models.json"),
    ],
)
def test_bad_files_are_one_line_and_78(user: Path, text: str, part: str) -> None:
    user.write_text(text)
    command = [sys.executable, "-m", "longchat_cli", "methods"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 78
    (line,) = done.stderr.splitlines()
    assert part in line
    assert str(user) in line


@pytest.mark.parametrize("data", [b"\xff\xfe\x00", b"#" * (settings.MOST_BYTES + 1)])
def test_bytes_that_are_no_configuration(user: Path, data: bytes) -> None:
    user.write_bytes(data)
    assert isinstance(run("methods").exception, BadConfig)


def test_help_and_config_path_come_whatever_the_file(user: Path) -> None:
    user.write_text("[ask")
    assert run("ask", "--help").exit_code == 0
    assert run("config", "path").output == f"{user}\n"
    assert isinstance(run("config", "show").exception, BadConfig)


def test_what_a_project_may_not_set(user: Path, project: Path) -> None:
    for text in (
        "[ask]\noutput = '/tmp/x'",
        "output = '/tmp/x'",
        "offline = false",
        "[bench.speed]\njson = '/tmp/x'",
        "plot = '/tmp'",
        "no-log = false",
        "[ask]\ncache = true",
        "[chat]\nwith = ['/etc/passwd']",
        "cache-size = 0",
        "[chat]\nno-save = false",
    ):
        project.write_text(text)
        assert isinstance(run("methods").exception, BadConfig)
        user.write_text(text)
        project.unlink()
        assert run("methods").exit_code == 0
        user.unlink()
    project.write_text("[ask]\nschema = 'a.json'\njson = true\n[methods]\ndata = 'b.txt'\n")
    assert run("methods").exit_code == 0
    project.write_text("no-log = true\n[ask]\ncache = false\n")  # less may be kept
    assert run("methods").exit_code == 0
    for words in (("ask.output", "x"), ("ask.no-log", "false")):
        assert run("config", "set", "--project", *words).exception
    assert run("config", "set", "--project", "ask.no-log", "true").exit_code == 0


def test_what_is_asked_is_no_setting(user: Path, project: Path) -> None:
    for file, (section, text) in itertools.product(
        (user, project),
        [
            ("ask", "question = 'Who?'"),
            ("chat", "resume = '1'"),
            ("chat", "fork = true"),
            ("sessions.rm", "all = true"),
        ],
    ):
        file.write_text(f"[{section}]\n{text}")
        error = run("methods").exception
        assert isinstance(error, BadConfig) and f"there is no setting {section}.{text.split()[0]}" in str(
            error
        )
        file.unlink()
    assert "question" not in run("config", "show", "--all").stdout


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="gives a file away")
def test_a_file_of_somebody_else_is_not_read(user: Path, project: Path) -> None:
    project.write_text("quiet = true")
    os.chown(project, 12345, 12345)
    done = run("config", "show")
    assert "belongs to somebody else" in done.stderr
    assert done.stdout == ""


def test_set_get_show_unset(user: Path, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user.write_text("# mine\nmodel = 'a' # why\n\n[ask]\ntop-k = 3\n")
    for words in (("ask.method", "sink"), ("chat.sink.window", "2k"), ("temperature", "0.5")):
        assert run("config", "set", *words).exit_code == 0
    run("config", "set", "ask.include", "*.md", "*.txt")
    run("config", "set", "--project", "ask.top-k", "4")
    run("config", "set", "ask.strict", "on")
    text = user.read_text()
    assert text.startswith("# mine\nmodel = 'a' # why\n")
    assert settings.user_file().table == {
        "model": "a",
        "temperature": 0.5,
        "ask": {"top-k": 3, "method": "sink", "include": ["*.md", "*.txt"], "strict": True},
        "chat": {"sink": {"window": "2k"}},
    }
    monkeypatch.setenv("LONGCHAT_MODEL", "b")
    shown = dict(
        line.split(" = ", 1) for line in run("config", "show", "ask", "--origin").output.splitlines()
    )
    assert shown["ask.top-k"] == f"4  # project file {project.parent / 'below' / settings.PROJECT}"
    assert shown["ask.model"] == '"b"  # LONGCHAT_MODEL'
    assert shown["ask.method"] == f'"sink"  # user file {user}'
    assert run("config", "get", "model").output == "b\n"
    assert run("config", "get", "chat.sink.window", "--origin").output == f"2k  # user file {user}\n"
    assert json.loads(run("config", "get", "chat.max-tokens", "--json").output) == {
        "key": "chat.max-tokens",
        "value": 1024,
        "origin": "default",
    }
    assert run("config", "get", "chat.repetition-penalty").output == "1.1\n"  # a chat copies itself without
    assert run("config", "get", "chat.start-penalty").output == "0.5\n"
    assert run("config", "get", "ask.repetition-penalty").output == "1.0\n"
    assert run("config", "unset", "ask.method").exit_code == 0
    assert "method" not in user.read_text()
    assert run("config", "unset", "ask.method").exception


def test_show_all_has_every_option_of_every_command(user: Path) -> None:
    keys = {row["key"] for row in json.loads(run("config", "show", "--all", "--json").output)}
    for path, command in configured.commands(cli):
        for key, option in configured.options_of(command).items():
            assert option.hidden or ".".join((*path, key)) in keys


@pytest.mark.parametrize(
    "words",
    [
        ("ask.metod", "x"),
        ("nonsense.model", "x"),
        ("ask", "x"),
        ("ask.method", "snik"),
        ("ask.model", "nosuch"),
        ("model", "no/such/model.gguf"),
        ("x.y.z", "1"),
    ],
)
def test_set_refuses_what_it_does_not_know(user: Path, words: tuple[str, str]) -> None:
    done = run("config", "set", *words)
    assert done.exit_code != 0
    assert not user.exists()


@pytest.mark.parametrize("name", ["smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct", "here.gguf"])
def test_set_takes_models_that_there_are(user: Path, project: Path, name: str) -> None:
    Path("here.gguf").touch()
    assert run("config", "set", "model", name).exit_code == 0
    assert settings.user_file().table == {"model": name}


@pytest.mark.parametrize(
    ("key", "meant"),
    [("window", "recall.window"), ("ask.passages", "ask.recall.passages"), ("eval.sinks", "eval.sink.sinks")],
)
def test_options_of_methods_are_pointed_at(user: Path, key: str, meant: str) -> None:
    error = run("config", "get", key).exception
    assert isinstance(error, UsageError)
    assert error.do == f"it is an option of methods: {meant}"
    assert run("config", "get", meant).exit_code == 0


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="drops from root to nobody")
def test_folders_that_may_not_be_entered_hold_no_file(user: Path, project: Path) -> None:
    user.write_text("quiet = true")
    project.write_text("quiet = true")
    user.parent.chmod(0o700)
    project.parent.chmod(0o700)
    if not (child := os.fork()):
        code = 2
        with contextlib.suppress(BaseException):
            os.setuid(65534)
            code = int(settings.project_file() is not None or settings.user_file().table != {})
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_new_file_is_private(user: Path) -> None:
    run("config", "set", "quiet", "true")
    assert stat.S_IMODE(user.stat().st_mode) == 0o600
    user.chmod(0o644)
    run("config", "set", "quiet", "false")
    assert stat.S_IMODE(user.stat().st_mode) == 0o644, "what the user chose stays"
    assert [path.name for path in user.parent.iterdir()] == ["config.toml"]


def test_edit_runs_the_editor_and_checks(user: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    editor = tmp_path / "editor"
    editor.write_text('#!/bin/sh\necho "$TEXT" >> "$1"\n')
    editor.chmod(0o755)
    monkeypatch.setenv("VISUAL", str(editor))
    monkeypatch.setenv("TEXT", "model = 'm'")
    assert run("config", "edit").exit_code == 0
    assert settings.user_file().table == {"model": "m"}
    monkeypatch.setenv("TEXT", "modle = 'm'")
    assert isinstance(run("config", "edit").exception, BadConfig)


def test_names_of_methods_commands_and_options_do_not_collide() -> None:
    """`[sink]` and `[ask.sink]` are methods, `[ask]` a command, `ask.model` an option."""
    assert not set(METHODS) & set(cli.commands)
    for _, command in configured.commands(cli):
        options = configured.options_of(command)
        assert "method" not in options or not set(METHODS) & set(options)


def test_a_directory_in_the_home_of_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGCHAT_DATA_DIR", "~no-such-user/x")
    with pytest.raises(BadConfig, match="LONGCHAT_DATA_DIR"):
        data_dir()


def test_what_a_project_says_is_shown_without_its_escapes(user: Path, project: Path) -> None:
    project.write_text('[ask]\nsystem = "a\\u001b[31mb\\u202ec"\n')
    shown = CliRunner().invoke(cli, ["config", "get", "ask.system"], color=True).stdout  # as on a terminal
    assert shown == "abc\n"
    for words in (["config", "show"], ["config", "get", "ask.system", "--json"]):
        shown = CliRunner().invoke(cli, words, color=True).stdout
        assert "ask.system" in shown and not {"\x1b", "\u202e"} & set(shown)
