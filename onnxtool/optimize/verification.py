"""Prove an optimized file against the file that went in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from onnxtool.metadata import MAX_LENGTH_KEY
from onnxtool.model_file import ModelFile
from onnxtool.reports import Verification
from onnxtool.runtime.comparison import Case, Tolerance, ask, require_passed, verify
from onnxtool.runtime.feeds import index_bounds, random_feeds, verification_shapes
from onnxtool.runtime.session import open_session

_LONGEST = 64  # for a model that does not say how long its texts may be


def verify_optimized(path: Path, source: ModelFile, tolerance: Tolerance, max_error: float | None) -> Verification:
    """Compare the file at `path` with `source`, both on the CPU, on random inputs of several shapes and masks.

    Args:
        path: the optimized file.
        source: what it was made from.
        tolerance: what may differ.
        max_error: the most that 1 - cosine of any output may be, in place of the tolerance's.

    Raises:
        VerificationError: an output differs by more.
    """
    if max_error is not None:
        tolerance = replace(tolerance, cosine=1.0 - max_error)
    # One session at a time: each holds the weights twice while it loads.
    answers = ask(open_session(source.path, provider="cpu").run, _cases(source), name=source.path.name)
    verification = verify(open_session(path, provider="cpu").run, answers, tolerance)
    require_passed(verification, "no file was written; try another --precision, or report the passes that ran")
    return verification


def _cases(source: ModelFile) -> list[Case]:
    bounds = index_bounds(source)
    longest = source.metadata.get(MAX_LENGTH_KEY, "")
    cases = []
    for seed, shape in enumerate(verification_shapes(int(longest) if longest.isdecimal() else _LONGEST)):
        feeds = random_feeds(source.structure.inputs, shape, bounds, seed=seed)
        masked = any("mask" in name for name in feeds)
        cases.append(Case(shape.description, feeds, shape.mask if masked else None))
    return cases
