"""The loss that a training step computes from a model and a batch: the model's own, or a criterion's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch

from onnxtool.errors import InputError

Batch = Any
"""Model arguments: a mapping of names to tensors, or `(inputs, targets)` for a criterion."""

Loss: TypeAlias = torch.Tensor | tuple[torch.Tensor, Any]
"""The loss, float [], and with `return_outputs` the model's outputs."""


ComputeLoss: TypeAlias = Callable[[torch.nn.Module, Batch, bool, torch.Tensor | None], Loss]
"""Returns the loss of a model for a batch, and the outputs on request.

The arguments are the same as for `transformers.Trainer.compute_loss`, version 5.23: model, inputs, `return_outputs`
and `num_items_in_batch`.
"""


_COMPUTE_LOSS = (
    "pass compute_loss to ModuleWithLoss, a function of (model, inputs, targets) or CriterionLoss(...), and call the "
    "module with (inputs, targets)"
)


class ModelLoss:
    """The loss that a transformers model computes from its `labels`, or a smoothed loss instead.

    It does what `transformers.Trainer.compute_loss` does, without a Trainer: `num_items_in_batch`, the number of labels
    not ignored in all batches of one optimizer step, is passed to models whose forward takes `**kwargs`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        label_smoothing: float = 0.0,
        label_smoother: Callable[..., torch.Tensor] | None = None,
    ) -> None:
        """Determine how to call the loss of `model`.

        Args:
            model: a transformers model, or one with the same conventions.
            label_smoothing: the share of the mean over all classes in the loss; 0 for the model's own loss.
            label_smoother: used instead of `LabelSmoother(label_smoothing)`.

        Raises:
            InputError: the share is not from 0 to 1, or both are given.
        """
        from transformers.trainer_pt_utils import LabelSmoother

        if not 0.0 <= label_smoothing <= 1.0:
            raise InputError(f"label_smoothing is {label_smoothing:g}", "it is a part of the loss, from 0 to 1")
        if label_smoothing and label_smoother is not None:
            raise InputError("label_smoothing with a label_smoother", "leave one out")
        self._takes_num_items = takes_num_items(model)
        self._shifts = predicts_next(model)
        self._smoother = label_smoother or (LabelSmoother(epsilon=label_smoothing) if label_smoothing else None)

    @property
    def passes_labels(self) -> bool:
        """Whether the model itself gets the labels."""
        return self._smoother is None

    def __call__(
        self,
        model: torch.nn.Module,
        inputs: Batch,
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> Loss:
        """Return the loss of `model` for `inputs`, a mapping, and its outputs on request.

        A bare tensor has no labels: the model's outputs are returned, and the caller computes the loss.

        Raises:
            InputError: the model returns no loss for these inputs.
        """
        if isinstance(inputs, torch.Tensor):
            return model(inputs)
        if not isinstance(inputs, Mapping):
            raise InputError(
                f"the model's own loss takes its arguments by name, not a {type(inputs).__name__}", _COMPUTE_LOSS
            )
        arguments = dict(inputs)
        labels = arguments.pop("labels", None) if self._smoother is not None else None
        if self._takes_num_items and num_items_in_batch is not None:
            arguments["num_items_in_batch"] = num_items_in_batch
        outputs = model(**arguments)
        if self._smoother is not None and labels is not None:
            loss = self._smoother(outputs, labels, shift_labels=self._shifts, num_items_in_batch=num_items_in_batch)
        elif isinstance(outputs, Mapping) and "loss" not in outputs:
            raise InputError(
                f"the model gives no loss for {', '.join(inputs)}",
                "add labels to the inputs, or compute the loss with compute_loss=CriterionLoss(...)",
            )
        elif isinstance(outputs, torch.Tensor) and outputs.dim():
            raise InputError(f"the model returns a tensor of {outputs.dim()} dimensions, and no loss", _COMPUTE_LOSS)
        elif isinstance(outputs, torch.Tensor):
            loss = outputs
        else:
            loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs[0]
        return (loss, outputs) if return_outputs else loss


class CriterionLoss(torch.nn.Module):  # type: ignore[misc]  # PyTorch is untyped here
    """`criterion(model(inputs), targets)` of a batch `(inputs, targets)`, for models that take no labels.

    A mapping is passed to the model as keywords, a tuple as positional arguments. A criterion with parameters or
    buffers is moved and trained along with its `ModuleWithLoss`.
    """

    def __init__(self, criterion: Callable[[Any, Any], torch.Tensor]) -> None:
        super().__init__()
        self.criterion = criterion

    def forward(
        self,
        model: torch.nn.Module,
        inputs: Batch,
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> Loss:
        """Return the criterion applied to the model's outputs; `num_items_in_batch` is not used.

        Raises:
            InputError: the batch is not a pair.
        """
        arguments, targets = pair(inputs)
        if isinstance(arguments, Mapping):
            outputs = model(**arguments)
        else:
            outputs = model(*arguments) if isinstance(arguments, tuple) else model(arguments)
        loss = self.criterion(outputs, targets)
        return (loss, outputs) if return_outputs else loss


_OPTIONAL = ("return_outputs", "num_items_in_batch")


class FunctionLoss(torch.nn.Module):  # type: ignore[misc]  # PyTorch is untyped here
    """A function with another signature: `function(model, inputs, ...)`, or `function(model, inputs, targets)`.

    The first one gets the other arguments by name, as `transformers.Trainer` passes them; the second one is for batches
    `(inputs, targets)`.
    """

    def __init__(self, function: Callable[..., Loss], parameters: Mapping[str, inspect.Parameter]) -> None:
        super().__init__()
        self.function = function
        kinds = [parameter.kind for parameter in parameters.values()]
        self._takes_targets = len(kinds) == 3 and set(kinds) <= _BY_POSITION and [*parameters][2] not in _OPTIONAL
        takes_any = inspect.Parameter.VAR_KEYWORD in kinds
        self._known = [name for name in _OPTIONAL if takes_any or name in parameters]
        self._required = [name for name in _OPTIONAL if name in parameters and parameters[name].default is _REQUIRED]

    def forward(
        self,
        model: torch.nn.Module,
        inputs: Batch,
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> Loss:
        """Return the function's loss.

        Raises:
            InputError: outputs are requested, or the loss should be divided by `num_items_in_batch`, and the function
                takes no argument of that name; or the batch is not a pair.
        """
        if self._takes_targets and not return_outputs:
            return self.function(model, *pair(inputs))
        if self._takes_targets:
            raise InputError(
                "compute_loss(model, inputs, targets) returns no outputs",
                "give compute_loss the arguments (model, inputs, return_outputs, num_items_in_batch)",
            )
        named: dict[str, Any] = {"num_items_in_batch": num_items_in_batch}
        if return_outputs or "return_outputs" in self._required:  # like the Trainer, which omits it during training
            named["return_outputs"] = return_outputs
        for name in [name for name in named if name not in self._known]:
            if named.pop(name) is not None:
                raise InputError(
                    f"compute_loss takes no {name}", f"give it the argument {name}, which transformers passes by name"
                )
        return self.function(model, inputs, **named)


_REQUIRED = inspect.Parameter.empty
_BY_POSITION = {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}


def with_all_arguments(compute_loss: Callable[..., Any]) -> ComputeLoss:
    """Adapt a function to take all arguments of `Trainer.compute_loss` in order.

    Raises:
        InputError: the function cannot be called with these arguments.
    """
    try:
        signature = inspect.signature(
            compute_loss.forward if isinstance(compute_loss, torch.nn.Module) else compute_loss
        )
    except (TypeError, ValueError):
        return compute_loss
    parameters = signature.parameters
    ordered = [name for name, parameter in parameters.items() if parameter.kind in _BY_POSITION]
    if len(ordered) == len(parameters) == 3 and ordered[2] not in _OPTIONAL:
        return FunctionLoss(compute_loss, parameters)
    in_order = tuple(ordered[2:4]) == _OPTIONAL
    try:
        if in_order:
            signature.bind(None, None, None, None)
        else:
            signature.bind(None, None, **{name: None for name in _OPTIONAL if name in parameters})
    except TypeError as error:
        raise InputError(
            f"compute_loss{signature} cannot be called: {error}",
            "it takes (model, inputs, return_outputs=False, num_items_in_batch=None) or (model, inputs, targets)",
        ) from error
    return compute_loss if in_order else FunctionLoss(compute_loss, parameters)


def pair(batch: Batch) -> tuple[Any, Any]:
    """Return the inputs and targets of a batch.

    Raises:
        InputError: it is not a pair.
    """
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise InputError(f"the batch is a {type(batch).__name__}, not a pair", "call the module with (inputs, targets)")
    inputs, targets = batch
    return inputs, targets


def takes_num_items(model: torch.nn.Module) -> bool:
    """Return whether the model's forward takes `num_items_in_batch`, by the rule of transformers' Trainer."""
    model = without_adapters(model)
    if hasattr(model, "accepts_loss_kwargs"):
        return bool(model.accepts_loss_kwargs)
    parameters = inspect.signature(model.forward).parameters.values()
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)


def predicts_next(model: torch.nn.Module) -> bool:
    """Return whether the logits at a position predict the label of the next one, by the Trainer's rule."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return type(without_adapters(model)).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def settle_loss_function(model: torch.nn.Module) -> None:
    """Fix the loss function that a transformers model would otherwise fall back to at each call.

    Falling back logs a message, and TorchDynamo ends a graph at a log call.
    """
    from transformers.loss.loss_utils import LOSS_MAPPING

    model = without_adapters(model)
    if hasattr(type(model), "loss_function") and getattr(model, "loss_type", None) not in LOSS_MAPPING:
        model.loss_function = model.loss_function


