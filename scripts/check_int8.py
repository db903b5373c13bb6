"""Check what an int8 file promises on every class of CPU: MiniLM, and a BERT-base in the shape of SPLADE.

`python scripts/check_int8.py` exports each, makes one file by `optimize --precision int8`, and prints a table as
Markdown. Errors are 1 - cosine to the exported file on 300 paragraphs that nothing was calibrated on: with the
session's exact products, with this CPU's own kernels where their sums saturate, and row by row where a kernel might
round activations so. Neighbours are compared as in the report of `optimize`. The last column is the largest 1 - cosine
of a vector alone and among 64 texts. MiniLM has trained weights; those of SPLADE are random. Exit code 1: an error is
above --max_error.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from harness.machine import cpu_class
from make_models import make_model, trained_model

from onnxtool.export import ExportOptions, export_model
from onnxtool.model_file import ModelFile
from onnxtool.model_file.weights import load_model, write_inline
from onnxtool.optimize import OptimizeOptions, optimize_model
from onnxtool.optimize.options import ACTIVATIONS
from onnxtool.optimize.quantization.calibration import text_feeds_of
from onnxtool.optimize.quantization.cpu_arithmetic import PER_ROW, by_arithmetic
from onnxtool.optimize.quantization.error import row_errors
from onnxtool.optimize.quantization.ranking import compare_vectors, held_out_texts
from onnxtool.runtime.providers import EXACT_PRODUCTS_OPTION, products_saturate

MODELS = ("minilm", "splade-bert-base")
NUM_TEXTS = 300
TOGETHER = 64
MAX_ERROR = 0.01
COLUMNS = (
    *("model", "layers in int8", "embeddings", "MB", "exact", "saturating", "per row"),
    *("top-10 overlap", "Kendall's tau", "alone and among 64"),
)


def vectors(path: Path, feeds: Sequence[Mapping[str, Any]], *, exact: bool = False) -> Any:
    """Return one vector a text, float32 [texts, width], by onnxruntime alone."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry(EXACT_PRODUCTS_OPTION, str(int(exact)))
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return np.concatenate([session.run(None, dict(given))[0] for given in feeds])


def alone_and_together(feeds: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the same texts each by itself and all in one batch, padded with zeros."""
    rows = [
        {name: array[row] for name, array in given.items()} for given in feeds for row in range(len(given["input_ids"]))
    ]
    rows = rows[:: max(1, len(rows) // TOGETHER)][:TOGETHER]
    lengths = [int(row["attention_mask"].sum()) for row in rows]
    alone = [
        {name: array[None, :length] for name, array in row.items()} for row, length in zip(rows, lengths, strict=True)
    ]
    together = {name: np.zeros((len(rows), max(lengths)), array.dtype) for name, array in rows[0].items()}
    for place, one in enumerate(alone):
        for name, array in one.items():
            together[name][place, : array.shape[1]] = array
    return alone, together


def check(name: str, activations: str, folder: Path) -> tuple[list[str], float]:
    """Make a file, and return its row of the table and its largest error."""
    source, path = folder / f"{name}.onnx", folder / f"{name}-int8.onnx"
    checkpoint = trained_model() if name == "minilm" else make_model(name, folder)
    export_model(ExportOptions(model_name=str(checkpoint), output=source))
    report = optimize_model(OptimizeOptions(source, path, precision="int8", activations=activations, verify=False))
    quantization = report.quantization
    if quantization is None:
        raise SystemExit(f"{name} has nothing in int8")
    feeds = text_feeds_of(ModelFile.open(source), held_out_texts(NUM_TEXTS))
    wanted, exact = vectors(source, feeds), vectors(path, feeds, exact=True)
    errors = {"exact": float(row_errors(exact, wanted, None).max())}
    if products_saturate():
        errors["saturating"] = float(row_errors(vectors(path, feeds), wanted, None).max())
    computed = by_arithmetic(load_model(path))
    if PER_ROW in computed:
        write_inline(computed[PER_ROW], folder / "per_row.onnx")
        errors["per row"] = float(row_errors(vectors(folder / "per_row.onnx", feeds), wanted, None).max())
    ranking = compare_vectors(wanted, exact, "")
    alone, together = alone_and_together(feeds)
    apart = float(row_errors(vectors(path, alone), vectors(path, [together]), None).max())
    cells = [
        f"{name}, {activations}",
        f"{quantization.num_layers - len(quantization.kept)} of {quantization.num_layers}",
        str(quantization.num_embeddings),
        f"{path.stat().st_size / 1e6:.1f}",
        *(f"{errors[one]:.4f}" if one in errors else "as exact" for one in ("exact", "saturating", "per row")),
        f"{ranking.overlap:.3f}",
        f"{ranking.kendall_tau:.3f}",
        f"{apart:.1e}",
    ]
    return cells, max(errors.values())


def main() -> int:
    """Check each model and print its row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS)
    parser.add_argument("--activations", nargs="*", default=[ACTIVATIONS[0]], choices=ACTIVATIONS)
    arguments = parser.parse_args()
    print(
        f"{cpu_class()}; onnxruntime {ort.__version__}\n\n| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}",
        flush=True,
    )
    worst = 0.0
    for name in arguments.models:
        for activations in arguments.activations:
            with tempfile.TemporaryDirectory() as folder:
                cells, error = check(name, activations, Path(folder))
            print(f"| {' | '.join(cells)} |", flush=True)
            worst = max(worst, error)
    return int(worst > MAX_ERROR)


if __name__ == "__main__":
    sys.exit(main())
