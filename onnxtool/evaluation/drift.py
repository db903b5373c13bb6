"""Drift: whether an index that was built with one model still serves the queries of another.

Shape letters: N texts, H numbers of a vector.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxtool.checkpoint.pooling_modules import normalize
from onnxtool.checkpoint.text_files import iterate_texts
from onnxtool.encoding.reading import Shard
from onnxtool.errors import GateError, InputError, imported
from onnxtool.evaluation.collection import Collection, open_collection, read_documents
from onnxtool.evaluation.measures import Measure, MeasureDifference, compute, difference_of, mean_of, parse_measures
from onnxtool.evaluation.options import DEFAULT_MEASURES, DriftOptions, EvaluateOptions
from onnxtool.evaluation.report import GateCheck
from onnxtool.evaluation.search import QueryComparison
from onnxtool.evaluation.systems import OnnxVectors, VectorSystem, open_model
from onnxtool.infer.vectors import SparseVector, SparseVectors, TokenVectors
from onnxtool.options import StrPath, checked
from onnxtool.progress import tell
from onnxtool.reports import Json, short_repr
from onnxtool.summary.gates import check_gates, parse_gate

_MOST_TEXTS = 1000  # all pairs of them are compared
_NEIGHBOURS = 10
_LEAST_KEPT = 0.9  # of the neighbours, without judgements
_MOST_LOST = 0.01  # of a measure
_ROUNDING = 1e-3  # relative to the largest similarity: int8 moves them by more


@dataclass(frozen=True)
class MixedMeasure:
    """A measure with the old index.

    Attributes:
        base: the old model's queries over its own documents.
        model: the new model's queries over its own documents.
        mixed: the new model's queries over the old model's documents.
        change: of `mixed` from `base`.
    """

    base: Measure
    model: Measure
    mixed: Measure
    change: MeasureDifference


@short_repr
@dataclass(frozen=True)
class DriftReport:
    """Whether an index of the old model, the base, serves queries of the new one.

    Attributes:
        kind: as in SystemReport.
        num_texts: number of texts whose vectors were compared.
        cosine_mean: cosine of the old and the new vector of a text, on average; None if they have no common space.
        cosine_min: the smallest of them.
        neighbours_kept: fraction of a text's ten nearest by the old model that the new model's query finds among the
            old vectors.
        own_neighbours_kept: fraction that it finds among its own vectors.
        kendall_tau: rank correlation of both queries' similarities to the old vectors, on average.
        relation: of the new vectors to the old ones: `the same`, `scaled`, `rotated` (or permuted: all similarities
            among them are the same), `others`, or `none` for another space.
        measures: by name; empty without judgements.
        keeps_index: whether the old index can be kept.
        reason: why.
        gates: the checked gates.
    """

    model: str
    base: str
    kind: str
    num_texts: int
    cosine_mean: float | None
    cosine_min: float | None
    neighbours_kept: float | None
    own_neighbours_kept: float | None
    kendall_tau: float | None
    relation: str
    measures: Mapping[str, MixedMeasure]
    keeps_index: bool
    reason: str
    gates: tuple[GateCheck, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether no gate is met; without gates, whether the index can be kept."""
        return not any(gate.met for gate in self.gates) if self.gates else self.keeps_index


@checked
def measure_drift(model: StrPath, base: StrPath, options: DriftOptions) -> DriftReport:
    """Compare the vectors of a new model with those of the base, and search the old index with new queries.

    Args:
        model: the new ONNX file, an encoder.
        base: the one that the index was built with.
        options: the texts, or a collection with judgements.

    Raises:
        GateError: a gate is malformed, or names what is not measured.
        InputError: the texts cannot be read, or a file gives no vectors.
        OnnxtoolError: a file cannot be loaded or run.
    """
    measures = {} if options.data is None else parse_measures(DEFAULT_MEASURES)
    known = {name.casefold(): name for name in (*_FIGURES, *measures)}
    gates = [parse_gate(expression) for expression in options.fail_if]
    if unknown := [gate.figure for gate in gates if gate.figure.casefold() not in known]:
        raise GateError(f"nothing called {unknown[0]!r} is measured", f"there are {', '.join(known.values())}")
    gates = [gate._replace(figure=known[gate.figure.casefold()]) for gate in gates]
    collection = None if options.data is None else open_collection(options.data)
    if collection is None and options.texts is None:
        raise InputError("drift is measured on texts", "pass --texts FILE, or --data of a collection")
    evaluating = EvaluateOptions(cache=options.cache, provider=options.provider)
    new, old = (_open(Path(path), evaluating) for path in (model, base))
    texts = [*_texts(options, collection)]
    if len(texts) <= _NEIGHBOURS:
        raise InputError(f"{len(texts)} texts have no {_NEIGHBOURS} neighbours each", "pass some hundreds")
    report = _compared(new, old, texts)
    if collection is not None and report.relation != "none":
        report = _with_measures(report, new, old, collection, measures)
    figures: dict[str, Json] = {name: getattr(report, name) for name in _FIGURES}
    figures |= {name: measure.mixed.mean for name, measure in report.measures.items()}
    before: dict[str, Json] = dict.fromkeys(_FIGURES, 1.0)
    before |= {name: measure.base.mean for name, measure in report.measures.items()}
    checks = check_gates(gates, {name: value for name, value in figures.items() if value is not None}, before)
    return replace(report, gates=tuple(GateCheck(check.gate.expression, check.met, str(check)) for check in checks))


