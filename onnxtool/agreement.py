"""Compare an ONNX file with its source: the verification of every command, as a function."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from onnxtool.errors import InputError, OptionError
from onnxtool.export.options import AllowPickle, Revision, TrustRemoteCode
from onnxtool.export.targets import TARGETS
from onnxtool.interruption import temporary_folder
from onnxtool.model_file import ModelFile, scratch_file
from onnxtool.options import NOTHING, UNSET, Many, Option, OptionalPath, StrPath, checked
from onnxtool.runtime.given_inputs import GivenInputs, InputShapes, SampleInputs
from onnxtool.runtime.providers import CPU, ProviderOptions, parse_provider, provider_effect
from onnxtool.verification import Verification

if TYPE_CHECKING:
    from onnxtool.runtime.difference import Tolerance

_CONSUMERS = tuple(name for name, target in TARGETS.items() if not target.takes_any_graph)
# The tolerances live in `runtime.comparison`, which imports numpy; --help must not.
TOLERANCE_NAMES = ("fp32", "fp16", "bf16", "int8", "int4")


class VerifyOptions(ProviderOptions):
    """Inputs and tolerances of a comparison.

    Attributes:
        sample_inputs: .npz files to run both models on, instead of generated inputs.
        input_shapes: shapes of generated inputs, as NAME:1,128.
        revision: revision of a checkpoint on the hub.
        trust_remote_code: whether code in the checkpoint may run.
        allow_pickle: whether the checkpoint's weights may be read from a pickle.
        provider: where two files run. On another provider than these, only the first one does, and the reference runs
            on the CPU.
        precision: the precision that sets the tolerance; `atol`, `rtol` and `min_cosine` override its parts.
        consumer: the consumer in which `consumers.verify_in_consumer` opens a folder; None for `verify`.
        interpreter: the Python or node that has the consumer.
        max_error: upper bound on the error of a consumer's answers in int8, uint8 and int4; None for 0.01.
        texts: for `evaluation.drift.measure_drift`, a file of texts on which the vectors of two files are compared.
        data: likewise, a collection with judgements.
        fail_if: gates on drift.
    """

    sample_inputs: SampleInputs = NOTHING
    input_shapes: InputShapes = NOTHING
    revision: Revision = None
    trust_remote_code: TrustRemoteCode = False
    allow_pickle: AllowPickle = False
    provider: Annotated[
        str,
        Option(
            "Execution provider for two files: cpu or cuda for both, or another one for the first.",
            metavar="NAME[:DEVICE]",
            effect=provider_effect,
            parse=parse_provider,
        ),
    ] = CPU
    precision: Annotated[
        str, Option("The precision that sets the tolerance.", choices=TOLERANCE_NAMES, effect="check")
    ] = "fp32"
    atol: Annotated[
        float | None, Option("Allowed absolute error, instead of the precision's.", minimum=0, effect="check")
    ] = None
    rtol: Annotated[
        float | None, Option("Allowed error relative to the largest value of an output.", minimum=0, effect="check")
    ] = None
    min_cosine: Annotated[
        float | None,
        Option("Minimum cosine similarity of an output with the reference.", minimum=0, maximum=1, effect="check"),
    ] = None
    consumer: Annotated[
        str | None,
        Option(
            "Open MODEL, a folder written for a --target, in this consumer, each of its files.",
            choices=_CONSUMERS,
        ),
    ] = None
    interpreter: Annotated[
        str | None,
        Option(
            "The Python or node of the environment that has the --consumer.", default="onnxtool's own", effect="code"
        ),
    ] = None
    max_error: Annotated[
        float | None,
        Option(
            "Largest error of a --consumer's answers in int8, uint8 and int4.",
            minimum=0,
            maximum=2,
            default="0.01",
            effect="check",
        ),
    ] = None

    texts: Annotated[
        OptionalPath,
        Option(
            "Measure drift on these texts (.txt or .jsonl): how the vectors of MODEL lie to those of REFERENCE, and "
            "whether an index of the latter can be kept.",
            metavar="FILE",
        ),
    ] = UNSET
    data: Annotated[
        OptionalPath,
        Option(
            "Measure drift on a collection, as of evaluate: the retrieval quality of new queries over the old index.",
            metavar="DIR",
        ),
    ] = UNSET
    fail_if: Annotated[
        Many[str],
        Option(
            "Of drift, exit with 1 if this holds, such as 'neighbours_kept<0.95' or 'ndcg@10<-1%'; may be repeated.",
            metavar="EXPR",
            default="if the index cannot be kept",
        ),
    ] = NOTHING

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.texts is not None or self.data is not None:
            used = ("texts", "data", "fail_if", "provider")
            others = [option.name for option in fields(self) if option.name not in used]
            if given := [name for name in others if getattr(self, name) != getattr(type(self), name)]:
                raise OptionError(f"--{given[0]} has no effect on drift (--texts, --data)", "leave it out")
            if self.texts is not None and self.data is not None:
                raise OptionError("drift is measured on --texts or on --data", "leave one of them out")
        elif self.fail_if:
            raise OptionError("--fail_if is for drift", "pass --texts or --data with it")
        _ = self.given  # refuses invalid shapes immediately
        for name in ("interpreter", "max_error"):
            if self.consumer is None and getattr(self, name) is not None:
                raise OptionError(f"--{name} is for --consumer, which was not passed", "leave it out")

    @property
    def tolerance(self) -> Tolerance:
        """The tolerance of the precision, with overrides applied."""
        from onnxtool.runtime.difference import TOLERANCES

        return TOLERANCES[self.precision].overridden(self.atol, self.rtol, self.min_cosine)

    @property
    def given(self) -> GivenInputs:
        """The options for the inputs."""
        return GivenInputs.of(self.sample_inputs, self.input_shapes)


_DEFAULTS = VerifyOptions()
_OF_CHECKPOINTS = ("revision", "trust_remote_code", "allow_pickle")


@checked
def verify(model: StrPath, reference: StrPath, options: VerifyOptions = _DEFAULTS) -> Verification:
    """Compare an ONNX file with its source: another ONNX file, as `onnxtool optimize` does, or a checkpoint.

    Two files run on the given inputs, or on generated ones: many lengths, batch sizes and paddings, as recorded by the
    reference's export or suggested by its graph, including the sizes at which the graph takes a different path. A
    checkpoint runs in PyTorch on the cases of `onnxtool export`, or on given samples. The files of fixed sizes that
    belong to the file are compared with it.

    Args:
        model: the ONNX file to verify.
        reference: an ONNX file, or a checkpoint given as a folder or hub id.
        options: inputs and tolerances.

    Returns:
        The figures of each case; `passed` is true if all are within the tolerance.

    Raises:
        ModelFileError: one of the files cannot be read.
        InputError: the models have different inputs, no inputs can be generated, or the given ones do not fit.
        SessionError: the reference runs on none of the inputs.
        CheckpointError: the checkpoint cannot be found, understood or loaded.
        VerificationError: the reference is not deterministic, or has no outputs that can be compared.
    """
    if options.consumer is not None:
        raise OptionError("`verify` compares a file (consumer)", "call onnxtool.verify_in_consumer with a folder")
    if options.texts is not None or options.data is not None:
        raise OptionError("`verify` compares outputs (texts, data)", "call onnxtool.measure_drift with DriftOptions")
    with temporary_folder() as folder:
        file = _reading_ids(ModelFile.open(model), folder / "model")
        # A missing file is a mistake, not a hub id.
        if not Path(reference).is_file() and Path(reference).suffix != ".onnx":
            found = _compare_with_checkpoint(file.with_sizes(), os.fspath(reference), options)
        else:
            for name in _OF_CHECKPOINTS:
                if getattr(options, name) != getattr(_DEFAULTS, name):
                    raise OptionError(f"--{name} is for a checkpoint, and {reference} is an ONNX file", "leave it out")
            found = _compare(file, _reading_ids(ModelFile.open(reference), folder / "reference"), options, folder)
        if not file.sizes:
            return found
        from onnxtool.runtime.made_files import with_sizes

        return with_sizes(found, file, options.provider)


def _reading_ids(file: ModelFile, folder: Path) -> ModelFile:
    """Return the part that reads ids of a file that reads texts, after a comparison of both; others as they are."""
    stated = file.text_input
    if stated is None:
        return file
    from onnxtool.export.in_graph import check_tokenizer
    from onnxtool.graph.text_input import serialized
    from onnxtool.runtime.text_graph import check_same_outputs, take_tokenizer_off

    folder.mkdir()
    core, front = take_tokenizer_off(file, stated, folder)
    content = serialized(front)
    check_tokenizer(file, stated, core, content)
    check_same_outputs(file, core, content)
    return core


def _compare(file: ModelFile, source: ModelFile, options: VerifyOptions, folder: Path) -> Verification:
    """Compare two files; `folder` is for scratch."""
    _require_same_signature(file, source)
    from onnxtool.checkpoint.pruning import stored_of
    from onnxtool.graph.shapes import find_turns
    from onnxtool.model_file.weights import load_model
    from onnxtool.optimize.stored_vectors import take_off
    from onnxtool.optimize.verification import Original
    from onnxtool.runtime.session import find_provider, prove_elsewhere

    provider, _ = find_provider(file, options.provider)
    if not provider.row.is_reference:  # it may die of a graph: another process runs it there first
        prove_elsewhere(file, provider, is_trial=True)
    graph = load_model(source.path)
    storage = take_off(graph, source)
    with ExitStack() as stack:
        # Vectors that the reference stores as codes, or prunes, are compared before that.
        original_file = source if storage is None else stack.enter_context(scratch_file(graph, folder))
        original = Original(
            source,
            original_file,
            provider,
            source.structure.ops,
            turns=find_turns(graph),
            given=options.given,
        )
        del graph
        return original.run().compare(file, options.tolerance, stored_of(file))


def _compare_with_checkpoint(file: ModelFile, reference: str, options: VerifyOptions) -> Verification:
    from onnxtool.export.options import ExportOptions
    from onnxtool.export.verification import compare_with_checkpoint
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
        **{name: getattr(options, name) for name in _OF_CHECKPOINTS},
        atol=tolerance.atol,
        rtol=tolerance.rtol,
        min_cosine=tolerance.cosine,
        force=True,
    )
    samples = input_cases(file, given=options.given) if options.given.samples else ()
    return compare_with_checkpoint(file, asked, samples)


def _require_same_signature(file: ModelFile, source: ModelFile) -> None:
    """Refuse files that cannot run on the same inputs, or whose outputs cannot be compared."""
    for kind in ("inputs", "outputs"):
        names, wanted = ({info.name for info in getattr(one.structure, kind)} for one in (file, source))
        if names != wanted if kind == "inputs" else not wanted <= names:
            raise InputError(
                f"{file.path} has the {kind} {', '.join(sorted(names))}, and {source.path} has "
                f"{', '.join(sorted(wanted))}",
                "compare files of one model: the names of their inputs and outputs are the same",
            )
