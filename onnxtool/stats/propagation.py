"""Find the shape of every value of a graph for given sizes of its inputs, one node after another.

Shapes of ONNX's operators are onnx's own inference of a single node, with the numbers that earlier nodes computed from
shapes put in as constants; those of onnxruntime's operators come from a table of ours. Bodies of If, Loop and Scan and
functions of the model are followed like the graph itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

from onnxtool.stats.contrib import RULES, Call, Value
from onnxtool.stats.known import MOST_NUMBERS, WRONG, Names, attributes_of, compute, reads_of
from onnxtool.stats.multiplications import count_macs
from onnxtool.wire import ELEMENT_BITS

if TYPE_CHECKING:
    import onnx

_MOST_NESTED = 32
_BITS_OF_A_BYTE = 8


@dataclass
class Totals:
    """What the nodes of a graph cost."""

    macs: Counter[str] = field(default_factory=Counter)
    num_bytes: int = 0
    peak_bytes: int = 0
    unknown: Counter[str] = field(default_factory=Counter)

    def add(self, other: Totals, times: int = 1) -> None:
        """Add what a body costs that runs so many times."""
        for op, macs in other.macs.items():
            self.macs[op] += macs * times
        self.num_bytes += other.num_bytes * times
        self.unknown.update(other.unknown)


class Propagation:
    """Follows a model through its graphs."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._functions = {(f.domain, f.name, f.overload): f for f in model.functions}
        self._opsets = {opset.domain: opset.version for opset in model.opset_import}

    def follow(self, graph: onnx.GraphProto, names: Names, depth: int = 0) -> Totals:
        """Add what `graph` computes to `names`, and return what that costs."""
        from onnx import numpy_helper

        for tensor in graph.initializer:
            if prod(tensor.dims) <= MOST_NUMBERS and not tensor.external_data:
                with suppress(*WRONG):
                    names.keep(tensor.name, numpy_helper.to_array(tensor))
                    continue
            names.values[tensor.name] = Value(tuple(tensor.dims), tensor.data_type)
        return self._follow_nodes(graph.node, names, {value.name for value in graph.output}, depth)

    def _follow_nodes(self, nodes: Any, names: Names, kept: set[str], depth: int) -> Totals:
        totals = Totals()
        readers = Counter(name for node in nodes for name in reads_of(node))
        alive: dict[str, int] = {}
        for node in nodes:
            inside = self._follow_node(node, names, totals, depth)
            if node.op_type != "Constant":
                made = {name: _num_bytes(names, name) for name in node.output if name}
                totals.num_bytes += sum(made.values())
                alive |= made
            totals.peak_bytes = max(totals.peak_bytes, sum(alive.values()) + inside)
            readers.subtract(reads_of(node))
            for name in (*reads_of(node), *node.output):
                if readers[name] <= 0 and name not in kept:
                    alive.pop(name, None)
        return totals

    def _follow_node(self, node: onnx.NodeProto, names: Names, totals: Totals, depth: int) -> int:
        """Add what `node` computes to `names` and what it costs to `totals`; return the bytes that its bodies take."""
        if depth > _MOST_NESTED:
            totals.unknown[node.op_type] += 1
            return 0
        function = self._functions.get((node.domain, node.op_type, node.overload))
        if function is not None:
            return self._call(function, node, names, totals, depth)
        if node.op_type in ("If", "Loop", "Scan") and not node.domain:
            return self._enter(node, names, totals, depth)
        try:
            outputs = self._infer(node, names)
        except WRONG:
            outputs = []
        for name, value in zip(node.output, outputs, strict=False):
            if name and value is not None and name not in names.numbers:
                names.values[name] = value
        if not outputs or not all(name in names.values for name in node.output[:1]):
            totals.unknown[_name(node)] += 1
            return 0
        try:
            if macs := count_macs(node.op_type, _call(node, names), outputs):
                totals.macs[_name(node)] += macs
        except WRONG:
            totals.unknown[_name(node)] += 1
        return 0

    def _infer(self, node: onnx.NodeProto, names: Names) -> list[Value | None]:
        """Return what is known of each output of `node`; empty where its shape cannot be told."""
        number = compute(node, names)
        if number is not None:
            names.keep(node.output[0], number)
            return [names.values[node.output[0]]]
        rule = RULES.get(node.op_type)
        if rule is not None and (node.domain or node.op_type in _BY_OWN_RULE):
            return rule(_call(node, names))[: len(node.output)]
        return self._infer_by_onnx(node, names)

    def _infer_by_onnx(self, node: onnx.NodeProto, names: Names) -> list[Value | None]:
        import onnx
        from onnx import helper, numpy_helper

        domain = "" if node.domain == "ai.onnx" else node.domain
        version = self._opsets.get(domain, self._opsets.get(domain or "ai.onnx", 1))
        reads = reads_of(node)
        types = {name: helper.make_tensor_type_proto(*reversed(names.values[name])) for name in reads}
        numbers = {name: numpy_helper.from_array(names.numbers[name], name) for name in reads if name in names.numbers}
        opsets = [helper.make_opsetid(name, number) for name, number in self._opsets.items()]
        try:
            schema = onnx.defs.get_schema(node.op_type, version, domain)
            found = onnx.shape_inference.infer_node_outputs(schema, node, types, numbers, opset_imports=opsets)
        except (onnx.checker.ValidationError, onnx.defs.SchemaError, onnx.shape_inference.InferenceError) as error:
            raise LookupError(node.op_type) from error
        return [_value(found.get(name)) for name in node.output]

    def _enter(self, node: onnx.NodeProto, names: Names, totals: Totals, depth: int) -> int:
        """Follow the bodies of If, Loop or Scan: the dearer branch, and a loop as often as it is known to run."""
        bodies = [attribute.g for attribute in node.attribute if attribute.HasField("g")]
        attributes = attributes_of(node)
        followed: list[tuple[Totals, list[Value | None]]] = []
        for body in bodies:
            inner = Names(names)
            self._bind(node, body, inner, attributes)
            cost = self.follow(body, inner, depth + 1)
            followed.append((cost, [inner.values.get(output.name) for output in body.output]))
        if not followed:
            totals.unknown[_name(node)] += 1
            return 0
        cost, outputs = max(followed, key=lambda item: (sum(item[0].macs.values()), item[0].num_bytes))
        times = _times(node, names, attributes)
        totals.add(cost, times)
        for name, value in zip(node.output, _collected(node, outputs, attributes, times), strict=False):
            if name and value is not None:
                names.values[name] = value
        return cost.peak_bytes

    def _bind(self, node: onnx.NodeProto, body: onnx.GraphProto, inner: Names, attributes: Mapping[str, Any]) -> None:
        """Give the inputs of a body what the node gives them: a Loop its state, a Scan a slice as well."""
        given: list[Value | None] = [inner.values.get(name) for name in node.input]
        if node.op_type == "Loop":
            given = [Value((), _INT64), Value((), _BOOL), *given[2:]]
        elif node.op_type == "Scan":
            states = len(given) - int(attributes["num_scan_inputs"])
            given = [
                value if index < states or value is None else Value(value.shape[1:], value.dtype)
                for index, value in enumerate(given)
            ]
        for formal, value in zip(body.input, given, strict=False):
            inner.numbers.pop(formal.name, None)
            inner.values.pop(formal.name, None)
            if value is not None:
                inner.values[formal.name] = value

    def _call(self, function: Any, node: onnx.NodeProto, names: Names, totals: Totals, depth: int) -> int:
        """Follow the nodes of a function of the model with what the node gives it."""
        inner = Names()
        for formal, name in zip(function.input, node.input, strict=False):
            if name in names.values:
                inner.values[formal] = names.values[name]
            if name in names.numbers:
                inner.numbers[formal] = names.numbers[name]
        given = {attribute.name: attribute for attribute in (*function.attribute_proto, *node.attribute)}
        nodes = [_resolved(body_node, given) for body_node in function.node]
        cost = self._follow_nodes(nodes, inner, set(function.output), depth + 1)
        totals.add(cost)
        for formal, name in zip(function.output, node.output, strict=False):
            if name and formal in inner.values:
                names.values[name] = inner.values[formal]
            if name and formal in inner.numbers:
                names.numbers[name] = inner.numbers[formal]
        return cost.peak_bytes


