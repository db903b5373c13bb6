"""The graph of a step, forward and backward in one, as AOTAutograd traced it: cut in two."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

from onnxtool.torch_backend.nodes import Node, is_dropout_mask, is_random, is_uninitialized

_PURE_MODULES = ("_operator", "math", "torch")
"""Of what is called with sizes, and takes one result of several."""
_OF_DATA = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


def partition(joint: torch.fx.GraphModule, joint_inputs: Any, **arguments: Any) -> Any:
    """Cut a joint graph at its minimum; masks of dropout are saved, and not made again for the gradient.

    PyTorch's own pass that merges duplicates imports most of inductor, which costs 0.7 s (PyTorch 2.13).
    """
    from functorch.compile import config, min_cut_rematerialization_partition
    from torch.utils.checkpoint import CheckpointPolicy

    for node in joint.graph.nodes:
        if is_dropout_mask(node):
            node.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)
    if config.cse:
        merge_duplicates(joint.graph)
    with config.patch(cse=False):
        return min_cut_rematerialization_partition(joint, joint_inputs, **arguments)


def merge_duplicates(graph: torch.fx.Graph) -> None:
    """Let a call that repeats an earlier one be that one, as `torch._functorch.compile_utils.fx_graph_cse` does.

    Calls stay where a result of the graph shares their memory, since results are different tensors; where a change of a
    tensor is between them; and where they draw numbers, leave memory as it is or have sizes that depend on data.
    """
    (output,) = graph.find_nodes(op="output")
    returned = {storage for node in output.all_input_nodes if (storage := _storage(node)) is not None}
    seen: dict[Hashable, Node] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
            seen.clear()
        elif _is_pure(node) and _storage(node) not in returned:
            first = seen.setdefault((node.target, _frozen(node.args), _frozen(node.kwargs)), node)
            if first is not node:
                node.replace_all_uses_with(first)
                graph.erase_node(node)


def _is_pure(node: Node) -> bool:
    """Whether a second call with the same arguments gives the same result."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return getattr(node.target, "__module__", "") in _PURE_MODULES
    return not (is_random(node) or is_uninitialized(node) or _OF_DATA.intersection(node.target.tags))


def _storage(node: Node) -> int | None:
    """Return what identifies the memory of a node's fake tensor; None where it has none."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    try:
        storage: int = value.untyped_storage()._cdata
    except NotImplementedError:  # sparse, for example
        return None
    return storage


def _frozen(argument: object) -> Hashable:
    """Return an argument as a key: 1, 1.0 and True are different, and so are 0.0 and -0.0."""
    if isinstance(argument, list | tuple):
        return (type(argument), *map(_frozen, argument))
    if isinstance(argument, dict):
        return tuple((name, _frozen(value)) for name, value in argument.items())
    if isinstance(argument, torch.fx.Node):
        node: Hashable = argument
        return node
    return type(argument), repr(argument)
