"""The report of encoding a corpus."""

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
class PlanReport:
    """What a corpus is split into.

    Attributes:
        plan: its file.
        output: the folder that the vectors go to.
        num_shards: pieces of the corpus that are encoded for themselves.
        num_texts: that they have together.
        rejects: how many lines gave no text, by the reason.
        size_bytes: of the plan.
        seconds: from loading the model to the file.
        notes: what a user should know.
    """

    plan: str
    output: str
    num_shards: int
    num_texts: int
    rejects: dict[str, int]
    size_bytes: int
    seconds: float
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class PartReport:
    """Shards of a plan that are encoded.

    Attributes:
        shards: numbers and ranges of those that were asked for.
        num_shards: of these.
        num_encoded_shards: that were not done before.
        num_texts: of all that were asked for.
        num_encoded: texts that this run read.
        num_deaths: how often the worker died and was started again.
        num_left_out: texts that it could not run by themselves, and that will be among the rejected lines.
        num_deaths: how often the worker died and was started again.
        num_left_out: texts that it could not run by themselves, and that will be among the rejected lines.
        seconds: with loading the model.
        texts_per_s: likewise.
    """

    plan: str
    output: str
    shards: str
    num_shards: int
    num_encoded_shards: int
    num_texts: int
    num_encoded: int
    num_deaths: int
    num_left_out: int
    seconds: float
    texts_per_s: float


@short_repr
@dataclass(frozen=True)
class MergeReport:
    """Shards that are published as one, or which of them are missing.

    Attributes:
        manifest: the file that says what the vectors are; empty where shards are missing.
        num_removed: files that workers left which were killed or made a shard twice; they were removed.
        to_do: numbers and ranges of shards that are missing or wrong, as `--shards` takes them.
        problems: the same by what is wrong.
        notes: what a user should know.
    """

    plan: str
    output: str
    manifest: str
    num_shards: int
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
    """All shards of a plan, encoded by workers and published.

    Attributes:
        engine: where the workers ran.
        workers: how many there were; 0 where nothing was left to do.
        num_encoded: texts that this run read, of `num_texts`.
        num_deaths: how often a worker died and was started again.
        num_left_out: texts that no worker could run by themselves, and that are among the rejected lines.
        to_do: shards that are wrong in spite of their records, as of MergeReport, with their `problems`.
    """

    plan: str
    output: str
    manifest: str
    engine: str
    workers: int
    num_shards: int
    num_encoded_shards: int
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
    """How far a plan is encoded.

    Attributes:
        merged: whether the manifest is written.
        num_done: of `num_shards`.
        to_do: numbers and ranges of the others.
        half_written: files of workers that write now, or that were killed; `merge_parts` removes them.
        num_encoded: of `num_texts`.
        share: of the texts, from 0 to 1.
        texts_per_s: of all machines, by the times at which shards were done; None before two of them are.
        seconds_left: at this rate.
    """

    plan: str
    output: str
    merged: bool
    num_shards: int
    num_done: int
    to_do: str
    half_written: tuple[str, ...]
    num_texts: int
    num_encoded: int
    share: float
    texts_per_s: float | None
    seconds_left: float | None
