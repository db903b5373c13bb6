"""The cross entropy as operators that onnxruntime has kernels for, where no gradient went through it.

Letters: N samples, C classes, D* further axes of a sample.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from onnxtool.autodiff.builder import Builder, Tensor

if TYPE_CHECKING:
    import onnx_ir as ir


def decompose_losses(graph: ir.Graph) -> None:
    """Replace each `SoftmaxCrossEntropyLoss(x, labels, weight)` by LogSoftmax and GatherElements."""
    build = Builder(graph)
    nodes = [node for node in graph if node.op_type == "SoftmaxCrossEntropyLoss" and node.domain == ""]
    build.finish({node: _loss(build, node)[: len(node.outputs)] for node in nodes})


def _loss(build: Builder, node: ir.Node) -> tuple[Tensor, Tensor]:
    """Return the loss and the logarithms of the probabilities, [N, C, D*]."""
    import onnx_ir as ir

    x, labels, *weights = (build.tensor(value) for value in node.inputs if value is not None)
    ignored = node.attributes.get("ignore_index")
    reduction = node.attributes.get_string("reduction", "mean")
    log_probability = build.op("LogSoftmax", x, axis=1)
    kept = None
    if ignored is not None:
        kept = build.op("Not", labels.equals(build.constant(ignored.as_int(), labels.dtype)))
        labels = build.where(kept, labels, build.constant(0, labels.dtype))
    column = build.op("Unsqueeze", labels, build.axes([1]))
    losses = -build.op("Squeeze", build.op("GatherElements", log_probability, column, axis=1), build.axes([1]))
    share = build.op("Gather", weights[0], labels) if weights else None
    if kept is not None:
        share = kept.cast(x.dtype) if share is None else build.where(kept, share, 0.0)
    if share is not None:
        losses = losses * share
    if reduction == "none":
        return losses, log_probability
    total = build.op("ReduceSum", losses, keepdims=0)
    if reduction == "mean":
        size = build.op("Size", labels)
        size.value.dtype = ir.DataType.INT64
        count = size.cast(x.dtype) if share is None else build.op("ReduceSum", share, keepdims=0)
        total = total / count
    return total, log_probability
