"""Names of the inputs and outputs of training and optimizer models, as in onnxruntime-training.

Its operators change tensors in place and output flags. Standard operators return the new tensors: under the same names
in the training model, elsewhere under the input's name plus `_out`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
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

# Metadata keys of a training or eval model, whose values are JSON: the list of user inputs with a gradient; for each
# label input an object of the number of classes, the ignored label, and the first token whose label counts; and the
# number of rows for each input that only holds their indices.
INPUTS_WITH_GRADIENT, LABELS, IDS = "onnxtool.inputs_with_gradient", "onnxtool.labels", "onnxtool.ids"

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


def described(key: str, content: Any) -> dict[str, str]:
    """Return the metadata that holds one of these, if there is any."""
    return {key: json.dumps(content)} if content else {}


def description(key: str, metadata: Mapping[str, str]) -> Any:
    """Return one of these from a model's metadata; an empty object if it has none."""
    return parse_json(metadata.get(key, "{}"))
