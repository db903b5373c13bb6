"""Replace sequences of tensors, which PyTorch's exporter writes for chunks, by the tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir as ir


def replace_sequences(graph: ir.Graph) -> bool:
    """Replace `SequenceAt(SplitToSequence(x, sizes), i)` by an output of `Split`, and return whether there were any.

    The sizes and i must be constants; sequences with other readers are kept.
    """
    import onnx_ir as ir

    replaced = False
    for node in list(graph):
        if node.op_type != "SplitToSequence" or (sizes := _sizes(node)) is None:
            continue
        reads = [(use.node, _index(use.node, len(sizes))) for use in node.outputs[0].uses()]
        if node.outputs[0].is_graph_output() or any(place is None for _, place in reads):
            continue
        lengths = ir.node("Constant", [], {"value": ir.tensor(sizes)})
        split = ir.node(
            "Split", [node.inputs[0], lengths.outputs[0]], {"axis": _axis(node)}, num_outputs=len(sizes), name=node.name
        )
        lengths.outputs[0].name = f"{node.outputs[0].name}/sizes"
        for number, value in enumerate(split.outputs):
            value.name = f"{node.outputs[0].name}/{number}"
        graph.insert_before(node, [lengths, split])
        for reader, place in reads:
            value = split.outputs[place or 0]
            value.type, value.shape = reader.outputs[0].type, reader.outputs[0].shape
            ir.convenience.replace_all_uses_with(reader.outputs[0], value, replace_graph_outputs=True)
            graph.remove(reader, safe=True)
        graph.remove(node, safe=True)
        replaced = True
    return replaced


def _axis(node: ir.Node) -> int:
    axis = node.attributes.get("axis")
    return 0 if axis is None else axis.as_int()


def _sizes(node: ir.Node) -> list[int] | None:
    """Return the sizes of the pieces; None if they are not fixed, or the axis is removed."""
    import onnx_ir as ir

    x, lengths = node.inputs[0], node.inputs[1] if len(node.inputs) > 1 else None
    tensor = None if lengths is None else ir.convenience.get_const_tensor(lengths)
    if tensor is None or x is None:
        return None
    numbers = tensor.numpy()
    if numbers.ndim:
        return [int(number) for number in numbers]
    whole = None if x.shape is None else x.shape[_axis(node)]
    piece = int(numbers)
    if not isinstance(whole, int) or piece < 1:
        return None
    return [min(piece, whole - start) for start in range(0, whole, piece)]


def _index(node: ir.Node, length: int) -> int | None:
    """Return the index of the piece that a node reads; None for other readers, or if it is not constant."""
    import onnx_ir as ir

    if node.op_type != "SequenceAt" or node.inputs[1] is None:
        return None
    tensor = ir.convenience.get_const_tensor(node.inputs[1])
    place = None if tensor is None else int(tensor.numpy())
    return place % length if place is not None and -length <= place < length else None
