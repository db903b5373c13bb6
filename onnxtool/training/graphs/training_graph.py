"""Make the training and eval graphs of a model that ends in a loss.

Both take the user's inputs, then the parameters in the order of the model's initializers. The training graph also takes
a buffer for each gradient and `lazy_reset_grad`; it outputs the user's outputs, then the new content of each buffer and
the running statistics of batch normalizations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import onnx
import onnx_ir as ir
import onnx_ir.passes.common as common
from onnx import TensorProto

from onnxtool.autodiff import differentiate
from onnxtool.errors import ArtifactError, first_line
from onnxtool.graph.edit import attribute, constant, reads
from onnxtool.graph.shapes import infer_types
from onnxtool.training.graphs.decomposition import (
    CLASS_LOSSES,
    decompose_batch_normalizations,
    decompose_losses,
    lower,
    running_statistics,
    separate_statistics,
    set_inference_mode,
    set_training_mode,
    update_statistics,
)
from onnxtool.training.graphs.merged import FX_NODE
from onnxtool.training.graphs.names import (
    IDS,
    INPUTS_WITH_GRADIENT,
    LABELS,
    LAZY_RESET,
    accumulated_name,
    buffer_name,
    described,
    gradient_name,
    updated_name,
)
from onnxtool.training.graphs.parameters import FLOATS, Selection, check_disjoint, check_names
from onnxtool.training.graphs.rows import prune_ignored_rows, take_out_row_factors


@dataclass(frozen=True)
class Graphs:
    """A training and an eval model, the parameters that became inputs, and the user inputs with a gradient."""

    training: onnx.ModelProto
    evaluation: onnx.ModelProto
    trainable: list[onnx.TensorProto]
    frozen: list[onnx.TensorProto]
    inputs: list[str]


def build_graphs(model: onnx.ModelProto, selection: Selection, loss: str, path: Path | None = None) -> Graphs:
    """Differentiate `loss` with respect to the trained parameters; if there are none, no gradients are added.

    Args:
        model: opset 18 or later; its outputs are the loss and further outputs of both graphs.
        selection: the parameters to train and to freeze; float inputs to train also get a gradient.
        loss: name of a float output with one element.
        path: the model file, with its external data in the same folder.

    Raises:
        ArtifactError: a parameter is not in the model, or `loss` is not a loss.
        GradientError: operators between parameters and loss have no gradient.
    """
    separate_statistics(model)
    check_disjoint(selection.trained, selection.frozen)
    check_names(model, selection.trained, selection.frozen)
    _check_loss(model, loss)
    training, evaluation = _read(model, path), _read(model, path)
    statistics, trained = _train(training, selection, loss)
    buffers = [name for name in statistics if name not in selection.frozen]
    promoted = {*selection.trained, *selection.frozen, *buffers}
    labels, ids = _evaluate(evaluation, promoted)
    tensors = [tensor for tensor in model.graph.initializer if tensor.name in promoted]
    inputs = sorted(set(trained) - {tensor.name for tensor in tensors})
    of_inputs = described(LABELS, labels) | described(IDS, ids)
    training.metadata_props.update(described(INPUTS_WITH_GRADIENT, inputs) | of_inputs)
    evaluation.metadata_props.update(of_inputs)
    return Graphs(
        ir.to_proto(training),
        ir.to_proto(evaluation),
        [tensor for tensor in tensors if tensor.name in trained],
        [tensor for tensor in tensors if tensor.name not in trained],
        inputs,
    )


def _read(model: onnx.ModelProto, path: Path | None) -> ir.Model:
    converted: ir.Model = ir.from_proto(model)
    if path is not None:
        ir.external_data.set_base_dir(converted.graph, path.parent)
    # Dropout and similar operators have constant settings.
    try:
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(converted)
    except ValueError as error:  # an attribute that ONNX does not define; onnxruntime takes any name
        raise ArtifactError(
            f"a Constant of the model cannot be read: {first_line(error)}", "export it again"
        ) from error
    return converted


def _train(model: ir.Model, selection: Selection, loss: str) -> tuple[Mapping[str, ir.Value], list[str]]:
    """Turn `model` into a training graph; return the new running statistics and the trained parameters."""
    graph = model.graph
    normalizations = set_training_mode(graph, selection.trained)
    _promote(graph, {*selection.trained, *selection.frozen, *running_statistics(normalizations)})
    infer_types(model)
    decompose_losses(graph, "NegativeLogLikelihoodLoss")
    statistics = update_statistics(graph, normalizations)
    prune_ignored_rows(graph)
    gradients = differentiate(model, loss, selection.trained) if selection.trained else {}
    trained = _with_gradient(selection, gradients)
    decompose_losses(graph)
    decompose_batch_normalizations(graph)
    infer_types(model)
    replaced = take_out_row_factors(graph)
    accumulate(graph, {name: replaced.get(gradients[name], gradients[name]) for name in trained})
    for name, value in statistics.items():
        value.name = updated_name(name)
        graph.outputs.append(value)
    _tidy(model)
    order_accumulations(graph)
    lower(model)
    return statistics, trained


def _evaluate(model: ir.Model, promoted: set[str]) -> tuple[dict[str, dict[str, int | None]], dict[str, int]]:
    """Turn `model` into an eval graph; return descriptions of its inputs with labels, and with indices."""
    _promote(model.graph, promoted)
    set_inference_mode(model.graph)
    infer_types(model)
    descriptions = [described for node in model.graph if (described := _labels(node)) is not None]
    labels = {
        name: content for name, content in descriptions if all(content == b for a, b in descriptions if a == name)
    }
    tables = [table for node in model.graph if (table := _ids(node, promoted)) is not None]
    ids = {name: min(rows for other, rows in tables if other == name) for name, _ in tables}
    decompose_losses(model.graph)
    _tidy(model)
    lower(model)
    return labels, ids


def _ids(node: ir.Node, promoted: set[str]) -> tuple[str, int] | None:
    """Return the input with indices of a parameter's rows, and their number; indices of `x[i]` may be negative."""
    if node.op_type != "Gather" or node.domain or "aten.index" in node.metadata_props.get(FX_NODE, ""):
        return None
    table, ids = node.inputs
    while ids is not None and (maker := ids.producer()) is not None and maker.op_type in _SAME_LABELS - {"Pad"}:
        ids = maker.inputs[0]
    if table is None or ids is None or not ids.is_graph_input() or table.shape is None or attribute(node, "axis", 0):
        return None
    rows = table.shape[0]
    is_table = (table.name in promoted or table.is_initializer()) and isinstance(rows, int)
    return (str(ids.name), int(rows)) if is_table else None  # type: ignore[arg-type]  # an integer, checked above


