"""An answer on the screen, piece by piece: made safe, coloured on a terminal, thoughts apart."""

from __future__ import annotations

import sys
from typing import IO

from longchat_cli.engine import Piece
from longchat_cli.repl.markdown import RESET, Markdown
from longchat_cli.terminal import coloured
from longchat_cli.terminal_text import Sanitizer

_DIM = "\x1b[2m"


class Printer:
    """Writes answers to stdout, with colours for their Markdown where `styled`, and thoughts to stderr."""

    def __init__(self, styled: bool) -> None:
        self._markdown = Markdown() if styled else None
        self._safe = {False: Sanitizer(), True: Sanitizer()}
        self._thinking = False  # thoughts are on the screen and go on
        self._open = False  # the line is not ended

    def write(self, piece: Piece) -> None:
        """Print a piece at once."""
        text = self._safe[piece.thought].feed(piece.text)
        if piece.thought:
            self._think(text)
            return
        self._answer()
        self._say(sys.stdout, text, self._markdown.feed(text) if self._markdown else text)

    def end(self) -> None:
        """Leave the screen as it was, at the beginning of a line."""
        self._answer()
        rest = self._markdown.flush() if self._markdown else ""
        self._say(sys.stdout, "\n" if self._open else "", rest + ("\n" if self._open else ""))

    def _think(self, text: str) -> None:
        if text and not self._thinking:
            self._thinking = True
            self._say(sys.stderr, "", _DIM if coloured(sys.stderr) else "")
        self._say(sys.stderr, text, text)

    def _answer(self) -> None:
        """End the thoughts."""
        if self._thinking:
            self._thinking = False
            end = "\n" if self._open else ""
            self._say(sys.stderr, end, end + (RESET if coloured(sys.stderr) else ""))

    def _say(self, stream: IO[str], text: str, shown: str) -> None:
        if text:
            self._open = not text.endswith("\n")
        stream.write(shown)
        stream.flush()
