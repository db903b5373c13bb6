"""Prove an optimized file against the file that went in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from onnxtool.metadata import MAX_LENGTH_KEY
from onnxtool.model_file import ModelFile
from onnxtool.reports import Verification
from onnxtool.runtime.comparison import Case, Tolerance, ask, require_passed, verify
from onnxtool.runtime.feeds import index_bounds, is_mask, random_feeds, verification_shapes
from onnxtool.runtime.providers import cuda_problem
from onnxtool.runtime.session import open_session

_LONGEST = 64  # for a model that does not say how long its texts may be


def verify_optimized(
    path: Path, source: ModelFile, provider: str, tolerance: Tolerance, max_error: float | None
) -> Verification:
    """Compare the file at `path` with `source` on random inputs of several shapes and masks.

    Args:
        path: the optimized file.
        source: what it was made from.
        provider: where the file will run; where that cannot run here, both run on the CPU, and the result says so.
        tolerance: what may differ.
        max_error: the most that 1 - cosine of any output may be, in place of the tolerance's.

    Raises:
        VerificationError: an output differs by more.
    """
    if max_error is not None:
        tolerance = replace(tolerance, cosine=1.0 - max_error)
    # One session at a time: each holds the weights twice while it loads.
    here = provider if provider == "cpu" or not cuda_problem() else "cpu"
    answers = ask(open_session(source.path, provider=here).run, _cases(source), name=source.path.name)
    verification = replace(verify(open_session(path, provider=here).run, answers, tolerance), provider=here)
    require_passed(verification, "no file was written; try another --precision, or report the passes that ran")
    return verification


def _cases(source: ModelFile) -> list[Case]:
    bounds = index_bounds(source)
    longest = source.metadata_number(MAX_LENGTH_KEY) or _LONGEST
    cases = []
    for seed, shape in enumerate(verification_shapes(longest)):
        feeds = random_feeds(source.structure.inputs, shape, bounds, seed=seed)
        masked = any(is_mask(info) for info in source.structure.inputs)
        cases.append(Case(shape.description, feeds, shape.mask if masked else None))
    return cases
