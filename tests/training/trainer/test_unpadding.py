"""Rows of padding are left out of the layers where that changes nothing, and nowhere else."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import transformers
from torch.nn import functional

from onnxtool.training import ModuleWithLoss
from onnxtool.training.trainer import unpadding
from onnxtool.training.trainer.fewer_rows import INFERENCE, OUTPUTS
from onnxtool.training.trainer.losses import ModelLoss
from onnxtool.training.trainer.unpadded_layers import RowLayout, enter, leave, padded, unpadded
from onnxtool.training.trainer.unpadding import Unpadding
from tests.torch_backend.conftest import fresh_dynamo  # noqa: F401 - used by being here
from tests.training.trainer.language_models import (
    IGNORED,
    MODELS,
    VOCABULARY,
    Batch,
    batch_of,
    eager_step,
    require_same_step,
    step_of,
)

LENGTHS = (12, 5, 2)


def ragged(share: float = 0.3, seed: int = 0, lengths: tuple[int, ...] = LENGTHS, *, is_left: bool = False) -> Batch:
    """Sequences of these lengths, the first one the longest, with labels for a share of the tokens."""
    batch = batch_of(share, seed, VOCABULARY)
    places = torch.arange(12)
    mask = torch.stack([(places >= 12 - n) if is_left else (places < n) for n in lengths]).long()
    return {
        "input_ids": batch["input_ids"] * mask,
        "attention_mask": mask,
        "labels": batch["labels"].masked_fill(mask == 0, IGNORED),
    }


def unpadded_loss(model: torch.nn.Module, rows: Unpadding, batch: Batch, compute_loss: Any = None) -> torch.Tensor:
    """The loss that ModuleWithLoss would compile, by eager PyTorch."""
    compute_loss = compute_loss or ModelLoss(model)
    layouts, with_head = rows.layouts(compute_loss, batch, False, None, False)
    enter(rows.regions, layouts, with_head)
    try:
        return compute_loss(model, batch, False, None)
    finally:
        leave(rows.regions)
        rows.count_batch()


def layouts_of(rows: Unpadding, batch: Batch, loss: Any, return_outputs: bool = False) -> tuple[RowLayout, ...]:
    """The layouts of a batch that is counted, and computed by nobody."""
    layouts, _ = rows.layouts(loss, batch, return_outputs, None, False)
    rows.count_batch()
    return layouts


def model_of(name: str) -> Any:
    """One of the models for tokens, or one that is tried for its layers alone."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "pad_token_id": 0,
    }
    if name == "gemma3":
        windowed = {"sliding_window": 4, "head_dim": 8, "num_key_value_heads": 1, "sliding_window_pattern": 2}
        return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**sizes, **windowed)).train()
    if name == "qwen3":
        grouped = {"num_key_value_heads": 1, "head_dim": 8}
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, **grouped)).train()
    return MODELS[name]()


ENCODERS = ("bert", "roberta", "distilbert", "electra", "modernbert")
DECODERS = ("llama", "qwen3", "gemma3")


@pytest.mark.parametrize(
    ("name", "is_left"), [*((name, False) for name in (*ENCODERS, *DECODERS)), *((name, True) for name in ENCODERS)]
)
def test_fewer_rows_give_the_same_loss_and_gradients(name: str, is_left: bool) -> None:
    """Whatever positions are made of, with windows and grouped heads, and with the dropout of all rows."""
    model, batch = model_of(name), ragged(is_left=is_left)
    rows = Unpadding(model)
    require_same_step(step_of(lambda: unpadded_loss(model, rows, batch), model), eager_step(model, batch))
    report = rows.report
    assert report.num_pruned_batches == 1, str(report)
    assert (report.num_kept_rows, report.num_rows) == (sum(LENGTHS), 36)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("albert", unpadding.NO_LAYERS),  # its layers are one
        ("t5", unpadding.NO_LAYERS),  # two stacks
        ("gpt2", unpadding.NOT_FOUND),  # but another view of them
    ],
)
def test_layers_of_another_kind_compute_all_rows(name: str, reason: str) -> None:
    """And the loss is what it was."""
    model, batch = model_of(name), ragged()
    rows = Unpadding(model)
    require_same_step(step_of(lambda: unpadded_loss(model, rows, batch), model), eager_step(model, batch))
    assert [text for text, _ in rows.report.reasons] == [reason]


