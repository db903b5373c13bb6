"""Evaluate a model on a test collection: encode, search, measure, and compare with another."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from onnxtool.checkpoint.folder import find_checkpoint_folder
from onnxtool.encoding.sources import find_sources
from onnxtool.errors import GateError, InputError, OptionError
from onnxtool.evaluation.collection import Collection, open_collection, read_documents
from onnxtool.evaluation.measures import (
    Measure,
    PerQuery,
    compute,
    difference_of,
    mean_of,
    parse_measures,
)
from onnxtool.evaluation.options import BM25, DEFAULT_CANDIDATES, DEFAULT_MEASURES, RERANKER, SPARSE, EvaluateOptions
from onnxtool.evaluation.pruning import PruningRules, parse_cuts
from onnxtool.evaluation.report import (
    EvaluationReport,
    GateCheck,
    PrunedResult,
    QueryResult,
    SystemComparison,
    SystemReport,
    TermCounts,
    VectorSizes,
)
from onnxtool.evaluation.search import Run
from onnxtool.evaluation.systems import Bm25, SearchResults, System, VectorSystem, open_model
from onnxtool.model_file import ModelFile, check_writable, write_text
from onnxtool.model_file.metadata import PARTNER_KEY
from onnxtool.optimize.quantization.candidates import Judge, Judgement
from onnxtool.options import Option, StrPath, checked
from onnxtool.progress import Stage, tell
from onnxtool.reports import Json
from onnxtool.runtime.machine import peak_rss_bytes
from onnxtool.summary.gates import Gate, check_gates, parse_gate

_TIMED_QUERIES = 50
_TOP = 10
_LOST = 10
_OVERLAP = "overlap@10"
_INDEX = "index_bytes"
_OF_SYSTEMS = ("size_bytes", "query_ms", "query_terms", "document_terms", "sparsity")
_TIE = 1e-5  # relative difference of two scores due to float32 rounding


@checked
def evaluate_model(
    model_path: StrPath,
    data: StrPath,
    options: EvaluateOptions | None = None,
    *,
    run_path: Annotated[StrPath | None, Option(writes="file")] = None,
    force: bool = False,
) -> EvaluationReport:
    """Search the collection `data` with a model, and measure the results.

    Documents and queries are encoded with the checkpoint's own prompts and limits, the search is exact, and the
    measures come from ir_measures. A reranker reorders the candidates of a run or of BM25.

    Args:
        model_path: the ONNX file; its tokenizer is found next to it.
        data: a folder in the layout of BEIR, MTEB or TREC.
        options: the evaluation options.
        run_path: the file for the ranked results, in TREC format.
        force: whether to replace that file.

    Raises:
        GateError: a gate is malformed, names an unknown figure, or is relative without a base.
        InputError: the collection cannot be read, or the model does not fit it.
        OnnxtoolError: the model cannot be loaded or run.
    """
    options = options or EvaluateOptions()
    measures, gates, collection = check_evaluation(model_path, data, options, writes_run=run_path is not None)
    if run_path is not None:
        check_writable(Path(run_path), force=force)
    model = open_model(Path(model_path), options)
    base = None if options.against is None else _open_base(options.against, options, model.kind)
    systems = [system for system in (model, base) if system is not None]
    _refuse_unused(options, systems)
    _require_figures(gates, measures, model, base, has_sizes=bool(options.prune))
    if run_path is not None:
        _require_plain_ids(chain(collection.queries, (document.id for document in read_documents(collection))))
    report, run = _evaluate(model, base, collection, measures, gates, options)
    if run_path is not None:
        write_text(Path(run_path), _run_text(run, Path(model_path).stem), force=force)
        report = replace(report, run_path=str(run_path))
    return report


def _evaluate(
    model: System,
    base: System | None,
    collection: Collection,
    measures: dict[str, Any],
    gates: Sequence[Gate],
    options: EvaluateOptions,
) -> tuple[EvaluationReport, Run]:
    """Search the collection with the model and its base, measure and compare; return the model's run as well."""
    cuts = parse_cuts(options.prune)
    start = time.perf_counter()
    every = _retrieve_each(model, collection, cuts)
    results, seconds = every[PruningRules()], time.perf_counter() - start
    values = compute(measures, collection.judgements, results.run)
    times = _time_queries([system for system in (model, base) if system is not None], collection)
    against, base_results, base_values, base_seconds = None, None, None, 0.0
    if base is not None:
        start = time.perf_counter()
        base_results = base.retrieve(collection)
        base_seconds = time.perf_counter() - start
        base_values = compute(measures, collection.judgements, base_results.run)
    queries = _queries(collection, results.run, values, None if base_results is None else base_results.run, base_values)
    if base is not None and base_results is not None and base_values is not None:
        tell("comparing")
        against = SystemComparison(
            base=_described(base, base_results, times, base_seconds),
            measures={name: difference_of(values[name], base_values[name]) for name in values},
            overlap_at_10=_overlap(collection, results.run, base_results.run),
            num_equal_top_10=sum(
                _is_equal(results.run.get(query, {}), base_results.run.get(query, {})) for query in collection.queries
            ),
            lost=_lost(queries, next(iter(measures))),
        )
    report = EvaluationReport(
        model=_described(model, results, times, seconds),
        data=collection.name,
        split=collection.split,
        num_documents=results.num_documents,
        num_queries=len(collection.queries),
        num_judgements=collection.num_judgements,
        num_without_relevant=collection.num_without_relevant,
        num_own_ids_left_out=len(results.left_out),
        measures={name: mean_of(values[name]) for name in measures},
        rejects=results.rejects,
        against=against,
        gates=(),
        queries=queries,
        peak_rss_bytes=peak_rss_bytes(),
        notes=tuple(_notes(collection, results, model, base, options)),
    )
    if cuts:
        report = _with_pruned(report, every, base_results, collection, measures, gates)
    else:
        overlap = None if against is None else against.overlap_at_10
        figures = _figures(report.measures, report.model, overlap)
        base_figures = None if against is None else _figures_of_base(against)
        report = replace(report, gates=tuple(_check_gates(gates, figures, base_figures)))
    return report, results.run


