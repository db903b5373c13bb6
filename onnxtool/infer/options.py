"""What `onnxtool infer` is asked for, and the options that it shares with benchmarks and corpora."""

from __future__ import annotations

from os import PathLike
from typing import Annotated

from onnxtool.checkpoint.tasks import LATE_INTERACTION, RANKING
from onnxtool.errors import OptionError
from onnxtool.options import (
    NOTHING,
    UNSET,
    ManyPaths,
    ManyTexts,
    Option,
    OptionalName,
    OptionalPath,
    Options,
    PathField,
)
from onnxtool.runtime.bounds import Threads
from onnxtool.runtime.providers import Provider

LONG_TEXTS = ("truncate", "window", "fail")
TEXT_TASKS = ("query", "document")
# What a file may be said to be for, as the stamp of an export says it, and the heads of `export` with what each is for.
FILE_TASKS = (
    *("sentence-similarity", "sparse-encoding", LATE_INTERACTION, RANKING, "text-classification"),
    *("token-classification", "question-answering", "fill-mask", "feature-extraction", "text-generation"),
)
FILE_HEADS = {
    "embedding": "sentence-similarity",
    "splade": "sparse-encoding",
    LATE_INTERACTION: LATE_INTERACTION,
    "reranker": RANKING,
}
# The modes of the tables in `checkpoint.pooling_modes` and `sparse_modules`, which need numpy.
POOLING = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken", "sum")

ModelName = Annotated[
    OptionalName,
    Option(
        "Folder or hub id with tokenizer.json.",
        default="the files beside the model",
        metavar="ID_OR_DIR",
        is_checkpoint=True,
    ),
]
Prompt = Annotated[
    str | None,
    Option(
        "Written before each text: the name of one of the checkpoint's prompts, or the prompt itself; '' for none.",
        default="as the checkpoint says",
    ),
]
TextTask = Annotated[str | None, Option(choices=TEXT_TASKS)]
AnyTask = Annotated[
    str | None,
    Option(
        "Read texts as queries or as documents (query, document): with the prompt of that name, and the length and the "
        f"tokens that count of the checkpoint. Or what a file of another exporter is for: {', '.join(FILE_TASKS)}.",
        choices=(*TEXT_TASKS, *FILE_TASKS),
        metavar="TASK",
        default="document for late interaction, else neither; files of onnxtool say what they are for",
    ),
]
FileTask = Annotated[
    str | None,
    Option(
        f"What a file of another exporter is for: {', '.join(FILE_TASKS)}.",
        choices=FILE_TASKS,
        metavar="TASK",
        default="as the file says, or its outputs tell",
    ),
]
FileHead = Annotated[
    str | None,
    Option(
        "How the outputs of a file of another exporter are read, as the head of that name of export.",
        choices=tuple(FILE_HEADS),
        default="as --task says",
    ),
]
FilePooling = Annotated[
    str | None,
    Option(
        "How a file that gives a state for each token is pooled; max or sum of the logits of a sparse encoder.",
        choices=POOLING,
        default="as modules.json of the checkpoint says",
    ),
]
Normalized = Annotated[
    bool | None,
    Option(
        "Scale embeddings that a file of another exporter gives to length 1.",
        name="normalize",
        default="as modules.json of the checkpoint says",
    ),
]
Representation = Annotated[
    str | None,
    Option(
        "Of an M3 embedder (bge-m3): a vector for each text, weights of its terms, or a vector for each token.",
        choices=("dense", "sparse", "colbert"),
        default="dense",
    ),
]
Long = Annotated[
    str | None,
    Option(
        "What happens to texts that are longer than the model takes: cut, read in windows, or refused. In a folder of "
        "vectors, a window is a passage of its own, ID#0, ID#1 and so on.",
        choices=LONG_TEXTS,
        default="window for questions, else truncate",
    ),
]
LongText = Annotated[str, Option(choices=LONG_TEXTS)]
Overlap = Annotated[
    int | None, Option("Tokens that neighbouring windows share.", minimum=0, default="a quarter of a window")
]


class Described(Options, kw_only=True):
    """Options that say of an ONNX file what it does not say itself, beside a `task` of the class that has them.

    Attributes:
        head: how the outputs of the file are read, one of FILE_HEADS.
        pooling: how the states of tokens become a vector, or the logits of tokens weights of terms; one of POOLING.
        normalize: whether vectors are scaled to length 1.
    """

    head: FileHead = None
    pooling: FilePooling = None
    normalize: Normalized = None

    def __post_init__(self) -> None:
        super().__post_init__()
        purpose = None if self.head is None else FILE_HEADS[self.head]
        task: str | None = getattr(self, "task", None)
        if purpose is not None and task in FILE_TASKS and task != purpose:
            raise OptionError(
                f"--head {self.head} is for {purpose}, and --task {task} was passed", "leave one of them out"
            )

    @property
    def text_task(self) -> str | None:
        """What the texts are for, `query` or `document`; None for neither."""
        task: str | None = getattr(self, "task", None)
        return task if task in TEXT_TASKS else None

    @property
    def description(self) -> FileDescription:
        """What was said of the file."""
        task: str | None = getattr(self, "task", None)
        task = task if task in FILE_TASKS else None
        return FileDescription(task=task, head=self.head, pooling=self.pooling, normalize=self.normalize)


