"""Train small models on several versions of onnxruntime with nothing of onnxtool, and compare the losses.

`python scripts/check_training_runtimes.py DIR …` makes artifacts of perceptrons with every loss and optimizer, of a
convolutional network with a batch normalization, and of small BERT and Llama models as `onnxtool artifacts` makes them
of a checkpoint; it trains ten steps with each in this environment and in each virtual environment DIR, which needs
onnxruntime and numpy alone, and prints a table. Exit code 1: a runtime dies or fails, or a loss differs from this
environment's by more than 1e-5 of it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from onnxtool.training import artifacts, onnxblock

STEPS = 10
TOKENS, CLASSES, WORDS = 7, 4, 50
# No line of onnxtool: this is all that the artifacts ask of a runtime.
_TRAIN = """
import json, sys
import numpy as np, onnxruntime as ort
folder, steps = sys.argv[1], int(sys.argv[2])
training, evaluation, optimizer = [
    ort.InferenceSession(f"{folder}/{name}_model.onnx", providers=["CPUExecutionProvider"])
    for name in ("training", "eval", "optimizer")]
load = lambda name: dict(np.load(f"{folder}/{name}.npz"))
inputs, parameters = load("inputs"), load("parameters")
buffers = {one.name: one.name[: -len("_grad.accumulation.buffer")] for one in training.get_inputs()
           if one.name.endswith("_grad.accumulation.buffer")}
trained = list(buffers.values())
flat = lambda arrays: np.concatenate([array.reshape(-1) for array in arrays])[None]
size = sum(parameters[name].size for name in trained)
state = {one.name: np.zeros((1, size), np.float32) for one in optimizer.get_inputs() if "moments" in one.name}
losses = []
for step in range(1, steps + 1):
    feeds = {**inputs, **parameters, "lazy_reset_grad": np.array([True])}
    feeds.update({name: np.zeros_like(parameters[one]) for name, one in buffers.items()})
    names = [one.name for one in training.get_outputs()]
    found = dict(zip(names, training.run(names, {one.name: feeds[one.name] for one in training.get_inputs()})))
    losses.append(float(np.asarray(found[names[0]]).reshape(-1)[0]))
    gradients = flat([found[f"{name}_grad.accumulation.out"] for name in trained])
    parameters.update({name: found[f"{name}_out"] for name in parameters if f"{name}_out" in found})
    feeds = {"learning_rate": np.array([0.02], np.float32), "step": np.array([step]), "gradients": gradients,
             "params": flat([parameters[name] for name in trained]), **state}
    names = [one.name for one in optimizer.get_outputs()]
    found = dict(zip(names, optimizer.run(names, {one.name: feeds[one.name] for one in optimizer.get_inputs()})))
    state = {name: found[f"{name}_out"] for name in state}
    pieces = np.split(found["params_out"][0], np.cumsum([parameters[name].size for name in trained])[:-1])
    parameters.update({name: piece.reshape(parameters[name].shape) for name, piece in zip(trained, pieces)})
evaluation.run(None, {one.name: {**inputs, **parameters}[one.name] for one in evaluation.get_inputs()})
print(json.dumps([ort.__version__, losses]))
"""


def write_case(folder: Path, model: Any, inputs: dict[str, Any], loss: Any, optimizer: artifacts.OptimType) -> None:
    """Make artifacts of a model, and write what a step reads beside them."""
    artifacts.generate_artifacts(model, ["*"], loss=loss, optimizer=optimizer, artifact_directory=folder)
    write_values(folder, inputs)


def write_values(folder: Path, inputs: dict[str, Any]) -> None:
    """Write the user's inputs, and the parameters of the checkpoint, as numpy reads them."""
    from onnxtool.training.checkpoints.checkpoint import load_checkpoint

    checkpoint = load_checkpoint(folder / "checkpoint")
    np.savez(folder / "inputs.npz", **inputs)
    np.savez(folder / "parameters.npz", **checkpoint.trainable, **checkpoint.frozen)  # type: ignore[arg-type]


def network(convolution: bool) -> tuple[Any, dict[str, Any]]:
    """Return a network of two layers and its input: a normalization between them, or a convolution and a batch's."""
    draw = np.random.default_rng(1)
    if convolution:
        shapes = {"w": (6, 3, 3, 3), "scale": (6,), "shift": (6,), "head": (6, CLASSES)}
        nodes = [
            helper.make_node("Conv", ["x", "w"], ["c"], name="conv", pads=[1, 1, 1, 1]),
            helper.make_node("BatchNormalization", ["c", "scale", "shift", "mean", "var"], ["n"], name="norm"),
            helper.make_node("Relu", ["n"], ["r"], name="relu"),
            helper.make_node("GlobalAveragePool", ["r"], ["p"], name="pool"),
            helper.make_node("Flatten", ["p"], ["f"], name="flatten"),
            helper.make_node("MatMul", ["f", "head"], ["y"], name="head"),
        ]
        size: list[Any] = ["N", 3, 8, 8]
    else:
        shapes = {"w1": (20, 32), "b1": (32,), "scale": (32,), "shift": (32,), "w2": (32, CLASSES), "b2": (CLASSES,)}
        nodes = [
            helper.make_node("Gemm", ["x", "w1", "b1"], ["h"], name="fc1"),
            helper.make_node("LayerNormalization", ["h", "scale", "shift"], ["n"], name="norm"),
            helper.make_node("Relu", ["n"], ["r"], name="relu"),
            helper.make_node("Gemm", ["r", "w2", "b2"], ["y"], name="fc2"),
        ]
        size = ["N", 20]
    arrays = {name: (draw.standard_normal(shape) / 4).astype(np.float32) for name, shape in shapes.items()}
    if convolution:
        arrays |= {"mean": np.zeros(6, np.float32), "var": np.ones(6, np.float32)}
    graph = helper.make_graph(
        nodes,
        "network",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, size)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", CLASSES])],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    return model, {"x": draw.standard_normal([16, *size[1:]]).astype(np.float32)}