def _refuse_unused(options: EvaluateOptions, systems: Sequence[System]) -> None:
    """Refuse options that would change nothing for the model, the first of `systems`, and its base.

    Raises:
        InputError: there is one.
    """
    model, kinds = systems[0], {system.kind for system in systems}
    ignored = {
        "--num_candidates": options.num_candidates is not None and RERANKER not in kinds,
        "--keep_special": options.keep_special and model.kind != SPARSE,
        "--dimensions": options.dimensions is not None and model.kind == RERANKER,
    }
    if unused := [name for name, is_ignored in ignored.items() if is_ignored]:
        raise InputError(
            f"{' and '.join(unused)} would change nothing: {model.name} is a model of the kind {model.kind}",
            "leave it out",
        )


def _lost(queries: Sequence[QueryResult], measure: str) -> tuple[QueryResult, ...]:
    """Return the queries with the largest losses against the base, worst first."""
    worst = sorted(queries, key=lambda query: query.measures[measure] - query.base[measure])
    return tuple(query for query in worst[:_LOST] if query.measures[measure] < query.base[measure])


def check_evaluation(
    model_path: StrPath | None, data: StrPath, options: EvaluateOptions, *, writes_run: bool = False
) -> tuple[dict[str, Any], list[Gate], Collection]:
    """Return measures, gates and collection, checked as far as possible without loading a model.

    Args:
        model_path: as for `evaluate_model`; None for a model that does not exist yet.
        data: likewise.
        options: likewise.
        writes_run: whether the ranked results are to be written.

    Raises:
        OnnxtoolError: as for `evaluate_model`.
    """
    measures = parse_measures(options.measures or DEFAULT_MEASURES)
    for name, measure in measures.items():
        if measure.params.get("cutoff", 0) > options.depth:
            raise InputError(f"{name} is not known of the {options.depth} best documents", "pass a larger --depth")
    gates = _parse_gates(options, measures)
    parse_cuts(options.prune)
    if writes_run and options.prune:
        raise OptionError("a run has the results of one search, and --prune makes several", "leave one of them out")
    if model_path is not None:  # before a dataset is fetched
        ModelFile.open(Path(model_path))
    collection = open_collection(Path(data), options.split)
    if not any(collection.relevant.values()) and (vain := [gate for gate in gates if gate.figure in measures]):
        raise GateError(
            f"the gate {vain[0].expression!r} decides nothing: no query of {collection.name} has a relevant document",
            "check the grades of the judgements, or leave out --fail_if",
        )
    find_sources(collection.corpus)
    # A library may not compute a measure of these grades.
    compute(
        measures,
        collection.judgements,
        {q: {"": 0.0} | dict.fromkeys(d, 1.0) for q, d in collection.judgements.items()},
    )
    return measures, gates, collection


