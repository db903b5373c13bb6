"""The training state: the content of a checkpoint, and its values on the device once a Module holds them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from onnxtool.errors import ArtifactError
from onnxtool.options import checked
from onnxtool.training.checkpoints.checkpoint import Checkpoint, Format, Property, load_checkpoint, save_checkpoint


class Memory(Protocol):
    """The tensors of a Module."""

    def read(self, name: str) -> NDArray[Any]:
        """Return a copy of a parameter."""

    def write(self, name: str, array: NDArray[Any]) -> None:
        """Set a parameter."""

    def gradient(self, name: str) -> NDArray[Any]:
        """Return a copy of a parameter's gradient, zeros before the first step."""

    def moments(self) -> dict[str, dict[str, NDArray[Any]]]:
        """Return copies of the optimizer state."""


class Parameter:
    """A parameter of the model."""

    @checked
    def __init__(self, name: str, state: CheckpointState) -> None:
        self._name = name
        self._state = state

    @property
    def name(self) -> str:
        """Its name in the model."""
        return self._name

    @property
    def data(self) -> NDArray[Any]:
        """A copy of its values; assignment sets them."""
        return self._state.read(self._name)

    @data.setter
    def data(self, value: NDArray[Any]) -> None:
        self._state.write(self._name, value)

    @property
    def grad(self) -> NDArray[Any] | None:
        """A copy of its gradient, zeros before the first step; None if it is frozen or there is no module."""
        memory = self._state.memory
        return memory.gradient(self._name) if self.requires_grad and memory is not None else None

    @property
    def requires_grad(self) -> bool:
        """Whether it is trained."""
        return self._name in self._state.checkpoint.trainable

    def __repr__(self) -> str:
        return f"Parameter(name={self.name}, requires_grad={self.requires_grad})"


class Parameters:
    """All parameters by name; tied parameters also by their aliases. A nominal checkpoint has only names."""

    def __init__(self, state: CheckpointState) -> None:
        self._state = state

    def __getitem__(self, name: str) -> Parameter:
        if name not in self:
            raise KeyError(name)
        self._state.check_complete()
        return Parameter(self._state.resolved(name), self._state)

    def __setitem__(self, name: str, value: NDArray[Any]) -> None:
        self[name].data = value

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._state.resolved(name) in self._state.names()

    def __iter__(self) -> Iterator[tuple[str, Parameter]]:
        for name in self._state.names():
            yield name, Parameter(name, self._state)

    def __len__(self) -> int:
        return len(self._state.names())

    def __repr__(self) -> str:
        return repr(self._state.names())


class Properties:
    """Numbers and strings that the user stores in the checkpoint."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._properties = checkpoint.properties

    def __getitem__(self, name: str) -> Property:
        return self._properties[name]

    def __setitem__(self, name: str, value: Property) -> None:
        if not isinstance(value, int | float | str):
            raise TypeError(f"the property {name} is {type(value).__name__}, and only int, float and str are supported")
        self._properties[name] = value

    def __contains__(self, name: object) -> bool:
        return name in self._properties

    def __iter__(self) -> Iterator[tuple[str, Property]]:
        return iter(self._properties.items())

    def __len__(self) -> int:
        return len(self._properties)

    def __repr__(self) -> str:
        return repr(list(self._properties))


class CheckpointState:
    """The content of a checkpoint, created by `load_checkpoint`.

    Attributes:
        checkpoint: the checkpoint as read; step and learning rate are kept up to date.
        memory: the Module's tensors, once it exists.
    """

    @checked
    def __init__(self, checkpoint: Checkpoint) -> None:
        if not isinstance(checkpoint, Checkpoint):
            raise TypeError(f"a CheckpointState is made from a Checkpoint, not from {type(checkpoint).__name__}")
        self.checkpoint = checkpoint
        self.memory: Memory | None = None
        self.parameters = Parameters(self)
        self.properties = Properties(checkpoint)

    @classmethod
    @checked
    def load_checkpoint(cls, checkpoint_uri: str | os.PathLike[str]) -> CheckpointState:
        """Read a complete or nominal checkpoint written by onnxtool or onnxruntime-training.

        Raises:
            CheckpointError: the file is missing, truncated, or not a checkpoint.
        """
        return cls(load_checkpoint(Path(checkpoint_uri)))

    @classmethod
    @checked
    def save_checkpoint(
        cls,
        state: CheckpointState,
        checkpoint_uri: str | os.PathLike[str],
        include_optimizer_state: bool = False,
        format_name: Format = "safetensors",
    ) -> None:
        """Write the state, optionally with the optimizer state, step and learning rate.

        Raises:
            ArtifactError: the checkpoint is nominal and has no values.
            OutputWriteError: the file cannot be written.
        """
        old = state.checkpoint
        state.check_complete()
        new = Checkpoint(
            trainable={name: state.read(name) for name in old.trainable},
            frozen={name: state.read(name) for name in old.frozen},
            properties=dict(old.properties),
            aliases=dict(old.aliases),
        )
        if include_optimizer_state:
            new.step, new.learning_rate = old.step, old.learning_rate
            new.moments = old.moments if state.memory is None else state.memory.moments() or old.moments
        save_checkpoint(new, Path(checkpoint_uri), format_name=format_name)

    def attach(self, memory: Memory) -> None:
        """Use the values in `memory` from now on; the arrays that were read keep only dtype and shape."""
        self.memory = memory
        for group in (self.checkpoint.trainable, self.checkpoint.frozen):
            for name, array in group.items():
                # A nominal checkpoint from onnxruntime-training does not record shapes.
                shape = memory.read(name).shape if self.checkpoint.is_nominal else array.shape
                group[name] = np.broadcast_to(np.zeros((), array.dtype), shape)

    def names(self) -> list[str]:
        """Return the names of all parameters, the trained ones first."""
        return [*self.checkpoint.trainable, *self.checkpoint.frozen]

    @checked
    def resolved(self, name: str) -> str:
        """Return a parameter's name in the model, resolving the alias of a tied parameter."""
        return self.checkpoint.aliases.get(name, name)

    def check_complete(self) -> None:
        """Require values.

        Raises:
            ArtifactError: the checkpoint is nominal.
        """
        if self.checkpoint.is_nominal:
            raise ArtifactError("the checkpoint is nominal and has no values", "call copy_buffer_to_parameters first")

    @checked
    def read(self, name: str) -> NDArray[Any]:
        """Return a copy of a parameter.

        Raises:
            ArtifactError: the checkpoint is nominal.
        """
        self.check_complete()
        if self.memory is not None:
            return self.memory.read(name)
        return self._group(name)[name].copy()

    @checked
    def write(self, name: str, value: NDArray[Any]) -> None:
        """Set a parameter.

        Raises:
            ArtifactError: the shape differs.
        """
        group = self._group(name)
        array = np.asarray(value, group[name].dtype)
        if array.shape != group[name].shape:
            raise ArtifactError(
                f"{name} is {list(group[name].shape)}, and the new value {list(array.shape)}",
                "pass an array of the same shape",
            )
        if self.memory is None:
            group[name] = array.copy()
        else:
            self.memory.write(name, array)

    def _group(self, name: str) -> dict[str, NDArray[Any]]:
        return self.checkpoint.trainable if name in self.checkpoint.trainable else self.checkpoint.frozen
