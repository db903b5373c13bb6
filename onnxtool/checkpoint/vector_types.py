"""Storage types of vectors, and rules that make them smaller: names and options, for --help without numpy."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated

from onnxtool.errors import OptionError
from onnxtool.options import Option, OptionalPath, StrPath

# sentence-transformers' `precision` values, and float16.
VECTOR_TYPES = ("float32", "float16", "int8", "uint8", "binary", "ubinary")
CODES = ("int8", "uint8")  # 256 steps from the minimum to the maximum
BITS = ("binary", "ubinary")

POOL_FACTOR = "pool_factor"
_NUMBER = re.compile(r"([0-9]{1,9}(\.[0-9]{1,17})?|\.[0-9]{1,17})(e-[0-9]{1,2})?", re.ASCII)
# What each rule takes, and in words.
_RULES: dict[str, tuple[Callable[[float], bool], str]] = {
    "top_k": (lambda number: number >= 1 and number.is_integer(), "a whole number from 1"),
    "max_active_dims": (lambda number: number >= 1 and number.is_integer(), "a whole number from 1"),
    "max_ratio": (lambda number: number < 1, "a number from 0, below 1"),
    "alpha_mass": (lambda number: number < 1, "a number from 0, below 1"),
    "abs_value": (lambda number: True, "a number from 0"),
    POOL_FACTOR: (lambda number: number >= 1, "a number from 1"),
}


def parse_pruning(text: str) -> str:
    """Return a rule that makes vectors smaller, `RULE:NUMBER`, as it is recorded.

    Raises:
        OptionError: there is no such rule, or it takes no such number.
    """
    rule, _, number = text.partition(":")
    if rule not in _RULES:
        raise OptionError(f"{text!r} is no rule of pruning, which are {', '.join(_RULES)}", "write e.g. top_k:64")
    is_allowed, words = _RULES[rule]
    if not _NUMBER.fullmatch(number) or not is_allowed(float(number)):
        raise OptionError(f"{rule} takes {words}, and {number!r} was passed", f"write {rule}:NUMBER")
    return f"{rule}:{int(float(number)) if float(number).is_integer() else float(number)}"


_WEIGHT_RULES = (
    "keep the K heaviest (top_k:K; max_active_dims:K also takes negative ones), those of at least R times the "
    "heaviest (max_ratio:R), the heaviest that weigh at most A of all (alpha_mass:A), or those of at least W "
    "(abs_value:W)"
)
Prune = Annotated[
    str | None,
    Option(
        f"Terms of sparse vectors: {_WEIGHT_RULES}. In late interaction, pool_factor:F merges similar token vectors of "
        "a document to one F-th.",
        metavar="RULE:NUMBER",
        default="all",
        parse=parse_pruning,
    ),
]
PruneInGraph = Annotated[
    str | None,
    Option(
        "Terms that the graph of a sparse encoder gives: the K heaviest (top_k:K), those of at least R times the "
        "heaviest (max_ratio:R), or those of at least W (abs_value:W).",
        metavar="RULE:NUMBER",
        default="all",
        parse=parse_pruning,
    ),
]
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
        "The range of each dimension, for int8 and uint8: a .npy with minima and maxima, [2, dimensions], or the "
        "manifest of a corpus with such vectors."
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
