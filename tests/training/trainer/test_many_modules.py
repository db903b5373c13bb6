"""However many modules of one class a process trains, each one runs in onnxruntime, or says at every step that not."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from onnxtool.torch_backend.execution import SessionCall
from onnxtool.training.trainer.losses import CriterionLoss
from onnxtool.training.trainer.module_with_loss import ModuleWithLoss
from tests.torch_backend.conftest import fresh_dynamo  # noqa: F401 - used by being here
from tests.training.trainer.trainers import CLASSES, classified
from tests.training.trainer.trainers import classifier as bert

LOGGER = "onnxtool.training.trainer.module_with_loss"


@pytest.fixture
def few_graphs() -> Iterator[None]:
    """TorchDynamo keeps two graphs of a code object, where it would keep eight: a limit is reached with few models."""
    with torch._dynamo.config.patch(recompile_limit=2, accumulated_recompile_limit=2):
        yield


def module(width: int = 4) -> ModuleWithLoss:
    """A linear classifier of `width` features."""
    return ModuleWithLoss(torch.nn.Linear(width, CLASSES), compute_loss=CriterionLoss(torch.nn.CrossEntropyLoss()))


def batch_for(model: ModuleWithLoss) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(5, model.module.in_features), torch.arange(5) % CLASSES


def text_batch() -> dict[str, torch.Tensor]:
    examples = classified(4)
    return {name: torch.stack([example[name] for example in examples]) for name in examples[0]}


def unsettled() -> Any:
    """A classifier that would note down its type at its first call."""
    model = bert(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model.config.problem_type = None
    return model


@pytest.mark.usefixtures("few_graphs")
def test_each_module_of_a_class_has_graphs_of_its_own_number() -> None:
    """Other widths, in training and in evaluation, with gradients and without."""
    for width in (4, 5, 6):
        model = module(width)
        model(batch_for(model)).backward()
        with torch.no_grad():
            model.eval()(batch_for(model))
        assert [graph.kind for graph in model.explain().graphs] == ["forward", "backward", "inference"]
        assert model.backend.execution_count == 3


def test_modules_in_several_threads_have_graphs_of_their_own_number() -> None:
    """More modules than TorchDynamo keeps graphs, by its own limit: those of the fixture hold in one thread."""
    models = [module(width) for width in range(4, 14)]

    def train(model: ModuleWithLoss) -> int:
        model(batch_for(model)).backward()
        return model.backend.execution_count

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(train, models)) == [2] * len(models)


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor:UserWarning"
)  # TorchDynamo asks for it, in a resume
@pytest.mark.usefixtures("few_graphs")
def test_modules_with_a_graph_break_have_graphs_of_their_own_number() -> None:
    """What follows the break is another code object that all of them share."""

    class Broken(torch.nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            hidden = super().forward(inputs)
            torch._dynamo.graph_break()
            return hidden.tanh()

    counts = []
    for width in (4, 5, 6):
        model = ModuleWithLoss(Broken(width, CLASSES), compute_loss=CriterionLoss(torch.nn.CrossEntropyLoss()))
        model(batch_for(model)).backward()
        counts.append(model.backend.execution_count)
    assert counts == [2 * 3] * 3  # the product, its tangent, and the loss, each forward and backward


def test_a_classifier_is_compiled_once_and_notes_down_what_eager_pytorch_would() -> None:
    """Its labels are classes, as their dtype says."""
    model, eager, batch = unsettled(), unsettled(), text_batch()
    compiled = ModuleWithLoss(model)
    for _ in range(2):
        torch.testing.assert_close(compiled(batch), eager(**batch).loss, rtol=1e-6, atol=0)
    assert [graph.kind for graph in compiled.explain().graphs] == ["forward"]
    assert model.config.problem_type == eager.config.problem_type == "single_label_classification"


@pytest.mark.parametrize(
    ("num_labels", "labels", "expected"),
    [(1, torch.zeros(4), "regression"), (CLASSES, torch.zeros(4, CLASSES), "multi_label_classification")],
)
def test_the_type_of_labels_that_are_numbers_is_settled(num_labels: int, labels: torch.Tensor, expected: str) -> None:
    """As many as outputs, or one: the rule of transformers."""
    from onnxtool.training.trainer.losses import ModelLoss, settle_problem_type

    model = unsettled()
    model.num_labels = model.config.num_labels = num_labels
    settle_problem_type(model, ModelLoss(model), {"labels": labels})
    assert model.config.problem_type == expected


def test_a_model_that_does_not_get_the_labels_notes_down_nothing() -> None:
    """A smoothed loss keeps them from it; a pipeline would take its outputs for those of another type of classifier."""
    model = unsettled()
    with torch.compiler.set_stance("force_eager"):
        ModuleWithLoss(model, label_smoothing=0.1)(text_batch())
    assert model.config.problem_type is None


def test_every_step_that_pytorch_computes_alone_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """Not the first one only: nobody reads the first lines of a log that has a thousand."""
    model = module()
    with caplog.at_level(logging.WARNING, LOGGER), torch.compiler.set_stance("force_eager"):
        for _ in range(2):
            model(batch_for(model)).backward()
    assert [record.message.partition(":")[0] for record in caplog.records if record.name == LOGGER] == [
        "no session of onnxruntime ran in this step, PyTorch computed all of it"
    ] * 2


def test_every_step_whose_session_failed_names_the_failure(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch computes the right loss in its place."""

    def fail(_self: SessionCall, _arguments: object) -> list[Any]:
        raise RuntimeError("no memory left")

    monkeypatch.setattr(SessionCall, "_in_session", fail)
    model = module()
    batch = batch_for(model)
    with caplog.at_level(logging.WARNING, LOGGER):
        for _ in range(2):
            expected = torch.nn.functional.cross_entropy(model.module(batch[0]), batch[1])
            torch.testing.assert_close(model(batch), expected)
    messages = [record.message for record in caplog.records if record.name == LOGGER]
    assert len(messages) == 2
    assert all(message.endswith("no memory left") for message in messages)
    assert model.backend.execution_count == 0
