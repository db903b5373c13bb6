"""What is wrong with a checkpoint is said before anything is traced."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from onnxtool.checkpoint.pooling_modules import Normalize, Pooling
from onnxtool.errors import CheckpointError, ProviderError
from onnxtool.export.checkpoint import Checkpoint
from onnxtool.export.heads.choice import read_head
from onnxtool.export.source import Source
from tests.workshop import Workshop


@pytest.fixture
def folder(workshop: Workshop, tmp_path: Path) -> Path:
    """A checkpoint of our own to damage."""
    return Path(shutil.copytree(workshop.checkpoint("tiny-mlm"), tmp_path / "tiny-mlm"))


def change_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def load(folder: Path, **options: Any) -> Any:
    checkpoint = Checkpoint.open(Source.find(str(folder)), **options)
    checkpoint.load_tokenizer()
    return checkpoint.load_model(dtype="float32", device="cpu", attention=None)


def test_the_architecture_of_config_json_is_loaded(folder: Path) -> None:
    """A masked language model keeps its head, without which a SPLADE vector would be a hidden state."""
    assert type(load(folder)).__name__ == "BertForMaskedLM"


def test_a_folder_without_config_says_what_belongs_there(folder: Path) -> None:
    """The hint lists the files of a checkpoint."""
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no config\.json") as error:
        load(folder)
    assert "model.safetensors" in error.value.hint


def test_a_path_with_nothing_at_it_is_not_asked_of_the_hub(tmp_path: Path) -> None:
    """A mistyped folder must not become a request to a server."""
    with pytest.raises(CheckpointError, match="no such folder"):
        Source.find(str(tmp_path / "nothing"))


def test_without_a_network_a_hub_id_tells_how_to_pass_a_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The name of the hub does not resolve, and nothing is in the cache."""

    def fail(*_arguments: object) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setattr("socket.getaddrinfo", fail)
    monkeypatch.setattr("urllib.request.getproxies", dict)
    with pytest.raises(CheckpointError, match="cannot reach the hub for nobody/nothing-of-this-name") as error:
        Checkpoint.open(Source.find("nobody/nothing-of-this-name"))
    assert "--model_name path/to/checkpoint" in error.value.hint


@pytest.mark.parametrize(
    ("config", "types", "reason"),
    [
        (None, [], "has no config.json"),
        (None, ["StaticEmbedding"], "consists of StaticEmbedding, which onnxtool does not compute"),
        (None, ["Router", "Normalize"], "consists of Router, Normalize, which"),
        ({"frozen": True}, ["SparseStaticEmbedding"], "consists of SparseStaticEmbedding, which"),
        (None, ["Transformer", "Pooling"], "the folder .*0_Transformer has no config.json"),
    ],
)
def test_a_checkpoint_without_a_transformer_says_what_it_is(
    tmp_path: Path, config: dict[str, Any] | None, types: list[str], reason: str
) -> None:
    """modules.json says it: a missing config.json is not what is wrong with it."""
    modules = [{"path": f"{i}_{name}", "type": f"sentence_transformers.models.{name}"} for i, name in enumerate(types)]
    if modules:
        (tmp_path / "modules.json").write_text(json.dumps(modules))
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=reason):
        Checkpoint.open(Source.find(str(tmp_path)))


