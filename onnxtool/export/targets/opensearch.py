"""OpenSearch: ml-commons runs a model from an archive, with onnxruntime in the Deep Java Library.

From the sources of ml-commons 3.6: ONNXSentenceTransformerTextEmbeddingTranslator, SparseEncodingTranslator,
TextSimilarityTranslator, SparseTokenizerModel; and of DJL: OrtSymbolBlock, HuggingFaceTokenizer.

Shape letters: B batch, W vector width.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onnxtool.errors import TargetError
from onnxtool.export.heads.head import Head
from onnxtool.export.modalities.modality import BATCH
from onnxtool.export.sidecar_files import query_weights
from onnxtool.export.source import Source
from onnxtool.export.target import (
    DENSE,
    INFERENCE_FREE,
    SCORE_LOGITS,
    SCORES,
    SPARSE,
    Delivery,
    Target,
    TargetModel,
    Use,
    read_object,
    write_json,
)
from onnxtool.graph.builder import Builder
from onnxtool.model_file import ModelFile
from onnxtool.reports import Json, TensorInfo

if TYPE_CHECKING:
    import onnx_ir as ir
    from numpy.typing import NDArray

_VECTOR = TensorInfo("sentence_embedding", "float32", (BATCH, 1, None))
_WEIGHTS = TensorInfo("sparse", "float32", (BATCH, None))
# Both translators feed ids and mask, and check the number of graph inputs before their names. The vector translator
# feeds token types for a `model_type` of bert or albert; the pair translator always did, before ml-commons#4946.
_IDS = ("input_ids", "attention_mask")
_TYPES = "token_type_ids"
_MOST_TOKENS = 512  # DJL's limit; ml-commons has none of its own
_FUNCTIONS = {
    DENSE: "TEXT_EMBEDDING",
    SPARSE: "SPARSE_ENCODING",
    INFERENCE_FREE: "SPARSE_ENCODING",
    SCORES: "TEXT_SIMILARITY",
}
CONFIG = "ml-commons_model_config.json"  # opensearch-py-ml's name for it
_QUERY_CONFIG = "ml-commons_tokenizer_config.json"
_IDF = "idf.json"


class OpenSearch(Target):
    """Reads an archive with graph and tokenizer, and the request that registers it."""

    name = "opensearch"
    title = "OpenSearch"
    uses = (
        Use(DENSE, (_VECTOR,), head="embedding", declares=_IDS),
        *(
            Use(kind, (_WEIGHTS,), head="splade", declares=_IDS, unfed=(_TYPES,), prefix="input1.")
            for kind in (SPARSE, INFERENCE_FREE)
        ),
        Use(SCORES, (SCORE_LOGITS,), declares=(*_IDS, _TYPES)),
    )
    graph = "{name}.onnx"
    files = ("tokenizer.json",)
    max_ir = 10
    max_opset = 21

    def check_checkpoint(self, use: Use, source: Source, tokenizer: Any) -> None:
        """Refuse a vector encoder that does not say how it pools."""
        if use.kind == DENSE and source.sentence_modules.find("Pooling") is None:
            raise TargetError(
                f"{source.model_name} does not say how it pools, and OpenSearch gets vectors from the graph",
                "save the model with sentence-transformers, whose modules.json says it",
            )

    def adapt_outputs(self, graph: ir.Model, head: Head | None) -> None:
        """Convert a vector, float [B, W], to a first token's state, [B, 1, W], as expected with `pooling_mode` cls."""
        if head is None or head.output != _VECTOR.name:
            return
        import onnx_ir as ir

        vector = next(output for output in graph.graph.outputs if output.name == head.output)
        width, vector.name = vector.shape[-1] if vector.shape is not None else None, "vector"
        build = Builder(graph.graph, ir.DataType.FLOAT)
        state = build.op("Unsqueeze", vector, build.integers(1))
        state.name, state.type, state.shape = _VECTOR.name, vector.type, ir.Shape([BATCH, 1, width])
        graph.graph.outputs[:] = [state]

    def restore(self, outputs: Mapping[str, NDArray[Any]], model: TargetModel, batch: int) -> dict[str, NDArray[Any]]:
        """Convert a vector back to [B, W]."""
        return {name: array[:, 0] if name == _VECTOR.name else array for name, array in outputs.items()}

    def write_files(self, to: Delivery) -> None:
        """State the maximum text length in tokenizer.json, which DJL follows up to its own limit.

        Raises:
            TargetError: two query tokens with different weights are the same text.
        """
        path = to.folder / "tokenizer.json"
        most = min(to.max_length or _MOST_TOKENS, _MOST_TOKENS)
        cut: Json = {"direction": "Right", "max_length": most, "strategy": "LongestFirst", "stride": 0}
        write_json(path, {**read_object(path), "truncation": cut})
        if to.model.use.kind == INFERENCE_FREE:
            write_json(to.folder / _IDF, weights_by_text(query_weights(to.folder), to.tokenizer))

    def pack(self, model: TargetModel, folder: Path, graph: Path) -> None:
        """Write the archive and its registration; for an inference-free encoder, also those for its queries."""
        file = ModelFile.open(graph)
        kind = model.use.kind
        names = (graph.name, *file.external_locations)
        archive = _archive(
            folder / f"{model.name}.zip", [*(graph.parent / name for name in names), folder / "tokenizer.json"]
        )
        settings: dict[str, Json] = {}
        if kind in (DENSE, SCORES):
            width = file.structure.outputs[0].shape[-1]
            takes_types = any(info.name == _TYPES for info in file.structure.inputs)
            settings = {
                # It decides only one thing: whether token types are fed.
                "model_type": "bert" if takes_types else "roberta",
                "embedding_dimension": width if isinstance(width, int) else 1,
                "framework_type": "sentence_transformers" if kind == DENSE else "huggingface_transformers",
            }
        if kind == DENSE:
            settings |= {"pooling_mode": "CLS", "normalize_result": False}  # the graph has already done both
        what = f"{model.name}, exported by onnxtool"
        write_json(folder / CONFIG, _request(model.name, what, _FUNCTIONS[kind], archive, settings))
        if kind == INFERENCE_FREE:
            queries = _archive(folder / f"{model.name}-tokenizer.zip", [folder / "tokenizer.json", folder / _IDF])
            what = f"weights of the tokens of queries for {model.name}"
            write_json(
                folder / _QUERY_CONFIG, _request(f"{model.name}-tokenizer", what, "SPARSE_TOKENIZE", queries, {})
            )

    def instruction(self, model: TargetModel) -> str:
        """Say how to register it, and where results differ."""
        how = f"register {model.name}.zip by POST /_plugins/_ml/models/_register with {CONFIG} and a `url`"
        notes = [f"{how}, or by register_model() of opensearch-py-ml"]
        if model.use.kind == INFERENCE_FREE:
            notes.append(f"register {model.name}-tokenizer.zip with {_QUERY_CONFIG} for queries")
        if model.max_tokens is None or model.max_tokens > _MOST_TOKENS:
            notes.append(f"it cuts texts to {_MOST_TOKENS} tokens")
        if model.use.kind == SCORES:
            notes.append("similarities are the model's logits, without an activation")
        return "; ".join(notes)


