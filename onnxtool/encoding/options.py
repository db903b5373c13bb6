"""The options of a run over a corpus, and its progress."""

from __future__ import annotations

from typing import Annotated

from onnxtool.checkpoint.vector_types import Calibrated, Dimensions, RangesFile, VectorsAs, check_ranges_options
from onnxtool.infer.options import (
    AnyTask,
    Described,
    Long,
    ModelName,
    Overlap,
    Prompt,
    Representation,
    check_overlap,
)
from onnxtool.options import UNSET, Force, Option, Options
from onnxtool.progress import Stage
from onnxtool.runtime.bounds import Threads
from onnxtool.runtime.providers import Provider

# What vectors are written as, and the weights of terms in them.
OUTPUT_FORMATS = ("jsonl", "parquet", "npy")
WEIGHTS = ("int", "float")

MemoryLimit = Annotated[
    int, Option("Megabytes that a process may allocate; a text that needs more is rejected. 0: all.", minimum=0)
]
Workers = Annotated[int, Option("Batches of a corpus that run at once; 0: one per core.", minimum=0)]
ENGINES = ("local", "ray")


class VectorOptions(Described):
    """What the bytes of an encoded corpus depend on.

    Attributes:
        model_name: the checkpoint's folder, or its id on the hub, in place of the files beside the model.
        prompt: the name of one of the checkpoint's prompts, or a text to write before each; empty for none, and
            None for the checkpoint's default.
        task: what the texts are for, `query` or `document`; None for documents of late interaction, else neither. Or
            what the file is for, as of FileDescription, and so are `head`, `pooling` and `normalize`.
        representation: of an M3 embedder, `dense`, `sparse` or `colbert`; None for dense, and for other models.
        long: what becomes of texts that are longer than the model takes: they are cut (`truncate`, as for None), read
            as passages that each have an id and a vector (`window`), or rejected (`fail`).
        overlap: tokens that neighbouring passages share; None for a quarter of what the model takes.
        provider: `auto`, `cpu` or `cuda`.
        threads: intra-op threads of the session; 0 for one, as the workers have the other cores.
        output_format: one of OUTPUT_FORMATS; None for jsonl of a sparse encoder, and npy of an embedder.
        gzip: whether jsonl is compressed.
        contents: whether texts are written beside their vectors; None for yes in jsonl, else no.
        weights: `int` quantizes the weights of terms as Anserini does, `float` leaves them; None for `float` in
            parquet, else `int`.
        keep_special: whether tokens that frame a text, such as [CLS], may be terms.
        dimensions: how many numbers of an embedding are kept, its first; None for all.
        vectors_as: what these numbers are stored as, one of VECTOR_TYPES; None for as the model gives them.
        ranges: a file with the range of each number, for int8 and uint8.
        calibration: texts to measure these ranges on, in place of that file.
        shard_size: texts of a file of the output; what a killed run loses at most.
        split_bytes: what a corpus is split by: a part of a file of so many bytes, or smaller files in a row. A packed
            file is never cut, and Parquet between its row groups.
        batch_tokens: the most tokens of a batch, padding included; 0 for what fits the model.
    """

    model_name: ModelName = UNSET
    prompt: Prompt = None
    task: AnyTask = None
    representation: Representation = None
    long: Long = None
    overlap: Overlap = None
    provider: Provider = "auto"
    threads: Threads = 0
    output_format: Annotated[
        str | None,
        Option(
            "Of a folder of vectors: jsonl as Anserini reads it, npy (not of sparse encoders), or parquet.",
            choices=OUTPUT_FORMATS,
            default="jsonl of sparse encoders, npy of embedders",
        ),
    ] = None
    gzip: Annotated[bool, Option("Compress jsonl.")] = False
    contents: Annotated[bool | None, Option("Write the texts beside their vectors.", default="in jsonl only")] = None
    weights: Annotated[
        str | None,
        Option(
            "Weights of terms: int is round(weight / 5 * 256), as Anserini counts them.",
            choices=WEIGHTS,
            default="float in parquet, else int",
        ),
    ] = None
    keep_special: Annotated[bool, Option("Let special tokens such as [CLS] and [SEP] be terms.")] = False
    dimensions: Dimensions = None
    vectors_as: VectorsAs = None
    ranges: RangesFile = UNSET
    calibration: Calibrated = UNSET
    shard_size: Annotated[int, Option("Texts per file of vectors, the most that a killed run loses.", minimum=1)] = 4096
    split_bytes: Annotated[
        int, Option("Bytes of a piece of the collection that a process encodes by itself.", minimum=1)
    ] = 1 << 24
    batch_tokens: Annotated[
        int, Option("The most tokens of a batch of a corpus; 0: what fits the model.", minimum=0)
    ] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_overlap(self.long, self.overlap)
        check_ranges_options(self.vectors_as, self.ranges, self.calibration)


