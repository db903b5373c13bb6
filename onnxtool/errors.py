"""User-facing errors, each with what happened, the offending value and a hint."""

from __future__ import annotations

import errno
import re
from collections.abc import Collection
from importlib import import_module
from itertools import islice
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onnxtool.verification import Verification


NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_LONGEST_MESSAGE = 2000  # characters; messages quote files and options, whose names may have any length
_LONGEST_REASON = 300
_LONGEST_NAME = 160
_NAME = re.compile(rf"'[^'\n]{{{_LONGEST_NAME},}}'|(?<!\S)\S{{{_LONGEST_NAME},}}[^\s:;,.]")
_FEW = 4  # names of a list


def shorten(text: str, most: int = _LONGEST_NAME) -> str:
    """Leave out the middle of a long text, and state the full length."""
    if len(text) <= most:
        return text
    return f"{text[: most // 2]}…{text[-(most // 4) :]} ({len(text)} characters)"


def some(names: Collection[str], most: int = _FEW) -> str:
    """List the first names, and how many more there are."""
    shown = ", ".join(shorten(name) for name in islice(names, most))
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def bounded(message: str) -> str:
    """Shorten a message of more than 2,000 characters: first the names in it, then its lists, then the whole."""
    if len(message) > _LONGEST_MESSAGE:
        message = _NAME.sub(lambda name: shorten(name[0]), message)
    for separator in ("\n", "; ", ", "):
        parts = message.split(separator)
        if len(message) > _LONGEST_MESSAGE and len(parts) > 3 * _FEW:
            omitted = f"… {len(parts) - 2 * _FEW} more …"
            message = separator.join([*parts[:_FEW], omitted, *parts[-_FEW:]])
    return shorten(message, _LONGEST_MESSAGE)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, shortened, or its class if the message is empty."""
    return shorten((str(error).strip().splitlines() or [type(error).__name__])[0], _LONGEST_REASON)


class OnnxtoolError(Exception):
    """An expected failure; the command line prints it without a traceback and exits with 1.

    Attributes:
        message: what happened, with the offending value.
        hint: how to fix it, or an empty string.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message := bounded(message))
        self.message = message
        self.hint = bounded(hint)

    def __str__(self) -> str:
        """Return the message and the hint, as shown in logs and tracebacks of library users."""
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class CheckpointError(OnnxtoolError):
    """The checkpoint cannot be found, understood or loaded."""


class ExportError(OnnxtoolError):
    """The model cannot be traced, or the traced graph is not the requested one."""


class TargetError(OnnxtoolError):
    """The target consumer cannot use this model, or the file is not what it expects."""


class ModelFileError(OnnxtoolError):
    """An ONNX file is missing, malformed, or refers to data outside its folder."""


class OutputExistsError(OnnxtoolError):
    """The output already exists, and the caller did not ask to replace it."""


class OutputWriteError(OnnxtoolError):
    """The output cannot be written: no space, no permission, or no such folder."""


class StoreError(OnnxtoolError):
    """An object store refused a request, or did not answer."""


class PassError(OnnxtoolError):
    """An optimization pass cannot be applied to this model."""


class GradientError(OnnxtoolError):
    """The gradient of a model cannot be built."""


class ArtifactError(OnnxtoolError, RuntimeError):
    """The training artifacts of a model cannot be made, or do not match each other.

    Also a RuntimeError, as raised by onnxruntime-training.
    """


class FusionError(OnnxtoolError):
    """Fewer subgraphs were fused than the caller required."""


class ProviderError(OnnxtoolError):
    """The requested execution provider cannot run here."""


class SessionError(OnnxtoolError):
    """onnxruntime cannot load or run the model."""


class InputError(OnnxtoolError):
    """The input texts, files or tensors cannot be used."""


def imported(module: str, need: str, hint: str) -> Any:
    """Return a module of an optional package; `need` says what needs it.

    Raises:
        InputError: it cannot be imported.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise InputError(f"{need}, which cannot be imported: {error}", hint) from error


class OptionError(InputError, ValueError, TypeError):
    """An option or argument has an invalid value; the message lists the valid ones.

    Also a ValueError and a TypeError, as raised by Python's own functions. The command line exits with 2, as for all
    usage errors.
    """


class GateError(OnnxtoolError):
    """A gate expression is malformed, or names an unknown figure."""


class CompilationError(OnnxtoolError):
    """A PyTorch graph cannot be compiled for onnxruntime as requested, or its results differ from PyTorch's."""


class TrainingError(OnnxtoolError):
    """A PyTorch model cannot be trained through onnxruntime as requested."""


class VerificationError(OnnxtoolError):
    """The result differs from the reference by more than the tolerance; the output was not kept.

    Attributes:
        verification: the figures of every case, including the worst.
    """

    def __init__(self, message: str, hint: str, verification: Verification) -> None:
        super().__init__(message, hint)
        self.verification = verification
