"""The chat in a terminal, over an engine without a model: what is on the screen, keys, signals."""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from screen import Screen

from longchat_cli.repl.prompt import Prompt
from longchat_cli.sessions import Sessions

FAKES = Path(__file__).with_name("fakes.py")
MOMENTS = {"prefill": "word " * 200, "decode": "a story about the river"}
"""What is typed so that a signal a moment later meets the reading of a turn, or the answer."""

Start = Callable[..., Screen]


@pytest.fixture
def start(tokenizer_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """`start(*arguments)`: `longchat` over the fake engine in a terminal, its state in `tmp_path`.

    `delay`: seconds for a step, for loading; `shell`: a bash script around the command line `{}`.
    """
    for name in ("state", "data", "cache"):
        monkeypatch.setenv(f"LONGCHAT_{name.upper()}_DIR", str(tmp_path / name))
    for name in ("TMUX", "DISPLAY", "WAYLAND_DISPLAY", "NO_COLOR", "FORCE_COLOR", "VISUAL", "EDITOR"):
        monkeypatch.delenv(name, raising=False)
    screens: list[Screen] = []

    def spawn(
        *arguments: str, delay: str = "0,0", shell: str = "exec {}", size: Any = (30, 100), **env: str
    ) -> Screen:
        command = " ".join([sys.executable, str(FAKES), str(tokenizer_dir), delay, *arguments])
        screens.append(Screen(["bash", "--norc", "-c", shell.format(command)], tmp_path, env, size))
        return screens[-1]

    yield spawn
    for screen in screens:
        screen.close()


DIALOGUE = [
    ("hello", "keeps nothing\nYou said: hello\n>"),
    ("/context", "1 turn, 29 tokens seen"),
    ("/contxt", "error: no command /contxt; did you mean /context? (//contxt sends it as text)"),
    ("//etc is a folder", "You said: /etc is a folder"),
    ("/tokens hello", "> /tokens hello\n4 tokens\n>"),
    ("/undo", "> /undo\ntaken back: /etc is a folder\n>"),
    ("/retry", "> /retry\nYou said: hello\n>"),
    ("/edit 1 good day", "> /edit 1 good day\nYou said: good day\n>"),
    ("/edit 7 x", "error: there is no turn 7: they are 1 to 1"),
    ("/tokens", "   1         32  good day\n>"),
    ("/set temperature 0.7", "temperature        0.7\n>"),
    ("/set temprature 1", "error: there is no setting temprature; did you mean temperature?"),
    ("/set top-p much", "error: top-p is a number, not much"),
    ("/set max-tokens 99999gi", "it must be from 1 to 1,000,000,000"),
    ("/set top-p 3", "error: --top-p is 3.0: it must be above 0 and at most 1"),
    ("/set repetition-penalty 1e-320", "it must be from 0.01 to 100"),
    ("/set start-penalty -1", "it must be from 0 to 100"),
    ("/set repetition-penalty inf", "it must be from 0.01 to 100"),
    ("/set keys vim", "error: keys is emacs or vi, not vim"),
    ("/method", "sink: "),
    ("/model", "fake: window 2,048, float32 on cpu"),
    ("/method :", "error: which method?; choose from "),
    ("/system", "no system prompt; /system TEXT sets one"),
    ("/system Be brief.", "tokens read anew"),
    ("/system", "> /system\nBe brief.\n>"),
    ("/pin 1", "error: sink cannot keep a turn; /method sink and /method recall can"),
    ("/pin 1 off", "turn 1 is not pinned\n"),
    ("/pin two", "error: two is no turn's number; /tokens lists them"),
    ("/file nowhere.txt", "error: nowhere.txt does not exist"),
    ("/file note.txt", "note.txt: 16 tokens go with your next words"),
    ("/file off", "nothing goes with your next words"),
    ("/set think 12", "think              12\n>"),
    ("/set think 0", "think              0\n>"),
    ("/set think some", "error: 'some' is not a size"),
    ("/copy code", "error: there is no code in the last answer"),
    ("/save The river", "chat 1: The river; `longchat chat --resume 1`"),
    ("and now?", "You said: and now?"),
    ("/search good", "     1  turn 1     you     good day\n"),
    ("/search nobodysaidthis", "no turn has all of these words"),
    ("/export talk.md", "2 turns written to talk.md"),
    ("/export talk.json", "2 turns written to talk.json"),
    (
        "/export talk.json",
        "error: cannot write talk.json: it is there already; --force behind it writes over it",
    ),
    ("/export talk.json --force", "2 turns written to talk.json"),
    (
        "/export talk.pdf",
        "error: .pdf is no format of chats: a chat is written as .md, .markdown, .txt, .json",
    ),
    ("/export no/such/folder.md", "error: cannot create no/such/folder.md: No such file or directory"),
    ("/export loop", "error: cannot create loop: Too many levels of symbolic links"),
    (f"/export {'x' * 300}", "File name too long"),
    ("/export /dev/full", "error: cannot write /dev/full: No space left on device"),
    ("/branch 1", "chat 2: a copy of chat 1 up to turn 1"),
    ("/sessions", "     1  20"),
    ("/sessions", "     2* 20"),
    ("/load", "error: which chat?; /sessions lists them"),
    ("/load 2", "error: chat 2 is this one"),
    ("/load last", "error: chat 2 is this one"),
    ("/load 9", "error: there is no chat 9; `longchat sessions ls` shows them"),
    ("/load 1", "turn 2: and now?\nYou said: and now?"),
    ("/new", "> /new\na new conversation\n>"),
    ("/undo", "error: there is nothing to take back"),
    ("/edit", "error: there is no turn: nothing was said yet"),
    ("/copy", "error: there is no answer to copy"),
]
"""What is typed, and what stands on the screen afterwards."""


def test_commands(start: Start, tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("The mill has seven sails.\n")
    (tmp_path / "loop").symlink_to("loop")
    screen = start("chat", "-m", "sink")
    assert "fake, sink. /help lists commands, Ctrl-D leaves." in screen.prompt()
    for typed, shown in DIALOGUE:
        assert shown in screen.say(typed), screen.text()
        assert "Traceback" not in screen.text()
    screen.write("\x04")
    assert (screen.ended(), screen.restored()) == (0, True)
    assert "# The river" in (tmp_path / "talk.md").read_text()
    assert [turn["text"] for turn in json.loads((tmp_path / "talk.json").read_text())["turns"]] == [
        "good day",
        "You said: good day",
        "and now?",
        "You said: and now?",
    ]


def test_every_command_has_its_help_and_completion(start: Start, tmp_path: Path) -> None:
    from longchat_cli.repl.commands import COMMANDS

    (tmp_path / "note.txt").write_text("The mill has seven sails.\n")
    screen = start("chat", size=(50, 100))
    screen.prompt()
    shown = screen.say("/help")
    for name, command in COMMANDS.items():
        assert f"\n/{name} {command.takes}".rstrip() in shown
        assert command.help in shown
    assert "/undo   take the last" in screen.say("/help undo")
    for typed, offered, completed in (
        ("/re", "answer the last turn again", "/retry"),
        ("/method lm", "lm-infinite", "/method lm-infinite"),
        ("/set k", "emacs", "/set keys"),
        ("/file no", "note.txt", "/file note.txt"),
        ("/model gem", "Gemma", "/model gemma3-270m"),
    ):
        screen.write(typed)
        screen.until(offered)
        screen.write("\t")
        screen.until(f"> {completed}")
        screen.write("\x15")
    screen.write("/set keys vi\r")
    screen.prompt()
    screen.write("hallo\x1b")
    time.sleep(0.7)  # a lone Escape is told from the beginning of a key by what does not follow
    screen.write("0lrx\r")
    assert "You said: hxllo" in screen.prompt()
    assert "/quit" in screen.say("/set keys emacs")
    screen.write("/quit\r")
    assert (screen.ended(), screen.restored()) == (0, True)


def test_line_editor(start: Start, tmp_path: Path) -> None:
    """History, several lines, the editor, wide characters, another size."""
    editor = tmp_path / "editor"
    editor.write_text("#!/bin/sh\nsed -i s/river/lake/ $1\n")
    editor.chmod(0o755)
    screen = start("chat", EDITOR=str(editor))
    screen.prompt()
    screen.say("the river")
    screen.write("one\x1b\rtwo\r")  # Alt-Enter
    assert "> one\n. two\nYou said: one\ntwo\n>" in screen.prompt()
    screen.write("\x12the ri")  # Ctrl-R
    screen.until("reverse-i-search")
    screen.write("\r\r")
    assert screen.prompt().count("You said: the river") == 2
    screen.write("a river\x18\x05")  # Ctrl-X Ctrl-E
    screen.until("> a lake\nYou said: a lake\n>")
    assert "You said: the lake" in screen.say("/edit 3")
    assert "nothing was changed" in screen.say("/edit 3")
    assert "Enter adds a line, Alt-Enter sends" in screen.say("/multiline")
    screen.write("three\rfour\x1b\r")
    assert "You said: three\nfour" in screen.prompt()
    screen.write("/multiline\x1b\r")
    screen.prompt()
    screen.write("日本語 👍🏽 ok\x1b[D\x1b[D\x1b[Dx\r")  # x in front of " ok"
    screen.prompt()
    assert screen.text().replace(" ", "").count("日本語👍🏽xok") == 2
    screen.write("w" * 60)
    screen.until("w" * 60)
    screen.resize(30, 50)
    screen.until("> " + "w" * 48 + "\n  " + "w" * 12)
    screen.until(lambda: "recall" in screen.lines()[-1])
    assert "You said: " + "w" * 40 in screen.say("")
    screen.write("\x04")
    assert screen.ended() == 0
    history = tmp_path / "state" / "chat_history"
    assert "+the river\n" in history.read_text()
    assert history.stat().st_mode & 0o777 == 0o600
    assert history.parent.stat().st_mode & 0o777 == 0o700


def test_paste_of_ten_thousand_lines_is_one_turn(start: Start, tmp_path: Path) -> None:
    screen = start("chat", "--max-tokens", "8")
    screen.prompt()
    pasted = "\r".join(f"line {number} of a long text" for number in range(10_000))
    begun = time.monotonic()
    screen.write(f"\x1b[200~{pasted}\x1b[201~")
    screen.until("line 9999 of a long text")
    assert time.monotonic() - begun < 20, "half a second, on a machine that is not busy"
    screen.say("", seconds=60)
    assert "   1  " in screen.say("/tokens")
    assert "line 0 of a long text line 1 of a long text" in screen.text()
    assert "   2  " not in screen.text()
    screen.write("\x1b[A\x1b[A")  # it is in this chat's history, not in the file
    screen.write("\x15\x04")
    assert not (tmp_path / "state" / "chat_history").read_text().count("line 9999")


def test_nothing_that_is_said_acts_on_the_terminal(start: Start) -> None:
    screen = start("chat")
    screen.prompt()
    screen.write("\x1b[200~\x1b]0;owned\x07\x1b[31mred\x1b[2J\x1b[201~\r")
    screen.prompt()
    assert "\nYou said: red\n" in screen.text()
    assert screen.screen.title == ""
    assert b"\x1b]" not in screen.raw


def test_markdown_is_coloured_on_a_terminal_alone(start: Start, tmp_path: Path) -> None:
    asked = "some **bold** words"
    screen = start("chat")
    screen.prompt()
    assert "You said: some **bold** words" in screen.say(asked)
    assert b"\x1b[0;1mbold" in screen.raw
    screen.say("/set markdown off")
    screen.say(asked)
    assert screen.raw.count(b"\x1b[0;1mbold") == 1
    for arguments, env, shell, coloured in (
        (("--plain",), {"FORCE_COLOR": "1"}, "exec {}", False),
        ((), {"FORCE_COLOR": "1"}, "{} | cat", True),
    ):
        screen = start("chat", *arguments, shell=shell, **env)
        screen.prompt()
        screen.write(asked + "\r")
        screen.until("You said: some **bold** words\n")
        assert (b"\x1b[0;1mbold" in screen.raw) == coloured


def test_copy(start: Start, tmp_path: Path) -> None:
    """Through the terminal, or through a program when there is one."""
    screen = start("chat")
    screen.prompt()
    screen.say("a \u00e9 ~~~")
    assert "characters copied through the terminal (OSC 52)" in screen.say("/copy")
    assert b"\x1b]52;c;" + base64.b64encode("You said: a \u00e9 ~~~".encode()) + b"\x07" in screen.raw
    program = tmp_path / "bin" / "wl-copy"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ncat > {tmp_path}/copied\n")
    program.chmod(0o755)
    screen = start("chat", WAYLAND_DISPLAY="w", PATH=f"{program.parent}:{os.environ['PATH']}")
    screen.prompt()
    screen.write("\x1b[200~code:\r```py\rx = 1\r```\x1b[201~\r")
    screen.prompt()
    assert "6 characters copied through wl-copy" in screen.say("/copy code")
    assert (tmp_path / "copied").read_text() == "x = 1\n"


def test_dumb_terminal(start: Start) -> None:
    screen = start("chat", TERM="dumb")
    screen.until("\n>")
    screen.write("some **bold** words\r")
    screen.until("You said: some **bold** words\n>")
    screen.write("/context\r")
    screen.until("held")
    assert b"\x1b[" not in screen.raw
    screen.write("\x04")
    assert (screen.ended(), screen.restored()) == (0, True)


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_bytes_that_are_no_utf8_are_kept_as_replaced(start: Start, term: str) -> None:
    screen = start("chat", TERM=term)
    screen.until("\n>")
    screen.child.send(b"hi \xff there\r")
    screen.until("You said: hi \N{REPLACEMENT CHARACTER} there\n>")
    assert "damaged" not in screen.text()
    assert "warning" not in screen.text()
    assert Sessions().load(1).turns[0].text == "hi \N{REPLACEMENT CHARACTER} there"


@pytest.mark.parametrize(
    ("editor", "shown"),
    [
        ('"unbalanced', "error: the editor failed: No closing quotation"),
        ("rm -f", "error: the editor failed: [Errno 2]"),
        ("{}/latin1", "error: the editor failed: 'utf-8' codec"),
    ],
)
def test_editors_that_fail(start: Start, tmp_path: Path, editor: str, shown: str) -> None:
    script = tmp_path / "latin1"
    script.write_text("#!/bin/sh\nprintf '\\351' > $1\n")
    script.chmod(0o755)
    screen = start("chat", EDITOR=editor.format(tmp_path))
    screen.prompt()
    screen.say("hello")
    assert shown in screen.say("/edit 1")
    screen.write("a river\x18\x05")  # Ctrl-X Ctrl-E
    screen.until(lambda: screen.text().count(shown) == 2)
    assert "Traceback" not in screen.text()
    screen.write("side\r")
    screen.until("You said: a riverside\n>")  # what was typed was there
    assert "You said: bye" in screen.say("bye")


def test_a_blank_editor_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    editor = tmp_path / "vi"
    editor.write_text("#!/bin/sh\nPATH=/usr/bin:/bin sed -i s/a/b/ $1\n")
    editor.chmod(0o755)
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("VISUAL", " ")
    monkeypatch.setenv("EDITOR", "   ")
    assert Prompt(io.StringIO(), lambda name: []).edit("a") == "b"


@pytest.mark.parametrize("command", ["pin", "load", "edit", "branch"])
def test_endless_numbers(start: Start, command: str) -> None:
    screen = start("chat")
    screen.prompt()
    screen.say("hello")
    screen.write(f"\x1b[200~/{command} {'9' * 5000}\x1b[201~\r")
    assert "longchat: error: " in screen.prompt()
    assert "You said: bye" in screen.say("bye")


def test_history_is_best_effort(start: Start, tmp_path: Path) -> None:
    screen = start("chat", "--no-save")
    screen.prompt()
    shutil.rmtree(tmp_path / "state")
    assert "You said: hello\n>" in screen.say("hello")
    assert "You said: bye\n>" in screen.say("bye")
    assert "Press ENTER" not in screen.text()


def test_document_from_stdin_and_keyboard_from_the_terminal(start: Start) -> None:
    screen = start("chat", "--with", "-", shell="printf 'The mill has seven sails.\\n' | {}")
    screen.prompt()
    assert "You said: how many?" in screen.say("how many?")
    screen.write("\x04")
    assert screen.ended() == 0


def test_answers_to_a_file_prompt_on_the_terminal(start: Start, tmp_path: Path) -> None:
    screen = start("chat", shell="{} > out.txt")
    screen.prompt()
    screen.say("hello")
    screen.write("\x04")
    assert screen.ended() == 0
    assert (tmp_path / "out.txt").read_text() == "You said: hello\n"


def test_full_at_its_end(start: Start) -> None:
    screen = start("chat", "--method", "full", "--max-tokens", "4k")
    screen.prompt()
    screen.say("word " * 100)
    screen.write("\x1b[200~" + "word " * 1500 + "\x1b[201~\r")
    assert "error: full is at its end" in screen.prompt()
    assert "1 turn," in screen.say("/context")
    screen.write("/quit\r")
    assert screen.ended() == 0


def test_progress_bar_is_gone_before_the_answer(start: Start) -> None:
    screen = start("chat", "--max-tokens", "3", delay="0.4,0")
    screen.prompt()
    screen.write("a turn long enough to be read in several steps, so that there is a bar to be seen\r")
    screen.until("reading: ")
    screen.prompt()
    assert "reading: " not in screen.text()


def test_ctrl_c_stops_the_answer_and_keeps_the_part(start: Start) -> None:
    screen = start("chat", delay="0.1,0")
    screen.prompt()
    screen.write("a long story about the river\r")
    screen.until("You ")
    screen.write("\x03")
    assert "stopped; what was said is kept, Ctrl-C again leaves" in screen.prompt()
    assert "^C" not in screen.text()
    time.sleep(2.1)
    screen.write("\x03")
    assert "Ctrl-C again or Ctrl-D leaves" in screen.prompt()
    screen.write("\x03")
    assert (screen.ended(), screen.restored()) == (130, True)


def test_what_is_typed_during_an_answer_waits_for_the_prompt(start: Start) -> None:
    screen = start("chat", delay="0.1,0")
    screen.prompt()
    screen.write("one\r")
    screen.until("You ")
    screen.write("/context\rtwo")
    screen.prompt()
    screen.until("1 turn,")
    screen.prompt()
    screen.until("> two")
    assert "You said: one\n> /context\n" in screen.text()


def test_ctrl_c_while_a_turn_is_read_takes_it_back(start: Start) -> None:
    screen = start("chat", delay="0.1,0")
    screen.prompt()
    screen.write(MOMENTS["prefill"] + "\r")
    screen.until("reading: ")
    screen.write("\x03")
    assert "stopped; everything is as before, Ctrl-C again leaves" in screen.prompt()
    assert "0 turns, 5 tokens seen" in screen.say("/context")


@pytest.mark.parametrize("moment", MOMENTS)
def test_ctrl_c_held_down_leaves(start: Start, moment: str) -> None:
    screen = start("chat", delay="0.1,0")
    screen.prompt()
    screen.write(MOMENTS[moment] + "\r")
    screen.until("reading: " if moment == "prefill" else "You ")
    begun = time.monotonic()
    for _ in range(20):
        screen.write("\x03")
        screen.read(0.02)
    assert (screen.ended(), screen.restored()) == (130, True)
    assert time.monotonic() - begun < 10
    assert "Traceback" not in screen.text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_while_loading(start: Start, number: signal.Signals) -> None:
    screen = start("chat", delay="0,60")
    screen.until("loading")
    assert _ends_within_a_second(screen, number) == 128 + number


@pytest.mark.parametrize(
    ("moment", "number"),
    [*((moment, signal.SIGTERM) for moment in ("prompt", *MOMENTS)), ("decode", signal.SIGHUP)],
)
def test_signals_end_within_a_second(
    start: Start, tmp_path: Path, moment: str, number: signal.Signals
) -> None:
    screen = start("chat", delay="0.1,0")
    screen.prompt()
    if moment != "prompt":
        screen.write(MOMENTS[moment] + "\r")
        screen.until("reading: " if moment == "prefill" else "You ")
    assert _ends_within_a_second(screen, number) == 128 + number
    _check_what_is_kept(tmp_path, moment)


def _check_what_is_kept(home: Path, moment: str) -> None:
    """Of an answer as much as was there, of a turn that was not read in full nothing."""
    kept = Sessions(home / "data" / "sessions" / "sessions.db")
    turns = kept.load(kept.find("last")).turns if kept.ls() else []
    if moment != "decode":
        assert turns == []
        return
    (user, answer) = turns
    assert user.text == MOMENTS["decode"]
    assert "You said: a story about the river".startswith(answer.text) and answer.text
    assert answer.stop == "cancelled"


def _ends_within_a_second(screen: Screen, number: int) -> int:
    """The exit code, once the terminal is found as a shell wants it."""
    begun = time.monotonic()
    screen.child.kill(number)
    code = screen.ended()
    assert time.monotonic() - begun < 5, "a second, on a machine that is not busy"
    assert screen.restored()
    assert "Traceback" not in screen.text()
    return code


@pytest.mark.parametrize(
    ("moment", "trap", "codes"),
    [
        ("prompt", "", {129}),
        ("prefill", "", {129, 74}),  # whichever is first, the signal or the error of a write
        ("decode", "", {129, 74}),
        ("prompt", "trap '' HUP;", {0, 74}),
        ("decode", "trap '' HUP;", {74}),
    ],
)
def test_closed_terminal(start: Start, tmp_path: Path, moment: str, trap: str, codes: set[int]) -> None:
    """Where SIGHUP is ignored, it ends as well: nothing can be read or written any more."""
    screen = start("chat", delay="0.05,0", shell=trap + "exec {}")
    screen.prompt()
    if moment != "prompt":
        screen.write(MOMENTS[moment] + "\r")
        screen.until("reading: " if moment == "prefill" else "You ")
    assert screen.hang_up(5) in codes
    _check_what_is_kept(tmp_path, moment)


def test_suspended_and_back(start: Start, tmp_path: Path) -> None:
    """Ctrl-Z at the prompt and during an answer gives the shell its terminal; `fg` goes on."""
    (tmp_path / "inputrc").write_text("set enable-bracketed-paste off\n")
    shell = "INPUTRC=inputrc exec bash --norc -i < /dev/tty"
    screen = start("chat", delay="0.1,0", shell=f"printf '{{}}' > run; PS1='shell: ' {shell}")
    screen.until("shell:")
    screen.write(". ./run\r")
    screen.prompt()
    screen.write("half a line")
    screen.until("> half a line")
    for key in ("\x1a", None):  # Ctrl-Z, and a signal from elsewhere
        _suspend(screen, key)
        screen.write("fg\r")
        screen.prompt()
        screen.until("> half a line")
    screen.write(" more\r")
    screen.until("You ")
    _suspend(screen, "\x1a")
    screen.write("fg\r")
    assert "half a line more\n>" in screen.prompt()
    screen.write("/quit\r")
    screen.until("> /quit\n`longchat chat --resume 1` goes on from here\nshell:")
    screen.write("stty -a\r")
    assert " -echo " not in screen.until(" echoe ")


def _suspend(screen: Screen, key: str | None) -> None:
    """Stop the shell's child by a key, or by a signal; its shell finds the terminal as it left it."""
    stopped = screen.text().count("Stopped")
    if key:
        screen.write(key)
    else:
        children = subprocess.check_output(["ps", "-o", "pid=", "--ppid", str(screen.child.pid)], text=True)
        os.kill(int(children.split()[0]), signal.SIGTSTP)
    screen.until(lambda: screen.text().count("Stopped") > stopped)
    screen.until(lambda: screen.text().rstrip().endswith("shell:"))
    assert screen.restored()


def test_warnings_stand_above_the_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    from longchat_cli.terminal import Console

    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    console = Console()
    with console.progress("reading") as bar:
        time.sleep(0.6)
        bar(1, 3)
        console.warn("it forgets")
        bar(3, 3)
    before, _, after = screen.getvalue().partition("longchat: warning: it forgets")
    assert "reading:  33%" in before
    assert before.endswith("\r")
    assert after.startswith("\n")
    assert "reading:" in after


def test_interrupts_count(monkeypatch: pytest.MonkeyPatch) -> None:
    from longchat_cli.terminal import Interrupts

    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    interrupts = Interrupts()
    with interrupts.catching():
        os.kill(os.getpid(), signal.SIGINT)
        assert (interrupts.stop, interrupts.leave) == (True, False)
        now[0] += 3
        os.kill(os.getpid(), signal.SIGINT)
        assert not interrupts.leave
        now[0] += 1
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
            _wait()
        assert interrupts.leave


def _wait() -> Any:
    """A place for the signal's handler to run."""
    return sum(range(1000))
