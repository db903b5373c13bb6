"""Try the precisions of a provider on this machine, and choose the fastest one within the error bound.

What costs time is the calibration. So each precision is timed first as a draft: every layer in it, rounded to the
nearest value. A calibrated file has the same layers or fewer and is not faster, so that one whose draft is slower than
a finished file is not made.
"""

from __future__ import annotations

import logging
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from onnxtool.checkpoint.limits import fixed_shape
from onnxtool.errors import OnnxtoolError, PassError
from onnxtool.model_file import ModelFile, Staging, save_model
from onnxtool.model_file.metadata import MAX_LENGTH_KEY, step_entry
from onnxtool.optimize.options import DYNAMIC, MIXED, STATIC, computing_in
from onnxtool.optimize.pipeline import Pass, run_passes
from onnxtool.optimize.quantization.activations import Feeds
from onnxtool.optimize.quantization.arithmetic import ActivationGrid, Adjustment
from onnxtool.optimize.quantization.conversion import Conversion, Converted, expected_seconds
from onnxtool.optimize.quantization.error import measure_errors
from onnxtool.optimize.quantization.float16 import to_float16
from onnxtool.optimize.quantization.int4 import quantize_int4
from onnxtool.optimize.quantization.int8 import quantize_int8
from onnxtool.optimize.quantization.written import count_written
from onnxtool.optimize.report import Candidate
from onnxtool.progress import tell
from onnxtool.reports import short_repr
from onnxtool.runtime.input_cases import FeedShape, sized_feeds
from onnxtool.runtime.providers import BF16, CPU, ExecutionProvider, has_bf16, resolve_provider
from onnxtool.runtime.running import Session
from onnxtool.runtime.session import open_alike, open_session, prove_elsewhere
from onnxtool.runtime.timing import summarize_latencies

CANDIDATES: dict[str, tuple[tuple[str, str], ...]] = {
    "cpu": (("fp32", ""), ("fp16", ""), ("int8", MIXED), ("int8", DYNAMIC), ("int8", STATIC), ("int4", "")),
    "cuda": (("fp32", ""), ("fp16", ""), ("int4", "")),
    "openvino": (("fp32", ""), ("bf16", ""), ("int8", MIXED)),
}
"""The candidates of each provider: precision, and quantization mode of activations. The first is the reference."""

_LOGGER = logging.getLogger(__name__)
_SHAPES = ((1, 16), (8, 128))
# Sessions are opened one after another, round by round, so that other load on the machine affects all of them alike and
# only one model is in memory at a time.
_ROUNDS = 3
_FEWEST_RUNS = 3
_SECONDS = 0.2  # for each shape, model and round
_DRAFT_MARGIN = 0.9  # of the time of a draft: what a calibrated file may be faster by, and one round may be wrong by


@dataclass
class _CandidateRun:
    """A candidate under way.

    Attributes:
        conversion: how it is made, and for which provider.
        path: its file; None if there is none.
        samples_ms: latencies by shape name.
        share: its time, or that of its draft, as a share of that of the first in the same rounds.
        reason: why it was ruled out.
        quality: the judge's measurements.
        not_judged: why the judge did not look at it.
    """

    conversion: Conversion
    precision: str
    activations: str
    converted: Converted | None = None
    path: Path | None = None
    size_bytes: int | None = None
    error: float | None = None
    samples_ms: dict[str, list[float]] = field(default_factory=dict)
    share: float = 0.0
    reason: str = ""
    quality: Mapping[str, float] = field(default_factory=dict)
    not_judged: str = ""

    @property
    def label(self) -> str:
        """Its name in progress messages."""
        return " ".join(filter(None, (self.provider, self.precision, self.activations)))

    @property
    def target(self) -> ExecutionProvider:
        """The provider that it runs on, and the precision there."""
        return computing_in(self.precision, self.conversion.options.target)

    @property
    def provider(self) -> str:
        """The provider; empty for a reference, which has no rival."""
        return "" if self.target.row.is_reference else self.target.place

    def open(self, *, frugal: bool = False) -> Session:
        """Load its file where it is to run; a provider that is no reference has already shown that it is right."""
        path = Path() if self.path is None else self.path
        if self.target.row.is_reference:
            return open_session(path, provider=str(self.target), frugal=frugal)
        return open_alike(path, provider=self.target, disabled=())

    @property
    def latency_ms(self) -> dict[str, float]:
        """The median of each shape."""
        return {name: summarize_latencies(samples).p50 for name, samples in self.samples_ms.items()}

    def give_up(self, error: OnnxtoolError) -> None:
        """Record why it was ruled out, without the name of a temporary file."""
        self.reason = error.message.replace(str(self.path), "the file")

    def report(self, *, is_chosen: bool) -> Candidate:
        """Return its row of the report."""
        return Candidate(
            provider=self.target.place,
            precision=self.precision,
            activations=self.activations,
            latency_ms=self.latency_ms,
            size_bytes=self.size_bytes,
            error=self.error,
            chosen=is_chosen,
            reason=self.reason,
            quality=self.quality,
            not_judged=self.not_judged,
        )


