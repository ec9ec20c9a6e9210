"""Markdown in colour while it streams: nothing but colours is added, and no line is written twice.

Markers stay on the screen: what is seen is what was said, and what is copied from it is Markdown. An emphasis
ends with its line at the latest, so that a marker that is never closed cannot colour the rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

RESET = "\x1b[0m"
BOLD, DIM, ITALIC, CYAN = "1", "2", "3", "36"
HEADING = ("1", "34")
_CODE_COLOURS = {
    "Comment": ("90",),
    "Keyword": ("35",),
    "Literal.String": ("32",),
    "Literal.Number": ("36",),
    "Name.Function": ("34",),
    "Name.Class": ("34", "1"),
    "Name.Decorator": ("33",),
    "Name.Builtin": ("36",),
    "Name.Tag": ("35",),
    "Name.Attribute": ("33",),
    "Generic.Inserted": ("32",),
    "Generic.Deleted": ("31",),
    "Generic.Heading": ("1",),
}
"""The terminal's own 16 colours, which its user chose to be readable."""

_MARKER = re.compile(
    r"(?P<heading> {0,3}#{1,6}(?=\s))|(?P<item>\s*(?:[-*+]|\d{1,9}[.)])(?=\s))|(?P<quote> {0,3}>)"
)
_FENCE = re.compile(r" {0,3}(`{3,}(?=[^`]*$)|~{3,})\s*([\w+#.-]*)")
_UNDECIDED = re.compile(r"\s*(?:#{0,6}|[-*+]|\d{0,9}[.)]?)|( {0,3}(?:`{1,2}|~{1,2}|`{3,}[^`]*|~{3,}.*))")
_LINES = re.compile(r"[^\n]*\n|[^\n]+")
_RUNS = re.compile(r"\\[^\w\s]|(\*+|_+|`+)")
_LONGEST = 1000
"""Characters of a code line that is still looked through for colours."""
_CONTEXT = 20_000
"""Characters of a code block that colours depend on at most."""


