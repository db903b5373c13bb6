"""Shapes of all values of a graph, with sizes as polynomials in the dynamic axes of the inputs.

They are derived from the graph's operators, so the results hold for all inputs: a number is the same for all of them,
and two sizes with one name are always equal. Nothing is decided by trying sample sizes. Where numbers are easier to
work with, `prime_shape` replaces the names with distinct primes: products of different names are then different
numbers, and none accidentally equals a hidden size or a number of heads.

`infer_types` gives only dtypes, and shapes with axis names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxtool.graph.edit import constant
from onnxtool.graph.elements import Numbers, Scope
from onnxtool.graph.inference import Inference, read_type
from onnxtool.graph.operators import Size, Value
from onnxtool.graph.sizes import Sizes
from onnxtool.graph.symbolic import SymbolicInference
from onnxtool.model_file.weights import to_light_proto

Shape = tuple[int | None, ...]  # None for an unknown size

_SUM = " + "  # between the names of axes whose sizes add up, as in `past_sequence + sequence`
_KEPT = "onnxtool.shapes"  # where a model caches its shapes
_RANK_OF_STATES = 3
# Sizes that do not accidentally equal a hidden size or a number of heads; the first of each is the batch size.
_SMALL = ((3, 7, 11, 13, 19, 23, 29, 31), (5, 17, 37, 41, 43, 47, 53, 59))
# Models downsample audio and images, so probe sizes must be large.
_OF_SAMPLES = ((3, 8009, 211, 223, 227, 229), (5, 9001, 307, 311, 313, 317))
_OF_STEPS = ("Conv", "AveragePool", "MaxPool", "LpPool", "STFT")
_TURNING = ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max", "Min", "Mod")
# These turn at a number as well where it is an integer: of positions, where floats are scales and bounds of features.
_TURNING_OF_POSITIONS = ("Clip", "Div")


@dataclass(frozen=True)
class Shapes:
    """The shapes of a graph's values.

    Attributes:
        probes: small sizes of the dynamic axes, by name.
        sizes: the meaning of the texts in `known` and `elements`.
        known: the shape of each value by name, as far as known.
        elements: the elements of values computed only from shapes: numbers, or texts with dtype object.
        dtypes: the dtype of each value, as in onnx.TensorProto.
    """

    probes: tuple[Mapping[str, int], ...]
    sizes: Sizes
    known: Mapping[str, tuple[Size, ...]]
    elements: Numbers
    dtypes: Mapping[str, int]
    _primes: tuple[dict[str, int], ...] = field(default_factory=tuple, repr=False)

    @property
    def small(self) -> range:
        """The prime sets of `prime_shape` with which a value's elements can be numbered.

        Reshapes and transposes that move the numbers to the same places with two sets of primes do so for all sizes: no
        prime can be split, so they move whole axes, which the names are, and constants.
        """
        return range(len(self._primes))

    def shape(self, value: ir.Value | None) -> tuple[int | str, ...] | None:
        """Return the shape of `value`, with texts of `sizes` for dynamic sizes; None if any size is unknown."""
        shape = () if value is None else self.known.get(str(value.name), (None,))
        sizes = tuple(size for size in shape if size is not None)
        return None if value is None or len(sizes) < len(shape) else sizes

    def prime_shape(self, value: ir.Value | None, probe: int = 0) -> tuple[int, ...] | None:
        """Return the shape of `value` with a prime for each name; None if the shape or any size is unknown."""
        shape, primes = self.shape(value), self._primes[probe]
        if shape is None:
            return None

        def prime(name: str) -> int:
            if name not in primes:
                primes[name] = _next_prime(max(primes.values(), default=1))
            return primes[name]

        return tuple(self.sizes.at(size, prime) for size in shape)

    def rank(self, value: ir.Value | None) -> int | None:
        """Return the number of axes of `value`; None if unknown."""
        shape = self._sizes(value)
        return None if shape is None else len(shape)

    def fixed(self, value: ir.Value | None, axis: int) -> int | None:
        """Return the size of an axis if it is the same for all inputs; None if it varies or is unknown."""
        shape = self._sizes(value)
        size = shape[axis] if shape is not None and -len(shape) <= axis < len(shape) else None
        return size if isinstance(size, int) else None

    def same(self, first: ir.Value | None, second: ir.Value | None) -> bool:
        """Return whether two values have the same shape for all inputs."""
        shape = self.shape(first)
        return shape is not None and shape == self.shape(second)

    def dtype(self, value: ir.Value | None) -> np.dtype[Any] | None:
        """Return the dtype of `value`; None if it is unknown or NumPy does not have it."""
        known = 0 if value is None else self.dtypes.get(str(value.name), 0)
        return ir.DataType(known).numpy() if known else None

    def _sizes(self, value: ir.Value | None) -> tuple[Size, ...] | None:
        return None if value is None else self.known.get(str(value.name))


def find_shapes(model: ir.Model) -> Shapes:
    """Infer the shapes of all values of the main graph of `model`; cached until the model changes."""
    structure = _structure(model)
    kept = model.meta.get(_KEPT)
    if kept is None or kept[0] != structure:
        model.meta[_KEPT] = kept = (structure, _find_shapes(model), {})
    shapes: Shapes = kept[1]
    return shapes


def find_turns(model: ir.Model) -> dict[str, set[int]]:
    """Return sizes at which a graph starts to compute differently, by axis name.

    The empty name holds the numbers that anything else is compared with, which may also be lengths, such as the
    distance of two positions, -64 as well as 64. If sizes above a limit cannot be run, the limit is not included.
    """
    sizes = find_shapes(model).sizes
    turns = {
        axis: numbers - {most for size, most in sizes.limits if size == axis} for axis, numbers in sizes.turns.items()
    }
    turns[""] = set()
    for node in model.graph.all_nodes():
        kinds = "if" if node.op_type in _TURNING else "i" if node.op_type in _TURNING_OF_POSITIONS else ""
        for array in map(constant, node.inputs if kinds and not node.domain else ()):
            if array is not None and array.size == 1 and array.dtype.kind in kinds:
                number = abs(array.item()) if array.dtype.kind == "i" else array.item()
                turns[""] |= {int(number)} if number == number // 1 and number > 1 else set()
    axes = dynamic_axes(model)
    return {axis: numbers for axis, numbers in turns.items() if numbers and (not axis or axis in axes)}


def _structure(model: ir.Model) -> int:
    """Return a number that changes when nodes or their inputs change."""
    return hash(
        tuple(
            (node.op_type, *(value and value.name for value in node.inputs), *(value.name for value in node.outputs))
            for node in model.graph
        )
    )


def _find_shapes(model: ir.Model) -> Shapes:
    proto = to_light_proto(model)
    names = dynamic_axes(model)
    sizes, scope = Sizes(), Scope()
    sizes.add_axes(names)
    for name, value in _declared(proto.graph.input).items():
        shape = value.shape and tuple(size or axis_name(name, axis) for axis, size in enumerate(value.shape))
        scope.values[name] = Value(shape, value.dtype)
    SymbolicInference(proto, sizes).follow(proto.graph, scope)
    computed = {name for node in proto.graph.node for name in node.output}
    elements = {name: array for name, array in scope.numbers.items() if name in computed}
    for name, array in scope.sizes.items():
        if None not in array.reshape(-1).tolist():
            elements[name] = np.asarray(np.frompyfunc(sizes.settle, 1, 1)(array), object)
    return Shapes(
        probes=_probes(proto, names),
        sizes=sizes,
        known={
            name: tuple(sizes.settle(size) for size in value.shape)
            for name, value in scope.values.items()
            if value.shape is not None
        },
        elements=elements,
        dtypes={name: value.dtype for name, value in scope.values.items()},
        _primes=tuple(dict(_sized(names, primes)) for primes in _SMALL),
    )


def _sized(names: Sequence[str], primes: Sequence[int]) -> Mapping[str, int]:
    """Return sizes of all axes, no two of them equal; once the primes run out, odd numbers continue."""
    further = range(primes[-1] + 2, primes[-1] + 2 * len(names) + 2, 2)
    return with_sums(dict(zip(names, (*primes, *further), strict=False)))


def _probes(proto: onnx.ModelProto, names: Sequence[str]) -> tuple[Mapping[str, int], ...]:
    """Return two sets of sizes of the axes, small ones unless the model combines many into one step."""
    small = tuple(_sized(names, primes) for primes in _SMALL)
    if any(node.op_type in _OF_STEPS for node in proto.graph.node):
        shapes = _shapes_of(_probe(proto, small[0]))
        if any(len(shape) >= _RANK_OF_STATES and 0 in shape for shape in shapes.values()):
            return tuple(_sized(names, primes) for primes in _OF_SAMPLES)
    return small


def _next_prime(number: int) -> int:
    return next(
        candidate for candidate in count(number + 1) if all(candidate % by for by in range(2, int(candidate**0.5) + 1))
    )


def _probe(proto: onnx.ModelProto, sizes: Mapping[str, int]) -> Scope:
    """Infer the shape and dtype of each value, and compute numeric ones, with the dynamic axes at `sizes`."""
    scope = Scope()
    for name, value in _declared(proto.graph.input).items():
        shape = [
            size if isinstance(size, int) else sizes[size or axis_name(name, axis)]
            for axis, size in enumerate(value.shape or ())
        ]
        scope.values[name] = Value(None if value.shape is None else tuple(shape), value.dtype)
    Inference(proto).follow(proto.graph, scope)
    return scope


def _shapes_of(scope: Scope) -> dict[str, Shape]:
    return {
        name: tuple(size if isinstance(size, int) else None for size in value.shape)
        for name, value in scope.values.items()
        if value.shape is not None
    }


def fill_types(model: ir.Model) -> None:
    """Set the dtype of every value that has none; TorchScript's exporter omits it for intermediate values."""
    unknown = [output for node in model.graph for output in node.outputs if output.type is None]
    values = infer_values(to_light_proto(model)).values if unknown else {}
    for output in unknown:
        value = values.get(str(output.name))
        if value is not None and value.dtype:
            output.dtype = ir.DataType(value.dtype)


