"""Dropout and batch normalization as they are while training, and as they are afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from onnxtool.training.autodiff.builder import Builder, Tensor

if TYPE_CHECKING:
    import onnx_ir as ir


def stop_training(graph: ir.Graph) -> None:
    """Remove dropout, and let batch normalizations use the running statistics."""
    import onnx_ir as ir

    for node in list(graph):
        if node.op_type == "Dropout" and node.domain == "":
            _keep_everything(graph, node)
        elif node.op_type == "BatchNormalization" and node.domain == "":
            for output, running in zip(node.outputs[1:], node.inputs[3:5], strict=False):
                if running is not None:
                    ir.convenience.replace_all_uses_with(output, running, replace_graph_outputs=True)
            node.attributes.pop("training_mode", None)
            node.resize_outputs(1)


def start_training(graph: ir.Graph, trained: Sequence[str]) -> list[ir.Node]:
    """Switch dropout on, and batch normalizations that train to the statistics of the batch.

    A batch normalization trains where the file says so, or where its scale or bias is among `trained`: exporters write
    the mode of inference whatever the model was in.

    Returns:
        Those batch normalizations, each with three outputs.
    """
    import onnx_ir as ir

    normalizations = []
    for node in graph:
        if node.op_type == "Dropout" and node.domain == "":
            _drop(graph, node)
        elif node.op_type == "BatchNormalization" and node.domain == "":
            mode = node.attributes.get("training_mode")
            names = {value.name for value in node.inputs[1:3] if value is not None}
            if (mode is not None and mode.as_int()) or not names.isdisjoint(trained):
                node.attributes["training_mode"] = ir.AttrInt64("training_mode", 1)
                _name_outputs(node, 3)
                normalizations.append(node)
    return normalizations


def running_statistics(normalizations: Sequence[ir.Node]) -> list[str]:
    """Return the names of initializers that hold running means and variances."""
    values = [value for node in normalizations for value in node.inputs[3:5]]
    return [str(value.name) for value in values if value is not None and value.is_initializer()]


def decompose(graph: ir.Graph, normalizations: Sequence[ir.Node]) -> dict[str, ir.Value]:
    """Replace batch normalizations that train by simpler operators: stock onnxruntime has no kernel for them.

    The variance of the batch that goes into the running one is the unbiased one, as PyTorch's.

    Returns:
        For the name of each running statistic its new value.
    """
    import onnx_ir as ir

    updated: dict[str, ir.Value] = {}
    for node in normalizations:
        build = Builder(graph)
        normalized, mean, variance = _normalize(build, node)
        build.finish()
        for old, new in zip(node.outputs, (normalized, mean, variance), strict=True):
            new.value.shape = old.shape
            ir.convenience.replace_all_uses_with(old, new.value, replace_graph_outputs=True)
        updated |= {
            str(running.name): new.value
            for running, new in zip(node.inputs[3:5], (mean, variance), strict=True)
            if running is not None
        }
        graph.remove(node, safe=True)
    return updated


def _normalize(build: Builder, node: ir.Node) -> tuple[Tensor, Tensor, Tensor]:
    """Return the normalized input, and the running mean and variance after this batch."""
    x, scale, bias, mean, variance = (build.tensor(value) for value in node.inputs if value is not None)
    rank = len(node.inputs[0].shape or ())  # type: ignore[union-attr]
    axes, channels = [0, *range(2, rank)], [-1, *[1] * (rank - 2)]
    epsilon = node.attributes.get_float("epsilon", 1e-5) or 0.0
    momentum = node.attributes.get_float("momentum", 0.9) or 0.0
    average = x.mean(axes)
    centred = x - average
    spread = (centred * centred).mean(axes)
    deviation = build.op("Reciprocal", build.op("Sqrt", spread + epsilon))
    result = (centred * deviation) * scale.reshape(channels) + bias.reshape(channels)
    count = (build.op("Size", x).cast(x.dtype)) / build.op("Size", scale).cast(x.dtype)
    unbiased = spread.reshape([-1]) * (count / (build.op("Max", count - 1.0, build.constant(1.0, x.dtype))))
    kept = 1.0 - momentum
    return result, mean * momentum + average.reshape([-1]) * kept, variance * momentum + unbiased * kept


def _keep_everything(graph: ir.Graph, node: ir.Node) -> None:
    """Replace a dropout by its input, and its mask by one that is true everywhere."""
    import onnx_ir as ir

    x = node.inputs[0]
    if x is None:
        return
    if len(node.outputs) > 1 and (node.outputs[1].uses() or node.outputs[1].is_graph_output()):
        build = Builder(graph)
        mask = build.constant(True, ir.DataType.BOOL).expand(build.tensor(x).size())
        build.finish()
        ir.convenience.replace_all_uses_with(node.outputs[1], mask.value, replace_graph_outputs=True)
    if node.outputs[0].is_graph_output():  # its name is a promise
        node.resize_inputs(1)
        node.op_type = "Identity"
        node.resize_outputs(1)
        return
    ir.convenience.replace_all_uses_with(node.outputs[0], x)
    graph.remove(node, safe=True)


def _drop(graph: ir.Graph, node: ir.Node) -> None:
    import onnx_ir as ir

    build = Builder(graph)
    training = build.constant(True, ir.DataType.BOOL)
    build.finish()
    if len(node.inputs) < 3:
        node.resize_inputs(3)
    node.replace_input_with(2, training.value)


def _name_outputs(node: ir.Node, count: int) -> None:
    if len(node.outputs) < count:
        node.resize_outputs(count)
    for place, output in enumerate(node.outputs):
        if not output.name:
            output.name = f"{node.outputs[0].name}/output_{place}"
