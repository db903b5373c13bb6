"""Under autocast on the CPU, a training step is as exact as eager PyTorch's."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

from onnxtool.training import ModuleWithLoss
from tests.training.trainer.language_models import VOCABULARY, batch_of

PRODUCTS = {"aten.addmm.default", "aten.mm.default", "aten.bmm.default"}


def gradients(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([value.grad.double().flatten() for value in model.parameters()])


def rms(errors: list[torch.Tensor]) -> float:
    return float(torch.stack(errors).square().mean().sqrt())


def test_the_error_of_half_precision_is_eagers(caplog: pytest.LogCaptureFixture) -> None:
    """Against float64, over several batches: at most 1.2 of eager autocast's, of the loss and of the gradients.

    The report says that products are computed in onnxruntime; those of bfloat16 are in test_ort_trainer.py.
    """
    caplog.set_level(logging.WARNING, logger="onnxtool")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    config = BertConfig(vocab_size=VOCABULARY, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **sizes)
    ours = BertForMaskedLM(config).train()
    eager, exact = copy.deepcopy(ours), copy.deepcopy(ours).double()
    module = ModuleWithLoss(ours)
    errors: dict[str, list[torch.Tensor]] = {name: [] for name in ("loss", "eager loss", "gradient", "eager gradient")}
    for seed in range(8):
        batch = batch_of(0.5, seed)
        for model in (ours, eager, exact):
            model.zero_grad()
        expected = exact(**batch).loss
        with torch.autocast("cpu", dtype=torch.float16):
            theirs, loss = eager(**batch).loss, module(batch)
        for value in (expected, theirs, loss):
            value.backward()
        errors["loss"].append(loss.detach() - expected.detach())
        errors["eager loss"].append(theirs.detach() - expected.detach())
        errors["gradient"].append((gradients(ours) - gradients(exact)).norm())
        errors["eager gradient"].append((gradients(eager) - gradients(exact)).norm())
    assert 0 < rms(errors["gradient"]) <= 1.2 * rms(errors["eager gradient"])
    assert rms(errors["loss"]) <= 1.2 * rms(errors["eager loss"])
    assert not [node for graph in module.explain().graphs for node in graph.eager if node.operator in PRODUCTS]
    assert not caplog.messages  # no session failed
