"""Compare an ONNX file with its source: the verification of every command, as a function."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import fields, replace
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
from onnxtool.verification import LayerReport, Verification

if TYPE_CHECKING:
    from onnxtool.export.options import ExportOptions
    from onnxtool.runtime.comparison import Case
    from onnxtool.runtime.difference import Tolerance

_MOST_LAYER_TEXTS = 32
_MORE, _SURE = 4.0, 1e-5  # times the error of texts padded right, and an error that is no rounding
_CONSUMERS = tuple(name for name, target in TARGETS.items() if not target.takes_any_graph)
_OF_CHECKPOINTS = ("revision", "trust_remote_code", "allow_pickle")
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
        layers: whether `compare_layers` looks for the part that differs; its `texts` are the inputs then.
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

    layers: Annotated[
        bool, Option("Find the first part of MODEL that computes something else than REFERENCE's, on the CPU.")
    ] = False
    texts: Annotated[
        OptionalPath,
        Option(
            "Measure drift on these texts (.txt or .jsonl): how the vectors of MODEL lie to those of REFERENCE, and "
            "whether an index of the latter can be kept. With --layers, its first texts are the inputs.",
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
        if self.layers:
            self._refuse_others("--layers", ("layers", "texts", "sample_inputs", "input_shapes", *_OF_CHECKPOINTS))
        elif self.texts is not None or self.data is not None:
            self._refuse_others("drift (--texts, --data)", ("texts", "data", "fail_if", "provider"))
            if self.texts is not None and self.data is not None:
                raise OptionError("drift is measured on --texts or on --data", "leave one of them out")
        elif self.fail_if:
            raise OptionError("--fail_if is for drift", "pass --texts or --data with it")
        _ = self.given  # refuses invalid shapes immediately
        for name in ("interpreter", "max_error"):
            if self.consumer is None and getattr(self, name) is not None:
                raise OptionError(f"--{name} is for --consumer, which was not passed", "leave it out")

    def _refuse_others(self, purpose: str, used: Collection[str]) -> None:
        """Refuse options that have no effect."""
        names = [option.name for option in fields(self) if option.name not in used]
        if changed := [name for name in names if getattr(self, name) != getattr(type(self), name)]:
            raise OptionError(f"--{changed[0]} has no effect on {purpose}", "leave it out")

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
    if options.layers:
        raise OptionError("`verify` compares outputs (layers)", "call onnxtool.compare_layers")
    with temporary_folder() as folder:
        file = _reading_ids(ModelFile.open(model), folder / "model")
        if not _is_file(reference):
            verification = _compare_with_checkpoint(file.with_sizes(), os.fspath(reference), options)
        else:
            _refuse_loading(reference, options)
            source = _reading_ids(ModelFile.open(reference), folder / "reference")
            verification = _compare(file, source, options, folder)
        if not file.sizes:
            return verification
        from onnxtool.runtime.made_files import with_sizes

        return with_sizes(verification, file, options.provider)


def _is_file(reference: StrPath) -> bool:
    """Whether a reference is an ONNX file: a missing one is a mistake, not a hub id."""
    return Path(reference).is_file() or Path(reference).suffix == ".onnx"


def _refuse_loading(reference: StrPath, options: VerifyOptions) -> None:
    """Refuse options of how a checkpoint is loaded: the reference is a file."""
    for name in _OF_CHECKPOINTS:
        if getattr(options, name) != getattr(_DEFAULTS, name):
            raise OptionError(f"--{name} is for a checkpoint, and {reference} is an ONNX file", "leave it out")


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
    from onnxtool.checkpoint.pruning import Pruning
    from onnxtool.graph.shapes import find_turns
    from onnxtool.model_file.weights import load_model
    from onnxtool.optimize.pruned_output import take_off
    from onnxtool.optimize.verification import Original
    from onnxtool.runtime.session import find_provider, prove_elsewhere

    provider, _ = find_provider(file, options.provider)
    if not provider.row.is_reference:  # it may die of a graph: another process runs it there first
        prove_elsewhere(file, provider, is_trial=True)
    graph = load_model(source.path)
    pruned = take_off(graph, source)
    with ExitStack() as stack:
        # Vectors that the reference stores as codes, or prunes, are compared before that.
        original_file = source if pruned is None else stack.enter_context(scratch_file(graph, folder))
        original = Original(
            source,
            original_file,
            provider,
            source.structure.ops,
            turns=find_turns(graph),
            given=options.given,
        )
        del graph
        return original.run().compare(file, options.tolerance, Pruning.of_model(file))


def _compare_with_checkpoint(file: ModelFile, reference: str, options: VerifyOptions) -> Verification:
    from onnxtool.export.verification import compare_with_checkpoint
    from onnxtool.runtime.input_cases import input_cases

    if options.provider != "cpu" or options.given.shapes:
        option = "--input_shape" if options.given.shapes else f"--provider {options.provider}"
        raise OptionError(
            f"{option} is for two files, and {reference} is a checkpoint, or no file at all",
            "leave it out, or pass an ONNX file to compare with",
        )
    samples = input_cases(file, given=options.given) if options.given.samples else ()
    return compare_with_checkpoint(file, _export_options(reference, options), samples)


def _export_options(reference: str, options: VerifyOptions) -> ExportOptions:
    """Return the options with which a checkpoint is loaded."""
    from onnxtool.export.options import ExportOptions

    tolerance = options.tolerance
    return ExportOptions(
        reference,
        **{name: getattr(options, name) for name in _OF_CHECKPOINTS},
        atol=tolerance.atol,
        rtol=tolerance.rtol,
        min_cosine=tolerance.cosine,
        force=True,
    )


def _require_same_signature(file: ModelFile, source: ModelFile) -> None:
    """Refuse files that cannot run on the same inputs, or whose outputs cannot be compared."""
    for kind in ("inputs", "outputs"):
        names, wanted = ({info.name for info in getattr(model.structure, kind)} for model in (file, source))
        if names != wanted if kind == "inputs" else not wanted <= names:
            raise InputError(
                f"{file.path} has the {kind} {', '.join(sorted(names))}, and {source.path} has "
                f"{', '.join(sorted(wanted))}",
                "compare files of one model: the names of their inputs and outputs are the same",
            )


@checked
def compare_layers(model: StrPath, reference: StrPath, options: VerifyOptions = _DEFAULTS) -> LayerReport:
    """Find the first part of an ONNX file that computes something else than another file, or than a checkpoint.

    Both run on the CPU without onnxruntime's optimizations, on a few of the inputs of `verify`, on samples, or on the
    first of the option `texts`. Values between layers are matched by their numbers, across exporters, fusions and
    precisions, and each part of the file is computed from the reference's own values before it.

    Args:
        model: the ONNX file.
        reference: an ONNX file, or a checkpoint given as a folder or hub id, which runs in PyTorch.
        options: inputs, and how a checkpoint may be loaded.

    Raises:
        ModelFileError: one of the files cannot be read.
        InputError: the models have different inputs or no layers, or the given inputs do not fit.
        SessionError: a file runs on none of the inputs.
        CheckpointError: the checkpoint cannot be found, understood or loaded.
    """
    with temporary_folder() as folder:
        file = _reading_ids(ModelFile.open(model), folder / "model")
        if _is_file(reference):
            _refuse_loading(reference, options)
            source = _reading_ids(ModelFile.open(reference), folder / "reference")
            _require_same_signature(file, source)
        else:
            source = None
        usual, padded_left = _layer_cases(source or file, options)
        report, has_left = _find_layer(file, source, os.fspath(reference), options, (usual, padded_left))
        # With padding on the left, parts that read it, such as the state of the first token, differ by rounding.
        if report.passed and padded_left and not has_left:
            other, _ = _find_layer(file, source, os.fspath(reference), options, (padded_left, []))
            report = other if other.parts[-1].error > _MORE * max(report.parts[-1].error, _SURE) else report
    return replace(report, model=os.fspath(model))


def _layer_cases(source: ModelFile, options: VerifyOptions) -> tuple[list[Case], list[Case]]:
    """Return a few inputs for a comparison of layers; and one that is padded left, if there are others."""
    from onnxtool.optimize.quantization.error import padding_mask
    from onnxtool.optimize.verification import accepted_cases
    from onnxtool.runtime.comparison import Case

    if options.texts is not None:
        from onnxtool.checkpoint.text_files import read_texts
        from onnxtool.optimize.quantization.calibration import text_feeds_of

        texts = [text.contents for text in read_texts(options.texts)[:_MOST_LAYER_TEXTS]]
        feeds = text_feeds_of(source, texts)
        return [Case(f"texts of {options.texts.name}", feed, padding_mask(feed)) for feed in feeds], []
    cases = [case for case in accepted_cases(source, given=options.given) if not case.has_empty_rows]
    if options.given.samples:
        return cases, []
    # By the side on which texts are padded; texts of one length, in large batches first.
    sides: dict[str, list[Case]] = {"right": [], "left": [], "": []}
    for case in sorted(cases, key=lambda case: -len(next(iter(case.feeds.values())))):
        is_full = case.valid is None or case.valid.all()
        side = "" if is_full else "right" if case.valid is not None and case.valid[:, 0].all() else "left"
        sides[side].append(case)
    right = sides["right"][:2]
    return [*right, *sides[""][: 1 if right else 2]], sides["left"][:1]


def _find_layer(
    file: ModelFile,
    source: ModelFile | None,
    reference: str,
    options: VerifyOptions,
    groups: tuple[Sequence[Case], Sequence[Case]],
) -> tuple[LayerReport, bool]:
    """Compare the layers on inputs, and on others if the reference gives a text the same alone as among them.

    Returns:
        The report, and whether the others were used.
    """
    from onnxtool.runtime.layers import Values, measure_layers, output_errors, record, run_outputs

    cases = [*groups[0], *groups[1]]
    outputs, values = run_outputs(file, cases), Values((), (), (), (), (), "")
    if source is None:
        from onnxtool.export.verification import record_modules

        values = record_modules(file, _export_options(reference, options), cases)
    errors = output_errors(outputs, values.outputs if source is None else run_outputs(source, cases), cases)
    if not errors:
        raise InputError(f"{file.path} and {reference} have no outputs of floats in common", "leave --layers out")
    end = max(errors, key=lambda name: errors[name])
    values = record(source, cases, end) if source is not None else values._replace(end=end)
    kept = [number for number, stays in enumerate(values.stays) if stays or number < len(groups[0])]
    cases = [cases[number] for number in kept]
    parts = measure_layers(file, values.only(kept), cases)
    differing = [part for part in parts if part.differs]
    if differing:
        worst = differing[0]
        alone = f"it differs by {worst.own_error:.2g} alone, where {worst.precision} explains {worst.bound:.2g}"
        if worst.own_error <= worst.bound:
            alone = f"a text moves by {worst.batch_error:.2g} with the batch that it is in"
        count = f"{len(differing)} of {len(parts)} parts differ"
        more = count if len(differing) > 1 else f"no other of {len(parts)} parts does"
        reason = f"{alone}; {more}"
    else:
        worst = max(parts, key=lambda part: part.own_error / part.bound)
        reason = (
            f"none of {len(parts)} parts differs by more than its precision explains: at most {worst.own_error:.2g} "
            f"alone ({worst.scope}, where {worst.precision} explains {worst.bound:.2g}), and all together "
            f"{parts[-1].error:.2g}"
        )
    first = differing[0].scope if differing else None
    described = tuple(case.description for case in cases)
    report = LayerReport(str(file.path), reference, described, values.source, end, parts, first, reason)
    return report, len(cases) > len(groups[0])
