"""Which nodes of a model onnxruntime's CPU provider has no kernel for."""

from __future__ import annotations

import functools
from collections import defaultdict
from typing import Any

import onnx
import onnx_ir as ir
from onnxruntime.capi import _pybind_state as binding

from onnxtool.model_file.domains import default_opset


@functools.cache
def _kernels() -> dict[tuple[str, str], list[Any]]:
    """Return the kernels of the CPU provider by domain and operator."""
    table: dict[tuple[str, str], list[Any]] = defaultdict(list)
    for kernel in binding.get_registered_ep_kernel_defs("CPUExecutionProvider"):
        table[kernel.domain, kernel.op_name].append(kernel)
    return dict(table)


def nodes_without_kernel(model: ir.Model) -> list[str]:
    """Return the names of nodes whose operator has kernels, of which none is for the node's types.

    An operator without any kernel may be a function that onnxruntime expands, and float16 is computed as float32:
    neither is reported.
    """
    opset = default_opset(model.opset_imports)
    return [
        node.name or ""
        for node in model.graph
        if (kernels := _kernels().get((node.domain, node.op_type))) and not any(_fits(node, k, opset) for k in kernels)
    ]


def _fits(node: ir.Node, kernel: Any, opset: int) -> bool:
    first, last = kernel.version_range
    if not node.domain and not first <= opset <= last:
        return False
    try:
        schema = onnx.defs.get_schema(node.op_type, opset, node.domain)
    except onnx.defs.SchemaError:
        return True
    pairs = [*zip(schema.inputs, node.inputs, strict=False), *zip(schema.outputs, node.outputs, strict=False)]
    return all(
        value is None or value.dtype is None or _allowed(value.dtype, kernel.type_constraints.get(formal.type_str))
        for formal, value in pairs
    )


def _allowed(dtype: ir.DataType, types: list[str] | None) -> bool:
    if types is None:
        return True
    names = {f"tensor({dtype.name.lower()})"}
    if dtype is ir.DataType.FLOAT16:
        names.add("tensor(float)")
    return any(name in types for name in names)
