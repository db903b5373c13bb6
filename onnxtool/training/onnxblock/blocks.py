"""Basic blocks of one or two operators each, the parts of all other blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from onnx import ValueInfoProto, helper

from onnxtool.errors import ArtifactError
from onnxtool.training.onnxblock.block import Block


class _Binary(Block):
    """The standard operator named like the class, applied to two values."""

    def build(self, input_name1: str, input_name2: str) -> str:
        """Apply the operator to two values."""
        return self.accessor.add_node(type(self).__name__, [input_name1, input_name2])


class _Unary(Block):
    """The standard operator named like the class, applied to one value."""

    def build(self, input_name: str) -> str:
        """Apply the operator to one value."""
        return self.accessor.add_node(type(self).__name__, [input_name])


class Add(_Binary):
    """The sum of two values."""


class Sub(_Binary):
    """The difference of two values."""


class Mul(_Binary):
    """The elementwise product of two values."""


class Div(_Binary):
    """The elementwise quotient of two values."""


class Sigmoid(_Unary):
    """The logistic function."""


class Log(_Unary):
    """The natural logarithm."""


class Neg(_Unary):
    """The negative."""


class Abs(_Unary):
    """The absolute value."""


@dataclass(eq=False)
class _Reduction(Block):
    """A reduction of a value.

    Args:
        keepdims: whether the result keeps the rank of the input; otherwise it is a scalar.
    """

    keepdims: bool = True

    def build(self, input_name: str) -> str:
        """Reduce over all axes."""
        return self.accessor.add_node(type(self).__name__, [input_name], keepdims=int(self.keepdims))


class ReduceMean(_Reduction):
    """The mean of all elements."""


class ReduceSum(_Reduction):
    """The sum of all elements."""


@dataclass(eq=False)
class Pow(Block):
    """A power with a constant exponent."""

    exponent: float

    def build(self, pow_input_name: str) -> str:
        """Raise each element to the exponent."""
        exponent = self.accessor.add_constant(np.array([self.exponent], np.float32), "exponent")
        return self.accessor.add_node("Pow", [pow_input_name, exponent])


@dataclass(eq=False)
class Constant(Block):
    """A number, or an array of any dtype, as an initializer; a float becomes float32 [1]."""

    value_float: float | Sequence[float] | NDArray[np.generic]

    def build(self) -> str:
        """Add the initializer."""
        value = self.value_float
        array = value if isinstance(value, np.ndarray) else np.atleast_1d(np.array(value, np.float32))
        return self.accessor.add_constant(array)


class SequenceConstruct(Block):
    """A sequence of tensors."""

    def build(self, *names: str) -> str:
        """Put the values into a sequence."""
        return self.accessor.add_node("SequenceConstruct", names)


class ReduceAllL2(Block):
    """The Euclidean norm over all elements of several values, float32 [1]."""

    def build(self, *names: str) -> str:
        """Take the square root of the sum of all squares."""
        squares = [self.accessor.add_node("ReduceSumSquare", [name], keepdims=0) for name in names]
        total = squares[0] if len(squares) == 1 else self.accessor.add_node("Sum", squares)
        one = self.accessor.add_constant(np.array([1], np.int64))
        return self.accessor.add_node("Sqrt", [self.accessor.add_node("Reshape", [total, one])])


@dataclass(eq=False)
class Clip(Block):
    """Values clipped to bounds; either bound may be omitted."""

    clip_min: float | None = None
    clip_max: float | None = None

    def build(self, clip_input_name: str) -> str:
        """Clip each element."""
        # The specification requires scalars here.
        bounds = [
            "" if bound is None else self.accessor.add_constant(np.array(bound, np.float32))
            for bound in (self.clip_min, self.clip_max)
        ]
        return self.accessor.add_node("Clip", [clip_input_name, *bounds])


class PassThrough(Block):
    """The identity: returns its arguments, one name or a tuple of several."""

    def build(self, *names: str) -> str | tuple[str, ...]:
        """Return the names."""
        return names[0] if len(names) == 1 else names


@dataclass(eq=False)
class InputLike(Block):
    """A new model input with the dtype and shape of another value."""

    like: str

    def build(self, input_name: str | None = None) -> str:
        """Add the input, with the given name or a generated one."""
        value = ValueInfoProto()
        value.CopyFrom(self.accessor.value_info(self.like))
        value.name = input_name or self.accessor.new_name("input")
        if self.accessor.has_value(value.name):
            raise ArtifactError(f"the model already has a value called {value.name!r}", "give the input another name")
        self.base.graph.input.append(value)
        return str(value.name)


class LabelEncoder(Block):
    """Replace numbers or strings using a lookup table, with an operator of the ai.onnx.ml domain.

    Args:
        default_float: the value for keys not in the table, if values are floats.
        default_int64: the same for integers.
        default_string: the same for strings.
        keys_floats: the keys, if they are floats; all keys have the same type.
        keys_int64s: the same for integers.
        keys_strings: the same for strings.
        values_floats: one value per key, if they are floats; all values have the same type.
        values_int64s: the same for integers.
        values_strings: the same for strings.
    """

    def __init__(
        self,
        default_float: float = 0.0,
        default_int64: int = -1,
        default_string: str = "_Unused",
        keys_floats: Sequence[float] | None = None,
        keys_int64s: Sequence[int] | None = None,
        keys_strings: Sequence[str] | None = None,
        values_floats: Sequence[float] | None = None,
        values_int64s: Sequence[int] | None = None,
        values_strings: Sequence[str] | None = None,
    ) -> None:
        keys = {"keys_floats": keys_floats, "keys_int64s": keys_int64s, "keys_strings": keys_strings}
        values = {"values_floats": values_floats, "values_int64s": values_int64s, "values_strings": values_strings}
        tables = [{name: entry for name, entry in kinds.items() if entry is not None} for kinds in (keys, values)]
        if any(len(kinds) != 1 for kinds in tables):
            raise ArtifactError("a table has keys of one type and values of one type", "give one list of each")
        counts = [len(entry) for kinds in tables for entry in kinds.values()]
        if counts[0] != counts[1]:
            raise ArtifactError(f"{counts[0]} keys for {counts[1]} values", "give one value for each key")
        self._attributes: dict[str, object] = {
            "default_float": default_float,
            "default_int64": default_int64,
            "default_string": default_string,
            **tables[0],
            **tables[1],
        }

    def build(self, label_encoder_input_name: str) -> str:
        """Look up each element."""
        if all(opset.domain != "ai.onnx.ml" for opset in self.base.opset_import):
            self.base.opset_import.append(helper.make_opsetid("ai.onnx.ml", 2))
        return self.accessor.add_node(
            "LabelEncoder", [label_encoder_input_name], domain="ai.onnx.ml", **self._attributes
        )


@dataclass(eq=False)
class Cast(Block):
    """Elements converted to another type.

    Args:
        to: a value of onnx.TensorProto.DataType.
    """

    to: int

    def build(self, cast_input_name: str) -> str:
        """Convert each element."""
        return self.accessor.add_node("Cast", [cast_input_name], to=self.to)


@dataclass(eq=False)
class Linear(Block):
    """A layer `y = alpha x W^T + beta b` with new parameters, initialized like torch.nn.Linear.

    Args:
        in_features: width of the input.
        out_features: width of the output.
        bias: whether to add a bias.
        alpha: factor of the product.
        beta: factor of the bias.
        seed: seed of the initialization; None draws different parameters each time.
    """

    in_features: int
    out_features: int
    bias: bool = True
    alpha: float = 1.0
    beta: float = 1.0
    seed: int | None = field(default=None, kw_only=True)

    def build(self, linear_input_name: str) -> str:
        """Apply the layer to float32 [N, in_features]."""
        generator = np.random.default_rng(self.seed)
        bound = self.in_features**-0.5
        weight = generator.uniform(-bound, bound, (self.out_features, self.in_features)).astype(np.float32)
        inputs = [linear_input_name, self.accessor.add_constant(weight, "linear.weight")]
        if self.bias:
            bias = generator.uniform(-bound, bound, self.out_features).astype(np.float32)
            inputs.append(self.accessor.add_constant(bias, "linear.bias"))
        return self.accessor.add_node("Gemm", inputs, transB=1, alpha=float(self.alpha), beta=float(self.beta))
