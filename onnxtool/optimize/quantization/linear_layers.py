"""Find the linear layers of a graph that can be quantized, and unfuse operators that contain one, such as Attention.

Shape letters: K input width, N output width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from onnxtool.graph.edit import (
    attribute,
    drop_unused,
    is_made_on_saving,
    is_weight,
    only_consumer,
    operands,
    producer,
    replace_and_erase,
    required,
    tensor_of,
)
from onnxtool.graph.operators import MICROSOFT, named_inputs
from onnxtool.graph.shapes import Shapes
from onnxtool.graph.writer import Writer, without_omitted
from onnxtool.model_file.weights import read_once
from onnxtool.optimize.kept import PARTS, note_patterns, patterns_of
from onnxtool.optimize.quantization.arithmetic import Floats

# Inputs of an Attention without a cache.
_PLAIN_INPUTS = frozenset({"input", "weights", "bias", "mask_index", "attention_bias"})
_PARTS = ("query", "key", "value")
_PASSED_ON = ("num_heads", "mask_filter_value", "scale", "unidirectional")


@dataclass(frozen=True)
class LinearLayer:
    """A MatMul of activations with a weight, and the bias that is added to it.

    Attributes:
        weight: float32 [K, N], or [N, K] where `transposed`.
        bias: float32 [N]; None where there is none.
        result: the output of the MatMul, or its sum with the bias.
    """

    node: ir.Node
    weight: ir.Value
    transposed: bool
    bias: ir.Value | None
    result: ir.Value

    @property
    def value(self) -> ir.Value:
        """The activations, float32 [..., K]: the current input of the node, which another layer may have replaced."""
        return required(self.node, 0)

    @property
    def name(self) -> str:
        """The name of the weight, which identifies the layer in reports."""
        return str(self.weight.name)

    @property
    def stored_name(self) -> str:
        """The name of the quantized weight.

        A square weight may also be read transposed: the columns differ, but the shapes are equal.
        """
        rows, columns = self.size
        return f"{self.name}_transposed" if self.transposed and rows == columns else self.name

    @property
    def num_weights(self) -> int:
        """K times N."""
        return int(tensor_of(self.weight).size)

    @property
    def size(self) -> tuple[int, int]:
        """K and N."""
        rows, columns = (int(size) for size in tensor_of(self.weight).shape.numpy())
        return (columns, rows) if self.transposed else (rows, columns)

    def weight_reader(self) -> Callable[[], Floats]:
        """Return a function that reads the weight, float32 [K, N], even after the layer was removed from the graph."""
        tensor, transposed = tensor_of(self.weight), self.transposed

        def read() -> Floats:
            array: Floats = read_once(tensor)
            return array.T if transposed else array

        return read

    def read_bias(self) -> Floats | None:
        """Read the bias, float32 [N]."""
        if self.bias is None:
            return None
        array: Floats = tensor_of(self.bias).numpy()
        return array


# The attribute for a transposed weight, by operator.
_TRANSPOSED = {("", "MatMul"): "", ("", "Gemm"): "transB", (MICROSOFT, "FusedMatMul"): "transB"}
_PLAIN_ATTRIBUTES = {"alpha": 1.0, "beta": 1.0, "transA": 0, "transBatchA": 0, "transBatchB": 0}


def find_linear_layers(model: ir.Model) -> tuple[list[LinearLayer], list[str]]:
    """Find the linear layers with a float32 weight, and why others cannot be quantized."""
    layers, reasons = [], []
    for node in model.graph:
        name = _TRANSPOSED.get((node.domain, node.op_type))
        if name is None or not is_weight(node.inputs[1], 2):
            continue
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        transposed = bool(name and attribute(node, name, 0))
        layer = LinearLayer(node, required(node, 1), transposed, bias, node.outputs[0])
        reason = _objection(layer)
        if reason:
            reasons.append(reason)
        else:
            layers.append(layer if bias is not None else _with_added_bias(layer))
    return layers, reasons


def _objection(layer: LinearLayer) -> str:
    """Return why a layer cannot be quantized; empty if it can."""
    dtype = tensor_of(layer.weight).dtype
    if dtype != ir.DataType.FLOAT:
        return f"its weight is {dtype.numpy()}, not float32"
    if any(attribute(layer.node, name, plain) != plain for name, plain in _PLAIN_ATTRIBUTES.items()):
        return "scaled, or its input is transposed"
    if layer.bias is not None and not _is_bias(layer.bias, layer):
        return "the bias is no vector as long as the last axis"
    return ""


def _with_added_bias(layer: LinearLayer) -> LinearLayer:
    """Return a layer with the bias that a following Add adds, if any."""
    add = only_consumer(layer.result, "Add")
    parts = None if add is None else operands(add, lambda operand: _is_bias(operand, layer))
    return layer if add is None or parts is None else replace(layer, bias=parts[0], result=add.outputs[0])


def _is_bias(value: ir.Value, layer: LinearLayer) -> bool:
    return is_weight(value, 1) and tensor_of(value).size == layer.size[1]


def unfuse_linear_layers(model: ir.Model, fallbacks: frozenset[str], shapes: Shapes) -> list[str]:
    """Unfuse operators that contain a linear layer to be quantized, or its bias.

    `Attention(x, W, b)` becomes `MultiHeadAttention(x @ Wq + bq, x @ Wk + bk, x @ Wv + bv)`: a single MatMul with a
    Split would take longer. `BiasGelu(x @ W, b)` becomes `Gelu(x @ W + b)`: quantized layers add a bias at no cost. In
    a file that was already optimized, the bias is in a Sum. Operators whose weights are all in `fallbacks` stay.
    Returns the reasons why others stay.
    """
    reasons = []
    for node in list(model.graph):
        kind = (node.domain, node.op_type)
        if kind == ("", "Sum") and any(_is_quantized(value, fallbacks) for value in node.inputs):
            _write_additions(node)
        if kind == (MICROSOFT, "BiasGelu") and _is_quantized(node.inputs[0], fallbacks):
            _unfuse_bias_gelu(node)
        if kind != (MICROSOFT, "Attention"):
            continue
        reason = _objection_to_unfusing(node, shapes)
        if reason:
            reasons.append(reason)
        elif not fallbacks.issuperset(names_of_parts(required(node, 1))):
            _unfuse_attention(node)
    return reasons


def _is_quantized(value: ir.Value | None, fallbacks: frozenset[str]) -> bool:
    """Whether a value is the product of a linear layer that is to be quantized."""
    matmul = producer(value, "MatMul")
    return matmul is not None and is_weight(matmul.inputs[1], 2) and required(matmul, 1).name not in fallbacks


def _write_additions(node: ir.Node) -> None:
    """Replace `Sum(a, b, c)` by `Add(Add(a, b), c)`, which adds the same numbers in the same order."""
    writer, result = Writer(node), node.outputs[0]
    total, *terms = node.inputs
    for term in terms:
        total = writer.node("Add", [total, term])
        total.type = result.type
    if total is not None and terms:
        replace_and_erase(result, total)


def _unfuse_bias_gelu(node: ir.Node) -> None:
    writer = Writer(node)
    total = writer.node("Add", node.inputs, like=node.inputs[0])
    replace_and_erase(node.outputs[0], writer.node("Gelu", [total], domain=MICROSOFT, like=node.outputs[0]))


def _objection_to_unfusing(node: ir.Node, shapes: Shapes) -> str:
    inputs = named_inputs(node.domain, node.op_type, node.inputs)
    weight, bias, mask = inputs["weights"], inputs["bias"], inputs["mask_index"]
    if not is_weight(weight, 2) or tensor_of(required(node, 1)).dtype != ir.DataType.FLOAT:
        return "the weight of the attention is no float32 matrix"
    names = {name for name, value in inputs.items() if value is not None}
    if len(node.outputs) > 1 or not names <= _PLAIN_INPUTS:
        return "the attention has a cache"
    if attribute(node, "do_rotary", 0):
        return "the attention rotates its queries"
    sizes = attribute(node, "qkv_hidden_sizes", [])
    if (sizes and len(set(sizes)) > 1) or tensor_of(required(node, 1)).shape.numpy()[1] % 3:
        return "queries, keys and values are of several widths"
    if bias is not None and not is_weight(bias, 1):
        return "the bias of the attention is no constant"
    if mask is not None and shapes.rank(mask) != 2:
        return "the mask of the attention is no matrix [B, S]"
    return ""


def _unfuse_attention(node: ir.Node) -> None:
    writer = Writer(node)
    inputs = named_inputs(node.domain, node.op_type, node.inputs)
    weight, bias = required(node, 1), inputs["bias"]
    parts, patterns = [], tensor_of(weight).meta.get(PARTS, [patterns_of(node)] * len(_PARTS))
    for number, name in enumerate(names_of_parts(weight)):
        part = writer.node("MatMul", [inputs["input"], _columns(weight, number, name, writer)])
        note_patterns(part.producer(), patterns[number])
        if bias is not None:
            own = np.split(tensor_of(bias).numpy(), len(_PARTS))[number]
            part = writer.node("Add", [part, writer.constant(own, f"{bias.name}_{_PARTS[number]}")])
        parts.append(part)
    attributes = {name: node.attributes[name].value for name in _PASSED_ON if name in node.attributes}
    wanted = without_omitted([*parts, None, inputs["mask_index"], inputs["attention_bias"]])
    opened = writer.node("MultiHeadAttention", wanted, attributes, domain=MICROSOFT, like=node.outputs[0])
    replace_and_erase(node.outputs[0], opened)
    drop_unused(value for value in (weight, bias) if value is not None)


def names_of_parts(weight: ir.Value) -> list[str]:
    """Return the names of the query, key and value layers in an attention's packed weight."""
    return [f"{weight.name}_{part}" for part in _PARTS]


