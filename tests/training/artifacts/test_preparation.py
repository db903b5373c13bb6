"""Artifacts of checkpoints compute the loss and the gradients of transformers, and report their differences."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from onnxtool.autodiff.rules import RULES
from onnxtool.cli.artifacts import artifact_blocks
from onnxtool.errors import ArtifactError
from onnxtool.training.artifacts.preparation import Forward, export_forward, make_checkpoint_artifacts
from onnxtool.training.artifacts.report import ArtifactReport
from onnxtool.training.artifacts.verification import replace_dropout
from onnxtool.training.checkpoints.checkpoint import load_checkpoint
from onnxtool.training.options import ForwardOptions, PreparationOptions
from tests.autodiff.gradients import run_onnxruntime
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
_ENCODER_DECODER = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}

# Architecture and configuration of each checkpoint.
CHECKPOINTS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "causal": ("LlamaForCausalLM", {"num_key_value_heads": 1}),  # without dropout
    "texts": ("BertForSequenceClassification", {"num_labels": 3}),
    "translation": ("T5ForConditionalGeneration", _ENCODER_DECODER),
    "encoder": ("BertModel", {}),
}


def save_checkpoint(folder: Path, architecture: str, config: Mapping[str, Any]) -> Path:
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


class Exports:
    """Forward models of the checkpoints, each exported once for all tests of this module."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, Forward] = {}

    def source(self, name: str) -> Path:
        """Return the folder of a checkpoint."""
        return self._folder / name / "source"

    def forward(self, name: str) -> Forward:
        """Return a forward model with a reference that no other test changes."""
        if name not in self._made:
            source = save_checkpoint(self.source(name), *CHECKPOINTS[name])
            self._made[name] = export_forward(ForwardOptions(str(source)), source.parent)
        return copy.deepcopy(self._made[name])

    def prepare(self, name: str, output: Path, **options: Any) -> ArtifactReport:
        """Make the artifacts of a checkpoint."""
        return artifacts_of(self.forward(name), output, **options)


def artifacts_of(forward: Forward, output: Path, **options: Any) -> ArtifactReport:
    """Make the artifacts of a forward model."""
    chosen = PreparationOptions(forward=ForwardOptions(forward.path.parent.name), output=output, **options)
    return make_checkpoint_artifacts(chosen, forward)


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Exports:
    return Exports(tmp_path_factory.mktemp("exports"))


