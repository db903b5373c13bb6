"""Measure how `onnxtool infer` encodes a collection, compared with its peers: texts/s, CPU time, cosines.

`python scripts/bench_infer.py --peers PYTHON` runs sentence-transformers and OpenVINO in the environment of that
interpreter (`pip install sentence-transformers torch openvino`), and `--onnx_peers PYTHON` sentence-transformers on its
onnx backend (`pip install 'sentence-transformers<6' optimum-onnx`). Each contender is a process that encodes all texts,
in turns; ratios are of the same round. MiniLM has trained weights.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from documentation_texts import documentation_texts, write_corpus
from harness.machine import describe_machine
from harness.pages import print_head, print_row
from harness.workers import Worker
from make_models import trained_model

from onnxtool import ExportOptions, OptimizeOptions, export_model, optimize_model

ENCODERS = Path(__file__).parent / "harness" / "encoders.py"
PEERS = ("sentence-transformers", "sentence-transformers-bf16", "openvino")
ONNX_PEERS = ("sentence-transformers-onnx",)


def contender(name: str, folder: Path, python: str, *arguments: str | Path) -> Worker:
    """Start harness/encoders.py with an interpreter, and wait until its model is loaded."""
    words = [python, str(ENCODERS), *map(str, arguments), str(folder / f"{name}.npy")]
    variables = {"HF_HUB_OFFLINE": "1"} | ({} if python == sys.executable else {"PYTHONPATH": ""})
    return Worker.start(name, words, environment=variables, quiet=True)


def lowest_cosine(vectors: Any, expected: Any) -> float:
    """Return the lowest cosine of a pair of rows of float32 [N, H]."""
    vectors, expected = (array.astype(np.float64) for array in (vectors, expected))
    norms = np.linalg.norm(vectors, axis=1) * np.linalg.norm(expected, axis=1)
    return float(((vectors * expected).sum(axis=1) / norms).min())


def make_minilm(folder: Path) -> tuple[Path, Path, Path]:
    """Export MiniLM with its trained weights into `folder`, once; return the plain, the fused and the int8 file."""
    shutil.copytree(trained_model(), folder / "all-MiniLM-L6-v2", dirs_exist_ok=True)
    plain, fp32, int8 = (folder / f"minilm{suffix}.onnx" for suffix in ("", "-optimized", "-int8"))
    if not int8.exists():
        export_model(ExportOptions(str(folder / "all-MiniLM-L6-v2"), output=plain, force=True))
        optimize_model(OptimizeOptions(plain, output=fp32, force=True))
        optimize_model(OptimizeOptions(plain, output=int8, precision="int8", force=True))
    return plain, fp32, int8


def start_contenders(folder: Path, corpus: Path, options: argparse.Namespace) -> Iterator[Worker]:
    """Start onnxtool in fp32 and int8, and the peers that are available."""
    plain, *files = make_minilm(folder)
    runs = [(name, file, "cpu") for name, file in zip(("fp32", "int8"), files, strict=True)]
    for precision in ("fp32", "bf16", "int8") if options.provider else ():
        provider = options.provider.partition("?")[0]
        file = folder / f"{provider}-{precision}.onnx"
        optimize_model(OptimizeOptions(plain, output=file, provider=options.provider, precision=precision))
        runs.append((f"{precision} on {provider}", file, options.provider))
    for name, file, provider in runs:
        settings = (provider, str(options.workers), str(options.threads))
        yield contender(f"onnxtool {name}", folder, sys.executable, "onnxtool", corpus, file, *settings)
    checkpoint = folder / "all-MiniLM-L6-v2"
    for names, python in ((options.peer_names, options.peers), (ONNX_PEERS, options.onnx_peers)):
        for name in names if python else ():
            yield contender(name, folder, python, name, checkpoint, plain, corpus)


def print_table(contenders: Sequence[Worker], num_texts: int, folder: Path) -> None:
    """Print a row for each contender, compared with sentence-transformers if it ran."""
    vectors = [np.load(folder / f"{contender.name}.npy") for contender in contenders]
    place = next((place for place, contender in enumerate(contenders) if contender.name == PEERS[0]), 0)
    base = contenders[place]
    print_head(["contender", "texts/s", "CPU s", f"times {base.name}: wall", "CPU", "lowest cosine to it"])
    for contender, own in zip(contenders, vectors, strict=True):
        wall, used = (statistics.median(times) for times in zip(*contender.answers, strict=True))
        rounds = [*zip(base.answers, contender.answers, strict=True)]
        ratios = (f"{statistics.median(theirs[kind] / ours[kind] for theirs, ours in rounds):.2f}" for kind in (0, 1))
        cosine = lowest_cosine(own, vectors[place])
        print_row(contender.name, f"{num_texts / wall:.0f}", f"{used:.1f}", *ratios, f"{cosine:.6f}")


def main() -> int:
    """Let the contenders take turns, and print the table as Markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peers", help="Python of an environment with sentence-transformers and openvino")
    parser.add_argument("--peer_names", nargs="+", choices=PEERS, default=PEERS, help="which of them")
    parser.add_argument("--onnx_peers", help="Python of one with sentence-transformers and optimum-onnx")
    parser.add_argument("--provider", default="", help="encode on this provider as well, such as openvino")
    parser.add_argument("--texts", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=0, help="of onnxtool; 0 for its default")
    parser.add_argument("--threads", type=int, default=0, help="of onnxtool; 0 for its default")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder, texts = Path(name), documentation_texts(options.texts)
        contenders = []
        for worker in start_contenders(folder, write_corpus(folder / "texts.jsonl", texts), options):
            stack.callback(worker.stop)
            contenders.append(worker)
        for number in range(options.rounds):
            for worker in contenders:
                worker.answers.append(worker.ask("encode"))
            print(f"round {number + 1}: load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
        for worker in contenders:
            worker.ask("save")
        print(f"\n{len(texts)} texts of {min(map(len, texts))} to {max(map(len, texts))} characters, ", end="")
        print(f"{options.rounds} rounds in turns; {describe_machine(options.threads)}\n")
        print_table(contenders, len(texts), folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
