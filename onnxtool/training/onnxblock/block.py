"""The base classes of blocks: they are called with names of values, and return the name of what they add."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeVar

import onnx
from onnx import ModelProto

from onnxtool.errors import ArtifactError
from onnxtool.training.onnxblock.context import ModelAccessor, current

T = TypeVar("T")


class Block(ABC):
    """A part of a graph. A subclass defines in `build` what it adds, mostly by calling other blocks.

    Blocks exist inside `with onnxblock.base(model):`; calling one adds it to that model.
    """

    @property
    def base(self) -> ModelProto:
        """The model that the block is added to; `build` may also change it directly."""
        return current().model

    @property
    def accessor(self) -> ModelAccessor:
        """The same model, with methods that add nodes, constants and inputs to it."""
        return current()

    def infer_shapes_on_base(self) -> ModelProto:
        """Return a copy of the model with what is known of dtypes and shapes; weights in other files stay there."""
        inferred: ModelProto = onnx.shape_inference.infer_shapes(self.base)
        return inferred

    @abstractmethod
    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Add the block on top of the values with these names, and return the name of its output, or several.

        Each subclass defines its own parameters.
        """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Add the block to the model."""
        return self.build(*args, **kwargs)


class ForwardBlock(Block):
    """A block on top of a model, without gradients; what it returns becomes the outputs of an inference model."""

    _model: ModelProto | None = None

    @abstractmethod
    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Add the block, and return the name of the output of the model, or several."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Add the block, and make what it returns the outputs of the model."""
        output = self.build(*args, **kwargs)
        declare_outputs(self, output_names(output))
        onnx.checker.check_model(self.base, full_check=False)
        self._model = onnx.ModelProto()
        self._model.CopyFrom(self.base)
        return output

    def to_model_proto(self) -> ModelProto:
        """Return the model.

        Raises:
            ArtifactError: the block was not called yet.
        """
        return require_built(self._model)


def require_built(built: T | None) -> T:
    """Return what a block has built.

    Raises:
        ArtifactError: the block was not called yet.
    """
    if built is None:
        raise ArtifactError("the block was not built", "call it inside `with onnxblock.base(model):` first")
    return built


def output_names(output: object) -> list[str]:
    """Return what a block returned as a list of names.

    Raises:
        ArtifactError: it returned no names.
    """
    several = list(output) if isinstance(output, Sequence) and not isinstance(output, str) else [output]
    names = [name for name in several if isinstance(name, str)]
    if not names or len(names) < len(several):
        raise ArtifactError(f"the block returned {output!r}", "build returns the name of a value, or several")
    return names


def declare_outputs(block: Block, names: Sequence[str]) -> None:
    """Make the values with these names the only outputs of the model that the block works on."""
    infos = [block.accessor.value_info(name) for name in dict.fromkeys(names)]
    graph = block.base.graph
    # The type of an output may be the only known type of a value that an operator without a schema makes.
    known = {value.name for value in (*graph.value_info, *infos)}
    graph.value_info.extend(value for value in graph.output if value.name not in known)
    del graph.output[:]
    graph.output.extend(infos)