def _open_base(name: str, options: EvaluateOptions, kind: str) -> System:
    """Open the system to compare with: BM25, an ONNX file, or a checkpoint in PyTorch."""
    if name == BM25:
        return Bm25(options)
    path, adapter = Path(name), None
    if not path.is_file() and path.suffix.lower().startswith(".onnx@"):
        path, adapter = path.with_suffix(path.suffix[:5]), path.suffix[6:]
    options = replace(options, adapter=adapter)
    if path.is_file() or path.suffix.lower() == ".onnx":
        if ModelFile.open(path).stated_task:  # descriptions only apply to files that do not state it themselves
            options = replace(options, task=None, head=None, pooling=None, normalize=None)
        return open_model(path, replace(options, model_name=_own_files(path, options.model_name), partner=None))
    from onnxtool.evaluation.pytorch import open_checkpoint

    return open_checkpoint(name, kind, options)


def _own_files(path: Path, model_name: str | None) -> str | None:
    """Return the name of a base's checkpoint: None if its files lie next to it, otherwise the model's."""
    try:
        find_checkpoint_folder(ModelFile.open(path), None)
    except InputError:
        return model_name
    return None


def _require_plain_ids(ids: Iterable[str]) -> None:
    """Refuse ids with spaces, which separate the columns of a run, before anything is encoded.

    Raises:
        InputError: one has a space, or is empty.
    """
    for key in ids:
        if len(key.split()) != 1:
            raise InputError(
                f"the id {key!r} has a space or is empty, and TREC's format has no place for it", "rename it"
            )


def _run_text(run: Run, name: str) -> str:
    """Write a run in TREC format: `query Q0 document rank score name`."""
    tag = "".join(character if character.isalnum() or character in "-_." else "_" for character in name)
    return "".join(
        f"{query} Q0 {document} {rank} {np.float32(score)!s} {tag}\n"
        for query, documents in run.items()
        for rank, (document, score) in enumerate(documents.items(), start=1)
    )


def _retrieve_each(
    system: System, collection: Collection, cuts: Sequence[PruningRules]
) -> dict[PruningRules, SearchResults]:
    """Search with the vectors as they are, and as each of `cuts` makes them smaller.

    Raises:
        InputError: they are not for these vectors, or the system has none.
    """
    if not cuts:
        return {PruningRules(): system.retrieve(collection)}
    if not isinstance(system, VectorSystem):
        raise InputError(
            f"--prune is for encoders, and {system.name} is a model of the kind {system.kind}", "leave --prune out"
        )
    for cut in cuts:
        system.require(cut)
    every = [PruningRules(), *cuts]
    return dict(zip(every, system.retrieve_each(collection, every), strict=True))


