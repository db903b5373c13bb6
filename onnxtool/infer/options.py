"""Options of `onnxtool infer`, of generation, and options shared with benchmarks and corpora."""

from __future__ import annotations

from os import PathLike
from typing import Annotated

from onnxtool.checkpoint.tasks import LATE_INTERACTION, RANKING
from onnxtool.checkpoint.vector_types import Prune
from onnxtool.errors import OptionError
from onnxtool.options import (
    NOTHING,
    UNSET,
    Many,
    ManyPaths,
    ManyTexts,
    Option,
    OptionalName,
    OptionalPath,
    Options,
    PathField,
)
from onnxtool.runtime.providers import Provider, ProviderOptions, Threads

LONG_TEXTS = ("truncate", "window", "fail")
TEXT_TASKS = ("query", "document")
# Tasks for describing a file, as stamped by an export, and the heads of `export` with their tasks.
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
        default="the files next to the model",
        metavar="ID_OR_DIR",
        is_checkpoint=True,
    ),
]
Prompt = Annotated[
    str | None,
    Option(
        "Prompt before each text: the name of one of the checkpoint's prompts, or the prompt itself; '' for none.",
        default="as the checkpoint says",
    ),
]
TextTask = Annotated[str | None, Option(choices=TEXT_TASKS)]
AnyTask = Annotated[
    str | None,
    Option(
        "Read texts as queries or documents (query, document), with the checkpoint's prompt and length of that name, "
        f"and the tokens that count for it. Or the task of a file from another exporter: {', '.join(FILE_TASKS)}.",
        choices=(*TEXT_TASKS, *FILE_TASKS),
        metavar="TASK",
        default="document for late interaction, otherwise neither; onnxtool's own files state their task",
    ),
]
FileTask = Annotated[
    str | None,
    Option(
        f"Task of a file from another exporter: {', '.join(FILE_TASKS)}.",
        choices=FILE_TASKS,
        metavar="TASK",
        default="stated in the file, or deduced from its outputs",
    ),
]
FileHead = Annotated[
    str | None,
    Option(
        "How to interpret the outputs of a file from another exporter: like the export head of that name.",
        choices=tuple(FILE_HEADS),
        default="as --task says",
    ),
]
FilePooling = Annotated[
    str | None,
    Option(
        "Pooling of a file that returns token states; max or sum for the logits of a sparse encoder.",
        choices=POOLING,
        default="as in the checkpoint's modules.json",
    ),
]
Normalized = Annotated[
    bool | None,
    Option(
        "Scale embeddings of a file from another exporter to length 1.",
        name="normalize",
        default="as in the checkpoint's modules.json",
    ),
]
Representation = Annotated[
    str | None,
    Option(
        "For an M3 embedder (bge-m3): one vector per text, term weights, or one vector per token.",
        choices=("dense", "sparse", "colbert"),
        default="dense",
    ),
]
AdapterName = Annotated[
    str | None,
    Option(
        "Run with this adapter, one of those that the file was exported with.", metavar="NAME", default="the base alone"
    ),
]
Long = Annotated[
    str | None,
    Option(
        "Handling of texts beyond the model's limit: truncate, read in windows, or refuse. In a folder of "
        "vectors, each window is a separate passage, ID#0, ID#1 and so on.",
        choices=LONG_TEXTS,
        default="window for questions, otherwise truncate",
    ),
]
LongText = Annotated[str, Option(choices=LONG_TEXTS)]
Overlap = Annotated[
    int | None, Option("Tokens that neighbouring windows share.", minimum=0, default="a quarter of a window")
]


class Described(Options, kw_only=True):
    """Options that describe an ONNX file without a stamp, in addition to a class's `task`.

    Attributes:
        head: the interpretation of the outputs, one of FILE_HEADS.
        pooling: the pooling of token states to a vector, or of token logits to term weights; one of POOLING.
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
        """The texts' task, `query` or `document`; None for neither."""
        task: str | None = getattr(self, "task", None)
        return task if task in TEXT_TASKS else None

    @property
    def description(self) -> FileDescription:
        """The description of the file."""
        task: str | None = getattr(self, "task", None)
        task = task if task in FILE_TASKS else None
        return FileDescription(task=task, head=self.head, pooling=self.pooling, normalize=self.normalize)