def infer_shapes(model: ir.Model, sizes: Mapping[str, int]) -> Mapping[str, Shape]:
    """Infer the shapes of all values with the dynamic axes at `sizes`."""
    find_shapes(model)
    kept: dict[frozenset[tuple[str, int]], Mapping[str, Shape]] = model.meta[_KEPT][2]
    key = frozenset(sizes.items())
    if key not in kept:
        kept[key] = _shapes_of(_probe(to_light_proto(model), sizes))
    return kept[key]


def infer_types(model: ir.Model) -> Numbers:
    """Record the dtype and shape of every value of the main graph; axes keep their names, and known types are kept.

    Returns:
        The elements of small values that follow only from constants and fixed shapes.
    """
    scope = infer_values(to_light_proto(model))
    for node in model.graph:
        for output in node.outputs:
            value = scope.values.get(str(output.name))
            if value is None:
                continue
            if output.dtype is None and value.dtype:
                output.dtype = ir.DataType(value.dtype)
            if value.shape is not None:
                output.shape = ir.Shape(value.shape)
    return scope.numbers


def infer_values(proto: onnx.ModelProto) -> Scope:
    """Infer the dtype and shape of each value of the main graph, with axes by name.

    A size with neither a name nor a known number gets a new name; values that share a name have the same size.
    """
    scope = Scope()
    scope.values.update(_declared(proto.graph.input))
    declared = _declared((*proto.graph.input, *proto.graph.value_info, *proto.graph.output))
    Inference(proto, declared=declared).follow(proto.graph, scope)
    return scope


