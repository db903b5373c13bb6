"""The options of `onnxtool artifacts`: the model, what is trained, the loss, the optimizer, and the files to write."""

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
    """The losses that need no arguments."""

    MSELoss = 1
    CrossEntropyLoss = 2
    BCEWithLogitsLoss = 3
    L1Loss = 4


class OptimType(Enum):
    """The optimizers with their defaults."""

    AdamW = 1
    SGD = 2


class TrainingTarget(StrEnum):
    """Where artifacts are trained, apart from Python."""

    web = "web"
    node = "node"
    react_native = "react-native"
    android = "android"
    ios = "ios"


NONE = "none"
LOSS_NAMES = (*(kind.name for kind in LossType), NONE)
TARGET_NAMES = tuple(target.value for target in TrainingTarget)
OPTIMIZER_NAMES = (*(kind.name for kind in OptimType), NONE)


class ForwardOptions(Options):
    """The checkpoint to export, with options of `onnxtool export`."""

    model_name: Annotated[
        NameField,
        Option(
            "In place of --model_path: an id on the hub, or a folder, which is exported.",
            metavar="ID_OR_DIR",
            is_checkpoint=True,
        ),
    ]
    task: Task = "auto"
    revision: Revision = None
    trust_remote_code: TrustRemoteCode = False
    allow_missing_weights: AllowMissingWeights = False
    allow_unused_weights: AllowUnusedWeights = False
    allow_pickle: AllowPickle = False


class LoraOptions(Options):
    """Low-rank adapters beside products of a model, which are trained in place of its weights.

    Attributes:
        rank: of each adapter, r.
        targets: which products: patterns of the names of their weights, or ends of the names of their modules.
        alpha: an adapter is scaled by alpha / r.
        seed: of A, which is drawn as in PEFT; B is zero, so that training begins with the model as it is.
    """

    rank: Annotated[
        int,
        Option(
            "Add adapters of this rank (LoRA), and train nothing else but what --train names.",
            name="lora",
            metavar="RANK",
            minimum=1,
        ),
    ]
    targets: Annotated[
        Many[str],
        Option(
            "Products to add them to, by the name or a pattern of the weight, or as in PEFT by the end of the module's "
            "name; may be given several times.",
            name="lora_targets",
            metavar="PATTERN",
        ),
    ] = NOTHING
    alpha: Annotated[
        float, Option("They are scaled by X / RANK.", name="lora_alpha", metavar="X", minimum=0, is_open=True)
    ] = 8.0
    seed: Annotated[int, Option(minimum=0)] = 0


class PreparationOptions(Options):
    """The options of `onnxtool artifacts`.

    Attributes:
        model_path: an ONNX file; this or `forward` is given.
        forward: a checkpoint to export.
        train: names and patterns; empty for all that the loss depends on, and with `lora` for the adapters alone.
        lora: adapters to add.
        loss: one of LOSS_NAMES.
        class_axis: the class axis of a cross entropy; None for 1 with a file, and for the last with a checkpoint.
        ignore_index: of a cross entropy; None for none with a file, and for -100 with a checkpoint.
        shift_labels: None to shift the labels of causal language models.
        optimizer: one of OPTIMIZER_NAMES.
        recompute: compute cheap activations a second time for the gradients, instead of keeping them.
        target: one of TARGET_NAMES.
    """

    model_path: Annotated[OptionalPath, Option("A forward model, an ONNX file.")] = UNSET
    forward: ForwardOptions | None = None
    lora: LoraOptions | None = None
    train: Annotated[
        Many[str],
        Option(
            "Parameters to train, by name or pattern such as *.bias; may be given several times.",
            metavar="PATTERN",
            default="all that the loss depends on, or the adapters of --lora alone",
        ),
    ] = NOTHING
    freeze: Annotated[Many[str], Option("Parameters to freeze; may be given several times.", metavar="PATTERN")] = (
        NOTHING
    )
    loss: Annotated[
        str, Option("What is added to the model; none takes its first output as the loss.", choices=LOSS_NAMES)
    ] = "CrossEntropyLoss"
    loss_inputs: Annotated[
        Many[str],
        Option(
            "The value that the loss is computed from.",
            name="loss_input",
            metavar="NAME",
            default="the logits of a checkpoint, or the only output of a file",
        ),
    ] = NOTHING
    class_axis: Annotated[
        int | None,
        Option(
            "The axis of the classes, 1 or -1.",
            minimum=-1,
            maximum=1,
            default="1 of a file, the last of a checkpoint",
        ),
    ] = None
    ignore_index: Annotated[
        int | None, Option("Labels of this value are ignored.", default="none of a file, -100 of a checkpoint")
    ] = None
    shift_labels: Annotated[
        bool | None,
        Option(
            "Whether the logits at a token are for the label of the next one.",
            default="yes for checkpoints of causal language models, as in transformers",
        ),
    ] = None
    verify: Annotated[bool, Option("Compare loss and gradients of a checkpoint's artifacts with PyTorch.")] = True
    optimizer: Annotated[str, Option("The optimizer to write a model of.", choices=OPTIMIZER_NAMES)] = "AdamW"
    weight_decay: Annotated[float, Option("Of the optimizer.", minimum=0)] = 0.0
    max_grad_norm: Annotated[
        float | None,
        Option("Scale all gradients together down to this norm.", metavar="X", minimum=0, is_open=True),
    ] = None
    additional_outputs: Annotated[
        Many[str],
        Option(
            "A value to output besides the loss; may be given several times.", name="additional_output", metavar="NAME"
        ),
    ] = NOTHING
    output: Annotated[
        OptionalPath,
        Option("The folder.", default="NAME-training beside the file, or models/NAME-training"),
    ] = UNSET
    prefix: Annotated[str, Option("Put before the name of each file.")] = ""
    nominal_checkpoint: Annotated[bool, Option("Write a checkpoint without values as well.")] = False
    ort_format: Annotated[bool, Option("Write .ort files as well.")] = False
    target: Annotated[
        str | None,
        Option(
            "Where it is trained: training.json, and for the first three a JavaScript module; .ort files for phones.",
            choices=TARGET_NAMES,
        ),
    ] = None
    require_all: Annotated[
        bool,
        Option(
            "Fail on a parameter that is neither trained nor named in --freeze, and on scores whose name says "
            "probabilities."
        ),
    ] = False
    recompute: Annotated[bool, Option("Recompute activations for the gradients: less memory, more time.")] = False
    force: Force = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.class_axis == 0:
            raise OptionError("class_axis is 1 or -1; the first axis is that of the samples")
