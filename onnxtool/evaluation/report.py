"""The report of an evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from onnxtool.evaluation.measures import Measure, MeasureDifference
from onnxtool.reports import short_repr


@short_repr
@dataclass(frozen=True)
class QueryResult:
    """A query with its measures and top results.

    Attributes:
        measures: values by name.
        base: the base's values; empty without a comparison.
        top: the top documents, best first.
        base_top: the base's top documents.
    """

    id: str
    text: str
    measures: Mapping[str, float]
    top: tuple[str, ...]
    base: Mapping[str, float] = field(default_factory=dict)
    base_top: tuple[str, ...] = ()


@dataclass(frozen=True)
class TermCounts:
    """Sparsity of vectors.

    Attributes:
        query_terms: average number of nonzero weights per query.
        document_terms: average number of nonzero weights per document.
        sparsity: fraction of zero weights over all documents.
    """

    query_terms: float
    document_terms: float
    sparsity: float


@dataclass(frozen=True)
class SystemReport:
    """A system that searched the collection.

    Attributes:
        name: the path of the file, the name of the checkpoint, or `bm25`.
        kind: `dense`, `sparse`, `late interaction`, `reranker` or `bm25`.
        similarity: the similarity function of queries and documents; empty if the model computes it.
        size_bytes: size of its file; None if there is none.
        query_ms: median time to encode a single query, or score a single pair; None without a model.
        seconds: time to encode and search everything; less if vectors were cached.
        terms: sparsity of sparse vectors; None for others.
    """

    name: str
    kind: str
    similarity: str
    size_bytes: int | None
    query_ms: float | None
    seconds: float
    terms: TermCounts | None = None


@short_repr
@dataclass(frozen=True)
class SystemComparison:
    """Comparison of a model with its base, over the same queries.

    Attributes:
        base: the base system.
        measures: differences by name.
        overlap_at_10: average fraction of the base's top ten documents that are also in the model's.
        num_equal_top_10: number of queries with the same top ten documents in the same order, except for documents
            whose scores differ by less than one part in 100,000.
        lost: the queries with the largest losses in the first measure, worst first.
    """

    base: SystemReport
    measures: Mapping[str, MeasureDifference]
    overlap_at_10: float
    num_equal_top_10: int
    lost: tuple[QueryResult, ...]


@dataclass(frozen=True)
class GateCheck:
    """Whether a gate was met, with its message."""

    expression: str
    met: bool
    text: str


@dataclass(frozen=True)
class VectorSizes:
    """The sizes of the vectors of a collection.

    Attributes:
        query_terms: average number of terms of a query; of token vectors in late interaction.
        document_terms: average number of terms, or token vectors, of a document, or of its passage.
        empty_queries: number of queries without any.
        empty_documents: number of documents, or passages, without any.
        index_bytes: size of an index of the documents: 8 bytes for each term of each document and 8 for each term, or 4
            for each number of token vectors and 8 for each document.
    """

    query_terms: float
    document_terms: float
    empty_queries: int
    empty_documents: int
    index_bytes: int


@short_repr
@dataclass(frozen=True)
class PrunedResult:
    """Retrieval quality with smaller vectors.

    Attributes:
        prune: the rules for documents and queries, as in `--prune`; `none` for the vectors as they are.
        measures: means with their intervals, by name.
        changes: the differences from the vectors as they are, by name; empty for these.
        gates: the checked gates; empty for these.
        chosen: whether its index is the smallest of those for which no gate is met.
    """

    prune: str
    sizes: VectorSizes
    measures: Mapping[str, Measure]
    changes: Mapping[str, MeasureDifference]
    gates: tuple[GateCheck, ...] = ()
    chosen: bool = False


@short_repr
@dataclass(frozen=True)
class EvaluationReport:
    """The retrieval quality of a model.

    Attributes:
        model: the system that searched.
        data: the folder of the collection.
        split: the split of the judgements.
        num_documents: number of searchable documents.
        num_queries: number of judged queries, over which means are taken.
        num_judgements: number of judgements of these queries.
        num_without_relevant: number of these queries without a relevant document; they count as 0.
        num_own_ids_left_out: number of queries whose rankings leave out the document with the query's own id.
        measures: means with their intervals, by name.
        rejects: number of corpus lines that are not documents, by reason.
        against: the comparison; None without a base.
        gates: the checked gates.
        queries: the judged queries.
        peak_rss_bytes: the largest resident set of this process so far.
        run_path: path of the written run; empty if not written.
        notes: notes for the user.
        pruned: retrieval quality with the vectors as they are, and with smaller ones; empty if no rule was given.
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
    against: SystemComparison | None
    gates: tuple[GateCheck, ...]
    queries: tuple[QueryResult, ...]
    peak_rss_bytes: int
    run_path: str = ""
    notes: tuple[str, ...] = ()
    pruned: tuple[PrunedResult, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether no gate was met."""
        return not any(gate.met for gate in self.gates)
