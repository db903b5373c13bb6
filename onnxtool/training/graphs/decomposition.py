"""Decompose operators for stock onnxruntime 1.17, and set the mode of dropout and batch normalization.

Letters: N samples, C classes, D* further axes of each sample.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import onnx
import onnx_ir as ir
import onnx_ir.passes.common as common
from onnx import defs

from onnxtool.autodiff.builder import Builder, Tensor
from onnxtool.autodiff.rules.nn import without_negative
from onnxtool.errors import ArtifactError
from onnxtool.graph.edit import attribute, constant, only_consumer, producer
from onnxtool.model_file.domains import default_opset


def decompose_losses(graph: ir.Graph, *op_types: str) -> None:
    """Replace each loss `(x, labels, weight)` over class labels with LogSoftmax and GatherElements."""
    build = Builder(graph)
    nodes = [node for node in graph if node.op_type in (op_types or CLASS_LOSSES) and node.domain == ""]
    build.finish({node: _cross_entropy(build, node)[: len(node.outputs)] for node in nodes})


CLASS_LOSSES = ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")


def _cross_entropy(build: Builder, node: ir.Node) -> tuple[Tensor, Tensor]:
    """Return the loss and the log-probabilities, [N, C, D*]."""
    x, labels, *weights = (build.tensor(value) for value in node.inputs if value is not None)
    ignored, reduction = attribute(node, "ignore_index"), attribute(node, "reduction", "mean")
    log_probability = build.op("LogSoftmax", x, axis=1) if node.op_type == CLASS_LOSSES[0] else x
    is_valid = None
    if ignored is not None:
        is_valid = build.op("Not", labels.equals(build.constant(ignored, labels.dtype)))
        labels = build.where(is_valid, labels, build.constant(0, labels.dtype))
    labels = without_negative(build, labels)
    column = build.op("Unsqueeze", labels, build.axes([1]))
    losses = -build.op("Squeeze", build.op("GatherElements", log_probability, column, axis=1), build.axes([1]))
    weight = build.op("Gather", weights[0], labels) if weights else None
    if is_valid is not None:
        weight = is_valid.cast(x.dtype) if weight is None else build.where(is_valid, weight, 0.0)
    if weight is not None:
        losses = losses * weight
    if reduction == "none":
        return losses, log_probability
    total = build.op("ReduceSum", losses, keepdims=0)
    if reduction == "mean":
        size = build.op("Size", labels)
        size.value.dtype = ir.DataType.INT64
        count = size.cast(x.dtype) if weight is None else build.op("ReduceSum", weight, keepdims=0)
        total = total / count
    return total, log_probability


def decompose_batch_normalizations(graph: ir.Graph) -> None:
    """Replace each BatchNormalization in training mode with its formula."""
    build = Builder(graph)
    replaced: dict[ir.Node, list[Tensor]] = {}
    for node in graph:
        if node.op_type != "BatchNormalization" or node.domain != "" or not attribute(node, "training_mode"):
            continue
        x, scale, bias = (build.tensor(value) for value in node.inputs[:3] if value is not None)
        axes = batch_axes(node)
        average, variance = moments(x, axes)
        epsilon = node.attributes.get_float("epsilon", 1e-5) or 0.0
        inverse_deviation = build.op("Reciprocal", build.op("Sqrt", variance + epsilon))
        channels = [-1, *[1] * (len(axes) - 1)]
        normalized = ((x - average) * inverse_deviation) * scale.reshape(channels) + bias.reshape(channels)
        replaced[node] = [normalized, scale, scale][: len(node.outputs)]
    build.finish(replaced)


def moments(x: Tensor, axes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the mean and variance over `axes`, which are kept with size 1."""
    average = x.mean(axes)
    centered = x - average
    return average, (centered * centered).mean(axes)


def batch_axes(node: ir.Node) -> list[int]:
    """Return the axes that a BatchNormalization averages over: all but the channel axis."""
    x = node.inputs[0]
    return [0, *range(2, len(x.shape))] if x is not None and x.shape is not None else [0]


def decompose_training_operators(model: ir.Model) -> None:
    """Replace FakeQuant and ScaledSum, which exist only in training builds of onnxruntime."""
    build = Builder(model.graph)
    replaced = {
        node: _DECOMPOSITIONS[node.op_type](build, node)
        for node in model.graph
        if node.domain == "com.microsoft" and node.op_type in _DECOMPOSITIONS
    }
    if replaced:
        build.finish(replaced)
        common.NameFixPass()(model)  # nodes may keep the names of removed values
        common.RemoveUnusedOpsetsPass()(model)


def _fake_quant(build: Builder, node: ir.Node) -> list[Tensor]:
    """Return x rounded to `scale * (q - zero_point)` with q in the integer range, and a mask of in-range elements."""
    x, scale, zero = (build.tensor(value) for value in node.inputs if value is not None)
    lowest, highest = (
        build.constant(node.attributes.get_int(name, default), x.dtype)
        for name, default in (("quant_min", 0), ("quant_max", 255))
    )
    shifted = build.op("Round", x / scale) + zero
    in_range = build.op("Not", build.op("Or", shifted < lowest, shifted > highest))
    return [(build.op("Clip", shifted, lowest, highest) - zero) * scale, in_range][: len(node.outputs)]


def _scaled_sum(build: Builder, node: ir.Node) -> list[Tensor]:
    terms = [
        build.tensor(value) * node.attributes.get_float(f"scale_{place}", 1.0)
        for place, value in enumerate(node.inputs)
        if value is not None
    ]
    return [build.op("Sum", *terms)]


_DECOMPOSITIONS = {"FakeQuant": _fake_quant, "ScaledSum": _scaled_sum}


