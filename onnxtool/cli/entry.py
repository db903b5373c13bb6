"""The command group and its entry point: the only place that catches errors."""

from __future__ import annotations

import difflib
import errno
import importlib
import logging
import os
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click

from onnxtool.cli.commands import COMMANDS as COMMANDS
from onnxtool.cli.commands import RUNNABLE
from onnxtool.cli.streams import drop_output, is_text, ready_streams
from onnxtool.cli.streams import report_error as report_error
from onnxtool.errors import OnnxtoolError, OptionError, first_line
from onnxtool.reading import reading
from onnxtool.version import DISTRIBUTION, __version__, commit

# With less, some libraries end the process while loading, or wait forever.
_LEAST_MEMORY_MB = 256
_NO_MEMORY = re.compile("[Cc]annot allocate|start new thread|bad_alloc")
_EXTRA_ARGUMENTS = "Got unexpected extra argument"
_UNDER_A_LIMIT = re.compile("failed to map segment|NULL|return without exc")  # bugs and other causes produce it too


class TableGroup(click.Group):
    """A group whose help lists commands in the order of a table, and which suggests one for an unknown name.

    Attributes:
        table: the names of its commands, each with a description.
    """

    table: Mapping[str, str] = {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of the table."""
        return list(self.table)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the requested command, or suggest similar ones; an option is left to click.

        Raises:
            UsageError: there is no such command.
        """
        if args and args[0] not in self.table and not args[0].startswith("-"):
            close = difflib.get_close_matches(args[0], self.table, n=1)
            more = f"Did you mean {close[0]!r}?" if close else f"There are {', '.join(self.table)}."
            ctx.fail(f"No such command {args[0]!r}. {more}")
        return super().resolve_command(ctx, args)


class _LazyGroup(TableGroup):
    """A group that knows its commands' names and imports them one at a time."""

    table = COMMANDS

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"onnxtool.cli.{cmd_name}").command
        return command

    def invoke(self, ctx: click.Context) -> Any:
        """Run the resolved command; click itself would exit with 1 on a broken pipe."""
        try:
            with reading():
                return super().invoke(ctx)
        except BrokenPipeError:
            raise click.exceptions.Exit(_reader_is_gone()) from None
        except (OnnxtoolError, click.UsageError) as error:
            from onnxtool.cli.configuration import sources_of

            if isinstance(error, OnnxtoolError):
                sources = sources_of(ctx, f"{error.message}\n{error.hint}")
                error.hint = "\n".join(filter(None, (error.hint, sources)))
            elif sources := sources_of(ctx, error.message):
                raise click.UsageError(f"{error.format_message()}\n{sources}", error.ctx) from error
            raise

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def _with_underscores(token: str) -> str:
    """Accept hyphens in every option: `--model-name` is `--model_name`."""
    return token.replace("-", "_")


def _show_version(ctx: click.Context, _parameter: click.Parameter, is_asked_for: bool) -> None:
    """Print the version, and the commit if it is known."""
    if is_asked_for and not ctx.resilient_parsing:
        known = commit()
        click.echo(f"onnxtool, version {__version__}{f' ({known})' if known else ''}")
        ctx.exit()


@click.group(
    cls=_LazyGroup,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": _with_underscores,
        "max_content_width": 110,
    },
    epilog="\b\nExample: onnxtool export --model_name naver/splade-cocondenser-ensembledistil",
)
@click.option(
    "--version", is_flag=True, expose_value=False, is_eager=True, callback=_show_version, help="Show the version."
)
def main() -> None:
    """Turn a Hugging Face checkpoint into a verified, optimized, timed and documented ONNX model.

    Options come from the command line, then ONNXTOOL_COMMAND_OPTION in the environment, then
    [COMMAND] in .onnxtool.toml, then [tool.onnxtool.COMMAND] in pyproject.toml.
    """


def find_command(path: str) -> click.Command:
    """Return the matching command of RUNNABLE."""
    group: click.Command = main
    for name in path.split():
        assert isinstance(group, click.Group)  # noqa: S101  the first names are groups
        command = group.get_command(click.Context(group), name)
        assert command is not None  # noqa: S101  every name has a command
        group = command
    return group


def run_arguments(arguments: Sequence[str]) -> int:
    """Run a command line; return 0 for done, 1 for failed or a gate met, 2 for wrong usage, 130 for interrupted."""
    ready_streams()
    if wrong := [argument for argument in arguments if not is_text(argument)]:
        return report_error(
            f"the argument {wrong[0]!r} is not valid UTF-8", "rename the file, or write the text again", 2
        )
    # PyTorch makes a folder for its compiler when it is imported, unless this one is there; no command compiles.
    if os.path.isdir(temporary := os.environ.get("TMPDIR") or "/tmp"):  # noqa: PTH112, S108  half the time of tempfile
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", temporary)
    if logging.lastResort is not None and not logging.lastResort.filters:
        logging.lastResort.addFilter(logging.Filter("onnxtool"))  # what libraries log would stand ahead of an error
    allowed_mb = _allowed_mb()
    if allowed_mb is not None and allowed_mb < _LEAST_MEMORY_MB:
        return report_error(
            f"a process may have {allowed_mb} MB of memory here, and the libraries need {_LEAST_MEMORY_MB} MB alone",
            "raise the limit: ulimit -v, or ulimit -d",
            1,
        )
    try:
        arguments = arguments or ["--help"]
        code = main.main(list(arguments), standalone_mode=False, prog_name="onnxtool")
        sys.stdout.flush()
    except (OnnxtoolError, click.ClickException) as error:
        return _report_refusal(error, arguments[0] if arguments[0] in COMMANDS else "")
    except (KeyboardInterrupt, click.Abort):
        return report_error("interrupted", "", 130)
    except BrokenPipeError:
        return _reader_is_gone()
    except OSError as error:
        if error.errno is None:  # not a system failure: other libraries derive their errors from OSError too
            raise
        drop_output()
        return report_error(f"{_place_of(error)}: {error.strerror}", "", 1)
    except (MemoryError, ImportError, SystemError, RuntimeError) as error:
        if (reported := _report_missing(error, allowed_mb)) is None:
            raise
        return reported
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # a library in Rust gave up, with an error that is no Exception
            raise
        reason = first_line(error)
        return report_error(
            f"a library fails on the tokenizer or its texts: {reason}",
            "save the tokenizer again, or give other texts",
            1,
        )
    return code if isinstance(code, int) else 0


