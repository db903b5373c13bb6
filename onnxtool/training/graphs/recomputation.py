"""Compute cheap activations a second time in the backward pass instead of keeping them, to save memory.

An activation that the gradients read stays in memory from the forward pass until then. If elementwise operators, a
softmax or a normalization compute it from values that are kept anyway, their nodes are duplicated and the gradients
read the copy (Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016; the only matrix products recomputed
here are attention scores).

A plain copy would have no effect: onnxruntime merges equal nodes, and runs nodes before their results are needed. The
copy therefore reads the kept values through a Reshape to their own shape plus a zero that depends on an incoming
gradient: the ArgMax of one of its elements. No optimizer can fold it, no element is copied for it, and the copy cannot
run before the gradient is computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx_ir as ir

from onnxtool.autodiff.builder import Builder, Tensor
from onnxtool.autodiff.engine import gradient_of
from onnxtool.graph.edit import reads

_ELEMENTWISE = frozenset(
    (
        *("Abs", "Add", "Cast", "Clip", "Cos", "Div", "Elu", "Erf", "Exp", "Gelu", "Identity", "LeakyRelu", "Max"),
        *("Min", "Mul", "Neg", "Pow", "Reciprocal", "Relu", "Sigmoid", "Sin", "Softplus", "Sqrt", "Sub", "Sum", "Tanh"),
        "Where",
    )
)
_LAYOUT = frozenset(("Concat", "Expand", "Reshape", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze"))
_COPIES = _LAYOUT | {"Identity"}
_ALONG_AN_AXIS = frozenset(("LayerNormalization", "LogSoftmax", "Softmax"))
_CHEAP = _ELEMENTWISE | _LAYOUT | _ALONG_AN_AXIS
_SHAPES = frozenset(("Shape", "Size"))
# A longer chain back to kept values would also be recomputed for earlier layers, long before they need it.
_MAX_NODES = 10


def recompute_activations(graph: ir.Graph, results: Sequence[ir.Value]) -> int:
    """Make gradients read copies of cheap activations, and return the number of copies.

    Args:
        graph: a graph with gradients, without unused nodes.
        results: the results of the forward pass, including the loss; everything they depend on is the forward pass.
    """
    plan = _Plan(graph, results)
    build = Builder(graph)
    copies = _Copies(build, plan)
    for value in reversed(plan.recomputed):
        copies.replace(value)
    build.finish()
    graph.sort()
    return copies.count


class _Plan:
    """The values to keep and to recompute.

    Attributes:
        forward: the nodes of the forward pass.
        kept: values that gradients read and that are kept.
        recomputed: values that are recomputed, in graph order.
    """

    def __init__(self, graph: ir.Graph, results: Iterable[ir.Value]) -> None:
        self.forward = _ancestors(results)
        self._trained = _depending(graph, [value for value in graph.inputs if _is_float(value)])
        self._scores = _attention_scores(self.forward)
        nodes = [node for node in graph if node in self.forward]
        read = [value for node in nodes for value in node.outputs if self.readers(value)]
        self.kept = set(read)
        self.recomputed: list[ir.Value] = []
        for value in read:
            self.kept.discard(value)
            region = self.region(value) if _is_large(value) else None
            if region is not None and any(node.op_type not in _COPIES for node in region):
                self.recomputed.append(value)
            else:
                self.kept.add(value)

    def readers(self, value: ir.Value) -> list[ir.Node]:
        """Return the backward-pass nodes that read the elements of a value."""
        nodes = dict.fromkeys(use.node for use in value.uses())
        return [node for node in nodes if node not in self.forward and node.op_type not in _SHAPES]

    def region(self, value: ir.Value) -> list[ir.Node] | None:
        """Return the nodes that compute a value from kept ones; None if any is not cheap, or there are too many."""
        nodes: dict[ir.Node, None] = {}
        waiting = [value]
        while waiting:
            node = waiting.pop().producer()
            if node is None or node in nodes:
                continue
            if not self._is_cheap(node) or len(nodes) == _MAX_NODES:
                return None
            nodes[node] = None
            waiting.extend(source for source in sources(node) if not self.is_leaf(source))
        return list(nodes)

    def is_leaf(self, value: ir.Value) -> bool:
        """Return whether a copy reads a value directly: it is kept, or shared by all layers, as a mask is."""
        return value in self.kept or value.producer() is None or value.producer() not in self._trained

    def of_equal_shape(self, value: ir.Value) -> ir.Value:
        """Return a kept value that is known to have the shape of `value`, or `value` itself."""
        waiting, seen = [value], {value}
        while waiting:
            found = waiting.pop()
            if found in self.kept:
                return found
            alike = [one for one in _sources_of_equal_shape(found) if one not in seen]
            waiting += alike
            seen.update(alike)
        return value

    def _is_cheap(self, node: ir.Node) -> bool:
        if node.op_type == "Dropout":
            return len(node.outputs) > 1 and node.outputs[1] in self.kept
        return node.domain == "" and (node.op_type in _CHEAP or node in self._scores)


class _Copies:
    """Adds each copy once, for its first reader in the backward pass."""

    def __init__(self, build: Builder, plan: _Plan) -> None:
        self._build = build
        self._plan = plan
        self._made: dict[ir.Value, Tensor] = {}
        self.count = 0

    def replace(self, value: ir.Value) -> None:
        """Make the gradients read a copy of `value`, if some gradient is computed before they need it."""
        readers = self._plan.readers(value)
        gradient = self._incoming_gradient(value, readers)
        if gradient is None:
            self._plan.kept.add(value)
            return
        copy = self._copy(value, self._zero(gradient))
        if not _ancestors([copy.value]).isdisjoint(readers):
            return  # the copy exists already, for readers after the first of these
        for use in list(value.uses()):
            if use.node in readers:
                use.node.replace_input_with(use.idx, copy.value)
            elif use.node not in self._plan.forward and use.node.op_type in _SHAPES:  # which would keep it until then
                use.node.replace_input_with(use.idx, self._plan.of_equal_shape(value))
        self.count += 1

    def _incoming_gradient(self, value: ir.Value, readers: Sequence[ir.Node]) -> ir.Value | None:
        """Return the gradient of the last forward reader of `value`, or its own, if it needs none of `readers`."""
        layers = [use.node for use in value.uses() if use.node in self._plan.forward]
        outputs = [output for node in reversed(layers) for output in node.outputs]
        for output in (*outputs, value):
            gradient = gradient_of(output)
            if gradient is None or gradient.producer() is None or not gradient.uses():
                continue
            before = _ancestors([gradient])
            if before.isdisjoint(readers) and not before <= self._plan.forward:
                return gradient
        return None

    def _zero(self, gradient: ir.Value) -> Tensor:
        """Return a zero, int64 [1], that depends on the gradient."""
        first = self._build.tensor(gradient).reshape([-1]).slice(0, 1).cast(ir.DataType.FLOAT)
        zero = self._build.op("ArgMax", first, axis=0, keepdims=1)
        zero.value.dtype = ir.DataType.INT64
        return zero

    def _copy(self, value: ir.Value, zero: Tensor) -> Tensor:
        if value not in self._made:
            self._made[value] = self._gate(value, zero) if self._plan.is_leaf(value) else self._compute(value, zero)
        return self._made[value]

    def _gate(self, value: ir.Value, zero: Tensor) -> Tensor:
        """Return `value`, available only once the zero is; constants and masks need no gate."""
        tensor = self._build.tensor(value)
        return tensor.reshape(tensor.size() + zero) if value in self._plan.kept else tensor

    def _compute(self, value: ir.Value, zero: Tensor) -> Tensor:
        node = value.producer()
        if node is None:
            raise ValueError(f"{value.name} is an input and needs no copy")
        if node.op_type == "Dropout":
            return self._drop(node, zero)
        inputs = [None if given is None else self._copy(given, zero).value for given in node.inputs]
        again = ir.Node("", node.op_type, inputs, node.attributes.values(), num_outputs=len(node.outputs))
        kinds = [output.dtype or value.dtype or ir.DataType.FLOAT for output in node.outputs]
        outputs = self._build.add(again, kinds)
        for old, new in zip(node.outputs, outputs, strict=True):
            new.value.shape = old.shape
            self._made.setdefault(old, new)
        return self._made[value]

    def _drop(self, node: ir.Node, zero: Tensor) -> Tensor:
        """Apply the kept dropout mask: it drops the same elements as the first time."""
        x, mask = (self._copy(value, zero) for value in sources(node))
        ratio = self._build.tensor(node.inputs[1]).cast(x.dtype) if node.inputs[1] is not None else 0.5
        return self._build.where(mask, x * (1.0 / (1.0 - ratio)), 0.0)


def sources(node: ir.Node) -> list[ir.Value]:
    """Return what a copy of a node reads: for a dropout its mask, because the copy draws no random numbers."""
    if node.op_type == "Dropout":
        return [value for value in (node.inputs[0], node.outputs[1]) if value is not None]
    return [value for value in node.inputs if value is not None]


def _sources_of_equal_shape(value: ir.Value) -> list[ir.Value]:
    """Return the inputs of a value's operator that have its shape, by the operator or by the names of all axes."""
    node = value.producer()
    if node is None or node.op_type not in _ELEMENTWISE | _ALONG_AN_AXIS | {"Dropout"}:
        return []
    inputs = [one for one in node.inputs if one is not None]
    if node.op_type not in _ELEMENTWISE or len(inputs) == 1:
        return inputs[:1]
    is_known = value.shape is not None and all(isinstance(size, int) or size.value for size in value.shape)
    return [one for one in inputs if is_known and one.shape == value.shape]