class CorpusOptions(VectorOptions):
    """How a corpus is encoded.

    Attributes:
        workers: batches that run at once, sharing one session; 0 for one a core, and two on a device.
        strict: whether a line without a text ends the run.
        force: whether an output that exists is removed first, also one of the same command.
    """

    workers: Workers = 0
    strict: Annotated[
        bool,
        Option(
            "Stop at a line without id or text, and publish nothing where an id occurs twice; else such lines are "
            "counted and written to NAME.rejects.jsonl."
        ),
    ] = False
    force: Force = False


class ProcessOptions(Options):
    """How many processes encode.

    Attributes:
        processes: how many; 0 for one for each eight cores of this machine, or for each node of the cluster.
        workers: batches that run at once in each of them; 0 for its share of the cores.
        memory_limit: megabytes that a process may allocate, from which on a text is rejected; 0 for no limit.
    """

    processes: Annotated[
        int,
        Option("Processes that encode.", minimum=0, default="one for each eight cores, of Ray one for each node"),
    ] = 0
    workers: Annotated[
        int, Option("Batches that run at once in each process.", minimum=0, default="its share of the cores")
    ] = 0
    memory_limit: MemoryLimit = 0


class PartOptions(ProcessOptions):
    """Which splits of a corpus are encoded, and by how many processes.

    Attributes:
        part: `2/7` is the second of seven parts, which are equal; `slurm` and `kubernetes` read it from the variables
            of an array of jobs.
        splits: instead of it, numbers and ranges of splits, such as `3, 7-12`.
    """

    part: Annotated[
        str | None,
        Option(
            "Encode this part of the splits: 2/7 is the second of seven; slurm and kubernetes read it from the "
            "variables of an array of jobs.",
            metavar="I/N",
            default="all splits",
        ),
    ] = None
    splits: Annotated[
        str | None, Option("Encode these splits: numbers and ranges from 0, as merge lists them.", metavar="3,7-12")
    ] = None


class RunOptions(ProcessOptions):
    """Where a whole corpus is encoded, and by how many processes.

    Attributes:
        engine: one of ENGINES.
        strict: whether an id that occurs twice is an error; else the first text with it is kept.
        force: whether an output that exists is removed first, also one of the same command.
    """

    engine: Annotated[
        str, Option("Where processes run: on this machine, or on the nodes of a Ray cluster.", choices=ENGINES)
    ] = "local"
    strict: Annotated[bool, Option("Publish nothing where an id occurs twice, or a line has no id or text.")] = False
    force: Force = False


class CorpusProgress(Stage):
    """How far a run is, as `onnxtool.progress.listening` receives it.

    Attributes:
        num_texts: encoded so far, by earlier runs as well.
        share: of the input's bytes that are done, from 0 to 1.
        texts_per_s: of this run.
        seconds_left: as far as the share tells; None before anything is encoded.
        tokens_per_s: of this run, of whole shards; None where nobody counts them.
        num_rejects: of this run, of whole shards.
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
        """Return `seconds_left`: an earlier run may have encoded some of the share."""
        return self.seconds_left

    def figures(self) -> dict[str, float | None]:
        """Return the fields by name."""
        return {name: getattr(self, name) for name in self.FIELDS}
