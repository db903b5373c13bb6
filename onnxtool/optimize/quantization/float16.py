"""Convert weights and arithmetic to float16; inputs and outputs keep their types.

Nodes whose values float16 cannot represent stay in float32, and so do operators that do not accept float16 or are too
inaccurate in it. The range of values is measured by running the model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common

from onnxtool.errors import PassError
from onnxtool.graph.edit import attribute, drop_unused, is_weight, scalar, tensor_of
from onnxtool.graph.shapes import find_shapes
from onnxtool.graph.writer import Writer
from onnxtool.model_file.weights import load_model
from onnxtool.optimize.kept import patterns_of
from onnxtool.optimize.pipeline import Context, Outcome, Pass
from onnxtool.optimize.quantization.activations import Feeds, open_written
from onnxtool.optimize.quantization.written import REPORT, made_from

_PREFIX = "onnxtool.range/"


def measure_ranges(
    model: ir.Model, feeds: Iterable[Feeds], folder: Path, dtype: ir.DataType = ir.DataType.FLOAT
) -> dict[str, float]:
    """Run `model` on `feeds` and return the largest absolute value of each of its values of a dtype, by name.

    Inputs are included, because a mask may contain the lowest float. Infinities and NaN count as infinite. A copy of
    the model is written into `folder` and removed again.
    """
    probed = model.clone()
    names = _instrument(probed, dtype)
    largest = dict.fromkeys(names, 0.0)
    session = open_written(probed, folder)
    del probed
    for feed in feeds:
        outputs = session.run(feed)
        for name in names:
            size = float(outputs[_PREFIX + name])
            if size != -np.inf:  # the maximum of an empty tensor, such as the keys before the first token
                largest[name] = max(largest[name], size) if np.isfinite(size) else float("inf")
    return largest


def beyond(ranges: Mapping[str, float], limit: float, least: float = 0.0) -> tuple[str, ...]:
    """Return the names of values larger than `limit`, or nonzero and below `least`, the largest first."""
    names = (name for name, size in ranges.items() if size > limit or 0 < size < least)
    return tuple(sorted(names, key=lambda name: -ranges[name]))


def require_range(path: Path, feeds: Iterable[Feeds], folder: Path) -> None:
    """Check that no float16 value in the file at `path` leaves its range on `feeds`.

    onnxruntime computes chains of operators in float32 on the CPU, where no comparison of outputs shows an overflow.

    Raises:
        PassError: one does.
    """
    ranges = measure_ranges(load_model(path), feeds, folder, ir.DataType.FLOAT16)
    for name in beyond(ranges, _LARGEST)[:1]:
        raise PassError(f"{name} reaches {ranges[name]:.3g}, and the largest float16 is {_LARGEST:g}", REPORT)


def _instrument(model: ir.Model, dtype: ir.DataType) -> Sequence[str]:
    """Add an output to `model` for each input and result of a dtype: its largest absolute value, float32 []."""
    graph, writer = model.graph, Writer(model.graph)
    dtypes = find_shapes(model).dtypes
    values = [*graph.inputs, *(value for node in graph for value in node.outputs)]
    measured = [v for v in values if v.name and not v.is_initializer() and dtypes.get(v.name) == dtype.value]
    for value in measured:
        size = writer.op("Abs", writer.op("Cast", value, to=ir.DataType.FLOAT.value))
        output = writer.op("ReduceMax", size, keepdims=0)
        output.name, output.dtype, output.shape = _PREFIX + str(value.name), ir.DataType.FLOAT, ir.Shape([])
        graph.outputs.append(output)
    return [str(value.name) for value in measured]


_LARGEST = 65504.0
# The smallest normal number, and the smallest subnormal one; numbers between them lose digits.
LEAST = 2.0**-14
_SMALLEST = 2.0**-24
_BRANCHES = "branches and loop bodies are left unchanged"
# onnxruntime's converter keeps these in float32, and after them a mask's lowest float32 would become an infinity.
_TAKEN = frozenset({"Max", "Min"})
# It converts these, although their scales need more digits than float16 has, or they read bits.
_LEFT = frozenset({"QuantizeLinear", "DequantizeLinear", "BitCast"})
# Their results are far larger or smaller than their operands, or they square these internally.
_GROWING = frozenset(
    {"Exp", "LpNormalization", "MeanVarianceNormalization", "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp"}
    | {"ReduceProd", "ReduceSum", "ReduceSumSquare"}
)
_REDUCTIONS = frozenset({"ReduceMax", "ReduceMean", "ReduceMin"}) | _GROWING
# Their results have the magnitude of an operand, or a more extreme one.
_PASSING = _REDUCTIONS | frozenset(
    {"Abs", "Add", "Cast", "Clip", "Concat", "Expand", "Gather", "Identity", "Max", "Min", "Neg", "Pow", "Reciprocal"}
    | {"Reshape", "Slice", "Sqrt", "Squeeze", "Sub", "Sum", "Tile", "Transpose", "Unsqueeze", "Where"}
)
# Operands added to a product: their small elements are harmless, unless a scalar guards a root or a division.
_ADDED = {"Add": (0, 1), "Sub": (0, 1), "Sum": (0, 1), "Gemm": (2,), "Conv": (2,), "LayerNormalization": (2,)}
# Attributes that name the dtype of the output.
_DTYPES = ("to", "dtype", "output_datatype")


def to_float16(fallbacks: Collection[str] = ()) -> Pass:
    """Return the pass that converts all nodes except those that compute or read a value named in `fallbacks`."""
    names = frozenset(fallbacks)
    return Pass("float16", lambda model, context: _apply(model, context, names))


@dataclass
class _Float16Conversion:
    """A conversion under way.

    Attributes:
        floats: the names of all values that are float32.
        halved: the nodes that compute in float16.
        cast: the values cast so far, by value and wanted dtype.
    """

    model: ir.Model
    floats: frozenset[str]
    halved: set[ir.Node]
    cast: dict[tuple[ir.Value, ir.DataType], ir.Value] = field(default_factory=dict)

    def is_half(self, value: ir.Value) -> bool:
        """Whether a float value is computed in float16 after the conversion."""
        node = value.producer()
        return node is not None and node in self.halved


def _apply(model: ir.Model, context: Context, fallbacks: frozenset[str]) -> Outcome:
    """Replace `y = Op(float x)` by `y = Op(float16 x)`, with a Cast at inputs, outputs and nodes that stay float32."""
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    matrices = [value for value in model.graph.initializers.values() if _is_matrix(value)]
    kinds = sorted({str(tensor_of(value).dtype.numpy()) for value in matrices})
    if "float32" not in kinds:
        reason = f": they are {', '.join(kinds)}" if kinds else ""
        if _has_branches(model):
            reason += f"; {_BRANCHES}"
        return Outcome(model, 0, f"no weight of two axes or more is float32{reason}")
    dtypes = find_shapes(model).dtypes
    floats = frozenset(name for name, dtype in dtypes.items() if dtype == ir.DataType.FLOAT.value)
    opsets = model.opset_imports
    kept = _exact(model.graph, floats) | _extreme(model.graph, floats)
    unknown = {v for node in model.graph for v in node.outputs if v.uses() and not dtypes.get(str(v.name))}
    kept |= {node for node in model.graph if unknown & {*node.inputs, *node.outputs}}
    named = {node for node in model.graph if patterns_of(node)}
    # Otherwise, what they read would be cast twice.
    casts = [(n, {reader for reader, _ in n.outputs[0].uses()}) for n in model.graph if n.op_type == "Cast"]
    named |= {node for node, readers in casts if readers and readers <= named}
    free = set(model.graph) - kept - named
    halved = {node for node in free if _computes_in_half(node, floats, fallbacks, opsets)}
    conversion = _Float16Conversion(model, floats, halved)
    outputs = [value for value in model.graph.outputs if value.name in floats and conversion.is_half(value)]
    for node in list(model.graph):
        for index, value in enumerate(node.inputs):
            if value is not None and value.name in floats:
                _connect(node, index, value, conversion)
        if node in halved:
            _retype(node, floats, opsets)
    for node in halved:
        _widen_for_branches(node, floats)
        if context.provider != "cpu" and 0 < attribute(node, "epsilon", 0.0) < _SMALLEST:  # kernels there round it
            node.attributes["epsilon"] = ir.AttrFloat32("epsilon", _SMALLEST)
    for value in outputs:
        _keep_output(value, model.graph, conversion.cast.get((value, ir.DataType.FLOAT)))
    drop_unused(list(model.graph.initializers.values()))
    alone = [node for node in set(model.graph) - halved - named if any(v.name in floats for v in node.outputs)]
    num_kept = sum(node in kept or any(value.name in fallbacks for value in node.outputs) for node in alone)
    note = f"{num_kept} nodes stay in float32, because float16 is too coarse or too narrow for them" if num_kept else ""
    if not halved and named:
        note = "--keep_float32 keeps what could be"
    elif not halved and not note:
        note = _BRANCHES if _has_branches(model) else "no operator with a weight takes float16 in place of float32"
    return Outcome(model, len(halved), note)


def _has_branches(model: ir.Model) -> bool:
    return any(node.graph is not model.graph for node in model.graph.all_nodes())


def _exact(graph: ir.Graph, floats: frozenset[str]) -> set[ir.Node]:
    """Return the nodes that feed cosines, sines and integers, as far back as a matrix or a shape.

    A position times a frequency has few correct digits in float16, and rounding a size makes it wrong.
    """
    angles = [node for node in graph if not node.domain and node.op_type in ("Cos", "Sin")]
    casts = [(node, str(node.inputs[0] and node.inputs[0].name)) for node in graph if node.op_type == "Cast"]
    rounded = [node for node, source in casts if source in floats and node.outputs[0].name not in floats]
    exact = set[ir.Node]()
    for waiting, is_bounded in ((rounded, True), (angles, False)):
        seen = set[ir.Node]()
        while waiting:
            node = waiting.pop()
            if node in seen or (is_bounded and (node.op_type == "Shape" or any(map(_is_matrix, node.inputs)))):
                continue
            seen.add(node)
            waiting.extend(above for value in node.inputs if value and (above := value.producer()))
        exact |= seen
    return exact


def _extreme(graph: ir.Graph, floats: frozenset[str]) -> set[ir.Node]:
    """Return the nodes that make or read values that float16 may be unable to represent, for any inputs.

    These are squares, exponentials and sums; operands of divisions and logarithms, back to where something bounds them;
    constants beyond the range; and values computed from these, up to a division that restores a normal magnitude.
    """
    starts = {node for node in graph if _starts(node)}
    waiting = [value for node in graph for value in _divisors(node)]
    while waiting:
        node = waiting.pop().producer()
        if node is None or node in starts or any(map(_is_matrix, node.inputs)):
            continue
        starts.add(node)
        if node.op_type in _PASSING | {"Div", "Mul"} and node.op_type not in _REDUCTIONS:
            waiting.extend(value for value in node.inputs if value is not None and value.name in floats)
    affected, extreme = set(starts), dict[ir.Value, bool]()  # whether it is the reciprocal of a size
    for node in graph:
        reads = [value for value in node.inputs if value in extreme]
        if reads:
            affected.add(node)
        inverse = any(extreme[value] or value in _divisors(node) for value in reads)
        if node in starts or (reads and _passes_on(node, inverse=inverse)):
            extreme.update({value: inverse for value in node.outputs if value.name in floats})
    return affected


def _starts(node: ir.Node) -> bool:
    """Whether a node makes values of a very different magnitude, or has a constant that float16 cannot represent."""
    if node.op_type in _GROWING or (node.op_type == "Mul" and node.inputs[0] is node.inputs[1]):
        return True
    if node.op_type == "Pow" and not 0 <= _exponent(node) <= 1:
        return True
    numbers = [attribute(node, name, 0.0) for name in ("min", "max") if node.op_type == "Clip"]
    if node.op_type in ("ConstantOfShape", "Pad") and "value" in node.attributes:
        fill = attribute(node, "value")
        numbers.append(fill if isinstance(fill, float) else fill.numpy())
    return any(_is_beyond(number, node, 0) for number in numbers) or any(
        value
        and is_weight(value)
        and value.dtype == ir.DataType.FLOAT
        and _is_beyond(tensor_of(value).numpy(), node, i)
        for i, value in enumerate(node.inputs)
    )


def _is_beyond(array: Any, node: ir.Node, place: int) -> bool:
    """Whether float16 cannot represent a constant; small elements among larger ones only matter in divisors."""
    sizes = np.abs(array)
    largest = sizes.max(initial=0, where=np.isfinite(sizes))
    if largest > _LARGEST:
        return True
    if sizes.size > 1 and place in _ADDED.get(node.op_type, ()):
        return False
    each = node.op_type in ("Div", "Max")
    return bool(0 < largest < LEAST or (each and sizes.min(initial=1, where=sizes > 0) < LEAST))


def _divisors(node: ir.Node) -> Sequence[ir.Value]:
    """Return the operand of a division, a logarithm or a root below one that must not become 0 or infinite."""
    place = 1 if node.op_type == "Div" else 0
    negative = node.op_type == "Pow" and _exponent(node) < 0
    if negative or node.op_type in ("Div", "Log", "Reciprocal"):
        return [value for value in node.inputs[place : place + 1] if value is not None]
    return ()


def _exponent(node: ir.Node) -> float:
    exponent = scalar(node.inputs[1])
    return 2.0 if exponent is None else exponent


def _passes_on(node: ir.Node, *, inverse: bool) -> bool:
    """Whether the result may have the magnitude of the operand; x / size and x * (1 / size) do not."""
    if node.op_type in ("Div", "Mul"):
        return any(is_weight(value) for value in node.inputs) or (node.op_type == "Mul" and not inverse)
    return node.op_type in _PASSING


def _is_matrix(value: ir.Value | None) -> bool:
    """Whether a value is a weight with two axes or more; scalars and vectors may be float32 on purpose."""
    return value is not None and is_weight(value) and len(tensor_of(value).shape) > 1


@cache
def _schemas() -> dict[tuple[str, str], list[Any]]:
    """Return the schemas of all operators that onnxruntime knows, by domain and name, the latest version first."""
    from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema  # tested with 1.31

    schemas: dict[tuple[str, str], list[Any]] = {}
    for schema in sorted(get_all_operator_schema(), key=lambda schema: -schema.since_version):
        schemas.setdefault((schema.domain, schema.name), []).append(schema)
    return schemas


def _halves(node: ir.Node, opsets: Mapping[str, int]) -> tuple[list[bool], list[bool]]:
    """Return the inputs and outputs of a node that may be float16; none for an unknown operator."""
    version = opsets.get(node.domain, 1)
    known = [schema for schema in _schemas().get((node.domain, node.op_type), ()) if schema.since_version <= version]
    inputs, outputs = (known[0].inputs, known[0].outputs) if known else ((), ())

    def allowed(parameters: Sequence[Any], values: Sequence[Any]) -> list[bool]:
        places = (min(place, len(parameters) - 1) for place in range(len(values)))
        return [bool(parameters) and "tensor(float16)" in parameters[place].types for place in places]

    return allowed(inputs, node.inputs), allowed(outputs, node.outputs)


def _computes_in_half(
    node: ir.Node, floats: frozenset[str], fallbacks: frozenset[str], opsets: Mapping[str, int]
) -> bool:
    from onnxruntime.transformers.float16 import DEFAULT_OP_BLOCK_LIST

    names = [str(value.name) for value in (*node.inputs, *node.outputs) if value is not None]
    if not any(name in floats for name in names) or any(name in fallbacks for name in names):
        return False
    if node.op_type in _LEFT or (node.op_type in DEFAULT_OP_BLOCK_LIST and node.op_type not in _TAKEN):
        return False
    inputs, outputs = _halves(node, opsets)
    values = (*node.inputs, *(value if value.uses() or value.is_graph_output() else None for value in node.outputs))
    if any(
        value and value.name in floats and not half for value, half in zip(values, (*inputs, *outputs), strict=True)
    ):
        return False
    if attribute(node, "reduction", "none") != "none":  # sums of any length; onnxruntime scatters none in float16
        return False
    return not any(_keeps_float32(value) for value in node.attributes.values()) or node.op_type == "ConstantOfShape"


def _keeps_float32(attribute: ir.Attr) -> bool:
    """Whether an attribute holds a graph, or numbers that must have the dtype of the node's inputs."""
    if attribute.type is ir.AttributeType.TENSOR:
        return bool(attribute.value.dtype == ir.DataType.FLOAT)
    return attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)


