"""Corrections of ONNX nodes that onnxruntime (tested: 1.31.1) computes wrongly."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

Correction = Callable[[ir.Graph, ir.Node], None]
"""Rewrites a node of the graph in place, where onnxruntime would compute it wrongly."""


def multiply_columns(graph: ir.Graph, node: ir.Node) -> None:
    """Replace `MatMul(a, v)`, with a vector v, by `Squeeze(MatMul(a, Unsqueeze(v)))`.

    Where `a` is a Transpose, onnxruntime fuses it into a FusedMatMul, and that multiplies the vector by the matrix
    without transposing it.
    """
    matrix, vector = node.inputs
    if matrix is None or vector is None or vector.shape is None or vector.shape.rank() != 1:
        return
    if matrix.shape is not None and matrix.shape.rank() == 1:
        return
    output = node.outputs[0]
    axis = _constant(np.array([-1], np.int64), f"{output.name}_last_axis", f"{node.name}_axis")
    column = ir.Node("", "Unsqueeze", [vector, axis.outputs[0]], name=f"{node.name}_column")
    product = ir.Node("", "MatMul", [matrix, column.outputs[0]], name=f"{node.name}_product")
    row = ir.Node("", "Squeeze", [product.outputs[0], axis.outputs[0]], name=f"{node.name}_row")
    for made, part in ((column, "column"), (product, "product"), (row, "row")):
        made.outputs[0].name = f"{output.name}_{part}"
        made.outputs[0].type = vector.type
    row.outputs[0].shape = output.shape
    ir.convenience.replace_nodes_and_values(graph, node, [node], [axis, column, product, row], [output], row.outputs)


def count_axes_from_the_front(graph: ir.Graph, node: ir.Node) -> None:
    """Replace the negative axes of a reduction by the equal non-negative ones.

    Of an empty tensor, onnxruntime reduces no negative axis: the result has the shape of the input.
    """
    source, attribute = node.inputs[0], node.attributes.get("axis")
    if source is None or source.shape is None:
        return
    rank = source.shape.rank()
    if attribute is not None:
        if (axis := attribute.as_int()) < 0:
            node.attributes["axis"] = ir.AttrInt64("axis", axis + rank)
        return
    constant = ir.convenience.get_const_tensor(node.inputs[1]) if node.inputs[1:] and node.inputs[1] else None
    if constant is None or (axes := constant.numpy()).size == 0 or axes.min() >= 0:
        return
    made = _constant(np.where(axes < 0, axes + rank, axes), f"{node.outputs[0].name}_axes", f"{node.name}_axes")
    graph.insert_before(node, made)
    node.replace_input_with(1, made.outputs[0])


def _constant(array: NDArray[np.int64], name: str, node_name: str) -> ir.Node:
    tensor = ir.tensor(array)
    value = ir.Value(name=name, const_value=tensor)
    return ir.Node("", "Constant", [], [ir.AttrTensor("value", tensor)], outputs=[value], name=node_name)