class Markdown:
    """Colours for a text that comes in pieces. What comes out does not depend on how it was cut."""

    def __init__(self) -> None:
        self._line = ""  # what of the line is not written yet
        self._begun = False  # the beginning of the line is written
        self._before = " "  # the character before _line
        self._style: tuple[str, ...] = ()  # of the whole line
        self._bold = self._italic = self._ticks = ""  # the markers that are open
        self._code: _Code | None = None
        self._shown: tuple[str, ...] = ()

    def feed(self, text: str) -> str:
        """What of `text` and of what was held back can be written now."""
        out = []
        for part in _LINES.findall(text):
            self._line += part
            out.append(self._take(complete=part.endswith("\n")))
        return "".join(out)

    def flush(self) -> str:
        """The rest, at the end of the text."""
        return self._take(complete=True) + self._set(())

    def _take(self, complete: bool) -> str:
        if self._code:
            return self._code_line() if complete and self._line else ""
        if not self._begun:
            if not complete and _UNDECIDED.fullmatch(self._line):
                return ""
            if fence := _FENCE.match(self._line) if complete else None:
                return self._open(fence[1], fence[2])
        out = self._begin() + "".join(self._inline(complete))
        if complete:
            out = self._end(out)
        return out

    def _open(self, fence: str, language: str) -> str:
        self._code = _Code(fence, language)
        return self._whole((DIM,))

    def _whole(self, style: tuple[str, ...]) -> str:
        """All that is held, as one line."""
        line, self._line = self._line, ""
        text = line.rstrip("\n")
        return self._set(style) + text + self._set(()) + line[len(text) :]

    def _code_line(self) -> str:
        assert self._code is not None
        if self._code.closed_by(self._line):
            self._code = None
            return self._whole((DIM,))
        line, self._line = self._line, ""
        text = line.rstrip("\n")
        parts = [self._set(style) + value for style, value in self._code.colour(text)]
        return "".join(parts) + self._set(()) + line[len(text) :]

    def _begin(self) -> str:
        """The marker at the beginning of a line, if there is one."""
        if self._begun:
            return ""
        self._begun, self._style, self._before = True, (), " "
        found = _MARKER.match(self._line)
        if not found:
            return ""
        marker, self._line = found[0], self._line[found.end() :]
        if found["heading"]:
            self._style = HEADING
        elif found["quote"]:
            self._style = (ITALIC,)
        return self._set(self._style or (CYAN,)) + marker

    def _inline(self, complete: bool) -> Iterator[str]:
        """The line's text up to where what follows may change it."""
        line = self._line
        text = line.rstrip("\n")
        at = 0
        for found in _RUNS.finditer(text):
            if found.end() == len(text) and not complete:
                yield self._plain(text[at : found.start()])
                at = found.start()
                break
            yield self._plain(text[at : found.start()])
            at = found.end()
            if found[1]:
                yield from self._marker(found[1], text[at : at + 1])
            else:
                yield self._plain(found[0])
        else:
            end = len(text) - (text.endswith("\\") and not complete)
            yield self._plain(text[at:end])
            at = max(at, end)
        self._line = line[at:]

    def _plain(self, text: str) -> str:
        if not text:
            return ""
        self._before = text[-1]
        return self._set(self._styles()) + text

    def _marker(self, run: str, after: str) -> Iterator[str]:
        """A run of `*`, `_` or backticks: it opens, closes, or is text."""
        opens, closes = after.strip() != "", not self._before.isspace()
        if run[0] == "_":
            opens, closes = opens and not self._before.isalnum(), closes and not after.isalnum()
        self._before = run[-1]
        before = self._styles()
        if self._ticks or run[0] == "`":
            if not self._ticks:
                self._ticks = run
            elif self._ticks == run:
                self._ticks = ""
        elif len(run) <= 3:
            if len(run) != 1:
                self._bold = _turned(self._bold, run[0], opens, closes)
            if len(run) != 2:
                self._italic = _turned(self._italic, run[0], opens, closes)
        now = self._styles()
        yield (
            self._set((*(now if len(now) > len(before) else before), *([DIM] if now != before else []))) + run
        )

    def _styles(self) -> tuple[str, ...]:
        bold = (BOLD,) if self._bold and BOLD not in self._style else ()
        italic = (ITALIC,) if self._italic and ITALIC not in self._style else ()
        return (*self._style, *bold, *italic, *((CYAN,) if self._ticks else ()))

    def _end(self, out: str) -> str:
        rest, self._line = self._line, ""
        self._begun, self._style = False, ()
        self._bold = self._italic = self._ticks = ""
        return out + self._set(()) + rest

    def _set(self, style: tuple[str, ...]) -> str:
        """Change to `style`."""
        if style == self._shown:
            return ""
        self._shown = style
        return f"\x1b[0;{';'.join(style)}m" if style else RESET


def _turned(marker: str, run: str, opens: bool, closes: bool) -> str:
    """The open marker after a `run`: that one closed, this one opened, or as it was."""
    if marker:
        return "" if marker == run and closes else marker
    return run if opens else ""


class _Code:
    """A fenced block. Its lines are coloured one by one, each after those before it."""

    def __init__(self, fence: str, language: str) -> None:
        self._fence, self._lexer = fence, _lexer(language)
        self._text = ""

    def closed_by(self, line: str) -> bool:
        bare = line.strip()
        return len(bare) >= len(self._fence) and not bare.strip(self._fence[0])

    def colour(self, line: str) -> list[tuple[tuple[str, ...], str]]:
        """(style, text) pairs whose texts join to `line`."""
        if self._lexer is None or len(line) > _LONGEST:
            return [((), line)]
        if len(self._text) > _CONTEXT:
            self._text = ""
        begin = len(self._text)
        self._text += line + "\n"
        parts = [
            (_colour_of(kind), value[max(begin - at, 0) :][: begin + len(line) - max(at, begin)])
            for at, kind, value in self._lexer.get_tokens_unprocessed(self._text)
            if at + len(value) > begin and at < begin + len(line)
        ]
        # A lexer that loses characters must not take them from the answer.
        return parts if "".join(value for _, value in parts) == line else [((), line)]


def _lexer(language: str) -> Any:
    """pygments' lexer of that name, or None."""
    from pygments.lexers import get_lexer_by_name
    from pygments.util import ClassNotFound

    try:
        return get_lexer_by_name(language)
    except ClassNotFound:
        return None


def _colour_of(kind: Any) -> tuple[str, ...]:
    """The colour of a token type, or of the nearest one above it."""
    names = list(kind)
    return next(
        (
            _CODE_COLOURS[name]
            for n in range(len(names), 0, -1)
            if (name := ".".join(names[:n])) in _CODE_COLOURS
        ),
        (),
    )
