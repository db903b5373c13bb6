"""The report of `export`."""

from __future__ import annotations

from dataclasses import dataclass

from onnxtool.reports import TensorInfo, short_repr
from onnxtool.verification import Verification


@short_repr
@dataclass(frozen=True)
class ExportReport:
    """The result of `export`.

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
        partner: of a checkpoint that encodes queries and documents by different models, the export of the other one.
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
    partner: ExportReport | None = None
