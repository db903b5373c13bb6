"""What is wrong with a checkpoint is said before anything is traced."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import sys
import zipfile
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

from onnxtool import ExportOptions, export_model
from onnxtool.checkpoint.tasks import TASKS, recognize_task
from onnxtool.errors import CheckpointError, ProviderError
from onnxtool.export import pickles
from onnxtool.export.checkpoint import Checkpoint, task_of_architecture
from onnxtool.export.heads.choice import read_head
from onnxtool.export.source import Source
from tests.module_files import write_modules
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


def opened(folder: Path, **options: Any) -> tuple[Any, Any]:
    checkpoint = Checkpoint.open(Source.find(str(folder)), **options)
    return checkpoint, checkpoint.load_model(dtype="float32", device="cpu", attention=None)


def load(folder: Path, **options: Any) -> Any:
    checkpoint, model = opened(folder, **options)
    checkpoint.load_tokenizer()
    return model


def without_tokenizer(folder: Path) -> None:
    """Transformers would make up a tokenizer of five entries."""
    for name in ("tokenizer.json", "vocab.txt"):
        (folder / name).unlink()


def without_weights(folder: Path) -> None:
    """A model_type that does not exist as well: names are read in a moment, transformers takes seconds."""
    change_config(folder, lambda config: config.update(model_type="bert9"))
    (folder / "model.safetensors").unlink()


def truncate(folder: Path) -> None:
    """A download that broke off."""
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def ask_for_memory(folder: Path) -> None:
    """The tokenizer library allocates what its table of characters says: 4 GB."""
    path = folder / "tokenizer.json"
    normalizer = {"type": "Precompiled", "precompiled_charsmap": "/////wAAAAA="}
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | {"normalizer": normalizer}), "utf-8")


@pytest.mark.parametrize(
    ("damage", "message", "hint"),
    [
        (lambda folder: (folder / "config.json").unlink(), r"has no config\.json", "model.safetensors"),
        (without_weights, "has no weights", ""),
        (without_tokenizer, "has no tokenizer", ""),
        (truncate, "cannot load", ""),
        (lambda folder: (folder / "config.json").write_text("{"), r"config\.json|JSON", ""),
        (ask_for_memory, r"tokenizer\.json of .* is malformed: it asks for more than", ""),
    ],
    ids=["no config", "no weights", "no tokenizer", "truncated", "no JSON", "memory"],
)
def test_files_that_are_missing_or_damaged_are_one_error(
    folder: Path, damage: Callable[[Path], object], message: str, hint: str
) -> None:
    damage(folder)
    with pytest.raises(CheckpointError, match=message) as error:
        load(folder)
    assert hint in error.value.hint


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
    assert "pass the folder of a checkpoint" in error.value.hint


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
    write_modules(tmp_path)
    assert Checkpoint.open(Source.find(str(tmp_path))).architecture == architecture
    write_modules(tmp_path, "Pooling")
    checkpoint = Checkpoint.open(Source.find(str(tmp_path)))
    assert (checkpoint.architecture, checkpoint.task) == ("BertModel", "sentence-similarity")


MINE = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}


@pytest.mark.parametrize(
    ("values", "message", "hint"),
    [
        ({"model_type": "bertt"}, "'bertt'", "did you mean bert"),
        (MINE, "its own code", "--trust_remote_code"),
        ({"architectures": ["MyBert"]}, "no architecture 'MyBert'", "--trust_remote_code"),
        *(({"architectures": bad}, "architectures|cannot load", "") for bad in ([3], "BertModel", {"a": 1})),
        *(
            ({"architectures": [name]}, f"{name}, which config.json .* is not a model", "")
            for name in ("BertTokenizer", "AutoModel", "PreTrainedModel", "BertPreTrainedModel")
        ),
        ({"architectures": ["GPT2Model"]}, "is one of bert, and names GPT2Model, which is a model of gpt2", ""),
        # More parts than any model has: each would be built one by one, for hours.
        ({"num_hidden_layers": 10**9}, "1000000000 as num_hidden_layers", ""),
        ({"text_config": {"n_layer": 10**5}}, "100000 as n_layer", ""),
        ({"depths": [2, 10**6]}, "1000000 as depths", ""),
        ({"num_local_experts": 1e12}, "1000000000000.0 as num_local_experts", ""),
        ({"num_labels": 2**40}, f"{2**40} as num_labels", ""),
        # Values that the architecture cannot use; the text of a KeyError alone says nothing.
        ({"hidden_size": "wide"}, "cannot load", ""),
        ({"hidden_act": "foo"}, "cannot load .*KeyError: 'foo'", ""),
        ({"num_attention_heads": 0}, "cannot load .*(modulo|division|by zero)", ""),
        # The folder mixes two models: half of one would be exported, and verified against the same half.
        ({"intermediate_size": 48}, r"disagree.*intermediate\.dense.*\[64.*\[48", ""),
        ({"num_hidden_layers": 1}, r"more layers than config\.json states: .*layer\.1", ""),
    ],
)
def test_a_configuration_that_fits_no_model_is_an_error(
    folder: Path, values: dict[str, Any], message: str, hint: str
) -> None:
    """With a cause and a way out, and never a traceback of transformers."""
    change_config(folder, lambda config: config.update(values))
    with pytest.raises(CheckpointError, match=message) as error:
        load(folder)
    assert hint in error.value.hint


def test_a_config_without_architecture_names_the_candidates(folder: Path) -> None:
    """The user picks a task, and sees which class it means; the one that is named keeps its head."""
    assert type(load(folder)).__name__ == "BertForMaskedLM"
    change_config(folder, lambda config: config.pop("architectures"))
    with pytest.raises(CheckpointError, match="names no architecture") as error:
        load(folder)
    assert "fill-mask (BertForMaskedLM)" in error.value.hint
    assert type(load(folder, task="fill-mask")).__name__ == "BertForMaskedLM"


def test_pickled_weights_load_only_where_that_is_asked_for(folder: Path) -> None:
    """They can run code when they are read; else they are the same weights."""
    weights = load_file(folder / "model.safetensors")
    torch.save(weights, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="pickle"):
        load(folder)
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


def test_a_pickle_without_end_is_ended(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that holds itself twice, 60 times over, takes PyTorch's unpickler as long as 2^60 keys."""
    monkeypatch.setattr(pickles, "_SECONDS", 1)
    torch.save({}, folder / "plain.bin")
    key = b"".join(b"h%c\x86q%c" % (number, number + 1) for number in range(60))
    with zipfile.ZipFile(folder / "plain.bin") as plain, zipfile.ZipFile(folder / "pytorch_model.bin", "w") as hostile:
        for name in plain.namelist():
            content = b"\x80\x02}K\x00q\x00" + key + b"K\x01s."
            hostile.writestr(name, content if name.endswith("data.pkl") else plain.read(name))
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin of .* takes more than 1 s"):
        Checkpoint.open(Source.find(str(folder), allow_pickle=True)).load_model(
            dtype="float32", device="cpu", attention=None
        )


