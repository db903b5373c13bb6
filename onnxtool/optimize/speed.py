"""Time a result against its input in short turns, so that a slower file is never returned without a warning."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from numpy.typing import NDArray

from onnxtool.model_file import ModelFile
from onnxtool.optimize.report import Speed
from onnxtool.optimize.verification import verification_feeds
from onnxtool.runtime.given_inputs import NO_INPUTS, GivenInputs
from onnxtool.runtime.providers import CPU, ExecutionProvider
from onnxtool.runtime.running import Session
from onnxtool.runtime.session import open_plain
from onnxtool.runtime.timing import interval_of_median

_FEWEST_TURNS, _MOST_TURNS = 6, 15  # fewer have no interval of 95 %
_SECONDS, _MOST_SECONDS = 0.6, 3.0  # after which the fewest turns, or any number of them, are enough
_LARGE_BYTES = 256 << 20  # of a file whose session is closed before the other's is opened
_FINE = 1e-5  # seconds; CPU time is much coarser on Windows
_NOISE = 0.02  # of the ratio, beyond its interval
_NOISE_OF_FEW = 0.1  # where a file is too slow for turns enough


def compare_speed(
    source: ModelFile, result: ModelFile, provider: ExecutionProvider, given: GivenInputs = NO_INPUTS
) -> Speed:
    """Time the files `source` and `result` on the largest verification input, opened as a user would open them.

    Sessions have onnxruntime's defaults, without the session options requested in the metadata, and one thread: threads
    of two sessions would compete for cores. Both run in turns, after an uncounted run, for about a second, or once if a
    run takes longer; large files run one after another. Where both run on the processor, CPU time is measured, which
    other load on the machine affects little. The input of a file for a provider that is no reference runs on the CPU:
    that is what the provider is an alternative to.

    Raises:
        OnnxtoolError: there are no inputs for the file, or it cannot be run.
    """
    feeds = max(verification_feeds(source, given), key=lambda feed: sum(array.size for array in feed.values()))
    shape = "x".join(map(str, next(iter(feeds.values())).shape)) if feeds else ""
    turns: list[tuple[float, float]] = []
    base = provider if provider.row.is_reference else ExecutionProvider(CPU)
    clock = time.perf_counter_ns  # one for both: other load is in wall time alone
    if provider.is_processor and base.is_processor and time.get_clock_info("process_time").resolution < _FINE:
        clock = time.thread_time_ns if provider.name == CPU else time.process_time_ns  # a plugin has its own threads
    if source.size_bytes > _LARGE_BYTES:  # one after another: both may not fit into memory
        session, start, befores = _open(source, base, feeds), time.perf_counter(), list[float]()
        while not befores or (len(befores) < _MOST_TURNS and time.perf_counter() - start < _MOST_SECONDS / 2):
            befores.append(_time(session, feeds, clock))
        del session
        session = _open(result, provider, feeds)
        turns = [(before, _time(session, feeds, clock)) for before in befores]
    else:
        first, second = _open(source, base, feeds), _open(result, provider, feeds)
        start = time.perf_counter()
        while len(turns) < _MOST_TURNS:
            turns.append((_time(first, feeds, clock), _time(second, feeds, clock)))
            seconds = time.perf_counter() - start
            if seconds > (_SECONDS if len(turns) >= _FEWEST_TURNS else _MOST_SECONDS):
                break
    ratios = [before / after for before, after in turns]
    low, high = interval_of_median(ratios)
    noise = _NOISE if len(turns) >= _FEWEST_TURNS else _NOISE_OF_FEW
    before_ms, after_ms = (sorted(times)[len(times) // 2] for times in zip(*turns, strict=True))
    ratio = sorted(ratios)[len(ratios) // 2]
    return Speed(shape, len(turns), before_ms, after_ms, ratio, (low, high), slower=high < 1.0 - noise)


def _open(model: ModelFile, provider: ExecutionProvider, feeds: Mapping[str, NDArray[Any]]) -> Session:
    session = open_plain(model, provider)
    session.run_unchecked(feeds)  # the first run allocates
    return session


def _time(session: Session, feeds: Mapping[str, NDArray[Any]], clock: Callable[[], int]) -> float:
    """Return the duration of a run in milliseconds, by a clock of nanoseconds."""
    start = clock()
    session.run_unchecked(feeds)
    return max(1, clock() - start) / 1e6
