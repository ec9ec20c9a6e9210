"""The command `longchat`. Only click and the standard library are imported: `--help` must answer at once."""

from __future__ import annotations

import click

from longchat_cli import __version__
from longchat_cli.commands import Commands
from longchat_cli.commands.framework import Group, global_options

EPILOG = """\b
Exit codes:
  0 ok                                74 input or output failed, disk full
  1 other                             75 out of memory
  2 usage                             78 configuration
  3 context overflow refused         129 terminal closed (SIGHUP)
  4 inputs skipped under --strict    130 interrupted (Ctrl-C)
  5 unsupported, with --strict-cite  141 reader went away (pipe closed)
  6 over --token-budget              143 terminated
 65 bad input data
 66 input missing, model unknown
 69 model or URL unavailable
 73 output cannot be created

\b
Every option can be set in the environment: LONGCHAT_ASK_MODEL for `ask --model`,
LONGCHAT_MODEL for every command. The command line wins over LONGCHAT_ASK_MODEL,
that over LONGCHAT_MODEL, that over the files of `longchat config`, these over the default.
"""


@click.group(
    cls=Group,
    commands=Commands(),
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="longchat", message="%(prog)s %(version)s")
def cli() -> None:
    """Chat without end and ask whole books, with a local model and a small KV cache."""


cli.params += global_options(hidden=False)
