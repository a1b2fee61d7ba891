"""`ingot completion`."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from .options import log_options

_VARIABLE = "_INGOT_COMPLETE"


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@log_options
def command(shell: str) -> None:
    """Prints a script that completes ingot's commands, options and their values in SHELL.

    \b
    bash   ingot completion bash > ~/.local/share/bash-completion/completions/ingot
    zsh    ingot completion zsh > "${fpath[1]}/_ingot"
    fish   ingot completion fish > ~/.config/fish/completions/ingot.fish
    """
    completer = get_completion_class(shell)
    root = click.get_current_context().find_root().command
    # Only the text is wanted: source() would start the shell to ask for its version.
    script = completer(root, {}, "ingot", _VARIABLE)
    click.echo(script.source_template % script.source_vars())
