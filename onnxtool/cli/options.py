"""Command options: generated from the fields of options classes, plus options that several commands share."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import MISSING, fields
from functools import partial, wraps
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, NamedTuple, TypeVar, get_args, get_type_hints

import click
from click.core import ParameterSource

from onnxtool.cli.choices import CheckpointType, CountList, LocationType, NameChoice, PathType
from onnxtool.cli.configuration import all_of, config_option, unknown_variables
from onnxtool.cli.render import Block, emit, write_out
from onnxtool.cli.streams import shown
from onnxtool.encoding.locations import Uri
from onnxtool.errors import GateError, InputError, OnnxtoolError
from onnxtool.model_file import check_not_input, check_writable
from onnxtool.options import Force, Option, check
from onnxtool.reading import note_input

Command = TypeVar("Command", bound=Callable[..., Any])

FORMATS = ("text", "markdown", "json")
STDOUT = Path("-")
_LAST = ("output", "force")  # in the help
_MISSING = object()
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_OF_VERBOSITY = (logging.WARNING, logging.INFO, logging.DEBUG)


class _Field(NamedTuple):
    """A field that is an option: its name, its type without None, its default, its description, its annotated type."""

    name: str
    type: Any
    default: Any
    described: Option
    hint: Any

    @property
    def parameter(self) -> str:
        return self.described.name or self.name


class FieldOption(click.Option):
    """The option of a field, whose values are checked by the field's class.

    Attributes:
        section: the keyword of the field's options class.
    """

    section = ""

    def __init__(self, field: _Field, *arguments: Any, **attributes: Any) -> None:
        super().__init__(*arguments, **attributes)
        self.field, self.hint = field, field.hint

    def type_cast_value(self, ctx: click.Context, value: Any) -> Any:
        """Return the parsed value as the field's type.

        Raises:
            BadParameter: the value is not valid for the field.
        """
        if value is None or value == self.default:
            return value if value is None else self.field.default
        is_path = type(self.type) is PathType and not self.multiple  # which the check converts; addresses it does not
        parsed = value if is_path else super().type_cast_value(ctx, value)
        try:
            return check("", parsed, self.hint)
        except OnnxtoolError as error:
            raise click.BadParameter(str(error), ctx, self) from None


class SectionedCommand(click.Command):
    """A command with several jobs, whose help groups the options of each job under a title.

    Attributes:
        titles: titles by options class keyword; all other options come first.
    """

    titles: ClassVar[Mapping[str, str]] = {}

    def title_of(self, parameter: click.Parameter) -> str:
        """Return the title that an option stands under."""
        section = "" if parameter.name in _LAST else getattr(parameter, "section", "")
        return self.titles.get(section, "Options")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, section by section."""
        sections: dict[str, list[tuple[str, str]]] = {title: [] for title in ("Options", *self.titles.values())}
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is not None:
                sections[self.title_of(parameter)].append(record)
        for title, records in sections.items():
            with formatter.section(title):
                formatter.write_dl(records)


def derived_options(**classes: type) -> Callable[[Command], Command]:
    """Add an option for each field of `classes` with an `Option`; `--output` and `--force` come last.

    Classes that share an option get the same value. The command receives an instance of the first class, which enforces
    its required options, and for each other class a function that makes its instance, for the job that uses it; None if
    a required option of the class is missing.
    """
    fields = {keyword: _fields(options_class) for keyword, options_class in classes.items()}
    first = next(iter(fields))
    options: dict[str, FieldOption] = {}
    for keyword, described in fields.items():
        for field in described:
            option = _option(field, required=keyword == first and field.default is _MISSING)
            option.section = keyword
            options.setdefault(field.parameter, option)
    ordered = sorted(options, key=lambda name: _LAST.index(name) if name in _LAST else -1)

    def decorate(command: Command) -> Command:
        @wraps(command)
        def call(**values: Any) -> Any:
            objects: dict[str, Any] = {}
            for keyword, options_class in classes.items():
                arguments = {field.name: values[field.parameter] for field in fields[keyword]}
                needed = (field.name for field in fields[keyword] if field.default is _MISSING)
                make = None if any(arguments[name] is None for name in needed) else partial(options_class, **arguments)
                objects[keyword] = make() if make and keyword == first else make
            return command(**objects, **{name: value for name, value in values.items() if name not in options})

        # Like click's own decorators, which apply from the last line to the first.
        params = [*getattr(command, "__click_params__", ()), *(options[name] for name in reversed(ordered))]
        vars(call)["__click_params__"] = params
        return call  # type: ignore[return-value]  # click calls it with what it parsed

    return decorate


