"""What a user may ask of an evaluation, and the names of measures, kinds of models and similarities."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from onnxtool.checkpoint.vector_types import Dimensions
from onnxtool.infer.options import Described, FileTask, ModelName, Overlap, Representation, check_overlap
from onnxtool.options import NOTHING, UNSET, Many, Option, OptionalName, OptionalPath
from onnxtool.runtime.bounds import Threads
from onnxtool.runtime.providers import Provider

DEFAULT_SPLIT = "test"
DEFAULT_MEASURES = ("nDCG@10", "MRR@10", "Recall@100", "MAP")
BM25 = "bm25"
DENSE, SPARSE, LATE_INTERACTION, RERANKER = "dense", "sparse", "late interaction", "reranker"
COSINE, DOT, EUCLIDEAN, MANHATTAN = SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")
MAXSIM, MEANMAXSIM = "maxsim", "meanmaxsim"


class EvaluateOptions(Described):
    """How a collection is searched, and what is computed of it.

    Attributes:
        split: whose judgements count.
        measures: names of measures, as ir_measures writes them; MRR, Recall and MAP as well.
        against: another ONNX file, a checkpoint that sentence-transformers runs in PyTorch, or `bm25`.
        candidates: a run in TREC's format, whose documents a reranker orders; None for those that BM25 finds.
        depth: how many documents are kept for a query.
        num_candidates: how many documents of a query a reranker orders.
        keep_own_ids: whether a document with the query's own id is ranked even if it is not judged relevant.
        cache: where the vectors of documents are kept; None for a folder of the user.
        long: whether long documents are cut (`truncate`), or read in windows, of which the best one counts (`window`).
        overlap: tokens that neighbouring windows share; None for a quarter of a window.
        model_name: as in CorpusOptions, and so are `representation`, `provider`, `workers`, `threads`, `dimensions`
            and `keep_special`.
        task: what the file is for, as of FileDescription, and so are `head`, `pooling` and `normalize`; of `against` as
            well, where that is a file without a stamp.
        partner: the file of the other model, where queries and documents are encoded by one each.
        fail_if: gates on measures, such as `ndcg@10<0.4`, or `ndcg@10<-0.5%` against the base.
    """

    split: Annotated[str, Option("Whose judgements count: qrels/SPLIT.tsv.")] = DEFAULT_SPLIT
    measures: Annotated[
        Many[str],
        Option(
            "A measure such as nDCG@10, MRR@10, Recall@100, MAP or P@5; may be given several times.",
            name="measure",
            metavar="NAME",
            default=", ".join(DEFAULT_MEASURES),
        ),
    ] = NOTHING
    against: Annotated[
        OptionalName,
        Option(
            "What to compare with, query by query: another ONNX file, a checkpoint, which sentence-transformers runs "
            f"in PyTorch, or {BM25}.",
            metavar="MODEL_OR_ID",
            is_checkpoint=True,
        ),
    ] = UNSET
    candidates: Annotated[
        OptionalPath,
        Option("A run in TREC's format, whose documents a reranker orders.", default="what BM25 finds", metavar="FILE"),
    ] = UNSET
    num_candidates: Annotated[
        int, Option("Documents of a query that a reranker orders.", minimum=1, maximum=100_000)
    ] = 100
    depth: Annotated[int, Option("Documents that are kept for a query.", minimum=1, maximum=1_000_000)] = 1000
    keep_own_ids: Annotated[
        bool,
        Option(
            "Rank a document that has the query's own id as well. By default it is left out, as BEIR does, unless it "
            "is judged relevant for the query."
        ),
    ] = False
    cache: Annotated[
        OptionalPath,
        Option(
            "Where vectors of documents are kept, by the contents of model and corpus; a stopped run goes on there.",
            default="~/.cache/onnxtool/evaluate",
            metavar="DIR",
        ),
    ] = UNSET
    model_name: ModelName = UNSET
    task: FileTask = None
    partner: Annotated[
        OptionalPath,
        Option(
            "Of a checkpoint that encodes queries and documents by different models, the ONNX file of the other one.",
            default="the file that the model names",
        ),
    ] = UNSET
    representation: Representation = None
    long: Annotated[
        str,
        Option(
            "Documents that are longer than the model takes: cut, or read as passages, of which the best one counts.",
            choices=("truncate", "window"),
        ),
    ] = "truncate"
    overlap: Overlap = None
    provider: Provider = "auto"
    workers: Annotated[int, Option("Batches of documents that run at once; 0: one per core.", minimum=0)] = 0
    threads: Threads = 0
    dimensions: Dimensions = None
    keep_special: Annotated[bool, Option("Let special tokens such as [CLS] and [SEP] be terms.")] = False
    fail_if: Annotated[
        Many[str],
        Option(
            "Exit 1 if a measure meets a condition such as 'ndcg@10<0.4', or against a base 'ndcg@10<-0.5%'; may be "
            "given several times.",
            metavar="EXPR",
        ),
    ] = NOTHING

    def __post_init__(self) -> None:
        super().__post_init__()
        check_overlap(self.long, self.overlap)

    @property
    def cache_folder(self) -> Path:
        """Where vectors are kept."""
        if self.cache is not None:
            return self.cache
        home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        return Path(home).expanduser() / "onnxtool" / "evaluate"
