"""Gradients of matrix products, activations along an axis, normalizations, dropout and the cross entropy.

The gradient of the cross entropy is computed from the probabilities that the loss needs anyway.

Letters: M rows, K the axis summed over, N columns; of losses, N samples, C classes, D* further axes of each sample.
"""

from __future__ import annotations

import string
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxtool.autodiff.builder import Builder, Dimension, Tensor, sum_at_run_time, sum_to
from onnxtool.autodiff.rules.rule import Backward, Refusal, Rule, rule

_RUNNING_MEAN = 3


def _swapped(tensor: Tensor, rank: int) -> Tensor:
    """Transpose each matrix in a batch."""
    return tensor.transpose([*range(rank - 2), rank - 1, rank - 2])


def _rows(n: Backward, tensor: Tensor, columns: Dimension, rank: int) -> Tensor:
    """Flatten to a matrix with the last axis as columns."""
    if rank == 2:
        return tensor
    if isinstance(columns, int):
        return tensor.reshape([-1, columns])
    return tensor.reshape(n.build.concat([-1], tensor.size().slice(-1, rank)))


def _matmul_left(n: Backward) -> Tensor:
    a, b = n.shape(0), n.shape(1)
    if len(b) == 2 and len(a) > 1:
        product = n.build.op("Gemm", _rows(n, n.dy, b[1], len(a)), n.x(1), transB=1)
        return product if len(a) == 2 else product.reshape(n.x(0).size())
    left, right, dy = _as_matrices(n)
    return _summed_factor(n, dy @ _swapped(right, max(len(b), 2)), [*a[:-1], a[-1]], left)


def _matmul_right(n: Backward) -> Tensor:
    a, b = n.shape(0), n.shape(1)
    if len(b) == 2 and len(a) > 1:
        # One product over all rows of the batch, instead of a batch of products that must be summed.
        left = _rows(n, n.x(0), a[-1] if isinstance(a[-1], int) else b[0], len(a))
        return n.build.op("Gemm", left, _rows(n, n.dy, b[1], len(a)), transA=1)
    left, right, dy = _as_matrices(n)
    return _summed_factor(n, _swapped(left, max(len(a), 2)) @ dy, b, right)


def _as_matrices(n: Backward) -> tuple[Tensor, Tensor, Tensor]:
    """Return both factors of a product and its gradient with at least two axes, as MatMul treats them internally."""
    left, right, dy = n.x(0), n.x(1), n.dy
    if len(n.shape(1)) == 1:
        right, dy = (n.build.op("Unsqueeze", tensor, n.build.axes([-1])) for tensor in (right, dy))
    if len(n.shape(0)) == 1:
        left = n.build.op("Unsqueeze", left, n.build.axes([0]))
        dy = n.build.op("Unsqueeze", dy, n.build.axes([-2]))
    return left, right, dy


def _summed_factor(n: Backward, gradient: Tensor, shape: Sequence[Dimension], factor: Tensor) -> Tensor:
    """Sum over the batch axes along which the factor was repeated."""
    original = n.x(n.index)
    if factor.value is not original.value:  # a vector, which broadcasts along the whole batch
        return sum_to(n.build, gradient, of=gradient, to=factor).reshape(original.size())
    whole = n.y().shape
    if whole is not None and len(shape) >= 2 and gradient.value.shape is None:
        batch = whole[: max(len(n.shape(0)), len(n.shape(1))) - 2]
        gradient.value.shape = ir.Shape([*batch, *shape[-2:]])
    return sum_to(n.build, gradient, of=gradient, to=original)


def _gemm_left(n: Backward) -> Tensor:
    first, second, alpha = n.attribute("transA", 0), n.attribute("transB", 0), n.attribute("alpha", 1.0)
    if first:
        return n.build.op("Gemm", n.x(1), n.dy, transA=second, transB=1, alpha=alpha)
    return n.build.op("Gemm", n.dy, n.x(1), transB=1 - second, alpha=alpha)


def _gemm_right(n: Backward) -> Tensor:
    first, second, alpha = n.attribute("transA", 0), n.attribute("transB", 0), n.attribute("alpha", 1.0)
    if second:
        return n.build.op("Gemm", n.dy, n.x(0), transA=1, transB=first, alpha=alpha)
    return n.build.op("Gemm", n.x(0), n.dy, transA=1 - first, alpha=alpha)


def _gemm_added(n: Backward) -> Tensor:
    summed, beta = n.summed(n.dy, 2), n.attribute("beta", 1.0)
    return summed if beta == 1 else summed * beta


