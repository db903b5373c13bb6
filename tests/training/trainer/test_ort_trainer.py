"""OrtTrainer gives the losses and parameters of transformers' Trainer, in whatever way that is asked to train."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Trainer, TrainerCallback

from onnxtool.torch_backend import OrtBackend, OrtBackendOptions
from onnxtool.training import ModuleWithLoss, OrtTrainer, create_model_with_loss
from tests.training.trainer.trainers import (
    TOLERANCE,
    Example,
    Sorter,
    Tagger,
    classified,
    classifier,
    continued,
    losses_of,
    require_same_training,
    trainer_of,
)


def padded(examples: list[Example]) -> Example:
    """Pad to the longest text of the batch."""
    texts = [example["input_ids"] for example in examples]
    masks = [example["attention_mask"] for example in examples]
    return {
        "input_ids": torch.nn.utils.rnn.pad_sequence(texts, batch_first=True),
        "attention_mask": torch.nn.utils.rnn.pad_sequence(masks, batch_first=True),
        "labels": torch.stack([example["labels"] for example in examples]),
    }


def both(
    tmp_path: Path,
    make: Callable[[], torch.nn.Module],
    examples: Sequence[Example],
    arguments: dict[str, Any] | None = None,
    *,
    classes: tuple[type[Trainer], type[OrtTrainer]] = (Trainer, OrtTrainer),
    times: int = 1,
    tolerance: float = TOLERANCE,
    **of_trainer: Any,
) -> OrtTrainer:
    """Train by both, insist on the same, and return the OrtTrainer."""
    trainers = []
    for trainer_class in classes:
        trainer = trainer_of(
            trainer_class, make(), examples, tmp_path / trainer_class.__name__, arguments, **of_trainer
        )
        for _ in range(times):
            trainer.train()
        trainers.append(trainer)
    plain, ours = trainers
    assert isinstance(ours, OrtTrainer)
    require_same_training(plain, ours, tolerance)
    return ours


def test_smoothed_labels_and_clipped_gradients(tmp_path: Path) -> None:
    """With dropout, whose masks are those of the same seed, and with Adam.

    Adam divides a gradient by its own size. With its default epsilon of 1e-8, the first step turns a rounding error of
    4e-12 in a gradient of 1e-9 into 2e-5 of a parameter: both trainings are then as far from one in float64. An epsilon
    of the size of the gradients adds nothing to their errors, and leaves the step to depend on the norm that they are
    clipped to.
    """
    arguments = {"label_smoothing_factor": 0.1, "max_grad_norm": 0.1, "optim": "adamw_torch", "adam_epsilon": 1e-3}
    trainer = both(tmp_path, classifier, classified(12), arguments)
    assert [graph.kind for graph in trainer.explain().graphs] == ["forward", "backward"]


@pytest.mark.slow
def test_the_last_accumulation_is_smaller_and_counts_its_labels(tmp_path: Path) -> None:
    """11 texts are batches of 4, 4 and 3, two a step; each has its own number of labels that count."""
    trainer = both(
        tmp_path, Tagger, continued(11), {"gradient_accumulation_steps": 2, "max_steps": -1, "num_train_epochs": 2}
    )
    assert len(losses_of(trainer)) == 4
    assert len(trainer.explain().graphs) <= 4  # one more pair for the size that changes
    assert trainer.model_with_loss is not None
    assert trainer.model_with_loss.label_sparsity.num_pruned_batches == 6


@pytest.mark.slow
def test_sizes_that_change_with_every_batch_take_few_compilations(tmp_path: Path) -> None:
    """Batches are padded to their longest text, and the last of an epoch has fewer: each is a size that may change."""
    examples = classified(22, lengths=(5, 9, 7, 12, 6, 10, 8))
    trainer = both(tmp_path, Sorter, examples, {"max_steps": 9}, data_collator=padded)
    assert len(trainer.explain().graphs) <= 6


def test_autocast_is_around_the_model_and_not_around_the_loss(tmp_path: Path) -> None:
    """Products are bfloat16, which keeps 8 bits, and smoothed losses float32: they differ in the last of those bits."""
    arguments = {"bf16": True, "label_smoothing_factor": 0.1}
    trainer = both(tmp_path, Tagger, continued(12), arguments, tolerance=2e-4)
    assert trainer.compute_loss(trainer.model_wrapped, padded(continued(4))).dtype == torch.float32
    forward = trainer.explain().graphs[0]
    assert {node.reason for node in forward.eager if node.operator == "aten.addmm.default"} == {
        "onnxruntime has no bfloat16 kernels for the CPU"
    }


@pytest.mark.slow
def test_checkpointed_activations_give_the_losses_of_the_trainer(tmp_path: Path) -> None:
    """Dropout's masks of the second forward are those of the first."""
    both(tmp_path, classifier, classified(12), {"activation_checkpointing": True})


def test_a_loss_function_of_the_callers(tmp_path: Path) -> None:
    """It gets outputs, labels and their number, inside of the compiled graph."""

    def weighted(outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | None = None) -> torch.Tensor:
        weights = torch.tensor([1.0, 2.0, 4.0])
        losses = torch.nn.functional.cross_entropy(outputs["logits"], labels, weights, reduction="sum")
        return losses / num_items_in_batch

    trainer = both(tmp_path, Sorter, classified(16), {"gradient_accumulation_steps": 2}, compute_loss_func=weighted)
    assert [graph.kind for graph in trainer.explain().graphs] == ["forward", "backward"]


