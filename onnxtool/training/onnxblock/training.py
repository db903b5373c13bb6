"""A block whose result is a loss: of it come the training model, with gradients, and the eval model."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from onnxtool.errors import ArtifactError
from onnxtool.training.onnxblock.block import Block
from onnxtool.training.onnxblock.forward import declare_outputs, output_names

if TYPE_CHECKING:
    from onnx import ModelProto, TensorProto

    from onnxtool.training.graphs.parameters import Choice


class TrainingBlock(Block):
    """A block on top of a model that ends in a loss, and the gradients of parameters with respect to it.

    Parameters are named in `requires_grad` before the block is called; those of no name stay constants of the graph.

    Attributes:
        recompute: compute cheap activations a second time for the gradients, instead of keeping them.
    """

    recompute: bool = False
    _models: tuple[ModelProto, ModelProto] | None = None
    _parameters: tuple[list[TensorProto], list[TensorProto]] | None = None

    @abstractmethod
    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Add the block, and return the name of the loss, or of the loss and further outputs."""

    def requires_grad(self, argument_name: str, value: bool = True) -> None:
        """Let a parameter be trained, or with `value` False be frozen: an input of the models without a gradient."""
        self._chosen()[argument_name] = value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Add the block and the gradients.

        Raises:
            ArtifactError: a parameter is not in the model, or the loss is none.
            GradientError: operators on the way have no gradient.
        """
        from onnxtool.training.graphs.training_graph import build_graphs

        output = self.build(*args, **kwargs)
        names = output_names(output)
        declare_outputs(self, names)
        graphs = build_graphs(self.base, self.choice, names[0], self.accessor.path, recompute=self.recompute)
        self._models = (graphs.training, graphs.evaluation)
        self._parameters = (graphs.trainable, graphs.frozen)
        self.accessor.eval_model = graphs.evaluation
        self.base.CopyFrom(graphs.training)
        return output

    def parameters(self) -> tuple[list[TensorProto], list[TensorProto]]:
        """Return the parameters that are trained, and those that are frozen, in the order of the inputs.

        Raises:
            ArtifactError: the block was not called yet.
        """
        if self._parameters is None:
            raise _not_built()
        return self._parameters

    def to_model_proto(self) -> tuple[ModelProto, ModelProto]:
        """Return the training model and the eval model.

        Raises:
            ArtifactError: the block was not called yet.
        """
        if self._models is None:
            raise _not_built()
        return self._models

    @property
    def choice(self) -> Choice:
        """Which parameters are trained and which are frozen."""
        from onnxtool.training.graphs.parameters import Choice

        chosen = self._chosen()
        trained = tuple(name for name, value in chosen.items() if value)
        optional: frozenset[str] = self.__dict__.get("_optional", frozenset())
        return Choice(trained, tuple(name for name, value in chosen.items() if not value), optional)

    def choose(self, choice: Choice) -> None:
        """Take over a whole choice; its optional parameters are frozen where the loss does not depend on them."""
        for name in choice.trained:
            self.requires_grad(name)
        for name in choice.frozen:
            self.requires_grad(name, False)
        self.__dict__["_optional"] = choice.optional

    def _chosen(self) -> dict[str, bool]:
        # A subclass may define __init__ without calling this one's.
        chosen: dict[str, bool] = self.__dict__.setdefault("_choice", {})
        return chosen


def _not_built() -> ArtifactError:
    return ArtifactError("the block was not built", "call it inside `with onnxblock.base(model):` first")
