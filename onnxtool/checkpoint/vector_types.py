"""Storage types of vectors: names and options, importable for --help without numpy."""

from __future__ import annotations

from typing import Annotated

from onnxtool.errors import OptionError
from onnxtool.options import Option, OptionalPath, StrPath

# sentence-transformers' `precision` values, and float16.
VECTOR_TYPES = ("float32", "float16", "int8", "uint8", "binary", "ubinary")
CODES = ("int8", "uint8")  # 256 steps from the minimum to the maximum
BITS = ("binary", "ubinary")

Dimensions = Annotated[
    int | None,
    Option(
        "Keep only this many leading dimensions of an embedding, rescaled to length 1 if the checkpoint normalizes.",
        minimum=1,
        default="all",
    ),
]
VectorsAs = Annotated[
    str | None,
    Option(
        "Storage type of embeddings: int8 and uint8 divide the range of each dimension into 256 steps "
        "(--ranges or --calibration); binary and ubinary keep only the signs, eight per byte.",
        choices=VECTOR_TYPES,
        default="the model's own type",
    ),
]
RangesFile = Annotated[
    OptionalPath,
    Option(
        "The range of each dimension, for int8 and uint8: a .npy with minima and maxima, [2, dimensions], the "
        "manifest of a corpus with such vectors, or an ONNX file whose graph quantizes them."
    ),
]
Calibrated = Annotated[
    OptionalPath,
    Option("Texts to measure the ranges on, for int8 and uint8: .txt or .jsonl, a few hundred similar to the corpus."),
]


def check_ranges_options(vectors_as: str | None, ranges: StrPath | None, calibration: StrPath | None) -> None:
    """Refuse unused ranges, codes without ranges, and two sources of ranges.

    Raises:
        OptionError: one of these applies.
    """
    if vectors_as not in CODES and (ranges is not None or calibration is not None):
        name = "--calibration" if ranges is None else "--ranges"
        raise OptionError(
            f"{name} is for int8 and uint8 vectors, and {vectors_as or 'none'} were asked for",
            "pass --vectors_as int8 or uint8, or leave it out",
        )
    if ranges is not None and calibration is not None:
        raise OptionError(
            "ranges are read from --ranges or measured on --calibration, but both were passed", "leave one of them out"
        )
    if vectors_as in CODES and ranges is None and calibration is None:
        raise OptionError(
            f"{vectors_as} vectors need the range of each number, but none is known",
            "measure them on a few hundred texts like yours (--calibration texts.jsonl), or pass those of an earlier "
            "run (--ranges NAME.manifest.json, or a .npy)",
        )
