"""Filter out inputs that the file itself refuses."""

from __future__ import annotations

from collections.abc import Sequence

from onnxtool.errors import SessionError, first_line
from onnxtool.model_file import ModelFile
from onnxtool.runtime.comparison import Case, Runner, run_reference
from onnxtool.runtime.given_inputs import NO_INPUTS, GivenInputs
from onnxtool.runtime.input_cases import input_cases
from onnxtool.runtime.input_stamp import InputStamp
from onnxtool.runtime.session import open_session


def accepted_cases(model: ModelFile, *, longest: int | None = None, given: GivenInputs = NO_INPUTS) -> list[Case]:
    """Return the `input_cases` that the file itself runs on; cases of a stamp have already been run.

    Raises:
        InputError: as for `input_cases`.
        SessionError: it runs on none of them.
    """
    cases = input_cases(model, longest=longest, given=given)
    stamp = InputStamp.read(model)
    if stamp is not None and stamp.cases and given == NO_INPUTS:
        return cases
    session = open_session(model.path, provider="cpu", frugal=True)
    outputs = run_reference(session.run, cases, name=model.path.name, refusal=SessionError)
    require_accepted(model, outputs.cases, cases, session.run)
    return list(outputs.cases)


def require_accepted(model: ModelFile, accepted: Sequence[Case], cases: Sequence[Case], run: Runner) -> None:
    """Refuse a file that runs on none of `cases`.

    Raises:
        SessionError: it runs on none; with onnxruntime's message for the smallest.
    """
    if accepted:
        return
    try:
        run(min(cases, key=lambda case: sum(array.size for array in case.feeds.values())).feeds)
    except SessionError as error:
        tried = "; ".join(dict.fromkeys(case.description for case in cases))
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        raise SessionError(
            f"{model.path} itself runs on none of {len(cases)} inputs ({tried}): {first_line(cause)}",
            "pass inputs that it takes with --sample_inputs FILE.npz, or their shapes with --input_shape NAME:1,128",
        ) from error