def option_names(options_class: type) -> frozenset[str]:
    """Return the parameters of the options that are fields of a class."""
    return frozenset(field.parameter for field in _fields(options_class))


def _fields(options_class: type) -> list[_Field]:
    """Read the fields of a dataclass that are options; keyword-only fields come last."""
    defaults = {field.name: field.default for field in fields(options_class) if field.default is not MISSING}
    named = {field.name for field in fields(options_class) if field.kw_only}
    described_fields = []
    hints = get_type_hints(options_class, include_extras=True)
    for name, hint in sorted(hints.items(), key=lambda item: item[0] in named):
        described = next((item for item in getattr(hint, "__metadata__", ()) if isinstance(item, Option)), None)
        if described is not None and described.help:
            plain = get_args(hint)[0]
            if isinstance(plain, UnionType):
                plain, *_ = (kind for kind in get_args(plain) if kind not in (NoneType, Uri))
            described_fields.append(_Field(name, plain, defaults.get(name, _MISSING), described, hint))
    return described_fields


def _option(field: _Field, *, required: bool) -> FieldOption:
    """Make the option that gives a field its value."""
    kind, described, default = field.type, field.described, field.default
    attributes: dict[str, Any] = {"help": described.help, "metavar": described.metavar, "required": required}
    spelling = f"--{field.parameter}"
    if kind is bool:
        spelling += "" if default is False else f"/--no_{field.parameter}"
        attributes |= {"is_flag": True, "default": default}
    elif kind in (tuple[str, ...], tuple[Path, ...]):
        attributes |= {"multiple": True, "default": default, "type": PathType() if Path in get_args(kind) else str}
    else:
        attributes |= {"type": _value_type(kind, described)}
        if default not in (None, _MISSING):
            attributes["default"] = ",".join(map(str, default)) if isinstance(default, tuple) else default
    if described.default:
        attributes["help"] += f"  [default: {described.default}]"
    else:
        attributes["show_default"] = default not in ((), "") and default is not False
    return FieldOption(field, [spelling, field.parameter], **attributes)


def _value_type(kind: Any, described: Option) -> click.ParamType[Any]:
    if described.choices:
        return NameChoice(described.choices)
    if kind == tuple[int, ...]:
        return CountList()
    if kind is Path:
        return (LocationType if described.is_location else PathType)(described.writes)
    if kind is str:
        return CheckpointType() if described.is_checkpoint else click.STRING
    bounds: dict[str, Any] = {"min": described.minimum, "max": described.maximum, "min_open": described.is_open}
    if kind is int:
        return click.INT if bounds["min"] is None else _Integer(**bounds)
    return _Number(**bounds)


class _Integer(click.IntRange):
    """An integer with bounds, shown in the help and checked by the field."""

    convert = click.INT.convert


class _Number(click.FloatRange):
    """A float with bounds, likewise."""

    convert = click.FLOAT.convert


def _protect_inputs(context: click.Context) -> None:
    """Note the inputs of the running command, and refuse outputs that are one of them, or each other.

    Raises:
        OutputWriteError: an output is an input.
        InputError: an optional input does not exist.
        UsageError: two outputs are the same file.
    """
    paths = [
        (parameter.opts[0], parameter.type.writes, path)
        for parameter in context.command.params
        if isinstance(parameter.type, PathType | CheckpointType)
        for path in several_of(context.params.get(parameter.name or ""))
    ]
    found_by_library = ("--model_path", "--model", "--data", "--check", "--public_key", "--config")
    for name, writes, path in paths:
        is_input = isinstance(path, Path) and name.startswith("--") and not writes and path != STDOUT
        if is_input and name not in found_by_library and not path.expanduser().exists():
            path.expanduser().absolute()  # an error of its own where the working directory was removed
            raise InputError(f"no such input file: {path}", f"check {name}")
    note_input(*(Path(path).expanduser() for _, writes, path in paths if not writes))
    outputs: dict[Path, str] = {}
    for name, writes, path in paths:
        if writes and path != STDOUT:
            if not path.is_dir():
                check_not_input(path)
            same = next((known for known in outputs if path.exists() and known.exists() and path.samefile(known)), path)
            if (other := outputs.setdefault(Path(os.path.realpath(same)), name)) != name:
                raise click.UsageError(f"{other} and {name} are both {path}\npass two files", context)


