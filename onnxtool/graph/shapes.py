"""The shapes of all values of a graph, found by inferring them for a few concrete sizes of its dynamic axes.

Names of dynamic axes are the exporter's own, and it leaves many out. With every axis at a prime of its own, shape
inference computes plain numbers, and what it finds says which axis of a value is which. Several sets of primes tell a
dynamic axis from a fixed one, and one of them is large: a size that is cut somewhere is no longer the size.

`infer_types` gives only dtypes, and shapes with the names of the axes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from onnxtool.graph.elements import Numbers, Scope
from onnxtool.graph.inference import Inference, read_type
from onnxtool.graph.operator_rules import Value
from onnxtool.graph.protos import to_light_proto

Shape = tuple[int | None, ...]  # None for a size that is not known

_SUM = " + "  # between the names of axes whose sizes add up, as in `past_sequence + sequence`
_KEPT = "onnxtool.shapes"  # where a model keeps them
_RANK_OF_STATES = 3
# Sizes that no hidden size or number of heads is by accident; the first of each is that of the batch.
_SMALL = ((3, 7, 11, 13, 19, 23, 29, 31), (5, 17, 37, 41, 43, 47, 53, 59))
# For samples and pixels, of which a model makes one step of many: nothing would be left of a few.
_OF_SAMPLES = ((3, 8009, 211, 223, 227, 229), (5, 9001, 307, 311, 313, 317))
# The largest of these that a model takes; more than its table of positions has cannot be added to it.
_LARGE = ((2, 4099, 4111, 4127), (2, 509, 503, 499), (2, 127, 113, 109))


@dataclass(frozen=True)
class Shapes:
    """The shapes of a graph's values.

    Attributes:
        probes: the sizes of the dynamic axes in each probe, by their names.
        found: the shape of each value by its name in each probe; None for an axis of unknown size.
        numbers: the values that are computed from shapes alone, by their names in each probe.
        dtypes: the dtype of each value, as in onnx.TensorProto.
    """

    probes: tuple[Mapping[str, int], ...]
    found: tuple[Mapping[str, Shape], ...]
    numbers: tuple[Numbers, ...]
    dtypes: Mapping[str, int]

    @property
    def small(self) -> range:
        """The probes of small sizes, in which the elements of a value can be numbered."""
        return range(min(len(self.probes), len(_SMALL)))

    def of(self, value: ir.Value | None, probe: int = 0) -> Shape | None:
        """Return the shape of `value` in a probe; None where it, or any of its sizes, is not known."""
        shape = None if value is None else self.found[probe].get(str(value.name))
        return None if shape is None or None in shape else shape

    def rank(self, value: ir.Value | None) -> int | None:
        """Return the number of axes of `value`; None where it is not known."""
        shape = None if value is None else self.found[0].get(str(value.name))
        return None if shape is None else len(shape)

    def fixed(self, value: ir.Value | None, axis: int) -> int | None:
        """Return the size of an axis that is the same for all inputs; None where it moves or is not known."""
        shapes = [None if value is None else found.get(str(value.name)) for found in self.found]
        if any(shape is None or not -len(shape) <= axis < len(shape) for shape in shapes):
            return None
        sizes = {shape[axis] for shape in shapes if shape is not None}
        return sizes.pop() if len(sizes) == 1 else None

    def same(self, first: ir.Value | None, second: ir.Value | None) -> bool:
        """Whether two values have the same shape, whatever the inputs are."""
        shapes = [(self.of(first, probe), self.of(second, probe)) for probe in range(len(self.found))]
        return all(one is not None and one == other for one, other in shapes)

    def dtype(self, value: ir.Value | None) -> np.dtype[Any] | None:
        """Return the dtype of `value`; None where it is not known, or numpy does not have it."""
        known = 0 if value is None else self.dtypes.get(str(value.name), 0)
        return ir.DataType(known).numpy() if known else None

    def named(self, sizes: Sequence[int]) -> str | None:
        """Return the dynamic axis that has these sizes, one a probe; None where there is none."""
        for name in self.probes[0]:
            if all(probe[name] == size for probe, size in zip(self.probes, sizes, strict=True)):
                return name
        return None


def find_shapes(model: ir.Model) -> Shapes:
    """Infer the shapes of all values of the main graph of `model`, once until it changes."""
    structure = _structure(model)
    kept = model.meta.get(_KEPT)
    if kept is None or kept[0] != structure:
        model.meta[_KEPT] = kept = (structure, _find_shapes(model))
    shapes: Shapes = kept[1]
    return shapes


def _structure(model: ir.Model) -> int:
    """Return a number that is another one where nodes, or what they read, have changed."""
    return hash(
        tuple(
            (node.op_type, *(value and value.name for value in node.inputs), *(value.name for value in node.outputs))
            for node in model.graph
        )
    )


def _find_shapes(model: ir.Model) -> Shapes:
    proto = to_light_proto(model)
    names = dynamic_axes(model)

    def probe(primes: Sequence[int]) -> tuple[Mapping[str, int], Scope]:
        # Where there are more axes than primes, odd numbers go on: no two axes may have the same size in all probes.
        further = range(primes[-1] + 2, primes[-1] + 2 * len(names) + 2, 2)
        sizes = with_sums(dict(zip(names, (*primes, *further), strict=False)))
        return sizes, _probe(proto, sizes)

    done = [probe(primes) for primes in _SMALL]
    if any(len(shape) >= _RANK_OF_STATES and 0 in shape for shape in _shapes_of(done[0][1]).values()):
        done = [probe(primes) for primes in _OF_SAMPLES]
    elif names:
        known = _count_known(done[0][1])
        larger = (probe(primes) for primes in _LARGE)
        done.extend(itertools.islice((one for one in larger if _count_known(one[1]) >= known), 1))
    scopes = [scope for _, scope in done]
    computed = {name for node in proto.graph.node for name in node.output}
    return Shapes(
        probes=tuple(sizes for sizes, _ in done),
        found=tuple(_shapes_of(scope) for scope in scopes),
        numbers=tuple({name: scope.numbers[name] for name in scope.numbers if name in computed} for scope in scopes),
        dtypes={name: value.dtype for name, value in scopes[0].values.items()},
    )


def _probe(proto: onnx.ModelProto, sizes: Mapping[str, int]) -> Scope:
    """Infer shape and dtype of each value, and compute those that are numbers, with the dynamic axes at `sizes`."""
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


def _count_known(scope: Scope) -> int:
    return sum(value.is_complete for value in scope.values.values())


def fill_types(model: ir.Model) -> None:
    """Note the dtype of every value that has none; TorchScript's exporter writes none for intermediate values."""
    unknown = [output for node in model.graph for output in node.outputs if output.type is None]
    found = infer_values(to_light_proto(model)).values if unknown else {}
    for output in unknown:
        value = found.get(str(output.name))
        if value is not None and value.dtype:
            output.dtype = ir.DataType(value.dtype)


