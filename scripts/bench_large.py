"""Optimize a model of 3 GB, and print what memory that takes as a multiple of its size.

`python scripts/bench_large.py` builds a BERT of 14 layers of width 2048 with random weights, exports it as torch does,
with its weights beside the graph, and prints a row for a run that verifies and one that does not: wall time and largest
resident set of the whole process. Building it takes 7 GB of memory and of disk.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from harness.machine import describe_machine
from harness.processes import measure

BUILD = """
import sys, torch, transformers
torch.manual_seed(0)
num_layers, output = int(sys.argv[1]), sys.argv[2]
config = transformers.BertConfig(
    hidden_size=2048, intermediate_size=8192, num_attention_heads=32, num_hidden_layers=num_layers
)
model = transformers.BertForMaskedLM(config).eval()
names = ("input_ids", "attention_mask", "token_type_ids")
tokens = {name: torch.ones(2, 7, dtype=torch.int64) for name in names}
batch, sequence = (torch.export.Dim(name) for name in ("batch_size", "sequence"))
shapes = {name: {0: batch, 1: sequence} for name in names}
torch.onnx.export(
    model, kwargs=tokens, f=output, dynamo=True, dynamic_shapes=shapes, opset_version=18, external_data=True
)
"""


def main() -> int:
    """Build, measure, and print the table as Markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, default=14, help="each has 201 MB; 14 and the embedding make 3.1 GB")
    parser.add_argument("--work_dir", type=Path, help="where the files go, and stay; default: a temporary folder")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.work_dir or Path(temporary)).resolve()
        source, output = folder / "source" / "model.onnx", folder / "optimized" / "model.onnx"
        for path in (source, output):
            path.parent.mkdir(parents=True, exist_ok=True)
        if not source.exists():
            measure([sys.executable, "-c", BUILD, str(arguments.layers), str(source)])
        megabytes = sum(path.stat().st_size for path in source.parent.iterdir()) / 1e6
        print(f"{describe_machine()}\n")
        print("| run | file MB | wall s | peak MB | peak / file |\n|---|---:|---:|---:|---:|")
        command = (sys.executable, "-m", "onnxtool", "optimize", "--model_path", str(source), "--output", str(output))
        for name, options in (("onnxtool optimize --no_verify", ("--no_verify",)), ("onnxtool optimize, verified", ())):
            usage = measure([*command, "--force", *options])
            ratio = usage.peak_mb / megabytes
            print(f"| {name} | {megabytes:.0f} | {usage.wall_s:.1f} | {usage.peak_mb:.0f} | {ratio:.2f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
