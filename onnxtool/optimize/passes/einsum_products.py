"""Write an Einsum that is a matrix product as MatMul, which the other passes and the layers of int8 know."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxtool.graph.edit import is_weight, replace_and_erase, tensor_of
from onnxtool.graph.shapes import Shapes, find_shapes
from onnxtool.graph.writer import Writer
from onnxtool.optimize.pipeline import Context, Outcome, Pass

_EQUATION = re.compile(r"([a-z]+),([a-z]+)->([a-z]+)", re.IGNORECASE)


@dataclass(frozen=True)
class _Product:
    """The axes of `first` and `second`, by their letters.

    Attributes:
        batch: of both and of the result.
        rows: of the first and of the result.
        summed: of both.
        columns: of the second and of the result.
        result: all of the result, in its order.
    """

    first: str
    second: str
    batch: str
    rows: str
    summed: str
    columns: str
    result: str

    def swapped(self) -> _Product:
        """Return the product of the second and the first."""
        return _Product(self.second, self.first, self.batch, self.columns, self.summed, self.rows, self.result)


def _apply(model: ir.Model, _context: Context) -> Outcome:
    """Replace `Einsum(a, b)` by `MatMul(a, b)` with what moves the axes, as XLNet and ProphetNet need it."""
    einsums = [node for node in model.graph if node.op_type == "Einsum" and not node.domain and len(node.inputs) == 2]
    if not einsums:
        return Outcome(model, 0)
    shapes = find_shapes(model)
    return Outcome(model, sum(_rewrite(node, shapes) for node in einsums))


def _rewrite(node: ir.Node, shapes: Shapes) -> bool:
    """Write an Einsum as a MatMul; return whether it is one."""
    product = _product(node.attributes.get_string("equation") or "")
    first, second = node.inputs
    if product is None or first is None or second is None:
        return False
    if not is_weight(second) and product.result == product.batch + product.columns + product.rows:
        # The other way round, nothing has to be moved behind the product; Keras writes scores as keys by queries.
        product, first, second = product.swapped(), second, first
    sizes = _sizes(product, first, second, shapes)
    if sizes is None:
        return False
    writer = Writer(node)
    if is_weight(second) and not product.batch:
        result = _by_weight(product, first, second, sizes, writer)
    elif len(product.rows) == len(product.summed) == len(product.columns) == 1:
        left = _moved(first, product.first, product.batch + product.rows + product.summed, writer)
        right = _moved(second, product.second, product.batch + product.summed + product.columns, writer)
        result = writer.op("MatMul", left, right)
    else:
        return False
    axes = product.batch + product.rows + product.columns
    replace_and_erase(node.outputs[0], _moved(result, axes, product.result, writer))
    return True


def _product(equation: str) -> _Product | None:
    """Read an equation; None where it is more, or less, than a matrix product."""
    match = _EQUATION.fullmatch(equation.replace(" ", ""))
    if match is None or any(len(set(letters)) != len(letters) for letters in match.groups()):
        return None
    first, second, result = match.groups()
    product = _Product(
        first,
        second,
        batch="".join(letter for letter in result if letter in first and letter in second),
        rows="".join(letter for letter in result if letter in first and letter not in second),
        summed="".join(letter for letter in first if letter in second and letter not in result),
        columns="".join(letter for letter in result if letter in second and letter not in first),
        result=result,
    )
    is_whole = len(first) == len(product.batch + product.rows + product.summed)
    is_whole = is_whole and len(second) == len(product.batch + product.summed + product.columns)
    is_whole = is_whole and len(result) == len(product.batch + product.rows + product.columns)
    return product if is_whole and product.rows and product.summed and product.columns else None


def _sizes(product: _Product, first: ir.Value, second: ir.Value, shapes: Shapes) -> dict[str, int | None] | None:
    """Return the size of each axis, None for one that moves; None where two of a letter may differ."""
    found: dict[str, int | str] = {}
    for letters, value in ((product.first, first), (product.second, second)):
        shape = shapes.shape(value)
        if shape is None or len(shape) != len(letters):
            return None
        if any(found.setdefault(letter, size) != size for letter, size in zip(letters, shape, strict=True)):
            return None
    return {letter: size if isinstance(size, int) else None for letter, size in found.items()}


def _by_weight(
    product: _Product, x: ir.Value, weight: ir.Value, sizes: dict[str, int | None], writer: Writer
) -> ir.Value:
    """Write the product with a weight of any rank as that with a matrix, which is made when the model is saved."""
    summed, columns = ([sizes[letter] or 0 for letter in letters] for letters in (product.summed, product.columns))
    order = [product.second.index(letter) for letter in product.summed + product.columns]
    matrix = (int(np.prod(summed)), int(np.prod(columns)))

    def move() -> ir.TensorProtocol:
        return ir.tensor(np.ascontiguousarray(tensor_of(weight).numpy().transpose(order).reshape(matrix)))

    moved = ir.LazyTensor(move, dtype=tensor_of(weight).dtype, shape=ir.Shape(matrix))
    kept = [0] * len(product.rows)
    x = _moved(x, product.first, product.rows + product.summed, writer)
    if len(summed) > 1:
        x = _reshaped(x, [*kept, matrix[0]], writer)
    result = writer.op("MatMul", x, writer.initializer(moved, f"{weight.name}_matrix"))
    return _reshaped(result, [*kept, *columns], writer) if len(columns) > 1 else result


def _moved(value: ir.Value, axes: str, wanted: str, writer: Writer) -> ir.Value:
    if axes == wanted:
        return value
    return writer.op("Transpose", value, perm=[axes.index(letter) for letter in wanted])


def _reshaped(value: ir.Value, shape: Sequence[int], writer: Writer) -> ir.Value:
    name = f"onnxtool.shape_{'_'.join(map(str, shape))}"
    return writer.op("Reshape", value, writer.constant(np.array(shape, np.int64), name))


einsum_products = Pass("einsum_products", _apply)
