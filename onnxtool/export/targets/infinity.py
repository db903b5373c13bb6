"""infinity: its engine `optimum` pools by mean or first token, and scales vectors to length 1.

From the sources of infinity-emb 0.0.78: transformer/embedder/optimum.py, transformer/crossencoder/optimum.py.
"""

from __future__ import annotations

from typing import Any

from onnxtool.checkpoint.pooling_modules import Normalize, Pooling
from onnxtool.errors import TargetError
from onnxtool.export.source import Source
from onnxtool.export.target import (
    CLASSIFIERS,
    DENSE,
    HIDDEN_STATES,
    SCORES,
    SPARSE,
    TOKENIZER_FILES,
    TOKENS,
    Delivery,
    Target,
    TargetModel,
    Use,
    read_object,
    write_json,
)

_LIMIT = "max_position_embeddings"


class Infinity(Target):
    """Reads transformers' files, cuts texts to the number of positions in config.json, and runs optimum."""

    name = "infinity"
    title = "infinity"
    uses = (Use(DENSE, (HIDDEN_STATES,), after=(Pooling(("mean",)), Pooling(("cls",)), Normalize())), CLASSIFIERS)
    graph = "model.onnx"  # with the path that infinity passes, optimum finds no graph in a subfolder
    files = ("config.json", *TOKENIZER_FILES)
    max_ir = 10
    max_opset = 21
    tokenizer_of = "transformers"
    refused = (
        (SPARSE, "it serves no sparse encoders; pass another --target"),
        (TOKENS, "its engine optimum pools all tokens; pass --target sentence-transformers"),
    )

    def check_checkpoint(self, use: Use, source: Source, tokenizer: Any) -> None:
        """Refuse rerankers that distinguish query and text by token types, which it does not feed."""
        types = source.read("config.json").get("type_vocab_size")
        if use.kind == SCORES and isinstance(types, int) and types > 1:
            raise TargetError(
                f"infinity feeds a reranker no token types, and {source.model_name} has {types} of them "
                "(type_vocab_size in config.json), so its scores would differ",
                "serve it with --target tei or sentence-transformers",
            )

    def write_files(self, to: Delivery) -> None:
        """State the maximum text length in config.json, the only limit it follows, as the number of positions."""
        path = to.folder / "config.json"
        content = read_object(path)
        if to.max_length is not None and content.get(_LIMIT) != to.max_length:
            write_json(path, {**content, _LIMIT: to.max_length})

    def instruction(self, model: TargetModel) -> str:
        """Say how to start it, and where its vectors differ from the checkpoint's."""
        start = "in the folder, start infinity_emb v2 --model-id . --engine optimum"  # elsewhere it finds no graph
        if model.use.kind == SCORES:
            return f"{start}; scores are the model's logits"
        how = f"{start} --pooling-method {model.pooling_mode or 'mean'}"
        return how if model.is_normalized_outside else f"{how}; it scales vectors to length 1, unlike this checkpoint"


TARGET = Infinity()
