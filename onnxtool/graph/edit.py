"""Match and replace parts of an onnx_ir graph; `writer` adds new ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import onnx_ir as ir
from numpy.typing import NDArray

# Larger tensors are weights, which patterns never read.
_LARGEST_CONSTANT = 1024


def producer(value: ir.Value | None, *operators: str, domain: str = "") -> ir.Node | None:
    """Return the node that computes `value` if it is one of `operators` (any operator if none are given), else None."""
    node = None if value is None else value.producer()
    if node is None or node.domain != domain or (operators and node.op_type not in operators):
        return None
    return node


def bodies(node: ir.Node) -> list[ir.Graph]:
    """Return the subgraphs of a node: branches of an If, the body of a Loop or Scan."""
    graphs: list[ir.Graph] = []
    for attribute in node.attributes.values():
        if attribute.type is ir.AttributeType.GRAPH:
            graphs.append(attribute.as_graph())
        elif attribute.type is ir.AttributeType.GRAPHS:
            graphs.extend(attribute.as_graphs())
    return graphs


def reads(node: ir.Node) -> list[ir.Value | None]:
    """Return the values that a node reads: its inputs, then values its subgraphs may read from outside, each once."""
    inside: dict[ir.Value | None, None] = {}
    for body in bodies(node):
        for inner in body:
            inside.update(dict.fromkeys(reads(inner)))
        inside.update(dict.fromkeys(body.outputs))
    return [*node.inputs, *inside]


def only_consumer(value: ir.Value, *operators: str, domain: str = "") -> ir.Node | None:
    """Return the only node that reads `value` if it is one of `operators`, else None.

    Graph outputs and uses inside subgraphs count as uses.
    """
    uses = list(value.uses())
    if len(uses) != 1 or value.is_graph_output():
        return None
    node = uses[0][0]
    if node.domain != domain or node.graph is not value_graph(value) or (operators and node.op_type not in operators):
        return None
    return node


def value_graph(value: ir.Value) -> ir.Graph | ir.Function | None:
    """Return the graph that computes `value`."""
    node = value.producer()
    return value.graph if node is None else node.graph


def constant(value: ir.Value | None, most: int = _LARGEST_CONSTANT) -> NDArray[Any] | None:
    """Return the array of a constant of at most `most` elements (initializer or Constant node); else None."""
    if value is None or value.is_graph_input():
        return None
    tensor = value.const_value
    if tensor is None:
        node = producer(value, "Constant")
        attribute = None if node is None else node.attributes.get("value")
        tensor = None if attribute is None else attribute.as_tensor()
    if tensor is None or tensor.size > most:
        return None
    array: NDArray[Any] = tensor.numpy()
    return array


def scalar(value: ir.Value | None) -> float | None:
    """Return the number in a one-element constant; None for any other value."""
    array = constant(value)
    return float(array.reshape(-1)[0]) if array is not None and array.size == 1 and array.dtype.kind in "fiu" else None


def is_weight(value: ir.Value | None, rank: int | None = None) -> bool:
    """Return whether `value` is an initializer that callers cannot replace, with `rank` axes if given."""
    if value is None or not value.is_initializer() or value.is_graph_input() or value.const_value is None:
        return False
    return rank is None or len(value.const_value.shape) == rank


def required(node: ir.Node, index: int) -> ir.Value:
    """Return a required input of a node.

    Raises:
        ValueError: it is omitted.
    """
    value = node.inputs[index]
    if value is None:
        raise ValueError(f"{node.name} has no input {index}")
    return value


def is_float(value: ir.Value) -> bool:
    """Return whether `value` is float32 or float16, the dtypes of onnxruntime's fused operators."""
    return value.dtype in (ir.DataType.FLOAT, ir.DataType.FLOAT16)


def tensor_of(weight: ir.Value) -> ir.TensorProtocol:
    """Return the tensor of an initializer; its bytes stay on disk until they are read.

    Raises:
        ValueError: `weight` is not an initializer.
    """
    if weight.const_value is None:
        raise ValueError(f"{weight.name} is no initializer")
    return weight.const_value


