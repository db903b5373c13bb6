"""PEFT models train in onnxruntime as in PyTorch: adapters learn, and what they are beside stays."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Trainer

from onnxtool.training import OrtTrainer
from tests.training.trainer.trainers import (
    continued,
    decoder,
    losses_of,
    require_same_training,
    trainer_of,
)

peft = pytest.importorskip("peft", reason="peft is not installed")


def adapted() -> torch.nn.Module:
    """A decoder with adapters, their dropout, and an output head that is trained as a whole."""
    model = decoder()
    torch.manual_seed(1)
    targets = {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["lm_head"]}
    config = peft.LoraConfig(r=4, task_type="CAUSAL_LM", lora_dropout=0.1, **targets)
    result: torch.nn.Module = peft.get_peft_model(model, config)
    return result


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
def test_adapters_of_peft_learn_the_same(tmp_path: Path) -> None:
    """Nothing else has a gradient or moves, and what is saved is PEFT's, and loads into the base model."""
    examples, arguments = continued(12), {"learning_rate": 0.5, "max_steps": 4}
    trainers = []
    for kind in (Trainer, OrtTrainer):
        trainers.append(trainer_of(kind, adapted(), examples, tmp_path / kind.__name__, arguments))
        trainers[-1].train()
    plain, ours = trainers
    require_same_training(plain, ours)
    first, *_, last = losses_of(ours)
    assert abs(first - last) > 1e-4  # adapters begin with zeros: they learned something
    untouched = dict(adapted().named_parameters())
    learned = {name for name, value in ours.model.named_parameters() if not torch.equal(value, untouched[name])}
    trained = {name for name, value in ours.model.named_parameters() if value.requires_grad}
    assert learned <= trained
    assert {name for name in trained if "lora_B" in name} <= learned
    assert all(value.grad is None for name, value in ours.model.named_parameters() if name not in trained)
    ours.save_model(str(tmp_path / "saved"))
    batch = {name: examples[0][name][None] for name in ("input_ids", "attention_mask")}
    loaded = peft.PeftModel.from_pretrained(decoder(), tmp_path / "saved").eval()
    with torch.no_grad():
        expected, actual = (model(**batch).logits for model in (ours.model.eval(), loaded))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)