def several_of(value: Any) -> Sequence[Any]:
    """Return the paths of an option: none, one or several, without addresses of stores."""
    paths = value if isinstance(value, tuple) else (value,)
    return [path for path in paths if isinstance(path, Path | str)]


def log_options(command: Command) -> Command:
    """Add -v and --log_level, for `set_up_logging`."""
    level = click.option(
        "--log_level",
        type=NameChoice(tuple(_LEVELS), case_sensitive=False),
        help="What to log to stderr, with timestamps.  [default: warning; info with -v, debug with -vv]",
    )
    verbose = click.option(
        "-v",
        "--verbose",
        count=True,
        help="Log each step, such as passes and export strategies; -vv also logs every case, file and session.",
    )
    return verbose(level(command))


class _Formatter(logging.Formatter):
    """Write a record without control characters, and bounded: names in a model are untrusted."""

    default_msec_format = "%s.%03d"

    def format(self, record: logging.LogRecord) -> str:
        return shown(super().format(record))


def set_up_logging(context: click.Context, log_level: str | None, verbose: int) -> None:
    """Log to stderr until the command ends, at the given level, or one for the number of -v."""
    logger = logging.getLogger("onnxtool")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    before = logger.level, logger.propagate, list(logger.handlers)
    logger.handlers = [handler]
    logger.propagate = False  # a library may have added a handler to the root logger
    logger.setLevel(_LEVELS[log_level] if log_level else _OF_VERBOSITY[min(verbose, len(_OF_VERBOSITY) - 1)])

    for setting in all_of(context):
        logger.info("--%s is %s, from %s", setting.option, setting.value, setting.source)

    def take_back() -> None:
        logger.setLevel(before[0])
        logger.propagate, logger.handlers = before[1:]

    context.call_on_close(take_back)


def shown_options(formats: Sequence[str], more: str = "") -> Callable[[Command], Command]:
    """Add --format, which takes one of `formats` with `more` in its help, --quiet and the logging options."""

    def decorate(command: Command) -> Command:
        @wraps(command)
        def protected(*arguments: Any, log_level: str | None, verbose: int, **values: Any) -> Any:
            context = click.get_current_context()
            if log_level or verbose:
                set_up_logging(context, log_level, verbose)
            if context.info_name != "env" and (wrong := unknown_variables(context)):  # which lists them
                raise click.UsageError("; ".join(wrong), context)
            _protect_inputs(context)
            return command(*arguments, **values)

        quiet = click.option("--quiet", is_flag=True, help="No progress on stderr; the result is still printed.")
        return click.option(
            "--format",
            "format_name",
            type=NameChoice(formats),
            default="text",
            show_default=True,
            help=f"How to print the result on stdout{more}.",
        )(quiet(log_options(protected)))  # type: ignore[return-value]  # as click itself

    return decorate


def format_options(formats: Sequence[str], more: str = "") -> Callable[[Command], Command]:
    """Add --config and the options that `shown_options` adds."""
    return lambda command: shown_options(formats, more)(config_option(command))


report_options = format_options(FORMATS)
"""Add how the result and the progress of a command are shown, and its configuration."""


class Result(NamedTuple):
    """The destination of a command's report.

    Attributes:
        output: the file to write; None for stdout.
        force: whether to replace that file.
        quiet: whether to hide progress.
    """

    output: Path | None
    force: bool
    format_name: str
    quiet: bool

    def check(self, *paths: Path | None) -> None:
        """Refuse the output, and other files, that cannot be written."""
        for path in (self.output, *paths):
            if path is not None:
                check_writable(path, force=self.force)

    def emit(self, report: object, blocks: Sequence[Block]) -> None:
        """Print or write a report."""
        emit(report, blocks, self.format_name, output=self.output, force=self.force)

    def write(self, text: str) -> None:
        """Print or write text that is already formatted."""
        write_out(text, output=self.output, force=self.force)


def is_given(name: str) -> bool:
    """Whether a parameter of the running command was set explicitly."""
    return click.get_current_context().get_parameter_source(name) is not ParameterSource.DEFAULT