def _connect(node: ir.Node, index: int, value: ir.Value, conversion: _Float16Conversion) -> None:
    """Cast a float input of a node to the precision in which the node computes."""
    wanted = ir.DataType.FLOAT16 if node in conversion.halved else ir.DataType.FLOAT
    held = ir.DataType.FLOAT16 if conversion.is_half(value) else ir.DataType.FLOAT
    if wanted == held:
        return
    key = (value, wanted)
    if key not in conversion.cast:
        if value.is_initializer() and not value.is_graph_input():
            conversion.cast[key] = Writer(node).initializer(_halved(tensor_of(value)), f"{value.name}_float16")
        else:
            cast = Writer(node).node("Cast", [value], {"to": wanted.value})
            cast.type, cast.shape = ir.TensorType(wanted), value.shape
            conversion.cast[key] = cast
    node.replace_input_with(index, conversion.cast[key])


def _widen_for_branches(node: ir.Node, floats: frozenset[str]) -> None:
    """Cast float16 outputs of a node back to float32 for branches and loop bodies, which stay in float32."""
    for value in node.outputs:
        inside = [(reader, index) for reader, index in value.uses() if reader.graph is not node.graph]
        if value.name not in floats or not inside or node.graph is None:
            continue
        cast = ir.node("Cast", [value], attributes={"to": ir.DataType.FLOAT.value})
        cast.outputs[0].type, cast.outputs[0].shape = ir.TensorType(ir.DataType.FLOAT), value.shape
        node.graph.insert_after(node, cast)
        for reader, index in inside:
            reader.replace_input_with(index, cast.outputs[0])


