"""Compare an ONNX file with what it was made from: the comparison that every command makes, as a call."""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from onnxtool.errors import InputError, OptionError
from onnxtool.model_file import ModelFile, scratch_file
from onnxtool.options import NOTHING, Option, Options, StrPath, checked
from onnxtool.runtime.given_inputs import GivenInputs, InputShapes, SampleInputs
from onnxtool.verification import Verification

if TYPE_CHECKING:
    from onnxtool.runtime.comparison import Tolerance

# The tolerances are those of `runtime.comparison`, which needs numpy, and --help does not.
TOLERANCE_NAMES = ("fp32", "fp16", "int8", "int4")


class VerifyOptions(Options):
    """What to compare on, and how much may differ.

    Attributes:
        sample_inputs: .npz files to run both on, instead of made-up inputs.
        input_shapes: shapes of made-up inputs, as NAME:1,128.
        revision: of a checkpoint on the hub.
        trust_remote_code: whether code in a checkpoint may run.
        provider: where two files run, `cpu` or `cuda`.
        precision: whose tolerance holds; `atol`, `rtol` and `min_cosine` replace its parts.
    """

    sample_inputs: SampleInputs = NOTHING
    input_shapes: InputShapes = NOTHING
    revision: Annotated[str | None, Option("Of a checkpoint on the hub: a branch, tag or commit.")] = None
    trust_remote_code: Annotated[bool, Option("Let code in the checkpoint run.")] = False
    provider: Annotated[str, Option("Where both files run.", choices=("cpu", "cuda"))] = "cpu"
    precision: Annotated[str, Option("The precision whose tolerance holds.", choices=TOLERANCE_NAMES)] = "fp32"
    atol: Annotated[float | None, Option("Allowed absolute error, instead of the precision's.", minimum=0)] = None
    rtol: Annotated[float | None, Option("Allowed error relative to the largest value of an output.", minimum=0)] = None
    min_cosine: Annotated[
        float | None, Option("The least cosine of an output with the reference's.", minimum=0, maximum=1)
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.given  # refused at once where it is no shape

    @property
    def tolerance(self) -> Tolerance:
        """The tolerance of the precision, with the parts that are replaced."""
        from onnxtool.runtime.comparison import TOLERANCES, Tolerance

        base = TOLERANCES[self.precision]
        return Tolerance(
            base.atol if self.atol is None else self.atol,
            base.rtol if self.rtol is None else self.rtol,
            base.cosine if self.min_cosine is None else self.min_cosine,
        )

    @property
    def given(self) -> GivenInputs:
        """What is said of the inputs."""
        return GivenInputs.of(self.sample_inputs, self.input_shapes)


_DEFAULTS = VerifyOptions()


@checked
def verify(model: StrPath, reference: StrPath, options: VerifyOptions = _DEFAULTS) -> Verification:
    """Compare an ONNX file with what it was made from: an ONNX file, as `onnxtool optimize` does, or a checkpoint.

    Two files run on the inputs that are given, else on made-up ones: of many lengths, rows and paddings, as the
    reference's export stamped them or as its graph suggests, and at the sizes at which its graph computes in another
    way. A checkpoint runs in PyTorch on the cases of `onnxtool export`, or on given samples.

    Args:
        model: the ONNX file to verify.
        reference: an ONNX file, or a checkpoint: a folder, or an id on the hub.
        options: what to compare on, and how much may differ.

    Returns:
        The figures of each case; `passed` says whether all are within the tolerance.

    Raises:
        ModelFileError: one of the files cannot be read.
        InputError: the two have other inputs, no inputs can be made up, or what is given does not fit.
        SessionError: the reference runs on none of the inputs.
        CheckpointError: the checkpoint cannot be found, understood or loaded.
        VerificationError: the reference does not repeat itself, or gives nothing that can be compared.
    """
    file = ModelFile.open(model)
    # A file that is not there is a slip, and no id on the hub.
    if not Path(reference).is_file() and Path(reference).suffix != ".onnx":
        return _compare_with_checkpoint(file, os.fspath(reference), options)
    source = ModelFile.open(reference)
    _require_same_signature(file, source)
    from onnxtool.checkpoint.quantized_vectors import VectorType
    from onnxtool.graph.shapes import find_turns
    from onnxtool.model_file.weights import load_model
    from onnxtool.optimize.stored_vectors import storage_of
    from onnxtool.optimize.verification import Original

    graph = load_model(source.path)
    storage = storage_of(source)(graph)
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        # Vectors that the reference stores as codes are compared as it computes them.
        path = source.path if storage is None else stack.enter_context(scratch_file(graph, Path(name)))
        original = Original(
            source, path, options.provider, source.structure.ops, turns=find_turns(graph), given=options.given
        )
        del graph
        return original.run().compare(file.path, options.tolerance, VectorType.of_model(file))


def _compare_with_checkpoint(file: ModelFile, reference: str, options: VerifyOptions) -> Verification:
    from onnxtool.export.agreement import compare_with_checkpoint
    from onnxtool.export.options import ExportOptions
    from onnxtool.runtime.input_cases import input_cases

    if options.provider != "cpu" or options.given.shapes:
        what = "--input_shape" if options.given.shapes else f"--provider {options.provider}"
        raise OptionError(
            f"{what} is for two files, and {reference} is a checkpoint, or no file at all",
            "leave it out, or pass an ONNX file to compare with",
        )
    tolerance = options.tolerance
    asked = ExportOptions(
        reference,
        revision=options.revision,
        trust_remote_code=options.trust_remote_code,
        atol=tolerance.atol,
        rtol=tolerance.rtol,
        min_cosine=tolerance.cosine,
        force=True,
    )
    samples = input_cases(file, given=options.given) if options.given.samples else ()
    return compare_with_checkpoint(file, asked, samples)


def _require_same_signature(file: ModelFile, source: ModelFile) -> None:
    """Refuse files that cannot be run on the same inputs, or of which nothing could be compared."""
    for kind in ("inputs", "outputs"):
        names, wanted = ({info.name for info in getattr(one.structure, kind)} for one in (file, source))
        if names != wanted if kind == "inputs" else not wanted <= names:
            raise InputError(
                f"{file.path} has the {kind} {', '.join(sorted(names))}, and {source.path} has "
                f"{', '.join(sorted(wanted))}",
                "compare files of one model: the names of their inputs and outputs are the same",
            )