@pytest.mark.parametrize("architecture", ["BertForMaskedLM", "BertForSequenceClassification"])
def test_an_embedder_is_its_base_model_whatever_it_was_trained_as(tmp_path: Path, architecture: str) -> None:
    """As sentence-transformers loads it; Qwen3-Embedding, too, names its causal language model."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "architectures": [architecture]}))
    (tmp_path / "model.safetensors").touch()
    modules = [{"path": "", "type": "sentence_transformers.models.Transformer"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    assert Checkpoint.open(Source.find(str(tmp_path))).architecture == architecture
    modules.append({"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"})
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    checkpoint = Checkpoint.open(Source.find(str(tmp_path)))
    assert (checkpoint.architecture, checkpoint.task) == ("BertModel", "sentence-similarity")


def test_an_unknown_model_type_suggests_near_ones(folder: Path) -> None:
    """`bertt` is close to something that exists."""
    change_config(folder, lambda config: config.update(model_type="bertt"))
    with pytest.raises(CheckpointError, match="'bertt'") as error:
        load(folder)
    assert "did you mean bert" in error.value.hint


def test_a_config_without_architecture_names_the_candidates(folder: Path) -> None:
    """The user picks a task, and sees which class it means."""
    change_config(folder, lambda config: config.pop("architectures"))
    with pytest.raises(CheckpointError, match="names no architecture") as error:
        load(folder)
    assert "fill-mask (BertForMaskedLM)" in error.value.hint
    assert type(load(folder, task="fill-mask")).__name__ == "BertForMaskedLM"


def test_an_architecture_that_transformers_does_not_have_is_named(folder: Path) -> None:
    """Code of the checkpoint's own is never run unasked."""
    change_config(folder, lambda config: config.update(architectures=["MyBert"]))
    with pytest.raises(CheckpointError, match="no architecture 'MyBert'") as error:
        load(folder)
    assert "--trust_remote_code" in error.value.hint


def test_a_tokenizer_alone_is_no_model(folder: Path) -> None:
    """Configuration and tokenizer are there, weights are not."""
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="has no weights"):
        load(folder)


def test_weights_are_looked_for_before_the_configuration_is_understood(folder: Path) -> None:
    """Their names are read in a moment, transformers takes seconds."""
    change_config(folder, lambda config: config.update(model_type="bert9"))
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="has no weights"):
        load(folder)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"num_hidden_layers": 10**9}, "1000000000 as num_hidden_layers"),
        ({"text_config": {"n_layer": 10**5}}, "100000 as n_layer"),
        ({"depths": [2, 10**6]}, "1000000 as depths"),
        ({"num_local_experts": 1e12}, "1000000000000.0 as num_local_experts"),
        ({"num_labels": 2**40}, f"{2**40} as num_labels"),
    ],
)
def test_more_parts_than_any_model_has_are_not_built(folder: Path, values: dict[str, Any], said: str) -> None:
    """Each would be built one by one, for hours."""
    change_config(folder, lambda config: config.update(values))
    with pytest.raises(CheckpointError, match=said):
        load(folder)


def test_code_of_a_checkpoint_is_called_that(folder: Path) -> None:
    """A kind of model that transformers does not know is not taken for a misspelled one."""
    change_config(folder, lambda config: config.update(model_type="mine", auto_map={"AutoConfig": "mine.Config"}))
    with pytest.raises(CheckpointError, match="code of its own") as error:
        load(folder)
    assert "--trust_remote_code" in error.value.hint


def test_a_model_without_tokenizer_is_refused(folder: Path) -> None:
    """Transformers would make up a tokenizer of five entries."""
    for name in ("tokenizer.json", "vocab.txt"):
        (folder / name).unlink()
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        load(folder)


def test_pickled_weights_are_refused(folder: Path) -> None:
    """They can run code when they are read."""
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="pickle"):
        load(folder)