def settle_problem_type(model: torch.nn.Module, compute_loss: ComputeLoss, inputs: Batch) -> None:
    """Record the kind of labels in a classifier's configuration, as its first call would.

    A change during the first call would make TorchDynamo recompile at the second. Nothing is recorded for a
    `compute_loss` that may keep the labels from the model, because the model would not record anything either.
    """
    labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
    if not isinstance(labels, torch.Tensor) or not _passes_labels(compute_loss):
        return
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "problem_type", "") is not None or not _notes_problem_type(module):
            continue
        if config.num_labels == 1:
            config.problem_type = "regression"
        elif config.num_labels > 1 and labels.dtype in (torch.int64, torch.int32):
            config.problem_type = "single_label_classification"
        else:
            config.problem_type = "multi_label_classification"


def _passes_labels(compute_loss: ComputeLoss) -> bool:
    """Return whether the model is known to get the labels."""
    if isinstance(compute_loss, ModelLoss):
        return compute_loss.passes_labels
    from transformers import Trainer

    trainer: Any = getattr(compute_loss, "__self__", None)
    is_trainers_own = getattr(compute_loss, "__func__", None) is Trainer.compute_loss and isinstance(trainer, Trainer)
    return is_trainers_own and trainer.label_smoother is None and trainer.compute_loss_func is None


def _notes_problem_type(module: torch.nn.Module) -> bool:
    """Return whether a transformers model records the kind of its labels when called with them."""
    from transformers.loss.loss_utils import LOSS_MAPPING, ForSequenceClassificationLoss

    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    if code is None or "labels" not in code.co_varnames:
        return False
    loss_type = getattr(module, "loss_type", None)
    return "problem_type" in code.co_names or LOSS_MAPPING.get(loss_type) is ForSequenceClassificationLoss


def without_adapters(model: torch.nn.Module) -> torch.nn.Module:
    """Return the base model of a PEFT model; any other model unchanged."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
