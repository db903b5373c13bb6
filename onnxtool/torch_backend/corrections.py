"""Rewrites what onnxruntime computes wrongly into what it computes rightly."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir


def correct(graph: ir.Graph) -> None:
    """Replace `MatMul(a, v)`, with a vector v, by `Squeeze(MatMul(a, Unsqueeze(v)))`.

    Where `a` is a Transpose, onnxruntime (tested: 1.31.1) fuses it into a FusedMatMul, and that multiplies the vector
    by the matrix that was not transposed.
    """
    for node in list(graph):
        if node.domain or node.op_type != "MatMul":
            continue
        matrix, vector = node.inputs
        if matrix is None or vector is None or vector.shape is None or vector.shape.rank() != 1:
            continue
        if matrix.shape is not None and matrix.shape.rank() == 1:
            continue
        minus_one = ir.tensor(np.array([-1], np.int64))
        last = ir.Value(name=f"{node.outputs[0].name}_last_axis", const_value=minus_one)
        axis = ir.Node(
            "", "Constant", [], [ir.AttrTensor("value", minus_one)], outputs=[last], name=f"{node.name}_axis"
        )
        column = ir.Node("", "Unsqueeze", [vector, last], name=f"{node.name}_column")
        product = ir.Node("", "MatMul", [matrix, column.outputs[0]], name=f"{node.name}_product")
        output = node.outputs[0]
        row = ir.Node("", "Squeeze", [product.outputs[0], last], name=f"{node.name}_row")
        for made, part in ((column, "column"), (product, "product"), (row, "row")):
            made.outputs[0].name = f"{output.name}_{part}"
            made.outputs[0].type = vector.type
        row.outputs[0].shape = output.shape
        ir.convenience.replace_nodes_and_values(
            graph, node, [node], [axis, column, product, row], [output], [row.outputs[0]]
        )
