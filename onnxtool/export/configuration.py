"""What config.json says: the configuration, the class of the model, and the tasks that it has classes for."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

from onnxtool.checkpoint.tasks import TASKS, Task, find_task
from onnxtool.errors import CheckpointError
from onnxtool.export.source import Source
from onnxtool.reports import Json
from onnxtool.runtime.quiet import quiet

_MOST_PARTS = 4096  # layers of the deepest models are some hundreds, experts two thousand
_MOST_LABELS = 1_000_000
# What a class of transformers builds one by one, by the names of its settings.
_PARTS = re.compile(r"(^|_)(n|num|nb)_?(\w+_)?(layers?|blocks?|stages?|experts)$|_layers$|(^|_)depths?$|^layers$")


def load_config(source: Source) -> Any:
    """Read config.json into its class of transformers.

    Raises:
        CheckpointError: it cannot be read, or transformers does not know its kind of model.
    """
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    _require_counts(source, source.read("config.json"))
    try:
        with quiet():
            return AutoConfig.from_pretrained(source.model_name, **source.arguments)
    except ValueError as error:
        model_type = source.read("config.json").get("model_type")
        if isinstance(model_type, str) and model_type in CONFIG_MAPPING_NAMES:
            raise source.unreadable(error) from error
        if source.read("config.json").get("auto_map") and not source.trust_remote_code:
            raise CheckpointError(
                f"{source.model_name} is a model with code of its own (auto_map in config.json), which was not run",
                "read that code, and pass --trust_remote_code if you trust it",
            ) from error
        near = difflib.get_close_matches(str(model_type), CONFIG_MAPPING_NAMES, n=3)
        raise CheckpointError(
            f"transformers knows no model_type {model_type!r} (config.json of {source.model_name})",
            (f"did you mean {', '.join(near)}? " if near else "") + "a newer transformers may know it",
        ) from error
    except Exception as error:  # each configuration checks its values in its own way, or not at all
        raise source.unreadable(error) from error


def _require_counts(source: Source, settings: Mapping[str, Json]) -> None:
    """Refuse more layers, experts or labels than any model has: each is built one by one, for hours and in memory."""
    for name, value in settings.items():
        if isinstance(value, dict):
            if len(value) > _MOST_LABELS:
                raise _too_many(source, name, len(value), _MOST_LABELS)
            _require_counts(source, value)
        limit = _MOST_LABELS if name == "num_labels" else _MOST_PARTS
        numbers = value if isinstance(value, list) else [value]
        if name == "num_labels" or _PARTS.search(name):
            for number in numbers:
                if isinstance(number, int | float) and number > limit:
                    raise _too_many(source, name, number, limit)


def _too_many(source: Source, name: str, number: float, limit: int) -> CheckpointError:
    return CheckpointError(
        f"config.json of {source.model_name} has {number} as {name}, and no model has more than {limit}",
        "the file is damaged, or made to do harm; fetch it again",
    )


def find_class(architecture: str, config: Any, source: Source) -> Any:
    """Return the class called `architecture`, or transformers' automatic one for a checkpoint with code of its own.

    Raises:
        CheckpointError: transformers has none of this name, it is no model, or it is one of another configuration.
    """
    import torch
    import transformers

    if source.trust_remote_code:
        for auto_class, reference in (getattr(config, "auto_map", None) or {}).items():
            if str(reference).rsplit(".", 1)[-1] == architecture:
                return getattr(transformers, auto_class)
    model_class = getattr(transformers, architecture, None)
    if not isinstance(model_class, type) or not hasattr(model_class, "from_pretrained"):
        raise CheckpointError(
            f"transformers {transformers.__version__} has no architecture {architecture!r} "
            f"(config.json of {source.model_name})",
            f"pass --task: {candidates(config)}; a model with code of its own needs --trust_remote_code",
        )
    # The bases of a model's classes have weights and no forward.
    is_base = getattr(model_class, "forward", None) is torch.nn.Module.forward
    if not issubclass(model_class, transformers.PreTrainedModel) or is_base:
        raise CheckpointError(
            f"{architecture}, which config.json of {source.model_name} names as its architecture, is no model",
            f"name the class that the weights are of, or pass --task: {candidates(config)}",
        )
    wanted = getattr(model_class, "config_class", None)
    if isinstance(wanted, type) and not isinstance(config, wanted):
        raise CheckpointError(
            f"config.json of {source.model_name} is one of {config.model_type}, and names {architecture}, "
            f"which is a model of {getattr(wanted, 'model_type', wanted.__name__)}",
            f"the folder mixes two models; take both from one, or pass --task: {candidates(config)}",
        )
    return model_class


def architecture_for(config: Any, task: str) -> str:
    """Return the class for `task`: the one that config.json names where it serves it, else transformers' own.

    Raises:
        CheckpointError: transformers has none for it.
    """
    row = find_task(task)
    names = architectures(row, config.model_type)
    named = getattr(config, "architectures", None) or ()
    own = [name for name in named if name in names or serves(name, row) or name.endswith(row.own_suffixes)]
    if own:
        return str(own[0])
    if not names:
        raise CheckpointError(
            f"{config.model_type} has no architecture for the task {task}", f"pass one of: {candidates(config)}"
        )
    return names[0]


def base_architecture(config: Any) -> str:
    """Return the class of the model without a head; of an encoder-decoder, that of its encoder where there is one.

    Raises:
        CheckpointError: transformers has none.
    """
    named = architecture_for(config, "feature-extraction")
    if not getattr(config, "is_encoder_decoder", False):
        return named
    names = architectures(find_task("feature-extraction"), config.model_type)
    return next((name for name in names if name.endswith("EncoderModel")), named)


def candidates(config: Any) -> str:
    """List the tasks that a configuration could be used for, with their classes."""
    found = [(task.name, architectures(task, config.model_type)) for task in TASKS]
    return ", ".join(f"{task} ({names[0]})" for task, names in found if names) or "none that onnxtool knows"


def task_of_architecture(model_type: str, architecture: str) -> str:
    """Tell what an architecture is for: one of TASK_NAMES, or `other`."""
    known = next((task.name for task in TASKS if architecture in architectures(task, model_type)), None)
    return known or next((task.name for task in TASKS if architecture.endswith(task.suffixes)), "other")


def architectures(task: Task, model_type: str) -> tuple[str, ...]:
    """Return the names of the classes that transformers has for a task and a model type."""
    import transformers

    names: list[str] = []
    for auto_class in task.auto_classes:
        # Private, and the only list of what exists; by name, so that nothing is imported. transformers 5.23.
        found = getattr(transformers, auto_class)._model_mapping._model_mapping.get(model_type, ())  # noqa: SLF001
        names += [found] if isinstance(found, str) else found
    return tuple(names)


def serves(architecture: str, task: Task) -> bool:
    """Whether an architecture is for a task, whatever its model type: parts of larger models have their own."""
    import transformers

    for auto_class in task.auto_classes:
        for names in getattr(transformers, auto_class)._model_mapping._model_mapping.values():  # noqa: SLF001  as above
            if architecture in ((names,) if isinstance(names, str) else names):
                return True
    return False
