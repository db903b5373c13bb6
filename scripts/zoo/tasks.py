"""Which model types there are for a task, and which class of transformers each of them is.

The types of a task are the keys of transformers' own auto mappings, all of them. Text encoding is the mapping that
transformers calls so (`MODEL_FOR_TEXT_ENCODING_MAPPING`): the encoders of text that it offers apart from any head.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers.models.auto import modeling_auto


@dataclass(frozen=True)
class Task:
    """One task.

    Attributes:
        name: as `onnxtool export --task` calls it.
        mappings: names of transformers' tables from model type to class, the first that knows a type wins.
        modality: what the model is fed with: `text`, `image` or `audio`.
    """

    name: str
    mappings: tuple[str, ...]
    modality: str = "text"

    @property
    def is_generative(self) -> bool:
        """Whether it writes text token by token."""
        return "generation" in self.name

    @property
    def has_cache(self) -> bool:
        """Whether the exported graphs hand a cache of earlier tokens on."""
        return self.name.endswith("-with-past")


_SPEECH = ("MODEL_FOR_CTC_MAPPING_NAMES", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES")
TASKS: tuple[Task, ...] = (
    Task("fill-mask", ("MODEL_FOR_MASKED_LM_MAPPING_NAMES",)),
    Task("text-classification", ("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",)),
    Task("token-classification", ("MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",)),
    Task("feature-extraction", ("MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES",)),
    Task("image-classification", ("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",), modality="image"),
    Task("text-generation", ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",)),
    Task("text-generation-with-past", ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",)),
    Task("text2text-generation", ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",)),
    Task("text2text-generation-with-past", ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",)),
    Task("automatic-speech-recognition", _SPEECH, modality="audio"),
    Task("audio-classification", ("MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",), modality="audio"),
)
TASK_NAMES = tuple(task.name for task in TASKS)


def find_task(name: str) -> Task:
    """Return the task called `name`, which must be one of TASK_NAMES."""
    return next(task for task in TASKS if task.name == name)


def model_classes(task: Task) -> dict[str, str]:
    """Return model type to the name of its class, for every type of the task."""
    classes: dict[str, str] = {}
    for mapping in task.mappings:
        for model_type, names in getattr(modeling_auto, mapping).items():
            classes.setdefault(model_type, names if isinstance(names, str) else names[0])
    return classes
