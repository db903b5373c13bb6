"""sentence-transformers, through its ONNX backend: it computes its modules itself.

From the sources of sentence-transformers 5.7 with optimum-onnx 0.1.
"""

from __future__ import annotations

from onnxtool.export.target import (
    DENSE,
    HIDDEN_STATES,
    LOGITS,
    SCORE_LOGITS,
    SCORES,
    SPARSE,
    TOKENIZER_FILES,
    Target,
    Use,
)


class SentenceTransformers(Target):
    """Reads the checkpoint's own files, and a graph in the folder `onnx`."""

    name = "sentence-transformers"
    title = "sentence-transformers"
    uses = (
        Use(DENSE, (HIDDEN_STATES,), after=None),
        Use(SPARSE, (LOGITS,), after=None),
        Use(SCORES, (SCORE_LOGITS,), after=None),
    )
    graph = "onnx/model.onnx"
    files = ("config.json", *TOKENIZER_FILES)
    max_ir = 10
    max_opset = 21


TARGET = SentenceTransformers()
