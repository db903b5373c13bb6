"""Gradient rules: for each operator input, how to compute its gradient.

A gradient is a function of a node in the backward pass: `n.x(i)` and `n.y(i)` are the node's inputs and outputs, `n.dy`
is the gradient of the loss with respect to its first output, and the function returns the gradient with respect to one
input. It is only called for inputs that need a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

import onnx_ir as ir
from numpy.typing import NDArray

from onnxtool.autodiff.builder import Builder, Dimension, Tensor, sum_to

T = TypeVar("T")


class Refusal(Exception):  # noqa: N818 - not a user error: the engine collects them
    """The reason why a rule does not support a node."""


@dataclass(frozen=True)
class Backward:
    """A node in the backward pass.

    Attributes:
        build: adds nodes to the graph.
        node: the node in the forward graph.
        index: the input whose gradient is needed.
        gradients: the gradients of the loss with respect to each output; None if the loss does not depend on it.
        active: the inputs that depend on a source of the differentiation and are therefore not constant.
    """

    build: Builder
    node: ir.Node
    index: int
    gradients: Sequence[Tensor | None]
    active: frozenset[int]

    def x(self, index: int) -> Tensor:
        """Return an input of the node; it must be present."""
        value = self.node.inputs[index]
        if value is None:
            raise ValueError(f"{self.node.op_type} was given no input {index}")
        return self.build.tensor(value)

    def y(self, index: int = 0) -> Tensor:
        """Return an output of the node."""
        return self.build.tensor(self.node.outputs[index])

    @property
    def dy(self) -> Tensor:
        """The gradient with respect to the first output."""
        return self.dys(0)

    def dys(self, index: int) -> Tensor:
        """Return the gradient with respect to an output; zeros if the loss does not depend on it."""
        gradient = self.gradients[index]
        return gradient if gradient is not None else self.build.zeros(self.y(index).size(), self.y(index).dtype)

    def summed(self, gradient: Tensor, index: int) -> Tensor:
        """Sum a gradient with the first output's shape down to the shape of an input, which broadcasts to it."""
        return sum_to(self.build, gradient, of=self.y(), to=self.x(index))

    def has(self, index: int) -> bool:
        """Return whether an optional input is present."""
        return index < len(self.node.inputs) and self.node.inputs[index] is not None

    def attribute(self, name: str, default: T) -> T:
        """Return an attribute of the node; it has the type of `default`."""
        entry = self.node.attributes.get(name)
        value: T = default if entry is None else entry.value
        return list(value) if isinstance(value, tuple) else value  # type: ignore[return-value]

    def constant(self, index: int) -> NDArray | None:  # type: ignore[type-arg]
        """Return the elements of a constant input; None if it is absent or not constant."""
        if not self.has(index) or index in self.active:
            return None
        value = self.node.inputs[index]
        while value is not None and (source := _same_numbers(value)) is not None:
            value = source
        tensor = None if value is None or value.is_graph_input() else ir.convenience.get_const_tensor(value)
        return None if tensor is None else tensor.numpy()

    def shape(self, index: int = 0) -> tuple[Dimension, ...]:
        """Return the sizes of an input; its rank must be known."""
        shape = self.x(index).shape
        if shape is None:
            raise Refusal(f"the rank of {self.x(index).value.name} is not known")
        return shape

    def sizes(self, index: int, start: int = 0) -> list[int]:
        """Return the sizes of an input starting at axis `start`; they must be fixed."""
        sizes = self.shape(index)[start:]
        if not all(isinstance(size, int) for size in sizes):
            raise Refusal(f"the shape of {self.x(index).value.name} is not fixed")
        return [size for size in sizes if isinstance(size, int)]

    def axis(self, default: int) -> int:
        """Return the `axis` attribute as a non-negative index."""
        axis = self.attribute("axis", default)
        return axis + len(self.shape()) if axis < 0 else axis


def _same_numbers(value: ir.Value) -> ir.Value | None:
    """Return the value that `value` is a copy of, possibly with another float dtype."""
    maker = value.producer()
    if maker is None or maker.op_type not in ("Cast", "CastLike", "Identity"):
        return None
    exact = maker.op_type == "Identity" or (value.dtype is not None and value.dtype.is_floating_point())
    return maker.inputs[0] if exact else None


Gradient: TypeAlias = Callable[[Backward], Tensor]


@dataclass(frozen=True)
class Rule:
    """The gradients for an operator.

    Attributes:
        gradients: one for each differentiable input, by index.
        variadic: the last gradient is also used for all further inputs, with their index in `n.index`.
        broadcasts: the inputs broadcast; gradients have the output's shape, and the engine sums them.
        num_outputs: number of outputs that the gradients read; missing optional ones are added to the node.
        outputs: the outputs whose gradients the rule supports.
        forward: computes the node's outputs with other operators, which the gradients share; the node is then removed.
            If it returns nothing, the node is kept.
    """

    gradients: tuple[Gradient | None, ...]
    variadic: bool = False
    broadcasts: bool = False
    num_outputs: int = 1
    outputs: Container[int] = (0,)
    forward: Callable[[Backward], Sequence[Tensor]] | None = None

    def gradient(self, index: int) -> Gradient:
        """Return the gradient of an input.

        Raises:
            Refusal: the rule has no such gradient.
        """
        gradient = self.find(index)
        if gradient is None:
            raise Refusal(f"not with respect to its input {index}")
        return gradient

    def find(self, index: int) -> Gradient | None:
        """Return the gradient of an input, or None if the rule has none."""
        place = min(index, len(self.gradients) - 1) if self.variadic else index
        return self.gradients[place] if place < len(self.gradients) else None


def rule(*gradients: Gradient | None) -> Rule:
    """Make a rule for an operator whose inputs do not broadcast."""
    return Rule(gradients)


def broadcasting(*gradients: Gradient | None) -> Rule:
    """Make a rule for an operator whose inputs broadcast."""
    return Rule(gradients, broadcasts=True)
