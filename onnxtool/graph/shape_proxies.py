"""Stand in for onnxruntime's operators while shapes are inferred: past them ONNX's own inference knows nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onnxtool.graph.edit import MICROSOFT
from onnxtool.graph.protos import to_light_proto

if TYPE_CHECKING:
    import onnx
    import onnx_ir as ir

# Their outputs, the first and the fourth, look like their first input.
_LIKE_THEIR_INPUT = frozenset(
    {
        ("", "SimplifiedLayerNormalization"),
        (MICROSOFT, "BiasGelu"),
        (MICROSOFT, "FastGelu"),
        (MICROSOFT, "Gelu"),
        (MICROSOFT, "QuickGelu"),
        (MICROSOFT, "RotaryEmbedding"),
        (MICROSOFT, "ScaledSum"),
        (MICROSOFT, "SkipLayerNormalization"),
        (MICROSOFT, "SkipSimplifiedLayerNormalization"),
    }
)


def _needs_stand_in(node: ir.Node | onnx.NodeProto) -> bool:
    return node.domain == MICROSOFT or (node.domain, node.op_type) in _LIKE_THEIR_INPUT


def with_stand_ins(model: ir.Model) -> onnx.ModelProto:
    """Return the model without its large weights, standard operators of the same dtypes and shapes in place of those.

    The standard ones make the same values under the same names, and other numbers.
    """
    proto = to_light_proto(model)
    nodes = list(proto.graph.node)
    del proto.graph.node[:]
    for node in nodes:
        proto.graph.node.extend(_stand_in(node, model) if _needs_stand_in(node) else [node])
    return proto


def _stand_in(node: onnx.NodeProto, model: ir.Model) -> list[onnx.NodeProto]:
    """Return standard operators whose outputs have the dtypes and shapes of those of `node`; itself where unknown."""
    from onnx.helper import get_attribute_value, make_node

    attributes = {attribute.name: get_attribute_value(attribute) for attribute in node.attribute}
    inputs, output = list(node.input), node.output[0]
    between = [f"{output}/{number}" for number in range(3)]
    if (node.domain, node.op_type) in _LIKE_THEIR_INPUT:
        return [make_node("Identity", inputs[:1], [name]) for name in node.output[::3] if name]
    if node.op_type in ("DequantizeLinear", "QuantizeLinear"):  # as those of ONNX, but for more dtypes
        return [make_node(node.op_type, inputs, [output], **attributes)]
    if node.op_type == "FakeQuant":
        return [
            make_node(op_type, inputs[:1], [name])
            for op_type, name in zip(("Identity", "IsNaN"), node.output, strict=False)
        ]
    if node.op_type == "EmbedLayerNormalization":
        return [make_node("Gather", [inputs[2], inputs[0]], [output])]
    if node.op_type == "FusedMatMul" and set(attributes) == {"transB"} and attributes["transB"]:
        # Our own passes write it for matrices only.
        transposed = make_node("Transpose", inputs[1:2], between[:1], perm=[1, 0])
        return [transposed, make_node("MatMul", [inputs[0], between[0]], [output])]
    if node.op_type == "MultiHeadAttention" and len(inputs) >= 3 and inputs[1] in _of_rank_four(model):
        # Keys and values with their past, [B, H, L, D]: what comes out has the shape of the queries.
        return [make_node("Identity", inputs[:1], [output])]
    if node.op_type == "MultiHeadAttention" and len(inputs) >= 3 and inputs[1] and inputs[2]:
        transposed = make_node("Transpose", inputs[1:2], between[:1], perm=[0, 2, 1])
        scores = make_node("MatMul", [inputs[0], between[0]], between[1:2])
        return [transposed, scores, make_node("MatMul", [between[1], inputs[2]], [output])]
    if node.op_type == "Attention" and "qkv_hidden_sizes" not in attributes:
        pieces = {"num_outputs": 3} if model.opset_imports.get("", 0) >= 18 else {}
        projected = make_node("MatMul", inputs[:2], between[:1])
        return [projected, make_node("Split", between[:1], [output, *between[1:]], axis=-1, **pieces)]
    return [node]


def _of_rank_four(model: ir.Model) -> frozenset[str]:
    """Return the names of the outputs of `model` that are said to have four axes, as a cache has."""
    return frozenset(
        str(value.name) for value in model.graph.outputs if value.shape is not None and len(value.shape) == 4
    )
