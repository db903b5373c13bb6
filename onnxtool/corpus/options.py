"""What a run over a corpus is asked for, and what it says while it goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from onnxtool.corpus.report import OUTPUT_FORMATS, WEIGHTS
from onnxtool.errors import InputError


@dataclass(frozen=True)
class CorpusOptions:
    """How a corpus is encoded.

    Attributes:
        model_name: the checkpoint's folder, or its id on the hub, in place of the files beside the model.
        prompt: the name of one of the checkpoint's prompts, or a text to write before each; empty for none, and
            None for the checkpoint's default.
        provider: `auto`, `cpu` or `cuda`.
        workers: batches that run at once, sharing one session; 0 for one a core, and two on a device.
        threads: intra-op threads of the session; 0 for one, as the workers have the other cores.
        output_format: one of OUTPUT_FORMATS; None for jsonl of a sparse encoder, and npy of an embedder.
        gzip: whether jsonl is compressed.
        contents: whether texts are written beside their vectors; None for yes in jsonl, else no.
        weights: `int` quantizes the weights of terms as Anserini does, `float` leaves them.
        keep_special: whether tokens that frame a text, such as [CLS], may be terms.
        strict: whether a line without a text ends the run.
        shard_size: texts of a file of the output; what a killed run loses at most.
        batch_tokens: the most tokens of a batch, padding included; 0 for what fits the model.
        force: whether an output that exists is removed first, also one of the same command.
    """

    model_name: str | None = None
    prompt: str | None = None
    provider: str = "auto"
    workers: int = 0
    threads: int = 0
    output_format: str | None = None
    gzip: bool = False
    contents: bool | None = None
    weights: str = "int"
    keep_special: bool = False
    strict: bool = False
    shard_size: int = 4096
    batch_tokens: int = 0
    force: bool = False

    def __post_init__(self) -> None:
        for name in ("workers", "threads", "batch_tokens"):
            if getattr(self, name) < 0:
                raise InputError(f"{name} is {getattr(self, name)}", "pass 0 for the default, or more")
        if self.shard_size < 1:
            raise InputError(f"shard_size is {self.shard_size}", "pass at least 1")
        if self.output_format not in (None, *OUTPUT_FORMATS):
            raise InputError(f"unknown output_format {self.output_format!r}", f"use one of {', '.join(OUTPUT_FORMATS)}")
        if self.weights not in WEIGHTS:
            raise InputError(f"unknown weights {self.weights!r}", f"use one of {', '.join(WEIGHTS)}")


@dataclass(frozen=True)
class CorpusProgress:
    """How far a run is.

    Attributes:
        num_texts: encoded so far, by earlier runs as well.
        share: of the input's bytes that are done, from 0 to 1.
        texts_per_s: of this run.
        seconds_left: as far as the share tells; None before anything is encoded.
    """

    num_texts: int
    share: float
    texts_per_s: float
    seconds_left: float | None


OnProgress = Callable[[CorpusProgress], None]
