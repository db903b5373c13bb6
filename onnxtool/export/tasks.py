"""What checkpoints are for: a table of tasks, and how a checkpoint tells its own.

Task names are the hub's pipeline tags; `sparse-encoding` (SPLADE and its kin), for which the hub has none, is ours.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """One task.

    Attributes:
        name: as users type it.
        auto_class: the transformers class that picks an architecture for it.
        suffixes: how the names of its architectures end.
    """

    name: str
    auto_class: str
    suffixes: tuple[str, ...]


# The first row whose suffix fits an architecture's name wins, so the general `Model` stands last.
TASKS: tuple[Task, ...] = (
    Task("fill-mask", "AutoModelForMaskedLM", ("ForMaskedLM",)),
    Task("sparse-encoding", "AutoModelForMaskedLM", ()),
    Task("text-classification", "AutoModelForSequenceClassification", ("ForSequenceClassification",)),
    Task("token-classification", "AutoModelForTokenClassification", ("ForTokenClassification",)),
    Task("question-answering", "AutoModelForQuestionAnswering", ("ForQuestionAnswering",)),
    Task("text-generation", "AutoModelForCausalLM", ("ForCausalLM", "LMHeadModel")),
    Task("sentence-similarity", "AutoModel", ()),
    Task("feature-extraction", "AutoModel", ("Model",)),
)
TASK_NAMES = tuple(task.name for task in TASKS)

# The tags by which model cards of sparse encoders are found.
_SPARSE_TAGS = frozenset({"splade", "sparse-encoder"})


def find_task(name: str) -> Task:
    """Return the row of the task called `name`, which must be one of TASK_NAMES."""
    return next(task for task in TASKS if task.name == name)


def recognize_task(architecture: str, *, modules: Collection[str], tags: Collection[str]) -> str:
    """Tell what a checkpoint is for.

    Args:
        architecture: the class named in config.json, e.g. `BertForMaskedLM`.
        modules: types named in sentence-transformers' modules.json; empty where there is none.
        tags: those of the model card; empty where there is none.

    Returns:
        One of TASK_NAMES, or `other` for an architecture of no known task.
    """
    general = next((task.name for task in TASKS if architecture.endswith(task.suffixes)), "other")
    kinds = {module.rsplit(".", 1)[-1] for module in modules}
    if general == "fill-mask" and ("SpladePooling" in kinds or _SPARSE_TAGS.intersection(tags)):
        return "sparse-encoding"
    if general == "feature-extraction" and "Pooling" in kinds:
        return "sentence-similarity"
    return general
