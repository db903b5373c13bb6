"""Quantize embedding tables to blocks of 4 bits, or to those of the head that they are tied to.

Letters of shapes: V rows of a table, H their width, C blocks of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from onnxtool.graph.edit import is_made_on_saving, replace_and_erase, tensor_of
from onnxtool.graph.operators import MICROSOFT
from onnxtool.graph.writer import Writer
from onnxtool.optimize.pipeline import Outcome, Pass
from onnxtool.optimize.quantization.arithmetic import Floats
from onnxtool.optimize.quantization.blocks import BLOCK, Grids, pack_weight
from onnxtool.optimize.quantization.int4_linear_layers import lazy_parts
from onnxtool.optimize.quantization.int8_embeddings import rewrite_lookups


def int4_embeddings(grids: Grids | None = None) -> Pass:
    """Return the pass that quantizes embeddings to blocks of 4 bits.

    Args:
        grids: the grids of one model, and the importances to find others; None for a pass for any model.
    """
    return Pass("int4_embeddings", lambda model, _context: _apply(model, Grids() if grids is None else grids))


def _apply(model: ir.Model, grids: Grids) -> Outcome:
    """Replace `Gather(table, ids)` by `GatherBlockQuantized(table in blocks, ids, scales, zero points)`.

    A table that is tied to a quantized head shares its blocks, of 4 bits or of 8. `EmbedLayerNormalization` is unfused
    where it has position ids.
    """
    written: dict[ir.Value, _Blocks] = {}

    def rewrite(node: ir.Node, table: ir.Value) -> str:
        if tensor_of(table).shape.numpy()[1] % 2:
            return "a row of an odd width fills no whole bytes"
        if table not in written:
            written[table] = _shared_blocks(table, model.graph, node) or _own_blocks(table, grids, node)
        _write(node, written[table])
        return ""

    return rewrite_lookups(model, rewrite)


@dataclass(frozen=True)
class _Blocks:
    """A table as the operator reads it: uint8 [V, H * bits / 8], float32 [V, C], uint8 [V, C * bits / 8]."""

    bits: int
    data: ir.Value
    scale: ir.Value
    zero: ir.Value


def _write(node: ir.Node, blocks: _Blocks) -> None:
    inputs = [blocks.data, node.inputs[1], blocks.scale, blocks.zero]
    attributes = {"bits": blocks.bits, "block_size": BLOCK, "gather_axis": 0, "quantize_axis": 1}
    writer = Writer(node)
    rows = writer.node("GatherBlockQuantized", inputs, attributes, domain=MICROSOFT, like=node.outputs[0])
    replace_and_erase(node.outputs[0], rows)


def _shared_blocks(table: ir.Value, graph: ir.Graph, node: ir.Node) -> _Blocks | None:
    """Return the blocks of a head that reads the same table, as rows; None where there is none.

    The head has a block on the axis in between. Its bytes are the same unless the last block is padded.
    """
    num_rows, width = (int(size) for size in tensor_of(table).shape.numpy())
    # See `stored_name`: the rows of a square table are what is stored of its transpose.
    name = f"{table.name}_transposed" if num_rows == width else table.name
    for bits in (4, 8):
        held = [graph.initializers.get(f"{name}_int{bits}_{part}") for part in ("blocks", "scale", "zero")]
        data, scale, zero = held
        shape = [num_rows, width // BLOCK, BLOCK * bits // 8]
        if data is None or scale is None or zero is None:
            continue
        # What a file brought under these names is not made on saving; a padded last block makes one more.
        if not is_made_on_saving(tensor_of(data)) or list(tensor_of(data).shape.numpy()) != shape:
            continue
        writer = Writer(node)
        sizes = writer.constant(np.array([num_rows, width * bits // 8]), f"{table.name}_rows_shape")
        rows = writer.node("Reshape", [data, sizes])
        rows.type, rows.shape = ir.TensorType(ir.DataType.UINT8), ir.Shape([num_rows, width * bits // 8])
        return _Blocks(bits, rows, scale, zero)
    return None


def _own_blocks(table: ir.Value, grids: Grids, node: ir.Node) -> _Blocks:
    tensor, name = tensor_of(table), f"{table.name}_rows"
    num_rows, width = (int(size) for size in tensor.shape.numpy())

    def read() -> Floats:
        array: Floats = tensor.numpy().T
        return array

    def data() -> ir.TensorProtocol:
        array = read()
        packed = pack_weight(array, grids.find(name, 4, lambda: array)).reshape(num_rows, -1)
        return ir.tensor(np.ascontiguousarray(packed[:, : width // 2]))  # without the padding of the last block

    parts = lazy_parts(name, (width, num_rows), 4, grids, read)
    parts["blocks"] = ir.LazyTensor(data, ir.DataType.UINT8, ir.Shape([num_rows, width // 2]))
    writer = Writer(node)
    return _Blocks(4, *(writer.initializer(part, f"{name}_int4_{suffix}") for suffix, part in parts.items()))
