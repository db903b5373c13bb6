"""sentence-transformers 5, through its own ONNX backend: `SentenceTransformer(FOLDER, backend="onnx")`.

From the sources of sentence-transformers 5.7 with optimum-onnx 0.1, which needs transformers 4. For
sentence-transformers 6, the target sentence-transformers runs the file without optimum.
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
    TargetModel,
    Use,
)


class Optimum(Target):
    """Reads the checkpoint's own files, and a graph in the folder `onnx`."""

    name = "optimum"
    title = "optimum"
    uses = (
        Use(DENSE, (HIDDEN_STATES,), after=None),
        Use(SPARSE, (LOGITS,), after=None),
        Use(SCORES, (SCORE_LOGITS,), after=None),
    )
    graph = "onnx/model.onnx"
    files = ("config.json", *TOKENIZER_FILES)
    max_ir = 10
    max_opset = 21
    tokenizer_of = "sentence-transformers"

    def instruction(self, model: TargetModel) -> str:
        """Name the argument and the compatible versions."""
        return 'load it with backend="onnx" in sentence-transformers 5 with optimum-onnx and transformers 4'


TARGET = Optimum()
