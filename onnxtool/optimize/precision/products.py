"""The products with weights of a graph: which of them int8 can compute, and the packed attention opened up to show its.

Letters of shapes: K width of the input, N width of the product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from onnxtool.optimize.matching import (
    MICROSOFT,
    Editor,
    attribute,
    is_weight,
    only_consumer,
    operands,
    producer,
    supersede,
    tensor_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    import onnx_ir as ir

    from onnxtool.optimize.precision.quantization import Floats
    from onnxtool.optimize.shapes import Shapes

_QKV_BIAS, _MASK, _PAST, _ATTENTION_BIAS = 2, 3, 4, 5  # inputs of Attention
_PASSED_ON = ("num_heads", "mask_filter_value", "scale", "unidirectional")


@dataclass(frozen=True)
class Product:
    """A product of activations with a weight, and the bias that is added to it.

    Attributes:
        weight: float32 [K, N], or [N, K] where `transposed`.
        bias: float32 [N]; None where there is none.
        result: what the graph reads: the product, or its sum with the bias.
    """

    node: ir.Node
    weight: ir.Value
    transposed: bool
    bias: ir.Value | None
    result: ir.Value

    @property
    def value(self) -> ir.Value:
        """The activations, float32 [..., K]: what the node reads now, which may be another product written anew."""
        value = self.node.inputs[0]
        if value is None:
            raise ValueError(f"{self.node.name} has no input")
        return value

    @property
    def name(self) -> str:
        """The name of the weight, which is how reports call a product."""
        return str(self.weight.name)

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
        """Return what reads the weight, float32 [K, N], also when the product has left the graph."""
        tensor, transposed = tensor_of(self.weight), self.transposed

        def read() -> Floats:
            array: Floats = tensor.numpy()
            return array.T if transposed else array

        return read

    def read_bias(self) -> Floats | None:
        """Read the bias, float32 [N]."""
        if self.bias is None:
            return None
        array: Floats = tensor_of(self.bias).numpy()
        return array


def find_products(model: ir.Model) -> tuple[list[Product], list[str]]:
    """Find the products of float32 activations with a float32 matrix, and why others were passed over."""
    products, reasons = [], []
    for node in model.graph:
        if (node.domain, node.op_type) not in _TRANSPOSED or not is_weight(node.inputs[1], 2):
            continue
        reason = _objection(node)
        if reason:
            reasons.append(reason)
        else:
            products.append(_product(node))
    return products, reasons


# Attributes that say that the weight is transposed, by operator.
_TRANSPOSED = {("", "MatMul"): "", ("", "Gemm"): "transB", (MICROSOFT, "FusedMatMul"): "transB"}
_PLAIN_ATTRIBUTES = {"alpha": 1.0, "beta": 1.0, "transA": 0, "transBatchA": 0, "transBatchB": 0}


def _objection(node: ir.Node) -> str:
    """Return why int8 cannot compute a product; empty where it can."""
    import onnx_ir as ir

    if tensor_of(_weight_of(node)).dtype != ir.DataType.FLOAT:
        return "not float32"
    if any(attribute(node, name, plain) != plain for name, plain in _PLAIN_ATTRIBUTES.items()):
        return "scaled, or its input is transposed"
    if len(node.inputs) > 2 and node.inputs[2] is not None and not _is_vector(node.inputs[2], _size(node)[1]):
        return "the bias is no vector as long as the last axis"
    return ""


def _weight_of(node: ir.Node) -> ir.Value:
    weight = node.inputs[1]
    if weight is None:
        raise ValueError(f"{node.name} has no second input")
    return weight


def _is_transposed(node: ir.Node) -> bool:
    name = _TRANSPOSED[node.domain, node.op_type]
    return bool(name and attribute(node, name, 0))


def _size(node: ir.Node) -> tuple[int, int]:
    rows, columns = (int(size) for size in tensor_of(_weight_of(node)).shape.numpy())
    return (columns, rows) if _is_transposed(node) else (rows, columns)


def _is_vector(value: ir.Value | None, length: int) -> bool:
    return is_weight(value, 1) and value is not None and tensor_of(value).size == length


def _product(node: ir.Node) -> Product:
    weight, result = _weight_of(node), node.outputs[0]
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    add = only_consumer(result, "Add") if bias is None else None
    parts = None if add is None else operands(add, lambda one: _is_vector(one, _size(node)[1]))
    if add is not None and parts is not None:
        bias, result = parts[0], add.outputs[0]
    return Product(node, weight, _is_transposed(node), bias, result)


def open_attention(model: ir.Model, kept: frozenset[str], shapes: Shapes) -> list[str]:
    """Replace `Attention(x, W, b)` by `MultiHeadAttention(q, k, v)` with `q, k, v = Split(x @ W + b)`.

    Those whose weight is in `kept` stay. Returns why others do.
    """
    packed = [node for node in model.graph if node.op_type == "Attention" and node.domain == MICROSOFT]
    reasons = []
    for node in packed:
        weight = node.inputs[1]
        if weight is not None and weight.name in kept:
            continue
        reason = _objection_to_opening(node, shapes)
        if reason:
            reasons.append(reason)
        else:
            _open(node)
    return reasons


def _objection_to_opening(node: ir.Node, shapes: Shapes) -> str:
    import onnx_ir as ir

    weight, inputs = node.inputs[1], list(node.inputs) + [None] * 7
    if not is_weight(weight, 2) or tensor_of(_weight_of(node)).dtype != ir.DataType.FLOAT:
        return "the weight of the attention is no float32 matrix"
    if len(node.outputs) > 1 or any(one is not None for one in (inputs[_PAST], *inputs[_ATTENTION_BIAS + 1 :])):
        return "the attention has a cache"
    if attribute(node, "do_rotary", 0):
        return "the attention rotates its queries"
    sizes = attribute(node, "qkv_hidden_sizes", [])
    if (sizes and len(set(sizes)) > 1) or _size_of_weight(node)[1] % 3:
        return "queries, keys and values are of several widths"
    if inputs[_MASK] is not None and shapes.rank(inputs[_MASK]) != 2:
        return "the mask of the attention is no matrix [B, S]"
    return ""


def _size_of_weight(node: ir.Node) -> tuple[int, int]:
    rows, columns = tensor_of(_weight_of(node)).shape.numpy()
    return int(rows), int(columns)


def _open(node: ir.Node) -> None:
    import numpy as np
    import onnx_ir as ir

    editor = Editor(node)
    inputs = list(node.inputs) + [None] * 6
    joined = editor.node("MatMul", inputs[:2])
    if inputs[_QKV_BIAS] is not None:
        joined = editor.node("Add", [joined, inputs[_QKV_BIAS]])
    graph = node.graph
    if graph is None:
        raise ValueError(f"{node.name} is in no graph")
    # The attribute num_outputs came with opset 18; the lengths as an input are older.
    width = _size_of_weight(node)[1] // 3
    lengths = editor.constant(np.full(3, width, np.int64), "onnxtool.lengths")
    split = ir.node("Split", [joined, lengths], {"axis": -1}, num_outputs=3)
    graph.insert_before(node, split)
    attributes = {name: node.attributes[name].value for name in _PASSED_ON if name in node.attributes}
    wanted = [*split.outputs, None, inputs[_MASK], inputs[_ATTENTION_BIAS]]
    while wanted[-1] is None:
        wanted.pop()
    opened = editor.node("MultiHeadAttention", wanted, attributes, domain=MICROSOFT, like=node.outputs[0])
    supersede(node.outputs[0], opened)


def scalable_normalization(value: ir.Value) -> ir.Node | None:
    """Return the normalization that makes `value`, where its scale and shift can take a factor a channel; else None."""
    node = producer(value, "LayerNormalization")
    if node is None or any(output.uses() or output.is_graph_output() for output in node.outputs[1:]):
        return None
    return node if all(is_weight(one, 1) for one in node.inputs[1:] if one is not None) else None
