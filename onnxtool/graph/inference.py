"""Infer the shape and dtype of every value of a graph, node by node.

Shapes of ONNX operators come from onnx's own single-node inference, with numbers that earlier nodes computed from
shapes passed in as constants; shapes of onnxruntime's operators come from the table in `operators`. Bodies of If, Loop
and Scan and model functions are followed like the graph itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from onnx.shape_inference import infer_node_outputs

from onnxtool.graph.elements import Scope, attributes_of, compute, is_small, move, reads_of
from onnxtool.graph.operators import OPERATORS, WRONG, Operator, OperatorCall, Shape, Size, Value
from onnxtool.model_file.domains import default_opset

MAX_ELEMENTS = 1 << 14  # for computed values: a row of positions, but not a mask
_MOST_NESTED = 32
_MOST_FOLLOWED = 100_000  # nodes of bodies and functions; functions that call each other twice would never end
_INT64, _BOOL = 7, 9
_FIRST_OPSET_OF_SCANS = 9  # before, Scan had a batch axis


class Inference:
    """Follows a model through its graphs.

    Args:
        model: the model with its small initializers; large ones may be inputs.
        declared: types of inputs and other values, used where inference finds nothing or less. If given, every unknown
            size gets a new name, so that two values are seen to share it.
    """

    def __init__(self, model: onnx.ModelProto, *, declared: Mapping[str, Value] | None = None) -> None:
        self._functions = {(f.domain, f.name, f.overload): f for f in model.functions}
        self._opsets = {opset.domain: opset.version for opset in model.opset_import}
        self._left = _MOST_FOLLOWED
        self._declared = declared
        self._taken = {size for value in (declared or {}).values() for size in value.shape or ()}
        self._num_names = 0
        self._protos: dict[Value | None, onnx.TypeProto] = {None: onnx.TypeProto()}

    @property
    def _version(self) -> int:
        return default_opset(self._opsets) or 1

    def follow(self, graph: onnx.GraphProto, scope: Scope, depth: int = 0) -> None:
        """Add the values that `graph` computes to `scope`."""
        for tensor in graph.initializer:
            if is_small(tensor.dims, MAX_ELEMENTS) and not tensor.external_data:
                with suppress(*WRONG):
                    scope.keep(tensor.name, numpy_helper.to_array(tensor))
                    continue
            scope.values[tensor.name] = Value(tuple(tensor.dims), tensor.data_type)
        for node in graph.node:
            self._follow_node(node, scope, depth)

    def _follow_node(self, node: onnx.NodeProto, scope: Scope, depth: int) -> None:
        """Add a node's outputs to `scope`."""
        function = self._functions.get((node.domain, node.op_type, node.overload))
        outputs: Sequence[Value | onnx.TypeProto | None] = []
        with suppress(*WRONG):
            if function is not None:
                self._charge(len(function.node), depth)
                self._call_function(function, node, scope, depth)
                return
            if node.op_type in ("If", "Loop", "Scan") and not node.domain:
                outputs = self._enter(node, scope, depth)
            else:
                outputs = self._infer(node, scope)
        self._note(node, outputs, scope)

    def _note(self, node: onnx.NodeProto, outputs: Sequence[Value | onnx.TypeProto | None], scope: Scope) -> None:
        """Record what is known about the outputs of `node`."""
        for index, name in enumerate(node.output):
            value = outputs[index] if index < len(outputs) else None
            if not name or name in scope.numbers:
                continue
            if value is not None and not isinstance(value, Value):
                scope.other_types[name] = value
                continue
            if self._declared is not None:
                value = self._named(_better(self._declared.get(name), value))
            if value is not None:
                scope.values[name] = value

    def _named(self, value: Value | None) -> Value | None:
        """Return the value with a new name for each unknown size."""
        if value is None or value.shape is None or None not in value.shape:
            return value
        return Value(tuple(self._new_name() if size is None else size for size in value.shape), value.dtype)

    def _new_name(self) -> str:
        """Return an unused name in the style that onnx gives to axes."""
        while (name := f"unk__{self._num_names}") in self._taken:
            self._num_names += 1
        self._taken.add(name)
        return name

    def _charge(self, num_nodes: int, depth: int) -> None:
        """Count the nodes of a body before following them."""
        self._left -= num_nodes
        if depth >= _MOST_NESTED or self._left < 0:
            raise LookupError("nodes without end")

    def _infer(self, node: onnx.NodeProto, scope: Scope) -> Sequence[Value | onnx.TypeProto | None]:
        """Return what is known about each output of `node`."""
        number = compute(node, scope, self._version, MAX_ELEMENTS)
        if number is not None:
            scope.keep(node.output[0], number)
            return [scope.values[node.output[0]]]
        row = OPERATORS.get((node.domain, node.op_type))
        if row is not None and row.outputs:
            return row.infer(_call(row, node, scope))
        sizes = move(node, scope, self._version)
        if sizes is not None and is_small(sizes.shape, MAX_ELEMENTS):
            return [self._keep_sizes(node, sizes, scope)]
        inferred = self._infer_by_onnx(node, scope, row.onnx_name if row is not None else "")
        outputs = [read_type(inferred.get(name)) for name in node.output]
        if node.op_type == "Split" and not node.domain:
            return _pieces(outputs, scope.values.get(node.input[0]), attributes_of(node))
        if node.op_type == "Reshape" and not node.domain and len(node.input) > 1:
            return [_reshaped(outputs[0], scope.values.get(node.input[1]))]
        return outputs

    def _keep_sizes(self, node: onnx.NodeProto, sizes: NDArray[Any], scope: Scope) -> Value:
        """Record sizes that `node` computes or moves, and return the shape and dtype of its output."""
        source = scope.values.get(node.input[0])
        dtype = _INT64 if node.op_type == "Shape" or source is None else source.dtype
        value = Value(sizes.shape, int(attributes_of(node).get("to", dtype)))
        if all(isinstance(size, int) for size in sizes.flat):
            scope.keep(node.output[0], sizes.astype(helper.tensor_dtype_to_np_dtype(value.dtype)))
        else:
            scope.sizes[node.output[0]] = sizes
        return value

    def _infer_by_onnx(self, node: onnx.NodeProto, scope: Scope, onnx_name: str) -> Mapping[str, onnx.TypeProto]:
        """Return what onnx infers about the outputs of `node`, treated as ONNX's operator `onnx_name`."""
        domain = "" if onnx_name else node.domain
        version = self._opsets.get(domain, 1) if domain else self._version
        types = {name: self._type(name, scope) for name in reads_of(node)}
        numbers = {name: numpy_helper.from_array(scope.numbers[name], name) for name in types if name in scope.numbers}
        opsets = [helper.make_opsetid(name, number) for name, number in self._opsets.items()]
        try:
            schema = onnx.defs.get_schema(onnx_name or node.op_type, version, domain)
            if onnx_name:
                node = _as(schema, node)
            named = {name: scope.sizes[name] for name in types if name in scope.sizes and name not in numbers}
            if named:
                return _infer_by_names(node, types, numbers, named, opsets)
            inferred: Mapping[str, onnx.TypeProto] = infer_node_outputs(
                schema, node, types, numbers, opset_imports=opsets
            )
            return inferred
        except (onnx.checker.ValidationError, onnx.defs.SchemaError) as error:
            raise LookupError(node.op_type) from error
        except onnx.shape_inference.InferenceError:
            pass
        # Inputs that fitted while a size was unknown may no longer fit; the dtype is known anyway.
        for name, known in types.items():
            types[name] = onnx.TypeProto()
            types[name].CopyFrom(known)
            if known.HasField("tensor_type"):
                types[name].tensor_type.ClearField("shape")
        try:
            inferred = infer_node_outputs(schema, node, types, opset_imports=opsets)
        except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
            raise LookupError(node.op_type) from error
        return inferred

    def _type(self, name: str, scope: Scope) -> onnx.TypeProto:
        """Return what is known about a value as an onnx type; an empty type if nothing is."""
        if name in scope.other_types:
            return scope.other_types[name]
        value = scope.values.get(name)
        if value is not None and value not in self._protos:
            self._protos[value] = helper.make_tensor_type_proto(value.dtype, value.shape)
        return self._protos[value]

    def _enter(self, node: onnx.NodeProto, scope: Scope, depth: int) -> Sequence[Value | None]:
        """Follow the bodies of If, Loop or Scan, and return the node's outputs."""
        bodies = [attribute.g for attribute in node.attribute if attribute.HasField("g")]
        attributes = attributes_of(node)
        followed: list[list[Value | None]] = []
        for body in bodies:
            self._charge(len(body.node), depth)
            inner = Scope(scope)
            self._bind(node, body, inner, attributes)
            self.follow(body, inner, depth + 1)
            followed.append([inner.values.get(output.name) for output in body.output])
        if not followed:
            raise LookupError("a body")
        results = [_agreed(values) for values in zip(*followed, strict=True)]
        outputs = _collected(node, results, attributes, _times_of(node, scope, attributes))
        if node.op_type == "Loop":  # it may end before the first run
            states = [scope.values.get(name) for name in node.input[2:]]
            outputs[: len(states)] = [_agreed(pair) for pair in zip(states, outputs, strict=False)]
        return outputs

    def _bind(self, node: onnx.NodeProto, body: onnx.GraphProto, inner: Scope, attributes: Mapping[str, Any]) -> None:
        """Pass a node's values to the inputs of its body: the state for a Loop, and also slices for a Scan."""
        inputs: list[Value | None] = [inner.values.get(name) for name in node.input]
        if node.op_type == "Loop":
            states = [value and Value(None, value.dtype) for value in inputs[2:]]
            inputs = [Value((), _INT64), Value((), _BOOL), *states]
        elif node.op_type == "Scan":
            if self._version < _FIRST_OPSET_OF_SCANS:
                raise LookupError("the axis of the batch")
            inputs = _slices(inputs, attributes)
        for formal, value in zip(body.input, inputs, strict=False):
            inner.take(formal.name, Scope(), "")
            if value is not None:
                inner.values[formal.name] = value

    def _call_function(self, function: onnx.FunctionProto, node: onnx.NodeProto, scope: Scope, depth: int) -> None:
        """Follow the nodes of a model function with the values the node passes."""
        inner = Scope()
        for formal, name in zip(function.input, node.input, strict=False):
            inner.take(formal, scope, name)
        attributes = {attribute.name: attribute for attribute in (*function.attribute_proto, *node.attribute)}
        outer = self._opsets
        self._opsets = {opset.domain: opset.version for opset in function.opset_import} or outer
        try:
            for body_node in function.node:
                self._follow_node(_resolved(body_node, attributes), inner, depth + 1)
        finally:
            self._opsets = outer
        for formal, name in zip(function.output, node.output, strict=False):
            if name:
                scope.take(name, inner, formal)


