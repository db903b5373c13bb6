"""Measure commands of onnxtool beside their peers, as whole processes in turns, on a BERT in the shape of SPLADE.

`python scripts/bench_commands.py export stats` prints a table for each section, as Markdown: medians of wall time, CPU
time and peak memory, the size of the file, and ratios. Peers of this environment verify nothing and describe nothing;
the others need virtual environments of their own: `--optimum DIR` (torch, optimum-onnx[onnxruntime]) and
`--inspectors DIR` (polygraphy, onnxslim, onnx). All peers stand in harness/peers.py.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

from harness import peers
from harness.processes import Command, compare, run
from make_models import ROOT

ONNXTOOL = (sys.executable, "-m", "onnxtool")
PYTHON = (sys.executable, "-c")
SECTIONS = ("export", "optimize", "stats", "difference", "large")
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


def contenders(section: str, checkpoint: Path, folder: Path, given: argparse.Namespace) -> list[Command]:
    """Return what takes turns in a section, onnxtool first."""
    exported, optimized, other = folder / "m.onnx", folder / "m-optimized.onnx", folder / "other.onnx"
    stats = (*ONNXTOOL, "stats", "--format", "json")
    match section:
        case "export":
            ours = (*ONNXTOOL, "export", "--model_name", str(checkpoint), "--output", str(exported), "--force")
            plain = (*PYTHON, peers.EXPORT_WITH_TRANSFORMERS, str(checkpoint), str(folder / "plain"))
            found = [
                Command("onnxtool export, verified", ours, exported),
                Command("transformers.exporters", plain, folder / "plain"),
            ]
            if given.optimum:
                command = (f"{given.optimum}/bin/optimum-cli", "export", "onnx", "--model", str(checkpoint))
                output = folder / "optimum"
                found.append(Command("optimum-cli", (*command, "--task", "fill-mask", str(output)), output))
            return found
        case "optimize":
            ours = (*ONNXTOOL, "optimize", "--model_path", str(exported), "--output", str(optimized), "--force")
            plain = (*PYTHON, peers.OPTIMIZE_WITH_ONNXRUNTIME, str(exported), str(other))
            return [
                Command("onnxtool optimize, verified", ours, optimized),
                Command("onnxtool optimize --no_verify", (*ours, "--no_verify"), optimized),
                Command("onnxruntime.transformers.optimizer", plain, other),
            ]
        case "stats":
            found = [Command("onnxtool stats", (*stats, str(exported)))]
            found.append(Command("onnx.load", (*PYTHON, peers.DESCRIBE_WITH_ONNX, str(exported))))
            for name, (program, *words) in peers.INSPECTORS.items() if given.inspectors else ():
                found.append(Command(name, (f"{given.inspectors}/bin/{program}", *words, str(exported))))
            return found
        case "difference":
            return [Command("onnxtool stats of two", (*stats, str(optimized), str(exported)))]
        case _:
            run(*PYTHON, _MAKE_LARGE, str(exported), str(folder))
            return [Command("onnxtool stats, weights of 6 GB", (*stats, str(folder / "large.onnx")))]


def main() -> int:
    """Measure the sections that are asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"any of {', '.join(SECTIONS)}; default: all")
    parser.add_argument("--model", default="splade-bert-base", help="a recipe of models/recipes.json")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--optimum", type=Path, metavar="DIR", help="a virtual environment with optimum-onnx")
    parser.add_argument("--inspectors", type=Path, metavar="DIR", help="one with polygraphy, onnxslim and onnx")
    given = parser.parse_args()
    if unknown := set(given.sections) - set(SECTIONS):
        parser.error(f"no such section: {', '.join(sorted(unknown))}")
    os.environ["HF_HUB_OFFLINE"] = "1"
    # In a process of its own: a child's peak memory starts at its parent's, which torch would make half a gigabyte.
    run(sys.executable, str(ROOT / "scripts" / "make_models.py"), given.model)
    checkpoint = ROOT / "models" / "checkpoints" / given.model
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        chosen = given.sections or SECTIONS
        if "export" not in chosen:
            run(*contenders("export", checkpoint, folder, given)[0].words)
        if "optimize" not in chosen and "difference" in chosen:
            run(*contenders("optimize", checkpoint, folder, given)[0].words)
        for section in (one for one in SECTIONS if one in chosen):
            compare(contenders(section, checkpoint, folder, given), given.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
