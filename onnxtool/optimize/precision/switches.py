"""A model that holds its products in float32 and in int8, with an input that says which of the two to take.

Any choice of layers is measured by running one session, where building and loading a model for each would take minutes.
Letters of shapes: M products.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from onnxtool.optimize.matching import Editor, replace
from onnxtool.optimize.passes.int8_products import divide, write_product
from onnxtool.optimize.precision.activations import Feeds, open_written
from onnxtool.optimize.precision.products import Product, find_products, open_attention
from onnxtool.optimize.precision.quantization import PLAIN, Adjustment
from onnxtool.optimize.precision.quantization_error import output_errors, padding_mask
from onnxtool.optimize.shapes import fill_types, find_shapes
from onnxtool.runtime.session import Arrays, Session

if TYPE_CHECKING:
    import onnx_ir as ir
    from numpy.typing import NDArray

_SWITCHES = "onnxtool.switches"


@dataclass(frozen=True)
class SwitchableModel:
    """A session on a model with switches.

    Attributes:
        num_weights: of each product that can be switched, by its name.
    """

    num_weights: Mapping[str, int]
    _session: Session

    def errors(self, int8: Collection[str], feeds: Feeds, expected: Arrays) -> NDArray[np.float64]:
        """Return the errors of all outputs (see `output_errors`) on `feeds`, with the products `int8` in int8."""
        switches = np.array([name in int8 for name in self.num_weights], np.float32)
        found = self._session.run({**feeds, _SWITCHES: switches})
        return output_errors(found, expected, padding_mask(feeds))


def open_switchable(model: ir.Model, adjustments: Mapping[str, Adjustment], folder: Path) -> SwitchableModel:
    """Write `model` with switches to `folder` and open a session on it."""
    import onnx_ir as ir

    model = model.clone()
    open_attention(model, frozenset(), find_shapes(model))
    fill_types(model)
    products, _ = find_products(model)
    sizes = {product.name: product.num_weights for product in products}
    switches = ir.Value(name=_SWITCHES, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([len(sizes)]))
    model.graph.inputs.append(switches)
    places = {name: place for place, name in enumerate(sizes)}
    for product in products:
        _write_switch(product, adjustments.get(product.name, PLAIN), switches, places[product.name])
    return SwitchableModel(sizes, open_written(model, folder))


def _write_switch(product: Product, adjustment: Adjustment, switches: ir.Value, place: int) -> None:
    """Replace a product p by `p + switch * (int8 p - p)`."""
    import onnx_ir as ir

    graph, last = product.node.graph, product.result.producer()
    if graph is None or last is None:
        raise ValueError(f"{product.name} is in no graph")
    # Everything else reads the new node from now on, and only then the new node reads the product.
    joint = ir.node("Identity", [None])
    graph.insert_after(last, joint)
    replace(product.result, joint.outputs[0])
    product.result.name = product.result.name or f"{product.name}_float32"  # an output of the graph gave its name away
    editor = Editor(joint)
    value = product.value if adjustment.divisor is None else divide(product, adjustment.divisor, editor)
    quantized = write_product(product, value, adjustment, editor)
    switch = editor.node("Gather", [switches, editor.constant(np.array(place), f"onnxtool.place_{place}")])
    difference = editor.node("Sub", [quantized, product.result])
    joint.replace_input_with(
        0, editor.node("Add", [product.result, editor.node("Mul", [switch, difference])], like=product.result)
    )
