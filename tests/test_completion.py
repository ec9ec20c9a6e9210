"""Completion in a real bash, what zsh and fish would be told, and the manual page."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from longchat_cli import config
from longchat_cli.attention import METHODS, method_class
from longchat_cli.cli import cli
from longchat_cli.commands import configured, man

Complete = Callable[..., list[str]]


@pytest.fixture
def complete(tmp_path: Path) -> Complete:
    """`complete("ask", "--me")`: what bash offers for the last word."""
    program = tmp_path / "bin" / "longchat"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m longchat_cli "$@"\n')
    program.chmod(0o755)
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    script = tmp_path / "script"
    script.write_bytes(subprocess.check_output([program, "completion", "bash"]))

    def call(*words: str) -> list[str]:
        code = (
            f"compopt() {{ echo files; }}; source {script}\n"
            f'COMP_WORDS=(longchat "$@"); COMP_CWORD={len(words)}\n'
            "_longchat_completion longchat\n"
            'printf "%s\\n" "${COMPREPLY[@]}"\n'
        )
        done = subprocess.run(
            ["bash", "--norc", "-c", code, "bash", *words],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"PATH": path},
        )
        assert done.stderr == ""
        return done.stdout.split()

    return call


needs_bash = pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")


@needs_bash
def test_commands_options_methods_models_and_files(complete: Complete) -> None:
    assert complete("as") == ["ask"]
    assert complete("models", "p") == ["pull"]
    assert complete("ask", "--over") == ["--overflow"]
    assert complete("ask", "x", "--method", "si") == ["sink", "sink++"]
    assert complete("methods", "snap") == ["snapkv"]
    assert "smollm2" in complete("ask", "--model", "smol")
    assert "smollm2" in complete("models", "pull", "")
    assert complete("ask", "--model", "./a") == ["files"]
    assert complete("ask", "boo") == ["files"]
    assert complete("config", "set", "ask.max-") == ["ask.max-tokens"]


@needs_bash
def test_options_of_the_method_complete_and_are_remembered(complete: Complete) -> None:
    assert complete("ask", "-m", "sink", "--win") == ["--window"]
    assert complete("chat", "-m", "full", "--kv-dtype", "in") == ["int8", "int4"]
    (kept,) = config.cache_dir().glob("options-*.json")
    kept.write_text("{")
    assert complete("ask", "-m", "sink", "--win") == ["--window"], "a damaged file is made again"
    code = (
        "import sys, os\nos.environ |= {'_LONGCHAT_COMPLETE': 'bash_complete', 'COMP_CWORD': '4',"
        " 'COMP_WORDS': 'longchat ask -m sink --win'}\n"
        "from longchat_cli.__main__ import main\nmain([])\nassert 'torch' not in sys.modules\n"
    )
    assert subprocess.check_output([sys.executable, "-c", code]) == b"plain,--window\n"


@needs_bash
def test_a_broken_configuration_does_not_break_completion(
    complete: Complete, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONGCHAT_CONFIG_DIR", str(tmp_path))
    (tmp_path / "config.toml").write_text("[ask")
    assert complete("ask", "--over") == ["--overflow"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells(shell: str) -> None:
    script = subprocess.check_output([sys.executable, "-m", "longchat_cli", "completion", shell], text=True)
    assert f"_LONGCHAT_COMPLETE={shell}_complete" in script
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True)


def test_the_manual_names_every_option_of_every_command_and_method() -> None:
    lines = list(man.page(cli))
    text = "\n".join(lines).replace("\\-", "-")
    for path, command in configured.commands(cli):
        part = text.partition(f".SS longchat {' '.join(path)}\n")[2].partition("\n.S")[0]
        for key, option in configured.options_of(command).items():
            assert option.hidden or f"--{key}" in part, (path, key)
    for name in METHODS:
        part = text.partition(f".SS {name}\n")[2].partition("\n.S")[0]
        assert all(f"--{field.name.replace('_', '-')}" in part for field in method_class(name).options())
    assert ".SH EXIT CODES" in lines
    assert ".SH ENVIRONMENT" in lines


@pytest.mark.skipif(shutil.which("groff") is None, reason="no groff")
def test_the_manual_is_valid_roff() -> None:
    text = "\n".join(man.page(cli))
    command = ["groff", "-man", "-Tutf8", "-ww", "-P-c"]
    done = subprocess.run(command, input=text, text=True, capture_output=True, check=True)
    assert [line for line in done.stderr.splitlines() if "adjust" not in line and "break" not in line] == []
    assert "130 interrupted (Ctrl-C)" in done.stdout


def test_completion_is_quick() -> None:
    """Best of three: a busy machine must not fail it."""
    environment = os.environ | {
        "_LONGCHAT_COMPLETE": "bash_complete",
        "COMP_WORDS": "longchat ask --ove",
        "COMP_CWORD": "2",
    }

    def measure() -> float:
        start = time.perf_counter()
        subprocess.check_output([sys.executable, "-m", "longchat_cli"], env=environment)
        return time.perf_counter() - start

    assert min(measure() for _ in range(3)) < 1
