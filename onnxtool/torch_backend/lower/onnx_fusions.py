"""Fuses RMS normalizations and rotary embeddings, which onnxruntime's optimizer does not find in graphs of the backend.

Unlike the passes of `onnxtool optimize`, these know all shapes from PyTorch, and keep what the gradient reads.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes

from onnxtool.graph.edit import attribute, constant, producer
from onnxtool.graph.operators import MICROSOFT
from onnxtool.graph.patterns import match_normalized, match_rotation, scaled


def fuse(model: ir.Model) -> None:
    """Fuse RMS normalizations and rotary embeddings in place."""
    graph = model.graph
    tables: dict[ir.Value, tuple[ir.Value, ...]] = {}
    for node in list(graph):
        if node.op_type == "Mul":
            _fuse_normalization(graph, node)
        elif node.op_type == "Add":
            _fuse_rotation(graph, node, tables)
    passes.RemoveUnusedNodesPass()(model)
    if any(node.domain == MICROSOFT for node in graph):
        model.opset_imports[MICROSOFT] = 1


def _fuse_normalization(graph: ir.Graph, node: ir.Node) -> None:
    """Replace `w * (x * (1 / sqrt(mean(x ** 2) + epsilon)))` by one node, which also gives the factor of each row.

    x: float32 [..., D]; w: [D], an input or a constant. The gradient reads the factor.
    """
    match = match_normalized(node)
    found = scaled(node.outputs[0])
    if match is None or match.factor is None or found is None or match.value.dtype is not ir.DataType.FLOAT:
        return
    x, reciprocal = match.value, match.factor.producer()
    scale, result = found
    if reciprocal is None or scale.producer() is not None or x.shape is None or scale.shape != x.shape[-1:]:
        return
    attributes = [ir.AttrInt64("axis", -1), ir.AttrFloat32("epsilon", match.epsilon), ir.AttrInt64("stash_type", 1)]
    name = f"{reciprocal.name}:normalization"
    fused = ir.Node("", "SimplifiedLayerNormalization", [x, scale], attributes, num_outputs=2, name=name)
    ir.convenience.replace_nodes_and_values(graph, reciprocal, [], [fused], [result, match.factor], fused.outputs)


def _fuse_rotation(graph: ir.Graph, node: ir.Node, tables: dict[ir.Value, tuple[ir.Value, ...]]) -> None:
    """Replace `x * cos + concat(-x[..., D/2:], x[..., :D/2]) * sin` by one node.

    x: float32 [B, N, S, D]; cos, sin: [1, 1, S, D], of angles whose two halves are the same.
    """
    rotation = match_rotation(node)
    concat = None if rotation is None else producer(rotation.turned)
    if rotation is None or concat is None or rotation.value.shape is None or rotation.value.shape.rank() != 4:
        return
    size = rotation.value.shape[3]
    halves = [value.shape[3] for value in concat.inputs if value is not None and value.shape is not None]
    angles = _angles(rotation.cosine, "Cos")
    if not isinstance(size, int) or [2 * half for half in halves] != [size, size]:
        return
    if angles is None or angles is not _angles(rotation.sine, "Sin"):
        return
    if angles not in tables:
        tables[angles] = _tables(graph, angles)
    fused = ir.Node(MICROSOFT, "RotaryEmbedding", [rotation.value, *tables[angles]], name=f"{node.name}:rotation")
    ir.convenience.replace_nodes_and_values(graph, node, [], [fused], node.outputs, fused.outputs)


def _angles(value: ir.Value | None, function: str) -> ir.Value | None:
    """Return the angles, [1, S, D/2], that occur twice in the argument of the cosine or sine `value`: [1, 1, S, D]."""
    unsqueeze = producer(value, "Unsqueeze")
    computed = producer(unsqueeze.inputs[0], function) if unsqueeze else None
    twice = producer(computed.inputs[0], "Concat") if computed else None
    if not unsqueeze or not twice or len(twice.inputs) != 2 or twice.inputs[0] is not twice.inputs[1]:
        return None
    half, axes = twice.inputs[0], constant(unsqueeze.inputs[1])
    if half is None or half.shape is None or not half.shape.is_static() or half.dtype is not ir.DataType.FLOAT:
        return None
    is_last = attribute(twice, "axis") in (-1, 2) and axes is not None and axes.ravel().tolist() == [1]
    return half if is_last and half.shape.rank() == 3 and half.shape[0] == 1 else None


def _tables(graph: ir.Graph, angles: ir.Value) -> tuple[ir.Value, ...]:
    """Insert the first position, and the cosines and sines of all positions, [S, D/2], after the angles."""
    name = f"{angles.name}_table"
    first = ir.node("Constant", [], {"value": ir.tensor(np.zeros(1, np.int64), name=f"{name}_first")})
    axis = ir.node("Constant", [], {"value": ir.tensor(np.zeros(1, np.int64), name=f"{name}_axis")})
    flat = ir.node("Squeeze", [angles, axis.outputs[0]])
    cosine, sine = (ir.node(function, [flat.outputs[0]]) for function in ("Cos", "Sin"))
    nodes = [first, axis, flat, cosine, sine]
    for index, node in enumerate(nodes):
        node.name = f"{name}:{node.op_type}_{index}"
        node.outputs[0].name = f"{name}_{node.op_type}_{index}"
    producing = angles.producer()
    if producing is not None:
        graph.insert_after(producing, nodes)
    else:
        graph.insert_before(graph[0], nodes)
    return first.outputs[0], cosine.outputs[0], sine.outputs[0]
