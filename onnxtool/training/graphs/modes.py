"""Dropout and batch normalization as they are while training, and as they are afterwards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from onnxtool.autodiff.builder import Builder, Tensor

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir


def untie_statistics(model: onnx.ModelProto) -> None:
    """Give each batch normalization running statistics of its own.

    Exporters merge equal initializers: at first a mean is as zero as a bias, and a variance as one as a scale.
    """
    graph = model.graph
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    copies = {node.output[0]: node for node in graph.node if node.op_type == "Identity"}
    readers = Counter(name for node in graph.node for name in node.input)
    for node in [node for node in graph.node if node.op_type == "BatchNormalization" and not node.domain]:
        for place, kind in ((3, "running_mean"), (4, "running_var")):
            name = source = node.input[place]
            if name in copies and copies[name].input[0] in tensors:  # it kept its name, and lost its values
                source = copies[name].input[0]
                graph.node.remove(copies.pop(name))
            elif name in tensors and readers[name] > 1:
                name = f"{node.input[1].removesuffix('.weight')}.{kind}"
            if name not in tensors and source in tensors:
                graph.initializer.append(tensors[source])
                graph.initializer[-1].name = node.input[place] = name
                tensors[name] = graph.initializer[-1]


def stop_training(graph: ir.Graph) -> None:
    """Remove dropout, and let batch normalizations use the running statistics."""
    for node in list(graph):
        if node.op_type == "Dropout" and node.domain == "":
            _keep_everything(graph, node)
        elif node.op_type == "BatchNormalization" and node.domain == "":
            node.attributes.pop("training_mode", None)
            _read_running(node)


def start_training(graph: ir.Graph, trained: Sequence[str]) -> list[ir.Node]:
    """Switch dropout on, and batch normalizations that train to the statistics of the batch.

    A batch normalization trains where the file says so, or where its scale or bias is among `trained`: exporters write
    the mode of inference whatever the model was in.

    Returns:
        Those batch normalizations; nothing reads their running statistics.
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
                _read_running(node)
                node.resize_outputs(3)  # in this mode type inference wants all of them
                for place in (1, 2):
                    node.outputs[place].name = f"{node.outputs[0].name}/unread_{place}"
                normalizations.append(node)
    return normalizations


def running_statistics(normalizations: Sequence[ir.Node]) -> list[str]:
    """Return the names of initializers that hold running means and variances."""
    values = [value for node in normalizations for value in node.inputs[3:5]]
    return [str(value.name) for value in values if value is not None and value.is_initializer()]


def update_statistics(graph: ir.Graph, normalizations: Sequence[ir.Node]) -> dict[str, ir.Value]:
    """Add what the running statistics are after this batch; the shapes of the graph are known.

    The variance of the batch that goes in is the unbiased one, as PyTorch's; that of ONNX would differ from it in
    small batches, and so would the results of the trained model.

    Returns:
        For the name of each running statistic its new value.
    """
    updated: dict[str, ir.Value] = {}
    build = Builder(graph)
    for node in normalizations:
        x, scale, _, *running = (build.tensor(value) for value in node.inputs if value is not None)
        average, spread = _moments(x, _axes(node))
        count = build.op("Size", x).cast(x.dtype) / build.op("Size", scale).cast(x.dtype)
        unbiased = spread.reshape([-1]) * (count / build.op("Max", count - 1.0, build.constant(1.0, x.dtype)))
        momentum = node.attributes.get_float("momentum", 0.9) or 0.0
        for old, new in zip(running, (average.reshape([-1]), unbiased), strict=True):
            updated[str(old.value.name)] = (old * momentum + new * (1.0 - momentum)).value
    build.finish()
    return updated


def decompose(graph: ir.Graph) -> None:
    """Replace batch normalizations that train by simpler operators: stock onnxruntime has no kernel for them."""
    build = Builder(graph)
    replaced: dict[ir.Node, list[Tensor]] = {}
    for node in graph:
        mode = node.attributes.get("training_mode")
        if node.op_type != "BatchNormalization" or node.domain != "" or mode is None or not mode.as_int():
            continue
        x, scale, bias = (build.tensor(value) for value in node.inputs[:3] if value is not None)
        average, spread = _moments(x, _axes(node))
        epsilon = node.attributes.get_float("epsilon", 1e-5) or 0.0
        deviation = build.op("Reciprocal", build.op("Sqrt", spread + epsilon))
        channels = [-1, *[1] * (len(_axes(node)) - 1)]
        normalized = ((x - average) * deviation) * scale.reshape(channels) + bias.reshape(channels)
        replaced[node] = [normalized, scale, scale][: len(node.outputs)]
    build.finish(replaced)


def _moments(x: Tensor, axes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return mean and variance over some axes, which stay with the size 1."""
    average = x.mean(axes)
    centred = x - average
    return average, (centred * centred).mean(axes)


def _axes(node: ir.Node) -> list[int]:
    """Return the axes that a batch normalization averages over: all but that of the channels."""
    x = node.inputs[0]
    return [0, *range(2, len(x.shape))] if x is not None and x.shape is not None else [0]


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


def _read_running(node: ir.Node) -> None:
    """Leave a batch normalization its first output alone; who reads the others reads what the running ones were."""
    import onnx_ir as ir

    for output, running in zip(node.outputs[1:], node.inputs[3:5], strict=False):
        if running is not None:
            ir.convenience.replace_all_uses_with(output, running, replace_graph_outputs=True)
    node.resize_outputs(1)
