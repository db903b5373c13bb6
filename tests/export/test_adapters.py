"""Adapters of PEFT are merged by PEFT, or refused by name."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from onnxtool.errors import CheckpointError
from onnxtool.export import ExportOptions, export_model
from onnxtool.export.checkpoint import Checkpoint
from onnxtool.export.source import Source
from tests.workshop import Workshop

# Of transformers, about a property that PEFT 0.21 reads.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")

IDS = torch.tensor([[2, 7, 8, 9, 3]])
SIZES: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16,
}  # fmt: skip


def lora(**settings: Any) -> Any:
    return peft.LoraConfig(r=2, target_modules=["query", "value"], init_lora_weights=False, **settings)


def save_adapter(base: Path, model: Any, config: Any, folder: Path) -> Any:
    """Save an adapter as PEFT does, and return the model with it."""
    torch.manual_seed(0)
    adapted = peft.get_peft_model(model, config).eval()
    adapted.save_pretrained(folder)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": str(base)}))
    return adapted


@pytest.fixture(scope="module")
def base(workshop: Workshop) -> Path:
    """A masked language model."""
    return workshop.checkpoint("tiny-mlm")


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of it in a folder of its own."""
    folder = tmp_path_factory.mktemp("adapters") / "lora"
    save_adapter(base, transformers.BertForMaskedLM.from_pretrained(base), lora(), folder)
    return folder


def merged(folder: Path) -> Any:
    checkpoint = Checkpoint.open(Source.find(str(folder)))
    return checkpoint, checkpoint.load_model(dtype="float32", device="cpu", attention=None)


def test_a_folder_of_an_adapter_is_exported_with_its_base(base: Path, adapter: Path, tmp_path: Path) -> None:
    """The file computes what PEFT's model computes, with the tokenizer of the base."""
    model = transformers.BertForMaskedLM.from_pretrained(base)
    wanted = peft.PeftModel.from_pretrained(model, adapter).merge_and_unload()
    report = export_model(ExportOptions(model_name=str(adapter), output=tmp_path / "m.onnx"))
    session = onnxruntime.InferenceSession(str(tmp_path / "m.onnx"))
    feeds = {value.name: np.ones_like(IDS.numpy()) for value in session.get_inputs()} | {"input_ids": IDS.numpy()}
    feeds |= {name: np.zeros_like(IDS.numpy()) for name in feeds if name == "token_type_ids"}
    with torch.no_grad():
        logits = wanted.eval()(IDS).logits.numpy()
    np.testing.assert_allclose(session.run(None, feeds)[0], logits, atol=1e-4)
    assert any("an adapter (LORA) is merged into the weights of" in note for note in report.notes)
    assert report.metadata["onnxtool.adapter_base"] == base.name
    assert (tmp_path / "m" / "tokenizer.json").is_file()


def test_an_adapter_beside_its_model_is_merged_into_it(base: Path, adapter: Path, tmp_path: Path) -> None:
    """Whatever base its configuration names."""
    folder = shutil.copytree(base, tmp_path / "both")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(adapter / name, folder / name)
    checkpoint, model = merged(folder)
    wanted = peft.PeftModel.from_pretrained(transformers.BertForMaskedLM.from_pretrained(base), adapter)
    wanted = wanted.merge_and_unload()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in wanted.state_dict().items())
    assert "an adapter (LORA) is merged" in checkpoint.notes


def test_the_digest_tells_two_adapters_of_one_base_apart(base: Path, adapter: Path, tmp_path: Path) -> None:
    """They are two models."""
    other = tmp_path / "other"
    save_adapter(base, transformers.BertForMaskedLM.from_pretrained(base), lora(lora_alpha=3), other)
    weights = load_file(other / "adapter_model.safetensors")
    save_file({name: value + 1 for name, value in weights.items()}, other / "adapter_model.safetensors")
    digests = {Checkpoint.open(Source.find(str(folder))).weights_sha256 for folder in (base, adapter, other)}
    assert len(digests) == 3


