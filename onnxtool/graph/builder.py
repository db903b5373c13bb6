"""Append the formulas of a model's head to a graph, in the precision that they need.

Shape letters: B batch, S sequence, H hidden, N output features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from onnxtool.graph.writer import Writer
from onnxtool.model_file.domains import default_opset

_OPSET = 17  # of models of our own


class Builder(Writer):
    """Appends operators that compute in `dtype` to a graph; equal constants share an initializer.

    Half-precision models are pooled in float32, as in sentence-transformers: sums over tokens would overflow float16.

    Attributes:
        dtype: float32, or float64 if the model uses it.
        opset: the graph's opset; some operators changed.
    """

    def __init__(self, graph: ir.Graph, dtype: ir.DataType) -> None:
        super().__init__(graph)
        self.dtype = dtype if dtype == ir.DataType.DOUBLE else ir.DataType.FLOAT
        self.opset = default_opset(graph.opset_imports)

    def constant(self, array: NDArray[Any], name: str = "") -> ir.Value:
        """Return an initializer that holds `array`, named by onnxtool if no name is given."""
        return self.shared_constant(
            ir.tensor(array), lambda: name or f"onnxtool.head.constant_{len(self.initializers)}"
        )

    def weight(self, array: NDArray[Any], name: str) -> ir.Value:
        """Return a trained weight as an initializer of the computation dtype."""
        return self.constant(array.astype(self.dtype.numpy()), name)

    def number(self, value: float) -> ir.Value:
        """Return a scalar."""
        return self.constant(np.array(value, dtype=self.dtype.numpy()))

    def integers(self, *values: int) -> ir.Value:
        """Return a list of axes or sizes: int64 [N]."""
        return self.constant(np.array(values, dtype=np.int64))

    def cast(self, value: ir.Value, dtype: ir.DataType | None = None) -> ir.Value:
        """Cast to `dtype`, or to the computation dtype."""
        return self.op("Cast", value, to=(self.dtype if dtype is None else dtype).value)

    def as_weights(self, mask: ir.Value) -> ir.Value:
        """Return [B, S] as [B, S, 1], to multiply with per-token values."""
        return self.op("Unsqueeze", mask, self.integers(-1))

    def reduce(self, op_type: str, value: ir.Value, *, axis: int = 1, keepdims: int = 0) -> ir.Value:
        """Reduce over one axis. The axes are an input from opset 13 on for ReduceSum, from 18 on for the others."""
        if op_type == "ReduceSum" or self.opset >= 18:
            return self.op(op_type, value, self.integers(axis), keepdims=keepdims)
        return self.op(op_type, value, axes=[axis], keepdims=keepdims)

    def pick(self, states: ir.Value, scores: ir.Value) -> ir.Value:
        """Take, for each text, the state of the first token with the highest score: [B, S, H] by [B, S] to [B, H]."""
        return self._pick_at(states, self.op("ArgMax", scores, axis=1, keepdims=1))

    def pick_before(self, values: ir.Value, scores: ir.Value) -> ir.Value:
        """Like `pick`, but before a linear layer and the elementwise steps after it, which then run on only one token.

        A product [B, S, H] by [H, N] becomes [B, H] by [H, N].
        """
        return self._picked_before(values, self.op("ArgMax", scores, axis=1, keepdims=1))

    def _picked_before(self, value: ir.Value, places: ir.Value) -> ir.Value:
        """Go back through bounds, scales, biases and casts, which models apply to logits, to the product."""
        match value.producer():
            case ir.Node(op_type="MatMul", inputs=[ir.Value() as states, weight]) as node if _is_fixed(weight, 2):
                inputs = [self._pick_at(states, places), weight]
            case ir.Node(op_type="Cast" | "Identity" | "Tanh" | "Neg", inputs=[ir.Value() as one]) as node:
                inputs = [self._picked_before(one, places)]
            case ir.Node(op_type="Add" | "Mul" | "Div", inputs=[ir.Value() as one, by]) as node if _is_fixed(by, 1):
                inputs = [self._picked_before(one, places), by]
            case ir.Node(op_type="Add" | "Mul", inputs=[one, ir.Value() as other]) as node if _is_fixed(one, 1):
                inputs = [one, self._picked_before(other, places)]
            case _:
                return self._pick_at(value, places)
        return self.node(node.op_type, inputs, node.attributes)

    def _pick_at(self, states: ir.Value, places: ir.Value) -> ir.Value:
        return self.op("GatherND", states, places, batch_dims=1)


def model_of(append: Callable[..., ir.Value], inputs: Mapping[str, tuple[Any, int]]) -> bytes:
    """Make a model of float32 of what `append` adds to a graph, given a Builder and the inputs.

    Args:
        append: returns the output.
        inputs: dtypes and ranks by name; inputs that are not read are left out.
    """
    values = [
        ir.val(name, dtype=ir.DataType.from_numpy(np.dtype(dtype)), shape=[None] * rank)
        for name, (dtype, rank) in inputs.items()
    ]
    graph = ir.Graph(values, [], nodes=[], opset_imports={"": _OPSET}, name="modules")
    build = Builder(graph, ir.DataType.FLOAT)
    output = append(build, *values)
    output = build.op("Identity", output) if output in values else output
    output.dtype = ir.DataType.FLOAT
    graph.outputs.append(output)
    graph.inputs[:] = [value for value in values if value.uses()]
    serialized: bytes = ir.to_proto(ir.Model(graph, ir_version=8)).SerializeToString()
    return serialized


def _is_fixed(value: ir.Value | None, most_axes: int) -> bool:
    """Return whether a value is a constant with at most `most_axes` axes, which broadcasts to one token as to all."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    return tensor is not None and len(tensor.shape) <= most_axes
