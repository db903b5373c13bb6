"""Make on-device training artifacts from a forward model: training, eval and optimizer model, and checkpoint.

All files are written to one folder, or none.

Names, arguments and the order of inputs and outputs follow onnxruntime-training's `artifacts`;
docs/guide/artifacts.md lists where stock onnxruntime needs something else.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from math import prod
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from onnx import defs, numpy_helper

from onnxtool.errors import ArtifactError, OutputExistsError, some
from onnxtool.model_file import ModelFile, ModelPath, Staging, check_not_input, check_writable, save_beside, staged
from onnxtool.model_file.domains import default_opset, settle_domains
from onnxtool.model_file.weights import relocate, sort_nodes
from onnxtool.progress import tell
from onnxtool.reports import WritePlan, planned_files
from onnxtool.runtime.probation import check_harmless
from onnxtool.runtime.quiet import quiet, quiet_stdout_descriptor
from onnxtool.runtime.session import require_loadable
from onnxtool.runtime.timing import Stopwatch
from onnxtool.training import onnxblock
from onnxtool.training.artifacts.report import (
    DESCRIPTION,
    ArtifactFile,
    describe,
    doubtful,
    write_description,
)
from onnxtool.training.artifacts.report import ArtifactReport as ArtifactReport
from onnxtool.training.artifacts.verification import ArtifactVerification
from onnxtool.training.checkpoints import Checkpoint
from onnxtool.training.checkpoints.checkpoint import write_checkpoint
from onnxtool.training.graphs.merged import FileParameters
from onnxtool.training.graphs.parameters import (
    FLOATS,
    join_tied,
    matchable_parameters,
    select_parameters,
    single_numbers,
)
from onnxtool.training.onnxblock.block import checkpoint_of, output_names
from onnxtool.training.options import LossType, OptimType, TrainingTarget

MAX_MODEL_BYTES = 2**31 - 2**20
"""Protocol buffers are limited to 2 GB."""
_REQUIRE_ALL = "name it with --train or --freeze, pass the logits with --loss_input, or leave --require_all out"
_DAMAGED = "it is damaged, or was changed by hand; export it again"


LOSSES: Mapping[LossType, type[onnxblock.Block]] = {
    LossType.MSELoss: onnxblock.loss.MSELoss,
    LossType.CrossEntropyLoss: onnxblock.loss.CrossEntropyLoss,
    LossType.BCEWithLogitsLoss: onnxblock.loss.BCEWithLogitsLoss,
    LossType.L1Loss: onnxblock.loss.L1Loss,
}
OPTIMIZERS: Mapping[OptimType, type[onnxblock.optim.Optimizer]] = {
    OptimType.AdamW: onnxblock.optim.AdamW,
    OptimType.SGD: onnxblock.optim.SGD,
}


_MODELS = ("training_model", "eval_model", "optimizer_model")
# Files of an older set that the new one lacks must not stay next to it.
_NAMES = (
    *(f"{model}{suffix}" for model in _MODELS for suffix in (".onnx", ".ort", ".required_operators.config")),
    "checkpoint",
    "nominal_checkpoint",
    DESCRIPTION,
)


@dataclass(frozen=True)
class ArtifactOptions:
    """The forward model, and the options for making its artifacts.

    Attributes:
        model: the forward model, or its file.
        requires_grad: parameters to train, by name or by pattern such as `*.bias`.
        frozen_params: names or patterns of parameters that become inputs without a gradient; others stay constants.
        loss: the loss to add to the model; None if the model's first output is the loss.
        optimizer: the optimizer model to make, if any.
        artifact_directory: the output folder.
        prefix: prepended to each file name.
        ort_format: write `.ort` files in addition to the `.onnx` files.
        additional_output_names: further outputs of the training and eval models.
        nominal_checkpoint: also write a checkpoint without values.
        loss_input_names: the inputs of the loss; None for all outputs of the model.
        aliases: other names of tied parameters, which can also select them; stored in the checkpoint.
        parameters: the names that patterns match; None for all float initializers of more than one element.
        target: the platform to train on, if not Python; the description that a program there reads is also written.
        force: replace existing files.
        require_all: refuse parameters neither trained nor explicitly frozen, and loss inputs named as probabilities.
        verify: compares the files in a folder with PyTorch before they are moved into place.
    """

    model: onnx.ModelProto | ModelPath
    requires_grad: Sequence[str] | None = None
    frozen_params: Sequence[str] | None = None
    loss: LossType | onnxblock.Block | None = None
    optimizer: OptimType | onnxblock.ForwardBlock | None = None
    artifact_directory: Path = Path()
    prefix: str = ""
    ort_format: bool = False
    additional_output_names: Sequence[str] | None = None
    nominal_checkpoint: bool = False
    loss_input_names: Sequence[str] | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    parameters: Sequence[str] | None = None
    target: TrainingTarget | None = None
    force: bool = False
    require_all: bool = False
    verify: Callable[[Path], ArtifactVerification | None] | None = None


def generate_artifacts(
    model: onnx.ModelProto | str | os.PathLike[str],
    requires_grad: Sequence[str] | None = None,
    frozen_params: Sequence[str] | None = None,
    loss: LossType | onnxblock.Block | None = None,
    optimizer: OptimType | onnxblock.ForwardBlock | None = None,
    artifact_directory: str | os.PathLike[str] | None = None,
    prefix: str = "",
    ort_format: bool = False,
    custom_op_library: str | os.PathLike[str] | None = None,
    additional_output_names: Sequence[str] | None = None,
    nominal_checkpoint: bool = False,
    loss_input_names: Sequence[str] | None = None,
    require_all: bool = False,
) -> ArtifactReport:
    """Write the artifacts of `model` to `artifact_directory`, replacing existing ones.

    All arguments except the last one are the same as in onnxruntime-training; see `ArtifactOptions`.

    Raises:
        ArtifactError: a name is not in the model, or the loss is no scalar of it.
        GradientError: operators between the parameters and the loss have no gradient.
        OutputWriteError: the files cannot be written.
        TypeError: an argument is of a wrong type.
    """
    if custom_op_library is not None:
        onnxblock.custom_op_library(os.fspath(custom_op_library))
    return make_artifacts(
        ArtifactOptions(
            model=model if isinstance(model, onnx.ModelProto) else Path(model),
            requires_grad=requires_grad,
            frozen_params=frozen_params,
            loss=loss,
            optimizer=optimizer,
            artifact_directory=Path.cwd() if artifact_directory is None else Path(artifact_directory),
            prefix=prefix,
            ort_format=ort_format,
            additional_output_names=additional_output_names,
            nominal_checkpoint=nominal_checkpoint,
            loss_input_names=loss_input_names,
            require_all=require_all,
            force=True,
        )
    )


def make_artifacts(options: ArtifactOptions) -> ArtifactReport:
    """Write the artifacts for `options`; the folder holds either the old files or the new ones, never a mixture.

    Raises:
        OutputExistsError: a file exists and `force` is not set.
        OnnxtoolError: as `generate_artifacts`.
    """
    stopwatch = Stopwatch()
    _check_output(options)
    tell("reading the model")
    model, path = _load(options.model)
    _check_model(model)
    data = "" if path is None else str(path.parent)
    parameters = FileParameters.of(model, data) if options.parameters is None else None
    tied = join_tied(model, data, options.parameters)
    options = replace(options, aliases={**options.aliases, **tied})
    if parameters is not None:
        options = replace(options, parameters=parameters.matched())
    loss, optimizer = _loss_block(options, model), _optimizer_block(options)
    selection = select_parameters(
        model, options.requires_grad, options.frozen_params, options.parameters, options.aliases
    )
    numbers = [] if parameters is None else single_numbers(model, selection, parameters.others)
    stopwatch.lap("read")
    tell("differentiating")
    block = _Training(loss, options)
    with onnxblock.base(model, path):
        block.select(selection)
        block(*_loss_inputs(options, model))
    doubts = _doubts(block, model, options, numbers, parameters)
    notes = [f"{head} and {table} are equal, and trained as one tensor" for head, table in tied.items()]
    notes += [*([] if parameters is None else parameters.notes_on(selection)), *doubts]
    models = dict(zip(_MODELS, block.to_model_proto(), strict=False))
    stopwatch.lap("differentiate")
    if optimizer is not None:
        with onnxblock.empty_base():
            optimizer(block.parameters())
        models[_MODELS[2]] = optimizer.to_model_proto()
    tell("writing")
    checkpoint = checkpoint_of(*block.parameters(), folder=path and path.parent)
    checkpoint.aliases = dict(options.aliases)
    directory, verification = options.artifact_directory, None
    with staged(_outputs(options)[0], force=options.force, root=directory) as staging:
        written = _write(models, checkpoint, options, staging, path and path.parent)
        if options.verify is not None:
            stopwatch.lap("write")
            tell("verifying")
            verification = options.verify(staging.folder)
            stopwatch.lap("verify")
        used = _name_of(options.loss) or "the first output", _name_of(options.optimizer)
        report = describe(block, str(directory), used, verification, notes)
        if options.target is not None:
            _check_target(options.target, block.inputs_with_gradient)
            written.append(write_description(options.target, report, checkpoint, staging.folder))
        staging.obsolete.extend(
            directory / f"{options.prefix}{name}" for name in _NAMES
        )  # removes only files not written now
        files = tuple(ArtifactFile(str(directory / file.name), _size_of(file)) for file in written)
    stopwatch.lap("write")
    return replace(report, files=files, duration_ms=stopwatch.laps_ms)


def _doubts(
    block: _Training,
    model: onnx.ModelProto,
    options: ArtifactOptions,
    numbers: Sequence[str],
    parameters: FileParameters | None,
) -> list[str]:
    """List possible mistakes, such as single `numbers` that are not trained.

    Raises:
        ArtifactError: there is one, or a parameter stays constant, and `require_all` is set.
    """
    takes_logits = isinstance(block.loss, onnxblock.loss.CrossEntropyLoss | onnxblock.loss.BCEWithLogitsLoss)
    doubts = list(doubtful(block, numbers, _loss_inputs(options, model) if takes_logits else ()))
    if parameters is not None:
        doubts += parameters.doubts_on(block.selection)
    if options.require_all:
        known = {*block.selection.trained, *block.selection.frozen}
        unnamed = [name for name in matchable_parameters(model, options.parameters) if name not in known]
        doubts += [f"{some(unnamed)} neither trained nor frozen"] if unnamed else []
        if doubts:
            raise ArtifactError(f"not everything is trained as require_all asks: {doubts[0]}", _REQUIRE_ALL)
    return doubts


def _write(
    models: Mapping[str, onnx.ModelProto],
    checkpoint: Checkpoint,
    options: ArtifactOptions,
    staging: Staging,
    folder: Path | None,
) -> list[Path]:
    """Write the models, whose constants are relative to `folder`, then the checkpoint; return the files in order."""
    prefix = options.prefix
    written = [_write_model(proto, staging, f"{prefix}{name}", folder) for name, proto in models.items()]
    written.append(staging.folder / f"{prefix}checkpoint")
    write_checkpoint(checkpoint, written[-1])
    if options.nominal_checkpoint:
        written.append(staging.folder / f"{prefix}nominal_checkpoint")
        nominal = Checkpoint(checkpoint.trainable, checkpoint.frozen, properties=checkpoint.properties, is_nominal=True)
        write_checkpoint(nominal, written[-1])
    if options.ort_format:
        written += [file for path in written[: len(models)] for file in _to_ort_format(path)]
    return written


def _check_target(target: TrainingTarget, inputs: Sequence[str]) -> None:
    """Refuse gradients of `inputs`, which the program of a target does not have."""
    if inputs:
        raise ArtifactError(
            f"the program for {target} has no gradients of inputs, and {', '.join(inputs)} is to have one",
            "train parameters only, or leave the target out",
        )


class _Training(onnxblock.TrainingBlock):
    """The loss and additional outputs from the options."""

    def __init__(self, loss: onnxblock.Block, options: ArtifactOptions) -> None:
        self.loss = loss
        self._additional = options.additional_output_names or ()

    def build(self, *names: str) -> tuple[str, ...]:
        """Add the loss on top of these values and name it `loss`, so that programs can find it."""
        loss, *outputs = output_names(self.loss(*names))
        return (self.accessor.rename(loss, "loss"), *outputs, *self._additional)


def _load(model: onnx.ModelProto | ModelPath) -> tuple[onnx.ModelProto, Path | None]:
    """Return the model without external data, and a path in the folder that its external data is relative to."""
    if isinstance(model, onnx.ModelProto):
        # ByteSize fails on models larger than 2 GB.
        if sum(len(tensor.raw_data) for tensor in model.graph.initializer) > MAX_MODEL_BYTES:
            raise ArtifactError("the model has more than 2 GB", "save it and pass the path of its file")
        copy = onnx.ModelProto()
        copy.CopyFrom(model)
        return _with_weights(settle_domains(copy)), None
    file = ModelFile.open(model)
    check_harmless(file)
    require_loadable(file)
    loaded = settle_domains(onnx.load(file.path, load_external_data=False))
    sort_nodes(loaded)
    path = relocate(loaded, file.path) / file.path.name
    return _with_weights(loaded), path


def _check_model(model: onnx.ModelProto) -> None:
    """Check the opset, tensors and node order; onnx.checker does not know onnxruntime's operators.

    Raises:
        ArtifactError: the model has a problem; the first one is reported.
    """
    opset = default_opset({entry.domain: entry.version for entry in model.opset_import})
    if not opset:
        raise ArtifactError("the model does not say which opset its operators belong to", _DAMAGED)
    if opset > defs.onnx_opset_version():
        raise ArtifactError(
            f"the model is of opset {opset}, and the installed onnx knows {defs.onnx_opset_version()} at most",
            "upgrade onnx, or export with an older opset",
        )
    if not model.graph.output:
        raise ArtifactError("the model has no outputs", _DAMAGED)
    for tensor in model.graph.initializer:
        _check_tensor(tensor)
    known = {value.name for value in (*model.graph.input, *model.graph.initializer)}
    known |= {tensor.values.name for tensor in model.graph.sparse_initializer}
    for node in model.graph.node:
        missing = next((name for name in node.input if name and name not in known), None)
        if missing is not None:
            late = any(missing in other.output for other in model.graph.node)
            raise ArtifactError(
                f"the node {node.name or node.output[0]} reads {missing!r}, which "
                f"{'is computed after it' if late else 'no node computes'}",
                _DAMAGED,
            )
        known.update(node.output)
    unknown = next((value.name for value in model.graph.output if value.name not in known), None)
    if unknown is not None:
        raise ArtifactError(f"no node computes the output {unknown!r} of the model", _DAMAGED)


def _check_tensor(tensor: onnx.TensorProto) -> None:
    if any(size < 0 for size in tensor.dims):
        raise ArtifactError(f"the initializer {tensor.name} has the shape {list(tensor.dims)}", _DAMAGED)
    if not tensor.HasField("raw_data"):
        return
    expected = (prod(tensor.dims) * ir.DataType(tensor.data_type).bitwidth + 7) // 8
    if len(tensor.raw_data) != expected:
        raise ArtifactError(
            f"the initializer {tensor.name} has {len(tensor.raw_data)} bytes, and {expected} are its shape "
            f"{list(tensor.dims)}",
            _DAMAGED,
        )


def _with_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """Replace Constant nodes, where some exporters keep weights, with initializers that can be trained.

    PyTorch's exporters keep weights in initializers, and other constants in Constant nodes.
    """
    nodes, weights = model.graph.node, list[onnx.TensorProto]()
    if model.producer_name == "pytorch" and any(tensor.data_type in FLOATS for tensor in model.graph.initializer):
        return model
    for place, node in reversed(list(enumerate(nodes))):
        held = {attribute.name: attribute for attribute in node.attribute} if node.op_type == "Constant" else {}
        weight = onnx.TensorProto()
        if "value" in held:
            weight.CopyFrom(held["value"].t)
        elif "value_floats" in held:
            weight = numpy_helper.from_array(np.array(held["value_floats"].floats, np.float32))
        if weight.data_type in FLOATS:
            weight.name = node.output[0]
            weights.append(weight)
            del nodes[place]
    model.graph.initializer.extend(reversed(weights))
    return model


def _loss_block(options: ArtifactOptions, model: onnx.ModelProto) -> onnxblock.Block:
    loss = options.loss
    for names in (options.additional_output_names, options.loss_input_names):
        if isinstance(names, str):
            raise ArtifactError(f"a list of names is expected, not the string {names!r}", "pass a list")
    if loss is None:
        return onnxblock.blocks.PassThrough()
    if isinstance(loss, LossType):
        loss = LOSSES[loss]()
    elif not isinstance(loss, onnxblock.Block):
        raise ArtifactError(f"{loss!r} is not a loss", "pass a LossType, or an instance of a class derived from Block")
    names = _loss_inputs(options, model)
    if isinstance(loss, tuple(LOSSES.values())) and len(names) != 1:
        raise ArtifactError(
            f"{type(loss).__name__} takes one value, and there are {', '.join(names) or 'none'}",
            "select one with loss_input_names (--loss_input), or write your own loss for all",
        )
    return loss


def _name_of(thing: Enum | onnxblock.Block | None) -> str:
    if thing is None:
        return ""
    return thing.name if isinstance(thing, Enum) else type(thing).__name__


def _loss_inputs(options: ArtifactOptions, model: onnx.ModelProto) -> Sequence[str]:
    return options.loss_input_names or [output.name for output in model.graph.output]


def _optimizer_block(options: ArtifactOptions) -> onnxblock.ForwardBlock | None:
    optimizer = options.optimizer
    if optimizer is None or isinstance(optimizer, onnxblock.ForwardBlock):
        return optimizer
    if not isinstance(optimizer, OptimType):
        raise TypeError(f"{optimizer!r} is not an optimizer: pass an OptimType, or a block of onnxblock.optim")
    return OPTIMIZERS[optimizer]()


def plan_artifacts(options: ArtifactOptions) -> WritePlan:
    """Describe what `make_artifacts` would write; for a model file, parameter names and the loss are checked.

    Raises:
        OnnxtoolError: as `make_artifacts`, before it differentiates.
    """
    _check_output(options)
    return WritePlan("artifacts", planned_files(_outputs(options)))


def _outputs(options: ArtifactOptions) -> list[Path]:
    """Return the paths of the files to write."""
    models = _MODELS[: 2 if options.optimizer is None else None]
    names = [*(f"{name}.onnx" for name in models), "checkpoint"]
    names += ["nominal_checkpoint"] if options.nominal_checkpoint else []
    names += [f"{name}.ort" for name in models] if options.ort_format else []
    names = [f"{options.prefix}{name}" for name in names]
    names += [DESCRIPTION] if options.target is not None else []
    return [options.artifact_directory / name for name in names]


def check_prefix(prefix: str) -> None:
    """Refuse a prefix that cannot start a file name.

    Raises:
        ArtifactError: the prefix is invalid.
    """
    if not prefix.isprintable():
        raise ArtifactError(f"the prefix {prefix!r} cannot begin the name of a file", "pass letters and digits")
    if Path(prefix).name != prefix and prefix:
        raise ArtifactError(f"the prefix {prefix!r} is a path", "pass the folder as artifact_directory")


def _check_output(options: ArtifactOptions) -> None:
    """Refuse an invalid prefix, and existing files without `force`."""
    prefix = options.prefix
    check_prefix(prefix)
    if prefix and options.target is not None:
        raise ArtifactError(
            f"{options.target} finds the files by their names, and the prefix is {prefix!r}",
            "leave --prefix out, and give each model its own --output",
        )
    check_writable(options.artifact_directory / f"{prefix}{_MODELS[0]}.onnx", force=True)
    outputs = _outputs(options)
    for output in outputs:
        check_not_input(output)
    existing = [output for output in outputs if output.exists()]
    if existing and not options.force:
        raise OutputExistsError(f"{existing[0]} already exists", "pass --force to replace it, or another --output")


def _write_model(proto: onnx.ModelProto, staging: Staging, name: str, folder: Path | None) -> Path:
    """Write a model to the staging folder; large constants go to its own external data."""
    model = ir.from_proto(proto)
    if folder is not None:
        ir.external_data.set_base_dir(model.graph, folder)
    return save_beside(model, staging, f"{name}.onnx")


def _to_ort_format(path: Path) -> tuple[Path, Path]:
    """Convert a model to the format for minimal onnxruntime builds, with onnxruntime's own converter.

    Returns:
        The model, and the operator list used to make such a build.

    Raises:
        ArtifactError: the conversion fails, or the installed wheel has no converter.
    """
    try:
        with quiet(), quiet_stdout_descriptor():
            from onnxruntime.tools.convert_onnx_models_to_ort import OptimizationStyle, convert_onnx_models_to_ort

            convert_onnx_models_to_ort(path, path.parent, [OptimizationStyle.Fixed])
    except ImportError as error:
        raise ArtifactError(
            f"this onnxruntime cannot write .ort files: {error}", "leave ort_format out, or install a wheel that can"
        ) from error
    except Exception as error:  # onnxruntime has no exception class for this
        raise ArtifactError(
            f"onnxruntime cannot convert {path.name}: {str(error)[:300]}", "leave ort_format out"
        ) from error
    operators = path.with_suffix(".required_operators.config")
    # The file mentions the temporary folder.
    operators.write_text(operators.read_text(encoding="utf-8").replace(f"{path.parent}{os.sep}", ""), encoding="utf-8")
    return path.with_suffix(".ort"), operators


def _size_of(path: Path) -> int:
    """Return the size of a file plus its external data in bytes."""
    files = (path, path.with_name(f"{path.name}.data"))
    return sum(file.stat().st_size for file in files if file.exists())
