"""A model with its loss trains as it does in eager PyTorch, with the loss in the compiled graph."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable

import pytest
import torch

from onnxtool.errors import InputError
from onnxtool.torch_backend import OrtBackendOptions
from onnxtool.training.trainer.losses import CriterionLoss, ModelLoss
from onnxtool.training.trainer.module_with_loss import ModuleWithLoss
from tests.torch_backend.conftest import fresh_dynamo  # noqa: F401 - used by being here
from tests.training.trainer.language_models import TOLERANCE, batch_of, eager_step, require_same_step
from tests.training.trainer.language_models import step_of as step
from tests.training.trainer.trainers import Tagger


def classifier() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [(torch.randn(5, 6, generator=draw), torch.randint(0, 3, (5,), generator=draw)) for _ in range(6)]


def test_model_loss_and_backward_are_two_graphs_wholly_in_onnxruntime() -> None:
    """The loss is among the nodes of the forward session, and nothing of either graph stays in PyTorch."""
    nodes: list[set[str]] = []
    options = OrtBackendOptions(
        pre_ort_model_transforms=(lambda proto: nodes.append({node.op_type for node in proto.graph.node}),)
    )
    model = ModuleWithLoss(classifier(), compute_loss=CriterionLoss(torch.nn.CrossEntropyLoss()), options=options)
    for batch in batches():
        model(batch).backward()
    graphs = [(graph.kind, len(graph.partitions), graph.eager) for graph in model.explain().graphs]
    assert graphs == [("forward", 1, ()), ("backward", 1, ())]
    assert nodes[0] & {"LogSoftmax", "Log"}
    assert model.backend.execution_count == 2 * len(batches())


def test_parameters_are_those_of_the_original_under_its_prefix() -> None:
    """An optimizer may be made from either; files are saved from the original."""
    original = classifier()
    model = ModuleWithLoss(original, compute_loss=CriterionLoss(torch.nn.CrossEntropyLoss()))
    theirs = {f"module.{name}": parameter for name, parameter in original.named_parameters()}
    ours = dict(model.named_parameters())
    assert ours.keys() == theirs.keys() == model.state_dict().keys()
    assert all(ours[name] is theirs[name] for name in theirs)
    assert model.module is original


def test_modes_and_dtypes_reach_the_original() -> None:
    """`eval()`, `train()` and `to()` are the module's; the criterion's weights move with it."""
    criterion = torch.nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))
    model = ModuleWithLoss(classifier(), compute_loss=CriterionLoss(criterion))
    assert not model.eval().module.training
    assert model.train().module.training
    model.to(torch.float64)
    assert {value.dtype for value in model.state_dict().values()} == {torch.float64}
    inputs, targets = batches()[0]
    expected = criterion(model.module(inputs.double()), targets)
    torch.testing.assert_close(model((inputs.double(), targets)), expected, rtol=1e-12, atol=0)


def test_outputs_come_with_the_loss_where_they_are_asked_for() -> None:
    """All of them, though few rows have a label."""
    original, batch = Tagger().eval(), batch_of(0.15)
    loss, outputs = ModuleWithLoss(original)(batch, True)
    expected = original(**batch)
    torch.testing.assert_close(loss, expected.loss, rtol=TOLERANCE, atol=0)
    torch.testing.assert_close(outputs.logits, expected.logits, rtol=0, atol=TOLERANCE)


def test_a_number_of_items_is_no_reason_to_compile_again() -> None:
    """It differs at each step, as a number or as a tensor."""
    model, batch = Tagger(), batch_of(0.5)
    module = ModuleWithLoss(model)
    for num_items in (11, torch.tensor(13), 17):
        expected = eager_step(model, batch, num_items=int(num_items))
        require_same_step(step(functools.partial(module.forward, batch, num_items_in_batch=num_items), model), expected)
    assert len(module.explain().graphs) == 2


def test_copies_are_modules_of_their_own() -> None:
    """Neither a copy nor what comes back from pickle runs the original's graphs."""
    model = ModuleWithLoss(classifier(), compute_loss=CriterionLoss(torch.nn.CrossEntropyLoss()))
    batch = batches()[0]
    loss = model(batch).detach()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301 - our own bytes
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.mul_(2.0)
        expected = torch.nn.functional.cross_entropy(other.module(batch[0]), batch[1])
        torch.testing.assert_close(other(batch), expected, rtol=TOLERANCE, atol=0)
        torch.testing.assert_close(model(batch), loss)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda model: ModuleWithLoss(model, label_smoothing=1.5), "label_smoothing is 1.5"),
        (
            lambda model: ModuleWithLoss(model, label_smoothing=0.1, compute_loss=ModelLoss(model)),
            "with a compute_loss",
        ),
        (lambda model: ModuleWithLoss(model)({"input_ids": batch_of(1.0)["input_ids"]}), "gives no loss for input_ids"),
    ],
)
def test_what_cannot_be_computed_is_an_error_with_a_way_out(
    make: Callable[[torch.nn.Module], object], message: str
) -> None:
    """The last one is raised at the first call: only then is it known what the inputs are."""
    with pytest.raises(InputError, match=message) as caught:
        make(Tagger())
    assert caught.value.hint
