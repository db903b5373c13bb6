"""The report of `export`."""

from __future__ import annotations

from dataclasses import dataclass

from onnxtool.reports import TensorInfo, short_repr
from onnxtool.runtime.sizes import SizeResult
from onnxtool.verification import Verification


@short_repr
@dataclass(frozen=True)
class ExportReport:
    """The result of `export`.

    Attributes:
        output: the ONNX file.
        files: the folder next to it with tokenizer and configuration.
        task: the model's task, as named on the hub.
        head: what the graph computes on top of the encoder.
        attention: the attention implementation requested for tracing; empty for transformers' own choice.
        fixed_axes: the axes with a fixed size in this file, and that size.
        metadata: the metadata stamped into the file.
        notes: remarks for the user, such as an exporter that failed before another succeeded.
        duration_ms: wall time by stage.
        sizes: the files of fixed sizes.
        partner: the other file's export, for a checkpoint with different query and document models.
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
    sizes: tuple[SizeResult, ...] = ()
    partner: ExportReport | None = None
