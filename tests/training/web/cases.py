"""Models to train in JavaScript, each a folder of artifacts with batches and with what Python makes of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from onnxtool.training.api import CheckpointState, Module, Optimizer
from onnxtool.training.artifacts.preparation import prepare_training
from onnxtool.training.options import ForwardOptions, PreparationOptions
from tests.training.artifacts.test_preparation import save_checkpoint
from tests.training.small_models import CLASSES, FEATURES, convolutions, load, perceptron

STEPS = 100
TOKENS, WORDS = 8, 60
# What dropout draws is a runtime's own matter.
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
Batch = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Case:
    """A folder to train in.

    Attributes:
        losses: of each of Python's steps, before it.
        loss: of the eval model after the last step, on the last batch.
    """

    folder: Path
    rate: float
    batches: list[Batch]
    losses: list[float]
    loss: float

    def go_on(self, checkpoint: Path) -> list[float]:
        """Train the second half in Python, from a checkpoint between the halves."""
        _, module, optimizer = load(self.folder, checkpoint.name)
        return _train(module, optimizer, self.batches[STEPS // 2 :])


def _numbers(draw: np.random.Generator) -> Batch:
    labels = draw.integers(0, CLASSES, 16)
    return {"x": (draw.standard_normal((16, FEATURES)) + labels[:, None]).astype(np.float32), "labels": labels}


def _pictures(draw: np.random.Generator) -> Batch:
    labels = draw.integers(0, CLASSES, 8)
    pictures = draw.standard_normal((8, 3, 8, 8)) * (1 + labels[:, None, None, None])
    return {"x": pictures.astype(np.float32), "labels": labels}


def _texts(draw: np.random.Generator) -> Batch:
    labels = draw.integers(0, 2, 8)
    ids = draw.integers(4, WORDS, (8, TOKENS))
    ids[:, 2] = 2 + labels
    mask = (np.arange(TOKENS) < draw.integers(4, TOKENS + 1, (8, 1))).astype(np.int64)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def _masked(draw: np.random.Generator) -> Batch:
    """Most labels are -100, and those of the third sample are all."""
    batch = _texts(draw)
    labels = np.where(draw.random((8, TOKENS)) < 0.4, batch["input_ids"], -100)
    labels[3] = -100
    return {**batch, "labels": labels}


def _file(make: Callable[[], onnx.ModelProto]) -> Callable[[Path], PreparationOptions]:
    def options(folder: Path) -> PreparationOptions:
        folder.mkdir(parents=True)
        path = folder / "forward.onnx"
        onnx.save(make(), path)
        return PreparationOptions(path)

    return options


def _checkpoint(architecture: str, config: Mapping[str, Any]) -> Callable[[Path], PreparationOptions]:
    def options(folder: Path) -> PreparationOptions:
        source = save_checkpoint(folder / "source", architecture, {**_NO_DROPOUT, **config})
        return PreparationOptions(forward=ForwardOptions(str(source)), verify=False)

    return options


CASES: dict[str, tuple[Callable[[Path], PreparationOptions], Callable[[np.random.Generator], Batch], float]] = {
    "perceptron": (_file(perceptron), _numbers, 1e-2),
    "convolutions": (_file(convolutions), _pictures, 1e-2),
    "classifier": (_checkpoint("BertForSequenceClassification", {"num_labels": 2}), _texts, 1e-3),
    "masked": (_checkpoint("BertForMaskedLM", {}), _masked, 1e-3),
}


def make_case(name: str, folder: Path, steps: int = STEPS) -> Case:
    """Make the artifacts of a case, train them in Python, and write the batches and the checkpoint of the middle."""
    options, draw_batch, rate = CASES[name]
    prepare_training(replace(options(folder), output=folder, target="web"))
    draw = np.random.default_rng(0)
    batches = [draw_batch(draw) for _ in range(steps)]
    rows = [{key: {"data": a.ravel().tolist(), "dims": a.shape} for key, a in batch.items()} for batch in batches]
    (folder / "batches.json").write_text(json.dumps({"rate": rate, "batches": rows}))
    state, module, optimizer = load(folder)
    optimizer.set_learning_rate(rate)
    losses = _train(module, optimizer, batches[: steps // 2])
    CheckpointState.save_checkpoint(state, folder / "halfway", include_optimizer_state=True)
    losses += _train(module, optimizer, batches[steps // 2 :])
    return Case(folder, rate, batches, losses, _loss(module.eval(), batches[-1]))


def _train(module: Module, optimizer: Optimizer, batches: list[Batch]) -> list[float]:
    losses = []
    for batch in batches:
        losses.append(_loss(module, batch))
        optimizer.step()
        module.lazy_reset_grad()
    return losses


def _loss(module: Module, batch: Batch) -> float:
    outputs = module(*(batch[name] for name in module.input_names()))
    return float(outputs[0] if isinstance(outputs, tuple) else outputs)