class FileDescription(Described, kw_only=True):
    """What a user says of an ONNX file that does not say it itself, as files of other exporters do not.

    Attributes:
        task: what the file is for, one of FILE_TASKS; None for what `head` is for, or what the file says.
    """

    task: FileTask = None

    @property
    def purpose(self) -> str | None:
        """What the file is for, which is the task, or that of the head."""
        return self.task or (None if self.head is None else FILE_HEADS[self.head])

    @property
    def as_head(self) -> str | None:
        """The head, or the one that is for the task; None where neither says one."""
        return self.head or next((head for head, task in FILE_HEADS.items() if task == self.task), None)

    @property
    def given(self) -> dict[str, str]:
        """What was said, by `--task`, `--head`, `--pooling` or `--normalize`, and how it was written."""
        named = (("task", self.task), ("head", self.head), ("pooling", self.pooling))
        scaled = {} if self.normalize is None else {"--normalize": f"--{'' if self.normalize else 'no_'}normalize"}
        return {f"--{name}": f"--{name} {value}" for name, value in named if value is not None} | scaled


class InferOptions(Described):
    """What to run, and how.

    Attributes:
        model_path: the ONNX file.
        model_name: the checkpoint's folder, or its id on the hub, in place of the files beside the model.
        texts: texts to run.
        images: picture files to run, for a model of pictures.
        query: makes a pair with every text; what pictures are ranked for.
        text_model: the ONNX file of the other side of a dual encoder, which encodes the query for pictures.
        input_path: a file of further texts, the folder of a test collection, or a folder or list of pictures.
        prompt: the name of one of the checkpoint's prompts, or a text to write before each; None for that of the task,
            or for the default.
        task: what the texts are for, `query` or `document`; None for neither. Or one of FILE_TASKS, as of
            FileDescription, and so are `head`, `pooling` and `normalize`.
        representation: of an M3 embedder, `dense`, `sparse` or `colbert`; None for dense, and for other models.
        long: what happens to long texts, one of LONG_TEXTS; None for what suits the task.
        overlap: tokens that neighbouring windows share; None for a quarter of a window.
        top_k: the most candidates of a text; None for what suits the task.
        provider: `auto`, `cpu` or `cuda`.
        threads: intra-op threads; 0 for one per core.
    """

    model_path: Annotated[PathField, Option("The ONNX file.", is_location=True)]
    model_name: ModelName = UNSET
    texts: Annotated[ManyTexts, Option("A text to run; may be given several times.", name="text")] = NOTHING
    images: Annotated[
        ManyPaths, Option("A picture to run, of a model of pictures; may be given several times.", name="image")
    ] = NOTHING
    query: Annotated[
        str | None,
        Option(
            "Makes a pair with every text: a query to rank texts for, a question to answer from them, or a premise. "
            "With --image, what to rank pictures for."
        ),
    ] = None
    text_model: Annotated[
        OptionalPath, Option("The ONNX file that encodes --query, where --model_path encodes pictures.")
    ] = UNSET
    input_path: Annotated[
        OptionalPath,
        Option(
            "A file of texts: .txt, or .jsonl with id, contents and, for pairs, query on each line, also with .gz; - "
            "is stdin. Of the folder of a test collection, its documents. For a model of pictures, a folder of them, "
            "or a file with a path, or id and image, on each line.",
            name="input",
            is_location=True,
        ),
    ] = UNSET
    prompt: Prompt = None
    task: AnyTask = None
    representation: Representation = None
    long: Long = None
    overlap: Overlap = None
    top_k: Annotated[
        int | None,
        Option(
            "Candidates for each text; of what is written, the tokens to draw from.",
            minimum=1,
            default="10 terms or tokens, 3 answers, all labels",
        ),
    ] = None
    provider: Provider = "auto"
    threads: Threads = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("texts", "images"):
            if isinstance(one := getattr(self, name), str | PathLike):
                object.__setattr__(self, name, (one,))
        check_overlap(self.long, self.overlap)


def check_overlap(long: str | None, overlap: int | None) -> None:
    """Refuse tokens that windows share where there are no windows.

    Raises:
        OptionError: there are none.
    """
    if overlap is not None and long != "window":
        raise OptionError("no windows to share tokens", "pass --long window, or leave out --overlap")
