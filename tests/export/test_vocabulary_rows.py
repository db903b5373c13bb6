"""The rows of an output head that no score reads are left out, and the others give what they gave."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from onnxtool.checkpoint.pooling_modules import LogitScore, Pooling
from onnxtool.errors import ExportError
from onnxtool.export.heads.head import Head
from onnxtool.export.heads.vocabulary_rows import keep_read_rows
from onnxtool.export.signature import Signature

SIZES = {"vocab_size": 40, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 4}
SIGNATURE = Signature({"input_ids": ("batch_size", "sequence")}, {"logits": ("batch_size", "sequence", 40)})
IDS = torch.tensor([[3, 7, 30, 12]])


def head_of(module: Any) -> Head:
    """Make a head of one module over logits."""
    return Head("reranker", "logits", "logits", "text-ranking", (module,))


def make(name: str, **settings: Any) -> Any:
    """Make a small causal language model by the name of its architecture."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, intermediate_size=16, num_key_value_heads=1, **settings)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("Qwen3", {"tie_word_embeddings": True}),
        ("Qwen3", {"tie_word_embeddings": False}),
        ("Gemma2", {"final_logit_softcapping": 0.5}),  # a bound on each logit
        ("Granite", {"logits_scaling": 3.0}),
    ],
)
def test_the_score_is_that_of_the_whole_output_head(name: str, settings: dict[str, Any]) -> None:
    """Whatever the architecture makes of logits behind it; embeddings keep all of their rows."""
    model, head = make(name, **settings), head_of(LogitScore(12, 5))
    expected = head.reference(model(IDS).logits, torch.ones_like(IDS))
    narrow, signature = keep_read_rows(model, head, SIGNATURE)
    logits = model(IDS).logits
    assert tuple(logits.shape) == (1, 4, 2)
    assert signature.outputs == {"logits": ("batch_size", "sequence", 2)}
    torch.testing.assert_close(narrow.reference(logits, torch.ones_like(IDS)), expected)
    assert model.get_input_embeddings().weight.shape == (40, 8)


def test_other_heads_leave_the_model_alone() -> None:
    """A pooling reads all of its input."""
    model, head = make("Qwen3"), head_of(Pooling())
    assert keep_read_rows(model, head, SIGNATURE) == (head, SIGNATURE)
    assert model.get_output_embeddings().weight.shape == (40, 8)


def test_an_output_head_that_is_no_linear_layer_is_refused() -> None:
    """Its rows cannot be told apart."""
    model = make("Qwen3")
    model.set_output_embeddings(torch.nn.Identity())
    with pytest.raises(ExportError, match="are made by Identity, and a reranker needs a linear layer"):
        keep_read_rows(model, head_of(LogitScore(12, 5)), SIGNATURE)
