"""What documents of onnxruntime write about a module with its loss works, or the error says what to write."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.trainer_pt_utils import LabelSmoother

from onnxtool.errors import CompilationError, InputError
from onnxtool.torch_backend import OrtBackendOptions
from onnxtool.training import ModuleWithLoss
from onnxtool.training.trainer.losses import CriterionLoss
from tests.torch_backend.conftest import fresh_dynamo  # noqa: F401 - used by being here
from tests.training.trainer.trainers import Sorter, classified

TOLERANCE = 1e-6
"""Relative; float32 sums in another order."""


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def pairs(number: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [(torch.randn(5, 6, generator=draw), torch.randint(0, 3, (5,), generator=draw)) for _ in range(number)]


def text_batch() -> dict[str, torch.Tensor]:
    examples = classified(4)
    return {name: torch.stack([example[name] for example in examples]) for name in examples[0]}


def compute_loss(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross entropy of what the model returns."""
    return nn.CrossEntropyLoss()(model(inputs), targets)


class TrainerOfTheDocument(Trainer):
    """A Trainer whose model is wrapped with its loss, by the method names of Optimum."""

    def create_model_with_loss(self) -> ModuleWithLoss:
        model_with_loss = ModuleWithLoss(self.model, self.args, self.label_smoother)
        model_with_loss.compute_model_plus_loss_internal = types.MethodType(Trainer.compute_loss, model_with_loss)
        return model_with_loss

    def _set_signature_columns_if_needed(self) -> None:
        columns: list[str] | None = getattr(self, "_signature_columns")  # noqa: B009 - mypy sees no type
        if columns is None:
            import inspect

            if isinstance(self.model, ModuleWithLoss):
                signature = inspect.signature(self.model._original_model.forward)
            else:
                signature = inspect.signature(self.model.forward)
            self._signature_columns = [*signature.parameters, *{"label", "label_ids", *self.label_names}]

    def compute_loss(self, model_with_loss: nn.Module, inputs: Any, return_outputs: bool = False) -> Any:
        if isinstance(self.model, ModuleWithLoss):
            dict_inputs = dict(inputs.items())
            return model_with_loss(dict_inputs, return_outputs)
        return super().compute_loss(model_with_loss, inputs, return_outputs)


def trainer_of_the_document(folder: Path, **arguments: Any) -> TrainerOfTheDocument:
    args = TrainingArguments(output_dir=str(folder), use_cpu=True, report_to=[], disable_tqdm=True, **arguments)
    model = Sorter().eval()
    model.config = types.SimpleNamespace()  # the Trainer looks into it where losses are smoothed
    trainer = TrainerOfTheDocument(model=model, args=args)
    trainer.model = trainer.create_model_with_loss()
    return trainer


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_wrapper_of_optimum_computes_the_loss_of_the_trainer(tmp_path: Path, smoothing: float) -> None:
    """Smoothed by the Trainer's smoother; columns, module and arguments have the names that the document uses."""
    trainer = trainer_of_the_document(tmp_path, label_smoothing_factor=smoothing)
    model = trainer.model
    loss, outputs = trainer.compute_loss(model, text_batch(), return_outputs=True)
    expected, theirs = Trainer.compute_loss(trainer, model.module, text_batch(), return_outputs=True)
    torch.testing.assert_close(loss, expected, rtol=TOLERANCE, atol=0)
    torch.testing.assert_close(outputs.logits, theirs.logits, rtol=0, atol=TOLERANCE)
    assert model.backend.execution_count
    assert model.module is model._original_model
    assert (model.args, model.label_smoother) == (trainer.args, trainer.label_smoother)
    trainer._set_signature_columns_if_needed()
    assert set(trainer._signature_columns) >= {"input_ids", "attention_mask", "labels"}


