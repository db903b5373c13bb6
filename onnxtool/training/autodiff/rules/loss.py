"""Gradient of the cross entropy, from the logarithms of the probabilities that the loss computes anyway.

Letters: N samples, C classes, D* further axes of a sample, as of a picture.
"""

from __future__ import annotations

from onnxtool.training.autodiff.builder import Tensor
from onnxtool.training.autodiff.rules.rule import Backward, Rule


def _cross_entropy(n: Backward) -> Tensor:
    """Return `(softmax(x) - one_hot(label)) * share`, the share being what a sample adds to the loss."""
    labels = n.build.op("Unsqueeze", n.x(1), n.build.axes([1]))  # [N, 1, D*]
    share, chosen = _shares(n, labels)
    scaled = n.build.op("Exp", n.y(1)) * share
    return n.build.op("ScatterElements", scaled, chosen, -share.expand(chosen.size()), axis=1, reduction="add")


def _shares(n: Backward, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of the loss by that of each sample, and labels that are all valid; both [N, 1, D*]."""
    build, dtype = n.build, n.x(0).dtype
    ignored = n.node.attributes.get("ignore_index")
    kept = None
    chosen = labels
    if ignored is not None:
        number = build.constant(ignored.as_int(), labels.dtype)
        kept = build.op("Not", labels.equals(number))
        chosen = build.where(kept, labels, build.constant(0, labels.dtype))
    weight = build.op("Gather", n.x(2), chosen) if n.has(2) else None
    if kept is not None:
        weight = kept.cast(dtype) if weight is None else build.where(kept, weight, 0.0)
    reduction = n.attribute("reduction", "mean")
    if reduction == "none":
        slope = build.op("Unsqueeze", n.dy, build.axes([1]))
    elif reduction == "sum":
        slope = n.dy
    else:
        count = build.op("Size", labels).cast(dtype) if weight is None else build.op("ReduceSum", weight, keepdims=0)
        # With no sample at all the loss is not a number, and its gradient is zero.
        slope = n.dy / build.where(count.equals(0.0), 1.0, count)
    return (slope if weight is None else weight * slope), chosen


LOSS: dict[str, Rule] = {
    "SoftmaxCrossEntropyLoss": Rule((_cross_entropy,), num_outputs=2),
}
