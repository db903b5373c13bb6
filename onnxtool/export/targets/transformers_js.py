"""Transformers.js: it computes common pooling itself, as requested by its caller.

From the sources of Transformers.js 4.3.
"""

from __future__ import annotations

from onnxtool.export.target import (
    CLASSIFIERS,
    LOGITS,
    OTHER,
    POOLED_BY_CONSUMER,
    POOLED_IN_GRAPH,
    SPARSE,
    TAGS,
    TOKENIZER_FILES,
    Delivery,
    Target,
    Use,
    bound_texts,
)


class TransformersJs(Target):
    """Reads the text length from tokenizer_config.json."""

    name = "transformers.js"
    title = "Transformers.js"
    uses = (
        POOLED_BY_CONSUMER,
        POOLED_IN_GRAPH,
        Use(SPARSE, (LOGITS,), after=None),
        CLASSIFIERS,
        Use(TAGS, (LOGITS,)),
    )
    graph = "onnx/model.onnx"
    files = ("config.json", *TOKENIZER_FILES)
    max_ir = 10
    max_opset = 21
    functions = ("Softmax", "Softmax", "Sigmoid", "Sigmoid")  # src/pipelines/text-classification.js
    refused = ((OTHER, "decoders need their cache as inputs there; pass --target plain for a graph without one"),)

    def write_files(self, to: Delivery) -> None:
        """State the text length."""
        bound_texts(to.folder, to.max_length)


TARGET = TransformersJs()
