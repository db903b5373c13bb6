"""The options of an export."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Annotated

from onnxtool.checkpoint.tasks import TASK_NAMES
from onnxtool.checkpoint.vector_types import Dimensions, PruneInGraph
from onnxtool.errors import ExportError, OptionError
from onnxtool.export.targets import TARGET_NAMES, TARGETS
from onnxtool.options import NOTHING, UNSET, Force, ManyNames, NameField, Option, OptionalPath, Options
from onnxtool.reports import Json
from onnxtool.runtime.sizes import FixedTo, check_sizes

if TYPE_CHECKING:
    from onnxtool.runtime.difference import Tolerance

LOWEST_OPSET = 13  # the opset that heads are written for

DEVICES = ("cpu", "cuda", "mps", "xpu")
DTYPES = {"float32": "fp32", "float16": "fp16"}

# Copies of the tables in `heads/choice.py` and `tracing.py`, so that the command's help lists them without loading
# these. `logits` and `none` add nothing to the model; `logits` requires that it gives logits.
HEAD_NAMES = ("auto", "logits", "splade", "embedding", "late-interaction", "m3", "reranker", "none")
BESIDE, IN_GRAPH, PAIRS_IN_GRAPH = TOKENIZER_PLACES = ("beside", "in_graph", "pairs_in_graph")
EXPORTER_NAMES = ("auto", "dynamo", "torchscript")

# Options that are not recorded in any other metadata entry.
_STAMPED = (
    *("max_length", "target", "tokenizer", "prompt", "dimensions", "route", "keep_raw", "opset", "text"),
    *("allow_missing_weights", "allow_pickle", "device", "allow_unused_weights", "atol", "rtol", "min_cosine"),
)


# Training artifacts are also made from a checkpoint.
Task = Annotated[
    str,
    Option(
        f"The model's task: {', '.join(TASK_NAMES)}. auto reads config.json, modules.json and the model card.",
        choices=("auto", *TASK_NAMES),
        metavar="TASK",
    ),
]
Revision = Annotated[str | None, Option("Branch, tag or commit on the hub.", effect="source")]
TrustRemoteCode = Annotated[bool, Option("Allow code in the checkpoint to run.", effect="code")]
AllowMissingWeights = Annotated[bool, Option("Initialize weights that the checkpoint lacks.", effect="check")]
AllowUnusedWeights = Annotated[
    bool, Option("Ignore weights in the checkpoint that the model does not use.", effect="check")
]
AllowPickle = Annotated[bool, Option("Load weights from a pickle if there are no safetensors.", effect="code")]


class ExportOptions(Options):
    """The options of `onnxtool export`.

    Attributes:
        output: the ONNX file, or the folder for a target that reads one; None for models/NAME.
        tokenizer: one of TOKENIZER_PLACES; None for that of the target.
        target: the consumer that will run the model, one of TARGET_NAMES.
        precisions: names of precisions, with commas between them; `export_variants` writes their files.
        max_error: upper bound on 1 - cosine of an output in int8 and int4; None for 0.01.
        dimensions: number of leading dimensions of an embedding to keep; None for all.
        route: the modules that a Router has for some of its texts, by name.
        adapters: folders or ids of PEFT adapters that the file can run with, next to its base.
        prune: as of `optimize`, like `sizes`.
        keep_raw: also keep the output that the head reads.
        text: an additional text to trace text models on.
        require_dynamic: refuse a file that fixes an axis which is dynamic in the model.
        atol: overrides the dtype's tolerance, as do `rtol` and `min_cosine`.
    """

    model_name: Annotated[
        NameField, Option("A hub id or a folder.", metavar="ID_OR_DIR", is_checkpoint=True, effect="source")
    ]
    output: Annotated[
        OptionalPath,
        Option(
            "The ONNX file, or the folder for a --target.", default="models/NAME.onnx, or models/NAME/", writes="file"
        ),
    ] = UNSET
    task: Task = "auto"
    head: Annotated[
        str,
        Option(
            "What the graph computes from the model's output: nothing (none, logits), a vector or a score; auto uses "
            "the head that the model was trained with.",
            choices=HEAD_NAMES,
        ),
    ] = "auto"
    target: Annotated[
        str,
        Option("The consumer of the model; names, layout and files match what it expects.", choices=TARGET_NAMES),
    ] = "plain"
    precisions: Annotated[
        str,
        Option(
            "With a --target, also write the files in these precisions that it opens, under its names: fp32, fp16, "
            "int8, uint8, int4 or int4_fp16.",
            metavar="NAME,...",
            default="the exported file alone",
        ),
    ] = ""
    max_error: Annotated[
        float | None,
        Option(
            "With --precisions, the upper bound on 1 - cosine of int8, uint8 and int4, on calibration texts.",
            metavar="X",
            minimum=0,
            maximum=1,
            effect="check",
            default="0.01",
        ),
    ] = None
    dimensions: Dimensions = None
    tokenizer: Annotated[
        str | None,
        Option(
            "Where the tokenizer is: in files beside the graph, or in it, by operators of onnxruntime-extensions: the "
            "graph then reads texts, or with pairs_in_graph pairs of texts, as a reranker scores them.",
            choices=TOKENIZER_PLACES,
            default="beside, or in_graph for a --target that feeds texts",
        ),
    ] = None
    prompt: Annotated[
        str | None,
        Option(
            "With --tokenizer in_graph, the checkpoint's prompt of this name, or a text, to put before each text.",
            metavar="NAME_OR_TEXT",
            default="the checkpoint's default prompt",
        ),
    ] = None
    route: Annotated[
        str | None,
        Option(
            "For a checkpoint with a Router, the modules to export, e.g. query or document.",
            metavar="NAME",
            default="both, if they have separate encoders",
        ),
    ] = None
    adapters: Annotated[
        ManyNames,
        Option(
            "A PEFT adapter (LoRA) of the checkpoint, which stays apart in a file of its own; may be repeated. Choose "
            "one with --adapter in infer, encode and evaluate.",
            name="adapter",
            metavar="ID_OR_DIR",
            is_checkpoint=True,
            effect="source",
        ),
    ] = NOTHING
    prune: PruneInGraph = None
    sizes: FixedTo = NOTHING
    keep_raw: Annotated[bool, Option("Also keep the output that the head reads.")] = False
    exporter: Annotated[
        str, Option("How to trace; auto uses the first result that passes verification.", choices=EXPORTER_NAMES)
    ] = "auto"
    opset: Annotated[int | None, Option("ONNX opset.", minimum=LOWEST_OPSET, default="the exporter's own")] = None
    text: Annotated[str | None, Option("A text to trace the model on.")] = None
    revision: Revision = None
    trust_remote_code: TrustRemoteCode = False
    allow_missing_weights: AllowMissingWeights = False
    allow_unused_weights: AllowUnusedWeights = False
    allow_pickle: AllowPickle = False
    require_dynamic: Annotated[bool, Option("Fail if the file would fix an axis that is dynamic in the model.")] = False
    dtype: Annotated[str, Option("The dtype of the weights.", choices=tuple(DTYPES))] = "float32"
    device: Annotated[str, Option("The device that PyTorch runs the model on, e.g. cuda.")] = "cpu"
    verify: Annotated[bool, Option("Compare the file with PyTorch.", effect="check")] = True
    atol: Annotated[
        float | None, Option("Allowed absolute error, instead of the dtype's default.", minimum=0, effect="check")
    ] = None
    rtol: Annotated[
        float | None, Option("Allowed error relative to the largest value of an output.", minimum=0, effect="check")
    ] = None
    min_cosine: Annotated[
        float | None,
        Option(
            "The minimum cosine similarity with PyTorch's output, instead of the dtype's.",
            minimum=0,
            maximum=1,
            effect="check",
        ),
    ] = None
    max_length: Annotated[
        int | None,
        Option(
            "The maximum text length in tokens that the file supports, verified at any cost.",
            minimum=1,
            default="the checkpoint's, within a budget",
        ),
    ] = None
    force: Force = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_error is not None and not self.precisions:
            raise OptionError("--max_error bounds the files of --precisions, which names none", "leave it out")
        target = TARGETS[self.target]
        place = IN_GRAPH if target.reads_texts else BESIDE
        if self.tokenizer not in (None, place) and not target.takes_any_graph:
            raise OptionError(
                f"{target.title} takes files with --tokenizer {place}, and --tokenizer {self.tokenizer} was passed",
                "leave --tokenizer out, or pass --target plain",
            )
        if self.prompt is not None and not self.reads_texts:
            raise OptionError(
                f"--prompt {self.prompt!r} is for a tokenizer in the graph",
                "pass --tokenizer in_graph with it, or pass the prompt to infer and encode",
            )
        conflicts = {"--tokenizer": self.reads_texts, "--precisions": self.precisions, "--sizes": self.sizes}
        conflicts["--target"] = not target.takes_any_graph
        if self.adapters and (conflicting := [name for name, value in conflicts.items() if value]):
            raise OptionError(
                f"--adapter makes further inputs, which nothing would feed with {' and '.join(conflicting)}",
                "leave one of them out, or export each adapter merged: --model_name ADAPTER",
            )
        if self.sizes:
            check_sizes(self.sizes)
        if self.sizes and (self.reads_texts or self.precisions or not target.takes_any_graph):
            conflict = "--tokenizer in_graph" if self.reads_texts else "--precisions" if self.precisions else ""
            raise OptionError(
                f"--sizes is for a graph that reads ids, in files of any name, and not for "
                f"{conflict or f'--target {self.target}'}",
                "leave one of them out, or pass --sizes to onnxtool optimize",
            )
        if self.precisions and self.reads_texts:
            raise OptionError(
                "--precisions writes files for consumers that tokenize themselves, and the tokenizer is in the graph",
                "leave --precisions out, and optimize the file",
            )
        bounds = [name for name in ("atol", "rtol", "min_cosine") if getattr(self, name) is not None]
        if bounds and not self.verify:
            raise OptionError(f"--{bounds[0]} bounds a comparison that --no_verify leaves out", "leave one of them out")
        device, colon, number = self.device.partition(":")
        if device not in DEVICES or (colon and not number.isdecimal()):
            raise OptionError(
                f"device: {self.device!r} is none of PyTorch's", f"use one of {', '.join(DEVICES)}, or cuda:0"
            )

    @property
    def reads_texts(self) -> bool:
        """Whether the tokenizer is in the graph."""
        return self.tokenizer not in (None, BESIDE) or TARGETS[self.target].reads_texts

    @property
    def choices(self) -> dict[str, Json]:
        """The non-default choices that affect the file and are not in its metadata yet."""
        defaults = {option.name: option.default for option in fields(self)}
        return {name: value for name in _STAMPED if (value := getattr(self, name)) != defaults[name]}

    @property
    def tolerance(self) -> Tolerance:
        """The dtype's tolerance, with the user's replacements."""
        from onnxtool.runtime.difference import TOLERANCES

        return TOLERANCES[DTYPES[self.dtype]].overridden(self.atol, self.rtol, self.min_cosine)


def check_opset(opset: int | None) -> None:
    """Refuse an opset that no exporter can write, before anything is loaded; None is the exporter's default.

    Raises:
        ExportError: torch cannot write it with the installed onnx, or onnxruntime cannot read it.
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
