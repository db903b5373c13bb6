"""Move a factor per row from a wide gradient to narrower values.

The gradient of a cross entropy is the error of each sample times the weight of the sample, for all classes. It is only
read by matrix products and by a sum over the samples, and the factor can be applied to their narrow inputs or outputs:
to a few hundred columns instead of a vocabulary.

Letters: R rows, C columns of the wide gradient, H columns of a narrow value.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from onnxtool.autodiff.builder import Builder, Tensor
from onnxtool.graph.edit import attribute, constant


def take_out_row_factors(graph: ir.Graph) -> dict[ir.Value, ir.Value]:
    """Move the factors that all readers of a product allow to move; return the replacements of the readers' outputs."""
    build = Builder(graph)
    replaced: dict[ir.Node, list[Tensor]] = {}
    for product in [found for node in graph if (found := _Product.of(node)) is not None]:
        if not product.readers or not product.readers.keys().isdisjoint(replaced):
            continue
        for reader, place in product.readers.items():
            replaced[reader] = [product.without_factor(build, reader, place)]
    build.finish(replaced)
    return {node.outputs[0]: tensors[0].value for node, tensors in replaced.items()}


@dataclass(frozen=True)
class _Product:
    """A gradient [R, C] times a factor.

    Attributes:
        gradient: [R, C].
        factor: a scalar, or one element per row, [R, 1].
        width: C.
        readers: Gemm, and ReduceSum over the rows, with the index of their input; empty if others read it as well.
    """

    gradient: ir.Value
    factor: ir.Value
    width: int
    readers: dict[ir.Node, int]

    @classmethod
    def of(cls, node: ir.Node) -> _Product | None:
        """Recognize a node of a gradient; None for any other node."""
        if node.op_type != "Mul" or not str(node.name).startswith("gradient/"):
            return None
        (gradient, factor), product = node.inputs, node.outputs[0]
        if gradient is None or factor is None or product.shape is None or len(product.shape) != 2:
            return None
        width = product.shape[1]
        if not isinstance(width, int) or not _is_factor(factor):
            return None
        return cls(gradient, factor, width, _readers(product, width))

    def without_factor(self, build: Builder, reader: ir.Node, place: int) -> Tensor:
        """Return the result of `reader`, computed without the wide product."""
        gradient, factor = build.tensor(self.gradient), build.tensor(self.factor)
        if reader.op_type == "ReduceSum":
            # A product of one row with a matrix is faster than ReduceSum, and twice as fast as its transpose.
            row = factor.reshape([1, -1])
            if factor.shape == ():
                row = row.expand(build.concat([1], gradient.size().slice(0, 1)))
            return (row @ gradient).reshape([-1])
        other = build.tensor(_other(reader, place))
        if reader.attributes.get_int("transA", 0):
            pair = (gradient, other * factor) if place == 0 else (other * factor, gradient)
            return build.op("Gemm", *pair, transA=1)
        return build.op("Gemm", gradient, other, transB=reader.attributes.get_int("transB", 0)) * factor


def _is_factor(value: ir.Value) -> bool:
    shape = value.shape
    return shape is not None and (len(shape) == 0 or (len(shape) == 2 and shape[1] == 1))


def _readers(value: ir.Value, width: int) -> dict[ir.Node, int]:
    """Return the readers of a value [R, C], also behind a Reshape of its rows; none if one of them does not fit."""
    readers: dict[ir.Node, int] = {}
    waiting = [value]
    while waiting:
        here = waiting.pop()
        for use in here.uses():
            output = use.node.outputs[0]
            if use.node.op_type == "Reshape" and output.shape is not None and output.shape[-1] == width:
                waiting.append(output)
            elif _fits(use.node, use.idx, width):
                readers[use.node] = use.idx
            else:
                return {}
        if here.is_graph_output():
            return {}
    return readers


def _fits(node: ir.Node, place: int, width: int) -> bool:
    """Return whether a factor per row can be moved past a node, and applies to fewer columns than C there."""
    if node.op_type == "ReduceSum":
        return _sums_rows(node)
    if node.op_type != "Gemm" or len(node.inputs) > 2 or node.attributes.get_float("alpha", 1.0) != 1.0:
        return False
    transposed = [node.attributes.get_int(name, 0) for name in ("transA", "transB")]
    if transposed == [1, 0]:  # a product over the rows, whose other factor has rows as well
        shape = node.outputs[0].shape
    elif place == 0 and not transposed[0]:
        shape = _other(node, place).shape
    else:
        return False
    sizes = [size for size in shape or () if isinstance(size, int)]
    return len(sizes) == 2 and min(sizes) < width


def _sums_rows(node: ir.Node) -> bool:
    """Return whether a node sums over all axes except the last."""
    x, axes = node.inputs[0], constant(node.inputs[1]) if len(node.inputs) > 1 else None
    if x is None or x.shape is None or axes is None or attribute(node, "keepdims", 1):
        return False
    return sorted(axis % len(x.shape) for axis in axes.tolist()) == list(range(len(x.shape) - 1))


def _other(node: ir.Node, place: int) -> ir.Value:
    value = node.inputs[1 - place]
    if value is None:
        raise ValueError("a Gemm has two factors")
    return value
