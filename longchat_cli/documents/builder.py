"""Puts a text together from pieces whose place in a file is known."""

from __future__ import annotations

import re

from longchat_cli.documents.document import Mark
from longchat_cli.documents.text import CONTROL

_BLANKS = re.compile(r"[ \t\n\r\f]+")


class Builder:
    """Collects pieces and marks. What separates two pieces is written only when the second one comes."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._separator = ""
        self._place, self._line = "", 0
        self.marks: list[Mark] = []
        self.length = 0

    @property
    def text(self) -> str:
        """All pieces so far, ended by a newline."""
        return "".join([*self._pieces, "\n"])

    def separate(self, by: str) -> None:
        """Ask for a separator (" ", tab, one or two newlines) before the next piece; the strongest wins."""
        if _STRENGTH[by] > _STRENGTH[self._separator]:
            self._separator = by

    def verbatim(self, text: str, line: int, place: str = "") -> None:
        """Add `text`, which begins on line `line` of `place`, as it is (without control characters)."""
        text = CONTROL.sub("", text)
        if not text:
            return
        if self.length and self._separator:
            self._write(self._separator)
        self._separator = ""
        if not self.marks or (place, line) != (self._place, self._line):
            self.marks.append(Mark(self.length, place, line))
        self._place, self._line = place, line
        self._write(text)

    def flowing(self, text: str, line: int, place: str = "") -> None:
        """Add `text` with each run of blanks as one: the way markup is shown."""
        for row, words in enumerate(text.split("\n")):
            if row:
                self.separate(" ")
            shown = _BLANKS.sub(" ", words)
            if shown.startswith(" "):
                self.separate(" ")
            if shown.strip(" "):
                self.verbatim(shown.strip(" "), line + row, place)
            if shown.endswith(" "):
                self.separate(" ")

    def _write(self, text: str) -> None:
        self._pieces.append(text)
        self.length += len(text)
        self._line += text.count("\n")


_STRENGTH = {"": 0, " ": 1, "\t": 2, "\n": 3, "\n\n": 4}