@short_repr
class Judgement(NamedTuple):
    """A judge's verdict on a candidate.

    Attributes:
        quality: means of measures by name.
        reason: why it may not be chosen; empty if it may.
    """

    quality: Mapping[str, float]
    reason: str = ""


Judge = Callable[[Path], Judgement]
"""Judges the file of a candidate."""


def choose(
    conversions: Sequence[Conversion], model: ir.Model, judge: Judge | None = None
) -> tuple[Converted, Conversion, tuple[Candidate, ...]]:
    """Return the fused `model` in the fastest precision within the error bound, its conversion, and all candidates.

    There is a conversion for each provider to try, that of the reference first.

    The fastest one has the smallest geometric mean of median latencies over all shapes. The judge looks at candidates
    from the fastest to the slowest, and only until one passes. Candidates that fail, exceed the error bound, are
    rejected by the judge, cannot win or are slower than the one that passed stay in the list with the reason.

    Raises:
        ProviderError: the provider cannot run on this machine.
        PassError: the model in float32 cannot be run, or every candidate is refused.
    """
    base = conversions[0]
    resolve_provider(base.options.target.place)
    with tempfile.TemporaryDirectory(dir=base.folder) as name:
        first, *rivals = candidates = [
            _CandidateRun(conversion, *names)
            for conversion in conversions
            for names in CANDIDATES[conversion.options.target.name]
        ]
        seconds = expected_seconds(model) * len(rivals)
        tell(f"choosing among {len(candidates)} precisions, in at most {seconds:.0f} s by the number of weights")
        _make(first, model, Path(name))
        first.error = 0.0
        feeds = timing_feeds(base.source, base.feeds)
        if not first.reason:
            _time_drafts(first, rivals, model, Path(name), feeds)
        if first.reason:  # all others are measured against it
            raise PassError(f"the model in float32 is not possible: {first.reason}", "pass another --precision")
        tried, waiting = [first], sorted(rivals, key=lambda candidate: candidate.share)
        while True:
            tried += _make_possible_winners(tried, waiting, model, Path(name), feeds)
            _time(tried, feeds)
            possible = [candidate for candidate in tried if not candidate.reason]
            possible.sort(key=lambda candidate: _geometric_mean(candidate.latency_ms.values()))
            if judge is not None:
                possible = _judge(possible, judge)
            if possible or not waiting:
                break
    chosen = next(iter(possible), None)
    if chosen is None or chosen.converted is None:
        raise PassError(f"no precision is possible here: fp32: {first.reason}", "pass the --precision that you want")
    for candidate in waiting:
        candidate.reason = (
            f"not made, because it cannot win: with every layer in {candidate.precision}, before its calibration, it "
            f"takes {candidate.share / chosen.share:.2f} times the time of {chosen.label}"
        )
    return (
        chosen.converted,
        chosen.conversion,
        tuple(candidate.report(is_chosen=candidate is chosen) for candidate in candidates),
    )


