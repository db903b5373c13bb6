"""Make of a forward model what on-device training needs: training, eval and optimizer model, and a checkpoint.

Names, arguments and the order of inputs and outputs are those of onnxruntime-training's `artifacts`; where stock
onnxruntime asks for something else, docs/guide/artifacts.md says so.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from onnxtool.errors import ArtifactError
from onnxtool.runtime.timing import Stopwatch
from onnxtool.training import onnxblock
from onnxtool.training.artifacts.files import Artifacts, write_artifacts
from onnxtool.training.artifacts.report import ArtifactFiles, describe
from onnxtool.training.artifacts.report import ArtifactReport as ArtifactReport
from onnxtool.training.onnxblock.checkpoints import checkpoint_of

if TYPE_CHECKING:
    import onnx

    from onnxtool.training.artifacts.verification import Proof


MAX_MODEL_BYTES = 2**31 - 2**20


class LossType(Enum):
    """The losses that need no arguments."""

    MSELoss = 1
    CrossEntropyLoss = 2
    BCEWithLogitsLoss = 3
    L1Loss = 4


class OptimType(Enum):
    """The optimizers with their defaults."""

    AdamW = 1
    SGD = 2


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


@dataclass(frozen=True)
class ArtifactOptions:
    """What to make artifacts of, and how.

    Attributes:
        model: the forward model, or the path of its file.
        requires_grad: names of parameters to train, or patterns such as `*.bias`.
        frozen_params: names or patterns of parameters that are inputs without a gradient; others stay constants.
        loss: None takes the first output of the model as the loss.
        optimizer: None makes no optimizer model.
        artifact_directory: where the files go.
        prefix: before each file name.
        ort_format: write `.ort` files beside the `.onnx` ones.
        additional_output_names: values that training and eval model give besides the loss.
        nominal_checkpoint: write a checkpoint without values as well.
        loss_input_names: values that the loss is built on; else all outputs of the model.
        aliases: further names of tied parameters, by which they may be chosen as well; the checkpoint has them.
        parameters: what patterns may mean; None for all float initializers of more than one element.
        recompute: compute cheap activations a second time for the gradients, instead of keeping them: less memory.
        force: replace files that are there.
        prove: compares the files in a folder with PyTorch before they are moved to their place.
    """

    model: onnx.ModelProto | Path
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
    recompute: bool = False
    force: bool = False
    prove: Callable[[Path], Proof | None] | None = None


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
    recompute: bool = False,
) -> ArtifactReport:
    """Write the artifacts of `model` to `artifact_directory`, replacing those that are there.

    The arguments but the last are those of onnxruntime-training; `ArtifactOptions` says what they mean.

    Raises:
        ArtifactError: names that are not in the model, a loss that is none, …
        GradientError: operators between the parameters and the loss have no gradient.
        OutputWriteError: the files cannot be written.
        TypeError: an argument is of a wrong type.
    """
    import onnx

    if custom_op_library is not None:
        _refuse_library(custom_op_library)
    return make_artifacts(
        ArtifactOptions(
            model if isinstance(model, onnx.ModelProto) else Path(model),
            requires_grad,
            frozen_params,
            loss,
            optimizer,
            Path.cwd() if artifact_directory is None else Path(artifact_directory),
            prefix,
            ort_format,
            additional_output_names,
            nominal_checkpoint,
            loss_input_names,
            recompute=recompute,
            force=True,
        )
    )


def make_artifacts(
    options: ArtifactOptions, on_progress: Callable[[str], None] = lambda _stage: None
) -> ArtifactReport:
    """Write the artifacts as `options` say; the folder holds the old files or the new ones, never some of both.

    Raises:
        OutputExistsError: the training model is there and `force` is not set.
        OnnxtoolError: as `generate_artifacts`.
    """
    from onnxtool.training.artifacts.validation import check_sound
    from onnxtool.training.graphs.parameters import choose

    stopwatch = Stopwatch()
    on_progress("reading the model")
    model, path = _load(options.model)
    check_sound(model)
    loss, optimizer = _loss_block(options, model), _optimizer_block(options)
    choice = choose(model, options.requires_grad, options.frozen_params, options.parameters, options.aliases)
    stopwatch.lap("read")
    on_progress("differentiating")
    block = _Training(loss, options)
    with onnxblock.base(model, path):
        block.choose(choice)
        block(*(options.loss_input_names or [output.name for output in model.graph.output]))
    training, evaluation = block.to_model_proto()
    trained, frozen = block.parameters()
    models = {"training_model": training, "eval_model": evaluation}
    stopwatch.lap("differentiate")
    if optimizer is not None:
        with onnxblock.empty_base():
            optimizer((trained, frozen))
        models["optimizer_model"] = optimizer.to_model_proto()
    on_progress("writing")
    checkpoint = checkpoint_of(trained, frozen, folder=None if path is None else path.parent)
    checkpoint.aliases = dict(options.aliases)
    proofs: list[Proof | None] = []

    def prove(folder: Path) -> None:
        if options.prove is not None:
            stopwatch.lap("write")
            on_progress("verifying")
            proofs.append(options.prove(folder))
            stopwatch.lap("verify")

    files = write_artifacts(
        Artifacts(models, checkpoint, None if path is None else path.parent, prove),
        options.artifact_directory,
        prefix=options.prefix,
        ort_format=options.ort_format,
        nominal=options.nominal_checkpoint,
        force=options.force,
    )
    stopwatch.lap("write")
    return describe(
        block,
        ArtifactFiles(str(options.artifact_directory), files),
        loss=_name_of(options.loss) or "the first output",
        optimizer=_name_of(options.optimizer),
        duration_ms=stopwatch.laps_ms,
        proof=proofs[0] if proofs else None,
    )


class _Training(onnxblock.TrainingBlock):
    """The loss of the options, and the outputs that are wanted besides."""

    def __init__(self, loss: onnxblock.Block, options: ArtifactOptions) -> None:
        self._loss = loss
        self._more = options.additional_output_names or ()
        self.recompute = options.recompute

    def build(self, *names: str) -> tuple[str, ...]:
        """Add the loss on top of these values."""
        from onnxtool.training.onnxblock.forward import output_names

        return (*output_names(self._loss(*names)), *self._more)


def _load(model: onnx.ModelProto | Path) -> tuple[onnx.ModelProto, Path | None]:
    """Return the model without its external data, and where that lies."""
    import onnx

    from onnxtool.model_file import ModelFile

    if isinstance(model, onnx.ModelProto):
        # ByteSize fails on just those.
        if sum(len(tensor.raw_data) for tensor in model.graph.initializer) > MAX_MODEL_BYTES:
            raise ArtifactError("the model has more than 2 GB", "save it and pass the path of its file")
        return model, None
    file = ModelFile.open(model)
    return onnx.load(file.path, load_external_data=False), file.path


def _loss_block(options: ArtifactOptions, model: onnx.ModelProto) -> onnxblock.Block:
    loss = options.loss
    for names in (options.additional_output_names, options.loss_input_names):
        if isinstance(names, str):
            raise ArtifactError(f"a list of names is expected, not the string {names!r}", "pass a list")
    if loss is None:
        return onnxblock.blocks.PassThrough()
    if isinstance(loss, onnxblock.Block):
        return loss
    if not isinstance(loss, LossType):
        raise ArtifactError(f"{loss!r} is no loss", "take a LossType, or an instance of a class derived from Block")
    names = options.loss_input_names or [output.name for output in model.graph.output]
    if len(names) != 1:
        raise ArtifactError(
            f"{loss.name} takes one value, and there are {', '.join(names)}",
            "name one with loss_input_names, or write a loss of your own for all",
        )
    return LOSSES[loss]()


def _optimizer_block(options: ArtifactOptions) -> onnxblock.ForwardBlock | None:
    optimizer = options.optimizer
    if optimizer is None or isinstance(optimizer, onnxblock.ForwardBlock):
        return optimizer
    if not isinstance(optimizer, OptimType):
        raise TypeError(f"{optimizer!r} is no optimizer: take an OptimType, or a block of onnxblock.optim")
    return OPTIMIZERS[optimizer]()


def _refuse_library(path: str | os.PathLike[str]) -> NoReturn:
    onnxblock.custom_op_library(os.fspath(path))


def _name_of(thing: Enum | onnxblock.Block | None) -> str:
    if thing is None:
        return ""
    return thing.name if isinstance(thing, Enum) else type(thing).__name__
