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
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from onnxtool.checkpoint.folder import TOKENIZER_NAME
from onnxtool.checkpoint.static_embeddings import IDF_NAME
from onnxtool.errors import TargetError
from onnxtool.export.modalities.modality import BATCH
from onnxtool.export.sidecar_files import query_weights, read_object, write_json
from onnxtool.export.target_specification import Arrays, TargetSpecification, truncation_to
from onnxtool.export.targets import DENSE, INFERENCE_FREE, SCORES, SPARSE
from onnxtool.graph.builder import Builder
from onnxtool.model_file import ModelFile
from onnxtool.reports import Json
from onnxtool.runtime.running import Session

_VECTOR = "sentence_embedding"
_FUNCTIONS = {
    DENSE: "TEXT_EMBEDDING",
    SPARSE: "SPARSE_ENCODING",
    INFERENCE_FREE: "SPARSE_ENCODING",
    SCORES: "TEXT_SIMILARITY",
}
CONFIG = "ml-commons_model_config.json"  # opensearch-py-ml's name for it
_QUERY_CONFIG = "ml-commons_tokenizer_config.json"


class OpenSearchSpecification(TargetSpecification):
    """An archive with graph and tokenizer, and the request that registers it."""

    def convert(self, graph: ir.Model) -> dict[str, ir.Model]:
        """Convert a vector, float [B, W], to a first token's state, [B, 1, W], as expected with `pooling_mode` cls."""
        if self.usage.kind == DENSE:
            (vector,) = graph.graph.outputs
            width, vector.name = vector.shape[-1] if vector.shape is not None else None, "vector"
            build = Builder(graph.graph, ir.DataType.FLOAT)
            state = build.op("Unsqueeze", vector, build.integers(1))
            state.name, state.type, state.shape = _VECTOR, vector.type, ir.Shape([BATCH, 1, width])
            graph.graph.outputs[:] = [state]
        return {}

    def run(self, session: Session, feeds: Arrays) -> Arrays:
        """Run the graph, and convert a vector back to [B, W]."""
        return {name: array[:, 0] if name == _VECTOR else array for name, array in session.run(feeds).items()}

    def files(self, folder: Path, longest: int | None) -> None:
        """State the maximum text length in tokenizer.json, which DJL follows up to its own limit.

        Raises:
            TargetError: two query tokens with different weights are the same text.
        """
        super().files(folder, longest)
        path, limits = folder / TOKENIZER_NAME, (longest, self.target.most_tokens)
        write_json(path, {**read_object(path), "truncation": truncation_to(min(filter(None, limits)))})
        if self.usage.kind == INFERENCE_FREE:
            write_json(folder / IDF_NAME, weights_by_text(query_weights(folder), self.tokenizer))

    def pack(self, folder: Path, graph: Path) -> None:
        """Write the archive and its registration; for an inference-free encoder, also those for its queries."""
        file, name, kind = ModelFile.open(graph), self.source.name, self.usage.kind
        names = (graph.name, *file.external_locations)
        archive = _archive(
            folder / f"{name}.zip", [*(graph.parent / name for name in names), folder / "tokenizer.json"]
        )
        settings: dict[str, Json] = {}
        if kind in (DENSE, SCORES):
            width = file.structure.outputs[0].shape[-1]
            takes_types = any("type" in info.name for info in file.structure.inputs)
            settings = {
                # It decides only one thing: whether token types are fed.
                "model_type": "bert" if takes_types else "roberta",
                "embedding_dimension": width if isinstance(width, int) else 1,
                "framework_type": "sentence_transformers" if kind == DENSE else "huggingface_transformers",
            }
        if kind == DENSE:
            settings |= {"pooling_mode": "CLS", "normalize_result": False}  # the graph has already done both
        description = f"{name}, exported by onnxtool" + (
            "" if self.pruning is None else f", its terms {self.pruning.name}"
        )
        write_json(folder / CONFIG, _request(name, description, _FUNCTIONS[kind], archive, settings))
        if kind == INFERENCE_FREE:
            queries = _archive(folder / f"{name}-tokenizer.zip", [folder / "tokenizer.json", folder / IDF_NAME])
            description = f"weights of the tokens of queries for {name}"
            write_json(
                folder / _QUERY_CONFIG, _request(f"{name}-tokenizer", description, "SPARSE_TOKENIZE", queries, {})
            )


def _archive(path: Path, files: list[Path]) -> Path:
    """Write files to an archive that is byte-for-byte reproducible from the same files."""
    with zipfile.ZipFile(path, "w") as archive:
        for file in files:
            entry = zipfile.ZipInfo(file.name)  # dated 1980, not now
            with file.open("rb") as source, archive.open(entry, "w", force_zip64=True) as target:
                while block := source.read(1 << 22):
                    target.write(block)
    return path


def _request(
    name: str, description: str, function: str, archive: Path, settings: Mapping[str, Json]
) -> dict[str, Json]:
    with archive.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {
        "name": name,
        "version": "1.0.0",
        "description": description,
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
    text_weights: dict[str, float] = {}
    for token_id, weight in enumerate(weights.tolist()):
        text = tokenizer.backend_tokenizer.decode([token_id], skip_special_tokens=True)
        if text and text_weights.setdefault(text, weight) != weight:
            raise TargetError(
                f"OpenSearch weighs tokens of queries by their text, and two that are {text!r} weigh "
                f"{text_weights[text]} and {weight}",
                "look queries up with `onnxtool infer --prompt query`, and pass --target plain",
            )
    return text_weights


SPECIFICATION = OpenSearchSpecification