def _time_drafts(
    first: _CandidateRun,
    rivals: Sequence[_CandidateRun],
    model: ir.Model,
    folder: Path,
    feeds: Mapping[str, Feeds],
) -> None:
    """Set the share of the first to 1, and that of each candidate with a draft; the others keep 0, and are made."""
    try:
        first.share, base_ms = 1.0, _round_ms(first, feeds)
    except OnnxtoolError as error:
        first.give_up(error)
        return
    shares: dict[tuple[str, str], float] = {}
    for rival in rivals:
        if (step := _draft_pass(rival)) is None:
            continue
        if (key := _draft_key(rival)) not in shares:
            tell(f"timing a draft of {rival.label}")
            place, conversion = folder / f"draft {rival.label}", rival.conversion
            place.mkdir()
            try:
                drafted = run_passes(model.clone(), (step, *conversion.finishing), conversion.context, most_rounds=1)
                rival.path = save_model(drafted[0], Staging(place, place / "model.onnx", place))
                shares[key] = _round_ms(rival, feeds) / base_ms
            except OnnxtoolError as error:  # its reason is that of the conversion
                _LOGGER.info("no draft of %s: %s", rival.label, error.message)
                shares[key] = 0.0
            rival.path = None
            shutil.rmtree(place)
        rival.share = shares[key]


def _draft_key(candidate: _CandidateRun) -> tuple[str, str]:
    """Return what the draft is of: `mixed` is `static` in some layers, and slower in the others."""
    return candidate.precision, STATIC if candidate.activations == MIXED else candidate.activations


def _draft_pass(candidate: _CandidateRun) -> Pass | None:
    """Return the pass that rounds every layer to the nearest value; None for what is not converted on the CPU."""
    if candidate.target.name != CPU:
        return None
    if candidate.precision == "int8":
        grid = (
            None if candidate.activations == DYNAMIC else ActivationGrid.over(-1.0, 1.0)
        )  # any range takes the same time
        return quantize_int8(every=Adjustment(activations=grid))
    return {"fp16": to_float16(), "int4": quantize_int4()}.get(candidate.precision)


def _make_possible_winners(
    tried: Sequence[_CandidateRun],
    waiting: list[_CandidateRun],
    model: ir.Model,
    folder: Path,
    feeds: Mapping[str, Feeds],
) -> list[_CandidateRun]:
    """Make those of `waiting`, sorted by share, that may be faster than the fastest possible one, and return them."""
    first, new = tried[0], list[_CandidateRun]()
    while waiting:
        shares = [candidate.share for candidate in (*tried, *new) if not candidate.reason]
        if waiting[0].share * _DRAFT_MARGIN > min(shares, default=math.inf):
            break
        candidate = waiting.pop(0)
        new.append(candidate)
        _make(candidate, model, folder)
        _measure_error(candidate, first)
        if not candidate.reason:
            try:
                candidate.share = _round_ms(candidate, feeds) / _round_ms(first, feeds)
            except OnnxtoolError as error:
                candidate.give_up(error)
    return new


def _round_ms(candidate: _CandidateRun, feeds: Mapping[str, Feeds]) -> float:
    """Return the geometric mean of its fastest runs, of few: what decides only whether to make it has a margin."""
    session = candidate.open()
    return _geometric_mean(min(_latencies_ms(session, feed, fewest=2)) for feed in feeds.values())


def _make(candidate: _CandidateRun, model: ir.Model, folder: Path) -> None:
    """Convert a copy of `model` and write it; the weights of the copy stay on disk.

    The file says what it is for, so that a judge runs it there. A provider that is no reference has to prove itself.
    """
    place = folder / candidate.label.replace(":", "-")
    place.mkdir()
    tell(f"trying {candidate.label}")
    try:
        if candidate.precision == BF16 and not has_bf16(candidate.target):
            candidate.reason = "bfloat16 would only be emulated here"
            return
        if candidate.precision == BF16 and candidate.conversion.options.keep_float32:
            candidate.reason = "its arithmetic is that of the whole session, and --keep_float32 is set"
            return
        candidate.converted = candidate.conversion.convert(
            model.clone(), candidate.precision, candidate.activations or MIXED
        )
        candidate.path = save_model(candidate.converted.model, Staging(place, place / "model.onnx", place))
        if (planned := candidate.converted.quantization) is not None:
            candidate.converted = replace(candidate.converted, quantization=count_written(planned, candidate.path))
        file = ModelFile.open(candidate.path)
        candidate.size_bytes = file.size_bytes
        file.stamp(step_entry("optimize", None, provider=candidate.target.place, precision=candidate.precision))
        if not candidate.target.row.is_reference:
            candidate.reason = prove_elsewhere(file, candidate.target, is_trial=True).failure
    except OnnxtoolError as error:
        candidate.give_up(error)
    _LOGGER.info("%s: %s", candidate.label, candidate.reason or f"{candidate.size_bytes} bytes")


