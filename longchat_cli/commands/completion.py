"""`longchat completion`."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from longchat_cli.commands.framework import command
from longchat_cli.commands.options import Name

VARIABLE = "_LONGCHAT_COMPLETE"
"""With it the shell asks `longchat` what may come next."""


@command("completion")
@click.argument("shell", type=Name(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print what makes a shell complete commands, options, models, methods and files.

    \b
    bash  longchat completion bash > ~/.local/share/bash-completion/completions/longchat
    zsh   longchat completion zsh > a file _longchat in a directory of $fpath
    fish  longchat completion fish > ~/.config/fish/completions/longchat.fish
    """
    found = get_completion_class(shell)
    assert found is not None
    root = click.get_current_context().find_root().command
    click.echo(found(root, {}, "longchat", VARIABLE).source())