def infer_shapes(model: ir.Model, sizes: Mapping[str, int]) -> Mapping[str, Shape]:
    """Infer the shapes of all values with the dynamic axes at `sizes`."""
    shapes = find_shapes(model)
    for probe, found in zip(shapes.probes, shapes.found, strict=True):
        if probe == sizes:
            return found
    return _shapes_of(_probe(to_light_proto(model), sizes))


def infer_types(model: ir.Model) -> None:
    """Note dtype and shape of every value of the main graph; the axes keep their names, and what is known stays."""
    found = infer_values(to_light_proto(model)).values
    for node in model.graph:
        for output in node.outputs:
            value = found.get(str(output.name))
            if value is None:
                continue
            if output.dtype is None and value.dtype:
                output.dtype = ir.DataType(value.dtype)
            if value.shape is not None:
                output.shape = ir.Shape(value.shape)


def infer_values(proto: onnx.ModelProto) -> Scope:
    """Infer dtype and shape of each value of the main graph, with the axes by their names.

    A size that has no name, and that no number tells, gets a new one; two values that share it have the same.
    """
    scope = Scope()
    scope.values.update(_declared(proto.graph.input))
    declared = _declared((*proto.graph.input, *proto.graph.value_info, *proto.graph.output))
    Inference(proto, declared=declared).follow(proto.graph, scope)
    return scope


def _declared(values: Iterable[onnx.ValueInfoProto]) -> dict[str, Value]:
    """Return what a model says of tensors."""
    types = ((value.name, read_type(value.type)) for value in values)
    return {name: value for name, value in types if isinstance(value, Value)}


def dynamic_axes(model: ir.Model) -> tuple[str, ...]:
    """Return the names of the dynamic axes of the inputs of `model`; one that has no name is called by its place."""
    return tuple(dict.fromkeys(name for value in model.graph.inputs for _, name in named_axes(value)))


def named_axes(value: ir.Value) -> list[tuple[int, str]]:
    """Return the dynamic axes of a graph input, by their place, with their names."""
    return [
        (axis, size.value or axis_name(str(value.name), axis))
        for axis, size in enumerate(value.shape or ())
        if isinstance(size, ir.SymbolicDim)
    ]


def with_sums(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return `sizes` in which an axis that is named as the sum of others is as long as they are together."""
    parts = {name: name.split(_SUM) for name in sizes}
    return {
        name: sum(sizes[part] for part in parts[name]) if all(part in sizes for part in parts[name]) else size
        for name, size in sizes.items()
    }


def axis_name(name: str, axis: int) -> str:
    """Return what an axis of the input `name` is called that has no name of its own."""
    return f"{name}[{axis}]"