class FileDescription(Described, kw_only=True):
    """A user's description of an ONNX file without a stamp, such as files from other exporters.

    Attributes:
        task: the file's task, one of FILE_TASKS; None for the task of `head`, or the file's own.
    """

    task: FileTask = None

    @property
    def purpose(self) -> str | None:
        """The task that the file states, or its head's."""
        return self.task or (None if self.head is None else FILE_HEADS[self.head])

    @property
    def as_head(self) -> str | None:
        """The head, or the task's head; None if neither is given."""
        return self.head or next((head for head, task in FILE_HEADS.items() if task == self.task), None)

    @property
    def given(self) -> dict[str, str]:
        """The options given, among `--task`, `--head`, `--pooling` and `--normalize`, as written."""
        named = (("task", self.task), ("head", self.head), ("pooling", self.pooling))
        scaled = {} if self.normalize is None else {"--normalize": f"--{'' if self.normalize else 'no_'}normalize"}
        return {f"--{name}": f"--{name} {value}" for name, value in named if value is not None} | scaled


class ModelOptions(Described, ProviderOptions, kw_only=True):
    """Options that answers and corpora share: the model's checkpoint, the reading of texts, and the provider.

    Attributes:
        model_name: the checkpoint's folder or hub id, instead of the files next to the model.
        prompt: the name of one of the checkpoint's prompts, or a text to write before each; empty for none; None for
            the task's prompt, or the checkpoint's default.
        task: the texts' task, `query` or `document`; None for documents in late interaction, otherwise neither. Or the
            file's task, one of FILE_TASKS, as in FileDescription, like `head`, `pooling` and `normalize`.
        representation: for an M3 embedder, `dense`, `sparse` or `colbert`; None for dense, and for other models.
        adapter: the name of one of the file's adapters; None for the base.
        long: handling of texts beyond the model's limit, one of LONG_TEXTS; None for the default of the model's task.
        overlap: number of tokens shared by neighbouring windows; None for a quarter of the model's limit.
        prune: a rule of `parse_pruning` that makes vectors smaller; None for none.
        provider: `auto`, or a provider as of `ExecutionProvider.parse`.
        threads: intra-op threads; 0 for one per core, or for one if batches run concurrently.
    """

    model_name: ModelName = UNSET
    prompt: Prompt = None
    task: AnyTask = None
    representation: Representation = None
    adapter: AdapterName = None
    long: Long = None
    overlap: Overlap = None
    prune: Prune = None
    provider: Provider = "auto"
    threads: Threads = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_overlap(self.long, self.overlap)

    @property
    def given_for_texts(self) -> list[str]:
        """The options given that are only for texts, as written; `--prompt` may be for the query of images."""
        values = {
            "--task": self.text_task,
            "--representation": self.representation,
            "--adapter": self.adapter,
            "--long": self.long,
            "--overlap": self.overlap,
            "--prune": self.prune,
        }
        return [*(name for name, value in values.items() if value is not None), *self.description.given.values()]