@pytest.mark.parametrize("asks_the_class_above", [True, False])
def test_the_loss_of_a_subclass_is_compiled(tmp_path: Path, asks_the_class_above: bool) -> None:
    """It is called with the original model, as under any Trainer."""

    class Halved:
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            if asks_the_class_above:
                loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)  # type: ignore[misc]
            else:
                outputs = model(**inputs)
                loss = outputs.loss
            loss = loss / 2 + outputs.logits.pow(2).mean()
            return (loss, outputs) if return_outputs else loss

    class HalvedTrainer(Halved, Trainer):
        pass

    class HalvedOrtTrainer(Halved, OrtTrainer):
        pass

    trainer = both(tmp_path, Sorter, classified(12), classes=(HalvedTrainer, HalvedOrtTrainer))
    assert [graph.kind for graph in trainer.explain().graphs] == ["forward", "backward"]


@pytest.mark.parametrize("return_dict", [False, True], ids=["tuples", "a dictionary"])
def test_a_module_that_is_not_of_transformers(tmp_path: Path, return_dict: bool) -> None:
    """A loss, in a dictionary or as the first of a tuple, is all that a Trainer asks for."""
    both(tmp_path, lambda: Sorter(return_dict=return_dict), classified(12))


@pytest.mark.slow
def test_a_second_train_goes_on_with_what_is_compiled(tmp_path: Path) -> None:
    """The losses of a Trainer that trains twice, and no further graph."""
    trainer = both(tmp_path, Sorter, classified(12), {"bf16": True}, times=2, tolerance=2e-4)
    forward = trainer.model.forward
    trainer.train()
    assert trainer.model.forward is forward  # and not with one more autocast around it
    assert [graph.kind for graph in trainer.explain().graphs] == ["forward", "backward"]


def test_evaluation_between_steps_is_the_original_models(tmp_path: Path) -> None:
    """Its losses are the Trainer's, it disturbs neither the training nor what is compiled."""
    arguments = {"eval_strategy": "steps", "eval_steps": 1}
    trainer = both(tmp_path, Sorter, classified(12), arguments, eval_dataset=classified(6))
    assert len([entry for entry in trainer.state.log_history if "eval_loss" in entry]) == 3
    assert [graph.kind for graph in trainer.explain().graphs] == ["forward", "backward"]


def test_the_model_that_is_evaluated_saved_and_called_back_is_the_original(tmp_path: Path) -> None:
    """Its names are those of the checkpoint; nothing of the module with the loss is in the file."""
    seen: list[torch.nn.Module] = []

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **about: Any) -> None:
            seen.append(about["model"])

    model = Sorter()
    trainer = trainer_of(OrtTrainer, model, classified(12), tmp_path, callbacks=[Watch()])
    trainer.train()
    assert trainer.model is model
    assert seen == [model] * 3
    assert isinstance(trainer.model_wrapped, ModuleWithLoss)
    calls = trainer.ort_backend.execution_count
    predicted = trainer.predict(classified(4))
    assert trainer.ort_backend.execution_count == calls
    trainer.save_model(str(tmp_path / "saved"))
    loaded = Sorter().eval()
    loaded.load_state_dict(load_file(tmp_path / "saved" / "model.safetensors"))
    with torch.no_grad():
        logits = loaded(**padded(classified(4))).logits.numpy()
    torch.testing.assert_close(logits, predicted.predictions, rtol=0, atol=1e-6)


def test_what_ran_where_is_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """After the first step, with the text of explain()."""
    backend = OrtBackend(OrtBackendOptions())
    trainer = trainer_of(OrtTrainer, Sorter(), classified(12), tmp_path, ort_options=backend)
    assert str(trainer.explain()) == "no graph was compiled"
    with caplog.at_level(logging.INFO, logger="onnxtool"):
        trainer.train()
    (message,) = [record.getMessage() for record in caplog.records if record.name == OrtTrainer.__module__]
    assert str(trainer.explain()) in message
    assert str(trainer.model_with_loss.label_sparsity) not in message  # which went on counting
    assert "label sparsity: 0 of 1 batches" in message
    assert "backward: " in message
    assert trainer.ort_backend is backend


def test_any_trainer_gives_its_loss_as_a_module(tmp_path: Path) -> None:
    """Of the original model, label smoothing and all, with the same gradients."""
    trainer = trainer_of(Trainer, Tagger(), continued(4), tmp_path, {"label_smoothing_factor": 0.1})
    module = create_model_with_loss(trainer)
    assert module.module is trainer.model
    assert module.config is trainer.model.config
    batch = padded(continued(4))
    trainer.model.eval()
    expected = trainer.compute_loss(trainer.model, dict(batch))
    expected.backward()
    gradients = {name: value.grad.clone() for name, value in trainer.model.named_parameters()}
    trainer.model.zero_grad()
    loss = module(batch)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for name, value in trainer.model.named_parameters():
        torch.testing.assert_close(value.grad, gradients[name], rtol=0, atol=1e-6)
