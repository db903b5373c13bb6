"""User-facing errors, each with what happened, the offending value and a hint."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onnxtool.verification import Verification


_LONGEST_REASON = 300  # characters; a library's message may hold a name of any length


def first_line(error: BaseException) -> str:
    """Return the beginning of the first line of an error's message, or its class if the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:_LONGEST_REASON]


class OnnxtoolError(Exception):
    """An expected failure; the command line prints it without a traceback and exits with 1.

    Attributes:
        message: what happened, with the offending value.
        hint: how to fix it, or an empty string.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

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


class PublishingError(OnnxtoolError):
    """A release cannot be uploaded to the hub."""


class VerificationError(OnnxtoolError):
    """The result differs from the reference by more than the tolerance; the output was not kept.

    Attributes:
        verification: the figures of every case, including the worst.
    """

    def __init__(self, message: str, hint: str, verification: Verification) -> None:
        super().__init__(message, hint)
        self.verification = verification
