"""What all blocks have in common: they are called with names of values, and give the name of what they add."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from onnxtool.training.onnxblock.context import ModelAccessor, current

if TYPE_CHECKING:
    from onnx import ModelProto


class Block(ABC):
    """A piece of a graph. A subclass says in `build` what it adds, mostly by calling other blocks.

    Blocks exist inside `with onnxblock.base(model):`; calling one adds it to that model.
    """

    @property
    def base(self) -> ModelProto:
        """The model that the block is added to, which `build` may also change by hand."""
        return current().model

    @property
    def accessor(self) -> ModelAccessor:
        """The same model, with what adds nodes, constants and inputs to it."""
        return current()

    @abstractmethod
    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Add the block on top of the values of these names, and return the name of its output, or several.

        The parameters are the subclass's own.
        """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Add the block to the model."""
        return self.build(*args, **kwargs)
