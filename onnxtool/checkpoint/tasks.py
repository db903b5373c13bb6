"""The table of tasks, and detection of a checkpoint's task.

Task names are the hub's pipeline tags. The hub has none for SPLADE and similar models, nor for ColBERT:
`sparse-encoding` and `late-interaction` are ours.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

TASK_WITH_CACHE = "text-generation-with-past"
LATE_INTERACTION = "late-interaction"
TASK_OF_PICTURES = "image-feature-extraction"
TEXT_TO_TEXT_WITH_CACHE = "text2text-generation-with-past"
# Task of a decoder that scores a pair of texts by one of two answer tokens. Rerankers with labels classify texts.
RANKING = "text-ranking"


@dataclass(frozen=True)
class Task:
    """One task.

    Attributes:
        name: as users type it.
        auto_classes: the transformers classes that pick an architecture for it, in order.
        suffixes: suffixes of architecture names that no auto class knows.
        own_suffixes: suffixes of architectures that serve the task only on request.
    """

    name: str
    auto_classes: tuple[str, ...]
    suffixes: tuple[str, ...] = ()
    own_suffixes: tuple[str, ...] = ()


_PAGE_RETRIEVERS = ("ForRetrieval",)  # page image retrievers, which encode queries too

# The first row with the architecture in its auto classes wins, then the first with a matching suffix; so translation
# precedes fill-mask, which also has BART, and the general `Model` comes last.
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
    Task(LATE_INTERACTION, ("AutoModel",), own_suffixes=_PAGE_RETRIEVERS),
    Task(TASK_OF_PICTURES, ("AutoModel",), own_suffixes=_PAGE_RETRIEVERS),
)
TASK_NAMES = tuple(task.name for task in TASKS)

# Model card tags of sparse encoders.
SPARSE_TAGS = ("splade", "sparse-encoder")


def find_task(name: str) -> Task:
    """Return the row of the task called `name`, which must be one of TASK_NAMES."""
    return next(task for task in TASKS if task.name == name)


def recognize_task(general: str, *, kinds: Collection[str], tags: Collection[str]) -> str:
    """Detect a checkpoint's task.

    Args:
        general: the task of its architecture.
        kinds: kinds of its sentence-transformers modules; empty if there are none.
        tags: tags of the model card, including its pipeline; empty if there is none.

    Returns:
        One of TASK_NAMES, or `other` for an architecture without a known task.
    """
    if general == "fill-mask" and ("SpladePooling" in kinds or set(SPARSE_TAGS).intersection(tags)):
        return "sparse-encoding"
    if general == "feature-extraction" and "Pooling" in kinds:
        return "sentence-similarity"
    if general == "text-generation" and ("LogitScore" in kinds or (not kinds and RANKING in tags)):
        return RANKING
    return general