def _call(row: Operator, node: onnx.NodeProto, scope: Scope) -> OperatorCall:
    inputs = [scope.values.get(name, Value(None, 0)) if name else None for name in node.input]
    return OperatorCall(row.named(inputs), attributes_of(node))


def _as(schema: onnx.defs.OpSchema, node: onnx.NodeProto) -> onnx.NodeProto:
    """Return `node` as the operator of `schema`, without attributes that the operator does not have."""
    known = [attribute for attribute in node.attribute if attribute.name in schema.attributes]
    return onnx.NodeProto(op_type=schema.name, input=node.input, output=node.output, attribute=known)


def _infer_by_names(
    node: onnx.NodeProto,
    types: Mapping[str, onnx.TypeProto],
    numbers: Mapping[str, onnx.TensorProto],
    named: Mapping[str, Any],
    opsets: Sequence[onnx.OperatorSetIdProto],
) -> dict[str, onnx.TypeProto]:
    """Return what onnx infers for inputs that hold axis names, which it follows only through Shape and Concat."""
    computed = {*numbers, *named}
    inputs = [helper.make_value_info(name, kind) for name, kind in types.items() if name not in computed]
    nodes = []
    for name, sizes in named.items():
        if sizes.ndim != 1:
            inputs.append(helper.make_value_info(name, types[name]))
            continue
        source = f"{name}/sizes"
        inputs.append(helper.make_tensor_value_info(source, onnx.TensorProto.FLOAT, sizes.tolist()))
        dtype = types[name].tensor_type.elem_type
        shape = name if dtype == _INT64 else f"{name}/int64"
        nodes.append(helper.make_node("Shape", [source], [shape]))
        if shape != name:
            nodes.append(helper.make_node("Cast", [shape], [name], to=dtype))
    outputs = [onnx.ValueInfoProto(name=name) for name in node.output if name]
    graph = helper.make_graph([*nodes, node], "node", inputs, outputs, list(numbers.values()))
    model = onnx.shape_inference.infer_shapes(helper.make_model(graph, opset_imports=opsets), data_prop=True)
    known = {size for sizes in named.values() for size in sizes.flat}
    known |= {dim.dim_param for kind in types.values() for dim in kind.tensor_type.shape.dim}
    inferred = {value.name: value.type for value in (*model.graph.output, *model.graph.value_info)}
    for kind in inferred.values():
        for dim in kind.tensor_type.shape.dim:
            if dim.dim_param not in known:  # generated by onnx
                dim.Clear()
    return inferred