# The checkpoint, the type of its labels for transformers, and options.
KINDS: dict[str, tuple[str, str | None, Mapping[str, Any]]] = {
    "causal": ("causal", None, {}),
    "classes of texts": ("texts", "single_label_classification", {}),
    "labels of texts": ("texts", "multi_label_classification", {"loss": "BCEWithLogitsLoss"}),
    "translation": ("translation", None, {}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_those_of_transformers(exports: Exports, tmp_path: Path, kind: str) -> None:
    """For each kind of model, most with dropout in it; the loss is that which the model computes from labels itself.

    Masked language models are in tests/cli/test_artifacts.py.
    """
    name, problem_type, options = KINDS[kind]
    forward = exports.forward(name)
    model = forward.reference.model
    model.config.problem_type = problem_type
    report = artifacts_of(forward, tmp_path, **options)
    proof = report.proof
    assert proof is not None
    assert proof.own_loss is not None
    assert proof.own_loss_error < 1e-5
    assert proof.loss_error < 1e-5
    assert proof.eval_loss_error < 1e-5
    assert 0 < proof.gradient_error < 1e-4
    for file in tmp_path.glob("*.onnx"):
        assert b"pkg.torch" not in file.read_bytes()  # the exporter's notes at nodes
    names = dict(model.named_parameters(remove_duplicate=False))
    saved = load_checkpoint(tmp_path / "checkpoint")
    assert proof.num_gradients == len(report.trained)
    assert {*report.trained, *report.frozen, *saved.aliases} == set(names)
    for parameter, array in saved.trainable.items():
        np.testing.assert_array_equal(array, names[parameter].detach().numpy())


def test_the_exported_model_is_the_checkpoint(exports: Exports) -> None:
    """Its weights are those that transformers loads."""
    import transformers

    model = exports.forward("texts").reference.model
    loaded = transformers.BertForSequenceClassification.from_pretrained(exports.source("texts"))
    torch.testing.assert_close(model.state_dict(), loaded.state_dict(), rtol=0, atol=0)


def test_the_loss_of_an_encoder_is_built_on_the_output_that_is_named(exports: Exports, tmp_path: Path) -> None:
    """A text encoder has no logits, and no loss of its own."""
    report = exports.prepare("encoder", tmp_path, loss="MSELoss", loss_inputs=("last_hidden_state",))
    proof = report.proof
    assert proof is not None
    assert proof.own_loss is None
    assert proof.gradient_error < 1e-4
    assert any("pooler" in note for note in report.notes)  # which the loss does not depend on
    assert any(name.startswith("pooler") for name in report.frozen)


def test_labels_of_a_causal_model_are_shifted_unless_told_otherwise(exports: Exports, tmp_path: Path) -> None:
    """The loss of both graphs is transformers' for input_ids as labels, with -100 ignored; the report says so."""
    model = exports.forward("causal").reference.model.eval()
    ids = torch.randint(2, 60, (3, 7), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[0, 4:] = -100
    with torch.no_grad():
        expected = model(input_ids=ids, labels=labels).loss.item()
        logits = model(input_ids=ids).logits
    feeds = {"input_ids": ids.numpy(), "attention_mask": np.ones((3, 7), np.int64), "labels": labels.numpy()}
    report = exports.prepare("causal", tmp_path / "out")
    assert any("shifted" in note for note in report.notes)
    _, module, _ = load(tmp_path / "out")
    values = [feeds[name] for name in module.input_names()]
    assert float(module(*values)) == pytest.approx(expected, rel=1e-5)
    assert float(module.eval()(*values)) == pytest.approx(expected, rel=1e-5)
    report = exports.prepare("causal", tmp_path / "plain", shift_labels=False)
    assert any("itself computes another loss" in note for note in report.notes)
    plain = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).item()
    _, module, _ = load(tmp_path / "plain")
    assert float(module(*values)) == pytest.approx(plain, rel=1e-5)


def test_a_wrong_gradient_is_found_and_nothing_is_written(
    exports: Exports, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the slope of Gelu is half of what it is; the error has the figures."""
    rule = RULES["", "Erf"]
    halved = replace(rule, gradients=(lambda n: rule.gradients[0](n) * 0.5,))  # type: ignore[misc]
    monkeypatch.setitem(RULES, ("", "Erf"), halved)
    monkeypatch.delitem(RULES, ("", "Gelu"))
    message = r"differ from BertForSequenceClassification in PyTorch: .* a relative error of"
    with pytest.raises(ArtifactError, match=message) as caught:
        exports.prepare("texts", tmp_path / "out")
    assert "--no_verify" in caught.value.hint
    assert not (tmp_path / "out").exists()
    assert exports.prepare("texts", tmp_path / "out", verify=False).proof is None


def test_the_row_of_padding_is_not_trained(exports: Exports, tmp_path: Path) -> None:
    """As in nn.Embedding with a padding_idx, where a tied head trains it all the same."""
    exports.prepare("texts", tmp_path, verify=False)
    state, module, _ = load(tmp_path)
    ids = np.array([[0, 5, 7], [5, 0, 9]])
    labels = np.array([0, 2])
    feeds = {"input_ids": ids, "labels": labels, "attention_mask": np.ones_like(ids), "token_type_ids": ids * 0}
    module(*(feeds[name] for name in module.input_names()))
    gradient = state.parameters["bert.embeddings.word_embeddings.weight"].grad
    assert gradient is not None
    assert [row for row in range(60) if gradient[row].any()] == [5, 7, 9]


def test_a_dropout_that_drops_nothing_scales_all_the_same() -> None:
    """What the graphs are compared with: each element times 1 / (1 - ratio), and a mask that is true."""
    model = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["" : 20]>
        g (float[3] x) => (float[3] y, bool[3] mask) <float ratio = {0.2}> { y, mask = Dropout(x, ratio) }""")
    assert numpy_helper.to_array(model.graph.initializer[0]) == np.float32(0.2)
    replace_dropout(model)
    x = np.array([1.0, -2.0, 0.0], np.float32)
    y, mask = run_onnxruntime(model, {"x": x})
    np.testing.assert_allclose(y, x / 0.8, rtol=1e-6)
    assert mask.all()


def test_the_report_has_the_figures(exports: Exports, tmp_path: Path) -> None:
    """In the text of the command line; tests of that read them as JSON."""
    report = exports.prepare("texts", tmp_path)
    assert report.proof is not None
    text = "\n".join(map(str, artifact_blocks(report)))
    assert "BertForSequenceClassification in PyTorch" in text
    assert "largest relative difference" in text
    assert report.proof.worst_parameter in text
