"""Text to the clipboard: through a program of the desktop, else through the terminal (OSC 52)."""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
import sys

from longchat_cli.errors import LongchatError, UsageError
from longchat_cli.terminal import is_tty

_PROGRAMS = (
    ("WAYLAND_DISPLAY", ("wl-copy",)),
    ("DISPLAY", ("xclip", "-selection", "clipboard")),
    ("DISPLAY", ("xsel", "--input", "--clipboard")),
    ("TMUX", ("tmux", "load-buffer", "-w", "-")),
    ("PATH", ("pbcopy",)),
    ("PATH", ("clip.exe",)),
)
"""The variable without which a program is of no use, and its command line."""
_PATIENCE = 5.0
_MOST = 74_994
"""Bytes of base64 that terminals take (xterm's limit)."""


def copy(text: str) -> str:
    """Copy `text`, made safe before; returns what took it. Raises LongchatError when nothing does."""
    for variable, command in _PROGRAMS:
        if os.environ.get(variable) and shutil.which(command[0]) and _give(command, text):
            return command[0]
    stream = next((stream for stream in (sys.stdout, sys.stderr) if is_tty(stream)), None)
    if stream is None or os.environ.get("TERM") == "dumb":
        raise LongchatError("nothing here takes a copy", "there is no clipboard program and no terminal")
    data = base64.b64encode(text.encode("utf-8", "replace"))
    if len(data) > _MOST:
        why = "terminals take about 55 kB"
        raise UsageError("the text is too long for the terminal's clipboard", why, "use /export FILE")
    stream.write(f"\x1b]52;c;{data.decode()}\x07")  # base64: nothing of the text can act on the terminal
    stream.flush()
    return "the terminal (OSC 52)"


def _give(command: tuple[str, ...], text: str) -> bool:
    """Whether the program took it. xclip stays behind to serve it, so nobody waits for its output's end."""
    nowhere = subprocess.DEVNULL
    try:
        done = subprocess.run(
            command, input=text.encode("utf-8", "replace"), stdout=nowhere, stderr=nowhere, timeout=_PATIENCE
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
