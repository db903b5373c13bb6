"""Whether a session takes and gives what the piece of a graph does that it was made for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from onnxtool.torch_backend.lower.finishing import INPUTS_KEY, NUM_NODES_KEY

if TYPE_CHECKING:
    import onnxruntime as ort

    from onnxtool.torch_backend.partition.partitions import Piece

_TYPES = {
    torch.bool: "bool",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float",
    torch.float64: "double",
    **{getattr(torch, name): name for name in ("int8", "int16", "int32", "int64", "uint8")},
}


def wrong_types(session: ort.InferenceSession, piece: Piece) -> dict[torch.fx.Node, str]:
    """Return the outputs of `piece` for which the session gives another type, each with that type.

    Their bytes would be read as what they are not.
    """
    outputs = zip(piece.outputs, session.get_outputs(), strict=True)
    return {node: given.type for node, given in outputs if given.type != _type_of(node.meta["val"])}


def is_of(session: ort.InferenceSession, piece: Piece) -> bool:
    """Whether a session that was not made just now can be that of `piece`: metadata, inputs, outputs and types."""
    metadata = session.get_modelmeta().custom_metadata_map
    used = metadata.get(INPUTS_KEY, "?").split()
    if not all(number.isdecimal() for number in (*used, metadata.get(NUM_NODES_KEY, "?"))):
        return False
    taken = [piece.inputs[index] for index in map(int, used) if index < len(piece.inputs)]
    if (len(taken), len(session.get_outputs())) != (len(session.get_inputs()), len(piece.outputs)):
        return False
    # Values of placeholders stand in the copies: a constant of the graph has none in the original.
    placeholders = piece.module.graph.find_nodes(op="placeholder")
    values = [placeholders[int(index)].meta["val"] for index in used]
    types = [value.type for value in session.get_inputs()]
    return types == list(map(_type_of, values)) and not wrong_types(session, piece)


def _type_of(value: object) -> str:
    """Return onnxruntime's name of the type of a fake value; sizes are integers."""
    if isinstance(value, torch.Tensor):
        return f"tensor({_TYPES.get(value.dtype, value.dtype)})"
    return "tensor(bool)" if isinstance(value, bool | torch.SymBool) else "tensor(int64)"
