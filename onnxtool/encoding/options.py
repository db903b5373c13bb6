"""The options of a run over a corpus, and its progress."""

from __future__ import annotations

from typing import Annotated

from onnxtool.checkpoint.vector_types import Calibrated, Dimensions, RangesFile, VectorsAs, check_ranges_options
from onnxtool.infer.options import ModelOptions
from onnxtool.options import UNSET, Force, Option, Options, PathField
from onnxtool.progress import Stage

# Output formats of vectors, and of term weights in them.
OUTPUT_FORMATS = ("jsonl", "parquet", "npy")
WEIGHTS = ("int", "float")

Workers = Annotated[int, Option("Concurrent batches of a corpus; 0: one per core.", minimum=0)]
ENGINES = ("local", "ray")


class VectorOptions(ModelOptions):
    """Options that determine the bytes of an encoded corpus, in addition to those of `ModelOptions`.

    Attributes:
        output_format: one of OUTPUT_FORMATS; None for jsonl with sparse encoders, and npy with embedders.
        contents: whether texts are written with their vectors; None for yes in jsonl, otherwise no.
        weights: `int` quantizes term weights like Anserini, `float` keeps them; None for `float` in parquet, otherwise
            `int`.
        keep_special: whether framing tokens, such as [CLS], may be terms.
        dimensions: number of leading dimensions to keep; None for all.
        vectors_as: the storage type, one of VECTOR_TYPES; None for the model's own type.
        ranges: a file with the range of each number, for int8 and uint8.
        calibration: texts to measure these ranges on, instead of that file.
        shard_size: texts per output file; a killed run loses at most this many.
        split_bytes: target size of a split: part of a larger file, or several smaller files. Compressed files are
            never divided, and Parquet only between row groups.
        batch_tokens: the maximum number of tokens per batch, including padding; 0 to fit the model.
    """

    output_format: Annotated[
        str | None,
        Option(
            "Format of a folder of vectors: jsonl in Anserini's layout, npy (not for sparse encoders), or parquet.",
            choices=OUTPUT_FORMATS,
            default="jsonl for sparse encoders, npy for embedders",
        ),
    ] = None
    contents: Annotated[bool | None, Option("Write the texts with their vectors.", default="in jsonl only")] = None
    weights: Annotated[
        str | None,
        Option(
            "Term weights: int is round(weight / 5 * 256), Anserini's quantization.",
            choices=WEIGHTS,
            default="float in parquet, otherwise int",
        ),
    ] = None
    keep_special: Annotated[bool, Option("Let special tokens such as [CLS] and [SEP] be terms.")] = False
    dimensions: Dimensions = None
    vectors_as: VectorsAs = None
    ranges: RangesFile = UNSET
    calibration: Calibrated = UNSET
    shard_size: Annotated[int, Option("Texts per vector file; a killed run loses at most this many.", minimum=1)] = 4096
    split_bytes: Annotated[
        int, Option("Size in bytes of a piece of the collection that one process encodes.", minimum=1)
    ] = 1 << 24
    batch_tokens: Annotated[
        int, Option("Maximum number of tokens per batch of a corpus; 0: fit to the model.", minimum=0)
    ] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.vectors_as, self.ranges, self.calibration) != (None, None, None):
            check_ranges_options(self.vectors_as, self.ranges, self.calibration)


class CorpusOptions(VectorOptions):
    """Options for encoding a corpus.

    Attributes:
        workers: number of concurrent batches, sharing one session; 0 for one per core, and two on a device.
        strict: whether a line without a text ends the run.
        force: whether to remove an existing output first, even from the same command.
    """

    workers: Workers = 0
    strict: Annotated[
        bool,
        Option(
            "Stop at a line without id or text, and publish nothing if an id is duplicated; by default such lines are "
            "counted and written to NAME.rejects.jsonl."
        ),
    ] = False
    force: Force = False


