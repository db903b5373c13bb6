"""Compute modules of sentence-transformers after a graph that ends before them, as a second, small ONNX model.

Shape letters: B batch, S sequence, N numbers per token, W width of a vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxtool.checkpoint.module_forms import Floats, Mask, PoolingModule
from onnxtool.checkpoint.pooling_modules import build_all
from onnxtool.errors import InputError, SessionError

_MOST_BYTES = 1 << 26  # of the logits that are copied at once


def compute(
    modules: Sequence[PoolingModule], values: Floats, mask: Mask | None = None, pooled: Mask | None = None
) -> NDArray[np.float32]:
    """Compute `modules` in order, in float32: float [B, S, N], or [B, W] after pooling, to float32.

    Args:
        modules: the modules; without any, the values stay as they are.
        values: the graph's output.
        mask: bool [B, S], false on padding; None if there is none.
        pooled: bool [B, S], false for prompts that are not pooled as well; None to pool all.

    Raises:
        InputError: a module takes vectors of another width.
        SessionError: a value outside the padding is NaN.
    """
    values = np.asarray(values, np.float32)
    if not modules:
        return values
    session = _session(tuple(modules), values.ndim, values.shape[-1])
    mask = np.ones(values.shape[:2], np.bool_) if mask is None else mask
    largest = values.max(axis=-1, initial=-np.inf)
    if np.isnan(largest[mask] if values.ndim == 3 else largest).any():  # onnxruntime's Relu makes 0 of it
        raise SessionError(
            "the model gives a value that is not a finite number",
            "a model in fp16 may overflow; try it in fp32, or on another provider",
        )
    arrays = {"values": values, "mask": mask, "pooled": mask if pooled is None else pooled}
    feeds = {
        graph_input.name: arrays[graph_input.name]
        if graph_input.name == "values"
        else arrays[graph_input.name].astype(np.int64)
        for graph_input in session.get_inputs()
    }
    step = max(1, _MOST_BYTES // max(1, values[:1].nbytes))
    return np.concatenate(
        [
            session.run(None, {name: array[start : start + step] for name, array in feeds.items()})[0]
            for start in range(0, max(1, len(values)), step)
        ]
    )


@lru_cache(maxsize=16)
def _session(modules: tuple[PoolingModule, ...], rank: int, width: int) -> Any:
    """Make the model, whose inputs are those that its modules read."""
    import onnxruntime as ort

    from onnxtool.graph.builder import model_of

    try:
        for module in modules:
            width = module.width(width)
    except ValueError as error:
        raise InputError(
            str(error), "the files beside the model belong to another one; pass --model_name with the right folder"
        ) from error
    model = model_of(
        lambda build, *values: build_all(modules, build, *values),
        {"values": (np.float32, rank), "mask": (np.int64, 2), "pooled": (np.int64, 2)},
    )
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