@pytest.mark.slow
def test_compiled_steps_are_those_of_eager_pytorch() -> None:
    """One forward and one backward graph serve batches with much and little padding, together with pruned labels."""
    model = model_of("llama")
    module = ModuleWithLoss(model)
    for seed, lengths in enumerate([(12, 5, 2), (12, 1, 1), (12, 8, 9), (3, 12, 4)]):
        batch = ragged(0.5, seed, lengths)
        require_same_step(step_of(functools.partial(module.forward, batch), model), eager_step(model, batch))
    assert [graph.kind for graph in module.explain().graphs] == ["forward", "backward"]
    assert module.unpadding.num_pruned_batches == module.label_sparsity.num_pruned_batches == 4
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # TorchDynamo looks at it
def test_a_loss_that_interrupts_its_graph_is_compiled_once_for_all_sizes() -> None:
    """As the loss of SPLADE's trainer does, which looks at its parts."""

    def loss(model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> torch.Tensor:
        value = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, 0].sum()
        return value * 2 if value.isnan() else value

    model = model_of("distilbert")
    module = ModuleWithLoss(model, compute_loss=loss)
    for seed, lengths in enumerate([(12, 5, 2), (12, 1, 1), (12, 8, 9), (3, 12, 4)]):
        batch = ragged(0.5, seed, lengths)
        expected = step_of(functools.partial(loss, model, batch, False, None), model)
        require_same_step(step_of(functools.partial(module.forward, batch), model), expected)
    assert module.unpadding.num_pruned_batches == 4
    assert [graph.kind for graph in module.explain().graphs] == ["forward", "backward"]


def sparse(model: Any, inputs: Any, _return_outputs: bool = False, _num_items: Any = None) -> torch.Tensor:
    """The loss of SPLADE: the largest score of each word over the tokens of a text."""
    logits = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
    vectors = (torch.log1p(torch.relu(logits)) * inputs["attention_mask"][..., None]).amax(1)
    return functional.cross_entropy(vectors @ vectors.flip(0).T, torch.arange(len(vectors)))


def test_the_head_of_splade_gets_the_rows_of_tokens_alone() -> None:
    """It has as many columns as there are words, and most of the work of a small model."""
    model, batch, seen = model_of("bert"), ragged(), []
    model.cls.register_forward_hook(lambda _m, _i, output: seen.append(tuple(output.shape)))
    rows = Unpadding(model)
    actual = step_of(lambda: unpadded_loss(model, rows, batch, sparse), model)
    assert seen[-1] == (1, sum(LENGTHS), VOCABULARY)
    require_same_step(actual, step_of(lambda: sparse(model, batch), model))
    assert rows.report.num_pruned_batches == 1, str(rows.report)


def hidden(model: Any, inputs: Any) -> torch.Tensor:
    return model.base_model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])[0]


