"""Measure commands of onnxtool and of their peers, as whole processes in turns, on a BERT in the shape of SPLADE.

`python scripts/bench_commands.py export stats` prints a table for each section, as Markdown: medians of wall time, CPU
time and peak memory, nodes, fused attentions and size of the file, and ratios. `optimize` takes four plain exports of
torch (dynamo and TorchScript, sdpa and eager attention), and times the files in turns as well. Peers of this
environment verify nothing and describe nothing; the others need virtual environments of their own: `--optimum DIR`
(torch, optimum-onnx[onnxruntime]), `--olive DIR` (olive-ai) and `--inspectors DIR` (polygraphy, onnxslim, onnx). All
peers are in harness/peers.py.

`sizes` exports and optimizes BERTs of up to 3 GB, and prints by how much a further byte of weights raises the peak.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench_precision import Contender, print_table, race
from harness import peers
from harness.machine import describe_machine
from harness.pages import print_head, print_row
from harness.processes import Command, compare, describe, measure, run
from make_models import ROOT

ONNXTOOL = (sys.executable, "-m", "onnxtool")
PYTHON = (sys.executable, "-c")
WAYS = tuple((exporter, attention) for exporter in ("dynamo", "torchscript") for attention in ("sdpa", "eager"))
SHAPES = ((8, 128), (1, 128), (1, 16))
UNVERIFIED = "onnxtool optimize --no_verify"
MODEL = "splade-bert-base"  # of models/recipes.json
SECTIONS = ("export", "optimize", "stats", "sizes")
SIZES = {"MiniLM": (6, 384), "BERT-base": (12, 768), "BERT-large": (24, 1024), "BERT of 3 GB": (24, 1536)}
_MAKE_SIZED = """
import sys, torch, transformers
source, target, layers, hidden = *sys.argv[1:3], *map(int, sys.argv[3:])
config = transformers.BertConfig(hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=hidden // 64,
                                 intermediate_size=4 * hidden)