def _declared(values: Iterable[onnx.ValueInfoProto]) -> dict[str, Value]:
    """Return the types that a model declares for tensors."""
    types = ((value.name, read_type(value.type)) for value in values)
    return {name: value for name, value in types if isinstance(value, Value)}


def dynamic_axes(model: ir.Model) -> tuple[str, ...]:
    """Return the names of the dynamic axes of the inputs of `model`; unnamed axes are named by their position."""
    return tuple(dict.fromkeys(name for value in model.graph.inputs for _, name in named_axes(value)))


def named_axes(value: ir.Value) -> list[tuple[int, str]]:
    """Return the dynamic axes of a graph input as positions and names."""
    return [
        (axis, size.value or axis_name(str(value.name), axis))
        for axis, size in enumerate(value.shape or ())
        if isinstance(size, ir.SymbolicDim)
    ]


def with_sums(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return `sizes`, with each axis named as a sum of others set to their total."""
    parts = {name: name.split(_SUM) for name in sizes}
    return {
        name: sum(sizes[part] for part in parts[name]) if all(part in sizes for part in parts[name]) else size
        for name, size in sizes.items()
    }


def axis_name(name: str, axis: int) -> str:
    """Return the name for an unnamed axis of the input `name`."""
    return f"{name}[{axis}]"
