"""Adapters of artifacts train, are exported and are merged as those of PyTorch and PEFT."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from safetensors.numpy import load_file

from onnxtool.errors import ArtifactError, CheckpointError, OutputExistsError
from onnxtool.training.api import CheckpointState, Module, Optimizer
from onnxtool.training.artifacts import LoraOptions
from onnxtool.training.artifacts.preparation import Forward, export_forward
from onnxtool.training.options import ForwardOptions
from tests.graphs import of_text
from tests.training.artifacts.test_preparation import artifacts_of, save_checkpoint
from tests.training.small_models import CLASSES, FEATURES, HIDDEN, batch, load, make, perceptron

RANK, ALPHA, RATE, STEPS = 4, 6.0, 3e-3, 25
TOLERANCE = 1e-5
_NO_DROPOUT = {
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "attention_dropout"), 0.0),
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
}
# Architecture, configuration, and the products with adapters as PEFT and as a pattern names them.
MODELS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "llama": ("LlamaForCausalLM", {"num_key_value_heads": 1}, ("q_proj", "v_proj", "lm_head")),
    "gpt2": (
        "GPT2LMHeadModel",
        {"n_positions": 24, "bos_token_id": 1, "eos_token_id": 1},
        ("c_attn", "*.mlp.c_proj.weight"),
    ),
}


class Low(torch.nn.Module):
    """A product with an adapter, written by hand: any layer, A [r, I] and B [O, r]."""

    def __init__(self, layer: torch.nn.Module, down: NDArray[np.float32], up: NDArray[np.float32]) -> None:
        super().__init__()
        self.layer = layer
        self.down, self.up = (torch.nn.Parameter(torch.tensor(array)) for array in (down, up))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added = torch.nn.functional.linear(torch.nn.functional.linear(x, self.down), self.up)
        result: torch.Tensor = self.layer(x) + (ALPHA / RANK) * added
        return result


class Trained:
    """A checkpoint whose adapters were trained, with the batches and the losses."""

    def __init__(self, folder: Path, name: str) -> None:
        architecture, config, targets = MODELS[name]
        self.folder = folder
        self.source = save_checkpoint(folder / "source", architecture, {**_NO_DROPOUT, **config})
        self.forward: Forward = export_forward(ForwardOptions(str(self.source)), folder)
        options = LoraOptions(RANK, targets, ALPHA)
        self.report = artifacts_of(self.forward, folder / "training", lora=options)
        self.state, self.module, self.optimizer = load(folder / "training")
        self.initial = {key: parameter.data for key, parameter in self.state.parameters}
        draw = np.random.default_rng(0)
        is_causal = not architecture.endswith("ForSequenceClassification")
        self.batches = list(self._draw(draw, is_causal, self.module.input_names()))
        self.losses = train(self.module, self.optimizer, self.batches)

    def model(self) -> Any:
        """Return the checkpoint in PyTorch, as transformers loads it."""
        import transformers

        return getattr(transformers, MODELS[self.source.parent.name][0]).from_pretrained(self.source).train()

    def logits(self, model: Any) -> NDArray[np.float32]:
        """Return PyTorch's for the first batch."""
        feeds = {name: torch.from_numpy(array) for name, array in self.batches[0].items() if name != "labels"}
        with torch.no_grad():
            logits: NDArray[np.float32] = model.eval()(**feeds).logits.numpy()
        return logits

    def exported(self, path: Path) -> NDArray[np.float32]:
        """Export the model with the adapters folded in, and return its logits for the first batch."""
        self.module.export_model_for_inferencing(path, ["logits"])
        assert b"lora" not in path.read_bytes()
        session = ort.InferenceSession(path)
        wanted = [value.name for value in session.get_inputs()]
        return np.asarray(session.run(["logits"], {name: self.batches[0][name] for name in wanted})[0])

    @staticmethod
    def _draw(draw: np.random.Generator, causal: bool, names: list[str]) -> Iterator[dict[str, NDArray[Any]]]:
        for _ in range(STEPS):
            ids = draw.integers(4, 60, (4, 7))
            made = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
            made["labels"] = ids if causal else draw.integers(0, 3, 4)
            yield {name: made[name] for name in names}