def _ancestors(values: Iterable[ir.Value]) -> set[ir.Node]:
    """Return all nodes that values depend on."""
    found: set[ir.Node] = set()
    waiting = list(values)
    while waiting:
        node = waiting.pop().producer()
        if node is not None and node not in found:
            found.add(node)
            waiting.extend(value for value in reads(node) if value is not None)
    return found


def _depending(graph: ir.Graph, values: Iterable[ir.Value]) -> set[ir.Node]:
    """Return all nodes that depend on values."""
    found: set[ir.Node] = set()
    waiting = list(values)
    while waiting:
        for use in waiting.pop().uses():
            if use.node not in found:
                found.add(use.node)
                waiting.extend(use.node.outputs)
    return found


def _attention_scores(forward: Iterable[ir.Node]) -> set[ir.Node]:
    """Return the matrix products of two activations that a softmax reads, through elementwise operators."""
    found: set[ir.Node] = set()
    for softmax in [node for node in forward if node.op_type == "Softmax"]:
        waiting = list(softmax.inputs[:1])
        while waiting:
            value = waiting.pop()
            node = None if value is None else value.producer()
            if node is None:
                continue
            if node.op_type == "MatMul" and all(one is not None and one.producer() is not None for one in node.inputs):
                found.add(node)
            elif node.op_type in _ELEMENTWISE:
                waiting.extend(node.inputs)
    return found


def _is_float(value: ir.Value) -> bool:
    return value.dtype is not None and value.dtype.is_floating_point()


def _is_large(value: ir.Value) -> bool:
    """Return whether a value has more than one element per row; a mean has only one."""
    return value.shape is None or (len(value.shape) > 0 and value.shape[-1] != 1)
