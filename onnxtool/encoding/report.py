"""The report of encoding a corpus."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CorpusReport:
    """Vectors for a collection of texts. Figures are of the whole corpus, also where an earlier run made a part of it.

    Attributes:
        output: the folder of vectors.
        output_format: `jsonl`, `parquet` or `npy`.
        manifest: the file that says what the vectors were made with, and the hash of each shard.
        num_texts: that have a vector.
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
