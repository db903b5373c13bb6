"""Rows without a label are dropped before the output head where that changes nothing, and nowhere else."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch.nn import functional

from onnxtool.torch_backend import OrtBackend
from onnxtool.training.trainer import label_pruning as label_sparsity
from onnxtool.training.trainer.fewer_rows import OUTPUTS
from onnxtool.training.trainer.label_pruning import LabelSparsity
from onnxtool.training.trainer.losses import ComputeLoss, ModelLoss
from onnxtool.training.trainer.module_with_loss import ModuleWithLoss
from tests.torch_backend.conftest import fresh_dynamo  # noqa: F401 - used by being here
from tests.training.trainer.language_models import (
    IGNORED,
    MODELS,
    VOCABULARY,
    Batch,
    batch_of,
    eager_step,
    require_same_step,
)
from tests.training.trainer.language_models import step_of as step
from tests.training.trainer.trainers import Tagger

NUM_ROWS = 3 * 12


def classes_of(name: str) -> int:
    return 5 if name == "bert-tokens" else VOCABULARY


def sparse_loss(
    model: torch.nn.Module,
    sparsity: LabelSparsity,
    batch: Batch,
    compute_loss: ComputeLoss | None = None,
    num_items: torch.Tensor | None = None,
) -> torch.Tensor:
    """The loss that ModuleWithLoss would compile, by eager PyTorch."""
    compute_loss = compute_loss or ModelLoss(model)
    inputs, rows = sparsity.prune(compute_loss, batch, False, num_items)
    sparsity.selection.rows = rows
    try:
        return compute_loss(model, inputs, False, num_items)
    finally:
        sparsity.selection.rows = None


@pytest.mark.parametrize("name", MODELS)
def test_fewer_rows_give_the_same_loss_and_gradients(name: str) -> None:
    """Whatever the head is made of, and whether scores are for the label at their place or for the next one."""
    model, batch = MODELS[name](), batch_of(0.3, classes=classes_of(name))
    sparsity = LabelSparsity(model)
    require_same_step(step(lambda: sparse_loss(model, sparsity, batch), model), eager_step(model, batch))
    report = sparsity.report
    assert report.num_pruned_batches == 1, str(report)
    assert report.num_kept_rows < report.num_rows == NUM_ROWS


@pytest.mark.slow
def test_compiled_steps_are_those_of_eager_pytorch() -> None:
    """One forward and one backward graph serve batches with many, few and no labels, with dropout as it was.

    The number of rows is dynamic where sizes are not; what is drawn, and sums of embeddings, alone stay in PyTorch.
    """
    model = MODELS["bert"]()
    module = ModuleWithLoss(model, dynamic=False)
    for seed, share in enumerate((0.15, 0.5, 0.0, 0.3)):
        batch = batch_of(share, seed)
        require_same_step(step(functools.partial(module.forward, batch), model), eager_step(model, batch))
    forward, backward = module.explain().graphs
    assert (forward.kind, backward.kind, len(forward.partitions)) == ("forward", "backward", 1)
    assert {node.operator.split(".")[1] for node in forward.eager} == {"empty", "bernoulli", "div"}  # drawn and scaled
    assert {node.operator.split(".")[1] for node in backward.eager} <= {"embedding_dense_backward"}
    assert module.label_sparsity.num_pruned_batches == 4


@pytest.mark.parametrize(("name", "num_items"), [("bert", None), ("llama", 23)])
def test_smoothed_and_summed_losses_drop_rows_as_well(name: str, num_items: int | None) -> None:
    """The smoothed loss ignores the rows that the plain one does; a sum over rows is divided by the given number."""
    model, batch = MODELS[name](), batch_of(0.3)
    sparsity, items = LabelSparsity(model), None if num_items is None else torch.tensor(num_items)
    actual = step(lambda: sparse_loss(model, sparsity, batch, ModelLoss(model, 0.1), items), model)
    require_same_step(actual, eager_step(model, batch, 0.1, num_items))
    assert sparsity.report.num_pruned_batches == 1


@pytest.mark.parametrize("name", ["bert", "llama"])
@pytest.mark.parametrize("num_items", [None, 7])
def test_no_labels_at_all_give_what_pytorch_gives(name: str, num_items: int | None) -> None:
    """The mean of nothing is not a number, and no sum is zero."""
    model, batch = MODELS[name](), batch_of(0.0)
    items = None if num_items is None else torch.tensor(num_items)
    actual = step(lambda: sparse_loss(model, LabelSparsity(model), batch, num_items=items), model)
    require_same_step(actual, eager_step(model, batch, num_items=num_items))


def test_where_nearly_all_labels_count_all_rows_go_through_the_head() -> None:
    """Gathering them would cost what it saves."""
    model, batch = MODELS["bert"](), batch_of(1.0)
    sparsity = LabelSparsity(model)
    inputs, rows = sparsity.prune(ModelLoss(model), batch, False, None)
    assert rows is None
    assert inputs is batch
    assert sparsity.report.reasons == ((label_sparsity.DENSE, 1),)


def test_the_part_of_the_model_around_the_head_gets_fewer_rows_too() -> None:
    """BERT's head has a transform of its own, which is hidden size squared a row."""
    model = MODELS["bert"]()
    seen = []
    model.cls.predictions.transform.register_forward_hook(lambda _m, _i, output: seen.append(output.shape[1]))
    sparsity = LabelSparsity(model)
    sparse_loss(model, sparsity, batch_of(0.15))
    assert seen[-1] == sparsity.report.num_kept_rows < NUM_ROWS


