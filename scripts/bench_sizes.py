"""Compare files of fixed sizes with the file that they were made from: answers, nodes, bytes and time.

`python scripts/bench_sizes.py` exports seven models (MiniLM and SPLADE trained, the others random), makes sets of them
in float32 and int8, and runs 1,000 requests of random rows and tokens through each. onnxruntime's own
`make_dim_param_fixed` and free dimension overrides stand beside it, on the same files, in turns. With
`--provider openvino` it also compiles MiniLM and times how long the compiled file takes to load.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
import transformers
from harness.machine import describe_machine
from make_models import place_trained
from onnxruntime.tools.onnx_model_utils import make_dim_param_fixed

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from onnxtool import ExportOptions, OptimizeOptions, export_model, optimize_model
from onnxtool.errors import OnnxtoolError
from onnxtool.model_file import ModelFile
from onnxtool.runtime.providers import ExecutionProvider, resolve_provider
from onnxtool.runtime.session import open_alike, open_session

SIZES, PICTURES = ((1, 16), (1, 64), (4, 64)), ((1,), (8,))
SECONDS, LEAST_ROUNDS = 4.0, 9
OF_SIZES = ("Shape", "Size", "Range", "Gather")
_LAYERS = {"hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 1024}
_BERT = {**_LAYERS, "vocab_size": 30522}
_DEBERTA = {**_BERT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 256}
_DEBERTA |= {"share_att_key": True, "norm_rel_ebd": "layer_norm", "type_vocab_size": 0}
_TEXTS = {**_LAYERS, "vocab_size": 30522, "max_position_embeddings": 128, "bos_token_id": 101, "eos_token_id": 102}
_PICTURES = {**_LAYERS, "image_size": 64, "patch_size": 8}
RANDOM: dict[str, Callable[[], Any]] = {
    "BERT": lambda: transformers.BertModel(transformers.BertConfig(**_BERT)),
    "ModernBERT": lambda: transformers.ModernBertModel(
        transformers.ModernBertConfig(
            **_BERT, pad_token_id=0, bos_token_id=101, eos_token_id=102, cls_token_id=101, sep_token_id=102
        )
    ),
    "DeBERTa": lambda: transformers.DebertaV2Model(transformers.DebertaV2Config(**_DEBERTA)),
    "reranker": lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**_BERT, num_labels=1)),
    "CLIP": lambda: transformers.CLIPModel(transformers.CLIPConfig(text_config=_TEXTS, vision_config=_PICTURES)),
}


def make_checkpoints(folder: Path) -> dict[str, tuple[Path, str]]:
    """Write the checkpoints; return them with the task of each export."""
    torch.manual_seed(0)
    place_trained(folder)
    found = {"MiniLM": (folder / "all-MiniLM-L6-v2", "auto"), "SPLADE": (folder / "splade", "auto")}
    for name, make in RANDOM.items():
        make().eval().save_pretrained(folder / name)
        for file in folder.glob("all-MiniLM-L6-v2/*token*"):
            shutil.copy(file, folder / name)
        found[name] = (folder / name, "auto")
    square = {"height": 64, "width": 64}
    transformers.CLIPImageProcessor(size={"shortest_edge": 64}, crop_size=square).save_pretrained(folder / "CLIP")
    found["CLIP, pictures"] = (folder / "CLIP", "image-feature-extraction")
    found["CLIP, texts"] = (found.pop("CLIP")[0], "sentence-similarity")
    return found


def inputs_of(model: ModelFile, rows: int, tokens: int, draw: np.random.Generator) -> dict[str, Any]:
    """Return random inputs of some rows and tokens, padded on the right."""
    mask = (np.arange(tokens) < draw.integers(1, tokens + 1, rows)[:, None]).astype(np.int64)
    mask[0] = 1
    every = {
        "input_ids": draw.integers(1000, 30000, (rows, tokens)),
        "attention_mask": mask,
        "token_type_ids": 0 * mask,
    }
    return {
        info.name: every[info.name]
        if info.name in every
        else draw.normal(size=(rows, *(size for size in info.shape[1:] if isinstance(size, int)))).astype(np.float32)
        for info in model.structure.inputs
    }


def largest_difference(model: ModelFile, sizes: tuple[tuple[int, ...], ...], requests: int) -> float:
    """Run the requests through the set and through the file; return the largest difference of a real token or row."""
    draw, most = np.random.default_rng(0), [max(numbers) for numbers in zip(*sizes, strict=True)]
    together, alone = open_session(model, provider="cpu"), open_session(model.with_sizes(), provider="cpu")
    worst = 0.0
    for _ in range(requests):
        rows, tokens = int(draw.integers(1, most[0] + 1)), int(draw.integers(1, most[-1] + 1))
        feeds = inputs_of(model, rows, tokens, draw)
        found, expected = together.run(feeds), alone.run(feeds)
        for name, wanted in expected.items():
            where = feeds["attention_mask"] != 0 if wanted.ndim > 2 else slice(None)
            worst = max(worst, float(np.abs(found[name][where] - wanted[where]).max()))
    return worst


def in_turns(*runs: Callable[[], Any]) -> list[float]:
    """Return the median time of each run as a ratio to the first one's; they take turns, each once in a round."""
    times: list[list[float]] = []
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end or len(times) < LEAST_ROUNDS:
        spent = []
        for run in runs:
            start = time.perf_counter()
            run()
            spent.append(time.perf_counter() - start)
        times.append(spent)
    medians = [statistics.median(column) for column in zip(*times[1:], strict=True)]
    return [median / medians[0] for median in medians]