def _measure_error(candidate: _CandidateRun, first: _CandidateRun) -> None:
    """Compare its outputs with those of the first, in float32, unless its calibration did; rule it out above the bound.

    What a calibration measured on the CPU says nothing of a provider that is no reference.
    """
    quantization = None if candidate.converted is None else candidate.converted.quantization
    if quantization is not None and candidate.target.row.is_reference:
        candidate.error = quantization.error
    if candidate.error is not None or candidate.reason:
        return
    tell(f"measuring the error of {candidate.label}")
    feeds, bound = candidate.conversion.calibration.feeds, candidate.conversion.bound
    session = first.open(frugal=True)
    expected = [session.run(feed) for feed in feeds]
    try:
        session = candidate.open(frugal=True)
        candidate.error = float(measure_errors(session, feeds, expected).max(initial=0.0))
    except OnnxtoolError as error:
        candidate.give_up(error)
        return
    if candidate.error > bound:
        candidate.reason = f"its error is above {bound:g}"


def timing_feeds(source: ModelFile, other_feeds: Sequence[Feeds]) -> dict[str, Feeds]:
    """Return random inputs by shape name: a short text and a batch of long ones, within the limits.

    For a model without text inputs, they are the smallest and the largest of `other_feeds`.
    """
    inputs = source.structure.inputs
    if all(info.name != "input_ids" for info in inputs):
        by_size = sorted(other_feeds, key=lambda feeds: sum(array.size for array in feeds.values()))
        named = (("x".join(map(str, next(iter(feeds.values())).shape)), feeds) for feeds in (by_size[0], by_size[-1]))
        return dict(named)
    limit = source.metadata_number(MAX_LENGTH_KEY)
    fixed_batch, fixed_length = fixed_shape(source)
    feeds: dict[str, Feeds] = {}
    for batch_size, length in _SHAPES:
        batch_size, length = fixed_batch or batch_size, fixed_length or min(length, limit or length)
        feeds[f"{batch_size}x{length}"] = sized_feeds(source, FeedShape.full(batch_size, length))
    return feeds


def _judge(by_speed: Sequence[_CandidateRun], judge: Judge) -> list[_CandidateRun]:
    """Return the fastest candidate that the judge accepts; slower ones are not shown to it."""
    accepted: list[_CandidateRun] = []
    for candidate in by_speed:
        if accepted:
            candidate.not_judged = f"slower than {accepted[0].label}, which passed"
        elif candidate.path is not None:
            tell(f"judging {candidate.label}")
            candidate.quality, candidate.reason = judge(candidate.path)
            accepted += [] if candidate.reason else [candidate]
    return accepted


def _time(candidates: Sequence[_CandidateRun], feeds: Mapping[str, Feeds]) -> None:
    for number in range(1, _ROUNDS + 1):
        for candidate in candidates:
            if candidate.reason or candidate.path is None:
                continue
            tell(f"timing {candidate.label}, round {number} of {_ROUNDS}")
            try:
                session = candidate.open()
                for name, feed in feeds.items():
                    samples = _latencies_ms(session, feed)
                    candidate.samples_ms.setdefault(name, []).extend(samples)
            except OnnxtoolError as error:
                candidate.give_up(error)


def _latencies_ms(session: Session, feeds: Feeds, fewest: int = _FEWEST_RUNS) -> list[float]:
    session.run_unchecked(feeds)  # the first run allocates
    samples: list[float] = []
    end = time.perf_counter() + _SECONDS
    while len(samples) < fewest or time.perf_counter() < end:
        start = time.perf_counter()
        outputs = session.run_unchecked(feeds)
        samples.append((time.perf_counter() - start) * 1e3)
        del outputs  # freed here, outside the time of the next run
    return samples


def _geometric_mean(values: Iterable[float]) -> float:
    return math.exp(float(np.mean([math.log(value) for value in values])))
