"""Gradient of the cross entropy, computed from the probabilities that the loss needs anyway.

Letters: N samples, C classes, D* further axes of each sample, such as height and width.
"""

from __future__ import annotations

from dataclasses import dataclass

from onnxtool.autodiff.builder import Builder, Tensor
from onnxtool.autodiff.rules.rule import Backward, Rule


@dataclass(frozen=True)
class Labels:
    """The labels of a loss.

    Attributes:
        classes: [N, 1, D*]; 0 for an ignored label, and out of bounds if a label is not a class.
        weight: the weight of each sample, [N, 1, D*]; None for equal weights.
        count: the sum of the weights, a scalar.
    """

    classes: Tensor
    weight: Tensor | None
    count: Tensor

    @classmethod
    def of(cls, n: Backward) -> Labels:
        """Read the labels from the inputs and attributes of the loss."""
        build, dtype = n.build, n.x(0).dtype
        labels = build.op("Unsqueeze", n.x(1), build.axes([1]))
        if (ignored := n.node.attributes.get("ignore_index")) is None:
            labels = without_negative(build, labels)
            weight = build.op("Gather", n.x(2), labels) if n.has(2) else None
        else:
            kept = build.op("Not", labels.equals(build.constant(ignored.as_int(), labels.dtype)))
            labels = without_negative(build, build.where(kept, labels, build.constant(0, labels.dtype)))
            weight = build.where(kept, build.op("Gather", n.x(2), labels), 0.0) if n.has(2) else kept.cast(dtype)
        count = build.op("Size", labels).cast(dtype) if weight is None else build.op("ReduceSum", weight, keepdims=0)
        return cls(labels, weight, count)


def without_negative(build: Builder, labels: Tensor) -> Tensor:
    """Move negative labels out of bounds: ONNX counts them from the last class, but PyTorch's loss raises."""
    return build.where(labels < 0, _NO_CLASS, labels)


_NO_CLASS = 2**31 - 1  # fits int32 and int64 labels


def _gradient(n: Backward) -> Tensor:
    """Return `(softmax(x) - one_hot(label)) * slope`, where slope is the gradient with respect to a sample's loss."""
    labels = Labels.of(n)
    return _error(n, labels) * _slope(n, labels)


def _error(n: Backward, labels: Labels) -> Tensor:
    """Return `softmax(x) - one_hot(label)`, [N, C, D*].

    If the loss is computed from the probabilities, the label's probability is the exponential of the negative sample
    loss. As nothing else reads the probabilities, they can be overwritten once the loss is computed.
    """
    build = n.build
    if _is_flat(n):
        probability = build.op("Softmax", n.x(0), axis=-1)
        of_label = build.op("Exp", -_losses(n, labels)) - 1.0
        return build.op("ScatterElements", probability, labels.classes, of_label, axis=1)
    minus_one = build.constant(-1.0, n.x(0).dtype).expand(labels.classes.size())
    probability = build.op("Exp", n.y(1))
    return build.op("ScatterElements", probability, labels.classes, minus_one, axis=1, reduction="add")


def _slope(n: Backward, labels: Labels) -> Tensor:
    """Return the gradient of the loss with respect to each sample's loss, a scalar or [N, 1, D*]."""
    reduction = n.attribute("reduction", "mean")
    slope = n.dy
    if reduction == "none":
        slope = n.build.op("Unsqueeze", slope, n.build.axes([1]))
    elif reduction == "mean":
        # Without labeled samples, the loss is NaN and its gradient zero.
        slope = slope / n.build.where(labels.count.equals(0.0), 1.0, labels.count)
    return slope if labels.weight is None else labels.weight * slope


def _is_flat(n: Backward) -> bool:
    """Return whether the class axis is last."""
    shape = n.x(0).shape
    return shape is not None and len(shape) == 2


def _losses(n: Backward, labels: Labels) -> Tensor:
    """Return the loss of each sample, [N, 1], for logits [N, C].

    The largest probability is 1 over the sum of the exponentials, so its logarithm is the largest LogSoftmax. This way,
    the gradient's Softmax is the only pass over all classes that computes exponentials.
    """
    build, x, classes = n.build, n.x(0), n.build.axes([1])
    largest = build.op("Log", build.op("ReduceMax", build.op("Softmax", x, axis=-1), classes, keepdims=1))
    # onnxruntime runs the nodes added last first; after this node, Softmax may overwrite the logits.
    of_label = build.op("GatherElements", x, labels.classes, axis=1)
    return build.op("ReduceMax", x, classes, keepdims=1) - of_label - largest


def _forward(n: Backward) -> tuple[Tensor, ...]:
    """Compute the loss of logits [N, C] from their Softmax along the last axis.

    onnxruntime expands the operator into its definition, with LogSoftmax along a middle axis, which takes three times
    as long.
    """
    if not _is_flat(n):
        return ()
    build, labels = n.build, Labels.of(n)
    each = _losses(n, labels)
    if labels.weight is not None:
        each = each * labels.weight
    logarithms = build.op("LogSoftmax", n.x(0), axis=-1)  # removed if nothing reads it
    reduction = n.attribute("reduction", "mean")
    if reduction == "none":
        return build.op("Squeeze", each, build.axes([1])), logarithms
    total = build.op("ReduceSum", each, keepdims=0)
    return (total / labels.count if reduction == "mean" else total), logarithms


LOSS: dict[str, Rule] = {
    "SoftmaxCrossEntropyLoss": Rule((_gradient,), num_outputs=2, forward=_forward),
}