@pytest.mark.skipif(sys.platform != "linux", reason="no limits of memory there")
@pytest.mark.parametrize("key", ["vocab_size", "max_position_embeddings", "intermediate_size"])
def test_a_configuration_asks_for_no_more_memory_than_its_weights_need(folder: Path, key: str) -> None:
    """Ten times the weights and 4 GB; the limit of this process is what it was."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    config = json.loads((folder / "config.json").read_text("utf-8")) | {key: 2**31}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    with pytest.raises(CheckpointError, match=r"config\.json of .* takes more than 4 GB, and its weights less"):
        load(folder)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def test_missing_weights_are_named_or_made_up_where_that_is_asked_for(folder: Path) -> None:
    """Random numbers go unnoticed by verification; with --allow_missing_weights every load makes up the same ones."""
    weights, name = load_file(folder / "model.safetensors"), "bert.encoder.layer.1.output.dense.weight"
    del weights[name]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"no weights for {re.escape(name)}"):
        load(folder)
    checkpoint = Checkpoint.open(Source.find(str(folder)))
    arguments: dict[str, Any] = {"dtype": "float32", "device": "cpu", "attention": None, "allow_missing_weights": True}
    first, second = (checkpoint.load_model(**arguments).state_dict()[name] for _ in range(2))
    assert checkpoint.initialized == [name]
    assert torch.equal(first, second)


def test_what_a_checkpoint_cannot_do_is_refused(folder: Path) -> None:
    """A revision of a folder, a device or pooling that it does not state, and a task of no class of its model."""
    source = Source.find(str(folder))
    with pytest.raises(CheckpointError, match="--revision v1 means nothing"):
        Source.find(str(folder), revision="v1")
    with pytest.raises(ProviderError, match="cannot use the device 'abacus'"):
        Checkpoint.open(source).load_model(dtype="float32", device="abacus", attention=None)
    with pytest.raises(CheckpointError, match="does not say how it pools"):  # the mean would be a guess
        read_head("embedding", source)
    (folder / "config.json").write_text(json.dumps({"model_type": "clip", "architectures": ["CLIPModel"]}))
    with pytest.raises(CheckpointError, match="no architecture for the task fill-mask"):
        Checkpoint.open(Source.find(str(folder)), task="fill-mask")


def saved(model: Any, folder: Path) -> Path:
    """Save a model with the little that loading it takes."""
    model.save_pretrained(folder)
    return folder


T5_SIZES: dict[str, Any] = {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2}
SIZES: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16,
}  # fmt: skip


def test_layers_that_stand_deeper_in_the_names_are_counted_too(tmp_path: Path) -> None:
    """A vision model counts layers within stages: the first number of a name is the stage's."""
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], num_labels=3)
    folder = saved(transformers.ResNetForImageClassification(config), tmp_path / "resnet")
    change_config(folder, lambda config: config.update(depths=[1, 1]))
    with pytest.raises(CheckpointError, match=r"more layers than config\.json states: .*stages\.1\.layers\.1"):
        opened(folder)


