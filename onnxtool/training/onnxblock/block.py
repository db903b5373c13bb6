"""Base classes of blocks, and the model they are added to, opened by `base` or `empty_base`, one at a time.

A `TrainingBlock` computes a loss: it provides the training model with gradients, the eval model, and a checkpoint.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, ValueInfoProto, helper, numpy_helper

from onnxtool.autodiff import LOWEST_OPSET, prepare
from onnxtool.errors import ArtifactError, CheckpointError, first_line
from onnxtool.graph.shapes import infer_values
from onnxtool.model_file.domains import default_opset, settle_domains
from onnxtool.runtime.quiet import quiet
from onnxtool.training.checkpoints.checkpoint import Checkpoint, load_checkpoint
from onnxtool.training.checkpoints.checkpoint import save_checkpoint as save
from onnxtool.training.graphs.parameters import Selection
from onnxtool.training.graphs.training_graph import Graphs, build_graphs

# The newest IR version that onnxruntime 1.17 reads, and the opset of new models.
IR_VERSION = 9
OPSET = 18

_PREFIX = "onnxblock/"


class ModelAccessor:
    """The model that blocks modify, with methods to add nodes, constants and inputs.

    Attributes:
        model: the model with all blocks added so far.
        path: the model file, with its external data in the same folder; None for a model in memory.
        eval_model: the model without gradients; None until a TrainingBlock is built.
    """

    def __init__(self, model: ModelProto, path: Path | None = None) -> None:
        self.model = model
        self.path = path
        self.eval_model: ModelProto | None = None
        self._taken = {name for name in self._names() if name}
        self._count = 0

    def new_name(self, kind: str) -> str:
        """Return a name that is not yet used in the model."""
        while (name := f"{_PREFIX}{kind}_{self._count}") in self._taken:
            self._count += 1
        self._taken.add(name)
        return name

    def rename(self, name: str, new: str) -> str:
        """Rename what a block has added unless the model already uses the name; return the resulting name."""
        if not name.startswith(_PREFIX) or new in self._taken:
            return name
        for node in self.model.graph.node:
            for names in (node.input, node.output):
                names[:] = [new if value_name == name else value_name for value_name in names]
        self._taken.add(new)
        return new

    def add_node(self, op_type: str, inputs: Sequence[str], *, domain: str | None = None, **attributes: Any) -> str:
        """Apply an operator, and return the name of its first output; an empty string omits an input.

        Attributes are numbers, strings or lists of them. Without a domain, the operator is a standard one.
        """
        output = self.new_name(op_type)
        node_name = self.new_name(op_type)
        node = helper.make_node(op_type, list(inputs), [output], name=node_name, domain=domain, **attributes)
        self.model.graph.node.append(node)
        return output

    def add_constant(self, array: NDArray[np.generic], kind: str = "constant") -> str:
        """Add an initializer, and return its name."""
        name = self.new_name(kind)
        self.model.graph.initializer.append(numpy_helper.from_array(array, name))
        return name

    def has_value(self, name: str) -> bool:
        """Return whether a graph input, initializer or node output has this name."""
        graph = self.model.graph
        named = (*graph.input, *graph.initializer)
        return any(value.name == name for value in named) or any(name in node.output for node in graph.node)

    def value_info(self, name: str) -> ValueInfoProto:
        """Return the dtype and shape of any value, inferred where the model does not declare them.

        Raises:
            ArtifactError: the model has no such value, or its dtype cannot be inferred.
        """
        graph = self.model.graph
        for value in (*graph.input, *graph.output, *graph.value_info):
            if value.name == name and value.type.tensor_type.elem_type and value.type.tensor_type.HasField("shape"):
                return value
        if not self.has_value(name):
            outputs = ", ".join(value.name for value in graph.output)
            raise ArtifactError(
                f"the model has no value called {name!r} that a loss could read", f"its outputs are {outputs}"
            )
        return self._inferred(name)

    def _inferred(self, name: str) -> ValueInfoProto:
        inferred = infer_values(self.model)
        value = inferred.values.get(name)
        if value is not None and value.dtype:
            return helper.make_tensor_value_info(name, value.dtype, value.shape)
        if name in inferred.other_types:
            return helper.make_value_info(name, inferred.other_types[name])
        raise ArtifactError(f"dtype and shape of {name!r} cannot be inferred", "declare them as an output of the model")

    def _names(self) -> Iterator[str]:
        graph = self.model.graph
        for value in (*graph.input, *graph.initializer):
            yield value.name
        for node in graph.node:
            yield from (node.name, *node.output)


_current: ContextVar[ModelAccessor | None] = ContextVar("onnxblock model", default=None)


def current() -> ModelAccessor:
    """Return the model that blocks are currently added to.

    Raises:
        ArtifactError: called outside `with onnxblock.base(...)` and `onnxblock.empty_base()`.
    """
    accessor = _current.get()
    if accessor is None:
        raise ArtifactError(
            "there is no model to build on", "build blocks inside `with onnxblock.base(model):` or `empty_base():`"
        )
    return accessor


@contextmanager
def base(model: ModelProto, model_path: str | Path | None = None) -> Iterator[ModelAccessor]:
    """Add blocks to a copy of `model`, converted to opset 18 if it is older.

    Args:
        model: the forward model; load a model of more than 2 GB with `load_external_data=False`.
        model_path: the file it was loaded from.

    Raises:
        ArtifactError: blocks are already being added to another model.
        GradientError: the model is too old to be converted.
    """
    path = None if model_path is None else Path(model_path)
    with _entered(ModelAccessor(_prepared(model, path), path)) as accessor:
        yield accessor


@contextmanager
def empty_base(opset_version: int | None = None) -> Iterator[ModelAccessor]:
    """Add blocks to an empty model, with opset 18 by default.

    Raises:
        ArtifactError: blocks are already being added to another model.
    """
    opsets = [helper.make_opsetid("", opset_version or OPSET)]
    graph = helper.make_graph([], "graph", [], [])
    model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION, producer_name="onnxtool")
    with _entered(ModelAccessor(model)) as accessor:
        yield accessor


def custom_op_library(custom_op_library_path: str | Path) -> NoReturn:
    """Refuse a custom operator library.

    Raises:
        ArtifactError: always.
    """
    raise ArtifactError(
        f"a library of custom operators ({custom_op_library_path}) has no gradients",
        "gradients are made of standard operators, so that they run on any onnxruntime: rewrite the operator with "
        "those, or add a rule in onnxtool/autodiff/rules/",
    )


@contextmanager
def _entered(accessor: ModelAccessor) -> Iterator[ModelAccessor]:
    if _current.get() is not None:
        raise ArtifactError("blocks are already being added to another model", "leave its `with` block first")
    token = _current.set(accessor)
    try:
        yield accessor
    finally:
        _current.reset(token)


def _prepared(model: ModelProto, path: Path | None) -> ModelProto:
    """Return a copy that gradients can be added to."""
    try:
        prepared = ir.from_proto(model)
    except (ir.serde.SerdeError, TypeError, ValueError) as error:
        reason = first_line(error)
        raise ArtifactError(
            f"the model is not valid: {reason}", "check it with onnx.checker, or export it again"
        ) from error
    if path is not None:
        ir.external_data.set_base_dir(prepared.graph, path.parent)
    if model.functions or default_opset(prepared.opset_imports) < LOWEST_OPSET:
        with quiet():  # the converter logs which of its two methods it uses
            prepare(prepared)
        return ir.to_proto(prepared)
    copy = type(model)()
    copy.CopyFrom(model)
    return settle_domains(copy)


T = TypeVar("T")


class Block(ABC):
    """A part of a graph. Subclasses define in `build` what to add, mostly by calling other blocks.

    Blocks are created inside `with onnxblock.base(model):`; calling one adds it to that model.
    """

    @property
    def base(self) -> ModelProto:
        """The model that the block is added to; `build` may also modify it directly."""
        return current().model

    @property
    def accessor(self) -> ModelAccessor:
        """The same model, with methods to add nodes, constants and inputs."""
        return current()

    def infer_shapes_on_base(self) -> ModelProto:
        """Return a copy of the model with inferred dtypes and shapes; external weights stay in their files."""
        inferred: ModelProto = onnx.shape_inference.infer_shapes(self.base)
        return inferred

    @abstractmethod
    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Add the block on top of the named values, and return the name of its output, or several.

        Each subclass defines its own parameters.
        """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Add the block to the model."""
        return self.build(*args, **kwargs)


class ForwardBlock(Block):
    """A block on top of a model, without gradients; its results become the outputs of an inference model."""

    _model: ModelProto | None = None

    @abstractmethod
    def build(self, *args: Any, **kwargs: Any) -> Any:
        """Add the block, and return the name of the model's output, or several."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Add the block, and make its results the outputs of the model."""
        output = self.build(*args, **kwargs)
        declare_outputs(self, output_names(output))
        onnx.checker.check_model(self.base, full_check=False)
        self._model = onnx.ModelProto()
        self._model.CopyFrom(self.base)
        return output

    def to_model_proto(self) -> ModelProto:
        """Return the model.

        Raises:
            ArtifactError: the block has not been called yet.
        """
        return require_built(self._model)


def require_built(built: T | None) -> T:
    """Return what a block has built.

    Raises:
        ArtifactError: the block has not been called yet.
    """
    if built is None:
        raise ArtifactError("the block was not built", "call it inside `with onnxblock.base(model):` first")
    return built


def output_names(output: object) -> list[str]:
    """Return a block's result as a list of names.

    Raises:
        ArtifactError: the result is not one or more names.
    """
    several = list(output) if isinstance(output, Sequence) and not isinstance(output, str) else [output]
    names = [name for name in several if isinstance(name, str)]
    if not names or len(names) < len(several):
        raise ArtifactError(f"the block returned {output!r}", "build returns the name of a value, or several")
    return names


def declare_outputs(block: Block, names: Sequence[str]) -> None:
    """Make the named values the only outputs of the block's model."""
    infos = [block.accessor.value_info(name) for name in dict.fromkeys(names)]
    graph = block.base.graph
    # An output's type may be the only known type of a value made by an operator without a schema.
    known = {value.name for value in (*graph.value_info, *infos)}
    graph.value_info.extend(value for value in graph.output if value.name not in known)
    del graph.output[:]
    graph.output.extend(infos)


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
