"""Fix the dynamic axes of a graph: what it computes from their sizes becomes constants."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import InlinePass, RemoveUnusedNodesPass

from onnxtool.graph.edit import replace_by_constant
from onnxtool.graph.shapes import find_shapes, named_axes

_OF_SIZES = ("Shape", "Size", "Range")
_UNKNOWN = np.array(None)


def fix_sizes(model: ir.Model, sizes: Mapping[str, int]) -> int:
    """Give each dynamic axis of the inputs its size, and replace all values that follow from sizes by constants.

    Shapes are inferred from the operators, so a constant is what the graph computes on every input of these sizes. What
    depends on values too, such as the number of tokens that a mask selects, stays computed, and so does what lies in a
    branch or a loop.

    Args:
        model: the model, changed in place.
        sizes: the size of each of its dynamic axes.

    Returns:
        The number of nodes that still compute sizes.
    """
    if model.functions:
        InlinePass()(model)
    for value in model.graph.inputs:
        named = dict(named_axes(value))
        if value.shape is not None:
            value.shape = ir.Shape(
                [sizes[named[axis]] if axis in named else size for axis, size in enumerate(value.shape)]
            )
    shapes = find_shapes(model)
    outputs = [output for node in model.graph for output in node.outputs]
    kept = {output.producer() for output in outputs if output.is_graph_output()}
    constants = {
        output: shapes.elements[str(output.name)]
        for output in outputs
        if output.producer() not in kept and shapes.elements.get(str(output.name), _UNKNOWN).dtype != object
    }
    for output in outputs:
        if output.producer() not in kept:
            output.shape = None
        if output in constants and not all(set(node.outputs) <= constants.keys() for node, _ in output.uses()):
            replace_by_constant(output, ir.tensor(np.ascontiguousarray(constants[output])), model.graph)
    RemoveUnusedNodesPass()(model)
    for output in model.graph.outputs:
        if (known := shapes.shape(output)) is not None and all(isinstance(size, int) for size in known):
            output.shape = ir.Shape(known)
    return sum(node.op_type in _OF_SIZES and not node.domain for node in model.graph.all_nodes())
