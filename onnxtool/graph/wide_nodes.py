"""Replace inputs of nodes with many inputs in constant time. Tested with onnx_ir 1.0 and 1.1."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

_NARROW = 64  # inputs


class _WideNode(ir.Node):
    """A node with its inputs in a list: onnx_ir's tuple is copied for each input that is replaced."""

    __slots__ = ()
    _inputs: Any

    def replace_input_with(self, index: int, value: Any) -> None:
        if not 0 <= index < len(self._inputs):
            raise ValueError(f"Index out of range: {index}")
        old, self._inputs[index] = self._inputs[index], value
        if old is not None:
            old._remove_usage(self, index)
        if value is not None:
            value._add_usage(self, index)

    def resize_inputs(self, new_size: int, /) -> None:
        self._inputs += [None] * (new_size - len(self._inputs))
        super().resize_inputs(new_size)


def ease_wide_nodes(model: ir.Model) -> None:
    """Let passes replace each input of a node with thousands of inputs, in time proportional to their number."""
    for node in model.graph.all_nodes():
        # Placement on several devices follows the inputs, which only onnx_ir's own method knows.
        if type(node) is ir.Node and len(node.inputs) > _NARROW and not getattr(node, "device_configurations", ()):
            node.__class__ = _WideNode
            node._inputs = list(node.inputs)  # type: ignore[assignment]  # by its new class