_FIGURES = ("cosine_mean", "cosine_min", "neighbours_kept", "own_neighbours_kept", "kendall_tau")


def _open(path: Path, options: EvaluateOptions) -> OnnxVectors:
    system = open_model(path, options)
    if isinstance(system, OnnxVectors):
        return system
    raise InputError(f"{path} scores pairs, and has no index", "compare encoders")


def _texts(options: DriftOptions, collection: Collection | None) -> Iterator[str]:
    """Yield the first texts of the file, or documents of the collection."""
    if options.texts is not None:
        yield from (text.contents for text in islice(iterate_texts(options.texts), _MOST_TEXTS))
    elif collection is not None:
        yield from (document.contents for document in islice(read_documents(collection), _MOST_TEXTS))


def _compared(new: OnnxVectors, old: OnnxVectors, texts: Sequence[str]) -> DriftReport:
    """Compare the vectors of texts."""
    tell("encoding texts")
    documents, new_documents = old.encode_documents(texts), new.encode_documents(texts)
    report = DriftReport(
        new.name, old.name, new.kind, len(texts), None, None, None, None, None, "none", {}, keeps_index=False, reason=""
    )
    if apart := _apart(new, old, new_documents, documents):
        return replace(report, reason=apart)
    old_queries, new_queries = old.encode_queries(texts), new.encode_queries(texts)
    before, mixed = _similarities(old_queries, documents, old), _similarities(new_queries, documents, old)
    own = _similarities(new_queries, new_documents, old)
    cosines = _cosines(new_documents, documents)
    kept = _kept(mixed, before)
    stats = imported("scipy.stats", "Kendall's tau needs scipy", "pip install 'onnxtool-cli[evaluate]'")
    taus = [stats.kendalltau(old_row, new_row).statistic for old_row, new_row in zip(before, mixed, strict=True)]
    report = replace(
        report,
        cosine_mean=None if cosines is None else float(cosines.mean()),
        cosine_min=None if cosines is None else float(cosines.min()),
        neighbours_kept=kept,
        own_neighbours_kept=_kept(own, before),
        kendall_tau=float(np.nanmean(taus)),
        relation=_relation(mixed, own, before),
        keeps_index=kept >= _LEAST_KEPT,
        reason=f"new queries find {kept:.1%} of the old {_NEIGHBOURS} nearest among the old vectors",
    )
    if report.relation == "rotated":
        report = replace(report, reason=f"{report.reason}: the vectors are the old ones, rotated or permuted")
    return report


def _apart(new: OnnxVectors, old: OnnxVectors, vectors: Any, old_vectors: Any) -> str:
    """Return why vectors have no common space; empty if they may have one."""
    if new.kind != old.kind:
        return f"the index has {old.kind} vectors, and the new model gives {new.kind} ones"
    if isinstance(vectors, SparseVectors):
        same = list(vectors.vocabulary) == list(old_vectors.vocabulary)
        return "" if same else "the terms of the index are those of another vocabulary"
    widths = vectors.shape[1], old_vectors.shape[1]
    return "" if widths[0] == widths[1] else f"vectors have {widths[0]} numbers, and those of the index {widths[1]}"