def _columns(weight: ir.Value, number: int, name: str, writer: Writer) -> ir.Value:
    """Return the query, key or value columns of a packed weight, read when needed."""
    tensor = tensor_of(weight)
    rows, columns = (int(size) for size in tensor.shape.numpy())
    width = columns // len(_PARTS)

    def read() -> ir.TensorProtocol:
        return ir.tensor(np.ascontiguousarray(read_once(tensor)[:, number * width : (number + 1) * width]))

    return shared_initializer(ir.LazyTensor(read, tensor.dtype, ir.Shape([rows, width])), name, writer)


def shared_initializer(tensor: ir.TensorProtocol, name: str, writer: Writer) -> ir.Value:
    """Return an initializer with `tensor`, shared with another layer that has the same weight, if any."""
    held: ir.Value | None = writer.initializers.get(name)
    # An initializer of the input file under this name is not computed on saving.
    if held is not None and is_made_on_saving(tensor_of(held)) and tensor_of(held).shape == tensor.shape:
        return held
    return writer.initializer(tensor, name)


def scalable_normalization(value: ir.Value) -> ir.Node | None:
    """Return the normalization that computes `value` if scale and shift can absorb a factor per channel, else None."""
    node = producer(value, "LayerNormalization")
    if node is None or any(output.uses() or output.is_graph_output() for output in node.outputs[1:]):
        return None
    return node if all(is_weight(operand, 1) for operand in node.inputs[1:] if operand is not None) else None
