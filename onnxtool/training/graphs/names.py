"""Names of the inputs and outputs of training and optimizer models, as in onnxruntime-training.

Its operators change tensors in place and output flags. Standard operators return the new tensors: under the same names
in the training model, elsewhere under the input's name plus `_out`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from onnxtool.reading import parse_json

LAZY_RESET = "lazy_reset_grad"
LEARNING_RATE = "learning_rate"
STEP = "step"
PARAMETERS = "params"
GRADIENTS = "gradients"
FIRST_MOMENTS = "first_order_moments"
SECOND_MOMENTS = "second_order_moments"
# A parameter's moments in a checkpoint, in the order of those inputs.
MOMENTS = {FIRST_MOMENTS: "momentum0", SECOND_MOMENTS: "momentum1"}

# Metadata key of a training model; its value is a JSON list of the user inputs with a gradient.
_INPUTS_KEY = "onnxtool.inputs_with_gradient"

# Metadata key of a JSON object that gives for each label input the number of classes, the ignored label, and the
# first token whose label counts.
_LABELS_KEY = "onnxtool.labels"

# Metadata key of a JSON object that gives the number of rows for each input that only holds their indices.
_IDS_KEY = "onnxtool.ids"

_BUFFER = ".accumulation.buffer"
_GRADIENT = "_grad"


def gradient_name(parameter: str) -> str:
    """Return the name of the gradient of a parameter."""
    return f"{parameter}{_GRADIENT}"


def buffer_name(parameter: str) -> str:
    """Return the name of the input with the accumulated gradient."""
    return f"{gradient_name(parameter)}{_BUFFER}"


def accumulated_name(parameter: str) -> str:
    """Return the name of the output with the accumulated gradient after this batch."""
    return f"{gradient_name(parameter)}.accumulation.out"


def updated_name(name: str) -> str:
    """Return the name of the output with the new value of an input."""
    return f"{name}_out"


def parameter_of_buffer(name: str) -> str | None:
    """Return the parameter whose gradient an input accumulates; None for other inputs."""
    ending = f"{_GRADIENT}{_BUFFER}"
    return name.removesuffix(ending) if name.endswith(ending) else None


def describe_inputs(names: Iterable[str]) -> dict[str, str]:
    """Return the metadata of a training model that computes the gradients of these inputs."""
    listed = list(names)
    return {_INPUTS_KEY: json.dumps(listed)} if listed else {}


def inputs_with_gradient(metadata: Mapping[str, str]) -> list[str]:
    """Return the user inputs whose gradients a training model computes, from its metadata."""
    names: list[str] = parse_json(metadata.get(_INPUTS_KEY, "[]"))
    return names


def describe_labels(labels: Mapping[str, Mapping[str, int | None]]) -> dict[str, str]:
    """Return the metadata that describes a model's label inputs."""
    return {_LABELS_KEY: json.dumps(labels)} if labels else {}


def labels_of(metadata: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return `classes`, `ignore_index` and `first` for each label input, from a model's metadata."""
    labels: dict[str, dict[str, Any]] = parse_json(metadata.get(_LABELS_KEY, "{}"))
    return labels


def describe_ids(rows: Mapping[str, int]) -> dict[str, str]:
    """Return the metadata that says how many rows each input with indices selects from."""
    return {_IDS_KEY: json.dumps(rows)} if rows else {}


def ids_of(metadata: Mapping[str, str]) -> dict[str, int]:
    """Return the number of rows for each input with indices, from a model's metadata."""
    rows: dict[str, int] = parse_json(metadata.get(_IDS_KEY, "{}"))
    return rows
