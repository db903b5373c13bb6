"""Plant errors in single layers of models, and count those that `onnxtool verify --layers` names where they are.

`python scripts/check_review.py DIR` makes four checkpoints in DIR, exports them, and optimizes them in four precisions;
then it plants errors (a weight, a scale, a bias, an epsilon, a mask, a head) and compares the parts.
"""

from __future__ import annotations

import argparse
import copy
import random
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from harness.pages import print_head, print_row
from make_models import TOKENIZER_FILES, trained_model
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from onnxtool import ExportOptions, OptimizeOptions, compare_layers, export_model, optimize_model
from onnxtool.errors import SessionError

LAYER = re.compile(r"(?:^|[./])layers?[./](\d+)[./]")
KINDS = ("weight", "scale", "head", "bias", "epsilon", "mask")
# Ranks of the weights that an error is planted in, and the error; biases are those of normalizations.
WEIGHTS: dict[str, tuple[tuple[int, ...], Callable[[Any], Any]]] = {
    "weight": ((2,), lambda array: 1.05 * array),
    "scale": ((1, 2), lambda array: 1.5 * array),
    "bias": ((1,), lambda array: array + 0.05),
}
CHECKPOINTS = ("minilm", "roberta", "modernbert", "qwen3")


def make_checkpoint(name: str, folder: Path) -> Any:
    """Write the checkpoint of this name into `folder` if it is not there, and return its configuration."""
    import torch
    import transformers

    if not folder.exists() and name == "minilm":
        shutil.copytree(trained_model(), folder)
    elif not folder.exists():
        small = {"vocab_size": 30_522, "hidden_size": 192, "num_attention_heads": 6, "initializer_range": 0.06}
        small |= {"pad_token_id": 0, "bos_token_id": 101, "eos_token_id": 102}
        heads = {"num_key_value_heads": 2, "head_dim": 32, "use_cache": False}
        configs = {
            "roberta": transformers.RobertaConfig(**small, num_hidden_layers=12, intermediate_size=512),
            "modernbert": transformers.ModernBertConfig(**small, num_hidden_layers=6, intermediate_size=384),
            "qwen3": transformers.Qwen3Config(**small, **heads, num_hidden_layers=6, intermediate_size=512),
        }
        torch.manual_seed(0)
        model = transformers.AutoModel.from_config(configs[name])
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(0.1 * torch.randn_like(weight) if weight.ndim == 1 else 0)
        model.save_pretrained(folder)
        for file in TOKENIZER_FILES:
            shutil.copy(trained_model() / file, folder)
    return transformers.AutoConfig.from_pretrained(folder)


def make_files(name: str, folder: Path) -> Any:
    """Write a checkpoint, its exports and optimized files that are not there yet; return the configuration."""
    config = make_checkpoint(name, folder / name)
    for exporter in ("dynamo", "torchscript"):
        output = folder / f"{name}-{exporter}.onnx"
        if not output.exists():
            export_model(ExportOptions(str(folder / name), output=output, exporter=exporter))
    for precision in ("fp32", "fp16", "int8", "int4"):
        output = folder / f"{name}-{precision}.onnx"
        if not output.exists():
            max_error = 0.2 if precision.startswith("int") else None
            source = folder / f"{name}-dynamo.onnx"
            optimize_model(OptimizeOptions(source, output=output, precision=precision, max_error=max_error))
    return config


def layer_of(names: Iterable[str]) -> int | None:
    """Return the number of the layer in the first name that has one."""
    return next((int(match[1]) for name in names if (match := LAYER.search(name))), None)


def plant(model: Any, kind: str, layer: int, ones: NDArray[Any], draw: random.Random) -> bool:
    """Plant an error in a layer; return whether the graph has a place for it.

    `ones` [H] has the type in which attention computes.
    """
    initializers = {tensor.name: tensor for tensor in model.graph.initializer}
    nodes = [
        node
        for node in model.graph.node
        if layer_of((node.name, *node.output, *(name for name in node.input if name in initializers))) == layer
    ]
    if kind in WEIGHTS:
        return change_weight(model, kind, nodes, initializers, draw)
    if kind == "epsilon":
        return change_epsilon(nodes, draw)
    attentions = [node for node in model.graph.node if node.op_type in ("Attention", "MultiHeadAttention")]
    if layer >= len(attentions):
        return False
    return (clear_head if kind == "head" else drop_mask)(model, attentions[layer], ones)


