"""Milvus, by the OnnxEmbeddingFunction of pymilvus.model, which pools by mean and scales vectors to length 1.

From the source of pymilvus-model 0.3.4, dense/onnx.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onnxtool.checkpoint.limits import Text
from onnxtool.checkpoint.pooling_modules import Normalize, Pooling
from onnxtool.errors import TargetError
from onnxtool.export.target import (
    DENSE,
    HIDDEN_STATES,
    TEXT_INPUTS,
    TOKENIZER_CONFIG,
    TOKENIZER_FILES,
    Target,
    TargetModel,
    Use,
    bound_texts,
    read_object,
)
from onnxtool.runtime.tokens import read_by_transformers


class Milvus(Target):
    """Feeds one text at a time, padded to the tokenizer's limit, with token types whatever the model takes."""

    name = "milvus"
    title = "Milvus"
    uses = (Use(DENSE, (HIDDEN_STATES,), after=(Pooling(("mean",)), Normalize()), declares=TEXT_INPUTS),)
    graph = "model.onnx"
    files = ("config.json", *TOKENIZER_FILES)
    max_ir = 10
    max_opset = 21

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Refuse one without a padding token as well."""
        super().check_tokenizer(tokenizer)
        if getattr(tokenizer, "pad_token", None) is None:
            raise TargetError(
                "Milvus pads every text, and this tokenizer has no padding token",
                "set one with tokenizer.pad_token = tokenizer.eos_token, save the tokenizer, and export again",
            )

    def read_texts(self, folder: Path, model: TargetModel, texts: Sequence[Text], limit: int | None) -> list[list[int]]:
        """Return the ids that transformers makes of texts."""
        return read_by_transformers(folder)(texts, limit)

    def write_files(
        self, model: TargetModel, config: Any, tokenizer: Any, folder: Path, max_length: int | None
    ) -> None:
        """State the length of texts, to which it pads each."""
        bound_texts(folder, max_length, pad_token=str(tokenizer.pad_token))
        if "model_max_length" not in read_object(folder / TOKENIZER_CONFIG):
            raise TargetError(
                "Milvus pads texts to the length that they are cut to, and neither tokenizer nor model says it",
                "write model_max_length into tokenizer_config.json of the checkpoint",
            )

    def instruction(self, model: TargetModel) -> str:
        """Say how it is loaded, and where its vectors are others than the checkpoint's."""
        how = (
            "push the folder to the hub, from where it fetches model.onnx, and load it with "
            "pymilvus.model.dense.OnnxEmbeddingFunction(model_name=ID, tokenizer_name=ID)"
        )
        return how if model.is_normalized_outside else f"{how}; it scales vectors to length 1, unlike this checkpoint"


TARGET = Milvus()
