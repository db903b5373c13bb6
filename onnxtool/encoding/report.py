"""The reports of encoding a corpus."""

from __future__ import annotations

from dataclasses import dataclass, field

from onnxtool.reports import short_repr


@short_repr
@dataclass(frozen=True)
class MergeReport:
    """Splits published as one corpus, or the missing splits.

    Attributes:
        output: the folder of vectors.
        manifest: the file with the origin of the vectors, and the hash of each shard; empty if splits are missing.
        num_texts: number of texts with a vector.
        num_passages: number of their passages, each with a vector, if texts are read as passages; otherwise 0.
        num_tokens: number of tokens read by the model, including special ones.
        num_truncated: number of texts beyond the model's limit, which were cut.
        num_empty: number of texts, or their passages, without any term.
        rejects_path: the file that lists the lines without a text; empty if there are none.
        size_bytes: total size of the files.
        num_removed: number of removed files, left by workers that were killed or made a shard twice.
        to_do: numbers and ranges of missing or damaged splits, in the form of `--splits`.
        problems: the same, by problem.
        notes: notes for the user.
    """

    output: str
    manifest: str
    num_splits: int
    num_shards: int = 0
    num_texts: int = 0
    num_passages: int = 0
    num_tokens: int = 0
    num_truncated: int = 0
    num_empty: int = 0
    num_rejects: int = 0
    rejects_path: str = ""
    num_files: int = 0
    size_bytes: int = 0
    num_removed: int = 0
    to_do: str = ""
    problems: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@short_repr
@dataclass(frozen=True, kw_only=True)
class CorpusReport(MergeReport):
    """Vectors of a collection of texts. Figures cover the whole corpus, including parts made by earlier runs.

    Attributes:
        output_format: `jsonl`, `parquet` or `npy`.
        num_encoded: number of texts encoded by this run.
        padding_share: fraction of padding in the tokens read, from 0 to 1.
        rejects: number of lines without a text, by reason.
        files: the files in the folder.
        seconds: duration of this run, from the first text to the last file, without loading the model.
        texts_per_s: speed of this run.
        load_ms: time from the model file to a session.
        workers: number of concurrent batches.
        threads: intra-op threads of the session.
        peak_rss_bytes: the largest resident set of this process so far.
        vectors_as: the storage type of vectors, one of VECTOR_TYPES.
        dimensions: numbers per vector; for sparse vectors, the size of the vocabulary.
        resumed: whether the run continued an earlier one.
    """

    model: str
    provider: str
    task: str
    output_format: str
    num_encoded: int
    padding_share: float
    rejects: dict[str, int]
    files: tuple[str, ...]
    seconds: float
    texts_per_s: float
    load_ms: float
    workers: int
    threads: int
    peak_rss_bytes: int
    vectors_as: str
    dimensions: int
    resumed: bool


@short_repr
@dataclass(frozen=True)
class PartReport:
    """Encoded splits of a corpus.

    Attributes:
        splits: numbers and ranges of the requested splits.
        num_splits: their number.
        num_encoded_splits: number of splits that were not done before.
        num_encoded: number of texts encoded by this run.
        seconds: duration, including loading the model.
        texts_per_s: speed of this run.
        notes: notes for the user.
    """

    output: str
    splits: str
    num_splits: int
    num_encoded_splits: int
    num_encoded: int
    seconds: float
    texts_per_s: float
    notes: tuple[str, ...] = ()


@short_repr
@dataclass(frozen=True, kw_only=True)
class RunReport(MergeReport):
    """A whole corpus, encoded by several processes and published.

    Attributes:
        engine: where the processes ran.
        processes: number of processes.
        num_encoded_splits: number of splits that were not done before.
        num_encoded: number of texts encoded by this run, of `num_texts`.
        seconds: duration, including loading the model.
        texts_per_s: speed of this run.
    """

    engine: str
    processes: int
    num_encoded_splits: int
    num_encoded: int
    seconds: float
    texts_per_s: float


@short_repr
@dataclass(frozen=True)
class StatusReport:
    """Encoding progress of a corpus.

    Attributes:
        merged: whether the manifest is written.
        num_done: number of finished splits, of `num_splits`.
        num_texts: number of texts stored so far, in unfinished splits too.
        share: fraction of finished splits, from 0 to 1.
        to_do: numbers and ranges of the other splits.
        half_written: stages of active or killed workers; whoever writes next removes those of killed ones.
        texts_per_s: speed of all machines, from the times of finished splits; None before two are finished.
        seconds_left: remaining time at this rate.
    """

    output: str
    merged: bool
    num_splits: int
    num_done: int
    num_texts: int
    share: float
    to_do: str = ""
    half_written: tuple[str, ...] = ()
    texts_per_s: float | None = None
    seconds_left: float | None = None
