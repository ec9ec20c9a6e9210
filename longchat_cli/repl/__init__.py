"""The chat at a terminal and over a pipe: the loop, its slash commands, and what the screen shows."""

from longchat_cli.repl.loop import Workbench, run

__all__ = ["Workbench", "run"]
