"""Operators that stay in PyTorch where they are large: one kernel takes one pass over memory, and ONNX several.

A cut of a graph costs some 20 to 50 microseconds, so small ones become ONNX. Measured as whole training steps with
scripts/bench_torch_backend.py: those of which a step gets no faster are not here, such as the gradients of softmax and
SiLU, and layer normalization itself.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch

from onnxtool.torch_backend.lower.fx_rewrites.rewriter import Node
from onnxtool.torch_backend.sizes import MANY_ELEMENTS

aten = torch.ops.aten

FUSED = "one kernel of PyTorch takes a pass over memory where ONNX takes several"
_DTYPES = (torch.float32, torch.float64)

Condition = Callable[[Node, Mapping[Node, str]], bool]
"""Takes a large node and what is known to stay in PyTorch before it."""


def kernel_is_faster(node: Node, stay: Mapping[Node, str]) -> bool:
    """Whether the node stays in PyTorch for its kernel; `stay` holds those before it that stay, for whatever reason."""
    condition = _CONDITIONS.get(node.target)
    return (
        condition is not None
        and _is_large([item.meta.get("val") for item in node.all_input_nodes])
        and (condition(node, stay))
    )


def unless_large(decompositions: dict[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """Return the table with decompositions that leave large operators as they are, where PyTorch's kernel is faster."""
    ours = {op: _small_only(decompositions[op]) for op in _CONDITIONS if op in decompositions}
    return {**decompositions, **ours}


def _small_only(decompose: Callable[..., Any]) -> Callable[..., Any]:
    def decompose_small(*arguments: Any, **options: Any) -> Any:
        if _is_large([*arguments, *options.values()]):
            return NotImplemented  # what the protocol of decompositions asks for
        return decompose(*arguments, **options)

    return decompose_small


def _is_large(values: list[object]) -> bool:
    """Whether some value is a real tensor of the CPU with many elements, known before the call."""
    return any(
        isinstance(value, torch.Tensor)
        and value.device.type == "cpu"
        and value.dtype in _DTYPES
        and all(isinstance(size, int) for size in value.shape)
        and value.numel() >= MANY_ELEMENTS
        for value in values
    )


def _always(_node: Node, _stay: Mapping[Node, str]) -> bool:
    return True


def _gives_places(node: Node, _stay: Mapping[Node, str]) -> bool:
    """Whether someone asks for the places of the maxima: onnxruntime's kernel for maxima alone is fast."""
    return any(user.target is operator.getitem and user.args[1] == 1 for user in node.users)


def _is_enclosed(node: Node, stay: Mapping[Node, str]) -> bool:
    """Whether the node is between two that stay: a session for it alone is slower than its own kernel."""
    return any(source in stay for source in node.all_input_nodes) and any(
        kernel_is_faster(user, stay) for user in node.users
    )


_CONDITIONS: dict[object, Condition] = {
    aten.gelu_backward.default: _always,
    aten.native_layer_norm_backward.default: _always,
    aten._native_batch_norm_legit_functional.default: _always,
    aten.native_batch_norm_backward.default: _always,
    aten.threshold_backward.default: _always,
    aten.max_pool2d_with_indices.default: _gives_places,
    aten.max_pool2d_with_indices_backward.default: _always,
    aten.relu.default: _is_enclosed,
}
