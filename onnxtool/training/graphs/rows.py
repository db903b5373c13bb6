"""Ignored-label pruning: compute a cross entropy's logits with `ignore_index` only for rows with a label.

Most tokens in masked language modeling have no label, and the head is a third of the work. All layers before the logits
that process each row independently, such as MatMul with a matrix, are computed only on labeled rows.

In the gradient, a factor per row moves from wide to narrower values: each sample's error is multiplied by the sample's
weight, for all classes. Only matrix products and a sum over samples read that result, and the factor can be applied to
their narrow inputs or outputs: to a few hundred columns instead of a vocabulary.

Letters: R rows, the product of all axes but the last; H the last axis, C columns of a wide gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from onnxtool.autodiff.builder import Builder, Tensor
from onnxtool.graph.edit import attribute, constant

# transformers and PyTorch ignore labels with this value.
IGNORE_INDEX = -100

_ELEMENTWISE = frozenset(
    (
        *("Abs", "Add", "Cast", "Div", "Dropout", "Elu", "Erf", "Exp", "Gelu", "Identity", "LeakyRelu", "Mul", "Neg"),
        *("Pow", "Reciprocal", "Relu", "Sigmoid", "Sqrt", "Sub", "Tanh"),
    )
)


def prune_ignored_rows(graph: ir.Graph) -> int:
    """Prune ignored rows, and return the number of losses pruned; dtypes and shapes must be known.

    One row with an ignored label is always kept so that no operator gets an empty tensor, which some versions of
    onnxruntime multiply incorrectly.
    """
    changed = 0
    for node in [node for node in graph if node.op_type == "SoftmaxCrossEntropyLoss" and node.domain == ""]:
        if "ignore_index" in node.attributes and node.attributes.get_string("reduction", "mean") != "none":
            changed += _prune_rows(graph, node)
    return changed


def _prune_rows(graph: ir.Graph, loss: ir.Node) -> bool:
    logits, labels = loss.inputs[:2]
    if logits is None or labels is None or logits.shape is None or len(logits.shape) != 2:
        return False
    top = _unflattened(logits)
    region = _Region(top, loss if top is logits else logits.producer())
    if not region.nodes:
        return False
    build = Builder(graph)
    flat = build.tensor(labels)
    ignored = build.constant([loss.attributes["ignore_index"].as_int()], flat.dtype)
    labeled = build.op("NonZero", build.op("Not", flat.equals(ignored))).reshape([-1])
    rows = build.concat(labeled, [0])
    selected = build.op("Concat", build.op("Gather", flat, labeled, axis=0), ignored, axis=0)
    for value in region.boundary:
        _gather_rows(build, value, rows, region)
    build.finish()
    _flatten(region)
    loss.replace_input_with(0, top)
    loss.replace_input_with(1, selected.value)
    graph.sort()
    return True


def _gather_rows(build: Builder, value: ir.Value, rows: Tensor, region: _Region) -> None:
    """Make the nodes of the region read the labeled rows of `value`, [R, H], instead of `value`."""
    tensor = build.tensor(value)
    width = _width(value)
    if region.rank != 2:
        tensor = tensor.reshape([-1, width])
    taken = build.op("Gather", tensor, rows, axis=0)
    taken.value.shape = ir.Shape([None, width])
    for usage in list(value.uses()):
        if usage.node in region.nodes:
            usage.node.replace_input_with(usage.idx, taken.value)


def _flatten(region: _Region) -> None:
    """Update the region's attributes and shapes: its values now have two axes."""
    for node in region.nodes:
        if node.op_type == "LayerNormalization":
            node.attributes["axis"] = ir.AttrInt64("axis", -1)
        for output in node.outputs:
            if output.shape is not None:
                output.shape = ir.Shape([None, output.shape[-1]]) if len(output.shape) == region.rank else None


