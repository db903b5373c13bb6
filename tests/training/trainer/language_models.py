"""Small models of transformers with labels for each token, and eager PyTorch as the oracle of their losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from transformers.trainer_pt_utils import LabelSmoother

from onnxtool.training.trainer.losses import ModelLoss

VOCABULARY = 97
IGNORED = -100
TOLERANCE = 1e-5
"""Relative; float32 sums in another order."""

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
Batch = dict[str, torch.Tensor]


def _make(name: str, config: str, sizes: Mapping[str, Any]) -> Callable[[], torch.nn.Module]:
    def make() -> torch.nn.Module:
        torch.manual_seed(0)
        return getattr(transformers, name)(getattr(transformers, config)(**sizes)).train()

    return make


MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "bert": _make("BertForMaskedLM", "BertConfig", _SIZES),
    "roberta": _make("RobertaForMaskedLM", "RobertaConfig", _SIZES),
    "distilbert": _make(
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        {"vocab_size": VOCABULARY, "dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 32},
    ),
    "albert": _make("AlbertForMaskedLM", "AlbertConfig", {**_SIZES, "embedding_size": 8}),
    "electra": _make("ElectraForMaskedLM", "ElectraConfig", {**_SIZES, "embedding_size": 8}),
    "modernbert": _make(
        "ModernBertForMaskedLM", "ModernBertConfig", {**_SIZES, **_SPECIAL, "cls_token_id": 1, "sep_token_id": 2}
    ),
    "gpt2": _make(
        "GPT2LMHeadModel", "GPT2Config", {**_SPECIAL, "vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 1, "n_head": 2}
    ),
    "llama": _make("LlamaForCausalLM", "LlamaConfig", {**_SIZES, "use_cache": False}),
    "t5": _make(
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": VOCABULARY,
            "d_model": 16,
            "d_kv": 8,
            "d_ff": 32,
            "num_layers": 1,
            "num_heads": 2,
            "decoder_start_token_id": 0,
        },
    ),
    "bert-tokens": _make("BertForTokenClassification", "BertConfig", {**_SIZES, "num_labels": 5}),
}


def batch_of(share: float, seed: int = 0, classes: int = VOCABULARY) -> Batch:
    """Three sequences of 12 tokens, with labels for a share of them."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (3, 12), generator=draw)
    labels = torch.where(torch.rand(ids.shape, generator=draw) < share, ids % classes, IGNORED)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def step_of(
    loss_of: Callable[[], torch.Tensor], model: torch.nn.Module
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return a loss, drawn with the same random numbers each time, and the gradients of the model's parameters."""
    model.zero_grad()
    torch.manual_seed(7)
    loss = loss_of()
    loss.backward()
    return loss.detach(), {
        name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
    }


def eager_step(
    model: torch.nn.Module, batch: Batch, smoothing: float = 0.0, num_items: int | None = None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss of the whole batch by eager PyTorch, and its gradients; transformers smooths the labels."""
    items = None if num_items is None else torch.tensor(num_items)

    def smoothed() -> torch.Tensor:
        outputs = model(**{name: array for name, array in batch.items() if name != "labels"})
        is_shifted = isinstance(model, transformers.LlamaForCausalLM)
        return LabelSmoother(smoothing)(outputs, batch["labels"], is_shifted, items)

    return step_of(smoothed if smoothing else lambda: ModelLoss(model)(model, batch, False, items), model)


def require_same_step(
    actual: tuple[torch.Tensor, dict[str, torch.Tensor]], expected: tuple[torch.Tensor, dict[str, torch.Tensor]]
) -> None:
    """Insist on the same loss and gradients, these relative to the largest of the model.

    Some are zero in exact arithmetic, such as those of the bias of keys: there is nothing else to compare them with.
    """
    torch.testing.assert_close(actual[0], expected[0], rtol=TOLERANCE, atol=0, equal_nan=True)
    assert actual[1].keys() == expected[1].keys()
    largest = max(float(gradient.abs().nan_to_num().max()) for gradient in expected[1].values())
    for name, gradient in expected[1].items():
        torch.testing.assert_close(
            actual[1][name],
            gradient,
            rtol=0,
            atol=TOLERANCE * largest,
            equal_nan=True,
            msg=lambda m, n=name: f"{n}: {m}",
        )
