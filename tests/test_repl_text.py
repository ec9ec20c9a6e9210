"""What the chat's screen is made of: Markdown in pieces, bars, the clipboard."""

from __future__ import annotations

import base64
import io
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longchat_cli.chat import Context
from longchat_cli.errors import StorageError, UsageError
from longchat_cli.repl import clipboard
from longchat_cli.repl.bar import Part, bar, gauge, legend, shares
from longchat_cli.repl.commands import context_parts
from longchat_cli.repl.markdown import Markdown
from longchat_cli.sessions import Sessions
from longchat_cli.terminal import coloured

COLOURS = re.compile("\x1b\\[[0-9;]*m")
SAMPLE = '''# A title with `code`
Some **bold**, *italic* and ***both***; 2 * 3 * 4, snake_case_name, \\*no\\*, `a*b`.
1. one **never closed
- two
> said **so**
```python
def f(x):
    """two
    lines"""
    return "`no`" + 1  # sum
```
~~~
**plain**
~~~
```nosuchlanguage
x = 1
'''


def styled(text: str, cuts: list[int]) -> str:
    """`text` as it comes out when it came in pieces."""
    markdown, places = Markdown(), [0, *sorted(cuts), len(text)]
    pieces = [markdown.feed(text[a:b]) for a, b in zip(places, places[1:], strict=False)]
    return "".join(pieces) + markdown.flush()


@given(st.lists(st.integers(0, len(SAMPLE)), max_size=40))
def test_colours_do_not_depend_on_the_pieces(cuts: list[int]) -> None:
    assert styled(SAMPLE, cuts) == styled(SAMPLE, [])


@given(
    st.text(st.sampled_from("ab *_`#>-1.~\\\n\u2028"), max_size=80), st.lists(st.integers(0, 80), max_size=8)
)
def test_nothing_but_colours_is_added(text: str, cuts: list[int]) -> None:
    shown = styled(text, [min(cut, len(text)) for cut in cuts])
    assert COLOURS.sub("", shown) == text
    assert shown == styled(text, [])
    last = COLOURS.findall(shown)[-1:]
    assert last in ([], ["\x1b[0m"]), "what follows would be coloured"


@pytest.mark.parametrize(
    ("text", "coloured"),
    [
        ("a **b** c", "a \x1b[0;1;2m**\x1b[0;1mb\x1b[0;1;2m**\x1b[0m c"),
        ("*b*", "\x1b[0;3;2m*\x1b[0;3mb\x1b[0;3;2m*\x1b[0m"),
        ("`x*y*`", "\x1b[0;36;2m`\x1b[0;36mx*y*\x1b[0;36;2m`\x1b[0m"),
        ("## Two\n", "\x1b[0;1;34m## Two\x1b[0m\n"),
        ("- item\n", "\x1b[0;36m-\x1b[0m item\n"),
        ("2 * 3 * 4", "2 * 3 * 4"),
        ("snake_case_name", "snake_case_name"),
        ("\\*no\\*", "\\*no\\*"),
        ("#hashtag", "#hashtag"),
        ("**open\nnext", "\x1b[0;1;2m**\x1b[0;1mopen\x1b[0m\nnext"),
        ("```py\nif x:\n```\n", "\x1b[0;2m```py\x1b[0m\n\x1b[0;35mif\x1b[0m x:\n\x1b[0;2m```\x1b[0m\n"),
        ("```\n*x*\n```", "\x1b[0;2m```\x1b[0m\n*x*\n\x1b[0;2m```\x1b[0m"),
    ],
)
def test_markdown(text: str, coloured: str) -> None:
    assert styled(text, []) == coloured


def test_a_string_over_lines_is_one_in_code() -> None:
    shown = styled('```python\nx = """a\nif b\n"""\n```\n', [])
    assert "\x1b[0;32mif b\x1b[0m" in shown, "green as the string it is in, no keyword"


def test_words_come_as_they_are_said() -> None:
    """Prose waits for nothing but a marker that is not complete; code for the end of its line."""
    markdown = Markdown()
    assert markdown.feed("Once ") == "Once "
    assert markdown.feed("upon *") == "upon "
    assert "a" in markdown.feed("a")
    markdown.feed("*\n```\n")
    assert markdown.feed("x = ") == ""
    assert markdown.feed("1\n") == "x = 1\n"


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=6), st.integers(1, 120))
def test_shares_of_a_bar(counts: list[int], width: int) -> None:
    cells = shares(counts, width)
    there = sum(count > 0 for count in counts)
    if not there or width < there:
        assert cells == [0] * len(counts)
        return
    assert sum(cells) == width
    for count, cell in zip(counts, cells, strict=True):
        assert (cell > 0) == (count > 0)
        assert abs(cell - count / sum(counts) * width) <= there + 1


