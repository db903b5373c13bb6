"""Plant changes and errors in models, and count those that a review names where they are.

`python scripts/check_review.py wiring FILE… [--onnxsim PYTHON]` changes graphs (names, order, an edge, two inputs, an
attribute, a constant) and compares them with `onnxtool stats`, beside the difference of onnxsim in that interpreter.

`python scripts/check_review.py layers DIR` makes four checkpoints in DIR, exports them, and optimizes them in four
precisions; then it plants errors (a weight, a scale, a bias, an epsilon, a mask, a head) in single layers and compares
the parts with `onnxtool verify --layers`.
"""

from __future__ import annotations

import argparse
import copy
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import onnx
from make_models import trained_model
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from onnxtool import ExportOptions, OptimizeOptions, compare_layers, export_model, optimize_model
from onnxtool.errors import SessionError
from onnxtool.stats import compare_models
from tests.summary import test_wiring as wiring

MUTATIONS = (
    wiring.rename,
    wiring.reorder,
    wiring.rewire,
    wiring.swap,
    wiring.change_attribute,
    wiring.change_constant,
)
ROUNDS = 4  # of each mutation and graph
PEER = """
import contextlib, io, sys
import onnx
from onnxsim.model_info import diff_graphs
with contextlib.redirect_stdout(io.StringIO()):
    found = diff_graphs(onnx.load(sys.argv[1]), onnx.load(sys.argv[2]))
parts = "removed_nodes", "added_nodes", "changed_nodes", "removed_values", "added_values"
print("changed" if any(getattr(found, part) for part in parts) else "same")
"""
LAYER = re.compile(r"(?:^|[./])layers?[./](\d+)[./]")
EXACT = ("bias", "epsilon", "mask")  # found in every precision
KINDS = ("weight", "scale", "head", *EXACT)
WORDS = 30_522


def check_wiring(files: Sequence[Path], peer: str | None) -> None:
    """Mutate each graph, and print how many mutations are named exactly, by kind."""
    right: Counter[str] = Counter()
    peers: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        changed_file, base_file = Path(folder, "model.onnx"), Path(folder, "base.onnx")
        for path in files:
            base = onnx.load(path)
            onnx.save(base, base_file)
            for mutate in MUTATIONS:
                for seed in range(ROUNDS):
                    model = copy.deepcopy(base)
                    changed = mutate(model, random.Random(seed))  # noqa: S311  any will do
                    onnx.save(model, changed_file)
                    found = compare_models(changed_file, base_file).delta.edges
                    named = {one.node for one in found.changes}
                    right[mutate.__name__] += found.compared and bool(named) == bool(changed) and named <= changed
                    if peer is not None:
                        command = [peer, "-c", PEER, str(changed_file), str(base_file)]
                        said = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
                        peers[mutate.__name__] += said == ("changed" if changed else "same")
    each = len(files) * ROUNDS
    print("| mutation | named exactly | onnxsim says whether it changed |\n|---|---|---|")
    for mutate in MUTATIONS:
        name = mutate.__name__
        print(f"| {name} | {right[name]} of {each} | {f'{peers[name]} of {each}' if peer else 'not run'} |")


