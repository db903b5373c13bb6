"""Measure how `onnxtool infer` encodes a collection, beside its peers: texts a second, CPU time and equal answers.

`python scripts/bench_infer.py --peers PYTHON` runs sentence-transformers and OpenVINO in the environment of that
interpreter (`pip install sentence-transformers torch openvino`), and `--onnx_peers PYTHON` sentence-transformers on its
onnx backend (`pip install 'sentence-transformers<6' optimum-onnx`). Each contender loads
its model once and encodes all texts, in turns; ratios are of the same round. MiniLM has trained weights.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from documentation_texts import documentation_texts, write_corpus
from harness.machine import describe_machine
from harness.workers import Worker
from make_models import trained_model

from onnxtool import ExportOptions, OptimizeOptions, export_model, optimize_model
from onnxtool.encoding import CorpusOptions, encode_corpus

ENCODERS = Path(__file__).parent / "harness" / "encoders.py"
PEERS = ("sentence-transformers", "sentence-transformers-bf16", "openvino")
ONNX_PEERS = ("sentence-transformers-onnx",)


@dataclass
class Contender:
    """Encodes all texts each time it is asked, and remembers wall and processor seconds."""

    name: str
    encode: Callable[[], tuple[float, float]]
    vectors: Callable[[], Any]
    seconds: list[tuple[float, float]] = field(default_factory=list)


def ours(precision: str, model: Path, corpus: Path, options: CorpusOptions) -> Contender:
    """Return onnxtool, from the file of texts to files of vectors; loading the model is not counted."""
    folder = corpus.with_name(f"vectors-{precision}")

    def encode() -> tuple[float, float]:
        used = time.process_time()
        shutil.rmtree(folder, ignore_errors=True)
        folder.with_name(f"{folder.name}.manifest.json").unlink(missing_ok=True)
        report = encode_corpus(model, corpus, folder, options)
        return report.seconds, time.process_time() - used

    def vectors() -> Any:
        return np.concatenate([np.load(path) for path in sorted(folder.glob("*.npy"))])

    return Contender(f"onnxtool {precision}", encode, vectors)


def peer(name: str, python: str, checkpoint: Path, model: Path, corpus: Path) -> Contender:
    """Start a peer in its own environment and wait until its model is loaded."""
    vectors = corpus.with_name(f"{name}.npy")
    command = [python, str(ENCODERS), name, str(checkpoint), str(model), str(corpus), str(vectors)]
    worker = Worker.start(name, command, environment={"HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}, quiet=True)

    def encode() -> tuple[float, float]:
        seconds = worker.ask("encode")
        return seconds["wall_s"], seconds["cpu_s"]

    def saved() -> Any:
        worker.ask("save")
        return np.load(vectors)

    return Contender(name, encode, saved)


def lowest_cosine(one: Any, other: Any) -> float:
    """Return the lowest cosine of a pair of rows."""
    one, other = (vectors.astype(np.float64) for vectors in (one, other))
    norms = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    return float(((one * other).sum(axis=1) / norms).min())


def make_minilm(folder: Path) -> tuple[Path, Path, Path]:
    """Export MiniLM with its trained weights into `folder`, once; return the plain, the fused and the int8 file."""
    shutil.copytree(trained_model(), folder / "all-MiniLM-L6-v2", dirs_exist_ok=True)
    plain, fp32, int8 = (folder / f"minilm{suffix}.onnx" for suffix in ("", "-optimized", "-int8"))
    if not int8.exists():
        export_model(ExportOptions(str(folder / "all-MiniLM-L6-v2"), output=plain, force=True))
        optimize_model(OptimizeOptions(plain, output=fp32, force=True))
        optimize_model(OptimizeOptions(plain, output=int8, precision="int8", force=True))
    return plain, fp32, int8


def make_contenders(folder: Path, corpus: Path, given: argparse.Namespace) -> list[Contender]:
    """Return onnxtool in fp32 and int8, and the peers that are here."""
    plain, *files = make_minilm(folder)
    options = CorpusOptions(provider="cpu", workers=given.workers, threads=given.threads, force=True)
    contenders = [ours(name, file, corpus, options) for name, file in zip(("fp32", "int8"), files, strict=True)]
    for precision in ("fp32", "bf16", "int8") if given.provider else ():
        name = given.provider.partition("?")[0]
        file, there = folder / f"{name}-{precision}.onnx", replace(options, provider=given.provider)
        optimize_model(OptimizeOptions(plain, output=file, provider=given.provider, precision=precision))
        contenders.append(ours(f"{precision} on {name}", file, corpus, there))
    checkpoint = folder / "all-MiniLM-L6-v2"
    for names, python in ((given.peer_names, given.peers), (ONNX_PEERS, given.onnx_peers)):
        contenders += [peer(name, python, checkpoint, plain, corpus) for name in names if python]
    return contenders


def take_turns(contenders: list[Contender], rounds: int) -> None:
    """Let each encode everything, one after another, `rounds` times."""
    for number in range(rounds):
        for contender in contenders:
            contender.seconds.append(contender.encode())
        print(f"round {number + 1}: load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)


def print_table(contenders: list[Contender], num_texts: int) -> None:
    """Print a row for each, beside sentence-transformers where it is there."""
    base = next((one for one in contenders if one.name == PEERS[0]), contenders[0])
    print(f"| contender | texts/s | CPU s | times {base.name}: wall | CPU | lowest cosine to it |")
    print("|---|---:|---:|---:|---:|---:|")
    vectors = base.vectors()
    for one in contenders:
        wall, used = (statistics.median(times) for times in zip(*one.seconds, strict=True))
        together = [*zip(base.seconds, one.seconds, strict=True)]
        ratios = (statistics.median(theirs[kind] / mine[kind] for theirs, mine in together) for kind in (0, 1))
        cells = " | ".join((f"{num_texts / wall:.0f}", f"{used:.1f}", *(f"{ratio:.2f}" for ratio in ratios)))
        print(f"| {one.name} | {cells} | {lowest_cosine(one.vectors(), vectors):.6f} |")


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
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        texts = documentation_texts(given.texts)
        contenders = make_contenders(Path(name), write_corpus(Path(name) / "texts.jsonl", texts), given)
        take_turns(contenders, given.rounds)
        print(f"\n{len(texts)} texts of {min(map(len, texts))} to {max(map(len, texts))} characters, ", end="")
        print(f"{given.rounds} rounds in turns; {describe_machine(given.threads)}\n")
        print_table(contenders, len(texts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
