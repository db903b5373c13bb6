"""Every stored tensor of a checkpoint is used, explained or refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from onnxtool.errors import CheckpointError, OnnxtoolError
from onnxtool.export.checkpoint import Checkpoint
from onnxtool.export.source import Source
from onnxtool.export.weights import account, as_floats, read_headers
from tests.workshop import Workshop

QUERY = "bert.encoder.layer.1.attention.self.query.weight"
NORM = "bert.embeddings.LayerNorm.weight"
WORDS = "bert.embeddings.word_embeddings.weight"

Weights = dict[str, torch.Tensor]


@pytest.fixture
def folder(workshop: Workshop, tmp_path: Path) -> Path:
    """A masked language model of our own to damage."""
    return Path(shutil.copytree(workshop.checkpoint("tiny-mlm"), tmp_path / "tiny-mlm"))


def change(folder: Path, edit: Callable[[Weights], Weights]) -> None:
    path = folder / "model.safetensors"
    save_file(edit(load_file(path)), path, metadata={"format": "pt"})


def configure(folder: Path, **settings: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def load(folder: Path, **options: Any) -> tuple[Checkpoint, Any]:
    checkpoint = Checkpoint.open(Source.find(str(folder)))
    return checkpoint, checkpoint.load_model(dtype="float32", device="cpu", attention=None, **options)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("name", [QUERY, WORDS])
def test_codes_in_place_of_a_weight_are_refused(folder: Path, name: str, dtype: torch.dtype) -> None:
    """Transformers casts them to floats, and nothing applies their scale."""
    change(folder, lambda weights: {**weights, name: (weights[name] * 50).to(dtype)})
    with pytest.raises(CheckpointError, match=rf"1 tensors .* another kind .*{name}"):
        load(folder)


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("SCB", "bitsandbytes in 8 bits"),
        ("weight.absmax", "bitsandbytes in 4 bits"),
        ("qzeros", "GPTQ or AWQ"),
        ("weight_packed", "compressed-tensors"),
        ("weight_scale", "a method that keeps scales"),
        ("weight_scale_inv", "a method that keeps scales"),
        ("input_zero_point", "a method that keeps scales"),
    ],
)
def test_scales_that_nothing_declares_are_called_by_their_method(folder: Path, name: str, method: str) -> None:
    """They would be left over, and the numbers beside them mean something else."""
    change(folder, lambda weights: {**weights, QUERY.removesuffix("weight") + name: torch.ones(1)})
    with pytest.raises(CheckpointError, match=rf"\({method}"):
        load(folder)


def test_floats_of_any_width_are_weights(folder: Path) -> None:
    """Their numbers mean what they are."""
    _, before = load(folder)
    change(folder, lambda weights: {name: value.double() for name, value in weights.items()})
    _, after = load(folder)
    assert torch.equal(before.state_dict()[QUERY], after.state_dict()[QUERY])


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda w: {**w, "adapter.gate": torch.ones(2)}, r"1 tensors .* fit nowhere .*adapter\.gate"),
        (lambda w: {**w, QUERY.removeprefix("bert."): w[QUERY] + 1}, f"holds both .* for {QUERY}"),
        (lambda w: {**w, NORM.replace("weight", "gamma"): w[NORM] + 1}, f"holds both .* for {NORM}"),
        (
            lambda w: {**w, "bert.embeddings.position_ids": torch.arange(64).flip(0)},
            "position_ids .* differs from what BertForMaskedLM computes",
        ),
        (
            lambda w: {name.replace("weight", "weigt") if name == QUERY else name: v for name, v in w.items()},
            r"no weights for .*weights that fit nowhere: .*weigt",
        ),
        (
            lambda w: {f"encoder.{name}" if "layer" in name else name: value for name, value in w.items()},
            "no weights for",
        ),
    ],
    ids=["unknown", "two names", "gamma and weight", "positions", "misspelled", "part of the names"],
)
def test_tensors_without_a_place_are_named(folder: Path, edit: Callable[[Weights], Weights], message: str) -> None:
    """Transformers leaves them out, or takes one of two, without a word."""
    change(folder, edit)
    with pytest.raises(CheckpointError, match=message):
        load(folder)


@pytest.mark.parametrize("stored", [torch.arange(64), torch.arange(32).unsqueeze(0)])
def test_unknown_tensors_are_left_out_where_that_is_asked_for(folder: Path, stored: torch.Tensor) -> None:
    """A note names them; positions as older versions stored them need none, as the model counts them itself."""
    change(folder, lambda weights: {**weights, "bert.embeddings.position_ids": stored})
    assert load(folder)[0].notes == []
    change(folder, lambda weights: {**weights, "adapter.gate": torch.ones(2)})
    checkpoint, _ = load(folder, allow_unused_weights=True)
    assert any("adapter.gate" in note for note in checkpoint.notes)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "model."])
def test_a_prefix_of_all_names_is_stripped(folder: Path, prefix: str) -> None:
    """Trainers wrap the model and save the wrapper."""
    _, before = load(folder)
    change(folder, lambda weights: {prefix + name: value for name, value in weights.items()})
    checkpoint, after = load(folder)
    assert all(torch.equal(value, after.state_dict()[name]) for name, value in before.state_dict().items())
    assert any(repr(prefix) in note for note in checkpoint.notes)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("tf_model.h5", "TensorFlow"),
        ("flax_model.msgpack", "Flax"),
        ("m.gguf", "GGUF"),
        ("model.onnx", "ONNX"),
        ("epoch=3.ckpt", "a trainer's checkpoint"),
        ("model.fp16.safetensors", "a variant"),
    ],
)
def test_weights_of_other_formats_are_called_what_they_are(folder: Path, name: str, kind: str) -> None:
    """'has no weights' would send people to look for what is there."""
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(CheckpointError, match=rf"has its weights as .*{kind}.*\({name}\)"):
        load(folder)


def shard(folder: Path, *, twice: str = "") -> tuple[Path, Path]:
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    files = folder / "model-1.safetensors", folder / "model-2.safetensors"
    for file, some in zip(files, (names[:4], [*names[4:], *([twice] if twice else [])]), strict=True):
        save_file({name: weights[name].clone() for name in some}, file, metadata={"format": "pt"})
    index = {name: files[position >= 4].name for position, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return files


def test_a_tensor_in_two_shards_and_a_shard_that_is_missing_are_refused(folder: Path) -> None:
    """One of the two tensors would win; and there are weights."""
    first = min(load_file(folder / "model.safetensors"))
    _, second_file = shard(folder, twice=first)
    with pytest.raises(CheckpointError, match=rf"both hold {first}"):
        load(folder)
    second_file.unlink()
    with pytest.raises(CheckpointError, match=r"lacks 1 of 2 shards .*model-2\.safetensors"):
        load(folder)


def test_a_head_that_differs_from_what_it_could_be_tied_to_is_kept(folder: Path) -> None:
    """Transformers leaves the two apart then, whatever config.json says."""
    name = "cls.predictions.decoder.weight"
    change(folder, lambda weights: {**weights, name: weights[WORDS] + 1})
    _, model = load(folder)
    stored = load_file(folder / "model.safetensors")
    assert torch.equal(model.state_dict()[name], stored[name])
    assert torch.equal(model.state_dict()[WORDS], stored[WORDS])


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_two_tensors_for_a_parameter_that_code_shares_must_be_equal(folder: Path, offset: float) -> None:
    """One of them is not what the model computes with, and transformers says nothing of it."""
    name = "cls.predictions.decoder.weight"
    change(folder, lambda weights: {**weights, name: weights[WORDS] + offset})
    model = transformers.BertForMaskedLM.from_pretrained(folder)
    model.cls.predictions.decoder.weight = model.bert.embeddings.word_embeddings.weight
    stored = read_headers([folder / "model.safetensors"], "tiny")
    if offset == 0.0:
        assert account(model, stored, "tiny").unknown == ()
    else:
        with pytest.raises(CheckpointError, match="hold different numbers, but the model has one parameter for both"):
            account(model, stored, "tiny")


def fp8(weights: Weights) -> Weights:
    """Quantize one layer as FineGrainedFP8 does, in blocks of 8."""
    value = weights[QUERY]
    rows, columns = value.shape
    blocks = value.reshape(rows // 8, 8, columns // 8, 8)
    scale = blocks.abs().amax((1, 3)) / 400
    coded = (blocks / scale[:, None, :, None]).reshape(rows, columns).to(torch.float8_e4m3fn)
    return {**weights, QUERY: coded, f"{QUERY}_scale_inv": scale}


FP8 = {"quant_method": "fp8", "weight_block_size": [8, 8], "activation_scheme": "dynamic"}


def test_float8_with_its_quantizer_is_exported_as_floats(folder: Path) -> None:
    """Transformers dequantizes it while it loads, and a note says so."""
    _, before = load(folder)
    change(folder, fp8)
    configure(folder, quantization_config=FP8)
    checkpoint, after = load(folder)
    error = (before.state_dict()[QUERY] - after.state_dict()[QUERY]).abs().max()
    assert 0 < error < 0.1 * before.state_dict()[QUERY].abs().max()
    assert any("1 tensors, quantized by fp8" in note for note in checkpoint.notes)
    # Without their scale, transformers takes the codes for the weights.
    change(folder, lambda weights: {name: v for name, v in weights.items() if not name.endswith("scale_inv")})
    with pytest.raises(CheckpointError, match="nothing would apply their scales"):
        load(folder)


def test_a_method_that_transformers_skips_is_refused(folder: Path) -> None:
    """It warns and loads the codes as they are; and it does not read hf_quant_config.json, of modelopt."""
    (folder / "hf_quant_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="modelopt"):
        load(folder)
    for settings in ({"quant_method": "nibbles"}, {"bits": 4}):
        configure(folder, quantization_config=settings)
        with pytest.raises(CheckpointError, match="which transformers does not compute with"):
            load(folder)


def test_layers_of_a_quantizer_become_the_matrices_that_they_multiply_by(folder: Path) -> None:
    """A linear map is known by the images of the unit vectors."""

    class Halves(torch.nn.Module):
        def __init__(self, linear: Any) -> None:
            super().__init__()
            self.in_features, self.out_features = linear.in_features, linear.out_features
            self.register_buffer("codes", linear.weight.detach().half())
            self.register_buffer("shift", linear.bias.detach())

        def forward(self, values: Any) -> Any:
            return values @ self.codes.float().T + self.shift

    _, model = load(folder)
    parent = model.get_submodule("bert.encoder.layer.1.attention.self")
    parent.query = Halves(parent.query)
    model.config.quantization_config = {"quant_method": "halves"}
    plain = as_floats(model)
    assert type(plain.get_submodule("bert.encoder.layer.1.attention.self.query")) is torch.nn.Linear
    ids = torch.tensor([[2, 7, 8, 3]])
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, model(ids).logits, atol=1e-5, rtol=1e-5)


def test_a_pooler_that_is_not_there_is_left_away(workshop: Workshop, folder: Path) -> None:
    """Nobody reads it of a model whose states are pooled; random numbers would be worse."""
    configure(folder, architectures=["BertModel"])
    checkpoint, model = load(folder)
    assert model.pooler is None
    assert checkpoint.initialized == []
    assert any("without its pooler" in note for note in checkpoint.notes)


def test_weights_of_a_module_are_accounted_for_as_well(tmp_path: Path) -> None:
    """A tensor that Dense does not read decides something in the model that wrote it."""
    from onnxtool.checkpoint.folder import CheckpointFolder
    from onnxtool.checkpoint.pooling_modules import Dense
    from onnxtool.checkpoint.sentence_modules import StoredModule

    settings = {"in_features": 4, "out_features": 2, "bias": True}
    weights = {"linear.weight": torch.ones(2, 4), "linear.bias": torch.ones(2)}
    (tmp_path / "2_Dense").mkdir()
    stored = StoredModule("Dense", "2_Dense", settings, CheckpointFolder(tmp_path))
    save_file(weights, tmp_path / "2_Dense" / "model.safetensors")
    Dense.read(stored)
    save_file({**weights, "scale": torch.ones(1)}, tmp_path / "2_Dense" / "model.safetensors")
    with pytest.raises(OnnxtoolError, match="weights that Dense does not use: scale"):
        Dense.read(stored)


def test_a_module_in_a_pickle_is_read_where_pickles_are_allowed(folder: Path) -> None:
    """--allow_pickle means the modules as well as the transformer."""
    (folder / "2_Dense").mkdir()
    torch.save({"linear.weight": torch.full((2, 2), 3.0)}, folder / "2_Dense" / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="only in a pickle"):
        Source.find(str(folder)).read_tensors("2_Dense")
    assert Source.find(str(folder), allow_pickle=True).read_tensors("2_Dense")["linear.weight"][0, 0] == 3.0
    torch.save({"linear.weight": torch.ones(1).expand(1 << 20, 1 << 20)}, folder / "2_Dense" / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="it names more numbers than it holds"):
        Source.find(str(folder), allow_pickle=True).read_tensors("2_Dense")


def test_an_index_of_more_shards_than_any_checkpoint_has_is_refused(folder: Path) -> None:
    """Looking up each would take minutes."""
    (folder / "model.safetensors").unlink()
    index = {f"w{number}": f"model-{number}.safetensors" for number in range(20_000)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    with pytest.raises(CheckpointError, match="it lists 20000 files"):
        Checkpoint.open(Source.find(str(folder)))
