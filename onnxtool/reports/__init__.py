"""What each step found out, as frozen dataclasses whose fields are the keys of the JSON output.

Dtypes are written as numpy writes them (`float32`, `int64`). A dimension is an integer where it is fixed, its name
where it is dynamic, and None where the file says nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from onnxtool.reports.running import BenchmarkReport as BenchmarkReport
from onnxtool.reports.running import BenchmarkResult as BenchmarkResult
from onnxtool.reports.running import InferReport as InferReport
from onnxtool.reports.running import LatencySummary as LatencySummary
from onnxtool.reports.running import Scored as Scored
from onnxtool.reports.running import TextAnswer as TextAnswer

Dimension = int | str | None
Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]


@dataclass(frozen=True)
class TensorInfo:
    """An input or output of a graph."""

    name: str
    dtype: str
    shape: tuple[Dimension, ...]


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
class Stats:
    """The structure of one model. Node and operator counts include the bodies of If, Loop and Scan.

    Attributes:
        size_bytes: the graph file and its external data.
        num_inputs: graph inputs that are not initializers.
        num_parameters: elements of all initializers.
        ops: operator to number of nodes, most frequent first; other domains as `com.microsoft::Attention`.
        initializer_bytes: dtype to bytes.
        duplicate_bytes: bytes that would go if equal initializers were stored once.
        num_functions: model-local functions.
        num_subgraphs: graphs inside nodes.
    """

    path: str
    size_bytes: int
    ir_version: int
    producer: str
    opsets: dict[str, int]
    num_nodes: int
    num_inputs: int
    num_outputs: int
    num_initializers: int
    num_parameters: int
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    ops: dict[str, int]
    metadata: dict[str, str]
    initializer_bytes: dict[str, int]
    duplicate_bytes: int
    num_functions: int
    num_subgraphs: int


@dataclass(frozen=True)
class Change:
    """A figure before and after; None where it is absent."""

    before: Json
    after: Json


@dataclass(frozen=True)
class MappingDelta:
    """What was added to, removed from and changed in a mapping."""

    added: dict[str, Json] = field(default_factory=dict)
    removed: dict[str, Json] = field(default_factory=dict)
    changed: dict[str, Change] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed)


@dataclass(frozen=True)
class StatsDelta:
    """The difference of two models; numbers are the model's minus the base's."""

    num_nodes: int
    num_initializers: int
    num_parameters: int
    size_bytes: int
    duplicate_bytes: int
    ops: MappingDelta
    inputs: MappingDelta
    outputs: MappingDelta
    opsets: MappingDelta
    metadata: MappingDelta


@dataclass(frozen=True)
class Difference:
    """Two models and what separates them."""

    base: Stats
    model: Stats
    delta: StatsDelta


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
    """A layer that stays in float32, and 1 - cosine of the outputs where it alone is quantized."""

    name: str
    error: float


@dataclass(frozen=True)
class Quantization:
    """What a quantized model costs, measured on calibration texts.

    Attributes:
        num_layers: products with weights; those in `kept` stay in float32.
        num_embeddings: lookups that read a quantized table.
        num_texts: how many texts it was calibrated on; 0 for random ids.
        error: the largest 1 - cosine of an output, or of a row of one, over all texts; real tokens alone count.
        mean_error: the average of the same.
        note: what a reader should know of the calibration; empty where there is nothing.
    """

    num_layers: int
    kept: tuple[KeptLayer, ...]
    num_embeddings: int
    num_texts: int
    error: float
    mean_error: float
    note: str


@dataclass(frozen=True)
class OptimizeReport:
    """What `optimize` made of a model; `quantization` is None where nothing was quantized."""

    output: str
    provider: str
    precision: str
    before: Stats
    after: Stats
    passes: tuple[PassResult, ...]
    fusions: tuple[FusionCount, ...]
    quantization: Quantization | None
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


def to_json(value: object) -> Json:
    """Turn a report into JSON values: dataclasses into objects, tuples into arrays, paths into strings.

    JSON knows no infinity and no NaN; a figure that is not finite becomes null.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    raise TypeError(f"no JSON form for {type(value).__name__}")
