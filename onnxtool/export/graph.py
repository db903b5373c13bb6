"""Clean up a traced graph: name outputs and axes, name nodes by their scope, drop the metadata of the exporter.

And rewrite what one fusion of onnxruntime computes otherwise.
"""

from __future__ import annotations

import ast
import re

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common

from onnxtool.errors import ExportError
from onnxtool.export.signature import Signature

_SCOPES_KEY = "pkg.torch.onnx.name_scopes"


def tidy(model: ir.Model, signature: Signature) -> None:
    """Bring the graph in line with the signature, in place.

    Raises:
        ExportError: an input is gone or fixed to a size, or an output is missing: the trace did not follow the model.
    """
    _check_inputs(model, signature)
    _select_outputs(model.graph, signature)
    _name_axes(model, signature)
    name_nodes(model.graph)
    strip(model)
    _pad_pools_by_negative_zero(model.graph)


def _check_inputs(model: ir.Model, signature: Signature) -> None:
    graph = model.graph
    found = {str(value.name): value for value in graph.inputs}
    for name, shape in signature.inputs.items():
        if name not in found:
            raise ExportError(
                f"the traced graph does not use {name}; it has {', '.join(found)}",
                "its answers could not depend on it; try the other --exporter",
            )
        traced = found[name].shape
        if traced is None or len(traced) != len(shape):
            raise ExportError(f"the traced graph gives {name} the shape {traced}, not {list(shape)}", "report this")
        fixed = [
            axis for size, axis in zip(traced, shape, strict=True) if isinstance(axis, str) and isinstance(size, int)
        ]
        if fixed:
            raise ExportError(
                f"the traced graph fixes {', '.join(fixed)} of {name}, {traced}",
                "try the other --exporter; this model specializes on sizes",
            )
    extra = [name for name in found if name not in signature.inputs]
    if extra:
        raise ExportError(f"the traced graph has inputs of its own: {', '.join(extra)}", "try the other --exporter")
    graph.inputs[:] = [found[name] for name in signature.inputs]


def _select_outputs(graph: ir.Graph, signature: Signature) -> None:
    found = {value.name: value for value in graph.outputs}
    missing = [name for name in signature.outputs if name not in found]
    if missing:
        raise ExportError(
            f"the traced graph lacks the outputs {', '.join(missing)}; it has {', '.join(map(str, found))}",
            "try the other --exporter",
        )
    graph.outputs[:] = [found[name] for name in signature.outputs]


def _name_axes(model: ir.Model, signature: Signature) -> None:
    """Rename the exporter's symbols (s18, s41) to what the axes mean, and set the shapes of inputs and outputs."""
    renames: dict[str, str] = {}
    for value in model.graph.inputs:
        assert value.shape is not None  # noqa: S101  checked by _check_inputs
        for size, name in zip(value.shape, signature.inputs[str(value.name)], strict=True):
            if isinstance(name, str):
                renames[str(size)] = name
    rename_axes(model, renames)
    for value in model.graph.inputs:
        value.shape = ir.Shape(list(signature.inputs[str(value.name)]))
    for value in model.graph.outputs:
        value.shape = ir.Shape(list(signature.outputs[str(value.name)]))


def rename_axes(model: ir.Model, renames: dict[str, str]) -> None:
    """Replace the exporter's symbols in the shapes of all computed values by their names."""
    for graph in model.graphs():
        for node in graph:
            for output in node.outputs:
                if output.shape is not None:
                    output.shape = ir.Shape([_renamed(size, renames) for size in output.shape])


def _renamed(size: int | ir.SymbolicDim, renames: dict[str, str]) -> int | str | None:
    """Return a dimension with the exporter's symbols in it replaced by their names."""
    if isinstance(size, int):
        return size
    if size.value is None:
        return None
    return re.sub(r"\w+", lambda match: renames.get(match[0], match[0]), str(size.value))


def name_nodes(graph: ir.Graph) -> None:
    """Call a node by the module that made it, `encoder.layer.0/MatMul`: differences and profiles become readable."""
    seen: dict[str, int] = {}
    for node in graph:
        module = _module_of(node)
        if module is None:
            continue
        name = "/".join(part for part in (module, node.op_type) if part)
        seen[name] = seen.get(name, -1) + 1
        node.name = f"{name}_{seen[name]}" if seen[name] else name


def _module_of(node: ir.Node) -> str | None:
    """Return the path of the module that made a node, empty for the model itself; None where nothing tells."""
    scopes = node.metadata_props.get(_SCOPES_KEY)
    if scopes is not None:
        # dynamo's list ends with the name of the operator's own FX node; before it are modules, outermost first.
        modules = [str(scope) for scope in ast.literal_eval(scopes)][:-1]
        return (modules or [""])[-1]
    if (node.name or "").startswith("/"):  # TorchScript's: /model/encoder/layer.0/MatMul_3
        return ".".join(str(node.name).split("/")[2:-1])
    return None


def strip(model: ir.Model) -> None:
    """Drop stack traces, which hold the paths of this machine, and whatever else an exporter writes on every node."""
    common.ClearMetadataAndDocStringPass()(model)
    model.metadata_props.clear()


def _pad_pools_by_negative_zero(graph: ir.Graph) -> None:
    """Let what a MaxPool reads be padded by -0.0 where it is padded by 0, which is the same number.

    onnxruntime joins a Pad of zeros, which it knows by their bits, and the MaxPool behind it, whose own padding counts
    as the lowest number: where all values at a border are negative, as BiT's may be, their maximum is another one then
    (core/optimizer/pad_fusion.cc, since 1.17 and still in 1.31; issue 290 of onnxsim is the same).
    """
    for node in graph:
        readers = {reader.op_type for reader, _ in node.outputs[0].uses()}
        given = node.inputs[2] if node.op_type == "Pad" and len(node.inputs) > 2 else None
        padding = None if given is None or "MaxPool" not in readers else ir.convenience.get_const_tensor(given)
        if given is None or padding is None or not padding.dtype.is_floating_point() or padding.numpy().any():
            continue
        array = -np.abs(padding.numpy())
        zero = ir.tensor(array, name=f"{node.outputs[0].name}_negative_zero")
        value = ir.Value(name=zero.name, const_value=zero, shape=ir.Shape(array.shape), type=ir.TensorType(zero.dtype))
        graph.register_initializer(value)
        node.replace_input_with(2, value)
        constant = given.producer()
        if not given.uses() and constant is not None:
            graph.remove(constant, safe=True)
        elif not given.uses():
            graph.initializers.pop(str(given.name))
