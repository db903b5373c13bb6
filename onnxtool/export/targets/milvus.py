"""Milvus, through pymilvus.model's OnnxEmbeddingFunction, which pools by mean and scales vectors to length 1.

From the source of pymilvus-model 0.3.4, dense/onnx.py.
"""

from __future__ import annotations

from onnxtool.checkpoint.pooling_modules import Normalize, Pooling
from onnxtool.export.target import (
    DENSE,
    HIDDEN_STATES,
    TEXT_INPUTS,
    TOKENIZER_FILES,
    Delivery,
    Target,
    TargetModel,
    Use,
    bound_texts,
    require_bound,
)


class Milvus(Target):
    """Feeds one text at a time, padded to the tokenizer's limit, always with token types."""

    name = "milvus"
    title = "Milvus"
    uses = (Use(DENSE, (HIDDEN_STATES,), after=(Pooling(("mean",)), Normalize()), declares=TEXT_INPUTS),)
    graph = "model.onnx"
    files = ("config.json", *TOKENIZER_FILES)
    max_ir = 10
    max_opset = 21
    tokenizer_of = "transformers"
    pads = "every text"

    def write_files(self, to: Delivery) -> None:
        """State the text length, to which it pads each text."""
        bound_texts(to.folder, to.max_length, pad_token=str(to.tokenizer.pad_token))
        require_bound(self.title, to.folder)

    def instruction(self, model: TargetModel) -> str:
        """Say how to load it, and where its vectors differ from the checkpoint's."""
        how = (
            "push the folder to the hub, from where it fetches model.onnx, and load it with "
            "pymilvus.model.dense.OnnxEmbeddingFunction(model_name=ID, tokenizer_name=ID)"
        )
        return how if model.is_normalized_outside else f"{how}; it scales vectors to length 1, unlike this checkpoint"


TARGET = Milvus()
