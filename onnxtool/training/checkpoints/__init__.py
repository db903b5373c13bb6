"""Training checkpoints: their content, onnxtool's own file format, and onnxruntime-training's."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

from numpy.typing import NDArray

Array: TypeAlias = "NDArray[Any]"
Property: TypeAlias = "int | float | str"


@dataclass
class Checkpoint:
    """The content of a checkpoint.

    Attributes:
        trainable: parameters with a gradient, by name, in the order of the training model's inputs.
        frozen: parameters without a gradient, including running statistics.
        moments: the optimizer's `momentum0` and `momentum1`, each by parameter name.
        step: number of optimizer steps so far.
        learning_rate: the learning rate of the next step.
        properties: numbers and strings stored by the user.
        aliases: other names of tied parameters, mapped to the name in the file.
        is_nominal: the checkpoint has names, dtypes and shapes but no values; arrays are zeros that take no memory.
    """

    trainable: dict[str, Array] = field(default_factory=dict)
    frozen: dict[str, Array] = field(default_factory=dict)
    moments: dict[str, dict[str, Array]] = field(default_factory=dict)
    step: int = 0
    learning_rate: float = 1e-3
    properties: dict[str, Property] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    is_nominal: bool = False