def is_made_on_saving(tensor: ir.TensorProtocol) -> bool:
    """Return whether a tensor is recomputed at each read, like the tensors that passes compute from weights."""
    return isinstance(tensor, ir.LazyTensor)


def operands(node: ir.Node, wanted: Callable[[ir.Value], Any]) -> tuple[ir.Value, ir.Value] | None:
    """Return both inputs of a commutative node, the one that `wanted` accepts first; None if it accepts neither."""
    if len(node.inputs) != 2:
        return None
    first, second = node.inputs
    if first is None or second is None:
        return None
    if wanted(first):
        return first, second
    return (second, first) if wanted(second) else None


def attribute(node: ir.Node, name: str, default: Any = None) -> Any:
    """Return the value of an attribute (a number, a string, or a list of numbers), or `default` if it is not set."""
    held = node.attributes.get(name)
    if held is None:
        return default
    return list(held.value) if isinstance(held.value, tuple) else held.value


def reduced_axes(node: ir.Node) -> list[int] | None:
    """Return the axes of a reduction, which are an input in newer opsets; None if absent or not fixed."""
    if len(node.inputs) < 2:
        listed: list[int] | None = attribute(node, "axes")
        return listed
    axes = constant(node.inputs[1])
    return None if axes is None else [int(axis) for axis in axes.reshape(-1)]


def is_closed(nodes: Sequence[ir.Node], result: ir.Value) -> bool:
    """Return whether the outputs of `nodes`, except `result`, are read only by `nodes` and are not graph outputs."""
    inside = set(nodes)
    inner = [output for node in nodes for output in node.outputs if output is not result]
    return all(not value.is_graph_output() and all(reader in inside for reader, _ in value.uses()) for value in inner)


def replace(old: ir.Value, new: ir.Value) -> None:
    """Replace `old` with `new` in all its consumers; a graph output keeps its name."""
    if new.type is None:
        new.type = old.type
    if new.shape is None:
        new.shape = old.shape
    if old.is_graph_output():
        name, old.name = old.name, None
        if new.is_graph_output() or new.producer() is None or new.is_initializer():
            raise ValueError(f"{new.name} cannot replace the graph output {name}")
        new.name = name
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)


def replace_by_constant(output: ir.Value, tensor: ir.TensorProtocol, graph: ir.Graph) -> None:
    """Let the readers of a value read an initializer of its name instead."""
    name, output.name = output.name, None
    tensor.name = name
    constant_value = ir.val(str(name), const_value=tensor)
    graph.register_initializer(constant_value)
    output.replace_all_uses_with(constant_value)


def bypass(node: ir.Node, value: ir.Value | None) -> bool:
    """Replace the only output of `node` with `value`, which the node reads, and remove the node.

    Returns:
        False if a graph output needs the node.
    """
    output, graph = node.outputs[0], node.graph
    if value is None or graph is None:
        return False
    source = value.producer()
    if output.is_graph_output() and (source is None or source.graph is not graph or value.is_graph_output()):
        return False
    replace(output, value)
    graph.remove(node, safe=True)
    return True


def remove_unused(graph: ir.Graph, nodes: Sequence[ir.Node]) -> int:
    """Remove those of `nodes` and their ancestors whose outputs are unused; return the number removed."""
    removed = 0
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node.graph is None or any(output.uses() or output.is_graph_output() for output in node.outputs):
            continue
        waiting.extend(above for value in node.inputs if value is not None and (above := value.producer()) is not None)
        graph.remove(node, safe=True)
        removed += 1
    return removed


def replace_and_erase(old: ir.Value, new: ir.Value) -> None:
    """Replace `old` with `new` under the name of `old`, and remove the nodes that only `old` needed.

    The name is kept because previously inferred shapes are looked up by it.
    """
    node, name = old.producer(), old.name
    replace(old, new)
    if node is not None and node.graph is not None and remove_unused(node.graph, [node]):
        new.name = name


def drop_unused(initializers: Iterable[ir.Value]) -> None:
    """Remove unread `initializers` from their graph."""
    for value in initializers:
        if value.graph is not None and not value.uses() and not value.is_graph_output():
            value.graph.initializers.pop(str(value.name), None)
