"""Store equal initializers once."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import onnx_ir as ir

from onnxtool.graph.edit import is_made_on_saving, replace, tensor_of
from onnxtool.optimize.pipeline import Context, Outcome, Pass

_SAMPLES = 64  # elements of a weight, far apart: they tell nearly all weights apart without reading them


def _apply(model: ir.Model, _context: Context) -> Outcome:
    """Replace `y = Op(x, A)` by `y = Op(x, B)` where A and B have equal dtype, shape and bytes; drop unused ones."""
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
            first = next((one for one in kept if _same(one, value)), None)
            if first is None:
                kept.append(value)
                continue
            replace(value, first)
            del graph.initializers[str(value.name)]
            num_changes += 1
    return Outcome(model, num_changes)


def _fingerprint(value: ir.Value) -> Any:
    """Return dtype, shape and a few elements of a tensor; None for one that is not in memory or on disk."""
    tensor = value.const_value
    if tensor is None or tensor.dtype.name in ("STRING", "UNDEFINED") or is_made_on_saving(tensor):
        return None
    array = tensor.numpy().reshape(-1)
    step = max(1, array.size // _SAMPLES)
    return tensor.dtype, tuple(tensor.shape.numpy()), array[::step].tobytes()


def _same(first: ir.Value, second: ir.Value) -> bool:
    """Whether two tensors of equal fingerprint have equal bytes, so that 0.0 and -0.0 differ and NaN equals itself."""
    one, other = (np.ascontiguousarray(tensor_of(value).numpy()).view(np.uint8) for value in (first, second))
    return np.array_equal(one, other)


deduplicate_initializers = Pass("deduplicate_initializers", _apply)
