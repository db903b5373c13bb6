"""Quantize embedding tables to int8, a quarter of their size.

Letters of shapes: V rows of a table, H their width, B batch, S sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtool.graph.edit import attribute, drop_unused, is_weight, replace_and_erase, tensor_of
from onnxtool.graph.operators import MICROSOFT, named_inputs
from onnxtool.graph.writer import Writer
from onnxtool.model_file.domains import default_opset
from onnxtool.optimize.pipeline import Context, Outcome, Pass, refusals
from onnxtool.optimize.quantization.arithmetic import quantize_weight

# Smaller tables (positions, segments) hardly add to the size.
_FEWEST_ROWS = 1024
_NARROWEST = 8
_FIRST_OPSET = 17  # of LayerNormalization
_DEFAULT_EPSILON = 1e-12  # of EmbedLayerNormalization


def _apply(model: ir.Model, _context: Context) -> Outcome:
    """Replace `Gather(table, ids)` by `Mul(Cast(Gather(int8 table, ids)), Gather(scale, ids))`, with a scale per row.

    `EmbedLayerNormalization` is unfused first where it has position ids.
    """
    written: dict[ir.Value, tuple[ir.Value, ir.Value]] = {}
    return rewrite_lookups(model, lambda node, table: _write(node, table, written))


def rewrite_lookups(model: ir.Model, rewrite: Callable[[ir.Node, ir.Value], str]) -> Outcome:
    """Rewrite each lookup of rows in a large table by `rewrite`, and drop the tables that nothing reads any more.

    `rewrite` returns why not where a precondition does not hold. `EmbedLayerNormalization` is unfused first.
    """
    reasons = _unfuse_embeddings(model)
    num_unfused = len(reasons)
    gathers = [(node, node.inputs[0]) for node in model.graph if node.op_type == "Gather" and not node.domain]
    lookups = [(node, table) for node, table in gathers if table is not None and _is_large_table(table)]
    for node, table in lookups:
        is_of_rows = attribute(node, "axis", 0) == 0
        reason = rewrite(node, table) if is_of_rows else "the lookup is not one of rows"
        reasons += [reason] if reason else []
    drop_unused(dict.fromkeys(table for _, table in lookups))
    return Outcome(model, len(lookups) - (len(reasons) - num_unfused), refusals(reasons))


def _is_large_table(table: ir.Value | None) -> bool:
    """Whether `table` is a float32 matrix large enough to be quantized, which only lookups read."""
    if table is None or not is_weight(table, 2) or table.is_graph_output():
        return False
    # Where another node reads it (a head that stays in float32), a quantized copy would only add to the size.
    if any(reader.op_type not in ("Gather", "EmbedLayerNormalization") for reader, _ in table.uses()):
        return False
    tensor = tensor_of(table)
    rows, columns = tensor.shape.numpy()
    return bool(tensor.dtype == ir.DataType.FLOAT and rows >= _FEWEST_ROWS and columns >= _NARROWEST)


def _write(node: ir.Node, table: ir.Value, written: dict[ir.Value, tuple[ir.Value, ir.Value]]) -> str:
    writer = Writer(node)
    if table not in written:
        rounded, scale = _lazy_table(tensor_of(table))
        written[table] = (
            writer.initializer(rounded, f"{table.name}_rows_int8"),
            writer.initializer(scale, f"{table.name}_rows_scale"),
        )
    rounded_rows, scales = (writer.node("Gather", [one, node.inputs[1]]) for one in written[table])
    rows = writer.node("Cast", [rounded_rows], {"to": ir.DataType.FLOAT})
    replace_and_erase(node.outputs[0], writer.node("Mul", [rows, scales], like=node.outputs[0]))
    return ""


def _lazy_table(tensor: ir.TensorProtocol) -> tuple[ir.TensorProtocol, ir.TensorProtocol]:
    """Return int8 [V, H] and its scale, float32 [V, 1], computed when their bytes are read."""

    def quantized(index: int) -> ir.TensorProtocol:
        columns, scale = quantize_weight(tensor.numpy().T)
        return ir.tensor(scale[:, None] if index else np.ascontiguousarray(columns.T))

    rows, columns = (int(size) for size in tensor.shape.numpy())
    return (
        ir.LazyTensor(lambda: quantized(0), ir.DataType.INT8, ir.Shape([rows, columns])),
        ir.LazyTensor(lambda: quantized(1), ir.DataType.FLOAT, ir.Shape([rows, 1]), cache=True),
    )


def _unfuse_embeddings(model: ir.Model) -> list[str]:
    """Replace `EmbedLayerNormalization` by lookups, sums and `LayerNormalization`; return why not where it stays."""
    reasons = []
    for node in model.graph:
        if node.op_type != "EmbedLayerNormalization" or node.domain != MICROSOFT:
            continue
        inputs: dict[str, Any] = named_inputs(node.domain, node.op_type, node.inputs)
        if not _is_large_table(inputs["word_embedding"]):
            continue
        if default_opset(model.opset_imports) < _FIRST_OPSET:
            reasons.append(f"opset below {_FIRST_OPSET}")
        elif inputs["position_ids"] is None:
            reasons.append("the embedding has no input of position ids")
        elif any(output.uses() or output.is_graph_output() for output in node.outputs[1:]):
            reasons.append("the mask or the sum of the embedding is read")
        else:
            _unfuse(node, inputs)
    return reasons


def _unfuse(node: ir.Node, inputs: dict[str, Any]) -> None:
    writer = Writer(node)
    total = writer.node("Gather", [inputs["word_embedding"], inputs["input_ids"]], like=node.outputs[0])
    for table, ids in (("position_embedding", "position_ids"), ("segment_embedding", "segment_ids")):
        if inputs[table] is not None and inputs[ids] is not None:
            rows = writer.node("Gather", [inputs[table], inputs[ids]])
            total = writer.node("Add", [total, rows], like=node.outputs[0])
    normalized = writer.node(
        "LayerNormalization",
        [total, inputs["gamma"], inputs["beta"]],
        {"axis": -1, "epsilon": float(attribute(node, "epsilon", _DEFAULT_EPSILON))},
        like=node.outputs[0],
    )
    replace_and_erase(node.outputs[0], normalized)


int8_embeddings = Pass("int8_embeddings", _apply)
