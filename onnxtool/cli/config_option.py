"""Command options from configuration files and the environment, checked by the options themselves."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import click

from onnxtool.cli.choices import CheckpointType, PathType
from onnxtool.cli.commands import RUNNABLE, TABLES
from onnxtool.cli.configuration import (
    OWN_FILE,
    PREFIX,
    PROJECT_FILE,
    ConfigFile,
    Setting,
    find_files,
    read_file,
    settings_of,
    unknown_variables,
)
from onnxtool.errors import OnnxtoolError, OptionError
from onnxtool.options import check

Command = TypeVar("Command", bound=Callable[..., Any])

PRECEDENCE = ("the command line", f"{PREFIX}COMMAND_OPTION in the environment", OWN_FILE, PROJECT_FILE, "the defaults")
"""The sources of an option, in order of precedence."""

# A file found in a folder, such as a cloned repository, does not speak for the user, so it may only set harmless
# options. A file named with --config was chosen by the user and may set the rest, except what runs code or replaces
# files.
_WRITES = "it says where to write"
EFFECTS: dict[str, tuple[str, ...]] = {
    "it runs code of a checkpoint, or reads files that can run code": ("allow_pickle", "trust_remote_code"),
    "it can load libraries and write files": ("provider_library", "provider_option"),
    "it replaces files": ("force",),
    "it chooses the checkpoint whose code --trust_remote_code runs": (
        *("artifacts.model_name", "artifacts.revision", "export.model_name", "export.revision", "verify.revision"),
    ),
    _WRITES: ("prefix",),  # and every path that is written
    "it sends something": ("engine", "private", "push"),
    "it can lower a check": (
        "allow_fallback",
        *("allow_missing_weights", "allow_unused_weights", "atol", "identity", "input_shape", "issuer", "max_error"),
        *("min_cosine", "public_key", "rtol", "sample_inputs", "verify", "verify.precision"),
    ),
}
"""Effects that options have beyond their command's result, each with its options or COMMAND.OPTION; all others are in
HARMLESS. A name in neither is refused as well."""
_NEVER_IN_FILES = frozenset(("allow_pickle", "force", "trust_remote_code"))
HARMLESS = frozenset(
    (
        *("activations", "additional_output", "against", "allowed_licenses", "batch_size"),
        *("batch_tokens", "benchmark", "calibration", "candidates", "chat", "check", "class_axis", "compare"),
        *("contents", "cpu", "data", "decoding", "depth", "device", "dimensions", "dry_run", "dtype", "duration"),
        *("encoder_path", "exporter", "fail_if", "format", "freeze", "gzip", "head", "hidden_size", "ignore_index"),
        *("image", "input", "inter_threads", "io_binding", "keep_own_ids", "keep_raw", "keep_special", "log_level"),
        *("long", "lora", "lora_alpha", "lora_targets", "loss", "loss_input", "max_grad_norm", "max_length"),
        *("max_new_tokens", "measure", "memory_limit", "model_name", "model_path", "model_type"),
        *("no_repeat_ngram_size", "nominal_checkpoint", "normalize", "num_beams", "num_candidates", "num_heads"),
        *("opset", "optimize", "optimizer", "ort_format", "output_format", "overlap", "part", "partner", "pooling"),
        *("precision", "processes", "prompt", "provider", "query", "quiet", "ranges", "read_back", "recompute"),
        *("repetition_penalty", "representation", "require_all", "require_dynamic", "require_fusion", "route"),
        *("runs", "seed", "sequence_length", "shard_size", "shift_labels", "split", "split_bytes", "splits", "stats"),
        *("stop", "stream", "strict", "target", "task", "temperature", "text", "text_model", "threads", "timing"),
        *("top_k", "top_p", "train", "vectors", "vectors_as", "verbose", "warmup", "weight_decay", "weights"),
        "workers",
    )
)


def effect_of(command: str, name: str, option: click.Parameter, value: Any = None) -> str | None:
    """Return the effect that bars an option from files found in a folder; None for a harmless option."""
    if getattr(option.type, "writes", ""):
        return _WRITES
    if name in ("provider", "compare") and "?" in str(value):  # options in the text of a provider
        name = "provider_option"
    for effect, names in EFFECTS.items():
        if name in names or f"{command}.{name}" in names:
            return effect
    return None if name in HARMLESS else "what it does is not known"


class Configured(NamedTuple):
    """A configured option with a valid value."""

    command: str
    option: str
    value: Any
    source: str


def config_option(command: Command) -> Command:
    """Add --config, and apply configured values to options that are not on the command line."""
    return click.option(
        "--config",
        type=PathType(),
        is_eager=True,
        expose_value=False,
        callback=_configure,
        help=f"Read this command's options from this TOML file, instead of {OWN_FILE} and {PROJECT_FILE} in the "
        "working directory or above it, up to the root of a git repository. Options are resolved in this order; the "
        "first one that is set wins: "
        f"{', '.join(PRECEDENCE)}.",
    )(command)


def configured(name: str) -> Configured | None:
    """Return the configured value of an option of the running command, ignoring the command line."""
    return next((one for one in all_of(click.get_current_context()) if one.option == name), None)


def all_of(context: click.Context) -> tuple[Configured, ...]:
    """Return what is configured for the running command."""
    found: dict[str, Configured] = context.meta.get(__name__, {})
    return tuple(found.values())


def sources_of(context: click.Context, text: str) -> str:
    """Name the source of each configured option that the error `text` mentions, one per line."""
    spoken = (
        one
        for one in all_of(context)
        if f"--{one.option}" in text
        or (re.search(rf"(?<![a-z_]){one.option}(?![a-z_])", text) and str(one.value) in text)
    )
    return "\n".join(f"--{one.option} is set in {one.source}" for one in spoken)


def all_configured(commands: Iterable[tuple[str, click.Command]]) -> tuple[list[Configured], list[str]]:
    """Return what is configured here for `commands`, by name, and the problems found."""
    found: list[Configured] = []
    problems: dict[str, None] = {}
    for name, command in commands:
        try:
            found += _resolve(click.Context(command, info_name=name), name, None).values()
        except click.UsageError as error:
            problems[error.message.replace("\n", ": ")] = None
    return found, list(problems)


def unknown(context: click.Context) -> list[str]:
    """Say which variables are of no command, each with the closest one that is."""
    root = context.find_root()
    known = []
    for table in TABLES if (names := unknown_variables()) else ():
        command: Any = root.command
        for name in next(path for path in RUNNABLE if path.replace(" ", "_") == table).split():
            command = command.get_command(root, name)
        known += [f"{PREFIX}{table}_{option.removeprefix('--')}".upper() for option in _options_of(command)]
    close = {name: difflib.get_close_matches(name, known, n=1, cutoff=0)[0] for name in names}
    return [f"the environment variable {name} is of no command. Did you mean {near}?" for name, near in close.items()]


def _configure(context: click.Context, _parameter: click.Parameter, file: Path | None) -> None:
    if context.resilient_parsing or context.info_name is None:
        return
    outer = context.parent
    name = context.info_name if outer is None or outer.parent is None else f"{outer.info_name}_{context.info_name}"
    try:
        found = _resolve(context, name, file)
    except click.UsageError:
        if name != "env" or file is not None:
            raise
        found = {}  # `onnxtool env` lists what is wrong with a configuration
    context.default_map = {one.option if one.option != "format" else "format_name": one.value for one in found.values()}
    context.meta[__name__] = found


def _resolve(context: click.Context, command: str, path: Path | None) -> dict[str, Configured]:
    """Return what is configured for a command, by option.

    Raises:
        UsageError: a file cannot be read, or a value is not valid for its option.
    """
    try:
        files = find_files() if path is None else [read_file(path)]
        for file in files:
            _check_tables(file, TABLES)
        if path is not None and command not in files[0].tables:
            table = f"[{files[0].prefix}{command}]"
            raise click.UsageError(f"{path} has no table {table}\nadd one, or leave --config out")
        settings = settings_of(command, files)
    except OnnxtoolError as error:
        raise click.UsageError(f"{error.message}\n{error.hint}", context) from error
    options = {option.removeprefix("--"): parameter for option, parameter in _options_of(context.command).items()}
    found = {}
    for name, setting in settings.items():
        if name not in options:
            known = [one for one in options if setting.folder is None or one in HARMLESS]
            raise click.UsageError(
                f"{setting.source}: {name} is not an option of onnxtool {command}{_suggestion(name, known)}", context
            )
        effect = effect_of(command, name, options[name], setting.value)
        if setting.folder is not None and effect and (path is None or name in _NEVER_IN_FILES):
            ways = f"pass --{name}, or set {PREFIX}{command.upper()}_{name.upper()}"
            raise click.UsageError(
                f"{setting.source}: {name} cannot be set in {'this' if path is None else 'a'} file, because {effect}\n"
                f"{ways if name in _NEVER_IN_FILES else f'{ways}, or name the file by --config'}",
                context,
            )
        found[name] = Configured(
            command, name, _value(context, options[name], setting, is_own=path is not None), setting.source
        )
    return found


def _options_of(command: click.Command) -> dict[str, click.Option]:
    """Return the options that can be configured by their names; --config is read before."""
    options = [one for one in command.params if isinstance(one, click.Option)]
    return {name: one for one in options for name in one.opts if name.startswith("--") and name != "--config"}


def _check_tables(file: ConfigFile, commands: Iterable[str]) -> None:
    for name in file.tables:
        if name not in commands:
            raise click.UsageError(
                f"{file.path} has [{file.prefix}{name}], and there is no such command{_suggestion(name, commands)}"
            )


def _suggestion(name: str, known: Iterable[str]) -> str:
    known = [*known]
    if name.removeprefix("no_") in known:
        return f"; write {name.removeprefix('no_')} = false"
    close = difflib.get_close_matches(name, known, n=1)
    return f". Did you mean {close[0]!r}?" if close else f"; use one of {', '.join(known)}"


def _value(context: click.Context, option: click.Option, setting: Setting, *, is_own: bool) -> Any:
    """Convert a setting to the option's type.

    Raises:
        UsageError: the type is wrong, or the option does not take the value.
    """
    value = setting.value
    try:
        if setting.folder is None:
            return option.type_cast_value(context, value.splitlines() if option.multiple else value)
        if not (option.type.name == "1,8,…" and type(value) in (int, str)):  # or spelled as on the command line
            check("", value, _hint(option))
        if isinstance(option.type, PathType | CheckpointType):
            texts = [value] if isinstance(value, str) else value
            of_file = [_located(text, option.type, setting.folder, is_own=is_own) for text in texts]
            value = of_file if option.multiple else of_file[0]
        elif isinstance(value, list) and not option.multiple:
            value = ",".join(map(str, value))
        return option.type_cast_value(context, value)
    except (click.BadParameter, OptionError) as error:
        raise click.UsageError(
            f"{setting.source}: {option.opts[-1].removeprefix('--')}: {error.message}", context
        ) from error


def _located(text: str, kind: PathType | CheckpointType, folder: Path, *, is_own: bool) -> str:
    """Return a path in a file as seen from the working directory; an id on the hub, or an address, stays as it is.

    Raises:
        OptionError: it leaves the folder of the file, or would be an id there and a path here.
    """
    from onnxtool.checkpoint.folder import is_path
    from onnxtool.encoding.locations import is_uri

    path = folder / Path(text).expanduser()
    if is_uri(text) or (kind.takes_ids and not is_path(text) and not path.exists()):
        if Path(text).exists():
            raise OptionError(f"{text} is here, and not in the folder of the file, which paths are relative to", "")
        return text
    if not is_own and not path.resolve().is_relative_to(folder.resolve()):
        raise OptionError(f"{text} leaves the folder of the file, which may not be yours", "")
    return str(path)


def _hint(option: click.Option) -> Any:
    """Return the type of a value in a file: the field's type, or the type of a command-specific option."""
    if option.is_flag:
        return bool
    if isinstance(option.type, click.types.IntParamType) or option.count:
        return int
    return getattr(option, "hint", tuple[str, ...] if option.multiple else str)