def test_pickled_weights_load_where_that_is_asked_for(folder: Path) -> None:
    """They are the same weights."""
    weights = load_file(folder / "model.safetensors")
    torch.save(weights, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    checkpoint = Checkpoint.open(Source.find(str(folder), allow_pickle=True))
    model = checkpoint.load_model(dtype="float32", device="cpu", attention=None)
    assert checkpoint.is_pickle
    name = "bert.encoder.layer.1.output.dense.weight"
    assert torch.equal(model.state_dict()[name], weights[name])


class _Planted:
    """Would create a folder where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_a_pickle_that_holds_more_than_tensors_runs_nothing(folder: Path, tmp_path: Path) -> None:
    """Even --allow_pickle loads tensors alone."""
    torch.save({"weight": _Planted(tmp_path / "planted")}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin of .* holds more than tensors \(") as error:
        Checkpoint.open(Source.find(str(folder), allow_pickle=True)).load_model(
            dtype="float32", device="cpu", attention=None
        )
    assert "weights_only" not in str(error.value) + error.value.hint
    assert not (tmp_path / "planted").exists()


def test_weights_that_are_missing_are_named(folder: Path) -> None:
    """They would be random numbers, which no verification notices."""
    weights = load_file(folder / "model.safetensors")
    del weights["bert.encoder.layer.1.output.dense.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"no weights for bert\.encoder\.layer\.1\.output\.dense\.weight"):
        load(folder)


def test_missing_weights_are_initialized_where_that_is_asked_for(folder: Path) -> None:
    """--allow_missing_weights is for those who will train the head."""
    weights = load_file(folder / "model.safetensors")
    del weights["bert.encoder.layer.1.output.dense.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    checkpoint = Checkpoint.open(Source.find(str(folder)))
    checkpoint.load_model(dtype="float32", device="cpu", attention=None, allow_missing_weights=True)
    assert checkpoint.initialized == ["bert.encoder.layer.1.output.dense.weight"]


def test_what_is_made_up_is_the_same_in_every_load(folder: Path) -> None:
    """Else the file would not agree with the model that it is compared with, nor with tomorrow's export."""
    weights = load_file(folder / "model.safetensors")
    name = "bert.encoder.layer.1.output.dense.weight"
    del weights[name]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    checkpoint = Checkpoint.open(Source.find(str(folder)))
    arguments: dict[str, Any] = {"dtype": "float32", "device": "cpu", "attention": None, "allow_missing_weights": True}
    first, second = (checkpoint.load_model(**arguments).state_dict()[name] for _ in range(2))
    assert torch.equal(first, second)


def test_config_and_weights_that_disagree_are_said_to(folder: Path) -> None:
    """The folder mixes two models."""
    change_config(folder, lambda config: config.update(intermediate_size=48))
    with pytest.raises(CheckpointError, match=r"disagree.*intermediate\.dense.*\[64.*\[48"):
        load(folder)


def test_truncated_weights_are_no_traceback(folder: Path) -> None:
    """A download that broke off."""
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(CheckpointError, match="cannot load"):
        load(folder)


def test_a_config_that_is_not_json_is_said_so(folder: Path) -> None:
    """The file and the place are named."""
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json|JSON"):
        load(folder)


def test_a_task_that_the_model_has_no_class_for_lists_those_it_has(folder: Path) -> None:
    """CLIP has no masked language model."""
    (folder / "config.json").write_text(json.dumps({"model_type": "clip", "architectures": ["CLIPModel"]}))
    with pytest.raises(CheckpointError, match="no architecture for the task fill-mask"):
        Checkpoint.open(Source.find(str(folder)), task="fill-mask")


def test_the_hash_tells_two_checkpoints_of_one_name_apart(folder: Path) -> None:
    """One changed weight changes it."""
    before = Checkpoint.open(Source.find(str(folder))).weights_sha256
    weights = load_file(folder / "model.safetensors")
    weights["cls.predictions.bias"] = weights["cls.predictions.bias"] + 1
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert Checkpoint.open(Source.find(str(folder))).weights_sha256 != before


def test_pooling_is_read_from_sentence_transformers_files(minilm: Path) -> None:
    """MiniLM takes the mean and normalizes."""
    head = read_head("embedding", Source.find(str(minilm)))
    assert head is not None
    assert head.modules == (Pooling(("mean",)), Normalize())


def test_a_pooling_folder_outside_the_checkpoint_is_refused(folder: Path) -> None:
    """A checkpoint is untrusted input."""
    modules = [{"type": "sentence_transformers.models.Pooling", "path": "../elsewhere"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(CheckpointError, match="outside the folder"):
        _ = Source.find(str(folder)).sentence_modules


def test_a_device_that_torch_cannot_use_is_an_error(folder: Path) -> None:
    """It says what torch said, and never takes another device."""
    checkpoint = Checkpoint.open(Source.find(str(folder)))
    with pytest.raises(ProviderError, match="cannot use the device 'abacus'"):
        checkpoint.load_model(dtype="float32", device="abacus", attention=None)


@pytest.mark.parametrize("architectures", [[3], "BertModel", {"a": 1}])
def test_architectures_that_are_no_list_of_names_are_said_so(folder: Path, architectures: object) -> None:
    """A string would be read letter by letter."""
    change_config(folder, lambda config: config.update(architectures=architectures))
    with pytest.raises(CheckpointError, match="architectures|cannot load"):
        load(folder)


def test_a_config_of_wrong_types_is_no_traceback(folder: Path) -> None:
    """Transformers validates some fields with an error of its own."""
    change_config(folder, lambda config: config.update(hidden_size="wide"))
    with pytest.raises(CheckpointError, match="cannot load"):
        load(folder)


def test_a_revision_of_a_folder_is_refused(folder: Path) -> None:
    """It would be ignored."""
    with pytest.raises(CheckpointError, match="--revision v1 means nothing"):
        Source.find(str(folder), revision="v1")


def test_a_checkpoint_that_does_not_say_how_it_pools_gets_no_embedding_head(folder: Path) -> None:
    """The mean would be a guess, and verification would share it."""
    with pytest.raises(CheckpointError, match="does not say how it pools"):
        read_head("embedding", Source.find(str(folder)))


def test_a_tokenizer_that_would_fill_the_memory_is_refused(folder: Path) -> None:
    """The library allocates what its table of characters says: 8 GB."""
    path = folder / "tokenizer.json"
    normalizer = {"type": "Precompiled", "precompiled_charsmap": "/////wAAAAA="}
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | {"normalizer": normalizer}), "utf-8")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json of .* is malformed: its precompiled_charsmap says"):
        load(folder)


def test_layers_that_the_config_does_not_count_are_not_left_out(folder: Path) -> None:
    """Half a model would otherwise be exported, and verified against the same half."""
    change_config(folder, lambda config: config.update(num_hidden_layers=1))
    with pytest.raises(CheckpointError, match=r"more layers than config\.json counts: .*layer\.1"):
        load(folder)


def saved(model: Any, folder: Path) -> Path:
    """Save a model with the little that loading it takes."""
    model.save_pretrained(folder)
    return folder


def load_saved(folder: Path, **options: Any) -> tuple[Checkpoint, Any]:
    checkpoint = Checkpoint.open(Source.find(str(folder)), **options)
    return checkpoint, checkpoint.load_model(dtype="float32", device="cpu", attention=None)


T5_SIZES: dict[str, Any] = {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2}
BERT_SIZES: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16,
}  # fmt: skip


