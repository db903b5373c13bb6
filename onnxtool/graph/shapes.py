"""The shapes of all values of a graph, found by inferring them for a few concrete sizes of its dynamic axes.

Names of dynamic axes are the exporter's own, and it leaves many out. With every axis at a prime of its own, shape
inference computes plain numbers, and what it finds says which axis of a value is which. Several sets of primes tell a
dynamic axis from a fixed one, and one of them is large: a size that is cut somewhere is no longer the size.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from onnxtool.graph.probing import Inferred, Numbers, Shape, axis_name, infer, infer_dtypes
from onnxtool.graph.shape_proxies import with_stand_ins

if TYPE_CHECKING:
    import numpy as np
    import onnx_ir as ir

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
        """The probes of small sizes, for those who number the elements of a value."""
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
        import onnx_ir as ir

        known = 0 if value is None else self.dtypes.get(str(value.name), 0)
        return ir.DataType(known).numpy() if known else None

    def named(self, sizes: Sequence[int]) -> str | None:
        """Return the dynamic axis that has these sizes, one a probe; None where there is none."""
        for name in self.probes[0]:
            if all(probe[name] == size for probe, size in zip(self.probes, sizes, strict=True)):
                return name
        return None


def find_shapes(model: ir.Model) -> Shapes:
    """Infer the shapes of all values of the main graph of `model`, once for as long as nobody changes it."""
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
    proto = with_stand_ins(model)
    names = dynamic_axes(model)

    def probe(primes: Sequence[int]) -> tuple[Mapping[str, int], Inferred]:
        # Where there are more axes than primes, odd numbers go on: no two axes may have the same size in all probes.
        further = range(primes[-1] + 2, primes[-1] + 2 * len(names) + 2, 2)
        sizes = dict(zip(names, (*primes, *further), strict=False))
        return sizes, infer(proto, sizes)

    done = [probe(primes) for primes in _SMALL]
    if any(len(shape) >= _RANK_OF_STATES and 0 in shape for shape in done[0][1].shapes.values()):
        done = [probe(primes) for primes in _OF_SAMPLES]
    elif names:
        known = _count_known(done[0][1])
        larger = (probe(primes) for primes in _LARGE)
        done.extend(itertools.islice((one for one in larger if _count_known(one[1]) >= known), 1))
    inferred = [found for _, found in done]
    return Shapes(
        probes=tuple(sizes for sizes, _ in done),
        found=tuple(found.shapes for found in inferred),
        numbers=tuple(found.numbers for found in inferred),
        dtypes=inferred[0].dtypes,
    )


def _count_known(inferred: Inferred) -> int:
    return sum(None not in shape for shape in inferred.shapes.values())


def fill_types(model: ir.Model) -> None:
    """Note the dtype of every value that has none; TorchScript's exporter writes none for intermediate values."""
    import onnx_ir as ir

    unknown = [output for node in model.graph for output in node.outputs if output.type is None]
    dtypes = infer_dtypes(with_stand_ins(model)) if unknown else {}
    for output in unknown:
        if dtype := dtypes.get(str(output.name), 0):
            output.dtype = ir.DataType(dtype)


def infer_shapes(model: ir.Model, sizes: Mapping[str, int]) -> Mapping[str, Shape]:
    """Infer the shapes of all values with the dynamic axes at `sizes`."""
    shapes = find_shapes(model)
    for probe, found in zip(shapes.probes, shapes.found, strict=True):
        if probe == sizes:
            return found
    return infer(with_stand_ins(model), sizes).shapes


def dynamic_axes(model: ir.Model) -> tuple[str, ...]:
    """Return the names of the dynamic axes of the inputs of `model`; one that has no name is called by its place."""
    return tuple(dict.fromkeys(name for value in model.graph.inputs for _, name in named_axes(value)))


def named_axes(value: ir.Value) -> list[tuple[int, str]]:
    """Return the dynamic axes of a graph input, by their place, with their names."""
    import onnx_ir as ir

    return [
        (axis, size.value or axis_name(str(value.name), axis))
        for axis, size in enumerate(value.shape or ())
        if isinstance(size, ir.SymbolicDim)
    ]
