"""Systems that search a collection: an ONNX encoder, whose document vectors are cached, an ONNX reranker, or BM25.

All of them read the same documents, skipping lines without a text or with a repeated id.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from onnxtool.checkpoint.text_files import TextInput
from onnxtool.encoding import CorpusOptions, encode_corpus
from onnxtool.encoding.manifest import file_sha256
from onnxtool.encoding.reading import Shard, by_document, read_shards
from onnxtool.encoding.sources import Document, find_sources
from onnxtool.errors import NO_SPACE, InputError, OutputExistsError, OutputWriteError, imported
from onnxtool.evaluation.collection import Collection, read_documents, read_run
from onnxtool.evaluation.options import (
    BM25,
    COSINE,
    DEFAULT_CANDIDATES,
    DENSE,
    DOT,
    LATE_INTERACTION,
    MAXSIM,
    MEANMAXSIM,
    RERANKER,
    SIMILARITIES,
    SPARSE,
    EvaluateOptions,
)
from onnxtool.evaluation.pruning import PrunedSearch, PruningRules
from onnxtool.evaluation.report import TermCounts, VectorSizes
from onnxtool.evaluation.search import Best, Run, require_different
from onnxtool.infer.chats import LongTexts
from onnxtool.infer.heads.head import VectorHead
from onnxtool.infer.heads.token_vectors import TokensOfTexts
from onnxtool.infer.loading import LoadedModel, load
from onnxtool.infer.static_queries import QUERY
from onnxtool.infer.vectors import SparseVectors, concatenated
from onnxtool.model_file import ModelFile
from onnxtool.progress import Stage, tell

_TEXTS_AT_A_TIME = 256
SHARD_TEXTS = 1024  # texts that a killed run loses, and that are in memory at once


@dataclass(frozen=True)
class SearchResults:
    """The results of a system.

    Attributes:
        run: the documents of each query.
        num_documents: number of searchable documents.
        unknown: judged documents that are not among them.
        own: queries whose id is also the id of a document.
        left_out: queries in `own` whose rankings do not contain that document.
        rejects: lines of the corpus that are not documents, by reason.
        terms: sparsity of the vectors; None if they are not sparse.
        sizes: how large the vectors are; None without vectors.
    """

    run: Run
    num_documents: int
    unknown: frozenset[str]
    own: frozenset[str]
    left_out: frozenset[str]
    rejects: dict[str, int]
    terms: TermCounts | None = None
    sizes: VectorSizes | None = None


class System(ABC):
    """A system that searches a collection.

    Attributes:
        name: the name given by the user.
        kind: `dense`, `sparse`, `late interaction`, `reranker` or `bm25`.
        similarity: the similarity function of queries and documents; empty if the model computes it.
        size_bytes: size of its file; None if there is none.
        note: a note for the user on how it read the documents; may be empty.
        reading_notes: notes on the interpretation of a file without a stamp, as in LoadedModel, or on guessed pooling.
    """

    name: str
    kind: str
    similarity: str = ""
    size_bytes: int | None = None
    note: str = ""
    reading_notes: tuple[str, ...] = ()

    @abstractmethod
    def retrieve(self, collection: Collection) -> SearchResults:
        """Search the collection for all of its queries."""

    @abstractmethod
    def run_query(self, text: str) -> None:
        """Process a query up to the search, for timing."""


class VectorSystem(System):
    """Compare query vectors with the vectors of all documents."""

    def __init__(self, options: EvaluateOptions) -> None:
        self._options = options

    @abstractmethod
    def encode_queries(self, texts: Sequence[str]) -> Any:
        """Return the vectors of texts as queries."""

    @abstractmethod
    def shards(self, collection: Collection, rejects: Counter[str]) -> Iterator[Shard]:
        """Yield the vectors of all documents."""

    def run_query(self, text: str) -> None:
        """Encode one query, to time it."""
        self.encode_queries([text])

    def retrieve(self, collection: Collection) -> SearchResults:
        """Encode the documents, then the queries, and search."""
        return self.retrieve_each(collection, [PruningRules()])[0]

    def require(self, cut: PruningRules) -> None:
        """Refuse to make vectors smaller by rules that are not for them.

        Raises:
            InputError: one is not.
        """
        raise InputError(
            f"--prune {cut.name} is for an ONNX file of a sparse or late-interaction encoder",
            "pass such a file, or leave --prune out",
        )

    def retrieve_each(self, collection: Collection, cuts: Sequence[PruningRules]) -> list[SearchResults]:
        """Encode once, and search with the vectors as each of `cuts` makes them smaller."""
        rejects: Counter[str] = Counter()
        shards = self.shards(collection, rejects)
        first = next(shards, None)  # encodes all of them, if that is done at once
        parts: list[Any] = []
        texts = list(collection.queries.values())
        for start in range(0, len(texts), _TEXTS_AT_A_TIME):
            tell(Stage("encoding queries", start, len(texts)))
            parts.append(self.encode_queries(texts[start : start + _TEXTS_AT_A_TIME]))
        tell("searching")
        queries = concatenated(parts)
        names, ids = list(collection.queries), list[str]()
        depth = self._options.depth + 1  # one extra, because the document with the query's own id may be dropped
        searches = [PrunedSearch(cut, names, queries, similarity=self.similarity, depth=depth) for cut in cuts]
        for shard in () if first is None else chain([first], shards):
            for search in searches:
                search.add(shard)
            ids += shard.ids
        require_different(ids)
        results = []
        for search in searches:
            result = _found(collection, self._options, search.found(), ids, rejects)
            if isinstance(queries, SparseVectors) and ids:
                result = replace(result, terms=_terms(queries, search.sizes))
            results.append(replace(result, sizes=search.sizes))
        return results


class Reranking(System):
    """Reorder documents found by another system."""

    kind = RERANKER

    def __init__(self, options: EvaluateOptions) -> None:
        self._options = options
        self._num_cut = 0  # pairs so far

    @abstractmethod
    def scores(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        """Return the relevance of the second text to the first in each pair."""

    def run_query(self, text: str) -> None:
        """Score a pair."""
        self.scores([(text, text)])

    def retrieve(self, collection: Collection) -> SearchResults:
        """Score the candidates of each query.

        Raises:
            InputError: the run with the candidates cannot be read, or has none of the queries or documents.
        """
        options = self._options
        candidates = first_stage(collection, options)
        wanted = {document for documents in candidates.run.values() for document in documents}
        texts = {entry.id: entry.contents for entry in read_documents(collection) if entry.id in wanted}
        pairs = [
            (query, document)
            for query, documents in candidates.run.items()
            for document in documents
            if document in texts
        ]
        if not pairs:
            raise InputError(
                f"{options.candidates or BM25} has no document of {collection.corpus} for a query",
                "pass a run of this collection to --candidates",
            )
        run: Run = {query: {} for query in collection.queries}
        for start in range(0, len(pairs), _TEXTS_AT_A_TIME):
            tell(Stage("scoring pairs", start, len(pairs)))
            part = pairs[start : start + _TEXTS_AT_A_TIME]
            scores = self.scores([(collection.queries[query], texts[document]) for query, document in part])
            for (query, document), score in zip(part, scores, strict=True):
                run[query][document] = score
        counts = (
            (len(wanted - texts.keys()), "candidates are not among the documents, and are left out"),
            (self._num_cut, "pairs are longer than the model takes, and cut; --long window reads each whole"),
        )
        self.note = "; ".join(f"{count} {text}" for count, text in counts if count)
        return replace(candidates, run={query: _ordered(documents) for query, documents in run.items()})


class Bm25(System):
    """BM25 from bm25s, Lucene's variant: English stop words are removed, and words are not stemmed."""

    name = kind = BM25

    def __init__(self, options: EvaluateOptions) -> None:
        """Load the library, before another system encodes anything.

        Raises:
            InputError: bm25s is not installed.
        """
        self._options = options
        self._library = imported("bm25s", "BM25 needs bm25s", "pip install 'onnxtool-cli[evaluate]'")

    def retrieve(self, collection: Collection) -> SearchResults:
        """Index the documents and search them.

        Raises:
            InputError: no document has a word.
        """
        bm25s = self._library
        rejects: Counter[str] = Counter()
        tell("indexing for BM25")
        ids, texts = [], []
        for document in read_documents(collection, rejects):
            ids.append(document.id)
            texts.append(document.contents)
        quiet: dict[str, Any] = {"show_progress": False}
        words = bm25s.tokenize(texts, stopwords="en", **quiet)
        if not words.vocab:
            raise InputError(f"{collection.corpus} has no document with a word", "BM25 needs words of letters")
        index = bm25s.BM25(method="lucene")
        index.index(words, **quiet)
        tell("searching with BM25")
        query_words = bm25s.tokenize(list(collection.queries.values()), stopwords="en", return_ids=False, **quiet)
        run: Run = {}
        for query, tokens in zip(collection.queries, query_words, strict=True):
            scores = index.get_scores(tokens) if any(token in words.vocab for token in tokens) else None
            best = Best(self._options.depth + 1)
            if scores is not None:
                best.add(np.where(scores > 0, scores, -np.inf), ids)
            run[query] = best.ordered()
        return _found(collection, self._options, run, ids, rejects)

    def run_query(self, text: str) -> None:
        """Do nothing: no model reads the query."""