def _softmax(n: Backward) -> Tensor:
    y = n.y()
    if _is_replaced(y.value):  # rows that are NaN would give a NaN gradient, although it should be zero
        y = n.build.where(n.build.op("IsNaN", y), 0.0, y)
    inner = (n.dy * y).sum([n.attribute("axis", -1)])
    return (n.dy - inner) * y


def _is_replaced(value: ir.Value) -> bool:
    """Return whether a Where reads a value: the graph then replaces fully masked attention rows."""
    return any(
        usage.node.op_type == "Where"
        or (usage.node.op_type in ("Cast", "Identity") and _is_replaced(usage.node.outputs[0]))
        for usage in value.uses()
    )


def _log_softmax(n: Backward) -> Tensor:
    total = n.dy.sum([n.attribute("axis", -1)])
    return n.dy - n.build.op("Exp", n.y()) * total


def _normalized_gradient(slope: Tensor, normalized: Tensor, deviation: Tensor, axes: Sequence[int]) -> Tensor:
    """Return the gradient of `(x - mean) * deviation` with respect to x.

    Args:
        slope: the gradient with respect to the normalized values.
        normalized: the normalized values.
        deviation: the inverse standard deviation.
        axes: the axes averaged over.
    """
    along = normalized * (slope * normalized).mean(axes)
    return (slope - slope.mean(axes) - along) * deviation


def _layer_axes(n: Backward) -> list[int]:
    """Return the axes that a LayerNormalization averages over."""
    return list(range(n.axis(-1), len(n.shape())))


def _layer_normalized(n: Backward) -> Tensor:
    """Return the normalized input, computed in the higher of the input and statistics precisions."""
    widest = max(n.x(0).dtype, n.y(1).dtype, key=lambda dtype: dtype.bitwidth)
    mean, deviation = n.y(1).cast(widest), n.y(2).cast(widest)
    return ((n.x(0).cast(widest) - mean) * deviation).cast(n.dy.dtype)


def _layer_norm_forward(n: Backward) -> tuple[Tensor, ...]:
    """Add a bias of zeros if there is none: onnxruntime 1.17 crashes on statistics without a bias."""
    if n.has(2) or n.x(0).dtype != n.y(1).dtype:
        return ()
    bias = n.build.zeros(n.x(1).size(), n.x(1).dtype)
    axis, epsilon = n.attribute("axis", -1), n.attribute("epsilon", 1e-5)
    return n.build.ops("LayerNormalization", n.x(0), n.x(1), bias, outputs=3, axis=axis, epsilon=epsilon)


def _rms_gradient(slope: Tensor, x: Tensor, deviation: Tensor, axes: Sequence[int]) -> Tensor:
    """Return the gradient of `x * deviation` with respect to x, where deviation is the inverse root mean square."""
    normalized = x * deviation
    return (slope - normalized * (slope * normalized).mean(axes)) * deviation


def _channels(n: Backward, vector: Tensor) -> Tensor:
    """Align a vector with one element per channel with the second axis."""
    return vector.reshape([-1, *[1] * (len(n.shape()) - 2)])


def _batch_axes(n: Backward) -> list[int]:
    """Return the axes averaged over: all but the channel axis and, in instance normalization, the batch axis."""
    first = [] if n.node.op_type == "InstanceNormalization" else [0]
    return [*first, *range(2, len(n.shape()))]


def _statistics(n: Backward) -> tuple[Tensor, Tensor]:
    """Return the normalized input and the inverse standard deviation."""
    x, epsilon = n.x(0), n.attribute("epsilon", 1e-5)
    if n.node.op_type == "BatchNormalization" and not n.attribute("training_mode", 0):
        centred, variance = x - _channels(n, n.x(3)), _channels(n, n.x(4))
    else:
        centred = x - x.mean(_batch_axes(n))
        variance = (centred * centred).mean(_batch_axes(n))
    deviation = n.build.op("Reciprocal", n.build.op("Sqrt", variance + epsilon))
    return centred * deviation, deviation


def _batch_norm(n: Backward) -> Tensor:
    slope = n.dy * _channels(n, n.x(1))
    normalized, deviation = _statistics(n)
    if n.node.op_type == "BatchNormalization" and not n.attribute("training_mode", 0):
        return slope * deviation
    return _normalized_gradient(slope, normalized, deviation, _batch_axes(n))


