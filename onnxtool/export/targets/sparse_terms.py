"""Turn weights of a whole vocabulary into the terms that a text has: what Anserini reads of a SPLADE model.

Letters of shapes: B batch, V vocabulary, N terms of weight above 0, of all texts together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from onnxtool.export.heads.builder import Builder

if TYPE_CHECKING:
    import onnx_ir as ir
    from numpy.typing import NDArray

TEXT_OUTPUT, TERM_OUTPUT, WEIGHT_OUTPUT = "output_text", "output_idx", "output_weights"


def append_terms(model: ir.Model, sparse: str, *, with_texts: bool) -> None:
    """Replace the output `sparse`, float [B, V], by the terms of weight above 0 and their weights, in place.

    `output_idx`: int64 [N] and `output_weights`: float32 [N], by text and then by term. Which text a term is of,
    Anserini does not ask, as it runs one at a time; `with_texts` adds it as `output_text`: int64 [N].
    """
    import onnx_ir as ir

    graph = model.graph
    value = next(output for output in graph.outputs if output.name == sparse)
    build = Builder(graph, ir.DataType.FLOAT)
    weights = value if value.dtype == ir.DataType.FLOAT else build.cast(value)
    places = build.op("NonZero", weights)  # [2, N], in the order of texts and then terms
    found = [
        (TEXT_OUTPUT, build.op("Gather", places, build.constant(np.array(0, dtype=np.int64)), axis=0)),
        (TERM_OUTPUT, build.op("Gather", places, build.constant(np.array(1, dtype=np.int64)), axis=0)),
        (WEIGHT_OUTPUT, build.op("GatherND", weights, build.op("Transpose", places, perm=[1, 0]))),
    ]
    for name, output in found:
        output.name = name
        output.dtype = ir.DataType.FLOAT if name == WEIGHT_OUTPUT else ir.DataType.INT64
        output.shape = ir.Shape(["terms"])
    graph.outputs[:] = [output for _, output in found[0 if with_texts else 1 :]]


def as_vectors(outputs: Mapping[str, NDArray[Any]], batch_size: int, width: int) -> NDArray[np.float32]:
    """Turn terms back into weights of the whole vocabulary: float32 [B, V]."""
    weights = np.zeros((batch_size, width), dtype=np.float32)
    texts = outputs.get(TEXT_OUTPUT, np.zeros_like(outputs[TERM_OUTPUT]))
    weights[texts, outputs[TERM_OUTPUT]] = outputs[WEIGHT_OUTPUT]
    return weights
