"""Options of an evaluation, and the names of measures, kinds of models and similarities."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from onnxtool.checkpoint.vector_types import Dimensions
from onnxtool.infer.options import AdapterName, Described, FileTask, ModelName, Overlap, Representation, check_overlap
from onnxtool.options import NOTHING, UNSET, Many, ManyTexts, Option, OptionalName, OptionalPath, Options
from onnxtool.runtime.providers import Provider, ProviderOptions, Threads

DEFAULT_SPLIT = "test"
DEFAULT_CANDIDATES = 100
DEFAULT_MEASURES = ("nDCG@10", "MRR@10", "Recall@100", "MAP")
BM25 = "bm25"
DENSE, SPARSE, LATE_INTERACTION, RERANKER = "dense", "sparse", "late interaction", "reranker"
COSINE, DOT, EUCLIDEAN, MANHATTAN = SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")
MAXSIM, MEANMAXSIM = "maxsim", "meanmaxsim"


class EvaluateOptions(Described, ProviderOptions):
    """Search and measure options of an evaluation.

    Attributes:
        split: the split of the judgements.
        measures: names of measures in ir_measures' notation; also MRR, Recall and MAP.
        against: another ONNX file, or FILE@ADAPTER for it with an adapter, a checkpoint that sentence-transformers runs
            in PyTorch, or `bm25`.
        candidates: a run in TREC format, whose documents a reranker reorders; None for BM25's results.
        depth: number of documents kept per query.
        num_candidates: number of documents per query that a reranker reorders; None for 100.
        keep_own_ids: whether a document with the query's own id is ranked even if it is not judged relevant.
        cache: folder for document vectors; None for the user's cache folder.
        long: whether long documents are truncated (`truncate`) or read in windows, of which the best counts (`window`).
        overlap: number of tokens shared by neighbouring windows; None for a quarter of a window.
        model_name: as in CorpusOptions, like `representation`, `adapter`, `provider`, `workers`, `threads`,
            `dimensions` and `keep_special`.
        task: the file's task as in FileDescription, like `head`, `pooling` and `normalize`; applied to `against` too
            if that is a file without a stamp.
        partner: the file of the other model, if queries and documents have separate models.
        prune: rules that make vectors smaller, each of which is evaluated, for documents or `DOCUMENTS/QUERIES`; with
            `fail_if`, the one with the smallest index is chosen among those that meet no gate.
        fail_if: gates on measures, such as `ndcg@10<0.4`, or `ndcg@10<-0.5%` against the base.
    """

    split: Annotated[str, Option("Split of the judgements: qrels/SPLIT.tsv.")] = DEFAULT_SPLIT
    measures: Annotated[
        Many[str],
        Option(
            "A measure such as nDCG@10, MRR@10, Recall@100, MAP or P@5; may be repeated.",
            name="measure",
            metavar="NAME",
            default=", ".join(DEFAULT_MEASURES),
        ),
    ] = NOTHING
    against: Annotated[
        OptionalName,
        Option(
            "Compare, query by query, with another ONNX file (FILE@NAME: with its adapter), a checkpoint, which "
            f"sentence-transformers runs in PyTorch, or {BM25}.",
            metavar="MODEL_OR_ID",
            is_checkpoint=True,
        ),
    ] = UNSET
    candidates: Annotated[
        OptionalPath,
        Option(
            "A run in TREC format, whose documents a reranker reorders.", default="the results of BM25", metavar="FILE"
        ),
    ] = UNSET
    num_candidates: Annotated[
        int | None,
        Option("Documents per query that a reranker reorders.", minimum=1, maximum=100_000, default="100"),
    ] = None
    depth: Annotated[int, Option("Documents kept per query.", minimum=1, maximum=1_000_000)] = 1000
    keep_own_ids: Annotated[
        bool,
        Option(
            "Also rank a document with the query's own id. By default it is left out, as in BEIR, unless it "
            "is judged relevant for the query."
        ),
    ] = False
    cache: Annotated[
        OptionalPath,
        Option(
            "Folder for document vectors, keyed by the contents of model and corpus; a stopped run resumes there.",
            default="~/.cache/onnxtool/evaluate",
            metavar="DIR",
            writes="folder",
        ),
    ] = UNSET
    model_name: ModelName = UNSET
    task: FileTask = None
    partner: Annotated[
        OptionalPath,
        Option(
            "For a checkpoint with separate models for queries and documents, the ONNX file of the other one.",
            default="the file named in the model",
        ),
    ] = UNSET
    representation: Representation = None
    adapter: AdapterName = None
    long: Annotated[
        str,
        Option(
            "Handling of documents beyond the model's limit: truncate, or read as passages, the best of which counts.",
            choices=("truncate", "window"),
        ),
    ] = "truncate"
    overlap: Overlap = None
    provider: Provider = "auto"
    workers: Annotated[int, Option("Concurrent batches of documents; 0: one per core.", minimum=0)] = 0
    threads: Threads = 0
    dimensions: Dimensions = None
    keep_special: Annotated[bool, Option("Let special tokens such as [CLS] and [SEP] be terms.")] = False
    prune: Annotated[
        ManyTexts,
        Option(
            "Also evaluate with smaller vectors of documents, by each of these rules of infer --prune; behind a slash "
            "is the rule for queries. With --fail_if, the smallest index that passes is chosen. May be repeated.",
            metavar="RULE:NUMBER,...",
        ),
    ] = NOTHING
    fail_if: Annotated[
        Many[str],
        Option(
            "Exit with 1 if a measure meets a condition such as 'ndcg@10<0.4', or against a base 'ndcg@10<-0.5%'; may "
            "be "
            "repeated.",
            metavar="EXPR",
        ),
    ] = NOTHING

    def __post_init__(self) -> None:
        super().__post_init__()
        check_overlap(self.long, self.overlap)

    @property
    def cache_folder(self) -> Path:
        """The folder for vectors."""
        if self.cache is not None:
            return self.cache
        home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        return Path(home).expanduser() / "onnxtool" / "evaluate"


class DriftOptions(Options):
    """Options of a measurement of drift.

    Attributes:
        texts: a file of texts; None for documents of `data`.
        data: a collection with judgements, as for `evaluate_model`; None for the vectors alone.
        fail_if: gates on figures and measures, such as `neighbours_kept<0.95` or `ndcg@10<-1%`.
        cache: as in EvaluateOptions.
        provider: as in EvaluateOptions.
    """

    texts: OptionalPath = UNSET
    data: OptionalPath = UNSET
    fail_if: Many[str] = NOTHING
    cache: OptionalPath = UNSET
    provider: Provider = "auto"
