"""What commands print with --json is what `longchat schema` says."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from longchat_cli.cli import cli
from longchat_cli.commands import configured, schema
from longchat_cli.logs import Entry, Log

jsonschema = pytest.importorskip("jsonschema", reason="the test extra is not installed")


def output(*words: str, typed: str = "") -> str:
    done = CliRunner().invoke(cli, words, input=typed, catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    return done.stdout


def schema_of(name: str) -> dict[str, Any]:
    return json.loads(output("schema", *name.split(".")))


def check(name: str, value: Any) -> None:
    jsonschema.Draft202012Validator(schema_of(name)).validate(value)


def with_json(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[str]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from with_json(command, (*path, name))
        elif "json" in configured.options_of(command):
            yield ".".join((*path, name))


def test_every_command_with_json_has_a_schema() -> None:
    assert sorted(with_json(cli)) == schema.names()
    assert output("schema").splitlines() == [name.replace(".", " ") for name in schema.names()]


@pytest.mark.parametrize("name", schema.names())
def test_schemas_are_valid_and_say_what_each_property_is(name: str) -> None:
    found = schema_of(name)
    jsonschema.Draft202012Validator.check_schema(found)

    def properties(part: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(part, dict):
            yield from part.get("properties", {}).items()
            for value in part.values():
                yield from properties(value)
        elif isinstance(part, list):
            for value in part:
                yield from properties(value)

    for key, about in properties(found):
        assert about.get("description") or "$ref" in about, key


def test_an_unknown_one_is_refused() -> None:
    done = CliRunner().invoke(cli, ["schema", "model", "list"])
    assert "did you mean models list?" in str(done.exception)


@pytest.fixture
def note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "note.txt").write_text("The mill has seven sails.\nThe river ran past it.\n")
    (tmp_path / "empty.txt").touch()
    return "note.txt"


@pytest.mark.parametrize(
    "more",
    [
        ("--method", "full"),
        ("--method", "full", "--no-cite"),
        ("--method", "sink"),
        ("--method", "recall"),
        ("--quote",),
    ],
    ids=" ".join,
)
def test_ask(note: str, tiny_model: Callable[..., Path], more: tuple[str, ...]) -> None:
    questions = ("-q", "How many sails?", "-q", "Where?")
    options = ("--model", str(tiny_model()), "--max-tokens", "12", "--json")
    lines = output("ask", note, *questions, *options, *more).splitlines()
    assert len(lines) == 2
    for line in lines:
        check("ask", json.loads(line))


def test_inspect(note: str, tiny_model: Callable[..., Path]) -> None:
    check("inspect", json.loads(output("inspect", ".", "--model", str(tiny_model()), "--json")))


@pytest.mark.parametrize(
    "words",
    [
        ("methods",),
        ("methods", "sink"),
        ("models", "list"),
        ("models", "info", "smollm2"),
        ("models", "info", "owner/name"),
        ("config", "show", "--all"),
        ("config", "get", "ask.method"),
        ("doctor",),
        ("eval", "citations", "--n", "2"),
    ],
    ids=" ".join,
)
def test_commands_without_a_model(words: tuple[str, ...]) -> None:
    names = [name for name in schema.names() if words[: name.count(".") + 1] == tuple(name.split("."))]
    check(names[0], json.loads(output(*words, "--json")))


@pytest.mark.parametrize("task", ["needle", "lines"])
def test_eval(tiny_model: Callable[..., Path], task: str) -> None:
    model = ("--model", str(tiny_model()), "--max-tokens", "4")
    check("eval", json.loads(output("eval", task, "--lengths", "200", "--n", "1", *model, "--json")))


def test_a_local_model(tiny_model: Callable[..., Path]) -> None:
    check("models.info", json.loads(output("models", "info", str(tiny_model()), "--json")))


def test_measure(tiny_model: Callable[..., Path]) -> None:
    words = (
        "--methods",
        "full,sink",
        "--columns",
        "needle",
        "--length",
        "300",
        "--n",
        "1",
        "--max-tokens",
        "2",
    )
    found = output("methods", "--measure", *words, "--model", str(tiny_model()), "--json")
    check("methods", json.loads(found))


def test_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGCHAT_DATA_DIR", str(tmp_path))
    Log(tmp_path / "logs.db").add(Entry("ask", "model", "full", "Who?", "Ahab", "eos", ("moby.txt",)))
    for words in (("list",), ("show",), ("search", "ahab")):
        check(f"logs.{words[0]}", json.loads(output("logs", *words, "--json")))


def test_chats(tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGCHAT_DATA_DIR", str(tmp_path))
    for more in ((), ("--resume",), ("--no-save",)):
        words = ("--model", str(tiny_model()), "--device", "cpu", "--max-tokens", "8", "--json", *more)
        lines = output("chat", *words, typed="hello river\n\nand you?\n").splitlines()
        assert len(lines) == 2
        for line in lines:
            check("chat", json.loads(line))
    for words in (("ls",), ("show",), ("search", "river")):
        found = json.loads(output("sessions", *words, "--json"))
        check(f"sessions.{words[0]}", found)
        assert found


@pytest.mark.slow
def test_kernel_costs() -> None:
    pytest.importorskip("triton")
    check("doctor", json.loads(output("doctor", "--kernels", "--json")))
