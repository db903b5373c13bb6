"""What a training checkpoint holds, whatever file it lies in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from numpy.typing import NDArray

Array: TypeAlias = "NDArray[Any]"
Property: TypeAlias = "int | float | str"


@dataclass
class Checkpoint:
    """What a checkpoint holds.

    Attributes:
        trainable: parameters with a gradient, by name, in the order of the training model's inputs.
        frozen: parameters without one, running statistics among them.
        moments: of the optimizer, `momentum0` and `momentum1`, each by the name of the parameter.
        step: steps of the optimizer so far.
        learning_rate: of the next step.
        properties: what the user keeps with it.
        aliases: further names of tied parameters, each with the name that is in the file.
        is_nominal: it knows names, dtypes and shapes, and no values; the arrays are zeros that take no memory.
    """

    trainable: dict[str, Array] = field(default_factory=dict)
    frozen: dict[str, Array] = field(default_factory=dict)
    moments: dict[str, dict[str, Array]] = field(default_factory=dict)
    step: int = 0
    learning_rate: float = 1e-3
    properties: dict[str, Property] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    is_nominal: bool = False