_SAME_LABELS = frozenset(("Cast", "Flatten", "Identity", "Pad", "Reshape", "Squeeze", "Transpose", "Unsqueeze"))


def _labels(node: ir.Node) -> tuple[str, dict[str, int | None]] | None:
    """Return the input with the labels of a loss, the number of classes, and the first token whose label counts."""
    if node.op_type not in CLASS_LOSSES or node.domain:
        return None
    scores, labels = node.inputs[:2]
    first = 0
    while labels is not None and (maker := labels.producer()) is not None:
        if maker.op_type == "Slice" and [constant(value) for value in maker.inputs[1:4:2]] == [[1], [1]]:
            first = 1  # language model labels: the first one has no logits
        elif maker.op_type not in _SAME_LABELS:
            return None
        labels = maker.inputs[0]
    if labels is None or not labels.is_graph_input() or scores is None or scores.shape is None:
        return None
    classes = scores.shape[1]
    known = {"classes": classes if isinstance(classes, int) else None, "first": first}
    return str(labels.name), {**known, "ignore_index": attribute(node, "ignore_index")}


def _promote(graph: ir.Graph, names: set[str]) -> None:
    """Turn initializers into inputs, in order; their values go to the checkpoint."""
    inputs = {value.name for value in graph.inputs}
    for name in [name for name in graph.initializers if name in names]:
        value = graph.initializers.pop(name)
        if value.const_value is not None:
            value.shape = ir.Shape(value.const_value.shape.numpy())
            value.type = ir.TensorType(value.const_value.dtype)
        value.const_value = None
        if name not in inputs:
            graph.inputs.append(value)


def _with_gradient(selection: Selection, gradients: Mapping[str, ir.Value]) -> list[str]:
    """Return the parameters with a gradient; only optional ones may be without."""
    missing = [name for name in selection.trained if name not in gradients and name not in selection.optional]
    if missing:
        raise ArtifactError(
            f"the loss does not depend on {', '.join(missing[:5])}",
            "leave them out or freeze them, or take another output for the loss",
        )
    if selection.trained and not gradients:
        raise ArtifactError("the loss depends on none of the parameters", "take another output for the loss")
    return [name for name in selection.trained if name in gradients]


def _tidy(model: ir.Model) -> None:
    model.graph.sort()
    common.DeduplicateInitializersPass(size_limit=1024)(model)  # several builders may have added equal constants
    common.CommonSubexpressionEliminationPass()(model)
    common.RemoveUnusedNodesPass()(model)
    common.RemoveUnusedFunctionsPass()(model)  # type: ignore[no-untyped-call]
    common.RemoveUnusedOpsetsPass()(model)
    common.NameFixPass()(model)
    model.graph.sort()


def _check_loss(model: onnx.ModelProto, loss: str) -> None:
    """Refuse an output that is not a single float."""
    value = next((value for value in model.graph.output if value.name == loss), None)
    if value is None:
        raise ArtifactError(f"the loss {loss!r} is not an output of the model", "return its name from build")
    kind = value.type.tensor_type
    if kind.elem_type and kind.elem_type not in FLOATS:
        raise ArtifactError(
            f"the loss {loss!r} is {TensorProto.DataType.Name(kind.elem_type).lower()}, and only floats have gradients",
            "take another output of the model, or a loss on top of it",
        )
    sizes: Sequence[object] = [getattr(dim, dim.WhichOneof("value") or "", None) for dim in kind.shape.dim]
    if kind.HasField("shape") and any(size != 1 for size in sizes):
        raise ArtifactError(
            f"the loss {loss!r} has the shape {sizes}, and a loss has one element",
            "reduce it to its mean or sum; with loss=None the first output of the model is the loss",
        )


