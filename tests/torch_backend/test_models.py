"""Small models of transformers, of many kinds: losses, gradients and answers are those of eager PyTorch.

BERT and Llama are in tests/training/trainer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from onnxtool.torch_backend import OrtBackend

Inputs = dict[str, Any]
_TEXT = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 99}
_GROUPED = {**_TEXT, "num_key_value_heads": 2, "head_dim": 8}


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(3, 98, shape)


def text() -> Inputs:
    mask = torch.ones(3, 10, dtype=torch.long)
    mask[0, 7:] = 0
    return {"input_ids": ids(3, 10), "attention_mask": mask, "labels": ids(3, 10)}


def cacheless() -> Inputs:
    return {**text(), "use_cache": False}


def translation() -> Inputs:
    return {**cacheless(), "labels": ids(3, 6)}


def picture() -> Inputs:
    return {"pixel_values": torch.rand(3, 3, 16, 16), "labels": torch.tensor([0, 1, 4])}


def sound() -> Inputs:
    return {"input_values": torch.randn(2, 400), "labels": torch.randint(1, 19, (2, 5))}


MODELS: dict[str, tuple[str, str, dict[str, Any], Callable[[], Inputs]]] = {
    "DeBERTa": (
        "DebertaV2ForMaskedLM",
        "DebertaV2Config",
        {**_TEXT, "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 8},
        text,
    ),
    "T5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, "vocab_size": 99}
        | {"decoder_start_token_id": 0},
        translation,
    ),
    "wav2vec 2.0": (
        "Wav2Vec2ForCTC",
        "Wav2Vec2Config",
        {**_TEXT, "vocab_size": 20, "conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3)}
        | {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "mask_time_prob": 0.0, "layerdrop": 0.0},
        sound,
    ),
    "Mamba": (
        "MambaForCausalLM",
        "MambaConfig",
        {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 99, "state_size": 4},
        lambda: {"input_ids": ids(3, 5), "labels": ids(3, 5), "use_cache": False},  # as many steps of its loop
    ),
    "Mixtral": ("MixtralForCausalLM", "MixtralConfig", {**_GROUPED, "num_local_experts": 4}, cacheless),
    "ResNet": (
        "ResNetForImageClassification",
        "ResNetConfig",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic", "num_labels": 5},
        picture,
    ),
}

EVALUATED = ("ResNet",)


def answers(model: nn.Module, call: Callable[..., Any], inputs: Inputs) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the outputs of a step of training and the gradients, with the masks of dropout of one seed."""
    torch.manual_seed(5)
    outputs = call(**inputs)
    outputs.loss.backward()
    tensors = {name: value.detach() for name, value in outputs.items() if isinstance(value, torch.Tensor)}
    return tensors, {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of TorchDynamo and transformers about themselves
@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_transformers(name: str) -> None:
    """Forward and backward in training; for some also in evaluation, with running statistics."""
    model_class, config_class, options, make_inputs = MODELS[name]
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**options)).train()
    eager, inputs, backend = copy.deepcopy(model), make_inputs(), OrtBackend()
    compiled = torch.compile(model, backend=backend)
    ours, theirs = answers(model, compiled, inputs), answers(eager, eager, inputs)
    # Sums of CTC's gradients are of the order of a hundred.
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    if name in EVALUATED:
        with torch.no_grad():
            expected = eager.eval()(**inputs).loss
            torch.testing.assert_close(compiled.eval()(**inputs).loss, expected, atol=1e-5, rtol=1e-5)
    assert any(graph.report.partitions for graph in backend.graphs)
    assert all(not session.failure for graph in backend.graphs for session in graph.sessions)