def _halved(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    """Return a tensor in float16, computed when it is read; numbers beyond its range are clipped."""

    def clipped() -> Any:
        return np.clip(tensor.numpy(), -_LARGEST, _LARGEST)

    def convert() -> ir.TensorProtocol:
        return ir.tensor(clipped().astype(np.float16))

    return made_from(ir.LazyTensor(convert, ir.DataType.FLOAT16, ir.Shape(tensor.shape.numpy())), clipped)


def _retype(node: ir.Node, floats: frozenset[str], opsets: Mapping[str, int]) -> None:
    """Set the dtype of the outputs of a node to float16, and the attributes that name it."""
    for output, half in zip(node.outputs, _halves(node, opsets)[1], strict=True):
        if output.name in floats and half:
            output.type = ir.TensorType(ir.DataType.FLOAT16)
    for name in _DTYPES:
        if attribute(node, name) == ir.DataType.FLOAT.value:
            node.attributes[name] = ir.AttrInt64(name, ir.DataType.FLOAT16.value)
    if node.op_type == "ConstantOfShape":
        fill = node.attributes.get("value")
        number = np.zeros(1, np.float16) if fill is None else _halved(fill.as_tensor()).numpy()
        node.attributes["value"] = ir.AttrTensor("value", ir.tensor(number))


def _keep_output(value: ir.Value, graph: ir.Graph, cast: ir.Value | None) -> None:
    """Let the graph return a value in float32 under its name: `cast` if there is one, or a new Cast."""
    name, value.name = value.name, f"{value.name}_float16"
    output = cast or Writer(graph).op("Cast", value, to=ir.DataType.FLOAT.value)
    output.name, output.dtype, output.shape = name, ir.DataType.FLOAT, value.shape
    for index, known in enumerate(graph.outputs):
        if known is value:
            graph.outputs[index] = output