class InferOptions(ModelOptions):
    """Options of `infer`, in addition to those of `ModelOptions`.

    Attributes:
        model_path: the ONNX file.
        texts: texts to run.
        images: image files to run, for an image model.
        query: paired with every text; for images, the text to rank them for.
        text_model: the ONNX file of the other side of a dual encoder, which encodes the query for images.
        input_path: a file of further texts, the folder of a test collection, or a folder or list of images.
        top_k: the maximum number of candidates per text; None for the task's default.
    """

    model_path: Annotated[PathField, Option("The ONNX file.", is_location=True)]
    texts: Annotated[ManyTexts, Option("A text to run; may be repeated.", name="text")] = NOTHING
    images: Annotated[ManyPaths, Option("An image to run, for an image model; may be repeated.", name="image")] = (
        NOTHING
    )
    query: Annotated[
        str | None,
        Option(
            "Paired with every text: a query to rank texts for, a question to answer from them, or a premise. "
            "With --image, the text to rank images for."
        ),
    ] = None
    text_model: Annotated[
        OptionalPath, Option("The ONNX file that encodes --query if --model_path encodes images.")
    ] = UNSET
    input_path: Annotated[
        OptionalPath,
        Option(
            "A file of texts: .txt, or .jsonl with id, contents and, for pairs, query on each line, optionally .gz; - "
            "is stdin. For the folder of a test collection, its documents. For an image model, a folder of images, "
            "or a file with a path, or id and image, on each line.",
            name="input",
            is_location=True,
        ),
    ] = UNSET
    top_k: Annotated[
        int | None,
        Option(
            "Candidates per text; for text generation, the tokens to sample from.",
            minimum=1,
            default="10 terms or tokens, 3 answers, all labels",
        ),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("texts", "images"):
            if isinstance(value := getattr(self, name), str | PathLike):
                object.__setattr__(self, name, (value,))


def check_overlap(long: str | None, overlap: int | None) -> None:
    """Refuse an overlap without windows.

    Raises:
        OptionError: there are none.
    """
    if overlap is not None and long != "window":
        raise OptionError("no windows to share tokens", "pass --long window, or leave out --overlap")


DECODINGS = ("greedy", "sample")
_CHECKPOINT = "as the checkpoint says"


class GenerateOptions(Options):
    """Settings that override generation_config.json. None keeps the checkpoint's value.

    Attributes:
        max_new_tokens: the maximum number of tokens generated per text.
        decoding: `greedy` for the best token each time, `sample` for a random one.
        num_beams: number of beams, of which the most likely is returned; 1 for no beam search.
        temperature: divisor of the scores before sampling.
        top_p: sample from the most likely tokens with this total probability.
        top_k: sample from this many of the most likely tokens; 0 for all.
        repetition_penalty: divisor of the scores of tokens that already occur.
        no_repeat_ngram_size: n-grams of this size are not repeated; 0 for no such rule.
        stop: texts that end an answer, and are not part of it.
        chat: whether each text is a user message for the tokenizer's chat template; a prompt is the system message.
        seed: random seed for sampling; answers do not depend on the other texts.
    """

    max_new_tokens: Annotated[
        int | None,
        Option(
            "Generate at most this many tokens after each text.",
            minimum=1,
            default=f"{_CHECKPOINT}; without it, a decoder lists candidates for the next token",
        ),
    ] = None
    decoding: Annotated[
        str | None,
        Option("Take the best token each time, or sample one.", choices=DECODINGS, default=_CHECKPOINT),
    ] = None
    num_beams: Annotated[
        int | None,
        Option(
            "Number of beams; the most likely answer is returned.",
            minimum=1,
            default=f"{_CHECKPOINT}; 1 with --decoding",
        ),
    ] = None
    temperature: Annotated[
        float | None,
        Option("Divide scores by this before sampling a token.", minimum=0, is_open=True, default=_CHECKPOINT),
    ] = None
    top_p: Annotated[
        float | None,
        Option(
            "Sample from the most likely tokens with this total probability.", minimum=0, maximum=1, default=_CHECKPOINT
        ),
    ] = None
    top_k: Annotated[int | None, Option(minimum=0)] = None
    repetition_penalty: Annotated[
        float | None,
        Option("Divide scores of tokens that already occur by this.", minimum=0, is_open=True, default=_CHECKPOINT),
    ] = None
    no_repeat_ngram_size: Annotated[
        int | None, Option("Do not repeat n-grams of this size.", minimum=0, default=_CHECKPOINT)
    ] = None
    stop: Annotated[Many[str], Option("A text that ends generation; may be repeated.")] = NOTHING
    chat: Annotated[
        bool,
        Option("Apply the checkpoint's chat template to each text as a user message; --prompt is the system message."),
    ] = False
    seed: Annotated[int, Option("Random seed for sampling.", minimum=0)] = 0

    @property
    def asks_for_text(self) -> bool:
        """Whether any option is set that needs a generative model."""
        return self != GenerateOptions(top_k=self.top_k)