def _with_pruned(
    report: EvaluationReport,
    results_by_cut: Mapping[PruningRules, SearchResults],
    base_results: SearchResults | None,
    collection: Collection,
    measures: Mapping[str, Any],
    gates: Sequence[Gate],
) -> EvaluationReport:
    """Measure what was found with smaller vectors, and choose the smallest index for which no gate is met.

    Gates compare with the base, which found `others`, or else with the vectors as they are. If each index meets one,
    all these gates count.
    """
    compared = results_by_cut[PruningRules()].run if base_results is None else base_results.run
    whole = compute(measures, collection.judgements, results_by_cut[PruningRules()].run)
    base = _figures(report.measures, report.model, 1.0, results_by_cut[PruningRules()].sizes)
    if report.against is not None and base_results is not None:
        base = _figures_of_base(report.against, base_results.sizes)
    results = []
    for cut, retrieved in results_by_cut.items():
        assert retrieved.sizes is not None  # noqa: S101  of vectors
        values = compute(measures, collection.judgements, retrieved.run)
        result = PrunedResult(
            prune=cut.name,
            sizes=retrieved.sizes,
            measures={name: mean_of(values[name]) for name in measures},
            changes={}
            if cut == PruningRules()
            else {name: difference_of(values[name], whole[name]) for name in measures},
        )
        if result.changes:
            overlap = _overlap(collection, retrieved.run, compared)
            figures = _figures(result.measures, replace(report.model, terms=retrieved.terms), overlap, retrieved.sizes)
            result = replace(result, gates=tuple(_check_gates(gates, figures, base)))
        results.append(result)
    passing = [result for result in results if result.gates and not any(gate.met for gate in result.gates)]
    chosen = min(passing, key=lambda result: result.sizes.index_bytes, default=None)
    pruned = tuple(replace(result, chosen=result is chosen) for result in results)
    checks = [
        replace(gate, text=f"{result.prune}: {gate.text}")
        for result in pruned
        for gate in result.gates
        if result.chosen or (chosen is None and gate.met)
    ]
    return replace(report, pruned=pruned, gates=tuple(checks))