def change_weight(
    model: Any, kind: str, nodes: Sequence[Any], initializers: dict[str, Any], draw: random.Random
) -> bool:
    """Let a node read a changed copy of a weight."""
    ranks, change = WEIGHTS[kind]
    candidates = []
    places = [(node, slot) for node in nodes for slot, name in enumerate(node.input) if name in initializers]
    for node, slot in places:
        tensor = initializers[node.input[slot]]
        if tensor.data_type not in (1, 10) or len(tensor.dims) not in ranks:
            continue
        is_scale = "scale" in tensor.name and np.prod(tensor.dims) > 8
        # Weights before the normalization of queries and keys scale nothing.
        scales_nothing = re.search("q_proj|k_proj|q_norm|k_norm", tensor.name)
        if ("Norm" in node.op_type) == (kind == "bias") and is_scale == (kind == "scale") and not scales_nothing:
            candidates.append((node, slot))
    if candidates:
        node, slot = draw.choice(candidates)
        array = numpy_helper.to_array(initializers[node.input[slot]])
        changed = change(array.astype(np.float64)).astype(array.dtype)
        model.graph.initializer.append(numpy_helper.from_array(changed, "planted"))
        node.input[slot] = "planted"
    return bool(candidates)


def change_epsilon(nodes: Sequence[Any], draw: random.Random) -> bool:
    """Change the epsilon of a normalization, except those of queries and keys."""
    nodes = [node for node in nodes if any(attribute.name == "epsilon" for attribute in node.attribute)]
    nodes = [node for node in nodes if not re.search("q_norm|k_norm", " ".join((node.name, *node.output)))]
    if nodes:
        next(attribute for attribute in draw.choice(nodes).attribute if attribute.name == "epsilon").f = 0.02
    return bool(nodes)


def clear_head(model: Any, node: Any, ones: NDArray[Any]) -> bool:
    """Set the first head of an attention to zero."""
    num_heads = next(attribute.i for attribute in node.attribute if attribute.name == "num_heads")
    is_kept = np.where(np.arange(ones.size) < ones.size // num_heads, 0, ones).astype(ones.dtype)
    model.graph.initializer.append(numpy_helper.from_array(is_kept, "planted"))
    output = node.output[0]
    users = [(user, slot) for user in model.graph.node for slot, name in enumerate(user.input) if name == output]
    insert(model, users[0][0], helper.make_node("Mul", [output, "planted"], ["planted_head"]))
    for user, slot in users:
        user.input[slot] = "planted_head"
    return True


def drop_mask(model: Any, node: Any, ones: NDArray[Any]) -> bool:
    """Let an attention see padding."""
    slots = [4, 5] if node.op_type == "MultiHeadAttention" else [3, 5]
    slots = [slot for slot in slots if len(node.input) > slot and node.input[slot]]
    if slots:
        is_bias = slots[0] == 5
        array = np.zeros(1, ones.dtype) if is_bias else np.ones(1, np.int32)
        model.graph.initializer.append(numpy_helper.from_array(array, "planted"))
        operator = "Mul" if is_bias else "Max"
        insert(model, node, helper.make_node(operator, [node.input[slots[0]], "planted"], ["planted_mask"]))
        node.input[slots[0]] = "planted_mask"
    return bool(slots)


def insert(model: Any, node: Any, before: Any) -> None:
    """Insert a node before another one."""
    model.graph.node.insert([id(other) for other in model.graph.node].index(id(node)), before)


def is_named(
    base: Any, kind: str, layer: int, width: int, draw: random.Random, folder: Path, source: Path
) -> bool | None:
    """Return whether a planted error is named with its layer; None if the graph has no place for it."""
    state = draw.getstate()
    for dtype in (np.float32, np.float16):
        draw.setstate(state)
        model = copy.deepcopy(base)
        if not plant(model, kind, layer, np.ones(width, dtype), draw):
            return None
        onnx.save(model, folder / "planted.onnx")
        with suppress(SessionError):  # attention computes in the other type
            first = compare_layers(folder / "planted.onnx", source).first
            return first is not None and layer_of([f"{first}."]) == layer
    return None


def main() -> None:
    """Plant errors in each file, and print how many are named with their layer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--rounds", type=int, default=2, help="layers of each kind of error and file")
    parser.add_argument("--names", nargs="+", choices=CHECKPOINTS, default=CHECKPOINTS)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    print_head(["file", "parts that differ without an error", *KINDS])
    for name in options.names:
        config = make_files(name, options.folder)
        source = options.folder / f"{name}-dynamo.onnx"
        for variant in ("torchscript", "fp32", "fp16", "int8", "int4"):
            path = options.folder / f"{name}-{variant}.onnx"
            base, draw = onnx.load(path), random.Random(0)  # noqa: S311  any will do
            healthy = sum(part.differs for part in compare_layers(path, source).parts)
            cells = []
            for kind in KINDS:
                layers = draw.sample(range(config.num_hidden_layers), options.rounds)
                planted = [
                    is_named(base, kind, layer, config.hidden_size, draw, options.folder, source) for layer in layers
                ]
                named = [result for result in planted if result is not None]
                cells.append(f"{sum(named)} of {len(named)}" if named else "")
            print_row(f"{name} {variant}", healthy, *cells)


if __name__ == "__main__":
    main()