def train(module: Module, optimizer: Optimizer, batches: list[dict[str, NDArray[Any]]]) -> list[float]:
    optimizer.set_learning_rate(RATE)
    losses = []
    for feeds in batches:
        losses.append(float(module(*(feeds[name] for name in module.input_names()))))
        optimizer.step()
        module.lazy_reset_grad()
    return losses


def train_in_pytorch(model: Any, batches: list[dict[str, NDArray[Any]]]) -> list[float]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, eps=1e-6, weight_decay=0.0)
    losses = []
    for feeds in batches:
        loss = model(**{name: torch.from_numpy(array) for name, array in feeds.items()}).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture(scope="module", params=MODELS)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return Trained(tmp_path_factory.mktemp("lora") / request.param, request.param)


@pytest.mark.slow
def test_adapters_learn_what_those_written_by_hand_learn(trained: Trained) -> None:
    """Losses of 25 steps, and the adapters after them; the losses fall, and nothing else is trained."""
    model = trained.model().requires_grad_(False)
    lora = trained.state.lora()
    assert lora is not None
    layers = {}
    for adapter in lora.adapters:
        layer = Low(model.get_submodule(adapter.module), trained.initial[adapter.down], trained.initial[adapter.up])
        parent, _, last = adapter.module.rpartition(".")
        setattr(model.get_submodule(parent), last, layer)
        layers[adapter] = layer
    losses = train_in_pytorch(model, trained.batches)
    np.testing.assert_allclose(trained.losses, losses, rtol=TOLERANCE)
    for adapter, layer in layers.items():
        for name, tensor in ((adapter.down, layer.down), (adapter.up, layer.up)):
            np.testing.assert_allclose(trained.state.parameters[name].data, tensor.detach().numpy(), atol=TOLERANCE)
    assert set(trained.report.trained) == set(lora.parameters)
    for name, parameter in trained.state.parameters:
        assert parameter.requires_grad == (name in lora.parameters)
        assert np.array_equal(parameter.data, trained.initial[name]) != parameter.requires_grad


