"""`onnxtool completion`: shell completion of commands, options, paths and checkpoint names."""

from __future__ import annotations

import os
from pathlib import Path

import click
from click.shell_completion import CompletionItem, get_completion_class

from onnxtool.cli.choices import NameChoice
from onnxtool.cli.logs import log_options

_SHELLS = ("bash", "zsh", "fish")
_FOLDER = "models--"  # folder of a repository in the hub's cache: models--OWNER--NAME


@click.command(epilog="Example: onnxtool completion bash")
@click.argument("shell", type=NameChoice(_SHELLS))
@log_options
def command(shell: str, log_level: str | None, verbose: int) -> None:
    """Print a script that lets SHELL complete onnxtool's commands, options, choices and paths.

    --model_name completes folders, and hub ids that are in the local cache. For bash, add the line
    eval "$(onnxtool completion bash)" to ~/.bashrc; for zsh likewise to ~/.zshrc; for fish, save the output as
    ~/.config/fish/completions/onnxtool.fish.
    """
    from onnxtool.cli.entry import main

    del log_level, verbose  # there is nothing to log
    completion = get_completion_class(shell)
    if completion is None:  # click has all of _SHELLS
        raise click.UsageError(f"no completion for {shell}")
    click.echo(completion(main, {}, "onnxtool", "_ONNXTOOL_COMPLETE").source())


def complete_checkpoint(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return folders, which the shell lists itself, and cached ids that begin with `incomplete`."""
    # The folder comes first: click's scripts drop whatever precedes it.
    return [CompletionItem(incomplete, type="dir"), *map(CompletionItem, cached_ids(incomplete))]


def cached_ids(beginning: str = "") -> list[str]:
    """Return the ids in the hub's cache with this prefix, sorted by name."""
    # huggingface_hub knows this folder too, but takes too long to load for a key press.
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()
    try:
        names = [entry.name for entry in os.scandir(cache) if entry.name.startswith(_FOLDER)]
    except OSError:
        return []
    ids = (name.removeprefix(_FOLDER).replace("--", "/", 1) for name in names)
    return sorted(one for one in ids if one.startswith(beginning))
