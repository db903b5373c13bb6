"""Describe an ONNX file, without reading its weights, or the difference between two."""

from __future__ import annotations

from onnxtool.model_file import ModelFile
from onnxtool.options import StrPath, checked
from onnxtool.stats.settings import Settings as Settings
from onnxtool.stats.settings import Shape as Shape
from onnxtool.summary import summarize_file
from onnxtool.summary import summarize_model as summarize_model
from onnxtool.summary.difference import compare_stats as compare_stats
from onnxtool.summary.difference import weights_of
from onnxtool.summary.figures import Difference, Stats


def describe_model(path: StrPath, shape: Shape | None = None) -> Stats:
    """Summarize the ONNX file at `path`, with the cost of a run on inputs of `shape`.

    Raises:
        ModelFileError: the file or its external data is missing, malformed, or outside the folder of the file.
        InputError: inputs of this shape do not fit the model.
    """
    return _describe(ModelFile.open(path), shape)


@checked
def compare_models(model: StrPath, base: StrPath, *, weights: bool = True, shape: Shape | None = None) -> Difference:
    """Compare the ONNX file at `model` with the one at `base`.

    Args:
        model: the reviewed file.
        base: the file to compare it with.
        weights: whether to compare the data of the weights, by hash; each file is then read completely.
        shape: the input shape for comparing the cost of a run.

    Raises:
        ModelFileError: a file or its external data is missing, malformed, or outside the folder of the file.
        InputError: inputs of this shape do not fit a model.
    """
    files = ModelFile.open(model), ModelFile.open(base)
    after, before = (_describe(file, shape) for file in files)
    return compare_stats(after, before, *(weights_of(file, hashed=weights) for file in files))


def _describe(file: ModelFile, shape: Shape | None) -> Stats:
    stats = summarize_file(file)
    if shape is None:
        return stats
    from onnxtool.stats.cost import estimate_cost

    return stats._replace(cost=estimate_cost(file.path, shape))