def test_bar_is_read_without_colours() -> None:
    parts = [
        Part("pinned", 10, "#", "35", "why"),
        Part("visible", 60, "|", "32"),
        Part("forgotten", 30, ".", "90"),
    ]
    assert bar(parts, 20) == "[##||||||||||||......]"
    assert COLOURS.sub("", bar(parts, 20, coloured=True)) == bar(parts, 20)
    assert legend(parts).splitlines()[0] == " #  pinned             10 tokens  why"
    assert [gauge(share) for share in (0, 0.5, 7)] == ["[----------]", "[#####-----]", "[##########]"]


@given(st.lists(st.integers(0, 5000), min_size=6, max_size=6), st.integers(0, 5000))
def test_what_the_bar_shows_adds_up(counts: list[int], sinks: int) -> None:
    opening, pinned, first, visible, retrieved, forgotten = counts
    seen = Context(opening, pinned, first, visible, retrieved, forgotten, 3, 2, 1 << 20)
    parts = context_parts(seen, sinks)
    assert sum(part.tokens for part in parts) == visible + forgotten
    assert min(part.tokens for part in parts) >= 0
    assert [part.name for part in parts] == ["pinned", "sinks", "visible", "retrieved", "forgotten"]
    assert len({part.letter for part in parts}) == 5


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stream", "env", "expected"),
    [
        (Terminal(), {}, True),
        (io.StringIO(), {}, False),
        (None, {}, False),
        (Terminal(), {"TERM": "dumb"}, False),
        (Terminal(), {"NO_COLOR": "1"}, False),
        (io.StringIO(), {"FORCE_COLOR": "1"}, True),
        (Terminal(), {"TERM": "dumb", "FORCE_COLOR": "1"}, True),
        (Terminal(), {"NO_COLOR": "1", "FORCE_COLOR": "1"}, False),
        (io.StringIO(), {"FORCE_COLOR": "0"}, False),
        (Terminal(), {"NO_COLOR": ""}, True),
    ],
)
def test_where_colours_go(
    monkeypatch: pytest.MonkeyPatch, stream: io.StringIO | None, env: dict[str, str], expected: bool
) -> None:
    for name, value in {"TERM": "xterm", "NO_COLOR": "", "FORCE_COLOR": "", **env}.items():
        monkeypatch.setenv(name, value)
    assert coloured(stream) == expected


def test_clipboard_of_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TMUX", "DISPLAY", "WAYLAND_DISPLAY", "PATH"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stdout", Terminal())
    text = "caf\u00e9 \x1b]0;x\x07\n"
    assert clipboard.copy(text) == "the terminal (OSC 52)"
    found = re.fullmatch("\x1b\\]52;c;([A-Za-z0-9+/=]*)\x07", sys.stdout.getvalue())
    assert found
    assert base64.b64decode(found[1]).decode() == text
    with pytest.raises(UsageError, match="too long"):
        clipboard.copy("x" * 60_000)


@pytest.mark.parametrize("styled", [False, True])
def test_thoughts_are_dim_and_apart(monkeypatch: pytest.MonkeyPatch, styled: bool) -> None:
    from longchat_cli.engine import Piece
    from longchat_cli.repl.answer import Printer

    screen = Terminal() if styled else io.StringIO()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    pieces = [Piece("Hm\x1b[2J.", thought=True), Piece(" So.", thought=True), Piece("**Ye"), Piece("s**")]
    printer = Printer(styled)
    for piece in pieces:
        printer.write(piece)
    printer.end()
    assert COLOURS.sub("", screen.getvalue()) == "Hm. So.\n**Yes**\n"
    assert screen.getvalue().startswith("\x1b[2mHm. So.\n\x1b[0m") == styled


def test_text_that_cannot_be_kept_is_no_damage(tmp_path: Path) -> None:
    sessions = Sessions(tmp_path / "sessions.db")
    with pytest.raises(StorageError, match="cannot hold this"), sessions.writing() as database:
        database.execute("SELECT ?", ("\udcff",))
