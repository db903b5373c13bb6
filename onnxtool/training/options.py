"""The options of `onnxtool artifacts`: the model, what to train, the loss, the optimizer, and the files to write."""

from __future__ import annotations

from enum import Enum, StrEnum
from typing import Annotated

from onnxtool.errors import OptionError
from onnxtool.export.options import (
    AllowMissingWeights,
    AllowPickle,
    AllowUnusedWeights,
    Revision,
    Task,
    TrustRemoteCode,
)
from onnxtool.options import NOTHING, UNSET, Force, Many, NameField, Option, OptionalPath, Options


class LossType(Enum):
    """Losses that need no arguments."""

    MSELoss = 1
    CrossEntropyLoss = 2
    BCEWithLogitsLoss = 3
    L1Loss = 4


class OptimType(Enum):
    """Optimizers with default settings."""

    AdamW = 1
    SGD = 2


class TrainingTarget(StrEnum):
    """Platforms to train on, other than Python."""

    web = "web"


NONE = "none"
LOSS_NAMES = (*(kind.name for kind in LossType), NONE)
TARGET_NAMES = tuple(target.value for target in TrainingTarget)
OPTIMIZER_NAMES = (*(kind.name for kind in OptimType), NONE)


class ForwardOptions(Options):
    """The checkpoint to export, with `onnxtool export` options."""

    model_name: Annotated[
        NameField,
        Option(
            "Instead of --model_path: a hub id or a folder, which is exported.",
            metavar="ID_OR_DIR",
            is_checkpoint=True,
            effect="source",
        ),
    ]
    task: Task = "auto"
    revision: Revision = None
    trust_remote_code: TrustRemoteCode = False
    allow_missing_weights: AllowMissingWeights = False
    allow_unused_weights: AllowUnusedWeights = False
    allow_pickle: AllowPickle = False


class PreparationOptions(Options):
    """The options of `onnxtool artifacts`.

    Attributes:
        model_path: an ONNX file; give this or `forward`.
        forward: a checkpoint to export.
        train: names and patterns; empty for everything the loss depends on.
        loss: one of LOSS_NAMES.
        class_axis: the class axis of a cross entropy; None for 1 with a file, and for the last with a checkpoint.
        ignore_index: for a cross entropy; None for none with a file, and for -100 with a checkpoint.
        shift_labels: None to shift labels for causal language models.
        optimizer: one of OPTIMIZER_NAMES.
        target: one of TARGET_NAMES.
    """

    model_path: Annotated[OptionalPath, Option("The forward model, an ONNX file.")] = UNSET
    forward: ForwardOptions | None = None
    train: Annotated[
        Many[str],
        Option(
            "Parameters to train, by name or pattern such as *.bias; may be given several times.",
            metavar="PATTERN",
            default="all that the loss depends on",
        ),
    ] = NOTHING
    freeze: Annotated[Many[str], Option("Parameters to freeze; may be given several times.", metavar="PATTERN")] = (
        NOTHING
    )
    loss: Annotated[
        str, Option("The loss to add to the model; none uses its first output as the loss.", choices=LOSS_NAMES)
    ] = "CrossEntropyLoss"
    loss_inputs: Annotated[
        Many[str],
        Option(
            "The value to compute the loss from.",
            name="loss_input",
            metavar="NAME",
            default="the logits of a checkpoint, or the only output of a file",
        ),
    ] = NOTHING
    class_axis: Annotated[
        int | None,
        Option(
            "The class axis, 1 or -1.",
            minimum=-1,
            maximum=1,
            default="1 for a file, the last for a checkpoint",
        ),
    ] = None
    ignore_index: Annotated[
        int | None, Option("Ignore labels with this value.", default="none for a file, -100 for a checkpoint")
    ] = None
    shift_labels: Annotated[
        bool | None,
        Option(
            "Treat the logits at a token as the prediction of the next token's label.",
            default="yes for checkpoints of causal language models, as in transformers",
        ),
    ] = None
    verify: Annotated[
        bool, Option("Compare loss and gradients of a checkpoint's artifacts with PyTorch.", effect="check")
    ] = True
    optimizer: Annotated[str, Option("The optimizer model to write.", choices=OPTIMIZER_NAMES)] = "AdamW"
    weight_decay: Annotated[float, Option("Weight decay of the optimizer.", minimum=0)] = 0.0
    max_grad_norm: Annotated[
        float | None,
        Option("Clip the joint norm of all gradients to this value.", metavar="X", minimum=0, is_open=True),
    ] = None
    output: Annotated[
        OptionalPath,
        Option(
            "The output folder.", default="NAME-training next to the file, or models/NAME-training", writes="folder"
        ),
    ] = UNSET
    prefix: Annotated[str, Option("Prepended to each file name.", effect="write")] = ""
    ort_format: Annotated[bool, Option("Also write .ort files.")] = False
    target: Annotated[
        str | None,
        Option(
            "The target platform: writes training.json for a program there.",
            choices=TARGET_NAMES,
        ),
    ] = None
    require_all: Annotated[
        bool,
        Option("Fail on parameters neither trained nor in --freeze, and on scores whose name suggests probabilities."),
    ] = False
    force: Force = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.class_axis == 0:
            raise OptionError("class_axis is 1 or -1; the first axis is the sample axis")