def refuse(names: AbstractSet[str], reason: str) -> None:
    """Refuse command-line parameters that would have no effect.

    Raises:
        UsageError: one was passed.
    """
    context = click.get_current_context()
    unused = [
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.name in names and context.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE
    ]
    if unused:
        raise click.UsageError(f"{reason} leave out {' and '.join(unused)}")


VECTORS = "vectors"
_SUFFIXES = dict.fromkeys(("", ".txt"), "text") | dict.fromkeys((".jsonl", ".jsonl.gz"), "jsonl")
_SUFFIXES |= {".json": "json", ".md": "markdown", ".html": "html"}
_SUFFIXES |= dict.fromkeys((".npy", ".npz", ".parquet"), VECTORS)


def format_of(output: Path | None, format_name: str, formats: Sequence[str]) -> str:
    """Return the format for the suffix of `output`, unless --format was given.

    Raises:
        UsageError: the suffix is of a format that the command does not write.
    """
    if output is None or is_given("format_name"):
        return format_name
    suffix = "".join(output.suffixes[-2:] if output.suffix.lower() == ".gz" else output.suffixes[-1:]).lower()
    if _SUFFIXES.get(suffix) not in formats:
        known = [name for name, suffix_format in _SUFFIXES.items() if name and suffix_format in formats]
        raise click.UsageError(
            f"--output {output} is named as {suffix[1:]}, and this result is written as {', '.join(formats)}\n"
            f"choose one of {', '.join(known)}, or the format by --format"
        )
    return _SUFFIXES[suffix]


def result_options(formats: Sequence[str] = FORMATS, more: str = "") -> Callable[[Command], Command]:
    """Add --output, --force, --format and --quiet, passed to the command as `result`, and related options."""

    def decorate(command: Command) -> Command:
        @wraps(command)
        def with_result(
            *arguments: Any, output: Path | None, force: bool, format_name: str, quiet: bool, **values: Any
        ) -> Any:
            destination = None if output == STDOUT else output
            chosen = format_of(destination, format_name, formats)
            return command(*arguments, result=Result(destination, force, chosen, quiet), **values)

        output_option = click.option(
            "--output",
            type=PathType("file"),
            help="Write the result to this file instead of stdout (-), in the format of its suffix: "
            f"{', '.join(name for name, one in _SUFFIXES.items() if name and one in formats)}.",
        )
        shown = format_options(formats, more)(with_result)
        force_field = _Field("force", bool, False, get_args(Force)[1], Force)
        vars(shown)["__click_params__"].append(_option(force_field, required=False))
        return output_option(shown)  # type: ignore[return-value]

    return decorate


def model_argument(name: str, metavar: str = "MODEL") -> Callable[[Command], Command]:
    """Accept the value of the option `name` as an argument too: `onnxtool optimize model.onnx`."""

    def decorate(command: Command) -> Command:
        params: list[click.Parameter] = vars(command)["__click_params__"]
        option = next(parameter for parameter in params if parameter.name == name)
        consume = option.consume_value

        def keep(ctx: click.Context, _parameter: click.Parameter, value: str | None) -> None:
            ctx.meta[f"{__name__}.{name}"] = value

        def consume_either(ctx: click.Context, opts: Mapping[str, Any]) -> tuple[Any, ParameterSource]:
            argument = ctx.meta[f"{__name__}.{name}"]
            if argument is None:
                return consume(ctx, opts)
            if opts.get(name) is not None:
                raise click.UsageError(f"{metavar} is given twice: {argument}, and {opts[name]} by --{name}", ctx)
            return argument, ParameterSource.COMMANDLINE

        option.consume_value = consume_either  # type: ignore[method-assign]
        params.append(
            click.Argument(
                [f"_{name}"], required=False, metavar=f"[{metavar}]", is_eager=True, expose_value=False, callback=keep
            )
        )
        return command

    return decorate


def dry_run_option(command: Command) -> Command:
    """Add --dry_run."""
    return click.option(
        "--dry_run",
        is_flag=True,
        help="Run the quick checks of options and inputs, list the files that would be written, and write none.",
    )(command)


@contextmanager
def refused_gates() -> Iterator[None]:
    """Convert the error of a gate that is malformed, or names no figure: 1 is for gates that are met.

    Raises:
        UsageError: a gate cannot be used.
    """
    try:
        yield
    except GateError as error:
        raise click.UsageError(f"{error.message}\n{error.hint}") from error