def test_a_method_for_the_loss_may_be_bound_to_the_module() -> None:
    """With the arguments of a Trainer, or without the number of items that Trainers once did not have."""

    def doubled(self: ModuleWithLoss, model: nn.Module, inputs: Any, return_outputs: bool = False) -> Any:
        outputs = model(**inputs)
        return (2 * outputs.loss, outputs) if return_outputs else 2 * outputs.loss

    model = ModuleWithLoss(Sorter().eval())
    model.compute_model_plus_loss_internal = types.MethodType(doubled, model)
    expected = 2 * model.module(**text_batch()).loss
    torch.testing.assert_close(model(text_batch()), expected, rtol=TOLERANCE, atol=0)
    torch.testing.assert_close(
        model.compute_model_plus_loss_internal(model._original_model, text_batch(), False), expected
    )
    with pytest.raises(InputError, match="compiled already"):
        model.compute_model_plus_loss_internal = doubled
    with pytest.raises(InputError, match="takes no num_items_in_batch"):
        model(text_batch(), num_items_in_batch=4)


@pytest.mark.parametrize("inside", [False, True])
def test_the_loop_with_a_function_of_model_inputs_and_targets_trains(inside: bool) -> None:
    """As the document writes it, the loss is PyTorch's; given to the module, it is in onnxruntime with the model."""
    original_model, eager = classifier(), classifier()
    model = ModuleWithLoss(original_model, compute_loss=compute_loss) if inside else ModuleWithLoss(original_model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    reference = torch.optim.Adam(eager.parameters(), lr=0.001)
    for inputs, targets in pairs():
        optimizer.zero_grad()
        loss = model((inputs, targets)) if inside else compute_loss(model, inputs, targets)
        loss.backward()
        optimizer.step()

        reference.zero_grad()
        expected = compute_loss(eager, inputs, targets)
        expected.backward()
        reference.step()
        torch.testing.assert_close(loss, expected, rtol=TOLERANCE, atol=0)
    assert model.backend.execution_count == 6


def test_the_smoother_of_transformers_is_one_of_two_ways_to_smooth() -> None:
    """Both together are refused, and so is a wish in the arguments that nobody would serve."""
    smoothed = ModuleWithLoss(Sorter().eval(), None, LabelSmoother(epsilon=0.2))(text_batch())
    torch.testing.assert_close(smoothed, ModuleWithLoss(Sorter().eval(), label_smoothing=0.2)(text_batch()))
    with pytest.raises(InputError, match="with a label_smoother"):
        ModuleWithLoss(Sorter(), label_smoother=LabelSmoother(), label_smoothing=0.1)
    with pytest.raises(InputError, match="label_smoothing_factor 0.3") as caught:
        ModuleWithLoss(Sorter(), types.SimpleNamespace(label_smoothing_factor=0.3))
    assert "trainer.label_smoother" in caught.value.hint


@pytest.mark.parametrize(
    ("make", "batch", "message"),
    [
        (lambda: ModuleWithLoss(classifier()), pairs()[0], "takes its arguments by name, not a tuple"),
        (lambda: ModuleWithLoss(classifier()), {"input": pairs()[0][0]}, "a tensor of 2 dimensions, and no loss"),
        (lambda: ModuleWithLoss(classifier(), compute_loss=compute_loss), pairs()[0][0][:2], "is a Tensor, not a pair"),
        (
            lambda: ModuleWithLoss(classifier(), compute_loss=CriterionLoss(nn.CrossEntropyLoss())),
            pairs()[0][0][:2],
            "is a Tensor, not a pair",
        ),
    ],
)
def test_a_batch_of_another_kind_names_what_to_pass(make: Any, batch: Any, message: str) -> None:
    """Two rows are no pair, though they unpack like one."""
    with pytest.raises(InputError, match=message) as caught:
        make()(batch)
    assert "(inputs, targets)" in caught.value.hint


def test_outputs_of_a_function_of_model_inputs_and_targets_are_refused() -> None:
    """It returns the loss alone."""
    with pytest.raises(InputError, match="returns no outputs"):
        ModuleWithLoss(classifier(), compute_loss=compute_loss)(pairs()[0], True)


@pytest.mark.parametrize(
    ("name", "way_out"),
    [
        ("target_opset", "exporter"),
        ("patterns", "pre_ort_model_transforms"),
        ("constant_folding", "optimize=False"),
        ("verbose", "explain"),
    ],
)
def test_options_of_another_exporter_are_refused_with_what_stands_for_them(name: str, way_out: str) -> None:
    """By its name."""
    options: dict[str, Any] = {name: 1}
    with pytest.raises(CompilationError, match=f"no option {name}") as caught:
        OrtBackendOptions.from_mapping(options)
    assert f"{name}: " in caught.value.hint
    assert way_out in caught.value.hint