@pytest.mark.parametrize("labels", [1, 3])
def test_a_head_that_the_adapter_brings_decides_on_the_labels(tmp_path: Path, labels: int) -> None:
    """A reranker is trained from a masked language model, whose config.json counts two labels."""
    torch.manual_seed(1)
    base = tmp_path / "base"
    transformers.BertForPreTraining(transformers.BertConfig(**SIZES)).save_pretrained(base)
    model = transformers.BertForSequenceClassification.from_pretrained(base, num_labels=labels)
    adapted = save_adapter(base, model, lora(task_type="SEQ_CLS"), tmp_path / "adapter")
    checkpoint, found = merged(tmp_path / "adapter")
    assert checkpoint.architecture == "BertForSequenceClassification"
    assert len(checkpoint.adapted_config["id2label"]) == labels
    with torch.no_grad():
        torch.testing.assert_close(found(IDS).logits, adapted(IDS).logits, atol=1e-5, rtol=1e-5)


def remove_one(weights: dict[str, torch.Tensor]) -> None:
    weights.pop(min(weights))


def add_one(weights: dict[str, torch.Tensor]) -> None:
    weights["base_model.model.bert.encoder.layer.9.attention.self.query.lora_A.weight"] = torch.ones(2, 32)


def code_one(weights: dict[str, torch.Tensor]) -> None:
    weights[min(weights)] = weights[min(weights)].to(torch.int8)


def widen_one(weights: dict[str, torch.Tensor]) -> None:
    weights[min(weights)] = torch.ones(5, 32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (remove_one, "has no weights for .*lora_A"),
        (add_one, r"1 tensors .* fit nowhere .*layer\.9"),
        (code_one, r"are quantized, and nothing would apply their scales: .*\(I8\)"),
        (widen_one, "PEFT cannot load the adapter .*size mismatch"),
    ],
)
def test_adapters_whose_tensors_do_not_fit_are_refused(
    adapter: Path, tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], None], message: str
) -> None:
    """PEFT warns of some, and initializes them at random."""
    folder = shutil.copytree(adapter, tmp_path / "changed")
    weights = load_file(folder / "adapter_model.safetensors")
    change(weights)
    save_file(weights, folder / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        merged(folder)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"base_model_name_or_path": None}, "does not name the model it is for"),
        ({"base_model_name_or_path": "/nowhere/at/all"}, "/nowhere/at/all, which cannot be found"),
        ({"peft_type": "WONDER"}, "PEFT cannot load the adapter"),
    ],
)
def test_adapters_whose_settings_lead_nowhere_say_so(
    adapter: Path, tmp_path: Path, settings: dict[str, Any], message: str
) -> None:
    """The hint says which file to change."""
    folder = shutil.copytree(adapter, tmp_path / "changed")
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    with pytest.raises(CheckpointError, match=message):
        merged(folder)


def test_an_adapter_of_prompts_cannot_be_merged(base: Path, tmp_path: Path) -> None:
    """It changes inputs."""
    model = transformers.BertForMaskedLM.from_pretrained(base)
    config = peft.PromptTuningConfig(task_type="FEATURE_EXTRACTION", num_virtual_tokens=2)
    save_adapter(base, model, config, tmp_path / "prompts")
    with pytest.raises(CheckpointError, match=r"\(PROMPT_TUNING\) cannot be merged .*: it changes inputs"):
        merged(tmp_path / "prompts")


def test_without_peft_an_adapter_is_an_error(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file must not depend on what is installed."""
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(CheckpointError, match="PEFT cannot be imported"):
        Checkpoint.open(Source.find(str(adapter)))


def test_an_adapter_without_weights_is_said_to_have_none(base: Path, adapter: Path, tmp_path: Path) -> None:
    """It would be merged as nothing."""
    folder = shutil.copytree(base, tmp_path / "both")
    shutil.copy(adapter / "adapter_config.json", folder / "adapter_config.json")
    with pytest.raises(CheckpointError, match=r"without weights \(adapter_model\.safetensors\)"):
        Checkpoint.open(Source.find(str(folder)))


def test_an_export_does_not_turn_its_adapter_into_a_model(adapter: Path, tmp_path: Path) -> None:
    """A config.json in the folder would end its being an adapter."""
    folder = shutil.copytree(adapter, tmp_path / "lora")
    with pytest.raises(CheckpointError, match=r"config\.json would be written into the checkpoint"):
        export_model(ExportOptions(model_name=str(folder), output=tmp_path / "lora.onnx"))
    assert not (folder / "config.json").exists()
