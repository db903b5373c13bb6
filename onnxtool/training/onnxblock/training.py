"""A block that computes a loss: it provides the training model with gradients, the eval model, and a checkpoint."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
from onnx import ModelProto, TensorProto, numpy_helper

from onnxtool.errors import CheckpointError
from onnxtool.training.checkpoints.checkpoint import Checkpoint, load_checkpoint
from onnxtool.training.checkpoints.checkpoint import save_checkpoint as save
from onnxtool.training.graphs.parameters import Selection
from onnxtool.training.graphs.training_graph import Graphs, build_graphs
from onnxtool.training.onnxblock.block import Block, declare_outputs, output_names, require_built


class TrainingBlock(Block):
    """A block on top of a model that ends in a loss, with the loss's gradients with respect to parameters.

    Name the parameters with `requires_grad` before calling the block; all others stay constants of the graph. Float
    inputs may also be named there: the training model then computes their gradients as well.
    """

    _graphs: Graphs | None = None
    _optional: frozenset[str] = frozenset()

    @abstractmethod
    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Add the block, and return the name of the loss, or of the loss and further outputs."""

    def requires_grad(self, argument_name: str, value: bool = True) -> None:
        """Train a parameter or compute the gradient of an input; with `value` False, freeze a parameter.

        A frozen parameter becomes an input of the models without a gradient.
        """
        self._selected()[argument_name] = value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Add the block and the gradients.

        Raises:
            ArtifactError: a parameter is not in the model, or the output is not a loss.
            GradientError: operators between parameters and loss have no gradient.
        """
        output = self.build(*args, **kwargs)
        names = output_names(output)
        declare_outputs(self, names)
        graphs = build_graphs(self.base, self.selection, names[0], self.accessor.path)
        self._graphs = graphs
        self.accessor.eval_model = graphs.evaluation
        self.base.CopyFrom(graphs.training)
        return output

    def parameters(self) -> tuple[list[TensorProto], list[TensorProto]]:
        """Return the trained and the frozen parameters, in the order of the inputs.

        Raises:
            ArtifactError: the block has not been called yet.
        """
        graphs = require_built(self._graphs)
        return graphs.trainable, graphs.frozen

    def to_model_proto(self) -> tuple[ModelProto, ModelProto]:
        """Return the training model and the eval model.

        Raises:
            ArtifactError: the block has not been called yet.
        """
        graphs = require_built(self._graphs)
        return graphs.training, graphs.evaluation

    @property
    def inputs_with_gradient(self) -> list[str]:
        """The user inputs whose gradients the training model computes.

        Raises:
            ArtifactError: the block has not been called yet.
        """
        return require_built(self._graphs).inputs

    @property
    def selection(self) -> Selection:
        """The parameters to train and to freeze."""
        selected = self._selected()
        trained = tuple(name for name, value in selected.items() if value)
        return Selection(trained, tuple(name for name, value in selected.items() if not value), self._optional)

    def select(self, selection: Selection) -> None:
        """Train and freeze parameters; optional ones are frozen if the loss does not depend on them."""
        for name in selection.trained:
            self.requires_grad(name)
        for name in selection.frozen:
            self.requires_grad(name, False)
        self._optional = selection.optional

    def _selected(self) -> dict[str, bool]:
        # A subclass may define __init__ without calling this one's.
        selected: dict[str, bool] = self.__dict__.setdefault("_requires_grad", {})
        return selected


def save_checkpoint(
    parameters: tuple[Sequence[onnx.TensorProto], Sequence[onnx.TensorProto]],
    path_to_checkpoint: str | Path,
    nominal_checkpoint: bool = False,
) -> None:
    """Write a TrainingBlock's (trained, frozen) parameters; a nominal checkpoint has no values.

    Raises:
        CheckpointError: a parameter is in both lists.
        OutputWriteError: the file cannot be written.
    """
    save(checkpoint_of(*parameters, nominal=nominal_checkpoint), Path(path_to_checkpoint))


def load_checkpoint_to_model(path_to_checkpoint: str | Path, model: onnx.ModelProto) -> None:
    """Set the initializers of `model` to the checkpoint's values of the same names.

    Raises:
        CheckpointError: it cannot be read, has no values, or a shape differs from the model's.
    """
    checkpoint = load_checkpoint(Path(path_to_checkpoint))
    if checkpoint.is_nominal:
        raise CheckpointError(f"{path_to_checkpoint} is nominal and has no values", "load the complete checkpoint")
    arrays = {**checkpoint.trainable, **checkpoint.frozen}
    for tensor in model.graph.initializer:
        if (array := arrays.get(tensor.name)) is None:
            continue
        if tuple(tensor.dims) != array.shape:
            raise CheckpointError(
                f"{tensor.name} is {list(array.shape)} in {path_to_checkpoint} and {list(tensor.dims)} in the model",
                "the checkpoint belongs to another model",
            )
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


def checkpoint_of(
    trainable: Sequence[onnx.TensorProto],
    frozen: Sequence[onnx.TensorProto],
    *,
    nominal: bool = False,
    folder: Path | None = None,
) -> Checkpoint:
    """Make a checkpoint from the given parameters.

    Args:
        trainable: parameters with a gradient.
        frozen: parameters without a gradient.
        nominal: whether to omit the values.
        folder: the model's folder, if the tensors are in its external data.
    """
    both = sorted({tensor.name for tensor in trainable} & {tensor.name for tensor in frozen})
    if both:
        raise CheckpointError(f"{', '.join(both)} cannot be trained and frozen at once", "name them in one list only")
    base = "" if folder is None else str(folder)
    groups = [
        {tensor.name: ir.serde.deserialize_tensor(tensor, base).numpy() for tensor in tensors}
        for tensors in (trainable, frozen)
    ]
    return Checkpoint(trainable=groups[0], frozen=groups[1], is_nominal=nominal)
