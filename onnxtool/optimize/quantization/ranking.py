"""Compare a quantized model's nearest neighbours or scores with the original's, on texts not calibrated on.

Shape letters: T texts, D width of a vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxtool.checkpoint.tasks import RANKING
from onnxtool.errors import InputError
from onnxtool.model_file import ModelFile, ModelPath
from onnxtool.model_file.metadata import TASK_KEY
from onnxtool.optimize.quantization.activations import Feeds
from onnxtool.optimize.quantization.calibration import text_feeds_of
from onnxtool.optimize.quantization.error import row_errors
from onnxtool.optimize.report import Ranking
from onnxtool.runtime.comparison import all_same
from onnxtool.runtime.difference import Spread, measure
from onnxtool.runtime.session import open_session

_OF_VECTORS = ("sentence-similarity", "sparse-encoding")  # tasks with one vector per text
_OF_SCORES = ("text-classification", RANKING)  # tasks whose output may be one score per text
_NUM_TEXTS = 200
_NEIGHBOURS = 10
_LENGTHS = range(40, 600)
# Python's own documentation: texts that every machine has.
_TEXTS = "pydoc_data"


def measure_ranking(reference: ModelPath, result: ModelPath, source: ModelFile) -> Ranking | None:
    """Compare the neighbours of texts, by the dot products of their vectors, or their scores, in two files.

    Args:
        reference: the file in float32.
        result: the quantized file.
        source: the file with the tokenizer next to it.

    Returns:
        ranking: None for a model without text vectors or scores, or without a tokenizer.
    """
    output = _output_of(source)
    if output is None or find_spec(_TEXTS) is None:
        return None
    try:
        feeds = text_feeds_of(source, held_out_texts(_NUM_TEXTS))
    except InputError:
        return None
    wanted, got = (_encode(path, output, feeds) for path in (reference, result))
    return (compare_scores if wanted.shape[1] == 1 else compare_vectors)(wanted, got, output)


def compare_scores(expected: NDArray[np.float32], actual: NDArray[np.float32], output: str) -> Ranking:
    """Compare the order of texts by two sets of scores, both float32 [T, 1]."""
    spread = Spread.of([expected])
    ranks = spread is not None and not all_same(expected)
    best = [set(np.argsort(-scores[:, 0], kind="stable")[:_NEIGHBOURS].tolist()) for scores in (expected, actual)]
    return Ranking(
        num_texts=len(expected),
        output=output,
        error=1.0 - measure(actual, expected, spread=spread).cosine,
        overlap=len(best[0] & best[1]) / len(best[0]) if ranks else None,
        kendall_tau=_tau(expected[:, 0], actual[:, 0]) if ranks else None,
        is_scores=True,
    )


def compare_vectors(expected: NDArray[np.float32], actual: NDArray[np.float32], output: str) -> Ranking:
    """Compare the neighbours of texts by two sets of vectors, both float32 [T, D]."""
    return Ranking(
        num_texts=len(expected),
        output=output,
        error=float(row_errors(actual, expected, None).max(initial=0.0)),
        overlap=None if all_same(expected) else _overlap(expected, actual),
        kendall_tau=None if all_same(expected) else _kendall_tau(expected, actual),
    )


def held_out_texts(count: int) -> list[str]:
    """Return `count` paragraphs of Python's documentation, evenly picked."""
    from pydoc_data.topics import topics

    paragraphs = (" ".join(part.split()) for topic in sorted(topics) for part in topics[topic].split("\n\n"))
    texts = [text for text in dict.fromkeys(paragraphs) if len(text) in _LENGTHS]
    return [texts[place * len(texts) // count] for place in range(min(count, len(texts)))]


def _output_of(source: ModelFile) -> str | None:
    """Return the name of the output with a vector or a score for each text; None if there is none."""
    task = source.metadata.get(TASK_KEY)
    for output in source.structure.outputs:
        if output.dtype.startswith("float") and len(output.shape or ()) == 2 and output.shape is not None:
            return output.name if task in (_OF_SCORES if output.shape[1] == 1 else _OF_VECTORS) else None
    return None


def _encode(path: ModelPath, output: str, feeds: Sequence[Feeds]) -> NDArray[np.float32]:
    """Return the vectors of all texts, float32 [T, D]."""
    session = open_session(path, provider="cpu", frugal=True)
    return np.concatenate([session.run(feed)[output] for feed in feeds]).astype(np.float32)


def _similarities(vectors: NDArray[np.float32]) -> NDArray[Any]:
    """Return the similarity of each text to all others, float32 [T, T - 1]."""
    products = vectors @ vectors.T
    similarities: NDArray[Any] = products[~np.eye(len(products), dtype=bool)].reshape(len(products), -1)
    return similarities


def _overlap(expected: NDArray[np.float32], actual: NDArray[np.float32]) -> float:
    """Return the average fraction of each text's nearest neighbours that both share."""
    nearest = [
        np.argsort(-_similarities(vectors), axis=1, kind="stable")[:, :_NEIGHBOURS] for vectors in (expected, actual)
    ]
    return float(np.mean([len(np.intersect1d(*pair)) / len(pair[0]) for pair in zip(*nearest, strict=True)]))


def _kendall_tau(expected: NDArray[np.float32], actual: NDArray[np.float32]) -> float:
    """Return Kendall's tau-a between the two orders of all other texts, averaged over the texts."""
    pairs = zip(_similarities(expected), _similarities(actual), strict=True)
    return float(np.mean([_tau(row, actual_row) for row, actual_row in pairs]))


def _tau(first: NDArray[Any], second: NDArray[Any]) -> float:
    orders = [np.sign(row[:, None] - row[None, :]) for row in (first, second)]
    return float((orders[0] * orders[1]).sum()) / (len(first) * (len(first) - 1))
