"""Text for a terminal: model output made safe and stop strings, both over streamed pieces, and tables."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any

# C0 without \t and \n, DEL, C1, lone surrogates, bidirectional embeddings, overrides and isolates.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u202a-\u202e\u2066-\u2069]")
_HIDDEN = re.compile("[\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
_SURROGATES = re.compile("[\ud800-\udfff]")
_STRINGS = "]PX^_\x9d\x90\x98\x9e\x9f"  # OSC, DCS, SOS, PM, APC: after ESC, and as C1
_CSI = "[\x9b"


class Sanitizer:
    """Removes control characters and escape sequences (ECMA-48), also those split over pieces.

    Kept: `\\n` and `\\t`; `\\r\\n` becomes `\\n`. Removed: the other C0 and C1 characters, DEL, CSI, OSC, DCS
    and other control strings with their payload, two-character escapes, bidirectional overrides. A control
    string also ends at a newline, so that an unterminated one cannot swallow the rest of an answer.
    """

    def __init__(self) -> None:
        self._state = "text"

    def feed(self, text: str) -> str:
        """What of `text` is safe to print."""
        if self._state == "text" and not _UNSAFE.search(text):
            return text
        return "".join(map(self._step, text))

    def flush(self) -> str:
        """Forget an unfinished sequence at the end of the output; nothing is left to print."""
        self._state = "text"
        return ""

    def _step(self, c: str) -> str:
        match self._state:
            case "escape":
                return self._escape(c)
            case "csi" if " " <= c <= "?":  # parameters and intermediates
                return ""
            case "csi" if "@" <= c <= "~":
                self._state = "text"
                return ""
            case "string" if c not in "\n\x07\x1b\x9c\x18\x1a":
                return ""
            case "string" if c not in "\n\x1b":
                self._state = "text"
                return ""
        self._state = "text"
        return self._plain(c)

    def _escape(self, c: str) -> str:
        """The character after ESC: opens a sequence, goes on (an intermediate), or ends it."""
        if c in _CSI or c in _STRINGS:
            self._state = "csi" if c in _CSI else "string"
            return ""
        if " " <= c <= "/":
            return ""
        self._state = "text"
        return "" if "0" <= c <= "~" else self._plain(c)

    def _plain(self, c: str) -> str:
        if c == "\x1b":
            self._state = "escape"
        elif c == "\x9b":
            self._state = "csi"
        elif c in _STRINGS[5:]:
            self._state = "string"
        return "" if _UNSAFE.match(c) else c


def replace_surrogates(text: str) -> str:
    """Text of the same length that can be encoded: bytes that were no UTF-8 become replacement characters."""
    return _SURROGATES.sub("\ufffd", text)


def json_text(value: Any, indent: int | None = None, default: Callable[[Any], str] | None = None) -> str:
    """JSON without a character that a terminal would obey or hide; `default` as in json.dumps."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, default=default)
    return _HIDDEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def brief(text: str, most: int = 60) -> str:
    """The beginning of a text on one line, made safe."""
    return textwrap.shorten(Sanitizer().feed(text[: 10 * most]), most, placeholder=" ...")


class StopMatcher:
    """Ends a stream at the first stop string; text that may be the beginning of one is held back.

    The stop string that is complete first wins (the longest of several), so the result does not depend on
    how the stream was cut into pieces.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.stopped = False

    def feed(self, text: str) -> tuple[str, bool]:
        """Text that is safe to print, without the stop string, and whether the stream ends here."""
        if self.stopped:
            return "", True
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[1]], True
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """What was held back, at the end of a stream that met no stop string."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that `text` ends with."""
    longest = min(len(stop) - 1, len(text))
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table that reads well in a terminal too: the first column to the left, the rest right."""
    lines = [list(header), *(list(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join(
        "| " + " | ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) + " |"
        for line in (lines[0], rule, *lines[1:])
    )
