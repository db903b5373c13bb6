"""Take a maximum before the activations whose order it keeps: they then have as many elements as there are maxima.

The vectors of SPLADE are `max(log1p(relu(x)))` over the tokens of a text, for each word. relu and log1p never decrease,
so that it is `log1p(relu(max(x)))`, with a fraction of the memory, forward and backward. This is done before autograd,
which then derives the gradient of the smaller form. The two differ in one case: if log1p rounds two inputs to the same
number, the larger of the two gets the gradient, and not the first one.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch.nn import functional

from onnxtool.torch_backend.lower import attempted

_RELU = (torch.relu, functional.relu, "relu", torch.relu_, "relu_")
_LOG1P = (torch.log1p, "log1p", "log1p_")  # never decreases where it is defined; after relu, it always is
_IN_PLACE = (torch.relu_, "relu_", "log1p_")
_FRESH = (operator.mul, torch.mul, "mul", *_RELU, *_LOG1P)
"""Results that share no memory with another tensor, so in-place writes are not visible elsewhere."""
_MAXIMUM = (torch.max, "max")  # amax gives its gradient to all that are as large, also to those that relu makes so
_MODES = ("_enter_autocast", "_exit_autocast", "_set_grad_enabled")


def take_maximum_first(graph: torch.fx.Graph) -> bool:
    """Move activations behind the maximum that reads them, in a graph of TorchDynamo; return whether any was moved."""
    modes = _numbers_of_modes(graph)
    moved = False
    for node in list(graph.nodes):
        match = attempted(_maximum_of_activations, node)
        if match is None:
            continue
        result, chain = match
        if not chain or len({modes[part] for part in (*chain, node, result)}) > 1:
            continue
        node.replace_input_with(chain[0], chain[-1].args[0])
        users, last = list(result.users), result
        for activation in reversed(chain):
            with graph.inserting_after(last):
                function = torch.relu if activation.target in _RELU else torch.log1p
                last = graph.call_function(function, (last,))
        for user in users:
            user.replace_input_with(result, last)
        for activation in chain:
            graph.erase_node(activation)
        moved = True
    return moved


def _maximum_of_activations(node: torch.fx.Node) -> tuple[torch.fx.Node, list[torch.fx.Node]] | None:
    """Return the node with the maxima that `node` takes, and the activations before it."""
    result = _result(node)
    return None if result is None else (result, _activations(node.args[0]))


def _numbers_of_modes(graph: torch.fx.Graph) -> dict[torch.fx.Node, int]:
    """Return for each node how often autocast or the recording of gradients was switched before it."""
    numbers, switches = {}, 0
    for node in graph.nodes:
        switches += getattr(node.target, "__name__", "") in _MODES
        numbers[node] = switches
    return numbers


def _result(node: torch.fx.Node) -> torch.fx.Node | None:
    """Return the node with the maxima, if `node` takes maxima over dimensions whose positions are not read."""
    has_dimension = "dim" in node.kwargs or (len(node.args) > 1 and not isinstance(node.args[1], torch.fx.Node))
    if not has_dimension or not node.args or not isinstance(node.args[0], torch.fx.Node):
        return None
    users = list(node.users)
    is_alone = len(users) == 1 and users[0].target is operator.getitem and users[0].args[1] == 0
    return users[0] if _calls(node, _MAXIMUM) and is_alone else None


def _calls(node: object, targets: Sequence[object]) -> bool:
    """Return whether `node` is a call of one of these functions or methods."""
    return isinstance(node, torch.fx.Node) and node.op in ("call_function", "call_method") and node.target in targets


def _activations(node: object) -> list[torch.fx.Node]:
    """Return the chain of activations that ends in `node`, the last one first; empty if its first one is not relu."""
    chain: list[torch.fx.Node] = []
    while isinstance(node, torch.fx.Node) and _calls(node, (*_RELU, *_LOG1P)) and len(node.users) == 1:
        source = node.args[0]
        is_in_place = node.target in _IN_PLACE or True in (*node.args[1:], *node.kwargs.values())
        if is_in_place and not (_calls(source, _FRESH) and len(source.users) == 1):
            break
        chain.append(node)
        node = source
    while chain and chain[-1].target not in _RELU:
        chain.pop()
    return chain
