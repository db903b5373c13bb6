"""Describe an ONNX file, without reading its weights, or the difference between two."""

from __future__ import annotations

from typing import Annotated

from onnxtool.model_file import ModelFile
from onnxtool.options import NOTHING, Many, Option, Options, StrPath, checked
from onnxtool.summary import summarize_file
from onnxtool.summary import summarize_model as summarize_model
from onnxtool.summary.difference import compare_stats as compare_stats
from onnxtool.summary.difference import weights_of
from onnxtool.summary.figures import Difference


class Settings(Options):
    """The gates to check.

    Attributes:
        fail_if: gates. Relative gates from a configuration file are only checked if there is a base.
    """

    fail_if: Annotated[
        Many[str],
        Option(
            "Exit with 1 if this holds: a figure of the JSON report, one of > >= < <= == !=, and a number; with a "
            "sign, and optionally %, the number is relative to BASE. E.g. 'num_nodes>500', 'ops.MatMul!=98', "
            "'size_bytes>+5%', 'count(delta.inputs.removed)>0'. Texts are compared with == and !=: "
            "'license!=apache-2.0'. May be given several times.",
            metavar="EXPR",
        ),
    ] = NOTHING
    allowed_licenses: Annotated[
        Many[str],
        Option(
            "Exit with 1 unless the license of MODEL is one of these: an SPDX id, or the name of another license. An "
            "unknown license never matches. May be given several times.",
            metavar="ID",
        ),
    ] = NOTHING
    weights: Annotated[
        bool, Option("Compare the weights with BASE by their data, not only dtype and shape; reads both files.")
    ] = True


@checked
def compare_models(model: StrPath, base: StrPath, *, weights: bool = True) -> Difference:
    """Compare the ONNX file at `model` with the one at `base`.

    Args:
        model: the reviewed file.
        base: the file to compare it with.
        weights: whether to compare the data of the weights, by hash; each file is then read completely.

    Raises:
        ModelFileError: a file or its external data is missing, malformed, or outside the folder of the file.
    """
    files = ModelFile.open(model), ModelFile.open(base)
    after, before = map(summarize_file, files)
    return compare_stats(after, before, *(weights_of(file, hashed=weights) for file in files))
