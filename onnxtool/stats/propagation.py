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

from onnxtool.model_file.wire import ELEMENT_BITS
from onnxtool.stats.bodies import collected, slices, times_of
from onnxtool.stats.contrib import RULES, Call, Value
from onnxtool.stats.known import WRONG, Names, attributes_of, compute, is_small, reads_of
from onnxtool.stats.multiplications import count_macs

if TYPE_CHECKING:
    import onnx

_MOST_NESTED = 32
_MOST_FOLLOWED = 100_000  # nodes of bodies and functions; those that call each other twice would never end
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
        self._version = self._opsets.get("", self._opsets.get("ai.onnx", 1))
        self._left = _MOST_FOLLOWED

    def follow(self, graph: onnx.GraphProto, names: Names, depth: int = 0) -> Totals:
        """Add what `graph` computes to `names`, and return what that costs."""
        from onnx import numpy_helper

        for tensor in graph.initializer:
            if is_small(tensor.dims) and not tensor.external_data:
                with suppress(*WRONG):
                    names.keep(tensor.name, numpy_helper.to_array(tensor))
                    continue
            names.values[tensor.name] = Value(tuple(tensor.dims), tensor.data_type)
        return self._follow_nodes(graph.node, names, {value.name for value in graph.output}, depth)

    def _follow_nodes(self, nodes: Any, names: Names, kept: set[str], depth: int) -> Totals:
        totals = Totals()
        readers = Counter(name for node in nodes for name in reads_of(node))
        alive: dict[str, int] = {}
        alive_bytes = 0
        for node in nodes:
            inside = self._follow_node(node, names, totals, depth)
            if node.op_type != "Constant":
                made = {name: _num_bytes(names, name) for name in node.output if name}
                totals.num_bytes += sum(made.values())
                alive_bytes += sum(size - alive.get(name, 0) for name, size in made.items())
                alive |= made
            totals.peak_bytes = max(totals.peak_bytes, alive_bytes + inside)
            readers.subtract(reads_of(node))
            for name in (*reads_of(node), *node.output):
                if readers[name] <= 0 and name not in kept:
                    alive_bytes -= alive.pop(name, 0)
        return totals

    def _follow_node(self, node: onnx.NodeProto, names: Names, totals: Totals, depth: int) -> int:
        """Add what `node` computes to `names` and what it costs to `totals`; return the bytes that its bodies take."""
        function = self._functions.get((node.domain, node.op_type, node.overload))
        try:
            if function is not None:
                self._charge(len(function.node), depth)
                return self._call(function, node, names, totals, depth)
            if node.op_type in ("If", "Loop", "Scan") and node.domain in _OWN_DOMAIN:
                return self._enter(node, names, totals, depth)
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

    def _charge(self, num_nodes: int, depth: int) -> None:
        """Count the nodes of a body before they are followed.

        Raises:
            LookupError: it is nested too deep, or too many nodes were followed.
        """
        self._left -= num_nodes
        if depth >= _MOST_NESTED or self._left < 0:
            raise LookupError("nodes without end")

    def _infer(self, node: onnx.NodeProto, names: Names) -> list[Value | None]:
        """Return what is known of each output of `node`; empty where its shape cannot be told."""
        number = compute(node, names, self._version)
        if number is not None:
            names.keep(node.output[0], number)
            return [names.values[node.output[0]]]
        rule = RULES.get(node.op_type)
        if rule is not None and (node.domain not in _OWN_DOMAIN or node.op_type in _BY_OWN_RULE):
            return rule(_call(node, names))[: len(node.output)]
        return self._infer_by_onnx(node, names)

    def _infer_by_onnx(self, node: onnx.NodeProto, names: Names) -> list[Value | None]:
        import onnx
        from onnx import helper, numpy_helper

        domain, op_type = ("", _AS_OF_ONNX[_name(node)]) if _name(node) in _AS_OF_ONNX else (node.domain, node.op_type)
        domain = "" if domain == "ai.onnx" else domain
        version = self._opsets.get(domain, 1) if domain else self._version
        reads = reads_of(node)
        types = {name: helper.make_tensor_type_proto(*reversed(names.values[name])) for name in reads}
        numbers = {name: numpy_helper.from_array(names.numbers[name], name) for name in reads if name in names.numbers}
        opsets = [helper.make_opsetid(name, number) for name, number in self._opsets.items()]
        try:
            schema = onnx.defs.get_schema(op_type, version, domain)
            if op_type != node.op_type or domain != node.domain:
                node = _as(schema, node)
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
            self._charge(len(body.node), depth)
            inner = Names(names)
            self._bind(node, body, inner, attributes)
            cost = self.follow(body, inner, depth + 1)
            followed.append((cost, [inner.values.get(output.name) for output in body.output]))
        if not followed:
            raise LookupError("a body")
        cost, outputs = max(followed, key=lambda item: (sum(item[0].macs.values()), item[0].num_bytes))
        times = times_of(node, names, attributes)
        outputs = collected(node, outputs, attributes, times)
        totals.add(cost, times)
        for name, value in zip(node.output, outputs, strict=False):
            if name and value is not None:
                names.values[name] = value
        return cost.peak_bytes

    def _bind(self, node: onnx.NodeProto, body: onnx.GraphProto, inner: Names, attributes: Mapping[str, Any]) -> None:
        """Give the inputs of a body what the node gives them: a Loop its state, a Scan a slice as well."""
        given: list[Value | None] = [inner.values.get(name) for name in node.input]
        if node.op_type == "Loop":
            given = [Value((), _INT64), Value((), _BOOL), *given[2:]]
        elif node.op_type == "Scan":
            given = slices(given, attributes)
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
_OWN_DOMAIN = ("", "ai.onnx")
# Of onnxruntime, with the shapes of an operator of ONNX.
_AS_OF_ONNX = {"com.microsoft::FusedConv": "Conv", "com.microsoft::FusedGemm": "Gemm"}
# Of ONNX's own domain: operators of onnxruntime that stand there, and one that onnx cannot be trusted with.
_BY_OWN_RULE = frozenset({"Einsum", "SimplifiedLayerNormalization", "SkipLayerNormalization"})


def _name(node: onnx.NodeProto) -> str:
    return f"{node.domain}::{node.op_type}" if node.domain not in _OWN_DOMAIN else node.op_type


def _call(node: onnx.NodeProto, names: Names) -> Call:
    inputs = [names.values.get(name) if name else None for name in node.input]
    if any(name and value is None for name, value in zip(node.input, inputs, strict=True)):
        raise LookupError(node.name)
    return Call(inputs, attributes_of(node), len(node.output))


def _as(schema: onnx.defs.OpSchema, node: onnx.NodeProto) -> onnx.NodeProto:
    """Return `node` as one of the operator of `schema`, without the attributes that are none of it."""
    import onnx

    known = [attribute for attribute in node.attribute if attribute.name in schema.attributes]
    return onnx.NodeProto(op_type=schema.name, input=node.input, output=node.output, attribute=known)


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