def _channel_sums(n: Backward, tensor: Tensor) -> Tensor:
    """Sum over all axes except the second."""
    return tensor.sum([0, *range(2, len(n.shape()))], keepdims=False)


def _scale_gradient(n: Backward) -> Tensor:
    return _channel_sums(n, n.dy * _statistics(n)[0])


def bias_gradient(n: Backward) -> Tensor:
    """Return the gradient of a bias with one element per channel."""
    return _channel_sums(n, n.dy)


def _running(n: Backward) -> Tensor:
    """Return the gradient of a running mean or variance, which is an input in inference mode."""
    if n.attribute("training_mode", 0):
        raise Refusal(f"with respect to its input {n.index}, a running statistic that it updates")
    slope = n.dy * _channels(n, n.x(1))
    normalized, deviation = _statistics(n)
    each = slope * deviation if n.index == _RUNNING_MEAN else slope * normalized * deviation * deviation * 0.5
    return -_channel_sums(n, each)


def _batch_norm_forward(n: Backward) -> tuple[Tensor, ...]:
    """Normalize with batch statistics, which the gradients share.

    onnxruntime has no CUDA kernel for training mode, and folds such a node into a convolution with constant weights.
    """
    if not n.attribute("training_mode", 0):
        return ()
    normalized, _ = _statistics(n)
    y = normalized * _channels(n, n.x(1)) + _channels(n, n.x(2))
    mean = n.x(0).mean(_batch_axes(n))
    centred = n.x(0) - mean
    momentum = n.attribute("momentum", 0.9)
    now = (mean.reshape([-1]), (centred * centred).mean(_batch_axes(n)).reshape([-1]))
    running = [n.x(place) * momentum + statistic * (1 - momentum) for place, statistic in zip((3, 4), now, strict=True)]
    return (y, *running)[: len(n.node.outputs)]


def _lp_norm(n: Backward) -> Tensor:
    """Subtract the component along the normalized values, which does not change their direction."""
    axes, order = [n.attribute("axis", -1)], n.attribute("p", 2)
    norm = n.build.op("ReduceL2" if order == 2 else "ReduceL1", n.x(0), n.build.axes(axes), keepdims=1)
    along = n.y() if order == 2 else n.build.op("Sign", n.x(0))
    slope = (n.dy - along * (n.dy * n.y()).sum(axes)) / n.build.where(norm.equals(0.0), 1.0, norm)
    return n.build.where(norm.equals(0.0), 0.0, slope)


def _dropout(n: Backward) -> Tensor:
    """Apply the forward pass's mask and scale; in inference mode, the gradient is unchanged."""
    training = n.constant(2)
    if not n.has(2) or (training is not None and not training.item()):
        return n.dy
    ratio = n.x(1).cast(n.dy.dtype) if n.has(1) else n.build.constant(0.5, n.dy.dtype)
    scale = 1.0 / (1.0 - ratio)
    if training is None:
        scale = n.build.where(n.x(2), scale, 1.0)
    return n.build.where(n.y(1), n.dy * scale, 0.0)


def _einsum_terms(n: Backward) -> tuple[list[str], str]:
    """Return the letters of each input, and of the output, with letters for the axes of an ellipsis."""
    equation = n.attribute("equation", "").replace(" ", "")
    left, arrow, output = equation.partition("->")
    if not arrow:  # then all letters that occur once, in order
        letters = left.replace(".", "")
        once = sorted(letter for letter in set(letters) - {","} if letters.count(letter) == 1)
        output = ("..." if "." in left else "") + "".join(once)
    inputs = left.split(",")
    if "." not in equation:
        return inputs, output
    free = [letter for letter in string.ascii_letters if letter not in equation]
    ranks = [len(n.shape(place)) - len(term) + 3 if "." in term else 0 for place, term in enumerate(inputs)]
    axes = "".join(free[: max(ranks)])
    written = [term.replace("...", axes[len(axes) - rank :]) for term, rank in zip(inputs, ranks, strict=True)]
    return written, output.replace("...", axes)


