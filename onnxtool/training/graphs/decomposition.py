"""Replace operators that stock onnxruntime has no kernel for by standard operators that it has one for.

Letters: N samples, C classes, D* further axes of a sample.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir
import onnx_ir.passes.common as common

from onnxtool.autodiff.builder import Builder, Tensor
from onnxtool.graph.edit import attribute


def decompose_losses(graph: ir.Graph) -> None:
    """Replace each `SoftmaxCrossEntropyLoss(x, labels, weight)` by LogSoftmax and GatherElements."""
    build = Builder(graph)
    nodes = [node for node in graph if node.op_type == "SoftmaxCrossEntropyLoss" and node.domain == ""]
    build.finish({node: _cross_entropy(build, node)[: len(node.outputs)] for node in nodes})


def _cross_entropy(build: Builder, node: ir.Node) -> tuple[Tensor, Tensor]:
    """Return the loss and the logarithms of the probabilities, [N, C, D*]."""
    x, labels, *weights = (build.tensor(value) for value in node.inputs if value is not None)
    ignored, reduction = attribute(node, "ignore_index"), attribute(node, "reduction", "mean")
    log_probability = build.op("LogSoftmax", x, axis=1)
    is_valid = None
    if ignored is not None:
        is_valid = build.op("Not", labels.equals(build.constant(ignored, labels.dtype)))
        labels = build.where(is_valid, labels, build.constant(0, labels.dtype))
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
    """Replace each BatchNormalization in training mode by its formula."""
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
    """Return mean and variance over `axes`, which stay with the size 1."""
    average = x.mean(axes)
    centered = x - average
    return average, (centered * centered).mean(axes)


def batch_axes(node: ir.Node) -> list[int]:
    """Return the axes that a BatchNormalization averages over: all except that of the channels."""
    x = node.inputs[0]
    return [0, *range(2, len(x.shape))] if x is not None and x.shape is not None else [0]


def decompose_training_operators(model: ir.Model) -> None:
    """Replace FakeQuant and ScaledSum, which only training builds of onnxruntime have."""
    build = Builder(model.graph)
    replaced = {
        node: _DECOMPOSITIONS[node.op_type](build, node)
        for node in model.graph
        if node.domain == "com.microsoft" and node.op_type in _DECOMPOSITIONS
    }
    if replaced:
        build.finish(replaced)
        common.NameFixPass()(model)  # nodes may keep the names of values that are gone
        common.RemoveUnusedOpsetsPass()(model)


def _fake_quant(build: Builder, node: ir.Node) -> list[Tensor]:
    """Return x rounded to `scale * (q - zero_point)` with q in the integer range, and a mask of what was in range."""
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
