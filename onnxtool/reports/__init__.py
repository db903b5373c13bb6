"""What each step found out, as frozen dataclasses whose fields are the keys of the JSON output.

Dtypes are written as numpy writes them (`float32`, `int64`). A dimension is an integer where it is fixed, its name
where it is dynamic, and None where the file says nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from onnxtool.figures import Change as Change
from onnxtool.figures import Difference as Difference
from onnxtool.figures import Dimension as Dimension
from onnxtool.figures import Json as Json
from onnxtool.figures import MappingDelta as MappingDelta
from onnxtool.figures import Stats as Stats
from onnxtool.figures import StatsDelta as StatsDelta
from onnxtool.figures import TensorInfo as TensorInfo
from onnxtool.figures import to_json as to_json
from onnxtool.reports.answers import InferReport as InferReport
from onnxtool.reports.answers import Ranking as Ranking
from onnxtool.reports.answers import Scored as Scored
from onnxtool.reports.answers import Span as Span
from onnxtool.reports.answers import TextAnswer as TextAnswer
from onnxtool.reports.benchmark import BenchmarkEnvironment as BenchmarkEnvironment
from onnxtool.reports.benchmark import BenchmarkReport as BenchmarkReport
from onnxtool.reports.benchmark import BenchmarkResult as BenchmarkResult
from onnxtool.reports.benchmark import ComparedShape as ComparedShape
from onnxtool.reports.benchmark import Comparison as Comparison
from onnxtool.reports.benchmark import GateOutcome as GateOutcome
from onnxtool.reports.benchmark import LatencySummary as LatencySummary
from onnxtool.reports.benchmark import ModelIdentity as ModelIdentity
from onnxtool.reports.benchmark import StageTimes as StageTimes
from onnxtool.reports.benchmark import TokenLengths as TokenLengths
from onnxtool.reports.benchmark import TransferTimes as TransferTimes


@dataclass(frozen=True)
class VerificationCase:
    """One comparison of the model with its reference on the same inputs.

    Attributes:
        description: what this case is about, e.g. `ragged, padded right`.
        inputs: the shape of each input.
        max_abs_error: the largest absolute difference over all outputs, on positions that are not padding.
        cosine: the smallest cosine similarity of an output with its reference, each flattened.
        passed: whether every output was within the tolerance.
        worst_output: the output with the largest error.
        failure: why the model did not run on these inputs at all; empty where it did.
    """

    description: str
    inputs: dict[str, tuple[int, ...]]
    max_abs_error: float
    cosine: float
    passed: bool
    worst_output: str
    failure: str = ""


@dataclass(frozen=True)
class Verification:
    """How far a model is from its reference.

    A case passes where `|output - reference| <= atol + rtol * max|reference|` holds for every output, and the
    cosine of each is at least `cosine_required`.

    Attributes:
        reference: what the model was compared with.
        mask_effect: how far the reference's own outputs move when the padding is attended to; a figure below `atol`
            means that these weights cannot show a wrong mask. None for a model without an attention mask.
        padding_effect: how far the model's outputs move where other ids stand in the padding, at most; None where
            that was not tried.
        refused: cases that the reference itself does not run on, and that were left out therefore.
        provider: where the model ran. The CPU provider computes half precision in float32, so it shows the rounding of
            weights and not an overflow in between.
    """

    passed: bool
    atol: float
    rtol: float
    cosine_required: float
    max_abs_error: float
    cosine_min: float
    reference: str
    cases: tuple[VerificationCase, ...]
    mask_effect: float | None = None
    padding_effect: float | None = None
    refused: tuple[str, ...] = ()
    provider: str = "cpu"


@dataclass(frozen=True)
class ExportReport:
    """What `export` made.

    Attributes:
        output: the ONNX file.
        files: the folder beside it with tokenizer and configuration.
        task: what the model is for, in the hub's words.
        head: what the graph computes on top of the encoder.
        attention: the attention implementation that was asked for to trace it; empty for transformers' own choice.
        fixed_axes: the axes that have one size in this file, with that size.
        metadata: what was stamped into the file.
        notes: what a user should know, such as an exporter that failed before another did it.
        duration_ms: wall time by stage.
    """

    output: str
    files: str
    source: str
    model_type: str
    architecture: str
    task: str
    head: str
    exporter: str
    attention: str
    fixed_axes: dict[str, int]
    opset: int
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    metadata: dict[str, str]
    verification: Verification | None
    notes: tuple[str, ...]
    duration_ms: dict[str, float]


@dataclass(frozen=True)
class PassResult:
    """What one pass did.

    Attributes:
        num_changes: nodes and initializers added, removed or rewritten.
        note: what the pass wants a reader to know, or an empty string.
    """

    name: str
    num_changes: int
    duration_ms: float
    note: str = ""


@dataclass(frozen=True)
class FusionCount:
    """How many subgraphs of a kind were fused; `expected` is None where the model does not say."""

    kind: str
    expected: int | None
    found: int


@dataclass(frozen=True)
class KeptLayer:
    """A layer that is kept in higher precision.

    Attributes:
        name: of its weight.
        error: the largest 1 - cosine of an output, or of a row of it, where this layer alone is quantized as far as the
            others are; on the calibration inputs that are worst where all layers are.
        precision: what it is kept in: `float32`, or `int8` for a weight of 8 bits among those of 4.
    """

    name: str
    error: float
    precision: str = "float32"


@dataclass(frozen=True)
class Quantization:
    """What a quantized model costs, measured on calibration texts.

    Attributes:
        precision: `int8` or `int4`.
        activations: how the activations of int8 get their ranges, `dynamic` or `static`; empty for int4, which leaves
            activations as they are.
        num_layers: products with weights; those in `kept` have higher precision.
        num_embeddings: lookups that read a quantized table.
        embedding_precision: of these; empty where there are none.
        num_texts: how many texts it was calibrated on; 0 for random ids.
        error: the largest 1 - cosine of an output, or of a row of one, over all texts; real tokens alone count.
        mean_error: the average of the same.
        note: what a reader should know of the calibration; empty where there is nothing.
    """

    precision: str
    activations: str
    num_layers: int
    kept: tuple[KeptLayer, ...]
    num_embeddings: int
    embedding_precision: str
    num_texts: int
    error: float
    mean_error: float
    note: str


@dataclass(frozen=True)
class Candidate:
    """A precision that `--precision auto` tried on this machine.

    Attributes:
        precision: what `--precision` would have been, with what `--activations` would have been.
        latency_ms: the median of each shape, by the name of the shape; empty where it was not timed.
        size_bytes: of the file; None where there is none.
        error: the largest 1 - cosine of an output, or of a row of one, on the calibration texts; None where it is not
            known.
        chosen: whether it is the output.
        reason: why it was not possible; empty where it was.
    """

    precision: str
    activations: str
    latency_ms: dict[str, float]
    size_bytes: int | None
    error: float | None
    chosen: bool
    reason: str


@dataclass(frozen=True)
class OptimizeReport:
    """What `optimize` made of a model.

    Attributes:
        precision: of the output, also where it was chosen.
        quantization: None where nothing was quantized.
        candidates: what `--precision auto` tried; empty where the precision was given.
    """

    output: str
    provider: str
    precision: str
    before: Stats
    after: Stats
    passes: tuple[PassResult, ...]
    fusions: tuple[FusionCount, ...]
    quantization: Quantization | None
    candidates: tuple[Candidate, ...]
    verification: Verification | None
    duration_ms: dict[str, float]


@dataclass(frozen=True)
class EnvironmentReport:
    """What is installed here, which execution providers run, and what is wrong."""

    python: str
    platform: str
    packages: dict[str, str]
    providers: dict[str, str]
    problems: tuple[str, ...]