def first_stage(collection: Collection, options: EvaluateOptions) -> SearchResults:
    """Return the candidates of a reranker: from a given run, otherwise from BM25.

    Raises:
        InputError: the run cannot be read, or has none of the queries.
    """
    options = replace(options, depth=options.num_candidates or DEFAULT_CANDIDATES)
    if options.candidates is None:
        return Bm25(options).retrieve(collection)
    candidates = read_run(options.candidates)
    if not candidates.keys() & collection.queries.keys():
        raise InputError(f"{options.candidates} has none of the queries of {collection.name}", "compare their ids")
    rejects: Counter[str] = Counter()
    ids = [document.id for document in read_documents(collection, rejects)]
    run = {query: _ordered(candidates.get(query, {})) for query in collection.queries}
    return _found(collection, options, run, ids, rejects)


def _found(
    collection: Collection, options: EvaluateOptions, run: Run, ids: Sequence[str], rejects: Counter[str]
) -> SearchResults:
    """Drop documents with the query's own id, and keep the best `options.depth` of the others.

    A query that is also a document finds itself first, which says nothing about the model. BEIR drops such documents
    from every ranking; here they are kept if judged relevant, because ideal rankings then contain them.

    Args:
        collection: the collection.
        options: the options of the evaluation.
        run: up to `options.depth` + 1 documents per query, from best to worst.
        ids: ids of all documents.
        rejects: lines of the corpus that are not documents.
    """
    judged = frozenset(document for grades in collection.judgements.values() for document in grades)
    own = frozenset(collection.queries.keys() & set(ids))
    left_out = frozenset(query for query in own if not options.keep_own_ids and query not in collection.relevant[query])
    for query, documents in run.items():
        kept = (entry for entry in documents.items() if entry[0] != query or query not in left_out)
        run[query] = dict(islice(kept, options.depth))
    return SearchResults(run, len(ids), judged.difference(ids), own, left_out, dict(sorted(rejects.items())))