def write_networks(folder: Path) -> Iterator[Path]:
    """Write perceptrons of every loss and optimizer, and the convolutional network; yield the folders."""
    loss, draw = onnxblock.loss, np.random.default_rng(2)
    labels = draw.integers(0, CLASSES, 16)
    numbers = draw.standard_normal((16, CLASSES)).astype(np.float32)
    weight = np.linspace(0.5, 2, CLASSES).astype(np.float32)
    losses: dict[str, tuple[Any, dict[str, Any]]] = {
        "cross entropy": (loss.CrossEntropyLoss(), {"labels": labels}),
        "cross entropy, ignored labels": (
            loss.CrossEntropyLoss(ignore_index=-100),
            {"labels": np.where(labels == 0, -100, labels)},
        ),
        "cross entropy, weights": (
            loss.CrossEntropyLoss(weight=weight, ignore_index=-100),
            {"labels": np.where(labels == 0, -100, labels)},
        ),
        "squares": (loss.MSELoss(), {"target": numbers}),
        "distances": (loss.L1Loss(), {"target": numbers}),
        "binary cross entropy": (loss.BCEWithLogitsLoss(), {"target": (numbers > 0).astype(np.float32)}),
    }
    for name, (chosen, targets) in losses.items():
        for optimizer in artifacts.OptimType:
            model, inputs = network(convolution=False)
            place = folder / f"perceptron, {name}, {optimizer.name}"
            write_case(place, model, {**inputs, **targets}, chosen, optimizer)
            yield place
    model, inputs = network(convolution=True)
    place = folder / "convolutions"
    write_case(
        place, model, {**inputs, "labels": labels}, artifacts.LossType.CrossEntropyLoss, artifacts.OptimType.AdamW
    )
    yield place


def write_transformers(folder: Path) -> Iterator[Path]:
    """Write artifacts of checkpoints of three tasks, and yield the folders."""
    import torch
    import transformers
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    from onnxtool.training.artifacts.preparation import prepare_training
    from onnxtool.training.options import ForwardOptions, PreparationOptions

    sizes: dict[str, Any] = {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 24, "max_position_embeddings": 24}
    # What dropout draws is a runtime's own matter.
    sizes |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "attention_dropout": 0.0}
    draw = np.random.default_rng(3)
    ids = draw.integers(1, WORDS, (4, TOKENS))
    mask = np.ones_like(ids)
    mask[1, 4:] = 0
    of_tokens = np.where((mask == 0) | (draw.random(ids.shape) < 0.4), -100, ids)
    cases = {
        "BertForSequenceClassification": {"labels": draw.integers(0, 2, 4)},
        "BertForMaskedLM": {"labels": of_tokens},
        "LlamaForCausalLM": {"labels": np.where(mask == 0, -100, ids)},
    }
    for architecture, targets in cases.items():
        kind = getattr(transformers, architecture)
        torch.manual_seed(0)
        source, place = folder / f"{architecture}-source", folder / architecture
        kind(kind.config_class(**sizes, architectures=[architecture])).save_pretrained(source)
        words = {"[PAD]": 0, "[UNK]": 1, **{f"w{place}": place for place in range(2, WORDS)}}
        tokenizer = Tokenizer(WordLevel(words, "[UNK]"))
        tokenizer.pre_tokenizer = Whitespace()
        special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "model_max_length": 24}
        transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(source)
        prepare_training(PreparationOptions(forward=ForwardOptions(str(source)), output=place))
        inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids), **targets}
        write_values(place, inputs)
        yield place


def train(python: Path, folder: Path) -> tuple[str, list[float]] | str:
    """Return the version of onnxruntime and the losses of each step, or what became of the process."""
    done = subprocess.run(
        [str(python), "-c", _TRAIN, str(folder), str(STEPS)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": ""},
    )
    if done.returncode:
        return f"ended with {done.returncode}: {done.stderr.strip().splitlines()[-1:]}"
    version, losses = json.loads(done.stdout)
    return version, losses


def main() -> int:
    """Train everywhere and print the table."""
    pythons = [Path(sys.executable), *(Path(folder) / "bin" / "python" for folder in sys.argv[1:])]
    failures = 0
    print("| model | onnxruntime | loss before | after ten steps | largest relative difference |")
    print("|---|---|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as name:
        for place in (*write_networks(Path(name)), *write_transformers(Path(name))):
            first: list[float] = []
            for python in pythons:
                found = train(python, place)
                if isinstance(found, str):
                    failures += 1
                    print(f"| {place.name} | {python} | {found} | | |", flush=True)
                    continue
                version, losses = found
                first = first or losses
                difference = max(abs(one - other) / abs(other) for one, other in zip(losses, first, strict=True))
                failures += difference > 1e-5
                figures = f"{losses[0]:.6f} | {losses[-1]:.6f} | {difference:.1e}"
                print(f"| {place.name} | {version} | {figures} |", flush=True)
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