def make_models(folder: Path) -> dict[str, int]:
    """Write checkpoints, exports and optimized files that are not there yet; return the layers of each."""
    import torch
    import transformers

    small = {"vocab_size": WORDS, "hidden_size": 192, "num_attention_heads": 6, "initializer_range": 0.06}
    small |= {"pad_token_id": 0, "bos_token_id": 101, "eos_token_id": 102}
    heads = {"num_key_value_heads": 2, "head_dim": 32, "use_cache": False}
    made = {
        "roberta": transformers.RobertaConfig(**small, num_hidden_layers=12, intermediate_size=512),
        "modernbert": transformers.ModernBertConfig(**small, num_hidden_layers=6, intermediate_size=384),
        "qwen3": transformers.Qwen3Config(**small, **heads, num_hidden_layers=6, intermediate_size=512),
    }
    folder.mkdir(parents=True, exist_ok=True)
    trained = trained_model()
    if not (folder / "minilm").exists():
        shutil.copytree(trained, folder / "minilm")
    for name, config in made.items():
        if not (folder / name).exists():
            torch.manual_seed(0)
            model = transformers.AutoModel.from_config(config)
            with torch.no_grad():
                for weight in model.parameters():
                    weight.add_(0.1 * torch.randn_like(weight) if weight.ndim == 1 else 0)
            model.save_pretrained(folder / name)
            for file in ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "special_tokens_map.json"):
                shutil.copy(trained / file, folder / name)
    for name in ("minilm", *made):
        for exporter in ("dynamo", "torchscript"):
            output = folder / f"{name}-{exporter}.onnx"
            if not output.exists():
                export_model(ExportOptions(str(folder / name), output=output, exporter=exporter))
        for precision in ("fp32", "fp16", "int8", "int4"):
            output = folder / f"{name}-{precision}.onnx"
            if not output.exists():
                loose = 0.2 if precision.startswith("int") else None
                source = folder / f"{name}-dynamo.onnx"
                optimize_model(OptimizeOptions(source, output=output, precision=precision, max_error=loose))
    return {"minilm": 6, **{name: config.num_hidden_layers for name, config in made.items()}}


def layer_of(*names: str) -> int | None:
    """Return the number of the layer in the first name that has one."""
    return next((int(match[1]) for name in names if (match := LAYER.search(name))), None)


def replaced(model: Any, node: Any, slot: int, change: Any) -> None:
    """Let a node read a changed copy of a weight."""
    held = {one.name: one for one in model.graph.initializer}
    array = numpy_helper.to_array(held[node.input[slot]])
    changed = change(array.astype(np.float64)).astype(array.dtype)
    model.graph.initializer.append(numpy_helper.from_array(changed, "planted"))
    node.input[slot] = "planted"


def inserted(model: Any, node: Any, before: Any) -> None:
    """Insert a node before another one."""
    model.graph.node.insert([id(one) for one in model.graph.node].index(id(node)), before)


