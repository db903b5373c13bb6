"""Merge duplicates: nodes, initializers, and transposed copies of weights."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common

from onnxtool.graph.edit import drop_unused, is_made_on_saving, is_weight, replace, tensor_of
from onnxtool.graph.writer import Writer
from onnxtool.optimize.pipeline import Context, Outcome, Pass
from onnxtool.runtime.quiet import quiet

_LARGEST_CONSTANT = 1024  # elements


def _merge_nodes(model: ir.Model, _context: Context) -> Outcome:
    """Merge `y = Op(x)` and `z = Op(x)`, with equal attributes, into the first; remove unused nodes."""
    before = _size(model.graph)
    common.RemoveUnusedNodesPass()(model)
    # Exporters repeat a constant for each of its readers.
    with quiet():  # it logs each initializer that is an input, such as those for adapters, as left alone
        common.DeduplicateInitializersPass(size_limit=_LARGEST_CONSTANT)(model)
    common.CommonSubexpressionEliminationPass()(model)
    return Outcome(model, before - _size(model.graph))


def _size(graph: ir.Graph) -> int:
    return graph.num_nodes() + len(graph.initializers)


common_subexpressions = Pass("common_subexpressions", _merge_nodes)


_SAMPLES = 64  # widely spaced elements of a weight: they distinguish nearly all weights without reading them in full


def _merge_initializers(model: ir.Model, _context: Context) -> Outcome:
    """Replace `y = Op(x, A)` by `y = Op(x, B)` if A and B have equal dtype, shape and bytes; drop unused ones."""
    graph = model.graph
    num_changes = 0
    alike: dict[Any, list[ir.Value]] = defaultdict(list)
    for name, value in list(graph.initializers.items()):
        if value.is_graph_input() or value.is_graph_output():
            continue
        if not value.uses():
            del graph.initializers[name]
            num_changes += 1
        elif (key := _fingerprint(value)) is not None:
            alike[key].append(value)
    for values in alike.values():
        kept: list[ir.Value] = []
        for value in values:
            first = next((candidate for candidate in kept if _same(candidate, value)), None)
            if first is None:
                kept.append(value)
                continue
            replace(value, first)
            del graph.initializers[str(value.name)]
            num_changes += 1
    return Outcome(model, num_changes)


def _fingerprint(value: ir.Value) -> Any:
    """Return dtype, shape and a few elements of a tensor; None if it is neither in memory nor on disk."""
    tensor = value.const_value
    if tensor is None or tensor.dtype.name in ("STRING", "UNDEFINED") or is_made_on_saving(tensor):
        return None
    array = tensor.numpy().reshape(-1)
    step = max(1, array.size // _SAMPLES)
    return tensor.dtype, tuple(tensor.shape.numpy()), array[::step].tobytes()


def _same(first: ir.Value, second: ir.Value) -> bool:
    """Whether two tensors with equal fingerprints have equal bytes: 0.0 and -0.0 differ, and NaN equals itself."""
    left, right = (np.ascontiguousarray(tensor_of(value).numpy()).view(np.uint8) for value in (first, second))
    return np.array_equal(left, right)


deduplicate_initializers = Pass("deduplicate_initializers", _merge_initializers)


_SMALLEST = 1 << 16  # elements; smaller copies are not searched for
_FUSED = frozenset({"FLOAT", "FLOAT16"})  # what `transposed_weights` takes
_ROWS = 1024  # of a weight that are compared at a time


def _tie(model: ir.Model, _context: Context) -> Outcome:
    """Replace `MatMul(x, W)` by `MatMul(x, Transpose(V))`, where V is another initializer and W is its transpose.

    Exporters that fold constants write an output layer tied to an embedding this way. `transposed_weights` then fuses
    the Transpose into the MatMul.
    """
    graph = model.graph
    weights = [value for value in graph.initializers.values() if _is_candidate(value)]
    by_shape: dict[Any, list[ir.Value]] = defaultdict(list)
    for value in weights:
        by_shape[_shape(value)].append(value)
    num_changes = 0
    for copy in weights:
        if not _is_only_multiplied(copy):
            continue
        candidates = by_shape[_shape(copy)[::-1]]
        original = next(
            (
                candidate
                for candidate in candidates
                if candidate is not copy and candidate.uses() and _is_transposed(copy, candidate)
            ),
            None,
        )
        if original is not None:
            _replace(copy, original)
            num_changes += 1
    return Outcome(model, num_changes)


def _is_candidate(value: ir.Value) -> bool:
    if not is_weight(value, 2) or value.is_graph_output():
        return False
    tensor = tensor_of(value)
    is_fused = tensor.dtype.name in _FUSED  # otherwise the Transpose would remain
    return is_fused and tensor.size >= _SMALLEST and not is_made_on_saving(tensor)


def _shape(value: ir.Value) -> tuple[int, ...]:
    return tuple(tensor_of(value).shape.numpy())


def _is_only_multiplied(weight: ir.Value) -> bool:
    uses = list(weight.uses())
    return bool(uses) and all(
        place == 1 and node.op_type == "MatMul" and not node.domain and node.graph is weight.graph
        for node, place in uses
    )


def _is_transposed(copy: ir.Value, original: ir.Value) -> bool:
    """Whether one is the bitwise transpose of the other, so that NaN equals itself, and 0.0 and -0.0 differ."""
    if tensor_of(copy).dtype != tensor_of(original).dtype:
        return False
    left, right = (_bits(tensor_of(value).numpy()) for value in (copy, original))
    rows, columns = (np.linspace(0, size - 1, _SAMPLES).astype(int) for size in left.shape)
    if not np.array_equal(left[rows, columns], right[columns, rows]):
        return False
    blocks = range(0, left.shape[0], _ROWS)
    return all(np.array_equal(left[start : start + _ROWS], right[:, start : start + _ROWS].T) for start in blocks)


def _bits(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return array.view(f"u{array.itemsize}")


def _replace(copy: ir.Value, original: ir.Value) -> None:
    """Replace `copy` by the transpose of `original` in all its consumers."""
    for node, place in list(copy.uses()):
        node.replace_input_with(place, Writer(node).node("Transpose", [original], {"perm": [1, 0]}, like=copy))
    drop_unused([copy])


tied_transposes = Pass("tied_transposes", _tie)