def test_the_trial_finds_out_what_a_score_is_for() -> None:
    """A decoder that transformers does not know is tried first as a model whose scores are for their own place."""
    model, batch = type("Decoder", (transformers.LlamaForCausalLM,), {})(MODELS["llama"]().config), batch_of(0.5)
    sparsity = LabelSparsity(model)
    require_same_step(step(lambda: sparse_loss(model, sparsity, batch), model), eager_step(model, batch))
    assert sparsity.report.num_pruned_batches == 1


def test_a_first_batch_without_labels_hides_nothing_from_the_trial() -> None:
    """It makes up its own."""
    model = MODELS["bert"]()
    sparsity = LabelSparsity(model)
    loss: Any = all_scores
    for share in (0.0, 0.5):
        assert sparsity.prune(loss, batch_of(share), False, None)[1] is None
    assert "differs by" in str(sparsity.report)


def test_the_trial_leaves_no_trace() -> None:
    """Random numbers, buffers and gradients are what they were before."""
    model = MODELS["bert"]()
    model.register_buffer("num_calls", torch.tensor(0))
    model.cls.register_forward_hook(lambda _m, _i, _o: model.num_calls.add_(1))
    before = torch.get_rng_state()
    LabelSparsity(model).prune(ModelLoss(model), batch_of(0.15), False, None)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.num_calls == 0
    assert all(parameter.grad is None for parameter in model.parameters())


def all_scores(
    model: torch.nn.Module, inputs: Any, _return_outputs: bool = False, _num_items: torch.Tensor | None = None
) -> torch.Tensor:
    """A loss that wants scores to be small, those of ignored rows as well."""
    outputs = model(**inputs)
    return outputs.loss + 0.01 * outputs.logits.logsumexp(-1).square().mean()


def weighted(
    model: torch.nn.Module, inputs: Any, _return_outputs: bool = False, _num_items: torch.Tensor | None = None
) -> torch.Tensor:
    """A loss that weighs tokens by their place."""
    labels = inputs["labels"]
    losses = functional.cross_entropy(
        model(**{**inputs, "labels": None}).logits.flatten(0, 1),
        labels.flatten(),
        ignore_index=IGNORED,
        reduction="none",
    )
    return (losses * torch.arange(labels.numel())).sum()


def without_head(
    model: torch.nn.Module, inputs: Any, _return_outputs: bool = False, _num_items: torch.Tensor | None = None
) -> torch.Tensor:
    """A loss of the hidden states."""
    return model.base_model(input_ids=inputs["input_ids"])[0].square().mean()


@pytest.mark.parametrize(
    ("compute_loss", "reason"),
    [(all_scores, "differs by"), (weighted, "differs by"), (without_head, "called 0 times")],
)
def test_a_loss_that_needs_all_rows_gets_them(compute_loss: Any, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    """The trial finds out, and says so once in the log."""
    model, batch = MODELS["bert"](), batch_of(0.15)
    sparsity = LabelSparsity(model)
    for _ in range(2):
        inputs, rows = sparsity.prune(compute_loss, batch, False, None)
        assert rows is None
        assert inputs is batch
    assert [count for _, count in sparsity.report.reasons] == [2]
    assert reason in str(sparsity.report)
    assert len(caplog.records) == 1
    assert reason in caplog.text


def test_dropout_in_front_of_the_head_gets_all_rows() -> None:
    """It would draw other numbers for fewer rows, so that only the head after it gets fewer."""
    model = MODELS["bert"]()
    model.cls.predictions.transform.dense = torch.nn.Sequential(
        model.cls.predictions.transform.dense, torch.nn.Dropout(0.3)
    )
    batch, sparsity = batch_of(0.15), LabelSparsity(model)
    require_same_step(step(lambda: sparse_loss(model, sparsity, batch), model), eager_step(model, batch))
    assert sparsity.selection.module is model.cls.predictions.decoder


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda batch: {**batch, "labels": batch["labels"][:, 0]}, label_sparsity.NO_LABELS),
        (lambda batch: {**batch, "labels": batch["labels"].float()}, label_sparsity.NO_LABELS),
        (lambda batch: {"input_ids": batch["input_ids"]}, label_sparsity.NO_LABELS),
    ],
)
def test_labels_of_another_kind_leave_the_batch_as_it_is(change: Callable[[Batch], Batch], reason: str) -> None:
    """One class for a whole text, or numbers."""
    model = MODELS["bert"]()
    sparsity, batch = LabelSparsity(model), change(batch_of(0.15))
    assert sparsity.prune(ModelLoss(model), batch, False, None) == (batch, None)
    assert sparsity.report.reasons == ((reason, 1),)


def test_it_can_be_switched_off_and_says_so() -> None:
    """Then no hook is left in the model."""
    model = MODELS["bert"]()
    sparsity = LabelSparsity(model, allowed=False)
    assert sparsity.prune(ModelLoss(model), batch_of(0.15), False, None)[1] is None
    assert label_sparsity.NOT_ALLOWED in str(sparsity.report)
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_outputs_that_are_asked_for_are_those_of_all_rows() -> None:
    """Scores of some rows, as if they were all, would be wrong."""
    model = MODELS["bert"]()
    sparsity = LabelSparsity(model)
    assert sparsity.prune(ModelLoss(model), batch_of(0.15), True, None)[1] is None
    assert OUTPUTS in str(sparsity.report)


def test_a_copy_drops_rows_of_its_own() -> None:
    """A copied module neither calls the original's model nor selects rows in it."""
    module, batch = ModuleWithLoss(Tagger()), batch_of(0.15)
    module(batch)
    other = copy.deepcopy(module)
    with torch.no_grad():
        other.module.head.bias.add_(1.0)
        other.module.embedding.weight.mul_(2.0)
    require_same_step(step(lambda: other(batch), other.module), eager_step(other.module, batch))
    assert isinstance(other.backend, OrtBackend)
    assert other.backend is not module.backend
    assert other.label_sparsity.num_pruned_batches == 2
