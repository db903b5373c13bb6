"""A model that holds its products in float32 and in fewer bits, with an input that says which of them to take.

Any choice of layers is measured by running one session, where building and loading a model for each would take minutes.
Letters of shapes: M products, L levels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from onnxtool.graph.edit import replace
from onnxtool.graph.shapes import fill_types, find_shapes
from onnxtool.graph.writer import Writer
from onnxtool.optimize.quantization.activations import Feeds, open_written
from onnxtool.optimize.quantization.error import output_errors, padding_mask
from onnxtool.optimize.quantization.linear_layers import Product, find_products, open_products
from onnxtool.runtime.session import Arrays, Session

if TYPE_CHECKING:
    import onnx_ir as ir
    from numpy.typing import NDArray

_SWITCHES = "onnxtool.switches"


@dataclass(frozen=True)
class Level:
    """A precision that a product can have.

    Attributes:
        precision: its name, such as `int8`.
        write: writes the product in it and returns the result.
    """

    precision: str
    write: Callable[[Product, Writer], ir.Value]


@dataclass(frozen=True)
class SwitchableModel:
    """A session on a model with switches.

    Attributes:
        num_weights: of each product that can be switched, by its name.
        precisions: the names of the levels, the lowest first.
    """

    num_weights: Mapping[str, int]
    precisions: tuple[str, ...]
    _session: Session

    def errors(self, levels: Mapping[str, int], feeds: Feeds, expected: Arrays) -> NDArray[np.float64]:
        """Return the errors of all outputs (see `output_errors`) on `feeds`.

        Args:
            levels: the place of its level in `precisions` for each product that is not in float32.
            feeds: input name to array.
            expected: the outputs in float32.
        """
        switches = np.zeros((len(self.precisions), len(self.num_weights)), np.float32)
        for place, name in enumerate(self.num_weights):
            if name in levels:
                switches[levels[name], place] = 1
        found = self._session.run({**feeds, _SWITCHES: switches.reshape(-1)})
        return output_errors(found, expected, padding_mask(feeds))


def open_switchable(model: ir.Model, levels: Sequence[Level], folder: Path) -> SwitchableModel:
    """Write `model` with switches to `folder` and open a session on it."""
    import onnx_ir as ir

    model = model.clone()
    open_products(model, frozenset(), find_shapes(model))
    fill_types(model)
    products, _ = find_products(model)
    sizes = {product.name: product.num_weights for product in products}
    num_switches = len(levels) * len(sizes)
    switches = ir.Value(name=_SWITCHES, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([num_switches]))
    model.graph.inputs.append(switches)
    places = {name: place for place, name in enumerate(sizes)}
    for product in products:
        _write_switches(product, levels, switches, range(places[product.name], num_switches, len(sizes)))
    return SwitchableModel(sizes, tuple(level.precision for level in levels), open_written(model, folder))


def _write_switches(product: Product, levels: Sequence[Level], switches: ir.Value, places: Sequence[int]) -> None:
    """Replace a product p by `p + switch * (int8 p - p)`, with such a term for each level."""
    import onnx_ir as ir

    graph, last = product.node.graph, product.result.producer()
    if graph is None or last is None:
        raise ValueError(f"{product.name} is in no graph")
    # Everything else reads the new node from now on, and only then the new node reads the product.
    joint = ir.node("Identity", [None])
    graph.insert_after(last, joint)
    replace(product.result, joint.outputs[0])
    product.result.name = product.result.name or f"{product.name}_float32"  # an output of the graph gave its name away
    writer = Writer(joint)
    total = product.result
    for level, place in zip(levels, places, strict=True):
        quantized = level.write(product, writer)
        switch = writer.node("Gather", [switches, writer.constant(np.array(place), f"onnxtool.place_{place}")])
        difference = writer.node("Sub", [quantized, product.result])
        total = writer.node("Add", [total, writer.node("Mul", [switch, difference])], like=product.result)
    joint.replace_input_with(0, total)
