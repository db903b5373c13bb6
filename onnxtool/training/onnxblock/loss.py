"""Common losses, in forms that neither overflow nor lose their gradient.

Letters: N samples, C classes, D* further axes of each sample.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper

from onnxtool.errors import ArtifactError
from onnxtool.training.onnxblock import blocks
from onnxtool.training.onnxblock.block import Block

_REDUCTIONS = {
    "mean": lambda: blocks.ReduceMean(keepdims=False),
    "sum": lambda: blocks.ReduceSum(keepdims=False),
    "none": blocks.PassThrough,
}


# Operators that turn logits into probabilities; a loss that applies one again would train something else.
_PROBABILITIES = frozenset(("Sigmoid", "Softmax", "HardSigmoid"))
_SAME_NUMBERS = frozenset(
    (
        *("Cast", "Clip", "Dropout", "Flatten", "Gather", "Identity", "Reshape", "Slice", "Split", "Squeeze"),
        *("Transpose", "Unsqueeze"),
    )
)


def _require_logits(model: ModelProto, name: str, loss: str) -> None:
    """Refuse scores that the graph has already turned into probabilities."""
    makers = {output: node for node in model.graph.node for output in node.output}
    value = name
    while (maker := makers.get(value)) is not None and maker.op_type in _SAME_NUMBERS:
        value = maker.input[0]
    kind = "" if maker is None or maker.domain else maker.op_type
    if maker is not None and kind == "Exp" and (inner := makers.get(maker.input[0])) is not None:
        maker, kind = inner, {"LogSoftmax": "Softmax"}.get(inner.op_type, kind)
    if maker is not None and kind in _PROBABILITIES:
        raise ArtifactError(
            f"{loss} expects logits, and {name!r} are probabilities: the node {maker.name!r} is a {maker.op_type}",
            f"pass the logits that it reads with --loss_input {maker.input[0]} (loss_input_names), or take MSELoss",
        )


def _reduction(name: str) -> Block:
    if name not in _REDUCTIONS:
        raise ArtifactError(f"there is no reduction {name!r}", f"take one of {', '.join(_REDUCTIONS)}")
    return _REDUCTIONS[name]()


class _Elementwise(Block):
    """An elementwise loss against a target of the same shape, then reduced."""

    def __init__(self, reduction: str = "mean") -> None:
        self._reduce = _reduction(reduction)

    def build(self, loss_input_name: str, target_name: str = "target") -> str:
        """Add the loss; the target becomes a model input unless it already is one."""
        if not self.accessor.has_value(target_name):
            blocks.InputLike(loss_input_name)(target_name)
        reduced: str = self._reduce(self._elementwise(loss_input_name, target_name))
        return reduced

    @abstractmethod
    def _elementwise(self, name: str, target: str) -> str:
        """Return the loss of each element."""


class MSELoss(_Elementwise):
    """The squared difference.

    Args:
        reduction: mean, sum or none.
    """

    def _elementwise(self, name: str, target: str) -> str:
        difference = blocks.Sub()(name, target)
        squared: str = blocks.Mul()(difference, difference)
        return squared


class L1Loss(_Elementwise):
    """The absolute difference.

    Args:
        reduction: mean, sum or none.
    """

    def _elementwise(self, name: str, target: str) -> str:
        absolute: str = blocks.Abs()(blocks.Sub()(name, target))
        return absolute


class BCEWithLogitsLoss(_Elementwise):
    """The binary cross entropy of logits x against targets t in [0, 1].

    It is `(1 - t) x + (1 + (p - 1) t) softplus(-x)`, which never overflows, where p is the weight of positive targets.

    Args:
        weight: weight of each element, with a shape that broadcasts to the elements.
        reduction: mean, sum or none.
        pos_weight: weight of positive targets, with a shape that broadcasts to the elements.
    """

    def __init__(
        self,
        weight: NDArray[np.generic] | None = None,
        reduction: str = "mean",
        pos_weight: NDArray[np.generic] | None = None,
    ) -> None:
        super().__init__(reduction)
        self._weight = weight
        self._pos_weight = pos_weight

    def _elementwise(self, name: str, target: str) -> str:
        _require_logits(self.accessor.model, name, "BCEWithLogitsLoss")
        add, mul, one = blocks.Add(), blocks.Mul(), blocks.Constant(1.0)()
        softened = self.accessor.add_node("Softplus", [blocks.Neg()(name)])
        if self._pos_weight is not None:
            more = blocks.Constant(_float32(self._pos_weight) - 1)()
            softened = mul(add(one, mul(more, target)), softened)
        loss: str = add(mul(blocks.Sub()(one, target), name), softened)
        return loss if self._weight is None else mul(blocks.Constant(_float32(self._weight))(), loss)


@dataclass(eq=False)
class CrossEntropyLoss(Block):
    """The negative log-probability of the labeled class.

    The labels are a separate input, int64 [N, D*] for logits [N, C, D*].

    Args:
        weight: weight of each class, float32 [C].
        reduction: mean, sum or none. The mean is over labels that are not ignored, and zero if all are.
        ignore_index: labels with this value are ignored.
        axis: the class axis: 1, or -1 for logits [N, D*, C] such as a language model's. With -1, rows with ignored
            labels are pruned before the layers that compute the logits.
        shift: the logits at a token predict the label of the next one, as in a language model whose labels are its
            inputs; the last logits then have no label. Requires axis=-1 and an ignore_index.
    """

    weight: NDArray[np.generic] | None = None
    reduction: str = "mean"
    ignore_index: int | None = None
    axis: int = 1
    shift: bool = False

    def __post_init__(self) -> None:
        _reduction(self.reduction)
        if self.axis not in (1, -1):
            raise ArtifactError(f"the axis of the classes is {self.axis}", "it is 1, or -1 for the last")
        if self.axis == -1 and self.reduction == "none":
            raise ArtifactError("reduction='none' goes with axis=1", "transpose the logits")
        if self.shift and (self.axis != -1 or self.ignore_index is None):
            raise ArtifactError("labels are shifted with axis=-1 and an ignore_index", "pass ignore_index=-100")

    def build(self, scores_input_name: str, labels_name: str = "labels") -> str:
        """Add the loss; the labels become a model input unless they already are one."""
        scores, labels = scores_input_name, labels_name
        _require_logits(self.accessor.model, scores, "CrossEntropyLoss")
        dims = self.accessor.value_info(scores).type.tensor_type.shape.dim
        shape = [getattr(dim, dim.WhichOneof("value") or "", None) for dim in dims]
        if len(shape) < 2:
            raise ArtifactError(
                f"the logits {scores!r} have {len(shape)} axes, and a cross entropy needs an axis of classes",
                "take another output, or BCEWithLogitsLoss for one score a sample",
            )
        if shape[self.axis] == 1:
            raise ArtifactError(
                f"the logits {scores!r} are of one class, {shape}, and their cross entropy is zero whatever they are",
                "take MSELoss for a number, or BCEWithLogitsLoss for yes or no",
            )
        self._require_labels(labels, shape)
        if self.shift:
            labels = self._shifted(labels, shape)
        if self.axis == -1 and len(shape) > 2:
            rows = self.accessor.add_constant(np.array([-1], np.int64))
            classes = self._last_size(scores, shape)
            scores = self.accessor.add_node("Reshape", [scores, classes])
            labels = self.accessor.add_node("Reshape", [labels, rows])
        inputs = [scores, labels]
        if self.weight is not None:
            inputs.append(self.accessor.add_constant(_float32(self.weight), "class_weight"))
        ignored: dict[str, Any] = {} if self.ignore_index is None else {"ignore_index": self.ignore_index}
        # The operator divides by the sum of the weights, which may be zero.
        divided = self.reduction == "mean" and len(inputs) + len(ignored) > 2
        reduction = "sum" if divided else self.reduction
        loss = self.accessor.add_node("SoftmaxCrossEntropyLoss", inputs, reduction=reduction, **ignored)
        return self.accessor.add_node("Div", [loss, self._count(*inputs[1:])]) if divided else loss

    def _shifted(self, labels: str, scores: list[int | str | None]) -> str:
        """Return the next token's label for each token, and an ignored label for the last."""
        if len(scores) != 3:
            raise ArtifactError(
                f"labels are shifted along the tokens, and the logits have {len(scores)} axes",
                "the logits of a language model are [N, S, C]; pass shift=False for others",
            )
        op, constant = self.accessor.add_node, self.accessor.add_constant
        first, beyond, axis = (constant(np.array([number], np.int64)) for number in (1, 2**62, 1))
        after = op("Slice", [labels, first, beyond, axis])
        return op("Pad", [after, constant(np.array([0, 0, 0, 1])), constant(np.array(self.ignore_index, np.int64))])

    def _count(self, labels: str, weight: str | None = None) -> str:
        """Return the sum of the weights of labels that are not ignored, or 1 if it is zero."""
        op, constant = self.accessor.add_node, self.accessor.add_constant
        is_valid = None
        if self.ignore_index is not None:
            is_valid = op("Not", [op("Equal", [labels, constant(np.array(self.ignore_index, np.int64))])])
            labels = op("Where", [is_valid, labels, constant(np.array(0, np.int64))])
        share = op("Cast", [is_valid or labels], to=TensorProto.FLOAT)
        if weight is not None:
            each = op("Gather", [weight, labels])
            share = each if is_valid is None else op("Mul", [share, each])
        count = op("ReduceSum", [share], keepdims=0)
        is_zero = op("Equal", [count, constant(np.array(0, np.float32))])
        return op("Where", [is_zero, constant(np.array(1, np.float32)), count])

    def _require_labels(self, name: str, scores: list[int | str | None]) -> None:
        """Add the labels to the model's inputs, or refuse an existing input that cannot hold labels."""
        if not self.accessor.has_value(name):
            sizes = list(scores)
            del sizes[self.axis]
            self.base.graph.input.append(helper.make_tensor_value_info(name, TensorProto.INT64, sizes))
        kinds = [value.type.tensor_type.elem_type for value in self.base.graph.input if value.name == name]
        if kinds and kinds[0] not in (TensorProto.INT32, TensorProto.INT64):
            raise ArtifactError(
                f"{name} of the model is {TensorProto.DataType.Name(kinds[0]).lower()}, and labels are int64 or int32",
                "pass labels_name to a loss of your own, or rename the input of the model",
            )

    def _last_size(self, scores: str, shape: list[int | str | None]) -> str:
        """Return the shape [-1, C]."""
        if isinstance(shape[-1], int):
            return self.accessor.add_constant(np.array([-1, shape[-1]], np.int64))
        last = self.accessor.add_node("Shape", [scores], start=-1)
        rows = self.accessor.add_constant(np.array([-1], np.int64))
        return self.accessor.add_node("Concat", [rows, last], axis=0)


def _float32(array: NDArray[np.generic]) -> NDArray[np.float32]:
    return np.asarray(array, np.float32)
