"""Retrieval measures computed by ir_measures, confidence intervals of means, and significance tests of differences."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxtool.errors import InputError, OptionError, imported
from onnxtool.evaluation.collection import Judgements
from onnxtool.evaluation.options import DEFAULT_MEASURES

# Names in ir_measures that differ from the printed ones.
_NAMES = {"RR": "MRR", "R": "Recall", "AP": "MAP"}
_RESAMPLES = 10_000
_PERMUTATIONS = 100_000
_AT_ONCE = 1 << 22  # numbers per block of samples
_SEED = 0

PerQuery = dict[str, dict[str, float]]
"""Values by measure and query."""


@dataclass(frozen=True)
class Measure:
    """The mean of a measure over the queries, and its 95 % confidence interval from resampled queries."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True)
class MeasureDifference:
    """The difference of a measure from the base, over the same queries.

    Attributes:
        base: the mean of the base.
        change: the mean minus the base's mean.
        relative: the change relative to the base; None if that is 0.
        low: lower end of the 95 % interval of the change.
        high: upper end of the interval.
        p_value: p-value of a two-sided paired randomization test: how often a change at least as large arises when the
            two values of each query are swapped at random (Smucker, Allan and Carterette, 2007).
        num_better: number of queries with a larger value.
        num_worse: number of queries with a smaller value.
    """

    base: float
    change: float
    relative: float | None
    low: float
    high: float
    p_value: float
    num_better: int
    num_worse: int


def require_library() -> Any:
    """Return the module of ir_measures.

    Raises:
        InputError: it is not installed.
    """
    return imported("ir_measures", "measures of retrieval need ir_measures", "pip install 'onnxtool-cli[evaluate]'")


def parse_measures(names: Sequence[str]) -> dict[str, Any]:
    """Return ir_measures' measures by name: `nDCG@10`, `MRR@10`, `Recall@100`, `MAP`, `P@5`, …, in any case.

    Raises:
        InputError: there is no such measure, or ir_measures is not installed.
    """
    library = require_library()
    registry: dict[str, str] = {}
    for name in library.measures.registry:
        registry.setdefault(name.casefold(), name)
    measures: dict[str, Any] = {}
    for name in names:
        word = re.match(r"\w*", name.strip())
        assert word is not None  # noqa: S101  it matches nothing as well
        spelled = registry.get(word[0].casefold(), word[0])
        try:
            measure = library.parse_measure(f"{spelled}{name.strip()[len(word[0]) :]}")
            known = library.DefaultPipeline.supports(measure)
        except Exception as error:  # noqa: BLE001  the library evaluates the text, and asserts about its parts
            raise _unknown(name, registry, str(error)) from None
        if not known:
            raise _unknown(name, registry, "no installed library computes it")
        if measure.params.get("cutoff", 1) < 1:  # aborts the process in pytrec_eval
            raise _unknown(name, registry, "it looks at no document")
        try:
            compute({name: measure}, {"": {"yes": 1, "no": 0}}, {"": {"yes": 1.0, "no": 0.0}})
        except InputError as error:
            raise _unknown(name, registry, error.message) from error
        measures[display_name(measure)] = measure
    if not measures:
        raise OptionError("no measure to compute", f"pass e.g. --measure {DEFAULT_MEASURES[0]}")
    return measures


def _unknown(name: str, registry: Mapping[str, str], reason: str) -> OptionError:
    from difflib import get_close_matches

    word = name.partition("@")[0].casefold()
    close = get_close_matches(word, registry, n=1)
    meant = f"did you mean {registry[close[0]]}? " if close and close[0] != word else ""
    hint = f"{meant}write e.g. nDCG@10, MRR@10, Recall@100, MAP, P@5"
    return OptionError(f"no measure {name[:60]!r}: {reason[:200]}", hint)


def display_name(measure: Any) -> str:
    """Return a measure's name in reports."""
    return re.sub(r"^\w+", lambda name: _NAMES.get(name[0], name[0]), str(measure))


