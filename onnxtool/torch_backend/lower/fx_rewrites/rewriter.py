"""Rewrite a graph of ATen operators before it is partitioned: the same numbers with fewer passes over memory.

onnxruntime computes one operator after another, and most are limited by the memory they read and write.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._sympy.functions import FloorDiv

from onnxtool.torch_backend.lower import attempted
from onnxtool.torch_backend.lower.decisions import decision
from onnxtool.torch_backend.lower.fx_rewrites.arithmetic import empty_result, indexes_nothing
from onnxtool.torch_backend.nodes import Node, tensor_of
from onnxtool.torch_backend.own_translations import Translations, mark


def rewritten(owner: torch.fx.GraphModule, translations: Translations) -> torch.fx.GraphModule:
    """Return a copy of `owner`, whose nodes have fake values in `meta["val"]`, with all rewrites applied.

    Nodes of operators in `translations` call the user's own, and have no rewrites.

    An empty result becomes a constant, regardless of what computes it. All other rewrites are listed by operator in
    `lower/decisions.py`. One that fails at a node is left out there.
    """
    copies: dict[Node, Node] = {}
    graph = torch.fx.Graph()
    for node in owner.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        copies[node].meta = copy.copy(node.meta)
    mark(graph, translations)
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        for rewrite in (empty_result, *decision(node.target).fx_rewrites):
            replacement = attempted(rewrite, node)
            if replacement is not None and _same_kind(node, replacement):
                node.replace_all_uses_with(replacement)
                break
    graph.eliminate_dead_code(lambda node: node.is_impure() or indexes_nothing(node))
    return torch.fx.GraphModule(owner, graph, class_name="Rewritten")


def _same_kind(node: Node, replacement: Node) -> bool:
    """Return whether both return tensors of the same type, shape and layout, for all sizes of a dynamic graph."""
    ours, theirs = tensor_of(replacement), tensor_of(node)
    if ours is None or theirs is None or ours.dtype != theirs.dtype or ours.dim() != theirs.dim():
        return False
    numbers = zip((*ours.shape, *ours.stride()), (*theirs.shape, *theirs.stride()), strict=True)
    return all(statically_known_true(first == second) for first, second in numbers)


# Numbers that Python computes from sizes are read from graph inputs and passed to operators as tensors.
#
# Both keep a graph in one partition: an inner tensor's size is known before the tensor, and a one-element tensor can
# be a session input where a double-precision float cannot.


aten = torch.ops.aten

_SIZES = (aten.sym_size.int, aten.sym_numel.default)
_ARITHMETIC = {
    aten.add.Tensor: aten.add.Tensor,
    aten.sub.Tensor: aten.sub.Tensor,
    aten.mul.Tensor: aten.mul.Tensor,
    aten.div.Tensor: aten.div.Tensor,
    torch.ops.prims.div.default: aten.div.Tensor,  # for equal shapes only
}
_OPERATORS: dict[type[sympy.Basic], Callable[..., object]] = {
    sympy.Add: operator.add,
    sympy.Mul: operator.mul,
    FloorDiv: operator.floordiv,
}


def rewrite_symbolic_sizes(graph: torch.fx.Graph) -> None:
    """Rewrite size computations in `graph`, whose nodes have fake values in `meta["val"]`."""
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
    """Replace a tensor's size with the same arithmetic on input sizes, if all of them are available."""
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
        inputs[expression] = functools.reduce(functools.partial(_add_call, graph, _OPERATORS[type(expression)]), parts)
    return inputs[expression]


def _add_call(graph: torch.fx.Graph, function: Callable[..., object], *arguments: Node | int) -> Node:
    node = graph.call_function(function, arguments)
    node.meta["val"] = function(*(part.meta["val"] if isinstance(part, torch.fx.Node) else part for part in arguments))
    return node


def _take_tensor(graph: torch.fx.Graph, node: Node) -> None:
    """Replace a float operand next to a tensor with a one-element tensor, of the type that PyTorch computes in."""
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
