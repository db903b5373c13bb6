"""What an exported graph computes on top of the model: a table of heads, a row each.

Each head is written twice: as ONNX operators, appended to any exporter's graph, and as a few lines of PyTorch taken
from its publication, by which the exported graph is verified.

Letters of shapes: B batch, S sequence, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from onnxtool.errors import ExportError
from onnxtool.export.companions import Pooling
from onnxtool.export.signature import BATCH, Signature

if TYPE_CHECKING:
    import onnx_ir as ir
    from numpy.typing import NDArray

# Builds the head on the graph: (builder, the model's output, the attention mask, pooling) -> the head's output.
Build = Callable[["Builder", "ir.Value", "ir.Value", Pooling], "ir.Value"]
# The same in PyTorch: (the model's output, the attention mask [B, S], pooling) -> the head's output.
Reference = Callable[[Any, Any, Pooling], Any]


@dataclass(frozen=True)
class Head:
    """One head.

    Attributes:
        source: the output of the model that it stands on.
        output: the one output of the graph with this head.
        task: what a model with this head is for, whatever its checkpoint says.
        build: appends the head to a graph.
        reference: the head in PyTorch.
    """

    name: str
    source: str
    output: str
    task: str
    build: Build
    reference: Reference


def _build_splade(build: Builder, logits: ir.Value, mask: ir.Value, _pooling: Pooling) -> ir.Value:
    """Append log(1 + relu(max over real tokens)): float [B, S, V] to float [B, V].

    The logarithm is monotonic, so it is taken once an entry after the maximum and not once a token. Padding counts
    as 0, which relu would give it anyway.
    """
    real = build.op("Mul", logits, build.mask_of_rank_3(mask))
    largest = build.op("Relu", build.reduce("ReduceMax", real))
    return build.op("Log", build.op("Add", largest, build.number(1.0)))


def _splade(logits: Any, mask: Any, _pooling: Pooling) -> Any:
    """Formal et al., SPLADE v2, 2021, eq. 1 with max pooling."""
    import torch

    weights = torch.log1p(torch.relu(logits)) * mask.unsqueeze(-1)
    return weights.max(dim=1).values


def _build_embedding(build: Builder, hidden: ir.Value, mask: ir.Value, pooling: Pooling) -> ir.Value:
    """Append the pooling that the checkpoint was trained with: float [B, S, H] to float [B, H]."""
    if pooling.mode == "cls":
        pooled = build.op("Gather", hidden, build.constant(np.array(0, dtype=np.int64)), axis=1)
    else:
        weights = build.mask_of_rank_3(mask)
        total = build.reduce("ReduceSum", build.op("Mul", hidden, weights))
        pooled = build.op("Div", total, build.op("Max", build.reduce("ReduceSum", weights), build.number(1e-9)))
    if not pooling.normalize:
        return pooled
    norm = build.reduce("ReduceL2", pooled, keepdims=1)
    return build.op("Div", pooled, build.op("Max", norm, build.number(1e-12)))


def _embedding(hidden: Any, mask: Any, pooling: Pooling) -> Any:
    """Reimers and Gurevych, Sentence-BERT, 2019, section 3."""
    import torch

    if pooling.mode == "cls":
        pooled = hidden[:, 0]
    else:
        weights = mask.unsqueeze(-1).to(hidden.dtype)
        pooled = (hidden * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1e-9)
    return torch.nn.functional.normalize(pooled, dim=1) if pooling.normalize else pooled


HEADS: tuple[Head, ...] = (
    Head("splade", "logits", "sparse", "sparse-encoding", _build_splade, _splade),
    Head("embedding", "last_hidden_state", "sentence_embedding", "sentence-similarity", _build_embedding, _embedding),
)
# `logits` and `none` put nothing on the model; the first insists on logits.
HEAD_NAMES = ("auto", "logits", *(head.name for head in HEADS), "none")


def choose_head(name: str, signature: Signature) -> tuple[str, Head | None]:
    """Turn the name of a head into the one that will be exported, and its row where it adds anything.

    Raises:
        ExportError: the model does not have the output that the head stands on.
    """
    if name == "auto":
        return ("logits" if "logits" in signature.outputs else "none"), None
    row = next((head for head in HEADS if head.name == name), None)
    needed = row.source if row is not None else "logits" if name == "logits" else ""
    if needed and needed not in signature.outputs:
        raise ExportError(
            f"the head {name} needs the output {needed}; this model gives {', '.join(signature.outputs)}",
            "pass --head auto, or a --task whose architecture has it",
        )
    if row is not None and len(signature.outputs[row.source]) != 3:
        raise ExportError(
            f"the head {name} needs {row.source} of three axes, one of them the sequence; "
            f"this model gives {list(signature.outputs[row.source])}",
            "pass --head auto",
        )
    if row is not None and "attention_mask" not in signature.inputs:
        raise ExportError(f"the head {name} needs an attention mask; this model takes none", "pass --head auto")
    return name, row


def append_head(model: ir.Model, head: Head, pooling: Pooling) -> None:
    """Put `head` on the graph, in place of its outputs."""
    import onnx_ir as ir
    import onnx_ir.passes.common as common

    graph = model.graph
    source = next(value for value in graph.outputs if value.name == head.source)
    mask = next(value for value in graph.inputs if value.name == "attention_mask")
    if source.dtype is None:
        raise ExportError("the exporter did not type the output that the head stands on", "try the other --exporter")
    output = head.build(Builder(graph, source.dtype), source, mask, pooling)
    output.name = head.output
    output.dtype = source.dtype
    output.shape = ir.Shape([BATCH, source.shape[-1] if source.shape is not None else None])
    graph.outputs[:] = [output]
    common.RemoveUnusedNodesPass()(model)  # what only the outputs before used, such as BERT's pooler


class Builder:
    """Appends operators to a graph; numbers are of the dtype of the model's output, equal constants are one."""

    def __init__(self, graph: ir.Graph, dtype: ir.DataType) -> None:
        from onnx_ir import tape

        self._tape = tape.Tape(graph)
        self._dtype = dtype
        self._opset = graph.opset_imports[""]
        self._constants: dict[tuple[str, tuple[int, ...], bytes], ir.Value] = {}

    def op(self, op_type: str, *inputs: ir.Value, **attributes: int | list[int]) -> ir.Value:
        """Append one node of one output."""
        return self._tape.op(op_type, inputs, attributes=attributes)

    def constant(self, array: NDArray[Any]) -> ir.Value:
        """Return an initializer that holds `array`."""
        import onnx_ir as ir

        key = (str(array.dtype), array.shape, array.tobytes())
        if key not in self._constants:
            name = f"onnxtool.head.constant_{len(self._constants)}"
            self._constants[key] = self._tape.initializer(ir.tensor(array, name=name))
        return self._constants[key]

    def number(self, value: float) -> ir.Value:
        """Return a scalar; one too small for the dtype becomes its smallest normal number, never 0."""
        dtype = self._dtype.numpy()
        return self.constant(np.array(max(value, float(np.finfo(dtype).tiny)), dtype=dtype))

    def mask_of_rank_3(self, mask: ir.Value) -> ir.Value:
        """Return an integer mask [B, S] as float [B, S, 1]."""
        last = self.constant(np.array([-1], dtype=np.int64))
        return self.op("Unsqueeze", self.op("Cast", mask, to=self._dtype.value), last)

    def reduce(self, op_type: str, value: ir.Value, *, keepdims: int = 0) -> ir.Value:
        """Reduce over axis 1. The axes are an input from opset 13 on for ReduceSum, from 18 on for the others."""
        if op_type == "ReduceSum" or self._opset >= 18:
            return self.op(op_type, value, self.constant(np.array([1], dtype=np.int64)), keepdims=keepdims)
        return self.op(op_type, value, axes=[1], keepdims=keepdims)