# Add each gradient to its buffer, or overwrite the buffer if `lazy_reset_grad` is true.
#
# There is one If per parameter: onnxruntime would compute both sides of a Where. If a Gemm is the last step of a
# gradient, it goes inside the If: it writes directly to the buffer, or adds to it, without a copy of the gradient.


# Inputs and attributes of a Gemm.
_Gemm: TypeAlias = "tuple[list[ir.Value | None], dict[str, int | float]]"
_SUFFIX = "/accumulate"


def accumulate(graph: ir.Graph, gradients: Mapping[str, ir.Value]) -> None:
    """Add buffers and `lazy_reset_grad` to the inputs, and the new content of the buffers to the outputs.

    Args:
        graph: the training graph, with the parameters among its inputs.
        gradients: the gradient of each trained parameter.
    """
    parameters = [value for value in graph.inputs if value.name in gradients]
    reset = ir.val(LAZY_RESET, ir.DataType.BOOL, [1])
    counts = Counter(gradients.values())
    for parameter in parameters:
        name = str(parameter.name)
        buffer = ir.val(buffer_name(name), parameter.dtype, parameter.shape)
        gemm = _as_gemm(gradients[name]) if counts[gradients[name]] == 1 else None
        node = _accumulation(reset, buffer, gemm or gradients[name], name)
        result = node.outputs[0]
        result.name, result.shape, result.type = accumulated_name(name), parameter.shape, parameter.type
        graph.append(node)
        graph.inputs.append(buffer)
        graph.outputs.append(result)
    graph.inputs.append(reset)


def order_accumulations(graph: ir.Graph) -> None:
    """Move the accumulations to the end of a sorted graph, the one whose gradient is ready last first.

    onnxruntime first runs what the last node needs, then what the node before it additionally needs, and so on. Each
    gradient is thus finished as early as possible and its memory freed; otherwise the gradients of all activations
    would come first and be in memory at the same time.
    """
    positions: dict[ir.Node | None, int] = {node: position for position, node in enumerate(graph)}
    names = {value.name for value in graph.outputs}
    nodes = [node for node in graph if node.op_type == "If" and node.outputs[0].name in names]
    nodes = [node for node in nodes if str(node.name).endswith(_SUFFIX)]
    makers = {node: [value.producer() for value in reads(node) if value is not None] for node in nodes}
    for node in sorted(nodes, key=lambda node: -max(positions.get(maker, 0) for maker in makers[node])):
        graph.remove(node)
        graph.append(node)


def _accumulation(reset: ir.Value, buffer: ir.Value, gradient: ir.Value | _Gemm, name: str) -> ir.Node:
    """Return the node that computes the new content of a buffer."""
    if isinstance(gradient, ir.Value):
        replaced, added = ir.node("Identity", [gradient]), ir.node("Add", [buffer, gradient])
    else:
        factors, attributes = gradient
        replaced, added = ir.node("Gemm", factors, attributes), ir.node("Gemm", [*factors, buffer], attributes)
    branches = {
        "then_branch": _branch("replace", replaced, buffer, name),
        "else_branch": _branch("add", added, buffer, name),
    }
    return ir.node("If", [reset], branches, name=f"{gradient_name(name)}{_SUFFIX}")


def _as_gemm(gradient: ir.Value) -> _Gemm | None:
    """Return inputs and attributes of a Gemm that computes the gradient; None if there is none or others read it."""
    node = gradient.producer()
    is_swapped = node is not None and node.op_type == "Transpose" and _is_read_once(gradient)
    if node is not None and is_swapped and node.inputs[0] is not None:
        gradient = node.inputs[0]
        node = gradient.producer()
    if node is None or node.op_type != "Gemm" or len(node.inputs) != 2 or not _is_read_once(gradient):
        return None
    first, second = (node.attributes.get_int(name, 0) or 0 for name in ("transA", "transB"))
    alpha = node.attributes.get_float("alpha", 1.0) or 0.0
    if is_swapped:  # (a^T b)^T is b^T a
        return [*node.inputs[::-1]], {"transA": 1 - second, "transB": 1 - first, "alpha": alpha}
    return [*node.inputs], {"transA": first, "transB": second, "alpha": alpha}


def _is_read_once(value: ir.Value) -> bool:
    return len(value.uses()) <= 1 and not value.is_graph_output()


def _branch(kind: str, node: ir.Node, buffer: ir.Value, name: str) -> ir.Graph:
    """Return a graph with one node, and an output with the buffer's type and shape."""
    result = node.outputs[0]
    node.name = result.name = f"{gradient_name(name)}/{kind}"
    result.shape, result.type = buffer.shape, buffer.type
    return ir.Graph([], [result], nodes=[node], name=f"{gradient_name(name)}/{kind}")
