"""PEFT models train in onnxruntime as in PyTorch: adapters learn, and what they are beside stays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer

from onnxtool.training import OrtTrainer
from tests.training.trainer.trainers import (
    Example,
    classified,
    classifier,
    continued,
    decoder,
    losses_of,
    require_same_training,
    trainer_of,
)

peft = pytest.importorskip("peft", reason="peft is not installed")

ON_A_CLASSIFIER = {"task_type": "SEQ_CLS", "target_modules": ["query", "value"], "lora_dropout": 0.1}
ON_A_DECODER = {"task_type": "CAUSAL_LM", "target_modules": ["q_proj", "v_proj"], "modules_to_save": ["lm_head"]}


def adapted(make: Callable[[], torch.nn.Module], **config: Any) -> torch.nn.Module:
    model = make()
    torch.manual_seed(1)
    result: torch.nn.Module = peft.get_peft_model(model, peft.LoraConfig(r=4, **config))
    return result


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
@pytest.mark.parametrize(
    ("make", "examples", "config"),
    [(classifier, classified(12), ON_A_CLASSIFIER), (decoder, continued(12), ON_A_DECODER)],
    ids=["a classifier and dropout", "a decoder and its output head"],
)
def test_adapters_of_peft_learn_the_same(
    tmp_path: Path, make: Callable[[], torch.nn.Module], examples: list[Example], config: dict[str, Any]
) -> None:
    """Nothing else has a gradient or moves, and what is saved is PEFT's, and loads into the base model."""
    arguments = {"learning_rate": 0.5, "max_steps": 4}
    trainers = []
    for kind in (Trainer, OrtTrainer):
        trainers.append(trainer_of(kind, adapted(make, **config), examples, tmp_path / kind.__name__, arguments))
        trainers[-1].train()
    plain, ours = trainers
    require_same_training(plain, ours)
    first, *_, last = losses_of(ours)
    assert abs(first - last) > 1e-4  # adapters begin with zeros: they learned something
    untouched = dict(adapted(make, **config).named_parameters())
    learned = {name for name, value in ours.model.named_parameters() if not torch.equal(value, untouched[name])}
    trained = {name for name, value in ours.model.named_parameters() if value.requires_grad}
    assert learned <= trained
    assert {name for name in trained if "lora_B" in name} <= learned
    assert all(value.grad is None for name, value in ours.model.named_parameters() if name not in trained)
    ours.save_model(str(tmp_path / "saved"))
    batch = {name: examples[0][name][None] for name in ("input_ids", "attention_mask")}
    loaded = peft.PeftModel.from_pretrained(make(), tmp_path / "saved").eval()
    with torch.no_grad():
        expected, actual = (model(**batch).logits for model in (ours.model.eval(), loaded))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)
