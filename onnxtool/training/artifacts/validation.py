"""Refuse an invalid model before anything is built on it: onnx and onnxruntime would fail later and less clearly."""

from __future__ import annotations

from math import prod

import onnx
import onnx_ir as ir
from onnx import defs

from onnxtool.errors import ArtifactError
from onnxtool.model_file.domains import default_opset

_HINT = "it is damaged, or was changed by hand; export it again"


def check_model(model: onnx.ModelProto) -> None:
    """Check opset, tensors and the order of nodes; onnx.checker does not know onnxruntime's operators.

    Raises:
        ArtifactError: for the first problem.
    """
    opset = default_opset({one.domain: one.version for one in model.opset_import})
    if not opset:
        raise ArtifactError("the model does not say which opset its operators belong to", _HINT)
    if opset > defs.onnx_opset_version():
        raise ArtifactError(
            f"the model is of opset {opset}, and the installed onnx knows {defs.onnx_opset_version()} at most",
            "upgrade onnx, or export with an older opset",
        )
    if not model.graph.output:
        raise ArtifactError("the model has no outputs", _HINT)
    for tensor in model.graph.initializer:
        _check_tensor(tensor)
    known = {value.name for value in (*model.graph.input, *model.graph.initializer)}
    known |= {tensor.values.name for tensor in model.graph.sparse_initializer}
    for node in model.graph.node:
        missing = next((name for name in node.input if name and name not in known), None)
        if missing is not None:
            late = any(missing in other.output for other in model.graph.node)
            raise ArtifactError(
                f"the node {node.name or node.output[0]} reads {missing!r}, which "
                f"{'is computed after it' if late else 'no node computes'}",
                _HINT,
            )
        known.update(node.output)
    unknown = next((value.name for value in model.graph.output if value.name not in known), None)
    if unknown is not None:
        raise ArtifactError(f"no node computes the output {unknown!r} of the model", _HINT)


def _check_tensor(tensor: onnx.TensorProto) -> None:
    if any(size < 0 for size in tensor.dims):
        raise ArtifactError(f"the initializer {tensor.name} has the shape {list(tensor.dims)}", _HINT)
    if not tensor.HasField("raw_data"):
        return
    expected = (prod(tensor.dims) * ir.DataType(tensor.data_type).bitwidth + 7) // 8
    if len(tensor.raw_data) != expected:
        raise ArtifactError(
            f"the initializer {tensor.name} has {len(tensor.raw_data)} bytes, and {expected} are its shape "
            f"{list(tensor.dims)}",
            _HINT,
        )