def separate_statistics(model: onnx.ModelProto) -> None:
    """Give each batch normalization its own initializers for the running statistics.

    Exporters merge equal initializers: before training, a mean equals a bias (zeros) and a variance a scale (ones).
    """
    graph = model.graph
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    copies = {node.output[0]: node for node in graph.node if node.op_type == "Identity"}
    readers = Counter(name for node in graph.node for name in node.input)
    for node in [node for node in graph.node if node.op_type == "BatchNormalization" and not node.domain]:
        for place, kind in ((3, "running_mean"), (4, "running_var")):
            name = source = node.input[place]
            if name in copies and copies[name].input[0] in tensors:  # the name was kept; it copies another initializer
                source = copies[name].input[0]
                graph.node.remove(copies.pop(name))
            elif name in tensors and readers[name] > 1:
                name = f"{node.input[1].removesuffix('.weight')}.{kind}"
                if name != source and name in tensors:  # of another one with the same scale
                    name = f"{node.output[0]}.{kind}"
            if name not in tensors and source in tensors:
                graph.initializer.append(tensors[source])
                graph.initializer[-1].name = node.input[place] = name
                tensors[name] = graph.initializer[-1]


def set_inference_mode(graph: ir.Graph) -> None:
    """Remove dropout, and make batch normalizations use their running statistics."""
    for node in list(graph):
        if node.op_type == "Dropout" and node.domain == "":
            _remove_dropout(graph, node)
        elif node.op_type == "BatchNormalization" and node.domain == "":
            node.attributes.pop("training_mode", None)
            _read_running_statistics(node)


def set_training_mode(graph: ir.Graph, trained: Sequence[str]) -> list[ir.Node]:
    """Enable dropout, and make trained batch normalizations use batch statistics.

    A batch normalization is trained if its attribute says so, or if its scale or bias is in `trained`: exporters
    write inference mode regardless of the model's mode.

    Returns:
        The trained batch normalizations; their running statistics are not read.
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
    """Return the names of initializers that hold running means or variances."""
    values = [value for node in normalizations for value in node.inputs[3:5]]
    return [str(value.name) for value in values if value is not None and value.is_initializer()]


def update_statistics(graph: ir.Graph, normalizations: Sequence[ir.Node]) -> dict[str, ir.Value]:
    """Compute the running statistics after this batch; the graph's shapes must be known.

    They use the batch's unbiased variance, as PyTorch does; with ONNX's definition, a model trained on small batches
    would give different results.

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
    """Replace a dropout with its input, and its mask with one that is all true."""
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
    """Keep only a batch normalization's first output; readers of the others read its running statistics."""
    for output, running in zip(node.outputs[1:], node.inputs[3:5], strict=False):
        if running is not None:
            ir.convenience.replace_all_uses_with(output, running, replace_graph_outputs=True)
    node.resize_outputs(1)


IR_VERSION = 9
HIGHEST_OPSET = 20
_REDEFINED = frozenset(("GroupNormalization",))  # opset 21 changed its scale from groups to channels


def lower(model: ir.Model) -> None:
    """Set the IR version, and lower the opset to 20 if all operators are the same there apart from dtypes.

    Raises:
        ArtifactError: an operator needs a newer opset.
    """
    common.ClearMetadataAndDocStringPass()(model)  # IR version 9 has no metadata on nodes and values
    outputs = (value for node in model.graph.all_nodes() for value in node.outputs)
    for value in (*model.graph.inputs, *model.graph.initializers.values(), *outputs):
        value.metadata_props.clear()
    decompose_training_operators(model)
    for graph in model.graphs():
        divide_at_once(graph)
    model.ir_version = IR_VERSION
    model.producer_name, model.producer_version = "onnxtool", None
    model.metadata_props.clear()
    opset = default_opset(model.opset_imports)
    if opset <= HIGHEST_OPSET:
        return
    changed = sorted({node.op_type for node in model.graph.all_nodes() if not _is_unchanged(node, opset)})
    if changed:
        raise ArtifactError(
            f"the model is of opset {opset}, and opset {HIGHEST_OPSET} has no such {', '.join(changed)}",
            f"export it again with --opset {HIGHEST_OPSET}, so that onnxruntime 1.17 and browsers read it",
        )
    for graph in model.graphs():
        graph.opset_imports[""] = HIGHEST_OPSET


def divide_at_once(graph: ir.Graph | ir.Function) -> None:
    """Turn `x * (1 / y)` into `x / y`; onnxruntime 1.17 to 1.20 crash when they make this rewrite themselves."""
    for node in list(graph):
        if node.op_type != "Mul" or node.domain:
            continue
        for place, factor in enumerate(node.inputs):
            division = producer(factor, "Div")
            if division is None or factor is None or only_consumer(factor) is not node:
                continue
            dividend = constant(division.inputs[0])
            if dividend is None or dividend.shape != () or dividend != 1:
                continue
            node.op_type = "Div"
            node.replace_input_with(0, node.inputs[1 - place])
            node.replace_input_with(1, division.inputs[1])
            graph.remove(division, safe=True)
            break


def _is_unchanged(node: ir.Node, opset: int) -> bool:
    """Return whether an operator takes the same inputs and attributes in the highest supported opset."""
    if node.op_type in _REDEFINED:
        return False
    if node.domain:
        return True
    try:
        new, old = (defs.get_schema(node.op_type, version, "") for version in (opset, HIGHEST_OPSET))
    except defs.SchemaError:
        return False
    attributes = set(node.attributes)
    is_known = attributes <= set(old.attributes) and len(node.inputs) <= old.max_input
    return is_known and new.max_output >= len(node.outputs)
