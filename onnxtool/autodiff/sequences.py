"""Replace sequences of tensors, which PyTorch's exporter writes for chunks, by the tensors."""

from __future__ import annotations

import onnx_ir as ir

from onnxtool.graph.edit import attribute, constant


def replace_sequences(graph: ir.Graph) -> bool:
    """Replace `SequenceAt(SplitToSequence(x, sizes), i)` by an output of `Split`, and return whether there were any.

    The sizes and i must be constants; sequences with other readers are kept.
    """
    replaced = False
    for node in list(graph):
        if node.op_type != "SplitToSequence" or (sizes := _sizes(node)) is None:
            continue
        reads = [(use.node, _index(use.node, len(sizes))) for use in node.outputs[0].uses()]
        if node.outputs[0].is_graph_output() or any(place is None for _, place in reads):
            continue
        lengths = ir.node("Constant", [], {"value": ir.tensor(sizes)})
        inputs, attributes = [node.inputs[0], lengths.outputs[0]], {"axis": attribute(node, "axis", 0)}
        split = ir.node("Split", inputs, attributes, num_outputs=len(sizes), name=node.name)
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


def _sizes(node: ir.Node) -> list[int] | None:
    """Return the sizes of the pieces; None if they are not fixed, or the axis is removed."""
    x, lengths = node.inputs[0], constant(node.inputs[1]) if len(node.inputs) > 1 else None
    if lengths is None or x is None:
        return None
    if lengths.ndim:
        return [int(length) for length in lengths]
    whole = None if x.shape is None else x.shape[attribute(node, "axis", 0)]
    piece = int(lengths)
    if not isinstance(whole, int) or piece < 1:
        return None
    return [min(piece, whole - start) for start in range(0, whole, piece)]


def _index(node: ir.Node, length: int) -> int | None:
    """Return the index of the piece that a node reads; None for other readers, or if it is not constant."""
    index = constant(node.inputs[1]) if node.op_type == "SequenceAt" else None
    return int(index) % length if index is not None and -length <= int(index) < length else None
