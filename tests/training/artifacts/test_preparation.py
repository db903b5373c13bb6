"""Artifacts of checkpoints compute the loss and the gradients of transformers, and say by how much they miss them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx import numpy_helper

from onnxtool.errors import ArtifactError
from onnxtool.training.artifacts.forward_export import ForwardOptions
from onnxtool.training.artifacts.preparation import PreparationOptions, prepare_training
from onnxtool.training.artifacts.report import ArtifactReport
from onnxtool.training.artifacts.verification import replace_dropout
from onnxtool.training.checkpoints.checkpoint import load_checkpoint
from tests.training.small_models import load

pytestmark = pytest.mark.slow

SIZES: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 24,
    "initializer_range": 0.3,
}


def checkpoint(folder: Path, architecture: str, **config: Any) -> Path:
    """Save a small model with a tokenizer of a few words."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    kind = getattr(transformers, architecture)
    torch.manual_seed(1)
    model = kind(kind.config_class(**{**SIZES, **config}, architectures=[architecture]))
    model.save_pretrained(folder)
    words = {word: place for place, word in enumerate(["[PAD]", "[UNK]", *(f"w{place}" for place in range(2, 60))])}
    tokenizer = Tokenizer(models.WordLevel(words, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=24, **special).save_pretrained(
        folder
    )
    return folder


def prepare(folder: Path, source: Path, **options: Any) -> ArtifactReport:
    return prepare_training(PreparationOptions(forward=ForwardOptions(str(source)), output=folder, **options))


KINDS: dict[str, tuple[str, Mapping[str, Any], Mapping[str, Any]]] = {
    "causal": ("LlamaForCausalLM", {"num_key_value_heads": 1, "attention_dropout": 0.2}, {}),
    "causal of GPT-2": ("GPT2LMHeadModel", {"n_positions": 24, "bos_token_id": 1, "eos_token_id": 1}, {}),
    "masked": ("BertForMaskedLM", {}, {}),
    "classes of texts": ("BertForSequenceClassification", {"num_labels": 3}, {}),
    "numbers of texts": ("BertForSequenceClassification", {"num_labels": 1}, {"loss": "MSELoss"}),
    "labels of texts": (
        "BertForSequenceClassification",
        {"num_labels": 3, "problem_type": "multi_label_classification"},
        {"loss": "BCEWithLogitsLoss"},
    ),
    "classes of tokens": ("BertForTokenClassification", {"num_labels": 4}, {}),
    "translation": (
        "T5ForConditionalGeneration",
        {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0},
        {},
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    """For each kind of model, with dropout in it; the loss is that which the model computes from labels itself."""
    architecture, config, options = KINDS[kind]
    source = checkpoint(tmp_path / "source", architecture, **config)
    report = prepare(tmp_path / "out", source, **options)
    proof = report.proof
    assert proof is not None
    assert proof.own_loss is not None
    assert proof.own_loss_error < 1e-5
    assert proof.loss_error < 1e-5
    assert proof.eval_loss_error < 1e-5
    assert 0 < proof.gradient_error < 1e-4
    import transformers

    for file in (tmp_path / "out").glob("*.onnx"):
        assert b"pkg.torch" not in file.read_bytes()  # what the exporter notes at nodes
    names = dict(getattr(transformers, architecture).from_pretrained(source).named_parameters(remove_duplicate=False))
    saved = load_checkpoint(tmp_path / "out" / "checkpoint")
    assert proof.num_gradients == len(report.trained)
    assert {*report.trained, *report.frozen, *saved.aliases} == set(names)
    for name, array in saved.trainable.items():
        np.testing.assert_array_equal(array, names[name].detach().numpy())


def test_the_loss_of_an_encoder_is_built_on_the_output_that_is_named(tmp_path: Path) -> None:
    """A text encoder has no logits, and no loss of its own."""
    source = checkpoint(tmp_path / "source", "BertModel")
    report = prepare(tmp_path / "out", source, loss="MSELoss", loss_inputs=("last_hidden_state",))
    proof = report.proof
    assert proof is not None
    assert proof.own_loss is None
    assert proof.gradient_error < 1e-4
    assert any("pooler" in note for note in report.notes)  # which the loss does not depend on
    assert any(name.startswith("pooler") for name in report.frozen)


def test_labels_of_a_causal_model_are_shifted_unless_told_otherwise(tmp_path: Path) -> None:
    """The loss of both graphs is transformers' for input_ids as labels, with -100 ignored; the report says so."""
    import transformers

    source = checkpoint(tmp_path / "source", "LlamaForCausalLM", num_key_value_heads=1)
    model = transformers.AutoModelForCausalLM.from_pretrained(source)
    ids = torch.randint(2, 60, (3, 7), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[0, 4:] = -100
    with torch.no_grad():
        wanted = model(input_ids=ids, labels=labels).loss.item()
        logits = model(input_ids=ids).logits
    feeds = {"input_ids": ids.numpy(), "attention_mask": np.ones((3, 7), np.int64), "labels": labels.numpy()}
    report = prepare(tmp_path / "out", source)
    assert any("shifted" in note for note in report.notes)
    _, module, _ = load(tmp_path / "out")
    values = [feeds[name] for name in module.input_names()]
    assert float(module(*values)) == pytest.approx(wanted, rel=1e-5)
    assert float(module.eval()(*values)) == pytest.approx(wanted, rel=1e-5)
    report = prepare(tmp_path / "plain", source, shift_labels=False)
    assert any("itself computes another loss" in note for note in report.notes)
    plain = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).item()
    _, module, _ = load(tmp_path / "plain")
    assert float(module(*values)) == pytest.approx(plain, rel=1e-5)


def test_a_wrong_gradient_is_found_and_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the slope of Gelu is half of what it is; the error has the figures."""
    from dataclasses import replace

    from onnxtool.autodiff.rules import RULES

    source = checkpoint(tmp_path / "source", "BertForTokenClassification", num_labels=4)
    rule = RULES["", "Erf"]
    halved = replace(rule, gradients=(lambda n: rule.gradients[0](n) * 0.5,))  # type: ignore[misc]
    monkeypatch.setitem(RULES, ("", "Erf"), halved)
    monkeypatch.delitem(RULES, ("", "Gelu"))
    with pytest.raises(
        ArtifactError, match=r"differ from BertForTokenClassification in PyTorch: .* a relative error of"
    ) as caught:
        prepare(tmp_path / "out", source)
    assert "--no_verify" in caught.value.hint
    assert not list((tmp_path / "out").iterdir())
    assert prepare(tmp_path / "out", source, verify=False).proof is None


def test_the_row_of_padding_is_not_trained(tmp_path: Path) -> None:
    """As in nn.Embedding with a padding_idx, where a tied head trains it all the same."""
    source = checkpoint(tmp_path / "source", "BertForTokenClassification", num_labels=4, pad_token_id=0)
    prepare(tmp_path / "out", source)
    state, module, _ = load(tmp_path / "out")
    ids = np.array([[0, 5, 7], [5, 0, 9]])
    feeds = {"input_ids": ids, "labels": ids % 4, "attention_mask": np.ones_like(ids), "token_type_ids": ids * 0}
    module(*(feeds[name] for name in module.input_names()))
    gradient = state.parameters["bert.embeddings.word_embeddings.weight"].grad
    assert gradient is not None
    assert [row for row in range(60) if gradient[row].any()] == [5, 7, 9]


def test_a_dropout_that_drops_nothing_scales_all_the_same() -> None:
    """What the graphs are compared with: each element times 1 / (1 - ratio), and a mask that is true."""
    from onnx import helper

    ratio = numpy_helper.from_array(np.float32(0.2), "ratio")
    node = helper.make_node("Dropout", ["x", "ratio"], ["y", "mask"])
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", 1, [3])],
        [helper.make_tensor_value_info("y", 1, [3]), helper.make_tensor_value_info("mask", 9, [3])],
        [ratio],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    replace_dropout(model)
    from tests.autodiff.gradients import run_onnxruntime

    x = np.array([1.0, -2.0, 0.0], np.float32)
    y, mask = run_onnxruntime(model, {"x": x})
    np.testing.assert_allclose(y, x / 0.8, rtol=1e-6)
    assert mask.all()


def test_the_report_has_the_figures(tmp_path: Path) -> None:
    """On the command line as on paper."""
    from tests.cli.entry_point import json_of, run_onnxtool

    source = checkpoint(tmp_path / "source", "BertForTokenClassification", num_labels=4)
    arguments = ("artifacts", "--model_name", source, "--output", tmp_path / "out", "--force", "--quiet")
    proof = json_of(run_onnxtool(tmp_path, *arguments, "--format", "json"))["proof"]
    assert proof["gradient_error"] < 1e-4
    assert proof["num_gradients"] > 10
    text = run_onnxtool(tmp_path, *arguments).stdout
    assert "Verified against: BertForTokenClassification in PyTorch" in text
    assert "largest relative difference" in text
    assert json.dumps(proof["worst_parameter"])[1:-1] in text