def plant(model: Any, kind: str, layer: int, kept: NDArray[Any], draw: random.Random) -> bool:
    """Plant an error in a layer; False if the graph has no place for it.

    `kept` has a one for each state, in the type in which attention computes.
    """
    held = {one.name: one for one in model.graph.initializer}
    own = [
        node
        for node in model.graph.node
        if layer_of(node.name, *node.output, *(name for name in node.input if name in held)) == layer
    ]
    attentions = [node for node in model.graph.node if node.op_type in ("Attention", "MultiHeadAttention")]
    if kind in ("weight", "scale", "bias"):
        places = [(node, slot) for node in own for slot, name in enumerate(node.input) if name in held]
        floats = [(node, slot) for node, slot in places if held[node.input[slot]].data_type in (1, 10)]
        is_norm = {"weight": False, "scale": False, "bias": True}[kind]
        floats = [(node, slot) for node, slot in floats if ("Norm" in node.op_type) == is_norm]
        ranks = {"weight": (2,), "scale": (1, 2), "bias": (1,)}[kind]
        floats = [(node, slot) for node, slot in floats if len(held[node.input[slot]].dims) in ranks]
        named = {id(one): held[one[0].input[one[1]]] for one in floats}
        is_scale = [one for one in floats if "scale" in named[id(one)].name and np.prod(named[id(one)].dims) > 8]
        floats = is_scale if kind == "scale" else [one for one in floats if one not in is_scale]
        # Weights before the normalization of queries and keys scale nothing.
        floats = [one for one in floats if not re.search("q_proj|k_proj|q_norm|k_norm", one[0].input[one[1]])]
        if not floats:
            return False
        node, slot = draw.choice(floats)
        change = {"weight": lambda a: 1.05 * a, "scale": lambda a: 1.5 * a, "bias": lambda a: a + 0.05}[kind]
        replaced(model, node, slot, change)
        return True
    if kind == "epsilon":
        nodes = [node for node in own if any(one.name == "epsilon" for one in node.attribute)]
        nodes = [node for node in nodes if not re.search("q_norm|k_norm", " ".join((node.name, *node.output)))]
        if nodes:
            next(one for one in draw.choice(nodes).attribute if one.name == "epsilon").f = 0.02
        return bool(nodes)
    if layer >= len(attentions):
        return False
    node = attentions[layer]
    if kind == "head":
        heads = next(one.i for one in node.attribute if one.name == "num_heads")
        kept = np.where(np.arange(kept.size) < kept.size // heads, 0, kept).astype(kept.dtype)
        model.graph.initializer.append(numpy_helper.from_array(kept, "planted"))
        made = node.output[0]
        users = [(one, slot) for one in model.graph.node for slot, name in enumerate(one.input) if name == made]
        inserted(model, users[0][0], helper.make_node("Mul", [made, "planted"], ["planted_head"]))
        for user, slot in users:
            user.input[slot] = "planted_head"
        return True
    masks = [4, 5] if node.op_type == "MultiHeadAttention" else [3, 5]
    masks = [place for place in masks if len(node.input) > place and node.input[place]]
    if not masks:
        return False
    is_bias = masks[0] == 5
    array = np.zeros(1, kept.dtype) if is_bias else np.ones(1, np.int32)
    model.graph.initializer.append(numpy_helper.from_array(array, "planted"))
    operator = "Mul" if is_bias else "Max"
    inserted(model, node, helper.make_node(operator, [node.input[masks[0]], "planted"], ["planted_mask"]))
    node.input[masks[0]] = "planted_mask"
    return True


def check_layers(folder: Path, rounds: int, names: Sequence[str]) -> None:
    """Plant errors in each file, and print how many are named with their layer."""
    layers = make_models(folder)
    widths = {name: 384 if name == "minilm" else 192 for name in layers}
    print("| file | parts that differ without an error | " + " | ".join(KINDS) + " |")
    print("|---|---|" + "---|" * len(KINDS))
    for name, number in layers.items():
        if names and name not in names:
            continue
        source = folder / f"{name}-dynamo.onnx"
        for variant in ("torchscript", "fp32", "fp16", "int8", "int4"):
            path = folder / f"{name}-{variant}.onnx"
            base, draw = onnx.load(path), random.Random(0)  # noqa: S311  any will do
            healthy = sum(part.differs for part in compare_layers(path, source).parts)
            counts = []
            for kind in KINDS:
                right = made = 0
                for layer in draw.sample(range(number), rounds):
                    state = draw.getstate()
                    for dtype in (np.float16, np.float32) if variant == "fp16" else (np.float32,):
                        draw.setstate(state)
                        model = copy.deepcopy(base)
                        if not plant(model, kind, layer, np.ones(widths[name], dtype), draw):
                            break
                        onnx.save(model, folder / "planted.onnx")
                        try:
                            first = compare_layers(folder / "planted.onnx", source).first
                        except SessionError:  # it attends in the other type
                            continue
                        made += 1
                        right += first is not None and layer_of(f"{first}.") == layer
                        break
                counts.append(f"{right} of {made}" if made else "")
            print(f"| {name} {variant} | {healthy} | {' | '.join(counts)} |", flush=True)


def main() -> None:
    """Run the chosen check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)
    wired = commands.add_parser("wiring")
    wired.add_argument("files", type=Path, nargs="+")
    wired.add_argument("--onnxsim", help="a Python that has onnxsim")
    layered = commands.add_parser("layers")
    layered.add_argument("folder", type=Path)
    layered.add_argument("--rounds", type=int, default=2, help="layers of each kind of error and file")
    layered.add_argument("--names", nargs="*", default=[], help="of the checkpoints; all by default")
    given = parser.parse_args()
    if given.what == "wiring":
        check_wiring(given.files, given.onnxsim)
    else:
        check_layers(given.folder, given.rounds, given.names)


if __name__ == "__main__":
    main()