def _archive(path: Path, files: list[Path]) -> Path:
    """Write files to an archive that is byte-for-byte reproducible from the same files."""
    with zipfile.ZipFile(path, "w") as archive:
        for file in files:
            entry = zipfile.ZipInfo(file.name)  # dated 1980, not now
            with file.open("rb") as source, archive.open(entry, "w", force_zip64=True) as target:
                while block := source.read(1 << 22):
                    target.write(block)
    return path


def _request(name: str, what: str, function: str, archive: Path, settings: Mapping[str, Json]) -> dict[str, Json]:
    with archive.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {
        "name": name,
        "version": "1.0.0",
        "description": what,
        "model_format": "ONNX",
        "function_name": function,
        "model_task_type": function,
        "model_content_size_in_bytes": archive.stat().st_size,
        "model_content_hash_value": digest,
        **({"model_config": dict(settings)} if settings else {}),
    }


def weights_by_text(weights: NDArray[np.float32], tokenizer: Any) -> dict[str, float]:
    """Return the weight of each token by its text, which is how ml-commons looks it up; 1 for tokens that it lacks.

    Raises:
        TargetError: two tokens with different weights are the same text.
    """
    found: dict[str, float] = {}
    for token_id, weight in enumerate(weights.tolist()):
        text = tokenizer.backend_tokenizer.decode([token_id], skip_special_tokens=True)
        if text and found.setdefault(text, weight) != weight:
            raise TargetError(
                f"OpenSearch weighs tokens of queries by their text, and two that are {text!r} weigh {found[text]} and "
                f"{weight}",
                "look queries up with `onnxtool infer --prompt query`, and pass --target plain",
            )
    return found


TARGET = OpenSearch()