def grouped(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Yield documents in groups that are encoded at once."""
    while part := list(islice(documents, SHARD_TEXTS)):
        yield part


def _ordered(documents: Mapping[str, float]) -> dict[str, float]:
    """Order documents from best to worst; among equals, the last id in sort order comes first."""
    return dict(sorted(documents.items(), key=lambda entry: (entry[1], entry[0]), reverse=True))


def _terms(queries: SparseVectors, sizes: VectorSizes) -> TermCounts:
    """Return the sparsity of Q queries, and of documents or passages."""
    return TermCounts(sizes.query_terms, sizes.document_terms, 1 - sizes.document_terms / len(queries.vocabulary))


def _named(path: Path, options: EvaluateOptions) -> str:
    return str(path) if options.adapter is None else f"{path}@{options.adapter}"


class OnnxVectors(VectorSystem):
    """An ONNX file that returns vectors. Document vectors are cached."""

    def __init__(self, path: Path, model: LoadedModel, options: EvaluateOptions) -> None:
        super().__init__(options)
        self.name, self.size_bytes = _named(path, options), ModelFile.open(path).size_bytes
        self._model = model
        self._documents = model.of_task("document")
        self._path = self._documents.session.model.path
        self.kind = SPARSE if model.is_sparse else LATE_INTERACTION if model.is_late_interaction else DENSE
        self.similarity = _similarity(model)
        head = model.head
        self.reading_notes = (
            *model.reading_notes,
            *([head.note] if isinstance(head, VectorHead) and head.note else ()),
        )

    def require(self, cut: PruningRules) -> None:
        """Refuse to make vectors smaller by rules that are not for them, or in a graph that does so itself."""
        for task, rule in (("document", cut.documents), (QUERY, cut.queries)):
            self._model.of_task(task).pruning_for(rule or None, task)

    def encode_queries(self, texts: Sequence[str]) -> Any:
        """Return vectors of texts, with the checkpoint's prompt and limit for queries."""
        return self._model.encode(
            texts, task=QUERY, dimensions=self._options.dimensions, keep_special=self._options.keep_special
        )

    @property
    def options(self) -> EvaluateOptions:
        """The options that were passed."""
        return self._options

    def encode_documents(self, texts: Sequence[str]) -> Any:
        """Return vectors of texts, with the checkpoint's prompt and limit for documents."""
        return self._documents.encode(texts, task="document")

    def shards(self, collection: Collection, rejects: Counter[str]) -> Iterator[Shard]:
        """Yield vectors of documents, encoding those that are not cached."""
        options, is_partner = self._options, self._documents is not self._model
        says_itself = self._documents.session.model.stated_task != ""
        corpus_options = CorpusOptions(
            model_name=None if is_partner and self._documents.folder.route is None else options.model_name,
            task="document",
            head=None if says_itself else options.description.as_head,
            pooling=options.pooling,
            normalize=options.normalize,
            representation=options.representation,
            adapter=options.adapter,
            long=options.long,
            overlap=options.overlap,
            provider=options.provider,
            workers=options.workers,
            threads=options.threads,
            dimensions=options.dimensions,
            keep_special=options.keep_special and self.kind == SPARSE,
            output_format="parquet" if self.kind == SPARSE else "npy",
            contents=False,
            shard_size=SHARD_TEXTS,
        )
        folder = options.cache_folder / self._key(collection, corpus_options)
        try:
            try:
                report = encode_corpus(self._path, collection.corpus, folder, corpus_options)
            except OutputExistsError:  # of another version of something
                again = replace(corpus_options, force=True)
                report = encode_corpus(self._path, collection.corpus, folder, again)
        except (OutputExistsError, OutputWriteError) as error:
            is_full = isinstance(error.__cause__, OSError) and error.__cause__.errno in NO_SPACE
            way = ", or wait for the run that writes there" if isinstance(error, OutputExistsError) else ""
            raise type(error)(
                error.message, f"pass another --cache{', or make room there' if is_full else way}"
            ) from error
        rejects.update(report.rejects)
        if report.num_passages:
            self.note = f"documents are read as {report.num_passages} passages, of which the best one counts"
        elif report.num_truncated:
            num_long = report.num_truncated
            self.note = f"{num_long} documents are longer than the model takes, and cut; --long window reads each whole"
        try:
            for shard in read_shards(folder, self._documents.tokenizer.vocabulary):
                yield by_document(shard) if options.long == "window" else shard
        except InputError as error:
            raise InputError(error.message, f"remove {folder}, or pass another --cache") from error

    def _key(self, collection: Collection, options: CorpusOptions) -> str:
        """Name the folder of vectors after the contents of their inputs."""
        model = ModelFile.open(self._path)
        files = model.files
        sources, _ = find_sources(collection.corpus)
        tell("reading the collection")
        stated = {
            "model": [file_sha256(path) for path in files],
            "corpus": [(source.name, file_sha256(source.path)) for source in sources],
            "checkpoint": str(self._documents.folder.path.resolve()),
            **{name: str(value) for name, value in vars(options).items() if name != "workers"},
        }
        digest = hashlib.sha256(json.dumps(stated, sort_keys=True).encode()).hexdigest()
        return f"{self._path.stem[:60]}-{digest[:16]}"


class OnnxReranker(Reranking):
    """An ONNX file that scores pairs of a query and a document."""

    def __init__(self, path: Path, model: LoadedModel, options: EvaluateOptions) -> None:
        super().__init__(options)
        self.name, self.size_bytes = _named(path, options), ModelFile.open(path).size_bytes
        self._model, self.reading_notes = model, model.reading_notes

    def scores(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        """Return the score of each pair."""
        texts = [TextInput(document, query=query) for query, document in pairs]
        long = LongTexts(self._options.long, self._options.overlap)
        answers = self._model.answer(texts, long=long).answers
        self._num_cut += sum(answer.truncated for answer in answers)
        return [answer.candidates[0].score for answer in answers]


def open_model(path: Path, options: EvaluateOptions) -> System:
    """Load an ONNX file that searches.

    Raises:
        OnnxtoolError: it cannot be loaded, or returns neither vectors nor scores of pairs.
    """
    LongTexts(options.long, options.overlap)  # refuses an overlap without windows before anything is encoded
    tell(f"loading {path}")
    model = load(
        path,
        model_name=options.model_name,
        description=options.description,
        provider=options.provider,
        threads=options.threads,
        representation=options.representation,
        adapter=options.adapter,
        partner_path=options.partner,
    )
    if options.candidates is not None and model.head.kind != "scores":
        raise InputError(
            f"--candidates is for rerankers, and {path} is for {model.task}", "leave it out: all documents are searched"
        )
    if model.gives_vectors:
        return OnnxVectors(path, model, options)
    if model.head.kind == "scores":
        return OnnxReranker(path, model, options)
    raise InputError(
        f"{path} is for {model.task}, and neither gives vectors nor scores pairs of a query and a document",
        f"{model.hint_of_vectors}, or evaluate a model for late interaction or ranking",
    )


def _similarity(model: LoadedModel) -> str:
    """Return the similarity function stated in the checkpoint.

    Raises:
        InputError: it names an unknown one.
    """
    head = model.head
    if isinstance(head, TokensOfTexts):
        return MEANMAXSIM if head.is_mean else MAXSIM
    stated = model.folder.sentence_modules.encoder.get("similarity_fn_name")
    if stated is None:
        return DOT if model.is_sparse else COSINE
    if stated not in SIMILARITIES or (model.is_sparse and stated != DOT):
        raise InputError(
            f"the checkpoint compares vectors by {stated!r}",
            f"it is one of {', '.join(SIMILARITIES)}, or for terms dot",
        )
    return str(stated)