@pytest.mark.parametrize(
    ("model", "field", "layer"),
    [
        (lambda: transformers.BertModel(transformers.BertConfig(**SIZES)), "num_hidden_layers", "encoder.layer.0"),
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
    with pytest.raises(CheckpointError, match=rf"more layers than config\.json states: .*{layer}"):
        opened(folder)


def test_what_another_head_leaves_over_is_no_layer(tmp_path: Path) -> None:
    """The decoder beside an encoder, and what BERT was trained with beside its masked language model."""
    t5 = saved(transformers.T5ForConditionalGeneration(transformers.T5Config(**T5_SIZES)), tmp_path / "t5")
    change_config(t5, lambda config: config.update(architectures=["T5EncoderModel"]))
    _, encoder = opened(t5)
    assert type(encoder).__name__ == "T5EncoderModel"
    bert = saved(transformers.BertForPreTraining(transformers.BertConfig(**SIZES)), tmp_path / "bert")
    checkpoint, _ = opened(bert, task="fill-mask")
    assert any("left out" in note and "cls.seq_relationship.weight" in note for note in checkpoint.notes)


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

    write_modules(folder, "Pooling", "Dense")
    found = [digest()]
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


@pytest.mark.parametrize(
    ("model_type", "architecture", "kinds", "tags", "task"),
    [
        ("bert", "BertForMaskedLM", (), (), "fill-mask"),
        ("bert", "BertForMaskedLM", (), ("splade",), "sparse-encoding"),
        ("bert", "BertForMaskedLM", ("SpladePooling",), (), "sparse-encoding"),
        ("bert", "BertModel", (), (), "feature-extraction"),
        ("bert", "BertModel", ("Pooling",), (), "sentence-similarity"),
        ("bert", "BertModel", (), ("splade",), "feature-extraction"),
        ("distilbert", "DistilBertForSequenceClassification", (), (), "text-classification"),
        ("gpt2", "GPT2LMHeadModel", (), (), "text-generation"),
        ("llama", "LlamaForCausalLM", (), (), "text-generation"),
        ("qwen3", "Qwen3ForCausalLM", ("Transformer", "LogitScore"), (), "text-ranking"),
        ("qwen3", "Qwen3ForCausalLM", (), ("text-ranking",), "text-ranking"),
        ("bert", "BertForSequenceClassification", (), ("text-ranking",), "text-classification"),
        ("bert", "BertForTokenClassification", (), (), "token-classification"),
        ("bert", "BertForQuestionAnswering", (), (), "question-answering"),
        ("bert", "BertForMultipleChoice", (), (), "other"),
        ("xlm", "XLMWithLMHeadModel", (), (), "fill-mask"),
        ("t5", "T5ForConditionalGeneration", (), (), "text2text-generation"),
        ("bart", "BartForConditionalGeneration", (), (), "text2text-generation"),
        ("vit", "ViTForImageClassification", (), (), "image-classification"),
        ("clip", "CLIPModel", (), (), "zero-shot-image-classification"),
        ("whisper", "WhisperForConditionalGeneration", (), (), "automatic-speech-recognition"),
        ("wav2vec2", "Wav2Vec2ForCTC", (), (), "automatic-speech-recognition"),
        ("wav2vec2", "Wav2Vec2ForSequenceClassification", (), (), "audio-classification"),
        ("of_its_own", "OfItsOwnForMaskedLM", (), (), "fill-mask"),
    ],
)
def test_the_task_follows_from_what_the_checkpoint_says(
    model_type: str, architecture: str, kinds: tuple[str, ...], tags: tuple[str, ...], task: str
) -> None:
    """A base model with a sparse card has no vocabulary to weigh, so the card alone does not make it one."""
    assert recognize_task(task_of_architecture(model_type, architecture), kinds=kinds, tags=tags) == task


def test_every_task_names_a_class_that_transformers_has() -> None:
    """A row with a typing error would show only to the user who asks for it."""
    import transformers

    assert all(hasattr(transformers, name) for task in TASKS for name in task.auto_classes)


# Of transformers, about a property that PEFT 0.21 reads.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")

IDS = torch.tensor([[2, 7, 8, 9, 3]])


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
    checkpoint, model = opened(folder)
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
    checkpoint, found = opened(tmp_path / "adapter")
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
        opened(folder)


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
        opened(folder)


def test_an_adapter_of_prompts_cannot_be_opened(base: Path, tmp_path: Path) -> None:
    """It changes inputs."""
    model = transformers.BertForMaskedLM.from_pretrained(base)
    config = peft.PromptTuningConfig(task_type="FEATURE_EXTRACTION", num_virtual_tokens=2)
    save_adapter(base, model, config, tmp_path / "prompts")
    with pytest.raises(CheckpointError, match=r"\(PROMPT_TUNING\) cannot be merged .*: it changes inputs"):
        opened(tmp_path / "prompts")


def test_an_adapter_without_peft_or_weights_is_an_error(
    base: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file must not depend on what is installed, and nothing would be merged."""
    folder = shutil.copytree(base, tmp_path / "both")
    shutil.copy(adapter / "adapter_config.json", folder / "adapter_config.json")
    with pytest.raises(CheckpointError, match=r"without weights \(adapter_model\.safetensors\)"):
        Checkpoint.open(Source.find(str(folder)))
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(CheckpointError, match="PEFT cannot be imported"):
        Checkpoint.open(Source.find(str(adapter)))


def test_an_export_does_not_turn_its_adapter_into_a_model(adapter: Path, tmp_path: Path) -> None:
    """A config.json in the folder would end its being an adapter."""
    folder = shutil.copytree(adapter, tmp_path / "lora")
    with pytest.raises(CheckpointError, match=r"config\.json would be written into the checkpoint"):
        export_model(ExportOptions(model_name=str(folder), output=tmp_path / "lora.onnx"))
    assert not (folder / "config.json").exists()