LOSSES: dict[str, Any] = {
    "mean of all rows": lambda states, _mask: states.mean(),
    "last position": lambda states, _mask: states[:, -1].sum(),
    "a position that is a token in this batch": lambda states, _mask: states[:, 1].square().sum(),
    "a trace of padding": lambda states, mask: states[:, 0].sum() + 1e-6 * (states * (1 - mask)).sum(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_reads_padding_gets_it(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """However little: with weights of exactly zero a loss is the same to the last bit, with others it is not."""
    model, batch = model_of("bert"), ragged()

    def loss(model: Any, inputs: Any, _return_outputs: bool, _num_items: Any) -> torch.Tensor:
        return LOSSES[name](hidden(model, inputs), inputs["attention_mask"][..., None])

    rows = Unpadding(model)
    for _ in range(2):
        require_same_step(
            step_of(lambda: unpadded_loss(model, rows, batch, loss), model),
            step_of(lambda: loss(model, batch, False, None), model),
        )
    assert rows.report.reasons == (("the loss depends on the rows of padding", 2),)
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    "read",
    [
        lambda states, _mask: states[:, 0].cos().sum(),
        lambda states, mask: ((states * mask).sum(1) / mask.sum(1)).cos().sum(),
        lambda states, mask: states.masked_fill(mask == 0, -1e9).amax(1).sum(),
        lambda states, mask: states[torch.arange(len(states)), mask[..., 0].sum(1) - 1].cos().sum(),
    ],
)
def test_every_pooling_of_tokens_is_known_by_its_independence(read: Any) -> None:
    """The first token, the mean, the maximum and the last token."""
    model, batch = model_of("bert"), ragged()

    def loss(model: Any, inputs: Any, _return_outputs: bool, _num_items: Any) -> torch.Tensor:
        return read(hidden(model, inputs), inputs["attention_mask"][..., None])

    rows = Unpadding(model)
    require_same_step(
        step_of(lambda: unpadded_loss(model, rows, batch, loss), model),
        step_of(lambda: loss(model, batch, False, None), model),
    )
    assert rows.report.num_pruned_batches == 1, str(rows.report)


def test_each_of_several_losses_is_checked() -> None:
    """The trainer of sentence-transformers takes the name of the data out of the batch, and its loss by that."""
    model, batch = model_of("bert"), ragged()
    losses: dict[str, Any] = {"first": lambda states: states[:, 0].cos().sum(), "mean": lambda states: states.mean()}

    def loss(model: Any, inputs: Any, _return_outputs: bool, _num_items: Any) -> torch.Tensor:
        return losses[inputs.pop("dataset_name")](hidden(model, inputs))

    rows = Unpadding(model)
    for name in losses:
        named = {**batch, "dataset_name": name}
        require_same_step(
            step_of(functools.partial(unpadded_loss, model, rows, dict(named), loss), model),
            step_of(functools.partial(loss, model, dict(named), False, None), model),
        )
    assert rows.report.num_pruned_batches == 1
    assert rows.report.reasons == (("the loss depends on the rows of padding", 1),)


class AcrossRows(torch.nn.Module):
    """A layer's part that does not compute each row by itself."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states + torch.roll(states, 1, dims=1) * 1e-2


def test_a_layer_that_mixes_rows_keeps_the_padding() -> None:
    """A convolution over positions would join the end of a text and the beginning of the next one."""
    model, batch = model_of("bert"), ragged()
    model.bert.encoder.layer[0].output.dense = torch.nn.Sequential(
        model.bert.encoder.layer[0].output.dense, AcrossRows()
    )
    rows = Unpadding(model)
    require_same_step(step_of(lambda: unpadded_loss(model, rows, batch), model), eager_step(model, batch))
    assert rows.report.num_pruned_batches == 0
    assert "padding" in str(rows.report)


def test_a_decoder_predicts_the_first_token_from_padding_on_its_left() -> None:
    """Its row has no label, and the loss reads it."""
    model = model_of("llama")
    rows = Unpadding(model)
    assert layouts_of(rows, ragged(1.0, is_left=True), ModelLoss(model)) == ()
    assert rows.report.reasons == (("the loss depends on the rows of padding", 1),)


def test_a_first_batch_without_labels_decides_nothing() -> None:
    """The mean of nothing is not a number, and the next batch is tried."""
    model = model_of("bert")
    rows = Unpadding(model)
    assert layouts_of(rows, ragged(0.0), ModelLoss(model)) == ()
    assert layouts_of(rows, ragged(1.0), ModelLoss(model))
    assert rows.report.reasons == ((unpadding.FLAT, 1),)


def test_a_batch_with_little_padding_begins_nothing_and_uses_what_there_is() -> None:
    """A graph for fewer rows is made where they are far fewer; then it serves all batches."""
    model, compute_loss = model_of("bert"), ModelLoss(model_of("bert"))
    rows, dense = Unpadding(model), [ragged(lengths=(12, 12, 11)), ragged(lengths=(12, 12, 12))]
    assert [layouts_of(rows, batch, compute_loss) for batch in dense] == [(), ()]
    assert all(layouts_of(rows, batch, compute_loss) for batch in [ragged(), *dense])
    assert rows.report.reasons == ((unpadding.DENSE, 2),)
    for batch in dense:
        require_same_step(
            step_of(functools.partial(unpadded_loss, model, rows, batch), model), eager_step(model, batch)
        )


def with_hole(batch: Batch) -> Batch:
    mask = batch["attention_mask"].clone()
    mask[0, 3] = 0
    return {**batch, "attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, IGNORED)}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (with_hole, unpadding.NOT_AT_ONE_END),
        (lambda batch: ragged(lengths=(12, 0, 2)), unpadding.NOT_AT_ONE_END),
        (lambda batch: {**batch, "labels": batch["input_ids"]}, unpadding.LABELED),
        (lambda batch: {"input_ids": batch["input_ids"], "labels": batch["labels"]}, unpadding.NO_MASK),
        (lambda batch: {**batch, "attention_mask": batch["attention_mask"].float()}, unpadding.NO_MASK),
    ],
)
def test_a_batch_of_another_kind_keeps_its_padding_and_says_why(change: Any, reason: str) -> None:
    """Each batch is looked at: what the check of the first one cannot show is refused."""
    model = model_of("bert")
    rows = Unpadding(model)
    unpadded_loss(model, rows, ragged())
    assert layouts_of(rows, change(ragged()), ModelLoss(model)) == ()
    assert rows.report.reasons == ((reason, 1),)
    assert rows.report.num_pruned_batches == 1


def test_padding_at_the_other_end_is_checked_by_itself() -> None:
    """The first position is a token with padding at the right, and padding in most texts with it at the left."""

    def first(model: Any, inputs: Any, _return_outputs: bool, _num_items: Any) -> torch.Tensor:
        return hidden(model, inputs)[:, 0].square().sum()

    model = model_of("bert")
    rows = Unpadding(model)
    assert layouts_of(rows, ragged(), first)
    assert not layouts_of(rows, ragged(is_left=True), first)
    assert rows.report.reasons == (("the loss depends on the rows of padding", 1),)


def test_outputs_and_steps_without_gradients_have_all_rows() -> None:
    """Outputs of some rows, as if they were all, would be wrong."""
    model = model_of("bert")
    rows = Unpadding(model)
    assert layouts_of(rows, ragged(), ModelLoss(model), True) == ()
    with torch.no_grad():
        assert layouts_of(rows, ragged(), ModelLoss(model)) == ()
    model.activation_checkpointing_enable()
    assert layouts_of(rows, ragged(), ModelLoss(model)) == ()
    assert {reason for reason, _ in rows.report.reasons} == {OUTPUTS, INFERENCE, unpadding.CHECKPOINTED}


def test_rows_are_counted_by_what_the_model_did() -> None:
    """A loss that later passes other tokens than those of the batch computes all rows."""
    model = model_of("bert")
    rows, calls = Unpadding(model), []

    def loss(model: Any, inputs: Any, _return_outputs: bool, _num_items: Any) -> torch.Tensor:
        calls.append(inputs)
        ids = inputs["input_ids"] if len(calls) <= 3 else inputs["input_ids"].clone()
        return model(**{**inputs, "input_ids": ids}).loss

    require_same_step(step_of(lambda: unpadded_loss(model, rows, ragged(), loss), model), eager_step(model, ragged()))
    assert len(calls) == 4
    assert rows.report.reasons == ((unpadding.NOT_FOUND, 1),)
    assert rows.report.num_kept_rows == 36


def test_it_can_be_switched_off_and_says_so() -> None:
    """Then no hook is left in the model."""
    model = model_of("bert")
    rows = Unpadding(model, allowed=False)
    assert layouts_of(rows, ragged(), ModelLoss(model)) == ()
    assert unpadding.NOT_ALLOWED in str(rows.report)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_the_check_and_an_error_inside_a_step_leave_no_trace() -> None:
    """Random numbers, gradients and the model's attention are what they were before."""
    model = model_of("bert")
    rows = Unpadding(model)
    before = torch.get_rng_state()
    layouts, _ = rows.layouts(ModelLoss(model), ragged(), False, None, False)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.grad is None for parameter in model.parameters())
    handle = model.bert.encoder.layer[0].intermediate.register_forward_hook(lambda *_: 1 / 0)
    enter(rows.regions, layouts, False)
    with pytest.raises(ZeroDivisionError):
        model(**{**ragged(), "input_ids": layouts[0].ids})
    leave(rows.regions)
    handle.remove()
    require_same_step(step_of(lambda: model(**ragged()).loss, model), eager_step(model, ragged()))


def test_a_copy_leaves_rows_out_by_itself() -> None:
    """Its hooks are its own."""
    model = model_of("bert")
    rows = Unpadding(model)
    unpadded_loss(model, rows, ragged())
    other_model, other = copy.deepcopy((model, rows))
    require_same_step(
        step_of(lambda: unpadded_loss(other_model, other, ragged()), other_model), eager_step(model, ragged())
    )
    assert (other.report.num_pruned_batches, rows.report.num_pruned_batches) == (2, 1)


def test_hooks_of_an_earlier_wrapper_are_no_part_of_the_step() -> None:
    """A model may be trained twice."""
    model = model_of("bert")
    for rows in (Unpadding(model), Unpadding(model)):
        require_same_step(
            step_of(functools.partial(unpadded_loss, model, rows, ragged()), model), eager_step(model, ragged())
        )
        assert rows.report.num_pruned_batches == 1, str(rows.report)


@pytest.mark.parametrize("is_left", [False, True])
def test_rows_go_out_and_come_back(is_left: bool) -> None:
    """Padding comes back as zeros, and gets no gradient."""
    batch = ragged(is_left=is_left)
    layout = RowLayout.of(batch["input_ids"], batch["attention_mask"])
    states = torch.randn(3, 12, 2, 4, dtype=torch.float64, requires_grad=True)
    rows = unpadded(states, layout)
    assert torch.equal(rows[0], states[layout.mask != 0])
    assert torch.equal(padded(rows, layout), states * layout.mask[..., None, None])
    torch.autograd.gradcheck(lambda states: padded(unpadded(states, layout).square(), layout), (states,))
