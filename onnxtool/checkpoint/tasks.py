"""What checkpoints are for: a table of tasks, and how a checkpoint tells its own.

Task names are the pipeline tags of the hub, which has none for SPLADE and similar models, nor for ColBERT:
`sparse-encoding` and `late-interaction` are ours.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

TASK_WITH_CACHE = "text-generation-with-past"
LATE_INTERACTION = "late-interaction"
TASK_OF_PICTURES = "image-feature-extraction"
TEXT_TO_TEXT_WITH_CACHE = "text2text-generation-with-past"
# Of a decoder that scores a pair of texts, whose answer is one of two tokens. Rerankers of labels classify texts.
RANKING = "text-ranking"


@dataclass(frozen=True)
class Task:
    """One task.

    Attributes:
        name: as users type it.
        auto_classes: the transformers classes that pick an architecture for it, in order.
        suffixes: how the names of its architectures end, for those that no auto class knows.
        own_suffixes: likewise, of those that serve it where a user asks for it.
    """

    name: str
    auto_classes: tuple[str, ...]
    suffixes: tuple[str, ...] = ()
    own_suffixes: tuple[str, ...] = ()


_OF_PAGES = ("ForRetrieval",)  # of retrievers of pages as pictures, which encode queries as well

# The first row that has an architecture in its auto classes wins, then the first whose suffix fits its name; so
# translation comes before fill-mask, which has BART as well, and the general `Model` last.
TASKS: tuple[Task, ...] = (
    Task("text2text-generation", ("AutoModelForSeq2SeqLM",)),
    Task(TEXT_TO_TEXT_WITH_CACHE, ("AutoModelForSeq2SeqLM",)),
    Task("fill-mask", ("AutoModelForMaskedLM",), ("ForMaskedLM",)),
    Task("sparse-encoding", ("AutoModelForMaskedLM",)),
    Task("text-classification", ("AutoModelForSequenceClassification",), ("ForSequenceClassification",)),
    Task("token-classification", ("AutoModelForTokenClassification",), ("ForTokenClassification",)),
    Task("question-answering", ("AutoModelForQuestionAnswering",), ("ForQuestionAnswering",)),
    Task("text-generation", ("AutoModelForCausalLM",), ("ForCausalLM", "LMHeadModel")),
    Task(TASK_WITH_CACHE, ("AutoModelForCausalLM",)),
    Task(RANKING, ("AutoModelForCausalLM",)),
    Task("image-classification", ("AutoModelForImageClassification",), ("ForImageClassification",)),
    Task("object-detection", ("AutoModelForObjectDetection",), ("ForObjectDetection",)),
    Task("image-segmentation", ("AutoModelForSemanticSegmentation",), ("ForSemanticSegmentation",)),
    Task("depth-estimation", ("AutoModelForDepthEstimation",), ("ForDepthEstimation",)),
    Task("zero-shot-image-classification", ("AutoModelForZeroShotImageClassification",)),
    Task("automatic-speech-recognition", ("AutoModelForCTC", "AutoModelForSpeechSeq2Seq"), ("ForCTC",)),
    Task("audio-classification", ("AutoModelForAudioClassification",)),
    Task("feature-extraction", ("AutoModel", "AutoModelForTextEncoding"), ("Model",)),
    Task("sentence-similarity", ("AutoModel",)),
    Task(LATE_INTERACTION, ("AutoModel",), own_suffixes=_OF_PAGES),
    Task(TASK_OF_PICTURES, ("AutoModel",), own_suffixes=_OF_PAGES),
)
TASK_NAMES = tuple(task.name for task in TASKS)

# The tags by which model cards of sparse encoders are found.
SPARSE_TAGS = ("splade", "sparse-encoder")


def find_task(name: str) -> Task:
    """Return the row of the task called `name`, which must be one of TASK_NAMES."""
    return next(task for task in TASKS if task.name == name)


def recognize_task(general: str, *, kinds: Collection[str], tags: Collection[str]) -> str:
    """Tell what a checkpoint is for.

    Args:
        general: the task of its architecture.
        kinds: those of sentence-transformers' modules; empty where there are none.
        tags: those of the model card, its pipeline among them; empty where there is none.

    Returns:
        One of TASK_NAMES, or `other` for an architecture of no known task.
    """
    if general == "fill-mask" and ("SpladePooling" in kinds or set(SPARSE_TAGS).intersection(tags)):
        return "sparse-encoding"
    if general == "feature-extraction" and "Pooling" in kinds:
        return "sentence-similarity"
    if general == "text-generation" and ("LogitScore" in kinds or (not kinds and RANKING in tags)):
        return RANKING
    return general