class _Region:
    """The nodes before the logits that process each row independently.

    Attributes:
        rank: the rank of all values that have rows.
        nodes: the nodes.
        boundary: values with rows that the nodes read from outside the region, in order of use.
    """

    def __init__(self, top: ir.Value, reader: ir.Node | None) -> None:
        self.rank = 0 if top.shape is None else len(top.shape)
        self.nodes: dict[ir.Node, None] = {}
        self.boundary: list[ir.Value] = []
        readers = {reader}
        waiting = [top]
        while waiting:
            value = waiting.pop()
            node = value.producer()
            if node is None or node in self.nodes or not self._is_prunable(node, readers):
                continue
            self.nodes[node] = None
            readers.add(node)
            waiting.extend(self._rows_of(node))
        values = [value for node in self.nodes for value in self._rows_of(node)]
        self.boundary = [value for value in dict.fromkeys(values) if value.producer() not in self.nodes]

    def _is_prunable(self, node: ir.Node, readers: set[ir.Node | None]) -> bool:
        """Return whether the node processes rows independently, and nothing else reads its ignored rows."""
        if any(output.is_graph_output() for output in node.outputs):
            return False
        users = {usage.node for output in node.outputs for usage in output.uses()}
        return users <= readers and self._has_independent_rows(node)

    def _has_independent_rows(self, node: ir.Node) -> bool:
        if node.domain != "" or any(value is None for value in node.inputs[:2]):
            return False
        inputs = [value for value in node.inputs if value is not None]
        if any(value.shape is None for value in inputs):
            return False
        ranks = [len(value.shape or ()) for value in inputs]
        if not all(_has_width(value) for value in self._rows_of(node)) or ranks[0] > self.rank:
            return False
        if node.op_type == "MatMul":
            maker = inputs[1].producer()  # a Transpose belongs to a tied weight
            return ranks == [self.rank, 2] and (maker is None or maker.op_type == "Transpose")
        if node.op_type == "Gemm":
            plain = not node.attributes.get_int("transA", 0)
            return ranks[:2] == [2, 2] and self.rank == 2 and plain and all(rank <= 1 for rank in ranks[2:])
        if node.op_type == "LayerNormalization":
            axis = node.attributes.get_int("axis", -1)
            return len(node.outputs) == 1 and ranks[0] == self.rank and axis in (-1, self.rank - 1)
        return node.op_type in _ELEMENTWISE and bool(self._rows_of(node)) and self._broadcasts_along_rows(inputs)

    def _broadcasts_along_rows(self, inputs: Sequence[ir.Value]) -> bool:
        """Return whether each input has all rows, one element per column, or a single element."""
        shapes = [list(value.shape or ()) for value in inputs]
        leading = {tuple(map(str, shape[:-1])) for shape in shapes if len(shape) == self.rank}
        return len(leading) == 1 and all(len(shape) in (0, 1, self.rank) for shape in shapes)

    def _rows_of(self, node: ir.Node) -> list[ir.Value]:
        """Return the inputs that have rows."""
        inputs = node.inputs[:1] if node.op_type in ("MatMul", "Gemm", "LayerNormalization") else node.inputs
        return [value for value in inputs if value is not None and len(value.shape or ()) == self.rank]


def _unflattened(logits: ir.Value) -> ir.Value:
    """Return the value [..., C] that a Reshape flattens to `logits` [R, C]; `logits` if there is no such Reshape."""
    node = logits.producer()
    if node is None or node.op_type != "Reshape" or node.inputs[0] is None:
        return logits
    inner = node.inputs[0]
    same = inner.shape is not None and logits.shape is not None and inner.shape[-1] == logits.shape[-1]
    return inner if same and _has_width(inner) and len(logits.uses()) == 1 else logits


def _has_width(value: ir.Value) -> bool:
    return value.shape is not None and isinstance(value.shape[-1], int)


def _width(value: ir.Value) -> int:
    return int(value.shape[-1])  # type: ignore[index, arg-type]


def take_out_row_factors(graph: ir.Graph) -> dict[ir.Value, ir.Value]:
    """Move row factors out of a product where all its readers allow it; return replacements of the readers' outputs."""
    build = Builder(graph)
    replaced: dict[ir.Node, list[Tensor]] = {}
    for product in [candidate for node in graph if (candidate := _ScaledGradient.of(node)) is not None]:
        if not product.readers or not product.readers.keys().isdisjoint(replaced):
            continue
        for reader, place in product.readers.items():
            replaced[reader] = [product.without_factor(build, reader, place)]
    build.finish(replaced)
    return {node.outputs[0]: tensors[0].value for node, tensors in replaced.items()}


@dataclass(frozen=True)
class _ScaledGradient:
    """A gradient [R, C] times a factor.

    Attributes:
        gradient: [R, C].
        factor: a scalar, or one element per row, [R, 1].
        width: C.
        readers: Gemm, and ReduceSum over the rows, with the index of their input; empty if there are other readers.
    """

    gradient: ir.Value
    factor: ir.Value
    width: int
    readers: dict[ir.Node, int]

    @classmethod
    def of(cls, node: ir.Node) -> _ScaledGradient | None:
        """Recognize a gradient node; None for any other node."""
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
        """Return the result of `reader` computed without the wide product."""
        gradient, factor = build.tensor(self.gradient), build.tensor(self.factor)
        if reader.op_type == "ReduceSum":
            # A one-row matrix product is faster than ReduceSum, and twice as fast as its transpose.
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
    """Return the readers of a value [R, C], looking through a Reshape of its rows; none if one of them does not fit."""
    readers: dict[ir.Node, int] = {}
    waiting = [value]
    while waiting:
        view = waiting.pop()
        for usage in view.uses():
            output = usage.node.outputs[0]
            if usage.node.op_type == "Reshape" and output.shape is not None and output.shape[-1] == width:
                waiting.append(output)
            elif _fits(usage.node, usage.idx, width):
                readers[usage.node] = usage.idx
            else:
                return {}
        if view.is_graph_output():
            return {}
    return readers


def _fits(node: ir.Node, place: int, width: int) -> bool:
    """Return whether a factor per row can be moved past a node, where it then applies to fewer than C columns."""
    if node.op_type == "ReduceSum":
        return _sums_rows(node)
    if node.op_type != "Gemm" or len(node.inputs) > 2 or node.attributes.get_float("alpha", 1.0) != 1.0:
        return False
    transposed = [node.attributes.get_int(name, 0) for name in ("transA", "transB")]
    if transposed == [1, 0]:  # a product over the rows, whose other factor also has rows
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
