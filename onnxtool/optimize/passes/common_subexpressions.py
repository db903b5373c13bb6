"""Merge nodes that compute the same value."""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as common

from onnxtool.optimize.pipeline import Context, Outcome, Pass

_LARGEST_CONSTANT = 1024  # elements


def _apply(model: ir.Model, _context: Context) -> Outcome:
    """Replace `y = Op(x)` and `z = Op(x)`, with equal attributes, by the first of them; remove unused nodes."""
    before = _size(model.graph)
    common.RemoveUnusedNodesPass()(model)
    # Exporters write a constant again for each of its readers.
    common.DeduplicateInitializersPass(size_limit=_LARGEST_CONSTANT)(model)
    common.CommonSubexpressionEliminationPass()(model)
    return Outcome(model, before - _size(model.graph))


def _size(graph: ir.Graph) -> int:
    return graph.num_nodes() + len(graph.initializers)


common_subexpressions = Pass("common_subexpressions", _apply)
