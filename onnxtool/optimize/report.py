"""What `optimize` made of a model: passes, fusions, precision, and the verification."""

from __future__ import annotations

from dataclasses import dataclass

from onnxtool.summary.figures import Stats
from onnxtool.verification import Verification


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