def _similarities(queries: Any, documents: Any, system: VectorSystem) -> NDArray[np.float64]:
    """Return float64 [N, N], with the least value for a text and itself, and for what shares no term."""
    scores = QueryComparison(queries, system.similarity).scores(documents, 0, len(documents)).astype(np.float64)
    scores[~np.isfinite(scores)] = 0.0
    np.fill_diagonal(scores, scores.min() - 1)
    return np.asarray(scores)


def _kept(scores: NDArray[np.float64], before: NDArray[np.float64]) -> float:
    """Return the fraction of the nearest texts that are the same, on average."""
    nearest = [np.argsort(-each, axis=1, kind="stable")[:, :_NEIGHBOURS] for each in (scores, before)]
    return float(np.mean([len({*new} & {*old}) / _NEIGHBOURS for new, old in zip(*nearest, strict=True)]))


def _cosines(vectors: Any, old_vectors: Any) -> NDArray[np.float64] | None:
    """Return the cosine of each text's vectors, float64 [N]; None for token vectors of different numbers."""
    if isinstance(vectors, TokenVectors):
        if not np.array_equal(vectors.indptr, old_vectors.indptr) or (np.diff(vectors.indptr) == 0).any():
            return None
        rows = (normalize(vectors.vectors.astype(np.float64)) * normalize(old_vectors.vectors.astype(np.float64))).sum(
            axis=1
        )
        return np.asarray(np.add.reduceat(rows, vectors.indptr[:-1]) / np.diff(vectors.indptr))
    rows = []
    for place in range(len(vectors)):
        pair = vectors[place], old_vectors[place]
        new, old = (vector.to_dense() if isinstance(vector, SparseVector) else vector for vector in pair)
        product = np.linalg.norm(new.astype(np.float64)) * np.linalg.norm(old.astype(np.float64))
        rows.append(float(new.astype(np.float64) @ old) / product if product else 0.0)
    return np.asarray(rows)


def _relation(mixed: NDArray[np.float64], own_scores: NDArray[np.float64], before: NDArray[np.float64]) -> str:
    """Say how new vectors relate to the old ones, by the similarities of texts with others."""
    away = ~np.eye(len(before), dtype=bool)
    mixed, own_scores, before = mixed[away], own_scores[away], before[away]
    largest = float(np.abs(before).max(initial=0.0)) or 1.0
    if np.abs(mixed - before).max() <= _ROUNDING * largest:
        return "the same"
    factor = float(mixed @ before / (before @ before))
    if factor > 0 and np.abs(mixed / factor - before).max() <= _ROUNDING * largest:
        return "scaled"
    return "rotated" if np.abs(own_scores - before).max() <= _ROUNDING * largest else "others"


class _Mixed(VectorSystem):
    """New queries over the documents of the old model."""

    def __init__(self, new: OnnxVectors, old: OnnxVectors) -> None:
        super().__init__(old.options)
        self.name, self.kind, self.similarity = f"{new.name} over {old.name}", old.kind, old.similarity
        self._new, self._old = new, old

    def encode_queries(self, texts: Sequence[str]) -> Any:
        """Encode with the new model."""
        return self._new.encode_queries(texts)

    def shards(self, collection: Collection, rejects: Counter[str]) -> Iterator[Shard]:
        """Yield the old vectors, which are cached by now."""
        return self._old.shards(collection, rejects)


def _with_measures(
    report: DriftReport, new: OnnxVectors, old: OnnxVectors, collection: Collection, measures: Mapping[str, Any]
) -> DriftReport:
    """Search the collection with the old model, the new one, and new queries over old documents."""
    runs = [system.retrieve(collection).run for system in (old, new, _Mixed(new, old))]
    before, now, mixed = (compute(measures, collection.judgements, run) for run in runs)
    mixed_measures = {
        name: MixedMeasure(
            mean_of(before[name]), mean_of(now[name]), mean_of(mixed[name]), difference_of(mixed[name], before[name])
        )
        for name in measures
    }
    name, first = next(iter(mixed_measures.items()))
    change = first.change
    keeps = change.change >= -_MOST_LOST * first.base.mean
    means = (
        f"{name} of new queries over the old index is {first.mixed.mean:.4f}, {first.base.mean:.4f} with the old model"
    )
    interval = f"a change of {change.change:+.4f}, from {change.low:+.4f} to {change.high:+.4f}"
    return replace(report, measures=mixed_measures, keeps_index=keeps, reason=f"{means}: {interval}; {report.reason}")