def _einsum(n: Backward) -> Tensor:
    """Multiply the gradient by the other inputs, and sum over axes that this one lacks.

    An axis may have size 1 in one input and not in another. Of a letter that occurs twice, only the diagonal is read.
    """
    inputs, output = _einsum_terms(n)
    wanted, x = inputs[n.index], n.x(n.index)
    others = [place for place in range(len(inputs)) if place != n.index]
    known = {*output, *(letter for place in others for letter in inputs[place])}
    kept = "".join(letter for letter in dict.fromkeys(wanted) if letter in known)
    equation = ",".join([output, *(inputs[place] for place in others)]) + f"->{kept}"
    gradient = n.build.op("Einsum", n.dy, *(n.x(place) for place in others), equation=equation)
    repeated = {axis: wanted.index(letter) for axis, letter in enumerate(wanted) if letter in wanted[:axis]}
    # Summed over in this input only, so all elements along it have the same gradient.
    absent = [axis for axis, letter in enumerate(wanted) if letter not in known or axis in repeated]
    if absent:
        gradient = n.build.op("Unsqueeze", gradient, n.build.axes(absent))
    if absent or not _has_one_size_per_letter(n, inputs, output):
        whole = _broadcast_size(n, inputs)
        gradient = sum_at_run_time(n.build, gradient.expand(whole), of=whole, to=x.size())
    for axis, first in repeated.items():
        zero, one = (n.build.constant(number, ir.DataType.INT64) for number in (0, 1))
        steps = n.build.op("Range", zero, x.size().slice(axis, axis + 1).reshape([]), one)
        row, column = (steps.reshape([-1 if a == b else 1 for b in range(len(wanted))]) for a in (first, axis))
        gradient = n.build.where(row.equals(column), gradient, 0.0)
    return gradient


def _broadcast_size(n: Backward, inputs: Sequence[str]) -> Tensor:
    """Return the sizes of an input's axes in the result; onnx's shape inference of Einsum takes 1 for some of them."""
    sizes = [
        [n.x(place).size().slice(axis, axis + 1) for place, term in enumerate(inputs) for axis in _places(term, letter)]
        for letter in inputs[n.index]
    ]
    return n.build.concat(*(found[0] if len(found) == 1 else n.build.op("Max", *found) for found in sizes))


def _places(term: str, letter: str) -> list[int]:
    return [axis for axis, other in enumerate(term) if other == letter]


def _has_one_size_per_letter(n: Backward, inputs: Sequence[str], output: str) -> bool:
    """Return whether the shapes show that no axis of size 1 is broadcast."""
    sizes: dict[str, set[object]] = defaultdict(set)
    shapes = [n.x(place).shape for place in range(len(inputs))]
    for term, shape in zip([*inputs, output], [*shapes, n.y().shape], strict=True):
        for letter, size in zip(term, shape or [None] * len(term), strict=True):
            sizes[letter].add(size)
    return all(len(found) == 1 and None not in found for found in sizes.values())


NN: dict[str, Rule] = {
    "BatchNormalization": Rule(
        (_batch_norm, _scale_gradient, bias_gradient, _running, _running), forward=_batch_norm_forward
    ),
    "Dropout": Rule((_dropout,), num_outputs=2),
    "Einsum": Rule((_einsum,), variadic=True),
    "Gemm": rule(_gemm_left, _gemm_right, _gemm_added),
    "InstanceNormalization": rule(_batch_norm, _scale_gradient, bias_gradient),
    "LayerNormalization": Rule(
        (
            lambda n: _normalized_gradient(
                n.dy * n.x(1), _layer_normalized(n), n.y(2).cast(n.dy.dtype), _layer_axes(n)
            ),
            lambda n: n.summed(n.dy * _layer_normalized(n), 1),
            lambda n: n.summed(n.dy, 2),
        ),
        num_outputs=3,
        forward=_layer_norm_forward,
    ),
    "LogSoftmax": rule(_log_softmax),
    "LpNormalization": rule(_lp_norm),
    "MatMul": rule(_matmul_left, _matmul_right),
    "SimplifiedLayerNormalization": Rule(
        (
            lambda n: _rms_gradient(n.dy * n.x(1), n.x(0), n.y(1).cast(n.dy.dtype), _layer_axes(n)),
            lambda n: n.summed(n.dy * (n.x(0) * n.y(1).cast(n.dy.dtype)), 1),
        ),
        num_outputs=2,
    ),
    "Softmax": rule(_softmax),
}


@dataclass(frozen=True)
class ClassLabels:
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
    def of(cls, n: Backward) -> ClassLabels:
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
    labels = ClassLabels.of(n)
    return _error(n, labels) * _slope(n, labels)


def _error(n: Backward, labels: ClassLabels) -> Tensor:
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


def _slope(n: Backward, labels: ClassLabels) -> Tensor:
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


def _losses(n: Backward, labels: ClassLabels) -> Tensor:
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
    build, labels = n.build, ClassLabels.of(n)
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
