"""Write products with weights as fast operators, which int8 and int4 layers build on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxtool.graph.edit import (
    attribute,
    drop_unused,
    is_float,
    is_weight,
    only_consumer,
    operands,
    producer,
    replace_and_erase,
    tensor_of,
    value_graph,
)
from onnxtool.graph.operators import MICROSOFT
from onnxtool.graph.shapes import Shapes, find_shapes
from onnxtool.graph.writer import Writer
from onnxtool.model_file.domains import default_opset
from onnxtool.optimize.pipeline import Context, Outcome, Pass, refusals, rewrite_each

_EQUATION = re.compile(r"([a-z]+),([a-z]+)->([a-z]+)", re.IGNORECASE)


@dataclass(frozen=True)
class _EinsumAxes:
    """The axes of `first` and `second`, by letter.

    Attributes:
        batch: axes of both and of the result.
        rows: axes of the first and of the result.
        summed: axes of both.
        columns: axes of the second and of the result.
        result: all axes of the result, in order.
    """

    first: str
    second: str
    batch: str
    rows: str
    summed: str
    columns: str
    result: str

    def swapped(self) -> _EinsumAxes:
        """Return the product of the second and the first."""
        return _EinsumAxes(self.second, self.first, self.batch, self.columns, self.summed, self.rows, self.result)


def _write_einsums(model: ir.Model, _context: Context) -> Outcome:
    """Replace `Einsum(a, b)` by `MatMul(a, b)` with transpositions, as needed for XLNet and ProphetNet."""
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
        # With swapped operands, nothing has to be moved after the product; Keras writes scores as keys by queries.
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


def _product(equation: str) -> _EinsumAxes | None:
    """Parse an equation; None if it is not exactly a matrix product."""
    match = _EQUATION.fullmatch(equation.replace(" ", ""))
    if match is None or any(len(set(letters)) != len(letters) for letters in match.groups()):
        return None
    first, second, result = match.groups()
    product = _EinsumAxes(
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


def _sizes(product: _EinsumAxes, first: ir.Value, second: ir.Value, shapes: Shapes) -> dict[str, int | None] | None:
    """Return the size of each axis, None for a dynamic one; None if two axes of a letter may differ."""
    sizes: dict[str, int | str] = {}
    for letters, value in ((product.first, first), (product.second, second)):
        shape = shapes.shape(value)
        if shape is None or len(shape) != len(letters):
            return None
        if any(sizes.setdefault(letter, size) != size for letter, size in zip(letters, shape, strict=True)):
            return None
    return {letter: size if isinstance(size, int) else None for letter, size in sizes.items()}


def _by_weight(
    product: _EinsumAxes, x: ir.Value, weight: ir.Value, sizes: dict[str, int | None], writer: Writer
) -> ir.Value:
    """Write the product with a weight of any rank as a product with a matrix, which is computed on saving."""
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


def _moved(value: ir.Value, axes: str, operator: str, writer: Writer) -> ir.Value:
    if axes == operator:
        return value
    return writer.op("Transpose", value, perm=[axes.index(letter) for letter in operator])


def _reshaped(value: ir.Value, shape: Sequence[int], writer: Writer) -> ir.Value:
    name = f"onnxtool.shape_{'_'.join(map(str, shape))}"
    return writer.op("Reshape", value, writer.constant(np.array(shape, np.int64), name))


einsum_products = Pass("einsum_products", _write_einsums)


def _transpose_weights(model: ir.Model, _context: Context) -> Outcome:
    """Replace `MatMul(x, Transpose(W))` by `MatMul(x, V)`, where V is the transposed weight, computed on saving.

    If another node reads W, such as an embedding tied to the output layer, V would be a second copy: then it becomes
    `FusedMatMul<transB=1>(x, W)`, and W stays one tensor.
    """
    matches = [
        (node, transpose)
        for node in model.graph
        if not node.domain
        and node.op_type == "MatMul"
        and (transpose := producer(node.inputs[1], "Transpose")) is not None
        and is_weight(transpose.inputs[0], 2)
        and attribute(transpose, "perm", [1, 0]) == [1, 0]
    ]
    transposed: dict[ir.Value, ir.Value] = {}
    outcome = rewrite_each(model, matches, _fuse_transpose, transposed)
    drop_unused(transposed)
    return outcome


def _fuse_transpose(node: ir.Node, transpose: ir.Node, shapes: Shapes, transposed: dict[ir.Value, ir.Value]) -> str:
    """Rewrite one MatMul, or return the precondition that does not hold."""
    value, weight = node.inputs[0], transpose.inputs[0]
    if value is None or weight is None or not is_float(weight):
        return "neither float32 nor float16"
    writer = Writer(node)
    if weight in transposed or _only_multiplied(weight):
        if weight not in transposed:
            transposed[weight] = writer.initializer(_transposed(weight), f"{weight.name}_transposed")
        fused = writer.node("MatMul", [value, transposed[weight]], like=node.outputs[0])
    elif (shapes.rank(value) or 0) < 2:  # 0: not known
        return "the input is not known to have two axes or more"
    else:
        attributes = {"transB": 1}
        fused = writer.node("FusedMatMul", [value, weight], attributes, domain=MICROSOFT, like=node.outputs[0])
    replace_and_erase(node.outputs[0], fused)
    return ""


def _only_multiplied(weight: ir.Value) -> bool:
    """Whether a weight is only transposed and then used as the right operand of MatMuls."""
    return not weight.is_graph_output() and all(
        reader.op_type == "Transpose"
        and not reader.domain
        and reader.graph is value_graph(weight)
        and attribute(reader, "perm", [1, 0]) == [1, 0]
        and not reader.outputs[0].is_graph_output()
        and all(
            place == 1 and user.op_type == "MatMul" and not user.domain and user.graph is reader.graph
            for user, place in reader.outputs[0].uses()
        )
        for reader, _ in weight.uses()
    )


def _transposed(weight: ir.Value) -> ir.TensorProtocol:
    """Return the transposed weight, float [N, M] of [M, N], computed when its bytes are read."""
    tensor = tensor_of(weight)

    def evaluate() -> ir.TensorProtocol:
        return ir.tensor(np.ascontiguousarray(tensor.numpy().T))

    return ir.LazyTensor(evaluate, tensor.dtype, ir.Shape(tensor.shape.numpy()[::-1]))


transposed_weights = Pass("transposed_weights", _transpose_weights)


_GEMM_OPSET = 7  # before, Gemm does not broadcast by default


def _fuse_biases(model: ir.Model, _context: Context) -> Outcome:
    """Replace `Add(MatMul(x, W), b)` by `Gemm(x, W, b)` if x is a matrix, the only rank that Gemm accepts."""
    matches = [
        (node, parts[0], times)
        for node in model.graph
        if not node.domain
        and node.op_type == "Add"
        and (parts := operands(node, lambda operand: is_weight(operand, 1))) is not None
        and (times := producer(parts[1], "MatMul")) is not None
        and is_weight(times.inputs[1], 2)
    ]
    if not matches or default_opset(model.opset_imports) < _GEMM_OPSET:
        return Outcome(model, 0)
    shapes = find_shapes(model)
    matrices = [row for row in matches if shapes.rank(row[2].inputs[0]) in (None, 2)]
    reasons = [reason for row in matrices if (reason := _fuse_bias(*row, shapes))]
    return Outcome(model, len(matrices) - len(reasons), refusals(reasons))


def _fuse_bias(add: ir.Node, bias: ir.Value, times: ir.Node, shapes: Shapes) -> str:
    """Write one Gemm, or return the precondition that does not hold."""
    value, weight = times.inputs
    if shapes.rank(value) is None:
        return "the rank of the input is not known"
    if shapes.fixed(bias, 0) != shapes.fixed(weight, 1):
        return "the bias is not as long as the last axis"
    if not is_float(bias):
        return "neither float32 nor float16"
    if only_consumer(times.outputs[0], "Add") is not add:
        return "the output of the MatMul is read elsewhere"
    replace_and_erase(add.outputs[0], Writer(add).node("Gemm", [value, weight, bias], like=add.outputs[0]))
    return ""


matmul_add = Pass("matmul_add", _fuse_biases)
