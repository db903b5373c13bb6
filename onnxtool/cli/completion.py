"""`onnxtool completion`: shell completion of commands, options, choices and paths."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from onnxtool.cli.choices import NameChoice
from onnxtool.cli.options import log_options

_SHELLS = ("bash", "zsh", "fish")


@click.command(epilog="Example: onnxtool completion bash")
@click.argument("shell", type=NameChoice(_SHELLS))
@log_options
def command(shell: str, log_level: str | None, verbose: int) -> None:
    """Print a script that lets SHELL complete onnxtool's commands, options, choices and paths.

    --model_name completes folders. For bash, add the line
    eval "$(onnxtool completion bash)" to ~/.bashrc; for zsh likewise to ~/.zshrc; for fish, save the output as
    ~/.config/fish/completions/onnxtool.fish.
    """
    from onnxtool.cli.entry import main

    del log_level, verbose  # there is nothing to log
    completion = get_completion_class(shell)
    if completion is None:  # click has all of _SHELLS
        raise click.UsageError(f"no completion for {shell}")
    click.echo(completion(main, {}, "onnxtool", "_ONNXTOOL_COMPLETE").source())