torch.manual_seed(0)
transformers.BertModel(config).save_pretrained(target)
transformers.AutoTokenizer.from_pretrained(source).save_pretrained(target)
"""
LARGE_BYTES, NUM_LARGE = 6 << 30, 64
_MAKE_LARGE = f"""
import onnx, sys
model = onnx.load(sys.argv[1], load_external_data=False)
small = [tensor for tensor in model.graph.initializer if len(tensor.raw_data) <= 1024]
del model.graph.initializer[:]
model.graph.initializer.extend(small)
place = 0
for index in range({NUM_LARGE}):
    size = {LARGE_BYTES // NUM_LARGE} + index  # of other sizes each: holes are all equal, and would be compared
    tensor = model.graph.initializer.add(name=f"layer.{{index}}.weight", data_type=2, dims=[size])
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", "large.data"), ("offset", place), ("length", size)):
        tensor.external_data.add(key=key, value=str(value))
    place += size
open(sys.argv[2] + "/large.data", "wb").truncate(place)
onnx.save(model, sys.argv[2] + "/large.onnx")
"""


def contenders(section: str, checkpoint: Path, folder: Path, options: argparse.Namespace) -> list[Command]:
    """Return what takes turns in a section, onnxtool first."""
    exported, optimized = folder / "m.onnx", folder / "m-optimized.onnx"
    stats = (*ONNXTOOL, "stats", "--format", "json")
    if section == "export":
        ours = (*ONNXTOOL, "export", "--model_name", str(checkpoint), "--output", str(exported), "--force")
        commands = [Command("onnxtool export, verified", ours, exported)]
        if options.optimum:
            tool = (f"{options.optimum}/bin/optimum-cli", "export", "onnx", "--model", str(checkpoint))
            output = folder / "optimum"
            commands.append(Command("optimum-cli", (*tool, "--task", "fill-mask", str(output)), output))
        return commands
    run(*ONNXTOOL, "optimize", "--model_path", str(exported), "--output", str(optimized))
    run(*PYTHON, _MAKE_LARGE, str(exported), str(folder))
    commands = [
        Command("onnxtool stats", (*stats, str(exported))),
        Command("onnxtool stats of two", (*stats, str(optimized), str(exported))),
        Command("onnxtool stats, weights of 6 GB", (*stats, str(folder / "large.onnx"))),
        Command("onnx.load", (*PYTHON, peers.DESCRIBE_WITH_ONNX, str(exported))),
    ]
    for name, (program, *words) in peers.INSPECTORS.items() if options.inspectors else ():
        commands.append(Command(name, (f"{options.inspectors}/bin/{program}", *words, str(exported))))
    return commands


def optimizers(source: Path, checkpoint: Path, options: argparse.Namespace) -> Iterator[Command]:
    """Yield onnxtool and the available peers, each with the file that it writes next to `source`."""
    folder, file = source.parent, str(source)
    ours, unverified = folder / "onnxtool.onnx", folder / "unverified.onnx"
    words = (*ONNXTOOL, "optimize", "--model_path", file, "--force", "--output")
    yield Command("onnxtool optimize, verified", (*words, str(ours)), ours)
    yield Command(UNVERIFIED, (*words, str(unverified), "--no_verify"), unverified)
    for name, code in (
        ("onnxruntime.transformers.optimizer", peers.OPTIMIZE_WITH_ONNXRUNTIME),
        ("onnxscript optimize_for_ort", peers.OPTIMIZE_WITH_ONNXSCRIPT),
    ):
        output = folder / f"{name[:11]}.onnx"
        yield Command(name, (*PYTHON, code, file, str(output)), output)
    if options.optimum:
        # It looks for a file of this name next to the configuration.
        model = folder / "model"
        model.mkdir()
        (model / "model.onnx").symlink_to(source)
        (model / "config.json").symlink_to(checkpoint / "config.json")
        output = folder / "optimum"
        tool = (f"{options.optimum}/bin/optimum-cli", "onnxruntime", "optimize", "--onnx_model", str(model), "-O2")
        yield Command("optimum-cli -O2", (*tool, "-o", str(output)), output / "model_optimized.onnx")
    if options.olive:
        settings = '{"model_type": "bert", "num_heads": 12, "hidden_size": 768}'
        tool = (f"{options.olive}/bin/olive", "run-pass", "--pass-name", "OrtTransformersOptimization", "-m", file)
        output = folder / "olive"
        yield Command("olive", (*tool, "--pass-config", settings, "-o", str(output)), output / "model.onnx")


def optimize(way: tuple[str, str], checkpoint: Path, folder: Path, options: argparse.Namespace) -> None:
    """Let every optimizer write its file of one export, then time the files in turns."""
    source = folder / "-".join(way) / "plain.onnx"
    source.parent.mkdir()
    run(*PYTHON, peers.EXPORT_WITH_TORCH, str(checkpoint), *way, str(source))
    print(f"\n## {', '.join(way)}: {' | '.join(map(str, describe(source)))} (nodes, attentions, MB)")
    commands = list(optimizers(source, checkpoint, options))
    compare(commands, options.rounds)
    files = {
        "plain": source,
        **{command.name: command.output for command in commands if command.output and command.name != UNVERIFIED},
    }
    contenders = [Contender(name, (sys.executable, "onnxtool", str(file)), file) for name, file in files.items()]
    print()
    print_table(contenders, race(contenders, SHAPES, 10, 0, folder), SHAPES, folder)


def sizes(checkpoint: Path, folder: Path, names: Sequence[str]) -> None:
    """Export, fuse and quantize a BERT of each size, once; the error is free, because the weights are random."""
    print(f"\n{describe_machine()}\n")
    print_head(["model", "command", "wall s", "CPU s", "peak MB", "file MB", "bytes a byte"])
    bases: dict[str, tuple[float, float]] = {}
    for name in names:
        sized, file = folder / name.replace(" ", "-"), folder / "sized" / "m.onnx"
        run(*PYTHON, _MAKE_SIZED, str(checkpoint), str(sized), *map(str, SIZES[name]))
        output = file.with_name("optimized.onnx")
        optimize = (*ONNXTOOL, "optimize", "--model_path", str(file), "--output", str(output), "--force")
        commands = {
            "export": (*ONNXTOOL, "export", "--model_name", str(sized), "--output", str(file)),
            "optimize": optimize,
            "optimize to int8": (*optimize, "--precision", "int8", "--max_error", "1"),
        }
        weights = (sized / "model.safetensors").stat().st_size / 1e6
        for title, words in commands.items():
            wall, cpu, peak = measure(words)
            written = file if title == "export" else output
            size = sum(part.stat().st_size for part in written.parent.glob(f"{written.name}*")) / 1e6
            base = bases.setdefault(title, (weights, peak))
            slope = "" if base[0] == weights else f"{(peak - base[1]) / (weights - base[0]):.2f}"
            print_row(name, title, f"{wall:.1f}", f"{cpu:.1f}", f"{peak:.0f}", f"{size:.0f}", slope)
        shutil.rmtree(sized)
        shutil.rmtree(file.parent)


def main() -> int:
    """Measure the chosen sections."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"any of {', '.join(SECTIONS)}; default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--optimum", type=Path, metavar="DIR", help="a virtual environment with optimum-onnx")
    parser.add_argument("--olive", type=Path, metavar="DIR", help="one with olive-ai")
    parser.add_argument("--inspectors", type=Path, metavar="DIR", help="one with polygraphy, onnxslim and onnx")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES), help="of the section of that name")
    options = parser.parse_args()
    if unknown := set(options.sections) - set(SECTIONS):
        parser.error(f"no such section: {', '.join(sorted(unknown))}")
    os.environ["HF_HUB_OFFLINE"] = "1"
    # In a process of its own: a child's peak memory starts at its parent's, which torch would make half a gigabyte.
    run(sys.executable, str(ROOT / "scripts" / "make_models.py"), MODEL)
    checkpoint = ROOT / "models" / "checkpoints" / MODEL
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.chdir(folder)  # Olive leaves a cache with whole models wherever it is run
        chosen = options.sections or SECTIONS
        if "stats" in chosen and "export" not in chosen:
            run(*contenders("export", checkpoint, folder, options)[0].words)
        for section in (section for section in SECTIONS if section in chosen):
            if section == "sizes":
                sizes(checkpoint, folder, options.sizes)
            elif section == "optimize":
                for way in WAYS:
                    optimize(way, checkpoint, folder, options)
            else:
                compare(contenders(section, checkpoint, folder, options), options.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
