"""Fuses what onnxruntime has one kernel for, and what its own optimizer does not see in the graphs of this backend."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as passes

_CONTRIBUTED = "com.microsoft"


def fuse(model: ir.Model) -> None:
    """Fuse RMS normalizations and rotary embeddings in place."""
    graph = model.graph
    tables: dict[ir.Value, tuple[ir.Value, ...]] = {}
    for node in list(graph):
        if node.op_type == "Reciprocal":
            _fuse_normalization(graph, node)
        elif node.op_type == "Add":
            _fuse_rotation(graph, node, tables)
    passes.RemoveUnusedNodesPass()(model)
    if any(node.domain == _CONTRIBUTED for node in graph):
        model.opset_imports[_CONTRIBUTED] = 1


def _fuse_normalization(graph: ir.Graph, reciprocal: ir.Node) -> None:
    """Replace `w * (x * (1 / sqrt(mean(x ** 2) + epsilon)))` by one node, which gives the factor of each row as well.

    x: float32 [..., D]; w: [D]. The gradient takes the factor.
    """
    root = _producer(reciprocal.inputs[0], "Sqrt")
    total = _producer(root.inputs[0], "Add") if root else None
    for mean_value, epsilon_value in _both_orders(total):
        mean, epsilon = _producer(mean_value, "ReduceMean"), _number(epsilon_value)
        square = _producer(mean.inputs[0], "Pow") if mean else None
        if not mean or not square or epsilon is None or not _is_over_the_last(mean) or _number(square.inputs[1]) != 2:
            continue
        x, factor = square.inputs[0], reciprocal.outputs[0]
        found = _scaled(x, factor)
        if found is None:
            return
        weight, result = found
        attributes = [ir.AttrInt64("axis", -1), ir.AttrFloat32("epsilon", epsilon), ir.AttrInt64("stash_type", 1)]
        name = f"{reciprocal.name}:normalization"
        fused = ir.Node("", "SimplifiedLayerNormalization", [x, weight], attributes, num_outputs=2, name=name)
        ir.convenience.replace_nodes_and_values(graph, reciprocal, [], [fused], [result, factor], fused.outputs)
        return


def _scaled(x: ir.Value | None, factor: ir.Value) -> tuple[ir.Value, ir.Value] | None:
    """Return w and the result of `w * (x * factor)`, where w is there from the start and nobody reads the inner one."""
    for inner in [use.node for use in factor.uses() if use.node.op_type == "Mul"]:
        value = inner.outputs[0]
        readers = [use.node for use in value.uses()]
        if x not in inner.inputs or len(readers) != 1 or readers[0].op_type != "Mul" or value.is_graph_output():
            continue
        for weight, other in _both_orders(readers[0]):
            if other is value and weight is not None and weight is not value and _has_last_size(weight, x):
                return weight, readers[0].outputs[0]
    return None


def _has_last_size(weight: ir.Value, x: ir.Value | None) -> bool:
    """Whether the weight is an input or a constant, with a number for each feature of x."""
    return weight.producer() is None and x is not None and x.shape is not None and weight.shape == x.shape[-1:]


def _is_over_the_last(mean: ir.Node) -> bool:
    source, keeps = mean.inputs[0], mean.attributes.get("keepdims")
    axes = _constant(mean.inputs[1]) if len(mean.inputs) > 1 else None
    if source is None or source.shape is None or axes is None or (keeps is not None and not keeps.as_int()):
        return False
    return source.dtype is ir.DataType.FLOAT and axes.ravel().tolist() in ([-1], [source.shape.rank() - 1])


def _fuse_rotation(graph: ir.Graph, total: ir.Node, tables: dict[ir.Value, tuple[ir.Value, ...]]) -> None:
    """Replace `x * cos + concat(-x[..., D/2:], x[..., :D/2]) * sin` by one node.

    x: float32 [B, N, S, D]; cos, sin: [1, 1, S, D], of angles whose two halves are the same.
    """
    for straight, crossed in _both_orders(total):
        for x, cosine in _both_orders(_producer(straight, "Mul")):
            for turned, sine in _both_orders(_producer(crossed, "Mul")):
                angles = _angles(cosine, "Cos")
                if angles is None or angles is not _angles(sine, "Sin") or not _is_turned(turned, x):
                    continue
                if angles not in tables:
                    tables[angles] = _tables(graph, angles)
                name = f"{total.name}:rotation"
                fused = ir.Node(_CONTRIBUTED, "RotaryEmbedding", [x, *tables[angles]], name=name)
                ir.convenience.replace_nodes_and_values(graph, total, [], [fused], total.outputs, fused.outputs)
                return


def _angles(value: ir.Value | None, function: str) -> ir.Value | None:
    """Return the angles, [1, S, D/2], that occur twice in the argument of the cosine or sine `value`: [1, 1, S, D]."""
    added = _producer(value, "Unsqueeze")
    made = _producer(added.inputs[0], function) if added else None
    twice = _producer(made.inputs[0], "Concat") if made else None
    if not added or not twice or len(twice.inputs) != 2 or twice.inputs[0] is not twice.inputs[1]:
        return None
    half, axes = twice.inputs[0], _constant(added.inputs[1])
    if half is None or half.shape is None or not half.shape.is_static() or half.dtype is not ir.DataType.FLOAT:
        return None
    is_last = twice.attributes["axis"].as_int() in (-1, 2)
    return (
        half if is_last and half.shape.rank() == 3 and half.shape[0] == 1 and axes is not None and axes == [1] else None
    )


def _is_turned(value: ir.Value | None, x: ir.Value | None) -> bool:
    """Whether `value` is the second half of the last axis of x, negated, and then the first; x has four dimensions."""
    joined = _producer(value, "Concat")
    negated = _producer(joined.inputs[0], "Neg") if joined and len(joined.inputs) == 2 else None
    if not joined or not negated or x is None or x.shape is None or x.shape.rank() != 4:
        return False
    size = x.shape[3]
    if not isinstance(size, int) or size % 2 or joined.attributes["axis"].as_int() not in (-1, 3):
        return False
    return _part(negated.inputs[0], x, size) == (size // 2, size) and _part(joined.inputs[1], x, size) == (0, size // 2)


def _part(value: ir.Value | None, x: ir.Value, size: int) -> tuple[int, int] | None:
    """Return where a slice of the last axis of x begins and ends."""
    node = _producer(value, "Slice")
    if not node or node.inputs[0] is not x:
        return None
    numbers = [_number(one) for one in node.inputs[1:]]
    if len(numbers) not in (3, 4) or numbers[2] not in (-1, 3) or numbers[3:] not in ([], [1]):
        return None
    return (int(numbers[0]), min(int(numbers[1]), size)) if numbers[0] is not None and numbers[1] is not None else None


def _tables(graph: ir.Graph, angles: ir.Value) -> tuple[ir.Value, ...]:
    """Insert the place of the first position, and the cosines and sines of each, [S, D/2], behind the angles."""
    name = f"{angles.name}_table"
    first = ir.node("Constant", [], {"value": ir.tensor(np.zeros(1, np.int64), name=f"{name}_first")})
    axis = ir.node("Constant", [], {"value": ir.tensor(np.zeros(1, np.int64), name=f"{name}_axis")})
    flat = ir.node("Squeeze", [angles, axis.outputs[0]])
    cosine, sine = (ir.node(function, [flat.outputs[0]]) for function in ("Cos", "Sin"))
    nodes = [first, axis, flat, cosine, sine]
    for node in nodes:
        node.name = f"{name}:{node.op_type}_{nodes.index(node)}"
        node.outputs[0].name = f"{name}_{node.op_type}_{nodes.index(node)}"
    producer = angles.producer()
    if producer is not None:
        graph.insert_after(producer, nodes)
    else:
        graph.insert_before(graph[0], nodes)
    return first.outputs[0], cosine.outputs[0], sine.outputs[0]


def _both_orders(node: ir.Node | None) -> Iterator[tuple[ir.Value | None, ir.Value | None]]:
    """Yield the two inputs of a commutative node, as they are and the other way round; none where there is no node."""
    if node is not None:
        first, second = node.inputs
        yield first, second
        yield second, first


def _producer(value: ir.Value | None, op_type: str) -> ir.Node | None:
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type == op_type and not node.domain else None


def _constant(value: ir.Value | None) -> np.ndarray | None:
    tensor = ir.convenience.get_const_tensor(value) if value is not None else None
    return None if tensor is None else tensor.numpy()


def _number(value: ir.Value | None) -> float | None:
    constant = _constant(value)
    return float(constant.item()) if constant is not None and constant.size == 1 else None