def test_layers_that_stand_deeper_in_the_names_are_counted_too(tmp_path: Path) -> None:
    """A vision model counts layers within stages: the first number of a name is the stage's."""
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], num_labels=3)
    folder = saved(transformers.ResNetForImageClassification(config), tmp_path / "resnet")
    change_config(folder, lambda config: config.update(depths=[1, 1]))
    with pytest.raises(CheckpointError, match=r"more layers than config\.json counts: .*stages\.1\.layers\.1"):
        load_saved(folder)


@pytest.mark.parametrize(
    ("model", "field", "layer"),
    [
        (lambda: transformers.BertModel(transformers.BertConfig(**BERT_SIZES)), "num_hidden_layers", "encoder.layer.0"),
        (
            lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**T5_SIZES)),
            "num_decoder_layers",
            "decoder.block.0",
        ),
    ],
    ids=["bert", "t5"],
)
def test_a_config_that_counts_no_layers_leaves_none_out(
    tmp_path: Path, model: Callable[[], Any], field: str, layer: str
) -> None:
    """There is no other layer then whose name would be alike."""
    folder = saved(model(), tmp_path / "model")
    change_config(folder, lambda config: config.update({field: 0}))
    with pytest.raises(CheckpointError, match=rf"more layers than config\.json counts: .*{layer}"):
        load_saved(folder)


