"""A step of the optimizer, in place on the parameters of a Module."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from onnxtool.errors import ArtifactError
from onnxtool.training.api.memory import Buffer
from onnxtool.training.api.session import Runner
from onnxtool.training.graphs.names import GRADIENTS, LEARNING_RATE, MOMENTS, PARAMETERS, STEP, updated_name

if TYPE_CHECKING:
    from onnxtool.training.api.module import Module


class Optimizer:
    """Changes the parameters of a module by their gradients.

    Args:
        optimizer_uri: the optimizer model.
        module: whose parameters and gradients it works on; its state keeps step and learning rate.

    Raises:
        ArtifactError: the model is no optimizer model, or the moments in the checkpoint do not fit.
    """

    def __init__(self, optimizer_uri: str | os.PathLike[str], module: Module) -> None:
        self._module = module
        self._checkpoint = module.state.checkpoint
        self._runner = Runner(Path(optimizer_uri), module.device, module.session_options)
        missing = {LEARNING_RATE, STEP, PARAMETERS, GRADIENTS} - set(self._runner.input_names)
        if missing:
            raise ArtifactError(
                f"{optimizer_uri} has no input {', '.join(sorted(missing))}",
                "pass the optimizer model of the artifacts",
            )
        self._bind()

    @property
    def num_steps(self) -> int:
        """The steps so far."""
        return self._checkpoint.step

    def step(self) -> None:
        """Change the parameters; the gradients stay until `lazy_reset_grad`."""
        import numpy as np

        self._module.check_complete()
        step = self._checkpoint.step + 1
        self._runner.feed(LEARNING_RATE, np.array([self._checkpoint.learning_rate], np.float32))
        self._runner.feed(STEP, np.array([step], np.int64))
        self._runner.run()
        self._checkpoint.step = step

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate of the next step."""
        self._checkpoint.learning_rate = float(learning_rate)

    def get_learning_rate(self) -> float:
        """Return the learning rate of the next step."""
        return self._checkpoint.learning_rate

    def _bind(self) -> None:
        module, runner = self._module, self._runner
        buffers = {PARAMETERS: module.values, GRADIENTS: module.gradients}
        for name, moment in MOMENTS.items():
            if name not in runner.input_names:
                continue
            buffers[name] = module.moment_buffers.setdefault(moment, Buffer(module.values.layout, module.device))
            saved = self._checkpoint.moments.get(moment, {})
            shapes = module.values.layout.shapes
            if any(shapes.get(parameter) != array.shape for parameter, array in saved.items()):
                raise ArtifactError(
                    f"the moments {moment} of the checkpoint do not fit the training model",
                    "they belong to other parameters; load the checkpoint that was saved with this model",
                )
            buffers[name].write(saved)
        for name, buffer in buffers.items():
            runner.bind_input(name, buffer.layout.blocks, buffer.pointer)
            if updated_name(name) in runner.output_names:
                runner.bind_output(updated_name(name), buffer.layout.blocks, buffer.pointer)
