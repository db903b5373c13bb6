"""fastembed: it computes the usual pooling itself, and is told of other models by `add_custom_model`.

From the sources of fastembed 0.9.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from onnxtool.checkpoint.pooling_modules import SpladePooling
from onnxtool.errors import TargetError
from onnxtool.export.sidecar_files import query_weights
from onnxtool.export.target import (
    CLASSIFIERS,
    DENSE,
    INFERENCE_FREE,
    LOGITS,
    PLAIN_SPLADE,
    POOLED_BY_CONSUMER,
    POOLED_IN_GRAPH,
    SCORES,
    SPARSE,
    TOKENIZER_CONFIG,
    TOKENIZER_FILES,
    Target,
    TargetModel,
    Use,
    bound_texts,
    read_object,
    write_json,
)

_IDF = "idf.json"
_MODES = {"cls": "CLS", "mean": "MEAN", "lasttoken": "LAST_TOKEN"}


class Fastembed(Target):
    """Reads the length of texts and the padding token from tokenizer_config.json."""

    name = "fastembed"
    title = "fastembed"
    uses = (
        Use(SPARSE, (LOGITS,), after=PLAIN_SPLADE),
        # Its IfSplade has the double log alone.
        Use(INFERENCE_FREE, (LOGITS,), after=(SpladePooling(activation="log1p_relu"),)),
        POOLED_BY_CONSUMER,
        POOLED_IN_GRAPH,
        CLASSIFIERS,
    )
    graph = "model.onnx"
    files = ("config.json", *TOKENIZER_FILES, "special_tokens_map.json")
    max_ir = 9  # it admits onnxruntime 1.17
    max_opset = 20

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Refuse one without a padding token as well."""
        super().check_tokenizer(tokenizer)
        if getattr(tokenizer, "pad_token", None) is None:
            raise TargetError(
                "fastembed pads every batch, and this tokenizer has no padding token",
                "set one with tokenizer.pad_token = tokenizer.eos_token, save the tokenizer, and export again",
            )

    def write_files(
        self, model: TargetModel, config: Any, tokenizer: Any, folder: Path, max_length: int | None
    ) -> None:
        """State the length of texts, which it needs, and the padding token."""
        bound_texts(folder, max_length, pad_token=str(tokenizer.pad_token))
        if model.use.kind == INFERENCE_FREE:
            weights = query_weights(folder).tolist()
            write_json(folder / _IDF, {token: weights[place] for token, place in tokenizer.get_vocab().items()})
        if "model_max_length" not in read_object(folder / TOKENIZER_CONFIG):
            raise TargetError(
                "fastembed needs the length that texts are cut to, and neither tokenizer nor model says it",
                "write model_max_length into tokenizer_config.json of the checkpoint",
            )

    def instruction(self, model: TargetModel) -> str:
        """Name the call that loads the model."""
        if model.use.kind == SPARSE:
            return 'load it with SparseTextEmbedding("prithivida/Splade_PP_en_v1", specific_model_path=FOLDER)'
        if model.use.kind == INFERENCE_FREE:
            return (
                'load it with SparseTextEmbedding("opensearch-project/opensearch-neural-sparse-encoding-doc-v3-gte", '
                "specific_model_path=FOLDER), and encode queries with query_embed"
            )
        if model.use.kind == SCORES:
            return 'register it with TextCrossEncoder.add_custom_model(..., model_file="model.onnx")'
        if model.use.kind != DENSE:
            return ""
        pooling = "DISABLED" if model.head is not None else _MODES.get(model.pooling_mode, "MEAN")
        return (
            f"register it with TextEmbedding.add_custom_model(..., pooling=PoolingType.{pooling}, "
            f'normalization={model.is_normalized_outside}, model_file="model.onnx"); '
            "load it with specific_model_path=FOLDER"
        )


TARGET = Fastembed()
