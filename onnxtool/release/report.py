"""Reports on making and checking a release."""

from __future__ import annotations

from dataclasses import dataclass

from onnxtool.release.facts import ReleasedModel
from onnxtool.reports import short_repr


@dataclass(frozen=True)
class StepReport:
    """The outcome of a step.

    Attributes:
        state: `ran`, `unchanged`, or in a dry run `to run`.
        reason: why it ran; otherwise empty.
    """

    name: str
    state: str
    reason: str
    seconds: float


@short_repr
@dataclass(frozen=True)
class ReleaseReport:
    """A release that was made; in a dry run, what would be done.

    Attributes:
        output: its folder; empty in a dry run.
        license: the checkpoint's license.
        models: the model files, with their measurements.
        signed: whether the files include a signature.
    """

    name: str
    output: str
    steps: tuple[StepReport, ...]
    license: str
    num_files: int
    size_bytes: int
    models: tuple[ReleasedModel, ...]
    signed: bool
    notes: tuple[str, ...] = ()


@short_repr
@dataclass(frozen=True)
class CheckReport:
    """The result of checking a release against its record.

    Attributes:
        problems: the problems found; empty if there are none.
        num_files: number of files compared with their digests.
        signature: `verified`, `none`, or `not verified` if no public key was given.
        verified: model files that were run again and compared, with the largest difference.
        alone: model files that were run but not compared, because their inputs or outputs have a consumer's format.
        uploaded: the URL of the commit that published it; empty if unpublished.
    """

    release: str
    problems: tuple[str, ...]
    num_files: int
    signature: str
    verified: dict[str, float]
    alone: tuple[str, ...] = ()
    uploaded: str = ""

    @property
    def passed(self) -> bool:
        """Whether there are no problems."""
        return not self.problems
