"""A `compute_loss` gets its arguments as transformers' Trainer passes them, whatever its signature is."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer

from onnxtool.errors import CompilationError, InputError
from onnxtool.torch_backend import OrtBackendOptions
from onnxtool.torch_backend.translator import Translator
from onnxtool.training import OrtTrainer, create_model_with_loss
from onnxtool.training.trainer.losses import with_all_arguments
from tests.training.trainer.trainers import Sorter, classified, require_same_training, trainer_of


def seen(return_outputs: Any = "left out", num_items_in_batch: Any = "left out") -> Any:
    return return_outputs, num_items_in_batch


class OfClass:
    """Signatures of methods; `seen` stands for the loss."""

    def keywords(self, model: Any, inputs: Any, return_outputs: Any = False, **kwargs: Any) -> Any:
        return seen(return_outputs, kwargs["num_items_in_batch"])

    @staticmethod
    def static(model: Any, inputs: Any, **kwargs: Any) -> Any:
        return seen(kwargs.get("return_outputs", False), kwargs["num_items_in_batch"])

    @classmethod
    def of_class(cls, model: Any, inputs: Any, *, num_items_in_batch: Any = None, return_outputs: Any = False) -> Any:
        return seen(return_outputs, num_items_in_batch)


class Criterion(torch.nn.Module):
    """Called as a module, whose own signature is `*args, **kwargs`."""

    def forward(self, model: Any, inputs: Any, num_items_in_batch: Any, return_outputs: Any = False) -> Any:
        return seen(return_outputs, num_items_in_batch)


def with_scale(
    model: Any, inputs: Any, return_outputs: Any = False, num_items_in_batch: Any = None, scale: Any = None
) -> Any:
    return seen(return_outputs, num_items_in_batch)


def passed_on(model: Any, inputs: Any, **kwargs: Any) -> Any:
    return OfClass().keywords(model, inputs, **{"return_outputs": False, **kwargs})


def decorated(function: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


SIGNATURES: dict[str, Any] = {
    "the trainers": lambda model, inputs, return_outputs=False, num_items_in_batch=None: seen(
        return_outputs, num_items_in_batch
    ),
    "all required": lambda m, i, return_outputs, num_items_in_batch: seen(return_outputs, num_items_in_batch),
    "one more": with_scale,
    "keywords": OfClass().keywords,
    "static": OfClass().static,
    "of the class": OfClass.of_class,
    "passed on": passed_on,
    "keyword only": lambda m, i, return_outputs=False, *, num_items_in_batch=None: seen(
        return_outputs, num_items_in_batch
    ),
    "required keywords": lambda m, i, *, num_items_in_batch, return_outputs=False: seen(
        return_outputs, num_items_in_batch
    ),
    "other order": lambda m, i, num_items_in_batch=None, return_outputs=False: seen(return_outputs, num_items_in_batch),
    "one between": lambda m, i, scale=1, return_outputs=False, num_items_in_batch=None: seen(
        return_outputs, num_items_in_batch
    ),
    "by position": lambda m, i, return_outputs=False, num_items_in_batch=None, /: seen(
        return_outputs, num_items_in_batch
    ),
    "partial": functools.partial(with_scale, scale=2.0),
    "partial of an optional": functools.partial(with_scale, num_items_in_batch=3, scale=2.0),
    "decorated": decorated(with_scale),
    "wraps": functools.wraps(with_scale)(decorated(with_scale)),
    "module": Criterion(),
}


@pytest.mark.parametrize("name", SIGNATURES)
@pytest.mark.parametrize("asked", [{}, {"return_outputs": True}], ids=["loss", "outputs"])
@pytest.mark.parametrize("count", [None, torch.tensor(7)], ids=["mean", "sum"])
def test_every_signature_gets_what_the_trainer_passes(name: str, asked: dict[str, bool], count: Any) -> None:
    """The Trainer names `num_items_in_batch` at every call, and `return_outputs` where it evaluates."""
    function = SIGNATURES[name]
    expected = (
        (asked.get("return_outputs", False), count)
        if name in ("by position", "all required")  # which the Trainer itself cannot call in both ways
        else function(None, {}, **asked, num_items_in_batch=count)
    )
    assert with_all_arguments(function)(None, {}, bool(asked), count) == expected


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (lambda model, inputs: None, (False, 3), "takes no num_items_in_batch"),
        (lambda model, inputs, return_outputs: None, (True, 3), "takes no num_items_in_batch"),
        (lambda model, inputs, num_items_in_batch=None: None, (True, 3), "takes no return_outputs"),
        (lambda model, inputs, targets: None, (True, None), "returns no outputs"),
        (lambda model, inputs, *others: None, (True, None), "takes no return_outputs"),
        (lambda model: None, (False, None), "cannot be called: too many positional arguments"),
        (lambda model, inputs, targets, scale: None, (False, None), "cannot be called: missing .* 'targets'"),
        (lambda model, inputs, return_outputs, num_items_in_batch, scale: None, (False, None), "missing .* 'scale'"),
        (lambda model, inputs, *, scale, **kwargs: None, (False, None), "missing .* 'scale'"),
    ],
)
def test_a_signature_that_lacks_what_is_passed_is_refused_by_name(function: Any, arguments: Any, message: str) -> None:
    """Where it takes less than the call has, at the call, and where nothing fits, before."""
    with pytest.raises(InputError, match=message) as caught:
        with_all_arguments(function)(None, {}, *arguments)
    assert "num_items_in_batch" in caught.value.hint or "return_outputs" in caught.value.hint


def keywords_loss(model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
    outputs = model(**inputs)
    total = torch.nn.functional.cross_entropy(outputs["logits"], inputs["labels"], reduction="sum")
    loss = total / (kwargs["num_items_in_batch"] or len(inputs["labels"]))
    return (loss, outputs) if return_outputs else loss


def subclass(base: type[Trainer]) -> type[Trainer]:
    """Override `compute_loss` by a static method, which gets no Trainer."""
    return type("Mine", (base,), {"compute_loss": staticmethod(keywords_loss)})


def test_a_trainer_with_another_signature_trains_and_evaluates(tmp_path: Path) -> None:
    """As transformers' Trainer does."""
    trainers = []
    for base in (Trainer, OrtTrainer):
        arguments = {"gradient_accumulation_steps": 2, "max_steps": 1}
        made = trainer_of(subclass(base), Sorter(), classified(8), tmp_path, arguments)
        made.eval_dataset = classified(5)
        made.train()
        trainers.append(made)
    plain, ours = trainers
    assert isinstance(ours, OrtTrainer)
    require_same_training(plain, ours)
    assert ours.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-5)
    found: Any = create_model_with_loss(plain).compute_loss(plain.model.eval(), batch(), False, torch.tensor(8))
    torch.testing.assert_close(found, keywords_loss(plain.model, batch(), num_items_in_batch=8))


def batch() -> dict[str, torch.Tensor]:
    return {name: torch.stack([one[name] for one in classified(4)]) for name in classified(1)[0]}


@pytest.mark.parametrize("value", ["2", "yes", "onnx"])
def test_a_wrong_value_of_the_converters_variable_is_named(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """And not taken for an option that nobody passed."""
    monkeypatch.setenv("ONNXRT_CHANGE_REWRITER", value)
    with pytest.raises(CompilationError, match=f"ONNXRT_CHANGE_REWRITER is '{value}'") as caught:
        Translator(OrtBackendOptions())
    assert "set it to 0, 1" in caught.value.hint
