"""Make nodes around traced graphs: of a loop over tokens, or of a choice between two graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import onnx_ir as ir


class Nodes:
    """Makes nodes in their order, under names that are unique in the model."""

    def __init__(self, scope: str, constants: dict[str, ir.Value]) -> None:
        self.nodes: list[ir.Node] = []
        self.constants = constants
        self._scope = scope

    def __call__(self, op_type: str, *inputs: ir.Value, **attributes: int | list[int]) -> ir.Value:
        """Make a node after those before it, and return its output."""
        import onnx_ir as ir

        name = f"{self._scope}/{op_type}_{len(self.nodes)}"
        node = ir.node(op_type, list(inputs), attributes, name=name)
        node.outputs[0].name = f"{name}/output"
        self.nodes.append(node)
        return node.outputs[0]

    def constant(self, name: str, value: Any) -> ir.Value:
        """Return an initializer of the outer graph: the same one for the same name."""
        import onnx_ir as ir

        name = f"tokens/{name}"
        if name not in self.constants:
            tensor = ir.tensor(np.asarray(value), name=name)
            kind, shape = ir.TensorType(tensor.dtype), ir.Shape(tensor.shape.numpy())
            self.constants[name] = ir.Value(name=name, const_value=tensor, type=kind, shape=shape)
        return self.constants[name]


def new_value(name: str, dtype: ir.DataType | None, shape: list[int] | None = None) -> ir.Value:
    """Return a value that no node makes: an input."""
    import onnx_ir as ir

    kind = None if dtype is None else ir.TensorType(dtype)
    return ir.Value(name=name, type=kind, shape=None if shape is None else ir.Shape(shape))