def _report_refusal(error: OnnxtoolError | click.ClickException, command: str) -> int:
    """Report what onnxtool or click refuses, with the command whose help explains it; return the exit code."""
    usage = f"onnxtool {command}".strip()
    if isinstance(error, OptionError):
        return report_error(error.message, _joined(error.hint, f"see {usage} --help"), 2)
    if isinstance(error, OnnxtoolError):
        return report_error(error.message, error.hint, 1)
    # A line that is not indented, as a mark under a gate is, begins the hint.
    # click lists the choices of a missing argument on lines that a tab begins.
    message, *hints = re.split(r"\n(?=\S)", re.sub(r"\n\t", " ", error.format_message()), maxsplit=1)
    if isinstance(error, click.UsageError):
        # The option parser has no context.
        path = error.ctx.command_path if error.ctx is not None else usage
        hints += [*_ways_out(error), f"see {path} --help"]
    return report_error(message, _joined(*hints), error.exit_code)


def _joined(*hints: str) -> str:
    return "; ".join(hint.replace("\n", "; ") for hint in hints if hint)


def _report_missing(error: Exception, allowed_mb: int | None) -> int | None:
    """Report that memory or a library is missing, and return the exit code; None for any other error."""
    if isinstance(error, ImportError) and error.name in ("torch", "transformers"):
        return report_error(
            f"this needs {error.name}, which is not installed", f"pip install '{DISTRIBUTION}[export]'", 1
        )
    is_known = isinstance(error, MemoryError) or _NO_MEMORY.search(str(error))
    if not is_known and (allowed_mb is None or not _UNDER_A_LIMIT.search(str(error))):
        return None
    limit = "" if allowed_mb is None else f"; a process may have {allowed_mb} MB here (ulimit -v, ulimit -d)"
    return report_error("there is not enough memory", f"use smaller batches, shorter texts, or more memory{limit}", 1)


def _allowed_mb() -> int | None:
    """Return the memory limit of this process in megabytes; None if there is none."""
    if sys.platform == "win32":
        return None
    import resource

    limits = (resource.getrlimit(limit)[0] for limit in (resource.RLIMIT_AS, resource.RLIMIT_DATA))
    return min((limit // 1_000_000 for limit in limits if limit != resource.RLIM_INFINITY), default=None)


def _place_of(error: OSError) -> str:
    """Describe what failed: a file, stdout written by us or click, or a library's system call."""
    if error.filename:
        return f"cannot read or write {error.filename}"
    import traceback

    try:
        os.getcwd()  # noqa: PTH109  pathlib is not imported yet
    except OSError:
        return "the working directory was removed, or cannot be read"
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    module: str = frame.f_globals["__name__"]
    if module.startswith(("click.", __package__)):
        return "cannot write to stdout"
    if module.startswith(("multiprocessing.", "concurrent.")):
        is_shared = not isinstance(error, FileNotFoundError | PermissionError) and error.errno != errno.EROFS
        return "cannot start a process" if is_shared else "cannot start a process, which needs to write to /dev/shm"
    return f"the system refuses a call of {module}.{frame.f_code.co_name}"


def _ways_out(error: click.UsageError) -> list[str]:
    """Say how to pass a missing or extra argument, and which commands have an option that this one lacks."""
    is_of_arguments = isinstance(error, click.MissingParameter) or error.message.startswith(_EXTRA_ARGUMENTS)
    if not is_of_arguments and not isinstance(error, click.NoSuchOption):
        return []
    name = error.option_name if isinstance(error, click.NoSuchOption) else ""
    ways = []
    if error.ctx is not None:
        command = error.ctx.command
        needs_one = any(isinstance(parameter, click.Argument) and parameter.required for parameter in command.params)
        usage = command.collect_usage_pieces(error.ctx)
        if needs_one or (is_of_arguments and len(usage) > 1):
            ways.append(f"write {' '.join([error.ctx.command_path, *usage])}")
        elif is_of_arguments and command.epilog:
            ways.append(f"write e.g. {command.epilog.rpartition('Example: ')[2]}")
    owners = [
        owner
        for owner in RUNNABLE
        if name and any(name in (*option.opts, *option.secondary_opts) for option in find_command(owner).params)
    ]
    if owners:
        ways.append(f"{name} is an option of onnxtool {', '.join(owners)}")
    return ways


def _reader_is_gone() -> int:
    """Stop silently, as other tools do, when the reader of the output is gone (`| head`)."""
    drop_output()
    return 141
