"""The report of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from onnxtool.evaluation.measures import Difference, Measure
from onnxtool.reports import short_repr


@short_repr
@dataclass(frozen=True)
class QueryResult:
    """A query and how well it was answered.

    Attributes:
        measures: name to value.
        base: the same of the base; empty where nothing is compared.
        top: the documents that were found first, the best first.
        base_top: those of the base.
    """

    id: str
    text: str
    measures: Mapping[str, float]
    top: tuple[str, ...]
    base: Mapping[str, float] = field(default_factory=dict)
    base_top: tuple[str, ...] = ()


@dataclass(frozen=True)
class Terms:
    """How sparse vectors are.

    Attributes:
        query_terms: weights of a query that are not zero, on average.
        document_terms: those of a document.
        sparsity: the share of the weights of all documents that are zero.
    """

    query_terms: float
    document_terms: float
    sparsity: float


@dataclass(frozen=True)
class SystemReport:
    """What searched the collection.

    Attributes:
        name: the path of the file, the name of the checkpoint, or `bm25`.
        kind: `dense`, `sparse`, `late interaction`, `reranker` or `bm25`.
        similarity: how a query and a document are compared; empty where that is the model's own matter.
        size_bytes: of its file; None where there is none.
        query_ms: the median time in which it reads a query, or a pair, alone; None where no model does.
        seconds: to encode and search all; less where vectors were in the cache.
        terms: of sparse vectors; None of others.
    """

    name: str
    kind: str
    similarity: str
    size_bytes: int | None
    query_ms: float | None
    seconds: float
    terms: Terms | None = None


@short_repr
@dataclass(frozen=True)
class Comparison:
    """How a model differs from its base, over the same queries.

    Attributes:
        base: what it was compared with.
        measures: name to difference.
        overlap_at_10: the share of the base's ten best documents that are among the model's, on average.
        num_equal_top_10: queries whose ten best documents are the same in the same order, but for documents whose
            scores differ by less than one part in 100,000.
        lost: the queries that lost most by the first measure, the worst first.
    """

    base: SystemReport
    measures: Mapping[str, Difference]
    overlap_at_10: float
    num_equal_top_10: int
    lost: tuple[QueryResult, ...]


@dataclass(frozen=True)
class GateCheck:
    """Whether a gate was met, and what it says of that."""

    expression: str
    met: bool
    text: str


@short_repr
@dataclass(frozen=True)
class EvaluationReport:
    """How well a model finds what is relevant.

    Attributes:
        model: what searched.
        data: the folder of the collection, or the dataset on the hub with its commit.
        split: whose judgements count.
        num_documents: that could be found.
        num_queries: that are judged, over which means are taken.
        num_judgements: of these queries.
        num_without_relevant: of these queries, those for which no document is judged relevant; they count as 0.
        num_own_ids_left_out: queries whose rankings leave out the document with the query's own id.
        measures: name to mean, with its interval.
        rejects: lines of the corpus that are no document, by the reason.
        against: the comparison; None where there is none.
        gates: what was checked.
        queries: each judged query.
        peak_rss_bytes: the largest resident set of this process so far.
        run_path: where the run was written; empty where it was not.
        notes: what a user should know.
    """

    model: SystemReport
    data: str
    split: str
    num_documents: int
    num_queries: int
    num_judgements: int
    num_without_relevant: int
    num_own_ids_left_out: int
    measures: Mapping[str, Measure]
    rejects: Mapping[str, int]
    against: Comparison | None
    gates: tuple[GateCheck, ...]
    queries: tuple[QueryResult, ...]
    peak_rss_bytes: int
    run_path: str = ""
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether no gate was met."""
        return not any(gate.met for gate in self.gates)
