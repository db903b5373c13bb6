"""Cut a graph where all paths from an input to an output meet: between layers, and between the parts of a layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

import onnx_ir as ir
from onnx_ir import Model as Model

from onnxtool.errors import InputError
from onnxtool.graph.edit import reads
from onnxtool.graph.shapes import fill_types

_MOST_INPUTS = 4  # that are tried
_FLOATS = frozenset((ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16))
_NARROW = frozenset(
    getattr(ir.DataType, name) for name in ("INT8", "UINT8", "INT4", "UINT4", "INT2", "UINT2", "FLOAT8E4M3FN")
)


class Chain(NamedTuple):
    """The values through which every path from an input to an output passes, in order, and the nodes between them.

    The last of `nodes` compute the output from the last value.
    """

    source: ir.Value
    end: ir.Value
    values: Sequence[ir.Value]
    nodes: Sequence[Sequence[ir.Node]]


def find_chain(model: ir.Model, end: str, source: str = "") -> Chain:
    """Return the chain from an input to an output: from the one with the longest chain if none is named.

    Raises:
        InputError: there is none.
    """
    fill_types(model)
    inputs = [value for value in model.graph.inputs if source in ("", value.name)][:_MOST_INPUTS]
    nodes = [node for node in model.graph if node.op_type != "Shape"]  # sizes are no content: they belong to no layer
    outputs = [value for value in model.graph.outputs if value.name == end]
    chains = [_chain(nodes, first, last) for first in inputs for last in outputs]
    longest = max((chain for chain in chains if chain is not None), key=lambda chain: len(chain.values), default=None)
    if longest is None or not longest.values:
        raise InputError(
            f"no layers are found: no value lies on all paths from an input to the output {end}",
            "compare the outputs alone, without --layers",
        )
    return longest


def _chain(nodes: Sequence[ir.Node], source: ir.Value, end: ir.Value) -> Chain | None:
    """Sweep over the nodes between two values: where one value alone is still to be read, all paths meet.

    Where the paths of a residual connection meet, those of its branch are followed as well.
    """
    reached: set[ir.Value | None] = {source}
    after = []
    for node in nodes:
        if not reached.isdisjoint(reads(node)):
            after.append(node)
            reached.update(node.outputs)
    if end not in reached:
        return None
    needed: set[ir.Value | None] = {end}
    left: Counter[ir.Value | None] = Counter([end])
    live: list[tuple[ir.Node, set[ir.Value | None]]] = []
    for node in reversed(after):
        if not needed.isdisjoint(node.outputs):
            operands = reached.intersection(reads(node))
            live.append((node, operands))
            needed |= operands
            left.update(operands)
    waiting: set[ir.Value | None] = {source}
    values: list[ir.Value] = []
    parts: list[Sequence[ir.Node]] = []
    part: list[ir.Node] = []
    start = source
    for node, operands in reversed(live):
        left.subtract(operands)
        waiting = {value for value in waiting if left[value]}
        results = [value for value in node.outputs if left[value]]
        branch = [value for value in operands if value is not None and value is not start]
        if not waiting and len(results) == 1 and (results[0].dtype in _FLOATS or results[0] is end):
            inner = _chain(part, start, branch[0]) if start in operands and len(branch) == 1 else None
            if inner is not None:
                values += [*inner.values, inner.end]
                parts += inner.nodes
                part = []
            start = results[0]
            values.append(start)
            parts.append([*part, node])
            part = []
        else:
            part.append(node)
        waiting.update(results)
    if not values or values[-1] is not end:
        return None
    return Chain(source, end, values[:-1], parts)


def show(graph: ir.Graph, value: ir.Value) -> str:
    """Add a value as a float32 output of the graph."""
    number = len(graph.outputs)
    node = ir.node("Cast", [value], {"to": ir.DataType.FLOAT.value}, name=f"layers/shown_{number}")
    node.outputs[0].name, node.outputs[0].dtype = str(node.name), ir.DataType.FLOAT
    graph.append(node)
    graph.outputs.append(node.outputs[0])
    return str(node.name)


def feed(graph: ir.Graph, value: ir.Value) -> str:
    """Let all nodes read a new float32 input instead of a value."""
    users = [(node, index) for node, index in value.uses() if not str(node.name).startswith("layers/")]
    number = len(graph.inputs)
    graph_input = ir.Value(name=f"layers/given_{number}", type=ir.TensorType(ir.DataType.FLOAT))
    graph.inputs.append(graph_input)
    node = ir.node("Cast", [graph_input], {"to": value.dtype.value if value.dtype else 1}, name=f"layers/cast_{number}")
    node.outputs[0].name = str(node.name)
    graph.insert_before(graph[0], node)
    for user, index in users:
        user.replace_input_with(index, node.outputs[0])
    return str(graph_input.name)


def scopes_of(nodes: Sequence[ir.Node]) -> list[str]:
    """Return the modules of nodes, by the names of what they compute and of their weights."""
    scopes = []
    for node in nodes:
        names = [str(node.name or ""), *(str(value.name) for value in node.outputs)]
        scope = next((scope for name in names if (scope := _scope(name))), "")
        weights = [str(value.name) for value in node.inputs if value is not None and value.is_initializer()]
        weight = next((name for name in weights if "." in name and "/" not in name), "")
        scopes.append(scope or weight.rpartition(".")[0])
    return [scope for scope in scopes if scope]


def _scope(name: str) -> str:
    if "/" not in name:
        return ""
    path = name.strip("/").rpartition("/")[0] if name.startswith("/") else name.partition("/")[0]
    return path.replace("/", ".")


def precision_of(nodes: Sequence[ir.Node], live: Collection[ir.Node]) -> str:
    """Return the narrowest type in which nodes compute, or which their weights have."""
    types, waiting = set(), list(nodes)
    while waiting:
        node = waiting.pop()
        types |= {value.dtype for value in (*node.inputs, *node.outputs) if value is not None}
        makers = (value.producer() for value in node.inputs if value is not None)
        waiting += [maker for maker in makers if maker is not None and maker not in live]
    if types & _NARROW:
        return "int8"
    return "fp16" if types & {ir.DataType.FLOAT16, ir.DataType.BFLOAT16} else "fp32"


def kind_of(node: ir.Node) -> str:
    """Describe what a node computes: its operator, and the shapes and types of its weights."""
    weights = (value for value in node.inputs if value is not None and value.is_initializer())
    return f"{node.op_type} {[(str(value.dtype), str(value.shape)) for value in weights]}"
