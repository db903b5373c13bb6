"""Store equal initializers once."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np

from onnxtool.graph.edit import is_made_on_saving, replace, tensor_of
from onnxtool.optimize.pipeline import Context, Outcome, Pass

if TYPE_CHECKING:
    import onnx_ir as ir

_SAMPLES = 64  # of a weight's elements, far apart: enough to tell nearly all from each other without reading them


def _apply(model: ir.Model, _context: Context) -> Outcome:
    """Let every use of an initializer go to the first one of equal dtype, shape and bytes; drop those without uses."""
    graph = model.graph
    num_changes = 0
    alike: dict[Any, list[ir.Value]] = defaultdict(list)
    for name, value in list(graph.initializers.items()):
        if value.is_graph_input() or value.is_graph_output():
            continue
        if not value.uses():
            del graph.initializers[name]
            num_changes += 1
        elif (key := _look(value)) is not None:
            alike[key].append(value)
    for values in alike.values():
        kept: list[ir.Value] = []
        for value in values:
            twin = next((one for one in kept if _same(one, value)), None)
            if twin is None:
                kept.append(value)
                continue
            replace(value, twin)
            del graph.initializers[str(value.name)]
            num_changes += 1
    return Outcome(model, num_changes)


def _look(value: ir.Value) -> Any:
    """Return dtype, shape and a few elements of a tensor; None for one whose memory cannot be looked at."""
    tensor = value.const_value
    if tensor is None or tensor.dtype.name in ("STRING", "UNDEFINED") or is_made_on_saving(tensor):
        return None
    array = tensor.numpy().reshape(-1)
    step = max(1, array.size // _SAMPLES)
    return tensor.dtype, tuple(tensor.shape.numpy()), array[::step].tobytes()


def _same(first: ir.Value, second: ir.Value) -> bool:
    """Whether two tensors of the same look hold the same bytes, so that 0.0 and -0.0 differ and NaN is itself."""
    one, other = (np.ascontiguousarray(tensor_of(value).numpy()).view(np.uint8) for value in (first, second))
    return np.array_equal(one, other)


deduplicate_initializers = Pass("deduplicate_initializers", _apply)
