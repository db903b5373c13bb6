"""Which large operators stay in PyTorch, because one kernel takes one pass over memory and ONNX takes several."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch

from onnxtool.torch_backend.lower.decisions import FusedKernel, decision
from onnxtool.torch_backend.nodes import MANY_ELEMENTS, Node, is_seen, seen_elements

_DTYPES = (torch.float32, torch.float64)


def kernel_is_faster(node: Node, stay: Mapping[Node, str]) -> bool:
    """Whether the node stays in PyTorch for its kernel; `stay` holds the nodes before it that stay for any reason."""
    when = decision(node.target).fused_kernel
    if when is None or not _is_large([item.meta.get("val") for item in node.all_input_nodes]):
        return False
    if when is FusedKernel.WITH_INDICES:
        return any(user.target is operator.getitem and user.args[1] == 1 for user in node.users)
    if when is FusedKernel.BETWEEN_OTHERS:
        return any(source in stay for source in node.all_input_nodes) and any(
            kernel_is_faster(user, stay) for user in node.users
        )
    return True


def small_only(decompose: Callable[..., Any]) -> Callable[..., Any]:
    """Return the decomposition for small operators; large ones are left as they are."""

    def decompose_small(*arguments: Any, **options: Any) -> Any:
        if _is_large([*arguments, *options.values()]):
            return NotImplemented  # the protocol of decompositions
        return decompose(*arguments, **options)

    return decompose_small


def _is_large(values: list[object]) -> bool:
    """Whether some value is a real tensor of the CPU with many elements, at the first call where sizes are dynamic.

    Asking a dynamic size itself would make a graph for small sizes and one for large ones.
    """
    return any(
        isinstance(value, torch.Tensor)
        and value.device.type == "cpu"
        and value.dtype in _DTYPES
        and is_seen(value)
        and seen_elements(value) >= MANY_ELEMENTS
        for value in values
    )
