"""`longchat chat` in a terminal, typed to as by its user; what was said is in the chat that it keeps."""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longchat_cli.config import cache_dir, data_dir, parse_size
from longchat_cli.errors import LongchatError, UsageError
from longchat_cli.evaluation.places import linked
from longchat_cli.sessions import Sessions, Turn
from longchat_cli.terminal_text import Sanitizer

_READY = b"\x1b[?2004h"
"""What a terminal is told as a prompt begins: that it may mark what is pasted."""
_PASTE = "\x1b[200~{}\x1b[201~\r"
_GRACE = 10.0
"""Seconds for a chat to leave."""


@dataclass(frozen=True)
class Said:
    """A user's turn, its `answer` and what `/context` says behind it: tokens `seen`, `bytes` held. `recalled`
    counts what was read again for it; `resident` are the bytes of the whole process (0: the system does not
    tell)."""

    user: Turn
    answer: Turn
    seen: int
    bytes: int
    recalled: int = 0
    resident: int = 0


class Typed:
    """A chat with `options` on its command line; leaving the context ends it. `program` is longchat.

    It has the user's models, and neither their chats nor pages. Raises UsageError where there are no
    pseudo-terminals, LongchatError with the last it said when the chat ends.
    """

    def __init__(
        self, options: Sequence[str], program: Sequence[str] = (sys.executable, "-m", "longchat_cli")
    ) -> None:
        self._command = [*program, "chat", "--plain", *options]

    def __enter__(self) -> Typed:
        try:
            import pty
            import termios
        except ImportError as error:  # Windows
            raise UsageError("a chat cannot be typed to", "this system has no pseudo-terminals") from error
        self._folder = tempfile.TemporaryDirectory(prefix="longchat-")
        place = Path(self._folder.name)
        self._sessions = Sessions(linked(place / "data", data_dir(), "sessions") / "sessions" / "sessions.db")
        environment = {
            **os.environ,
            "LONGCHAT_DATA_DIR": str(place / "data"),
            "LONGCHAT_CACHE_DIR": str(linked(place / "cache", cache_dir(), "pages")),
            "LONGCHAT_STATE_DIR": str(place / "state"),
            "TERM": "xterm",
            "NO_COLOR": "1",
            "PROMPT_TOOLKIT_NO_CPR": "1",  # nobody would say where the cursor is
        }
        self._terminal, end = pty.openpty()
        termios.tcsetwinsize(end, (30, 100))
        streams: dict[str, Any] = {"stdin": end, "stdout": end, "stderr": end}
        self._chat = subprocess.Popen(self._command, **streams, env=environment, start_new_session=True)
        os.close(end)
        os.set_blocking(self._terminal, False)
        try:
            self._shown("")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        os.close(self._terminal)  # as when its window is closed
        self._chat.terminate()
        try:
            self._chat.wait(_GRACE)
        except subprocess.TimeoutExpired:
            self._chat.kill()
            self._chat.wait()
        self._folder.cleanup()

    def say(self, text: str) -> Said:
        """Paste `text` at the prompt, send it and wait for the next one. Raises LongchatError where it does
        not arrive as one turn."""
        shown = self._shown(_PASTE.format(f"/{text}" if text.startswith("/") else text))
        *_, user, answer = self._sessions.load(self._sessions.find("last")).turns
        if user.text != text:
            raise LongchatError("what was typed is not what was said", user.text[:99])
        context = self._shown(_PASTE.format("/context"))
        return Said(
            user,
            answer,
            int(_found(r"([\d,]+) tokens seen", context).replace(",", "")),
            parse_size(_found(r"(\S+ \w+) held", context)),
            len(re.findall(r"recalled \d+ passage", shown)),
            _resident(self._chat.pid),
        )

    def _shown(self, keys: str) -> str:
        """Type `keys`; what the terminal shows up to the next prompt."""
        left, shown, place = keys.encode(), b"", self._terminal
        while left or _READY not in shown:
            # A terminal takes so many bytes, and none while it waits for somebody to read.
            readable, writable, _ = select.select([place], [place] if left else [], [])
            if writable:
                left = left[os.write(place, left[:512]) :]
            if readable:
                try:
                    shown += os.read(place, 1 << 16)
                except OSError as error:  # on Linux the end of a terminal
                    last = _plain(shown).strip().splitlines()[-1:]
                    raise LongchatError("the chat has ended", "".join(last)) from error
        return _plain(shown)


def _found(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    if found is None:
        raise LongchatError("the chat does not say what it holds", text[-99:])
    return found[1]


def _plain(shown: bytes) -> str:
    return Sanitizer().feed(shown.decode("utf-8", "replace"))


def _resident(process: int) -> int:
    """Bytes of a process that are in memory; 0 where the system does not tell."""
    pages = Path(f"/proc/{process}/statm")
    return int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if pages.exists() else 0