class CorpusPlaces(Options):
    """The places of a collection's encoding, each of which may be an address in an object store.

    Attributes:
        model_path: the ONNX file.
        corpus: a file or a folder of files.
        output: the folder of vectors.
    """

    model_path: Annotated[PathField, Option("The ONNX file.", is_location=True)]
    corpus: Annotated[
        PathField,
        Option(
            "The collection: a file or a folder of files; for a test collection, its documents are encoded.",
            name="input",
            is_location=True,
        ),
    ]
    output: Annotated[PathField, Option("The folder of vectors.", metavar="NAME/", is_location=True, writes="folder")]


class ProcessOptions(Options):
    """Options for encoding processes.

    Attributes:
        processes: number of processes; 0 for one per eight cores of this machine, or one per node of the cluster.
        workers: number of concurrent batches in each process; 0 for its share of the cores.
    """

    processes: Annotated[
        int,
        Option("Number of encoding processes.", minimum=0, default="one per eight cores, or one per node with Ray"),
    ] = 0
    workers: Annotated[
        int, Option("Concurrent batches in each process.", minimum=0, default="its share of the cores")
    ] = 0


class PartOptions(ProcessOptions):
    """Selection of splits to encode, and process options.

    Attributes:
        part: `2/7` is the second of seven equal parts.
        splits: instead of a part, numbers and ranges of splits, such as `3, 7-12`.
    """

    part: Annotated[
        str | None,
        Option("Encode this part of the splits: 2/7 is the second of seven.", metavar="I/N", default="all splits"),
    ] = None
    splits: Annotated[
        str | None, Option("Encode these splits: numbers and ranges from 0, as merge lists them.", metavar="3,7-12")
    ] = None


class RunOptions(ProcessOptions):
    """Options for encoding a whole corpus with several processes.

    Attributes:
        engine: one of ENGINES.
        strict: whether a duplicate id is an error; otherwise the first text with it is kept.
        force: whether to remove an existing output first, even from the same command.
    """

    engine: Annotated[
        str,
        Option(
            "Where processes run: on this machine, or on the nodes of a Ray cluster.", choices=ENGINES, effect="send"
        ),
    ] = "local"
    strict: Annotated[bool, Option("Publish nothing if an id is duplicated, or a line has no id or text.")] = False
    force: Force = False


class CorpusProgress(Stage):
    """The progress of a run, as received by `onnxtool.progress.listening`.

    Attributes:
        num_texts: number of texts encoded so far, including earlier runs.
        share: fraction of the input's bytes that is done, from 0 to 1.
        texts_per_s: speed of this run.
        seconds_left: estimated from the share; None before anything is encoded.
        tokens_per_s: speed of this run, from whole shards; None if not counted.
        num_rejects: rejected lines of this run, from whole shards.
    """

    FIELDS = ("num_texts", "share", "texts_per_s", "seconds_left", "tokens_per_s", "num_rejects")
    num_texts: int
    share: float
    texts_per_s: float
    seconds_left: float | None
    tokens_per_s: float | None
    num_rejects: int

    __slots__ = FIELDS

    def __new__(
        cls,
        num_texts: int,
        share: float,
        texts_per_s: float,
        seconds_left: float | None,
        tokens_per_s: float | None = None,
        num_rejects: int = 0,
    ) -> CorpusProgress:
        """Write it as text, e.g. `encoding: 128 texts, 31.4 texts/s`."""
        parts = [f"{num_texts} texts", f"{texts_per_s:.1f} texts/s"]
        parts += [f"{tokens_per_s:.0f} tokens/s"] if tokens_per_s else []
        parts += [f"{num_rejects} rejected"] if num_rejects else []
        stage = str.__new__(cls, f"encoding: {', '.join(parts)} ({share:.0%})")
        stage.name, stage.done, stage.total = "encoding", round(share * 1000), 1000
        values = (num_texts, share, texts_per_s, seconds_left, tokens_per_s, num_rejects)
        for name, value in zip(cls.FIELDS, values, strict=True):
            setattr(stage, name, value)
        return stage

    def time_left_s(self, elapsed_s: float) -> float | None:
        """Return `seconds_left`, taking into account that an earlier run may have encoded some of the share."""
        return self.seconds_left