def read_type(kind: onnx.TypeProto | None) -> Value | onnx.TypeProto | None:
    """Convert an onnx type to a value; types other than tensors are returned as is, and an empty type as None."""
    if kind is None or kind.WhichOneof("value") is None:
        return None
    if not kind.HasField("tensor_type"):
        return kind
    tensor = kind.tensor_type
    if not tensor.HasField("shape"):
        return Value(None, tensor.elem_type) if tensor.elem_type else None
    sizes = (dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None for dim in tensor.shape.dim)
    return Value(tuple(sizes), tensor.elem_type)


def _reshaped(value: Value | onnx.TypeProto | None, target: Value | None) -> Value | onnx.TypeProto | None:
    """Return what is known about the output of a Reshape: at least its rank, if the length of its target is known."""
    length = target.shape[0] if target is not None and target.shape else None
    if isinstance(value, Value) and value.shape is None and isinstance(length, int):
        return Value((None,) * length, value.dtype)
    return value


def _pieces(
    values: Sequence[Value | onnx.TypeProto | None], whole: Value | None, attributes: Mapping[str, Any]
) -> list[Value | onnx.TypeProto | None]:
    """Return the pieces of a Split with the unsplit axes of the whole; onnx infers none for computed sizes."""
    if whole is None or whole.shape is None:
        return list(values)
    sizes = list(whole.shape)
    sizes[int(attributes.get("axis", 0))] = None
    return [
        Value(tuple(sizes), piece.dtype) if isinstance(piece, Value) and piece.shape is None else piece
        for piece in values
    ]


