"""fastembed: it computes common pooling itself, and learns about other models from `add_custom_model`.

From the sources of fastembed 0.9.
"""

from __future__ import annotations

import string
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from onnxtool.checkpoint.folder import TOKENIZER_NAME, CheckpointFolder
from onnxtool.checkpoint.late_interaction import QueryExpansion
from onnxtool.checkpoint.limits import Text
from onnxtool.checkpoint.sentence_modules import as_object
from onnxtool.checkpoint.sparse_modules import SpladePooling
from onnxtool.checkpoint.tasks import LATE_INTERACTION
from onnxtool.checkpoint.token_modules import read_mask
from onnxtool.checkpoint.tokenizer_library import read_file
from onnxtool.errors import TargetError
from onnxtool.export.modalities.modality import BATCH, SEQUENCE
from onnxtool.export.sidecar_files import query_weights
from onnxtool.export.source import Source
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
    TOKENIZER_FILES,
    TOKENS,
    Delivery,
    Target,
    TargetModel,
    Use,
    bound_texts,
    read_object,
    require_bound,
    write_json,
)
from onnxtool.reports import TensorInfo

_IDF = "idf.json"
_VECTORS_OF_TOKENS = TensorInfo("token_embeddings", "float32", (BATCH, SEQUENCE, None))
_MODES = {"cls": "CLS", "mean": "MEAN", "lasttoken": "LAST_TOKEN"}


# Its Colbert class has hard-coded settings: the tokens inserted after the first token of a text, the query expansion,
# and the document tokens to skip.
_COLBERT = "colbert-ir/colbertv2.0"
_MARKERS = {"query": 1, "document": 2}
_EXPANSION = QueryExpansion(32, is_exact=True, attend=False, token=None)
_MASK = "[MASK]"


class Fastembed(Target):
    """Reads the text length and padding token from tokenizer_config.json."""

    name = "fastembed"
    title = "fastembed"
    uses = (
        Use(SPARSE, (LOGITS,), after=PLAIN_SPLADE),
        # Its IfSplade has only the double logarithm.
        Use(INFERENCE_FREE, (LOGITS,), after=(SpladePooling(activation="log1p_relu"),)),
        POOLED_BY_CONSUMER,
        POOLED_IN_GRAPH,
        # It adds a marker to ids and mask, but would not extend token types.
        Use(TOKENS, (_VECTORS_OF_TOKENS,), head=LATE_INTERACTION, unfed=("token_type_ids",)),
        CLASSIFIERS,
    )
    graph = "model.onnx"
    files = ("config.json", *TOKENIZER_FILES, "special_tokens_map.json")
    max_ir = 9  # it allows onnxruntime 1.17
    max_opset = 20
    pads = "every batch"

    def check_checkpoint(self, use: Use, source: Source, tokenizer: Any) -> None:
        """Refuse late interaction with tokens, an expansion or a skip list different from fastembed's."""
        if use.kind == TOKENS and (other := list(other_than_colbert(source, tokenizer))):
            raise TargetError(
                f"fastembed's late interaction is fixed to {_COLBERT}; {source.model_name} has {'; '.join(other)}",
                "pass --target sentence-transformers, whose MultiVectorEncoder follows the checkpoint",
            )

    def read_texts(self, folder: Path, model: TargetModel, texts: Sequence[Text], limit: int | None) -> list[list[int]]:
        """Return the ids of texts, also recognizing the tokens in special_tokens_map.json."""
        special_tokens = read_object(folder / "special_tokens_map.json")
        return read_file(folder / TOKENIZER_NAME, texts, limit, special_tokens)

    def write_files(self, to: Delivery) -> None:
        """State the text length, which it requires, and the padding token."""
        max_length = to.max_length
        if to.model.use.kind == TOKENS:
            max_length = CheckpointFolder(to.folder).sentence_modules.stated_length("document") or max_length
        bound_texts(to.folder, max_length, pad_token=str(to.tokenizer.pad_token))
        if to.model.use.kind == INFERENCE_FREE:
            weights = query_weights(to.folder).tolist()
            write_json(to.folder / _IDF, {token: weights[place] for token, place in to.tokenizer.get_vocab().items()})
        require_bound(self.title, to.folder)

    def instruction(self, model: TargetModel) -> str:
        """Name the call that loads the model."""
        if model.use.kind == SPARSE:
            return 'load it with SparseTextEmbedding("prithivida/Splade_PP_en_v1", specific_model_path=FOLDER)'
        if model.use.kind == INFERENCE_FREE:
            return (
                'load it with SparseTextEmbedding("opensearch-project/opensearch-neural-sparse-encoding-doc-v3-gte", '
                "specific_model_path=FOLDER), and encode queries with query_embed"
            )
        if model.use.kind == TOKENS:
            return (
                f'load it with LateInteractionTextEmbedding("{_COLBERT}", specific_model_path=FOLDER); '
                f"query_embed does not cut queries of more than {_EXPANSION.length} tokens"
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


def other_than_colbert(source: Source, tokenizer: Any) -> Iterator[str]:
    """Yield how its settings differ from fastembed's hard-coded ones."""
    modules = source.sentence_modules
    prompts, vocabulary = as_object(modules.encoder.get("prompts")), tokenizer.get_vocab()
    for role, marker in _MARKERS.items():
        prompt = str(prompts.get(role) or "")
        is_token = prompt in modules.prefixes or tokenizer.tokenize(prompt) == [prompt.strip()]
        if not is_token or vocabulary.get(prompt.strip()) != marker:
            yield f"{prompt!r} before each {role}, not token {marker}"
    expansion = QueryExpansion.of(modules, source)
    if expansion is None or replace(expansion, token=None) != _EXPANSION or tokenizer.mask_token != _MASK:
        yield f"the query expansion {expansion}, not {_EXPANSION.length} tokens with {_MASK}, unseen"
    elif expansion.token not in (None, _MASK):
        yield f"queries expanded by {expansion.token!r}, not {_MASK}"
    mask = read_mask(modules)
    if mask is None or {*mask.skipped} != {*string.punctuation} or mask.tasks != ("document",) or mask.kept_ids:
        yield "another skip list than punctuation in documents"
    if modules.kinds[-1] != "Normalize":
        yield "vectors of tokens that are not scaled to length 1"


TARGET = Fastembed()