def compute(measures: Mapping[str, Any], judgements: Judgements, run: Mapping[str, Mapping[str, float]]) -> PerQuery:
    """Return each measure for each judged query; a query without results counts as 0.

    Documents with equal scores are ordered as in trec_eval, the last id in sort order first, whichever library computes
    a measure: otherwise the libraries for MRR@10 and nDCG@10 would order them differently. Queries and documents get
    numbers as ids: gdeval, a script, cuts `PLAIN-3` to `3` and ids at spaces, and pytrec_eval cuts them at NUL.

    Args:
        measures: measures from `parse_measures`.
        judgements: judgements of all counting queries.
        run: scores of documents.

    Raises:
        InputError: a library cannot compute a measure of these judgements.
    """
    library = require_library()
    names = {measure: name for name, measure in measures.items()}
    per_query: PerQuery = {name: {} for name in measures}
    numbers, ids = _Numbers(), _Numbers()
    grades = {
        numbers[query]: {ids[document]: grade for document, grade in of_query.items()}
        for query, of_query in judgements.items()
    }
    results = {numbers[query]: _ranks(run[query], ids) for query in judgements if run.get(query)}
    if not results:
        return {name: dict.fromkeys(judgements, 0.0) for name in measures}
    try:
        for value in library.iter_calc(list(measures.values()), grades, results):
            per_query[names[value.measure]][value.query_id] = float(value.value)
    except Exception as error:  # raised by any of the libraries that it calls
        raise InputError(
            f"ir_measures cannot compute {', '.join(measures)} of these judgements: {type(error).__name__}: {error}",
            "leave the measure out; nDCG with exponential gains and ERR, computed by gdeval, know grades up to 4",
        ) from error
    return {name: {query: values.get(numbers[query], 0.0) for query in numbers} for name, values in per_query.items()}


class _Numbers(dict[str, str]):
    """A number for each id, counted as they come."""

    def __missing__(self, key: str) -> str:
        return self.setdefault(key, str(len(self)))


def _ranks(scores: Mapping[str, float], ids: _Numbers) -> dict[str, float]:
    """Replace scores by distinct ones, in the order of trec_eval, and ids by numbers."""
    ordered = sorted(scores, key=lambda document: (scores[document], document), reverse=True)
    return {ids[document]: float(-rank) for rank, document in enumerate(ordered)}


def mean_of(values: Mapping[str, float]) -> Measure:
    """Summarize a measure; the interval comes from resampled queries, always with the same seed."""
    array = np.array(list(values.values()), np.float64)
    low, high = _interval(array)
    return Measure(float(array.mean()), low, high)


def difference_of(values: Mapping[str, float], base: Mapping[str, float]) -> MeasureDifference:
    """Compare a measure with the base, query by query."""
    ours = np.array(list(values.values()), np.float64)
    theirs = np.array([base[query] for query in values], np.float64)
    changes = ours - theirs
    change, before = float(changes.mean()), float(theirs.mean())
    low, high = _interval(changes)
    return MeasureDifference(
        base=before,
        change=change,
        relative=change / before if before else None,
        low=low,
        high=high,
        p_value=_randomization(changes),
        num_better=int((changes > 0).sum()),
        num_worse=int((changes < 0).sum()),
    )


def _interval(values: NDArray[np.float64]) -> tuple[float, float]:
    """Return the 95 % interval of the mean, from resampled values."""
    if not np.any(values != values[0]):
        return float(values[0]), float(values[0])
    random = np.random.default_rng(_SEED)
    step = max(1, _AT_ONCE // len(values))
    means = np.concatenate(
        [
            values[random.integers(len(values), size=(min(step, _RESAMPLES - first), len(values)))].mean(axis=1)
            for first in range(0, _RESAMPLES, step)
        ]
    )
    low, high = np.percentile(means, (2.5, 97.5))
    return float(low), float(high)


def _randomization(changes: NDArray[np.float64]) -> float:
    """Return how often the mean is at least as far from 0 with random signs of the changes."""
    changes = changes[changes != 0]
    if not len(changes):
        return 1.0
    observed = abs(changes.sum()) * (1 - 1e-12)  # treat sums of the same numbers in another order as equal
    random = np.random.default_rng(_SEED)
    step = max(1, _AT_ONCE // len(changes))
    extreme = 0
    for first in range(0, _PERMUTATIONS, step):
        signs = random.integers(2, size=(min(step, _PERMUTATIONS - first), len(changes)), dtype=np.int8) * 2.0 - 1.0
        extreme += int((np.abs(signs @ changes) >= observed).sum())
    return (extreme + 1) / (_PERMUTATIONS + 1)
