"""What a gradient rule is: for each input of an operator, the gradient with respect to it.

A gradient is a function of the node on the way back: `n.x(i)` and `n.y(i)` are its inputs and outputs, `n.dy` is the
gradient of the loss with respect to its first output, and what it returns is that with respect to one input. It is only
called where somebody asks for it, so what nobody needs is never built.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from onnxtool.autodiff.builder import Builder, Dimension, Tensor

if TYPE_CHECKING:
    import onnx_ir as ir
    from numpy.typing import NDArray

T = TypeVar("T")


class Refusal(Exception):  # noqa: N818 - not an error of the user's: the engine collects them
    """A rule says why it does not fit a node."""


@dataclass(frozen=True)
class Backward:
    """One node on the way back.

    Attributes:
        build: adds nodes to the graph.
        node: the node of the forward graph.
        index: the input that a gradient is asked for.
        gradients: of the loss with respect to each output; None where the loss does not depend on it.
        trained: the inputs that depend on what is differentiated by, and so are no constants.
    """

    build: Builder
    node: ir.Node
    index: int
    gradients: Sequence[Tensor | None]
    trained: frozenset[int]

    def x(self, index: int) -> Tensor:
        """Return an input of the node, which is there."""
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
        """Return the gradient with respect to an output; zeros where the loss does not depend on it."""
        gradient = self.gradients[index]
        return gradient if gradient is not None else self.build.zeros(self.y(index).size(), self.y(index).dtype)

    def has(self, index: int) -> bool:
        """Whether an optional input was passed."""
        return index < len(self.node.inputs) and self.node.inputs[index] is not None

    def attribute(self, name: str, default: T) -> T:
        """Return an attribute of the node, which has the type of `default`."""
        found = self.node.attributes.get(name)
        value: T = default if found is None else found.value
        return list(value) if isinstance(value, tuple) else value  # type: ignore[return-value]

    def constant(self, index: int) -> NDArray | None:  # type: ignore[type-arg]
        """Return the elements of an input that is the same in every run; None where it is absent or is not."""
        import onnx_ir as ir

        if not self.has(index) or index in self.trained:
            return None
        value = self.node.inputs[index]
        while value is not None and (source := _same_numbers(value)) is not None:
            value = source
        tensor = None if value is None or value.is_graph_input() else ir.convenience.get_const_tensor(value)
        return None if tensor is None else tensor.numpy()

    def shape(self, index: int = 0) -> tuple[Dimension, ...]:
        """Return the sizes of an input whose rank must be known."""
        shape = self.x(index).shape
        if shape is None:
            raise Refusal(f"the rank of {self.x(index).value.name} is not known")
        return shape

    def sizes(self, index: int, start: int = 0) -> list[int]:
        """Return the sizes of an input from axis `start` on, which must be fixed."""
        sizes = self.shape(index)[start:]
        if not all(isinstance(size, int) for size in sizes):
            raise Refusal(f"the shape of {self.x(index).value.name} is not fixed")
        return [size for size in sizes if isinstance(size, int)]

    def axis(self, default: int, rank: int | None = None) -> int:
        """Return the attribute `axis`, counted from the front."""
        axis = self.attribute("axis", default)
        return axis + (len(self.shape()) if rank is None else rank) if axis < 0 else axis


def _same_numbers(value: ir.Value) -> ir.Value | None:
    """Return what `value` is a copy of, in another dtype of float perhaps."""
    maker = value.producer()
    if maker is None or maker.op_type not in ("Cast", "CastLike", "Identity"):
        return None
    exact = maker.op_type == "Identity" or (value.dtype is not None and value.dtype.is_floating_point())
    return maker.inputs[0] if exact else None


Gradient: TypeAlias = Callable[[Backward], Tensor]


@dataclass(frozen=True)
class Rule:
    """The gradients of an operator.

    Attributes:
        gradients: one for each differentiable input, by its place.
        variadic: the last one serves all further inputs as well, and finds its own in `n.index`.
        broadcasts: the inputs broadcast; the gradients have the shape of the output, and the engine sums them.
        num_outputs: how many outputs the gradients read; those that the node leaves out are added to it.
        outputs: the outputs through which a gradient may come.
        forward: computes the outputs of the node by others, of which the gradients use some as well; the node is then
            taken out. Where it returns nothing, the node stays.
    """

    gradients: tuple[Gradient | None, ...]
    variadic: bool = False
    broadcasts: bool = False
    num_outputs: int = 1
    outputs: Container[int] = (0,)
    forward: Callable[[Backward], Sequence[Tensor]] | None = None

    def gradient(self, index: int) -> Gradient:
        """Return the one for an input.

        Raises:
            Refusal: there is none.
        """
        place = min(index, len(self.gradients) - 1) if self.variadic else index
        found = self.gradients[place] if place < len(self.gradients) else None
        if found is None:
            raise Refusal(f"not with respect to its input {index}")
        return found


def rule(*gradients: Gradient | None) -> Rule:
    """Make the rule of an operator whose inputs do not broadcast."""
    return Rule(gradients)


def broadcasting(*gradients: Gradient | None) -> Rule:
    """Make the rule of an operator whose inputs broadcast."""
    return Rule(gradients, broadcasts=True)
