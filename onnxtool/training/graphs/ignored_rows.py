"""Ignored-label pruning: compute the logits of a cross entropy with `ignore_index` only for rows with a label.

Most tokens of a masked language model have no label, and its head is a third of the work. All layers before the logits
that process each row independently, such as MatMul with a matrix, are computed on the labeled rows only.

Letters: R rows, the product of all axes but the last; H the last axis.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from onnxtool.autodiff.builder import Builder, Tensor

# transformers and PyTorch ignore labels of this value.
IGNORE_INDEX = -100

_ELEMENTWISE = frozenset(
    (
        *("Abs", "Add", "Cast", "Div", "Dropout", "Elu", "Erf", "Exp", "Gelu", "Identity", "LeakyRelu", "Mul", "Neg"),
        *("Pow", "Reciprocal", "Relu", "Sigmoid", "Sqrt", "Sub", "Tanh"),
    )
)


def prune_ignored_rows(graph: ir.Graph) -> int:
    """Prune ignored rows, and return the number of losses for which it was possible; dtypes and shapes are known.

    One row with an ignored label is always kept: so no operator gets an empty tensor, which not every version of
    onnxruntime multiplies correctly.
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
    """Let the nodes of the region read the labeled rows of `value`, [R, H], instead of `value`."""
    tensor = build.tensor(value)
    width = _width(value)
    if region.rank != 2:
        tensor = tensor.reshape([-1, width])
    taken = build.op("Gather", tensor, rows, axis=0)
    taken.value.shape = ir.Shape([None, width])
    for use in list(value.uses()):
        if use.node in region.nodes:
            use.node.replace_input_with(use.idx, taken.value)


def _flatten(region: _Region) -> None:
    """Update attributes and shapes of the region: its values now have two axes."""
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
        boundary: values with rows that they read from outside the region, in the order of their use.
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
        read = [value for node in self.nodes for value in self._rows_of(node)]
        self.boundary = [value for value in dict.fromkeys(read) if value.producer() not in self.nodes]

    def _is_prunable(self, node: ir.Node, readers: set[ir.Node | None]) -> bool:
        """Return whether the node processes rows independently, and nothing else reads its ignored rows."""
        if any(output.is_graph_output() for output in node.outputs):
            return False
        users = {use.node for output in node.outputs for use in output.uses()}
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
            return ranks == [self.rank, 2] and inputs[1].producer() is None
        if node.op_type == "Gemm":
            plain = not node.attributes.get_int("transA", 0)
            return ranks[:2] == [2, 2] and self.rank == 2 and plain and all(rank <= 1 for rank in ranks[2:])
        if node.op_type == "LayerNormalization":
            axis = node.attributes.get_int("axis", -1)
            return len(node.outputs) == 1 and ranks[0] == self.rank and axis in (-1, self.rank - 1)
        return node.op_type in _ELEMENTWISE and bool(self._rows_of(node)) and self._broadcasts_along_rows(inputs)

    def _broadcasts_along_rows(self, inputs: Sequence[ir.Value]) -> bool:
        """Return whether each input has all rows, one element per column, or one element."""
        shapes = [list(value.shape or ()) for value in inputs]
        leading = {tuple(map(str, shape[:-1])) for shape in shapes if len(shape) == self.rank}
        return len(leading) == 1 and all(len(shape) in (0, 1, self.rank) for shape in shapes)

    def _rows_of(self, node: ir.Node) -> list[ir.Value]:
        """Return the inputs that have rows."""
        inputs = node.inputs[:1] if node.op_type in ("MatMul", "Gemm", "LayerNormalization") else node.inputs
        return [value for value in inputs if value is not None and len(value.shape or ()) == self.rank]


def _unflattened(logits: ir.Value) -> ir.Value:
    """Return the value [..., C] that a Reshape flattens to `logits`, [R, C]; `logits` without such a Reshape."""
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
