"""The reports of encoding a corpus."""

from __future__ import annotations

from dataclasses import dataclass, field

from onnxtool.reports import short_repr


@short_repr
@dataclass(frozen=True)
class CorpusReport:
    """Vectors for a collection of texts. Figures are of the whole corpus, also where an earlier run made a part of it.

    Attributes:
        output: the folder of vectors.
        output_format: `jsonl`, `parquet` or `npy`.
        manifest: the file that says what the vectors were made with, and the hash of each shard.
        num_texts: that have a vector.
        num_passages: of these texts, each with a vector, where texts are read as passages; else 0.
        num_encoded: of these, those that this run encoded.
        num_tokens: that the model read, special ones included.
        padding_share: of all that the model read, what was padding; from 0 to 1.
        num_truncated: texts that were longer than the model takes.
        rejects: how many lines gave no text, by the reason.
        rejects_path: the file that names them; empty where there are none.
        files: the files in the folder.
        size_bytes: of these.
        seconds: this run, from the first text to the last file; loading the model comes before.
        texts_per_s: of this run.
        load_ms: from the model's file to a session.
        workers: batches that ran at once.
        threads: intra-op threads of the session.
        peak_rss_bytes: the largest resident set of this process so far.
        vectors_as: what the numbers of vectors are stored as, one of VECTOR_TYPES.
        dimensions: numbers of a vector; of sparse vectors, the terms of the vocabulary.
        resumed: whether an earlier run had begun.
        notes: what a user should know.
    """

    model: str
    provider: str
    task: str
    output: str
    output_format: str
    manifest: str
    num_texts: int
    num_passages: int
    num_encoded: int
    num_tokens: int
    padding_share: float
    num_truncated: int
    rejects: dict[str, int]
    rejects_path: str
    files: tuple[str, ...]
    size_bytes: int
    seconds: float
    texts_per_s: float
    load_ms: float
    workers: int
    threads: int
    peak_rss_bytes: int
    vectors_as: str
    dimensions: int
    resumed: bool
    notes: tuple[str, ...] = ()


@short_repr
@dataclass(frozen=True)
class PartReport:
    """Splits of a corpus that are encoded.

    Attributes:
        splits: numbers and ranges of those that were asked for.
        num_splits: of these.
        num_encoded_splits: that were not done before.
        num_encoded: texts that this run encoded.
        num_deaths: how often a process died and was started again.
        num_left_out: texts that no process could run by themselves, and that will be among the rejected lines.
        seconds: with loading the model.
        texts_per_s: likewise.
        notes: what a user should know.
    """

    output: str
    splits: str
    num_splits: int
    num_encoded_splits: int
    num_encoded: int
    num_deaths: int
    num_left_out: int
    seconds: float
    texts_per_s: float
    notes: tuple[str, ...] = ()


@short_repr
@dataclass(frozen=True)
class MergeReport:
    """Splits that are published as one, or which of them are missing.

    Attributes:
        manifest: the file that says what the vectors are; empty where splits are missing.
        num_removed: files that workers left which were killed or made a shard twice; they were removed.
        to_do: numbers and ranges of splits that are missing or wrong, as `--splits` takes them.
        problems: the same by what is wrong.
        notes: what a user should know.
    """

    output: str
    manifest: str
    num_splits: int
    num_shards: int = 0
    num_texts: int = 0
    num_passages: int = 0
    num_tokens: int = 0
    num_rejects: int = 0
    rejects_path: str = ""
    num_files: int = 0
    size_bytes: int = 0
    num_removed: int = 0
    to_do: str = ""
    problems: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@short_repr
@dataclass(frozen=True)
class RunReport:
    """A whole corpus, encoded by several processes and published.

    Attributes:
        engine: where the processes ran.
        processes: how many there were.
        num_encoded: texts that this run encoded, of `num_texts`.
        num_deaths: how often a process died and was started again.
        num_left_out: texts that no process could run by themselves, and that are among the rejected lines.
        to_do: splits that are wrong in spite of their records, as of MergeReport, with their `problems`.
    """

    output: str
    manifest: str
    engine: str
    processes: int
    num_splits: int
    num_encoded_splits: int
    num_shards: int
    num_texts: int
    num_encoded: int
    num_tokens: int
    num_rejects: int
    rejects_path: str
    num_deaths: int
    num_left_out: int
    size_bytes: int
    seconds: float
    texts_per_s: float
    to_do: str = ""
    problems: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@short_repr
@dataclass(frozen=True)
class StatusReport:
    """How far a corpus is encoded.

    Attributes:
        merged: whether the manifest is written.
        num_done: of `num_splits`.
        num_texts: of the splits that are done.
        share: of the splits, from 0 to 1.
        to_do: numbers and ranges of the others.
        half_written: files of workers that write now, or that were killed; `merge_parts` removes them.
        texts_per_s: of all machines, by the times at which splits were done; None before two of them are.
        seconds_left: at this rate.
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
