"""Fuse the attentions of many architectures, with onnxtool and with its peers, and judge what comes out.

`python scripts/bench_attention.py` makes a tiny model of each architecture, exports it with both exporters, optimizes
the files with onnxtool, onnxruntime's transformers optimizer and onnxscript, and prints a row for each: how many
attentions are fused, and the largest difference to PyTorch on ragged batches, as a part of the largest value, from a
judge that shares nothing with onnxtool (scripts/survey/judging.py).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}

from bench_optimize import describe
from harness.peers import OPTIMIZE_WITH_ONNXRUNTIME, OPTIMIZE_WITH_ONNXSCRIPT
from survey.judging import TOLERANCE, judge
from zoo.checkpoint import NotRunnableError, make_checkpoint
from zoo.tasks import find_task

from onnxtool.model_file import ModelFile

# Architecture: its task, and what onnxruntime's optimizer calls what is nearest to it.
ARCHITECTURES = {
    "bert": ("fill-mask", "bert"),
    "roberta": ("fill-mask", "bert"),
    "xlm-roberta": ("fill-mask", "bert"),
    "distilbert": ("fill-mask", "bert"),
    "electra": ("fill-mask", "bert"),
    "albert": ("fill-mask", "bert"),
    "mpnet": ("fill-mask", "bert"),
    "deberta-v2": ("fill-mask", "bert"),
    "modernbert": ("fill-mask", "bert"),
    "t5": ("feature-extraction", "t5"),
    "gpt2": ("text-generation", "gpt2"),
    "bloom": ("text-generation", "gpt2"),
    "llama": ("text-generation", "gpt2"),
    "qwen3": ("text-generation", "gpt2"),
    "mistral": ("text-generation", "gpt2"),
    "vit": ("image-classification", "vit"),
    "wav2vec2": ("automatic-speech-recognition", "bert"),
}


def main() -> int:
    """Print the table as Markdown; return 1 where an attention of onnxtool's is not fused, or a file is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--types", nargs="+", choices=ARCHITECTURES, default=list(ARCHITECTURES), metavar="TYPE")
    parser.add_argument("--exporters", nargs="+", choices=("torchscript", "dynamo"), default=["torchscript", "dynamo"])
    arguments = parser.parse_args()
    print("| model | exporter | onnxtool | error | onnxruntime's optimizer | error | onnxscript | error |")
    print("|---|---|---:|---:|---:|---:|---:|---:|")
    is_whole = True
    with tempfile.TemporaryDirectory() as temporary:
        for model_type in arguments.types:
            task, name = ARCHITECTURES[model_type]
            checkpoint = Path(temporary) / model_type / "checkpoint"
            try:
                make_checkpoint(find_task(task), model_type, checkpoint)
            except NotRunnableError as error:
                raise SystemExit(f"{model_type} cannot be made: {error}") from error
            for exporter in arguments.exporters:
                row, is_good = _try(checkpoint, task, name, exporter)
                print(f"| {model_type} | {exporter} | " + " | ".join(row) + " |", flush=True)
                is_whole &= is_good
    return int(not is_whole)


def _try(checkpoint: Path, task: str, name: str, exporter: str) -> tuple[list[str], bool]:
    """Export and optimize one model; return the cells of its row, and whether onnxtool's are what they should be."""
    folder = checkpoint.parent / exporter
    source = folder / "model.onnx"
    onnxtool = (sys.executable, "-m", "onnxtool")
    export = ("export", "--model_name", str(checkpoint), "--task", task, "--output", str(source))
    if _run(*onnxtool, *export, "--exporter", exporter, "--quiet") is None:
        return ["not exported"] + [""] * 5, True
    commands = [
        (*onnxtool, "optimize", "--model_path", "{source}", "--output", "{output}", "--format", "json", "--quiet"),
        (sys.executable, "-c", OPTIMIZE_WITH_ONNXRUNTIME, "{source}", "{output}", name, *_sizes(source)),
        (sys.executable, "-c", OPTIMIZE_WITH_ONNXSCRIPT, "{source}", "{output}"),
    ]
    cells: list[str] = []
    is_good = True
    for number, command in enumerate(commands):
        output = folder / f"{number}.onnx"
        report = _run(*(part.format(source=source, output=output) for part in command))
        if report is None or not output.exists():
            cells += ["failed", ""]
            is_good &= number > 0
            continue
        verdict = judge(str(checkpoint), {"model": str(output)})
        fused, error = str(describe(output)["attention"]), f"{verdict['error'] * TOLERANCE:.0e}"
        if number == 0:
            count = next(one for one in json.loads(report)["fusions"] if one["kind"] == "attention")
            fused = f"{count['found']} of {count['expected']}"
            is_good = count["found"] == count["expected"] and verdict["right"]
        cells += [fused, error if verdict["right"] else f"wrong on {verdict['reason'].partition(':')[0]}"]
    return cells, is_good


def _sizes(path: Path) -> tuple[str, str]:
    """Return heads and width of a model, which onnxruntime's optimizer is to be told."""
    metadata = ModelFile.open(path).metadata
    return metadata.get("num_heads", "0"), metadata.get("hidden_size", "0")


def _run(*command: str) -> str | None:
    """Return what a command prints; None where it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return None if done.returncode else done.stdout


if __name__ == "__main__":
    sys.exit(main())
