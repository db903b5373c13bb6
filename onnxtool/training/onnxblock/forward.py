"""A block whose result becomes the outputs of an inference model."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from onnxtool.errors import ArtifactError
from onnxtool.training.onnxblock.block import Block

if TYPE_CHECKING:
    from onnx import ModelProto


class ForwardBlock(Block):
    """A block on top of a model, without gradients."""

    _model: ModelProto | None = None

    @abstractmethod
    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Add the block, and return the name of the output of the model, or several."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Add the block, and make what it returns the outputs of the model."""
        import onnx

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
        if self._model is None:
            raise ArtifactError("the block was not built", "call it inside `with onnxblock.base(model):` first")
        return self._model


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
    """Make the values of these names the outputs of the model that the block works on, and no others."""
    infos = [block.accessor.value_info(name) for name in dict.fromkeys(names)]
    graph = block.base.graph
    # What an output is said to be may be all that is known of what an operator without a schema makes.
    known = {value.name for value in (*graph.value_info, *infos)}
    graph.value_info.extend(value for value in graph.output if value.name not in known)
    del graph.output[:]
    graph.output.extend(infos)