def _time_queries(systems: Sequence[System], collection: Collection) -> dict[str, float | None]:
    """Return the median milliseconds in which each system encodes one query, measured in turns."""
    timed = [system for system in systems if system.kind != BM25]
    texts = list(collection.queries.values())
    step = max(1, len(texts) // _TIMED_QUERIES)
    samples: dict[str, list[float]] = {system.name: [] for system in timed}
    chosen = texts[::step][:_TIMED_QUERIES]
    for system in timed:
        system.run_query(chosen[0])  # the first run is slower
    for number, text in enumerate(chosen):
        tell(Stage("timing queries", number, len(chosen)))
        for system in timed:
            start = time.perf_counter()
            system.run_query(text)
            samples[system.name].append((time.perf_counter() - start) * 1e3)
    return {name: float(np.median(times)) for name, times in samples.items()}


def _described(
    system: System, results: SearchResults, times: Mapping[str, float | None], seconds: float
) -> SystemReport:
    return SystemReport(
        name=system.name,
        kind=system.kind,
        similarity=system.similarity,
        size_bytes=system.size_bytes,
        query_ms=times.get(system.name),
        seconds=seconds,
        terms=results.terms,
    )


def _overlap(collection: Collection, run: Run, base: Run) -> float:
    """Return the average fraction of the base's top ten documents that are also in the other's."""
    overlaps = []
    for query in collection.queries:
        top, base_top = list(run.get(query, {}))[:_TOP], list(base.get(query, {}))[:_TOP]
        overlaps.append(len({*top} & {*base_top}) / max(1, len(base_top)) if base_top or not top else 0.0)
    return float(np.mean(overlaps))


def _is_equal(ours: Mapping[str, float], theirs: Mapping[str, float]) -> bool:
    """Whether the top ten are the same in the same order, except for swaps by rounding."""
    top, base_top = list(ours)[:_TOP], list(theirs)[:_TOP]
    if len(top) != len(base_top):
        return False
    for ours_at, theirs_at in zip(top, base_top, strict=True):
        if ours_at != theirs_at:
            here, there = theirs[theirs_at], theirs.get(ours_at)
            if there is None or abs(here - there) > _TIE * max(abs(here), abs(there)):
                return False
    return True


def _queries(
    collection: Collection, run: Run, values: PerQuery, base_run: Run | None, base_values: PerQuery | None
) -> tuple[QueryResult, ...]:
    return tuple(
        QueryResult(
            id=query,
            text=text,
            measures={name: of_queries[query] for name, of_queries in values.items()},
            top=tuple(run.get(query, {}))[:_TOP],
            base={} if base_values is None else {name: of[query] for name, of in base_values.items()},
            base_top=() if base_run is None else tuple(base_run.get(query, {}))[:_TOP],
        )
        for query, text in collection.queries.items()
    )


def _notes(
    collection: Collection, results: SearchResults, model: System, base: System | None, options: EvaluateOptions
) -> list[str]:
    notes = [*collection.notes, *model.reading_notes]
    notes += [] if base is None else [f"{base.name}: {note}" for note in base.reading_notes]
    if results.left_out:
        notes.append(
            f"{len(results.left_out)} queries have the id of a document, which is left out of their rankings, as BEIR "
            "does; --keep_own_ids keeps it"
        )
    if kept := len(results.own - results.left_out):
        reason = "by --keep_own_ids" if options.keep_own_ids else "as it is judged relevant"
        notes.append(f"{kept} queries have the id of a document, which stays {reason}; BEIR leaves it out")
    if results.unknown:
        notes.append(
            f"{len(results.unknown)} judged documents are not among the documents; they count as not found, as in "
            "trec_eval"
        )
    if unreachable := sum(
        bool(documents) and documents <= results.unknown for documents in collection.relevant.values()
    ):
        notes.append(f"for {unreachable} queries no relevant document is among the documents; they count as 0")
    notes += [f"{count} lines of the corpus are left out: each {reason}" for reason, count in results.rejects.items()]
    if empty := sum(not results.run.get(query) for query in collection.queries):
        notes.append(f"for {empty} queries nothing was found; they count as 0")
    if model.note:
        notes.append(model.note)
    if model.kind == RERANKER:
        source = "BM25" if options.candidates is None else str(options.candidates)
        num = options.num_candidates or DEFAULT_CANDIDATES
        notes.append(f"the model orders {num} documents of a query at most, which {source} found")
    return notes


def needs_base(gate: Gate) -> bool:
    """Whether a gate is on the difference from a base."""
    return bool(gate.sign) or gate.figure.casefold() == _OVERLAP


def _parse_gates(options: EvaluateOptions, measures: Mapping[str, object]) -> list[Gate]:
    """Parse the gates, with figure names in any case.

    Raises:
        GateError: one is malformed, names what is not measured, or is relative and there is no base.
    """
    has_base = options.against is not None or bool(options.prune)
    names = (*measures, _OVERLAP, *_OF_SYSTEMS, *([_INDEX] if options.prune else []))
    known = {name.casefold(): name for name in names}
    gates = []
    for expression in options.fail_if:
        gate = parse_gate(expression)
        if gate.sign and not has_base:
            raise GateError(
                f"the gate {expression!r} is relative, and there is no base",
                "pass --against, or write the threshold without a sign",
            )
        name = known.get(gate.figure.casefold())
        if name is None or (name == _OVERLAP and not has_base):
            raise GateError(
                f"nothing called {gate.figure!r} is measured (gate {expression!r})",
                f"there are {', '.join(known.values())}; name others with --measure, and {_OVERLAP} needs --against",
            )
        gates.append(gate._replace(figure=name))
    return gates


def _figures_of(system: SystemReport) -> dict[str, float | None]:
    """Return the figures that gates may name in addition to measures; terms only for sparse vectors."""
    figures = vars(system) | ({} if system.terms is None else vars(system.terms))
    return {name: figures.get(name) for name in _OF_SYSTEMS}


def _require_figures(
    gates: Sequence[Gate], measures: Iterable[str], model: System, base: System | None, *, has_sizes: bool
) -> None:
    """Refuse gates on figures that a system will not have, before anything is encoded.

    Raises:
        GateError: there is one.
    """

    def expected(system: System) -> dict[str, Json]:
        terms = TermCounts(0.0, 0.0, 0.0) if system.kind == SPARSE else None
        query_ms = None if system.kind == BM25 else 0.0
        report = SystemReport(system.name, system.kind, "", system.size_bytes, query_ms, 0.0, terms)
        sizes = [_INDEX] if has_sizes and isinstance(system, VectorSystem) else []
        return {**dict.fromkeys((*measures, _OVERLAP, *sizes), 0.0), **_figures_of(report)}

    check_gates(gates, expected(model), expected(base or model))


def _figures(
    measures: Mapping[str, Measure], system: SystemReport, overlap: float | None, sizes: VectorSizes | None = None
) -> dict[str, Json]:
    """Return the figures of a system that gates may name."""
    figures: dict[str, Json] = {name: measure.mean for name, measure in measures.items()}
    figures |= {_OVERLAP: overlap} if overlap is not None else {}
    return figures | _figures_of(system) | ({} if sizes is None else {_INDEX: sizes.index_bytes})


def _figures_of_base(against: SystemComparison, sizes: VectorSizes | None = None) -> dict[str, Json]:
    figures: dict[str, Json] = {name: difference.base for name, difference in against.measures.items()}
    figures |= _figures_of(against.base) | {_OVERLAP: 1.0}
    return figures | ({} if sizes is None else {_INDEX: sizes.index_bytes})


def _check_gates(gates: Sequence[Gate], figures: dict[str, Json], base: dict[str, Json] | None) -> Iterator[GateCheck]:
    for result in check_gates(gates, figures, base):
        yield GateCheck(result.gate.expression, result.met, str(result))


def judge_by_retrieval(model_path: StrPath, data: StrPath, options: EvaluateOptions) -> Judge:
    """Return a judge that evaluates a candidate on the collection in `data`, and rejects it if a gate is met.

    Relative gates refer to the model being optimized, at `model_path`.

    Args:
        model_path: the ONNX file being optimized; its tokenizer is found next to it.
        data: as for `evaluate_model`.
        options: options with at least one gate.

    Raises:
        GateError: there is no gate, or one is malformed.
        InputError: the collection cannot be read.
        OnnxtoolError: the model cannot be used.
    """
    model_path, data = Path(model_path), Path(data)
    if not options.fail_if:
        raise GateError(
            "a collection decides nothing without a condition",
            "pass what is not allowed, such as --fail_if 'ndcg@10<-0.5%'",
        )
    folder = find_checkpoint_folder(ModelFile.open(model_path), options.model_name)
    # Candidates do not lie next to the partner, which they name as the model does.
    name = ModelFile.open(model_path).plain_name(PARTNER_KEY)
    partner = options.partner or (None if name is None else model_path.with_name(name))
    options = replace(options, model_name=str(folder.path), against=str(model_path), partner=partner)
    _, gates, _ = check_evaluation(model_path, data, options)
    if not any(map(needs_base, gates)):  # the input decides nothing
        options = replace(options, against=None)

    def judge(path: Path) -> Judgement:
        report = evaluate_model(path, data, options)
        met = [gate.text for gate in report.gates if gate.met]
        return Judgement({name: measure.mean for name, measure in report.measures.items()}, "; ".join(met))

    return judge
