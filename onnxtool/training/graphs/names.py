"""How the inputs and outputs of training and optimizer models are called: onnxruntime-training's names.

Its operators change tensors in place and so have flags as outputs. Standard ones give the new tensors, under the same
names in the training model, and with `_out` after the name of the input elsewhere.
"""

from __future__ import annotations

LAZY_RESET = "lazy_reset_grad"
LEARNING_RATE = "learning_rate"
STEP = "step"
PARAMETERS = "params"
GRADIENTS = "gradients"
FIRST_MOMENTS = "first_order_moments"
SECOND_MOMENTS = "second_order_moments"
# What a checkpoint calls the moments of a parameter, in the order of those inputs.
MOMENTS = {FIRST_MOMENTS: "momentum0", SECOND_MOMENTS: "momentum1"}

_BUFFER = ".accumulation.buffer"
_GRADIENT = "_grad"


def gradient_name(parameter: str) -> str:
    """Return the name of the gradient of a parameter."""
    return f"{parameter}{_GRADIENT}"


def buffer_name(parameter: str) -> str:
    """Return the input that holds the gradient so far."""
    return f"{gradient_name(parameter)}{_BUFFER}"


def accumulated_name(parameter: str) -> str:
    """Return the output with the gradient after this batch."""
    return f"{gradient_name(parameter)}.accumulation.out"


def updated_name(name: str) -> str:
    """Return the output with the new value of an input."""
    return f"{name}_out"


def parameter_of_buffer(name: str) -> str | None:
    """Return whose gradient an input holds; None for other inputs."""
    ending = f"{_GRADIENT}{_BUFFER}"
    return name.removesuffix(ending) if name.endswith(ending) else None
