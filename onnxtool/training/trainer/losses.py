"""What a training step computes of a model and a batch: the model's own loss, or a criterion's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias

import torch

from onnxtool.errors import InputError

Batch = Any
"""What a model is called with: a mapping of names to tensors, or what a criterion's user hands over."""

Loss: TypeAlias = torch.Tensor | tuple[torch.Tensor, Any]
"""The loss, float [], and with `return_outputs` the outputs of the model."""


class ComputeLoss(Protocol):
    """The signature of `transformers.Trainer.compute_loss`, version 5.23."""

    def __call__(
        self,
        model: torch.nn.Module,
        inputs: Batch,
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> Loss:
        """Return the loss of `model` for `inputs`, and its outputs where they are asked for."""


class ModelLoss:
    """The loss that a model of transformers computes of its `labels`, or the smoothed one in its place.

    It does what `transformers.Trainer.compute_loss` does, without a Trainer: `num_items_in_batch`, the number of labels
    that count in all batches of one step of the optimizer, goes to models whose forward takes further keywords.
    """

    def __init__(self, model: torch.nn.Module, label_smoothing: float = 0.0) -> None:
        """Read off `model` how its loss has to be called.

        Args:
            model: a model of transformers, or with its conventions.
            label_smoothing: what part of the loss is the mean over all classes; 0 for the model's own loss.
        """
        from transformers.trainer_pt_utils import LabelSmoother

        self._takes_num_items = takes_num_items(model)
        self._shifts = predicts_next(model)
        self._smoother = LabelSmoother(epsilon=label_smoothing) if label_smoothing else None

    def __call__(
        self,
        model: torch.nn.Module,
        inputs: Batch,
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> Loss:
        """Return the loss of `model` for `inputs`, a mapping, and its outputs where they are asked for.

        Raises:
            InputError: the model gives no loss for these inputs.
        """
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
        else:
            loss = outputs["loss"] if isinstance(outputs, Mapping) else outputs[0]
        return (loss, outputs) if return_outputs else loss


class CriterionLoss(torch.nn.Module):  # type: ignore[misc]  # PyTorch has no types here
    """`criterion(model(inputs), targets)` of a batch `(inputs, targets)`, for models that know nothing of labels.

    Inputs that are a mapping are the model's keywords, those that are a tuple its positional arguments. A criterion
    with parameters or buffers moves and trains with the `ModuleWithLoss` that it is given to.
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
        """Return the criterion of the model's outputs; `num_items_in_batch` is for losses of labels."""
        arguments, targets = inputs
        if isinstance(arguments, Mapping):
            outputs = model(**arguments)
        else:
            outputs = model(*arguments) if isinstance(arguments, tuple) else model(arguments)
        loss = self.criterion(outputs, targets)
        return (loss, outputs) if return_outputs else loss


def takes_num_items(model: torch.nn.Module) -> bool:
    """Return whether the model's forward takes `num_items_in_batch`, by the rule of transformers' Trainer."""
    model = without_adapters(model)
    if hasattr(model, "accepts_loss_kwargs"):
        return bool(model.accepts_loss_kwargs)
    parameters = inspect.signature(model.forward).parameters.values()
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)


def predicts_next(model: torch.nn.Module) -> bool:
    """Return whether the model's scores at a position are for the label of the next one, by the rule of the Trainer."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return type(without_adapters(model)).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def settle_loss_function(model: torch.nn.Module) -> None:
    """Let a model of transformers keep the loss function that it falls back to at each call.

    Falling back logs, and a graph ends where something is logged.
    """
    from transformers.loss.loss_utils import LOSS_MAPPING

    model = without_adapters(model)
    if hasattr(type(model), "loss_function") and getattr(model, "loss_type", None) not in LOSS_MAPPING:
        model.loss_function = model.loss_function


def without_adapters(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside of one of PEFT; any other model as it is."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
