"""Training and inference mode of dropout and batch normalization."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import onnx
import onnx_ir as ir

from onnxtool.autodiff.builder import Builder
from onnxtool.graph.edit import attribute
from onnxtool.training.graphs.decomposition import batch_axes, moments


def separate_statistics(model: onnx.ModelProto) -> None:
    """Give each batch normalization its own initializers of running statistics.

    Exporters merge equal initializers: before training, a mean equals a bias (zeros) and a variance a scale (ones).
    """
    graph = model.graph
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    copies = {node.output[0]: node for node in graph.node if node.op_type == "Identity"}
    readers = Counter(name for node in graph.node for name in node.input)
    for node in [node for node in graph.node if node.op_type == "BatchNormalization" and not node.domain]:
        for place, kind in ((3, "running_mean"), (4, "running_var")):
            name = source = node.input[place]
            if name in copies and copies[name].input[0] in tensors:  # its name stayed; it copies another initializer
                source = copies[name].input[0]
                graph.node.remove(copies.pop(name))
            elif name in tensors and readers[name] > 1:
                name = f"{node.input[1].removesuffix('.weight')}.{kind}"
            if name not in tensors and source in tensors:
                graph.initializer.append(tensors[source])
                graph.initializer[-1].name = node.input[place] = name
                tensors[name] = graph.initializer[-1]


def set_inference_mode(graph: ir.Graph) -> None:
    """Remove dropout, and let batch normalizations use their running statistics."""
    for node in list(graph):
        if node.op_type == "Dropout" and node.domain == "":
            _remove_dropout(graph, node)
        elif node.op_type == "BatchNormalization" and node.domain == "":
            node.attributes.pop("training_mode", None)
            _read_running_statistics(node)


def set_training_mode(graph: ir.Graph, trained: Sequence[str]) -> list[ir.Node]:
    """Enable dropout, and let batch normalizations that are trained use the statistics of the batch.

    A batch normalization is trained if its attribute says so, or if its scale or bias is among `trained`: exporters
    write inference mode whatever mode the model was in.

    Returns:
        The trained batch normalizations; nothing reads their running statistics.
    """
    normalizations = []
    for node in graph:
        if node.op_type == "Dropout" and node.domain == "":
            _enable_dropout(graph, node)
        elif node.op_type == "BatchNormalization" and node.domain == "":
            names = {value.name for value in node.inputs[1:3] if value is not None}
            if attribute(node, "training_mode") or not names.isdisjoint(trained):
                node.attributes["training_mode"] = ir.AttrInt64("training_mode", 1)
                _read_running_statistics(node)
                node.resize_outputs(3)  # type inference requires all three in this mode
                for place in (1, 2):
                    node.outputs[place].name = f"{node.outputs[0].name}/unread_{place}"
                normalizations.append(node)
    return normalizations


def running_statistics(normalizations: Sequence[ir.Node]) -> list[str]:
    """Return the names of initializers that hold running means and variances."""
    values = [value for node in normalizations for value in node.inputs[3:5]]
    return [str(value.name) for value in values if value is not None and value.is_initializer()]


def update_statistics(graph: ir.Graph, normalizations: Sequence[ir.Node]) -> dict[str, ir.Value]:
    """Compute the running statistics after this batch; the shapes of the graph are known.

    They use the unbiased variance of the batch, as PyTorch does; with that of ONNX, a model trained on small batches
    would give other results.

    Returns:
        The new value of each running statistic, by name.
    """
    updated: dict[str, ir.Value] = {}
    build = Builder(graph)
    for node in normalizations:
        x, scale, _, *running = (build.tensor(value) for value in node.inputs if value is not None)
        average, variance = moments(x, batch_axes(node))
        count = build.op("Size", x).cast(x.dtype) / build.op("Size", scale).cast(x.dtype)
        unbiased = variance.reshape([-1]) * (count / build.op("Max", count - 1.0, build.constant(1.0, x.dtype)))
        momentum = node.attributes.get_float("momentum", 0.9) or 0.0
        for old, new in zip(running, (average.reshape([-1]), unbiased), strict=True):
            updated[str(old.value.name)] = (old * momentum + new * (1.0 - momentum)).value
    build.finish()
    return updated


def _remove_dropout(graph: ir.Graph, node: ir.Node) -> None:
    """Replace a dropout by its input, and its mask by one that is all true."""
    x = node.inputs[0]
    if x is None:
        return
    if len(node.outputs) > 1 and (node.outputs[1].uses() or node.outputs[1].is_graph_output()):
        build = Builder(graph)
        mask = build.constant(True, ir.DataType.BOOL).expand(build.tensor(x).size())
        build.finish()
        ir.convenience.replace_all_uses_with(node.outputs[1], mask.value, replace_graph_outputs=True)
    if node.outputs[0].is_graph_output():  # the output keeps its name
        node.resize_inputs(1)
        node.op_type = "Identity"
        node.resize_outputs(1)
        return
    ir.convenience.replace_all_uses_with(node.outputs[0], x)
    graph.remove(node, safe=True)


def _enable_dropout(graph: ir.Graph, node: ir.Node) -> None:
    build = Builder(graph)
    training = build.constant(True, ir.DataType.BOOL)
    build.finish()
    if len(node.inputs) < 3:
        node.resize_inputs(3)
    node.replace_input_with(2, training.value)


def _read_running_statistics(node: ir.Node) -> None:
    """Keep only the first output of a batch normalization; readers of the others read its running statistics."""
    for output, running in zip(node.outputs[1:], node.inputs[3:5], strict=False):
        if running is not None:
            ir.convenience.replace_all_uses_with(output, running, replace_graph_outputs=True)
    node.resize_outputs(1)
