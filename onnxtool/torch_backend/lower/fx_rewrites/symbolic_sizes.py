"""Numbers that Python computes from sizes: read off the inputs of a graph, and given to operators as tensors.

Both keep a graph in one partition: the size of an inner tensor is known before the tensor is, and a tensor of one
element can be an input of a session where a float of double precision cannot.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

import sympy
import torch
from torch.utils._sympy.functions import FloorDiv

from onnxtool.torch_backend.nodes import Node

aten = torch.ops.aten

_SIZES = (aten.sym_size.int, aten.sym_numel.default)
_ARITHMETIC = {
    aten.add.Tensor: aten.add.Tensor,
    aten.sub.Tensor: aten.sub.Tensor,
    aten.mul.Tensor: aten.mul.Tensor,
    aten.div.Tensor: aten.div.Tensor,
    torch.ops.prims.div.default: aten.div.Tensor,  # of equal shapes only
}
_OPERATORS: dict[type[sympy.Basic], Callable[..., object]] = {
    sympy.Add: operator.add,
    sympy.Mul: operator.mul,
    FloorDiv: operator.floordiv,
}


def rewrite_symbolic_sizes(graph: torch.fx.Graph) -> None:
    """Rewrite how `graph`, whose nodes have fake values as `meta["val"]`, computes with sizes."""
    inputs = {
        node.meta["val"].node.expr: node
        for node in graph.find_nodes(op="placeholder")
        if isinstance(node.meta.get("val"), torch.SymInt)
    }
    for node in list(graph.nodes):
        if node.target in _SIZES and node.args[0].op != "placeholder":
            _compute_from_inputs(graph, node, inputs)
        elif node.target in _ARITHMETIC:
            _take_tensor(graph, node)


def _compute_from_inputs(graph: torch.fx.Graph, node: Node, inputs: dict[sympy.Basic, Node]) -> None:
    """Replace the size of a tensor by the same arithmetic of the sizes that are inputs, where all of them are there."""
    value = node.meta.get("val")
    if not isinstance(value, torch.SymInt) or not _is_known(value.node.expr, inputs):
        return
    with graph.inserting_before(node):
        result = _built(graph, value.node.expr, inputs)
    if isinstance(result, torch.fx.Node):
        node.replace_all_uses_with(result)
        graph.erase_node(node)


def _is_known(expression: sympy.Basic, inputs: dict[sympy.Basic, Node]) -> bool:
    if expression in inputs or isinstance(expression, sympy.Integer):
        return True
    return type(expression) in _OPERATORS and all(_is_known(part, inputs) for part in expression.args)


def _built(graph: torch.fx.Graph, expression: sympy.Basic, inputs: dict[sympy.Basic, Node]) -> Node | int:
    if isinstance(expression, sympy.Integer):
        return int(expression)
    if expression not in inputs:
        parts = [_built(graph, part, inputs) for part in expression.args]
        inputs[expression] = functools.reduce(functools.partial(_call, graph, _OPERATORS[type(expression)]), parts)
    return inputs[expression]


def _call(graph: torch.fx.Graph, function: Callable[..., object], *arguments: Node | int) -> Node:
    node = graph.call_function(function, arguments)
    node.meta["val"] = function(*(part.meta["val"] if isinstance(part, torch.fx.Node) else part for part in arguments))
    return node


def _take_tensor(graph: torch.fx.Graph, node: Node) -> None:
    """Replace a float beside a tensor by a tensor of one element, of the type in which PyTorch computes."""
    tensors = [source for source in node.all_input_nodes if isinstance(source.meta.get("val"), torch.Tensor)]
    floats = [source for source in node.all_input_nodes if isinstance(source.meta.get("val"), torch.SymFloat)]
    if (len(tensors), len(floats)) != (1, 1) or node.kwargs:
        return
    like = tensors[0].meta["val"]
    if like.dtype not in (torch.float32, torch.float64):
        return
    with graph.inserting_before(node):
        number = graph.call_function(
            aten.scalar_tensor.default, (floats[0],), {"dtype": like.dtype, "device": like.device}
        )
    number.meta["val"] = like.new_empty(())
    node.replace_input_with(floats[0], number)
    node.target = _ARITHMETIC[node.target]