_INT64, _BOOL = 7, 9
# Of ONNX's own domain: operators of onnxruntime that stand there, and one that onnx cannot be trusted with.
_BY_OWN_RULE = frozenset({"Einsum", "SimplifiedLayerNormalization", "SkipLayerNormalization"})


def _name(node: onnx.NodeProto) -> str:
    return f"{node.domain}::{node.op_type}" if node.domain not in ("", "ai.onnx") else node.op_type


def _call(node: onnx.NodeProto, names: Names) -> Call:
    inputs = [names.values.get(name) if name else None for name in node.input]
    if any(name and value is None for name, value in zip(node.input, inputs, strict=True)):
        raise LookupError(node.name)
    return Call(inputs, attributes_of(node), len(node.output))


def _value(kind: Any) -> Value | None:
    """Return a type of onnx as a value; None where it is no tensor, or a size is not known."""
    if kind is None or not kind.HasField("tensor_type") or not kind.tensor_type.HasField("shape"):
        return None
    dims = kind.tensor_type.shape.dim
    if not all(dim.HasField("dim_value") for dim in dims):
        return None
    return Value(tuple(dim.dim_value for dim in dims), kind.tensor_type.elem_type)


def _num_bytes(names: Names, name: str) -> int:
    value = names.values.get(name)
    if value is None:
        return 0
    return (prod(value.shape) * ELEMENT_BITS.get(value.dtype, 0) + _BITS_OF_A_BYTE - 1) // _BITS_OF_A_BYTE


def _times(node: onnx.NodeProto, names: Names, attributes: Mapping[str, Any]) -> int:
    """Return how often a body runs: once where only running the model would tell."""
    if node.op_type == "Scan":
        scanned = names.values.get(node.input[-1])
        return scanned.shape[0] if scanned is not None and scanned.shape and attributes["num_scan_inputs"] else 1
    if node.op_type == "Loop" and node.input[0] in names.numbers:
        return max(0, min(int(names.numbers[node.input[0]].flat[0]), 1 << 31))
    return 1


def _collected(
    node: onnx.NodeProto, outputs: list[Value | None], attributes: Mapping[str, Any], times: int
) -> list[Value | None]:
    """Return the outputs of the node from those of its body: what is scanned has an axis for the runs in front."""
    if node.op_type == "If":
        return outputs
    states = len(node.input) - (2 if node.op_type == "Loop" else int(attributes["num_scan_inputs"]))
    outputs = outputs[1:] if node.op_type == "Loop" else outputs
    return [
        value if value is None or index < states else Value((times, *value.shape), value.dtype)
        for index, value in enumerate(outputs)
    ]


def _resolved(node: Any, given: Mapping[str, Any]) -> Any:
    """Return a node of a function with the attributes that it takes from the call."""
    import onnx

    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    del copy.attribute[:]
    for attribute in node.attribute:
        if not attribute.ref_attr_name:
            copy.attribute.append(attribute)
        elif attribute.ref_attr_name in given:
            copy.attribute.append(given[attribute.ref_attr_name])
            copy.attribute[-1].name = attribute.name
    return copy