def test_what_another_head_leaves_over_is_no_layer(tmp_path: Path) -> None:
    """The decoder beside an encoder, and what BERT was trained with beside its masked language model."""
    t5 = saved(transformers.T5ForConditionalGeneration(transformers.T5Config(**T5_SIZES)), tmp_path / "t5")
    change_config(t5, lambda config: config.update(architectures=["T5EncoderModel"]))
    _, encoder = load_saved(t5)
    assert type(encoder).__name__ == "T5EncoderModel"
    bert = saved(transformers.BertForPreTraining(transformers.BertConfig(**BERT_SIZES)), tmp_path / "bert")
    checkpoint, _ = load_saved(bert, task="fill-mask")
    assert any("left out" in note and "cls.seq_relationship.weight" in note for note in checkpoint.notes)


@pytest.mark.parametrize(
    ("architecture", "message"),
    [
        ("BertTokenizer", "BertTokenizer, which config.json .* is no model"),
        ("AutoModel", "AutoModel, which config.json .* is no model"),
        ("PreTrainedModel", "PreTrainedModel, which config.json .* is no model"),
        ("BertPreTrainedModel", "BertPreTrainedModel, which config.json .* is no model"),
        ("GPT2Model", "is one of bert, and names GPT2Model, which is a model of gpt2"),
    ],
)
def test_an_architecture_that_is_no_model_of_this_config_is_said_so(
    folder: Path, architecture: str, message: str
) -> None:
    """Transformers has a class of this name, and it cannot hold the weights."""
    change_config(folder, lambda config: config.update(architectures=[architecture]))
    with pytest.raises(CheckpointError, match=message):
        load(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"hidden_act": "foo"}, "KeyError: 'foo'"), ({"num_attention_heads": 0}, "modulo|division|by zero")],
)
def test_values_that_the_architecture_cannot_use_are_no_traceback(
    folder: Path, change: dict[str, Any], message: str
) -> None:
    """It fails wherever one is first used, and the text of a KeyError alone says nothing."""
    change_config(folder, lambda config: config.update(change))
    with pytest.raises(CheckpointError, match=f"cannot load .*({message})"):
        load(folder)


def test_an_error_whose_text_says_nothing_is_called_by_its_type(folder: Path) -> None:
    """KeyError: 'foo' instead of 'foo'; a sentence stands alone."""
    source = Source.find(str(folder))
    assert source.unreadable(KeyError("foo")).message.endswith(": KeyError: 'foo'")
    assert source.unreadable(ValueError()).message.endswith(": ValueError")
    assert source.unreadable(OSError("no such file")).message.endswith(f"{folder}: no such file")


def test_the_hash_covers_the_weights_of_modules(folder: Path) -> None:
    """A Dense layer decides the vectors as much as the transformer does."""

    def digest() -> str:
        return Checkpoint.open(Source.find(str(folder))).weights_sha256

    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    found = [digest()]
    (folder / "2_Dense").mkdir()
    for value in (1.0, 2.0):
        save_file({"linear.weight": torch.full((2, 2), value)}, folder / "2_Dense" / "model.safetensors")
        found.append(digest())
    assert len(set(found)) == 3


def test_loading_leaves_the_random_numbers_of_its_caller_alone(folder: Path) -> None:
    """What is made up has a seed of its own; a training loop around it has another."""
    checkpoint = Checkpoint.open(Source.find(str(folder)))
    torch.manual_seed(7)
    wanted = torch.rand(3)
    torch.manual_seed(7)
    checkpoint.load_model(dtype="float32", device="cpu", attention=None)
    assert torch.equal(torch.rand(3), wanted)
