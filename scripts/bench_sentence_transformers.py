"""Measure how fast sentence-transformers encodes texts with an exported file in place of PyTorch.

Each contender is a process of its own, which loads sentence-transformers with the checkpoint or with a file that was
exported from it, runs once, and then encodes all texts in turns with the others; ratios are of the same round.
`--model` is the trained MiniLM, or a sparse encoder of models/recipes.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from documentation_texts import documentation_texts
from harness.machine import describe_machine
from harness.workers import Worker, serve
from make_models import make_model, trained_model

TRAINED = "all-MiniLM-L6-v2"
# What each contender loads: the checkpoint, or a file of the exported folder.
CONTENDERS = {
    "PyTorch": "",
    "onnxtool": "model.onnx",
    "onnxtool, optimized": "fp32.onnx",
    "onnxtool, int8": "int8.onnx",
}


def export(checkpoint: Path, folder: Path) -> None:
    """Write the exported folder with its optimized files."""
    from onnxtool.export import ExportOptions, export_model
    from onnxtool.optimize import OptimizeOptions, optimize_model

    export_model(ExportOptions(str(checkpoint), target="sentence-transformers", output=folder))
    for precision in ("fp32", "int8"):
        output = folder / "onnx" / f"{precision}.onnx"
        optimize_model(OptimizeOptions(folder / "onnx" / "model.onnx", precision=precision, output=output))


def serve_encoder(folder: str, file_name: str, kind: str, texts_path: str, output: str) -> None:
    """Encode all texts for each request, and answer wall and processor seconds; save the last vectors to `output`."""
    import sentence_transformers

    import onnxtool.sentence_transformers  # noqa: F401  by which the folder loads

    texts: list[str] = json.loads(Path(texts_path).read_text(encoding="utf-8"))
    arguments = {"model_kwargs": {"file_name": file_name}} if file_name else {}
    encoder: Any = getattr(sentence_transformers, kind)(folder, device="cpu", local_files_only=True, **arguments)
    encoder.encode(texts[:64])

    def answer(_request: Any) -> list[float]:
        start, used = time.perf_counter(), time.process_time()
        vectors = encoder.encode(texts, show_progress_bar=False)
        seconds = [time.perf_counter() - start, time.process_time() - used]
        np.save(output, vectors.to_dense().numpy() if kind == "SparseEncoder" else vectors)
        return seconds

    serve(answer)


def main() -> int:
    """Print the table."""
    if sys.argv[1:2] == ["worker"]:
        serve_encoder(*sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--model", default=TRAINED, help="the trained model, or a sparse encoder of models/recipes.json"
    )
    parser.add_argument("--texts", type=int, default=1000, help="how many texts to encode")
    parser.add_argument("--rounds", type=int, default=3, help="how often each contender encodes them")
    arguments = parser.parse_args()
    print(describe_machine())
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        is_dense = arguments.model == TRAINED
        checkpoint = trained_model() if is_dense else make_model(arguments.model, root / "checkpoints")
        export(checkpoint, root / "exported")
        texts = root / "texts.json"
        texts.write_text(json.dumps(documentation_texts(arguments.texts)), encoding="utf-8")
        kind = "SentenceTransformer" if is_dense else "SparseEncoder"
        workers = []
        for place, (contender, file_name) in enumerate(CONTENDERS.items()):
            folder = root / "exported" if file_name else checkpoint
            command = [sys.executable, __file__, "worker", str(folder), file_name, kind, str(texts)]
            workers.append(Worker.start(contender, [*command, str(root / f"{place}.npy")], quiet=True))
        for _ in range(arguments.rounds):
            for worker in workers:
                worker.ask("encode", keep=True)
        for worker in workers:
            worker.stop()
        vectors = [np.load(root / f"{place}.npy") for place in range(len(workers))]
    print("| contender | texts/s | CPU s | times PyTorch | lowest cosine to it |\n|---|---:|---:|---:|---:|")
    for worker, found in zip(workers, vectors, strict=True):
        wall, used = (statistics.median(column) for column in zip(*worker.answers, strict=True))
        ratio = statistics.median(
            theirs[0] / ours[0] for theirs, ours in zip(workers[0].answers, worker.answers, strict=True)
        )
        lengths = np.linalg.norm(found, axis=1) * np.linalg.norm(vectors[0], axis=1)
        cosine = float(((found * vectors[0]).sum(axis=1) / lengths).min())
        print(f"| {worker.name} | {arguments.texts / wall:.0f} | {used:.1f} | {ratio:.2f} | {cosine:.6f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