@pytest.mark.slow
def test_one_step_with_adapters_is_verified_with_pytorch(trained: Trained) -> None:
    """With a B other than zero, at which A gets a gradient as well."""
    proof = trained.report.proof
    assert proof is not None
    assert proof.num_gradients == len(trained.report.trained)
    assert proof.gradient_error < 1e-4


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT's own, of transformers
def test_peft_learns_the_same_and_loads_what_is_exported(trained: Trained, tmp_path: Path) -> None:
    """Its own adapters learn the same, it reads ours, and the model with them folded in gives the same logits."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    lora = trained.state.lora()
    assert lora is not None
    trained.state.export_adapter(tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(trained.model(), tmp_path / "adapter")
    logits = trained.logits(loaded)
    assert np.abs(logits - trained.logits(trained.model())).max() > 100 * TOLERANCE  # it has learned something
    np.testing.assert_allclose(trained.exported(tmp_path / "merged.onnx"), logits, atol=TOLERANCE)
    modules = [adapter.module for adapter in lora.adapters]
    config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=modules, lora_dropout=0.0)
    config.fan_in_fan_out = lora.adapters[0].inputs_first
    model = peft.get_peft_model(trained.model(), config)
    own = dict(model.named_parameters())
    names = {name: f"base_model.model.{name.removesuffix('weight')}default.weight" for name in lora.parameters}
    assert set(names.values()) == {name for name, parameter in own.items() if parameter.requires_grad}
    for name in lora.parameters:
        ours, theirs = trained.initial[name], own[names[name]].data
        bound = 1 / math.sqrt(ours.shape[1]) if "lora_A" in name else 0.0
        assert ours.shape == tuple(theirs.shape)
        assert np.abs(ours).max() <= bound
        assert theirs.abs().max() <= bound
        own[names[name]].data.copy_(torch.tensor(ours))
    losses = train_in_pytorch(model.train(), trained.batches)
    np.testing.assert_allclose(trained.losses, losses, rtol=TOLERANCE)
    for name in lora.parameters:
        found = trained.state.parameters[name].data
        np.testing.assert_allclose(found, own[names[name]].detach().numpy(), atol=TOLERANCE)
    model.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
    files = [load_file(tmp_path / name / "adapter_model.safetensors") for name in ("theirs", "adapter")]
    shapes = [{name: array.shape for name, array in file.items()} for file in files]
    assert shapes[0] == shapes[1]


@pytest.mark.slow
def test_the_exported_model_is_the_one_that_was_trained(trained: Trained, tmp_path: Path) -> None:
    """The weights with the adapters folded in give the logits of the hand-written adapters in PyTorch."""
    model = trained.model()
    lora = trained.state.lora()
    assert lora is not None
    for adapter in lora.adapters:
        down, up = (trained.state.parameters[name].data for name in (adapter.down, adapter.up))
        parent, _, last = adapter.module.rpartition(".")
        setattr(model.get_submodule(parent), last, Low(model.get_submodule(adapter.module), down, up))
    np.testing.assert_allclose(trained.exported(tmp_path / "m.onnx"), trained.logits(model), atol=TOLERANCE)


def shared_products() -> onnx.ModelProto:
    """Make float32 [N, 5] -> two products with one weight [5, 5], one with a transposed one -> [N, 3]."""
    draw = np.random.default_rng(3)
    weights = {"twice.weight": (FEATURES, FEATURES), "head.weight": (CLASSES, FEATURES), "norm.weight": (FEATURES,)}
    body = """a = MatMul(x, "twice.weight") b = Tanh(a) c = MatMul(b, "twice.weight") d = Mul(c, "norm.weight")
        t = Transpose("head.weight") y = MatMul(d, t)"""
    arrays = {name: draw.standard_normal(shape).astype(np.float32) for name, shape in weights.items()}
    return of_text(f"shared (float[N, {FEATURES}] x) => (float[N, {CLASSES}] y) {{ {body} }}", arrays)


def steps(folder: Path, count: int) -> tuple[CheckpointState, Module, list[float]]:
    state, module, optimizer = load(folder)
    x, labels = batch()
    return state, module, train(module, optimizer, [{"x": x, "labels": labels}] * count)


def values_of(state: CheckpointState) -> dict[str, NDArray[Any]]:
    return {name: parameter.data for name, parameter in state.parameters}


def test_a_weight_of_two_products_has_one_adapter(tmp_path: Path) -> None:
    """As a module of PyTorch that is called twice; PyTorch computes the loss and the folded model from the formula."""
    before = shared_products()
    make(tmp_path, before, requires_grad=None, lora=LoraOptions(2, ("twice", "head"), ALPHA))
    assert before == shared_products()  # whoever passes a model keeps it
    state, module, _ = steps(tmp_path, 30)
    x, labels = batch()
    found = {name: torch.tensor(array) for name, array in values_of(state).items()}
    factor = ALPHA / 2
    twice = found["twice.weight"] + factor * (found["twice.lora_B.weight"] @ found["twice.lora_A.weight"]).t()
    head = found["head.weight"] + factor * found["head.lora_B.weight"] @ found["head.lora_A.weight"]
    y = (torch.tanh(torch.tensor(x) @ twice) @ twice * found["norm.weight"]) @ head.t()
    expected = torch.nn.functional.cross_entropy(y, torch.tensor(labels)).item()
    assert float(module.eval()(x, labels)) == pytest.approx(expected, rel=TOLERANCE)
    module.export_model_for_inferencing(tmp_path / "merged.onnx", ["y"])
    assert "Transpose" in {node.op_type for node in onnx.load(tmp_path / "merged.onnx").graph.node}
    actual = ort.InferenceSession(tmp_path / "merged.onnx").run(None, {"x": x})[0]
    np.testing.assert_allclose(actual, y.numpy(), rtol=1e-4, atol=TOLERANCE)


def test_training_begins_with_the_model_as_it_is(tmp_path: Path) -> None:
    """B is zero, and A is drawn from the seed."""
    losses, drawn = [], {}
    lora = {"plain": None, "lora": 0, "again": 0, "other": 1}
    for name, seed in lora.items():
        options = None if seed is None else LoraOptions(2, ("fc1", "fc2"), seed=seed)
        make(tmp_path / name, perceptron(), requires_grad=["*"] if options is None else None, lora=options)
        drawn[name] = values_of(CheckpointState.load_checkpoint(tmp_path / name / "checkpoint"))
        state, _, found = steps(tmp_path / name, 1)
        losses += found
        assert (state.lora() is None) == (options is None)
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-6)
    down = "fc1.lora_A.weight"
    assert np.array_equal(drawn["lora"][down], drawn["again"][down])
    assert not np.array_equal(drawn["lora"][down], drawn["other"][down])
    assert not drawn["lora"]["fc1.lora_B.weight"].any()


def test_nothing_but_adapters_has_gradients_and_moments(tmp_path: Path) -> None:
    """What is named beside them is trained too; the rest is in the checkpoint once, not in each graph."""
    report = make(tmp_path, perceptron(), requires_grad=["fc2.bias"], lora=LoraOptions(2, ("fc1",)))
    assert set(report.trained) == {"fc2.bias", "fc1.lora_A.weight", "fc1.lora_B.weight"}
    assert set(report.frozen) == {"fc1.weight", "fc1.bias", "fc2.weight"}
    assert report.num_trained == CLASSES + 2 * (FEATURES + HIDDEN)
    graph = onnx.load(tmp_path / "training_model.onnx").graph
    buffers = [value.name for value in graph.input if value.name.endswith("_grad.accumulation.buffer")]
    assert sorted(buffers) == sorted(f"{name}_grad.accumulation.buffer" for name in report.trained)
    assert all(math.prod(tensor.dims) < HIDDEN for tensor in graph.initializer)
    state, *_ = steps(tmp_path, 2)
    CheckpointState.save_checkpoint(state, tmp_path / "later", include_optimizer_state=True)
    saved = CheckpointState.load_checkpoint(tmp_path / "later")
    assert {name for arrays in saved.checkpoint.moments.values() for name in arrays} == set(report.trained)
    assert saved.lora() == state.lora() == report.lora


@pytest.mark.parametrize("format_name", ["safetensors", "odtc"])
def test_a_saved_checkpoint_knows_its_adapters(tmp_path: Path, format_name: Any) -> None:
    """So the adapters can be exported where they arrive, without the models, and training goes on from it."""
    make(tmp_path, perceptron(), requires_grad=None, lora=LoraOptions(2, ("fc1", "fc2")))
    state, _, _ = steps(tmp_path, 3)
    state.export_adapter(tmp_path / "here")
    CheckpointState.save_checkpoint(state, tmp_path / "later", format_name=format_name)
    arrived = CheckpointState.load_checkpoint(tmp_path / "later")
    arrived.export_adapter(tmp_path / "there", base_model="org/model")
    for name in ("here", "there"):
        config = json.loads((tmp_path / name / "adapter_config.json").read_text())
        assert (config["r"], config["lora_alpha"], config["target_modules"]) == (2, 8, ["fc1", "fc2"])
    assert config["base_model_name_or_path"] == "org/model"
    here, there = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("here", "there"))
    assert sorted(here) == [f"base_model.model.fc{n}.lora_{part}.weight" for n in (1, 2) for part in "AB"]
    assert all(np.array_equal(here[name], there[name]) for name in here)
    with pytest.raises(OutputExistsError):
        arrived.export_adapter(tmp_path / "there")
    arrived.export_adapter(tmp_path / "there", force=True)


def test_a_head_that_is_trained_as_a_whole_goes_with_the_adapters(tmp_path: Path) -> None:
    """As `modules_to_save` of PEFT; what it has no place for is refused, and the folded model has it."""
    make(tmp_path, perceptron(), requires_grad=["fc2.*"], lora=LoraOptions(2, ("fc1",)))
    state, _, _ = steps(tmp_path, 3)
    state.export_adapter(tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["modules_to_save"] == ["fc2"]
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    np.testing.assert_array_equal(tensors["base_model.model.fc2.bias"], state.parameters["fc2.bias"].data)
    make(tmp_path / "b", perceptron(), requires_grad=["fc1.bias"], lora=LoraOptions(2, ("fc1",)))
    state, _, _ = steps(tmp_path / "b", 1)
    with pytest.raises(ArtifactError, match=r"fc1\.bias was trained along with the adapters"):
        state.export_adapter(tmp_path / "b" / "adapter")
    make(tmp_path / "c", perceptron())
    state, _, _ = steps(tmp_path / "c", 1)
    with pytest.raises(ArtifactError, match="has no adapters"):
        state.export_adapter(tmp_path / "c" / "adapter")


REFUSED: dict[str, tuple[LoraOptions, str, str]] = {
    "nothing": (LoraOptions(2), "no product is named", "twice.weight, head.weight"),
    "no match": (LoraOptions(2, ("query",)), "'query' of adapters matches none of the 3", "twice.weight, head.weight"),
    "no product": (LoraOptions(2, ("*.weight",)), r"matches norm\.weight, .* Mul reads it", "twice.weight"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_have_an_adapter_is_refused_by_name(tmp_path: Path, case: str) -> None:
    """With what can be named instead."""
    options, message, hint = REFUSED[case]
    with pytest.raises(ArtifactError, match=message) as caught:
        make(tmp_path, shared_products(), requires_grad=None, lora=options)
    assert hint in caught.value.hint
    assert not list(tmp_path.iterdir())


def test_weights_that_others_read_as_well_are_refused(tmp_path: Path) -> None:
    """A tied embedding cannot have an adapter folded in; a half cannot be trained; an adapted model has adapters."""
    tied = shared_products()
    tied.graph.node.append(helper.make_node("Gather", ["head.weight", "one"], ["g"]))
    tied.graph.initializer.append(numpy_helper.from_array(np.array([1]), "one"))
    half = shared_products()
    half.graph.initializer[1].CopyFrom(
        numpy_helper.from_array(np.zeros((CLASSES, FEATURES), np.float16), "head.weight")
    )
    again = shared_products()
    again.graph.initializer.append(numpy_helper.from_array(np.zeros((2, 2), np.float32), "head.lora_A.weight"))
    both = shared_products()
    both.graph.node.append(helper.make_node("Transpose", ["twice.weight"], ["u"], perm=[1, 0]))
    both.graph.node.append(helper.make_node("MatMul", ["x", "u"], ["v"]))
    for model, target, message in (
        (tied, "head", "Gather reads it"),
        (half, "head", "float16, not float32"),
        (again, "head", "has adapters already: head.lora_A.weight"),
        (both, "twice", "both as it is and transposed"),
    ):
        with pytest.raises(ArtifactError, match=message):
            make(tmp_path, model, requires_grad=None, lora=LoraOptions(2, (target,)))


@pytest.mark.parametrize(
    "note",
    ["", "[]", "{}", '{"rank": 2, "alpha": 8, "adapters": [["fc1", "fc1.weight", false], 3]}']
    + [
        f'{{"rank": {rank}, "alpha": {alpha}, "adapters": [["fc1", "fc1.weight", {first}]]}}'
        for rank, alpha, first in ((3, 8, "false"), (2, "NaN", "false"), (2, 8, "true"), (0, 8, "false"))
    ],
)
def test_a_note_of_adapters_that_was_changed_is_refused(tmp_path: Path, note: str) -> None:
    """A checkpoint comes from a device, and its shapes must be those of the note."""
    make(tmp_path, perceptron(), requires_grad=None, lora=LoraOptions(2, ("fc1",)))
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    assert state.lora() is not None
    state.properties["onnxtool.lora"] = note
    with pytest.raises(CheckpointError, match="does not fit its parameters"):
        state.export_adapter(tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


def test_a_model_without_its_adapters_cannot_have_them_folded_in(tmp_path: Path) -> None:
    """As when the eval model is that of other artifacts."""
    make(tmp_path / "a", perceptron(), requires_grad=None, lora=LoraOptions(2, ("fc1",)))
    make(tmp_path / "b", perceptron())
    state = CheckpointState.load_checkpoint(tmp_path / "a" / "checkpoint")
    module = Module(tmp_path / "a" / "training_model.onnx", state, tmp_path / "b" / "eval_model.onnx")
    with pytest.raises(ArtifactError, match=r"does not add fc1\.lora_B\.weight"):
        module.export_model_for_inferencing(tmp_path / "m.onnx", ["y"])
