"""The errors a user can meet, each with what happened, the value and the way out."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onnxtool.verification import Verification


class OnnxtoolError(Exception):
    """A failure that onnxtool foresees; the command line prints it without a traceback and exits 1.

    Attributes:
        message: what happened, with the offending value.
        hint: the way out, or an empty string where there is none to give.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        """Return the message and the hint, which users of the library log and see in tracebacks."""
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class CheckpointError(OnnxtoolError):
    """The checkpoint cannot be found, understood or loaded."""


class ExportError(OnnxtoolError):
    """The model cannot be traced, or the traced graph is not what was asked for."""


class TargetError(OnnxtoolError):
    """The consumer that the export is for cannot use this model, or the file is not what it expects."""


class ModelFileError(OnnxtoolError):
    """An ONNX file is missing, malformed, or refers to data outside its folder."""


class OutputExistsError(OnnxtoolError):
    """The output is there already, and the caller did not ask to replace it."""


class OutputWriteError(OnnxtoolError):
    """The output cannot be written: no space, no permission, no folder."""


class StoreError(OnnxtoolError):
    """An object store refuses a request, or does not answer."""


class PassError(OnnxtoolError):
    """An optimization pass cannot be applied to this model."""


class GradientError(OnnxtoolError):
    """The gradient of a model cannot be built."""


class ArtifactError(OnnxtoolError, RuntimeError):
    """The training artifacts of a model cannot be made, or do not fit each other.

    A RuntimeError as well, which is what onnxruntime-training raises.
    """


class FusionError(OnnxtoolError):
    """Fewer subgraphs were fused than the caller requires."""


class ProviderError(OnnxtoolError):
    """The requested execution provider cannot run here."""


class SessionError(OnnxtoolError):
    """onnxruntime cannot load or run the model."""


class InputError(OnnxtoolError):
    """The texts, files or tensors to run cannot be used."""


class OptionError(InputError, ValueError, TypeError):
    """An option or an argument has a value that it does not take; the message lists what it takes.

    A ValueError and a TypeError as well, which Python's own functions raise. The command line ends with 2, as for all
    wrong usage.
    """


class GateError(OnnxtoolError):
    """A gate expression cannot be understood, or names a figure that is not there."""


class CompilationError(OnnxtoolError):
    """A graph of PyTorch cannot be compiled for onnxruntime as asked, or its answers are not PyTorch's."""


class TrainingError(OnnxtoolError):
    """A model of PyTorch cannot be trained through onnxruntime as asked."""


class PublishingError(OnnxtoolError):
    """A release cannot be uploaded to the hub."""


class VerificationError(OnnxtoolError):
    """The result differs from what went in by more than the tolerance; the output was not kept.

    Attributes:
        verification: the figures of every case, the worst one among them.
    """

    def __init__(self, message: str, hint: str, verification: Verification) -> None:
        super().__init__(message, hint)
        self.verification = verification