def peers(path: Path, sizes: dict[str, int], folder: Path) -> tuple[Any, Any, int]:
    """Return sessions of onnxruntime's ways to fix sizes, and the nodes for sizes that its tool leaves."""
    model = onnx.load(path)
    for name, size in sizes.items():
        make_dim_param_fixed(model.graph, name, size)
    onnx.save(model, folder / "peer.onnx")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    for name, size in sizes.items():
        options.add_free_dimension_override_by_name(name, size)
    fixed = onnxruntime.InferenceSession(folder / "peer.onnx", providers=["CPUExecutionProvider"])
    overridden = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return fixed, overridden, nodes_for_sizes(model)


def nodes_for_sizes(model: onnx.ModelProto) -> int:
    """Count the nodes Shape, Size, Range and Gather that read nothing but shapes and constants."""
    constants, derived, count = {tensor.name for tensor in model.graph.initializer}, set[str](), 0
    for node in model.graph.node:
        is_start, reads = node.op_type in ("Shape", "Size"), {name for name in node.input if name}
        if is_start or (reads & derived and reads <= derived | constants):
            derived |= {*node.output}
            count += node.op_type in OF_SIZES and not node.domain
    return count


def bench(path: Path, precision: str, folder: Path, requests: int) -> list[str]:
    """Make a set of a file in a precision, and return the columns of its table."""
    is_picture = ModelFile.open(path).takes_pictures
    sizes: tuple[tuple[int, ...], ...] = PICTURES if is_picture else SIZES
    alone, output = folder / "alone.onnx", folder / f"{precision}.onnx"
    options = OptimizeOptions(path, output=alone, precision=precision, timing=False, force=True)
    optimize_model(options)
    stated = ",".join("x".join(map(str, size)) for size in sizes)
    report = optimize_model(OptimizeOptions(path, output=output, precision=precision, timing=False, sizes=stated))
    model = ModelFile.open(output)
    left = sum(nodes_for_sizes(onnx.load(output.with_name(one.file), load_external_data=False)) for one in report.sizes)
    share = model.size_bytes / alone.stat().st_size
    columns = [precision, f"{largest_difference(model, sizes, requests):.1e}", str(left), f"{share:.3f}"]
    dynamic, together = (open_session(one, provider="cpu") for one in (alone, model))
    for one in (report.sizes[0], report.sizes[-1]):
        numbers = [*one.sizes.values()]
        feeds = inputs_of(model, numbers[0], numbers[-1], np.random.default_rng(1))
        fixed, overridden, kept = peers(alone, one.sizes, folder)
        ratios = in_turns(
            partial(dynamic.run_unchecked, feeds),
            partial(together.run_unchecked, feeds),
            partial(fixed.run, None, feeds),
            partial(overridden.run, None, feeds),
        )
        columns += [f"{ratio:.2f}" for ratio in ratios[1:]]
    return [*columns, str(kept)]


def bench_loading(path: Path, provider: str, folder: Path) -> None:
    """Compile a file, and time how long it and its source take to load on its provider."""
    resolve_provider(provider)
    place = ExecutionProvider.parse(provider)
    usual = OptimizeOptions(path, output=folder / "source.onnx", provider=place.place, timing=False)
    if place.library:
        usual = replace(usual, provider_library=place.library)
    optimize_model(usual)
    optimize_model(replace(usual, output=folder / "compiled.onnx", compiled=True))
    source, compiled_file = folder / "source.onnx", folder / "compiled.onnx"

    def load(file: Path) -> Any:
        return open_alike(ModelFile.open(file), provider=place, disabled=())

    ratios = in_turns(lambda: load(source), lambda: load(compiled_file))
    draw = np.random.default_rng(0)
    feeds = inputs_of(ModelFile.open(source), 3, 40, draw)
    one, other = (load(file).run(feeds) for file in (source, compiled_file))
    equal = all(np.array_equal(one[name], other[name]) for name in one)
    print(f"compiled for {place.place}: loads in {ratios[1]:.2f} of the time of its source, bit-equal: {equal}")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", nargs="*", default=[])
    parser.add_argument("--requests", type=int, default=1000, help="random requests to each set")
    parser.add_argument("--provider", help="also compile MiniLM for this provider")
    arguments = parser.parse_args()
    print(describe_machine())
    figures = ["the set", "fixed by onnxruntime", "overridden"]
    columns = ["model", "precision", "difference", "sizes left", "bytes"]
    columns += [f"{name}, {shape}" for shape in ("smallest", "largest") for name in figures]
    print("|", " | ".join([*columns, "sizes left by onnxruntime"]), "|")
    with tempfile.TemporaryDirectory() as name:
        checkpoints = make_checkpoints(Path(name))
        for model, (checkpoint, task) in checkpoints.items():
            if arguments.models and model not in arguments.models:
                continue
            folder = Path(name) / f"made {model}"
            report = export_model(ExportOptions(str(checkpoint), task=task, output=folder / "m.onnx"))
            for precision in ("fp32", "int8"):
                try:
                    columns = bench(Path(report.output), precision, folder, arguments.requests)
                except OnnxtoolError as error:
                    columns = [precision, error.message]
                print("|", " | ".join([model, *columns]), "|", flush=True)
            if model == "MiniLM" and arguments.provider:
                bench_loading(Path(report.output), arguments.provider, folder)


if __name__ == "__main__":
    main()
