"""What a user may ask of an export."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Annotated

from onnxtool.checkpoint.tasks import TASK_NAMES
from onnxtool.checkpoint.vector_types import Calibrated, Dimensions, RangesFile, VectorsAs, check_ranges_options
from onnxtool.errors import ExportError, OptionError
from onnxtool.export.targets import TARGET_NAMES
from onnxtool.options import UNSET, Force, NameField, Option, OptionalPath, Options
from onnxtool.reports import Json

if TYPE_CHECKING:
    from onnxtool.runtime.comparison import Tolerance

LOWEST_OPSET = 13  # what heads are written in

DEVICES = ("cpu", "cuda", "mps", "xpu")
DTYPES = {"float32": "fp32", "float16": "fp16"}

# Those of the tables in `heads/choice.py` and `tracing.py`: the help of the command lists them without loading these.
# `logits` and `none` put nothing on the model; the first insists on logits.
HEAD_NAMES = ("auto", "logits", "splade", "embedding", "late-interaction", "m3", "reranker", "none")
EXPORTER_NAMES = ("auto", "dynamo", "torchscript")

# Options that no other entry of the metadata tells.
_STAMPED = (
    "max_length",
    *("target", "dimensions", "route", "keep_raw", "opset", "text", "allow_missing_weights", "allow_pickle", "device"),
    "allow_unused_weights",
    *("atol", "rtol", "min_cosine"),
)


# What training artifacts are made of is a checkpoint as well.
Task = Annotated[
    str,
    Option(
        f"What the model is for: {', '.join(TASK_NAMES)}. auto reads config.json, modules.json and the model card.",
        choices=("auto", *TASK_NAMES),
        metavar="TASK",
    ),
]
Revision = Annotated[str | None, Option("Branch, tag or commit on the hub.")]
TrustRemoteCode = Annotated[bool, Option("Let code in the checkpoint run.")]
AllowMissingWeights = Annotated[bool, Option("Initialize weights that the checkpoint does not have.")]
AllowUnusedWeights = Annotated[bool, Option("Leave out weights that fit nowhere in the model.")]
AllowPickle = Annotated[bool, Option("Load weights from a pickle where there are no safetensors.")]


class ExportOptions(Options):
    """What to export and how.

    Attributes:
        output: the ONNX file, or the folder for a target that reads one; None for models/NAME.
        target: what will run the model, one of TARGET_NAMES.
        dimensions: how many numbers of an embedding are kept, its first; None for all.
        route: the modules that a Router has for some of its texts, by their name.
        vectors_as: what the numbers of an embedding are stored as, one of VECTOR_TYPES; None for as computed.
        ranges: a file with the range of each number, for int8 and uint8.
        calibration: texts to measure these ranges on, in place of that file.
        keep_raw: keep the output that the head reads beside the head's own.
        text: what to trace a model of text on, beside a text of our own.
        require_dynamic: refuse a file that fixes an axis which the model itself leaves open.
        atol: replaces the tolerance of the dtype; so do `rtol` and `min_cosine`.
    """

    model_name: Annotated[NameField, Option("An id on the hub, or a folder.", metavar="ID_OR_DIR", is_checkpoint=True)]
    output: Annotated[
        OptionalPath,
        Option("The ONNX file, or the folder for a --target.", default="models/NAME.onnx, or models/NAME/"),
    ] = UNSET
    task: Task = "auto"
    head: Annotated[
        str,
        Option(
            "What the graph computes from the model's output: nothing (none, logits), a vector or a score; auto does "
            "what the model was trained with.",
            choices=HEAD_NAMES,
        ),
    ] = "auto"
    target: Annotated[
        str,
        Option("What will run the model: names, layout and files are as it expects them.", choices=TARGET_NAMES),
    ] = "plain"
    dimensions: Dimensions = None
    vectors_as: VectorsAs = None
    ranges: RangesFile = UNSET
    calibration: Calibrated = UNSET
    route: Annotated[
        str | None,
        Option(
            "Of a checkpoint with a Router, the modules to export, e.g. query or document.",
            metavar="NAME",
            default="both, where these have encoders of their own",
        ),
    ] = None
    keep_raw: Annotated[bool, Option("Keep the output that the head reads beside the head's own.")] = False
    exporter: Annotated[
        str, Option("How to trace; auto takes the first result that verifies.", choices=EXPORTER_NAMES)
    ] = "auto"
    opset: Annotated[int | None, Option("ONNX opset.", minimum=LOWEST_OPSET, default="the exporter's own")] = None
    text: Annotated[str | None, Option("A text to trace the model on.")] = None
    revision: Revision = None
    trust_remote_code: TrustRemoteCode = False
    allow_missing_weights: AllowMissingWeights = False
    allow_unused_weights: AllowUnusedWeights = False
    allow_pickle: AllowPickle = False
    require_dynamic: Annotated[bool, Option("Fail where the file would fix an axis that is dynamic in the model.")] = (
        False
    )
    dtype: Annotated[str, Option("Of the weights.", choices=tuple(DTYPES))] = "float32"
    device: Annotated[str, Option("Where PyTorch runs the model, e.g. cuda.")] = "cpu"
    verify: Annotated[bool, Option("Compare the file with PyTorch.")] = True
    atol: Annotated[float | None, Option("Allowed absolute error, in place of the dtype's.", minimum=0)] = None
    rtol: Annotated[float | None, Option("Allowed error relative to the largest value of an output.", minimum=0)] = None
    min_cosine: Annotated[
        float | None,
        Option("The least cosine of an output with PyTorch's, in place of the dtype's.", minimum=0, maximum=1),
    ] = None
    max_length: Annotated[
        int | None,
        Option(
            "The most tokens of a text that the file is for: verified there whatever that takes.",
            minimum=1,
            default="the checkpoint's, within a budget",
        ),
    ] = None
    force: Force = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_ranges_options(self.vectors_as, self.ranges, self.calibration)
        device, colon, number = self.device.partition(":")
        if device not in DEVICES or (colon and not number.isdecimal()):
            raise OptionError(
                f"device: {self.device!r} is none of PyTorch's", f"use one of {', '.join(DEVICES)}, or cuda:0"
            )

    @property
    def choices(self) -> dict[str, Json]:
        """What of all that goes into the file was chosen otherwise than by default, and is not in its metadata yet."""
        defaults = {option.name: option.default for option in fields(self)}
        return {name: value for name in _STAMPED if (value := getattr(self, name)) != defaults[name]}

    @property
    def tolerance(self) -> Tolerance:
        """The tolerance of the dtype, with what the user replaced."""
        from onnxtool.runtime.comparison import TOLERANCES, Tolerance

        base = TOLERANCES[DTYPES[self.dtype]]
        return Tolerance(
            base.atol if self.atol is None else self.atol,
            base.rtol if self.rtol is None else self.rtol,
            base.cosine if self.min_cosine is None else self.min_cosine,
        )


def check_opset(opset: int | None) -> None:
    """Refuse an opset that no exporter can give, before anything is loaded; None is the exporter's own.

    Raises:
        ExportError: torch cannot write it by the onnx that is installed, or onnxruntime cannot read it.
    """
    if opset is None:
        return
    import torch

    from onnxtool.runtime.providers import highest_opset, runtime_version

    highest = highest_opset()
    if not LOWEST_OPSET <= opset <= highest:
        raise ExportError(
            f"no opset {opset}: torch {torch.__version__} writes, and onnxruntime {runtime_version()} reads, "
            f"{LOWEST_OPSET} to {highest}",
            "leave --opset out for the exporter's own, or pass one of these",
        )