def _better(declared: Value | None, inferred: Value | None) -> Value | None:
    """Keep declared sizes and names, and add inferred ones where nothing is declared."""
    if declared is None or inferred is None:
        return declared or inferred
    dtype = declared.dtype or inferred.dtype
    if declared.shape is None or inferred.shape is None or len(declared.shape) != len(inferred.shape):
        return Value(inferred.shape if inferred.shape is not None else declared.shape, dtype)
    pairs = zip(declared.shape, inferred.shape, strict=True)
    return Value(tuple(other if stated is None or isinstance(other, int) else stated for stated, other in pairs), dtype)


def _resolved(node: onnx.NodeProto, passed: Mapping[str, onnx.AttributeProto]) -> onnx.NodeProto:
    """Return a function's node with the attributes that it takes from the call."""
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    del copy.attribute[:]
    for attribute in node.attribute:
        if not attribute.ref_attr_name:
            copy.attribute.append(attribute)
        elif attribute.ref_attr_name in passed:
            copy.attribute.append(passed[attribute.ref_attr_name])
            copy.attribute[-1].name = attribute.name
    return copy


_MOST_TIMES = 1 << 31


def _slices(inputs: Sequence[Value | None], attributes: Mapping[str, Any]) -> list[Value | None]:
    """Return what a Scan body reads: the states unchanged, and a slice of each other input."""
    states = len(inputs) - int(attributes["num_scan_inputs"])
    return [
        value
        if index < states or value is None or value.shape is None
        else Value(_without(value.shape, _axis(attributes, "scan_input_axes", index - states)), value.dtype)
        for index, value in enumerate(inputs)
    ]


def _times_of(node: onnx.NodeProto, scope: Scope, attributes: Mapping[str, Any]) -> Size:
    """Return how often a body runs: once for an If, None if only running the model would tell."""
    if node.op_type == "Scan":
        scanned, number = scope.values.get(node.input[-1]), int(attributes["num_scan_inputs"])
        return None if scanned is None else scanned.dims[_axis(attributes, "scan_input_axes", number - 1)]
    if node.op_type == "Loop":
        if node.input[0] not in scope.numbers:
            return None
        return max(0, min(int(scope.numbers[node.input[0]].flat[0]), _MOST_TIMES))
    return 1


def _collected(
    node: onnx.NodeProto, outputs: Sequence[Value | None], attributes: Mapping[str, Any], times: Size
) -> list[Value | None]:
    """Return the node's outputs from its body's outputs: scanned outputs get a leading axis for the runs."""
    if node.op_type == "If":
        return list(outputs)
    states = len(node.input) - (2 if node.op_type == "Loop" else int(attributes["num_scan_inputs"]))
    outputs = outputs[1:] if node.op_type == "Loop" else outputs
    return [
        value
        if value is None or value.shape is None or index < states
        else Value(_with(value.shape, _axis(attributes, "scan_output_axes", index - states), times), value.dtype)
        for index, value in enumerate(outputs)
    ]


def _agreed(values: Sequence[Value | None]) -> Value | None:
    """Return what holds for every one of several values; None if nothing does."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values) or len({value.dtype for value in known}) > 1:
        return None
    shapes = [value.shape for value in known if value.shape is not None]
    if len(shapes) < len(known) or len({len(shape) for shape in shapes}) > 1:
        return Value(None, known[0].dtype)
    sizes = [set(sizes) for sizes in zip(*shapes, strict=True)]
    return Value(tuple(choices.pop() if len(choices) == 1 else None for choices in sizes), known[0].dtype)


def _axis(attributes: Mapping[str, Any], name: str, index: int) -> int:
    """Return the axis along which a Scan slices an input or stacks an output; for a Loop it is the first."""
    axes = attributes.get(name)
    return int(axes[index]) if axes else 0


def _without(shape: Shape, axis: int) -> Shape:
    sizes = list(shape)
    del sizes[axis]
    return tuple(sizes)


def _with(shape: Shape, axis: int, size: Size) -> Shape:
    place = axis + len(shape) + 1 if axis < 0 else axis
    return (*shape[:place], size, *shape[place:])
