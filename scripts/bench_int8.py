"""Measure what int8 and int4 cost and give: latency, size and error of an optimized model for several bounds.

Run `python scripts/bench_int8.py --model_path NAME-optimized.onnx --max_error none 0.01 0.001`, with
`--precision int8-mixed int8-per_row int8-dynamic int8-static int4` for all of them. `error` is 1 - cosine at worst on
the calibration texts, `held out` the same on 200 paragraphs that were not among them, whose neighbours are compared as
in the report of `optimize`. Latencies are the processor time of one thread, taken in turns, so that the ratios hold on
a machine that does other things as well.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from check_int8 import vectors
from harness.machine import describe_machine

from onnxtool.errors import OnnxtoolError
from onnxtool.model_file import ModelFile
from onnxtool.model_file.weights import load_model, write_inline
from onnxtool.optimize.options import ACTIVATIONS
from onnxtool.optimize.quantization.bounded import Quantized
from onnxtool.optimize.quantization.calibration import make_calibration, text_feeds_of
from onnxtool.optimize.quantization.int4 import to_int4
from onnxtool.optimize.quantization.int8 import to_int8
from onnxtool.optimize.quantization.ranking import compare_vectors, held_out_texts
from onnxtool.runtime.feeds import FeedShape, index_bounds, random_feeds

METHODS: dict[str, Callable[..., Quantized]] = {
    **{f"int8-{activations}": partial(to_int8, activations=activations) for activations in ACTIVATIONS},
    "int4": to_int4,
}
SHAPES = ((8, 128), (1, 16))
SECONDS = 8.0  # for each shape and model
FEWEST_RUNS = 5
NUM_HELD_OUT = 200


def open_session(path: Path) -> Any:
    """Open a session of one thread with the settings that optimized files are tuned for."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    disabled = ["SkipLayerNormFusion"]
    return ort.InferenceSession(path, options, providers=["CPUExecutionProvider"], disabled_optimizers=disabled)


def latencies_ms(paths: Sequence[Path], batch_size: int, sequence_length: int) -> list[float]:
    """Return the median processor time of each model, all of them taken in turns."""
    model = ModelFile.open(paths[0])
    feeds = random_feeds(
        model.structure.inputs, FeedShape.full(batch_size, sequence_length), index_bounds(model), seed=0
    )
    sessions = [open_session(path) for path in paths]
    samples: list[list[float]] = [[] for _ in paths]
    start = time.perf_counter()
    while len(samples[0]) <= FEWEST_RUNS or time.perf_counter() - start < SECONDS * len(paths):
        for session, taken in zip(sessions, samples, strict=True):
            begin = time.process_time()
            session.run(None, feeds)
            taken.append((time.process_time() - begin) * 1e3)
    return [float(np.median(taken[1:])) for taken in samples]  # the first run allocates


def main() -> int:
    """Convert, measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model_path", type=Path, required=True, help="an optimized float32 model")
    parser.add_argument("--calibration", type=Path, help="texts to calibrate on; without it, onnxtool's own")
    parser.add_argument("--max_error", nargs="+", default=["none", "0.01", "0.001"], metavar="X")
    parser.add_argument("--precision", nargs="+", default=["int8-mixed"], choices=METHODS)
    arguments = parser.parse_args()
    calibration = make_calibration(arguments.model_path, arguments.calibration)
    print(f"{describe_machine(1)}; {calibration.num_texts} texts. {calibration.note}")
    rows = [("fp32", arguments.model_path, "", "")]
    with tempfile.TemporaryDirectory() as name:
        for precision, text in itertools.product(arguments.precision, arguments.max_error):
            bound = None if text == "none" else float(text)
            label = f"{precision}, max_error {text}"
            start = time.perf_counter()
            try:
                result = METHODS[precision](load_model(arguments.model_path), calibration.feeds, bound)
            except OnnxtoolError as failure:
                print(f"{label}: {failure.message}", file=sys.stderr)
                continue
            path = Path(name) / f"{precision}-{text}.onnx"
            write_inline(result.outcome.model, path)
            layers = f"{result.num_layers - len(result.kept)} of {result.num_layers}"
            print(f"{label}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
            rows.append((label, path, layers, f"{result.error:.5f}"))
        paths = [path for _, path, _, _ in rows]
        feeds = text_feeds_of(ModelFile.open(arguments.model_path), held_out_texts(NUM_HELD_OUT))
        embedded = [vectors(path, feeds) for path in paths]
        timed = [latencies_ms(paths, *shape) for shape in SHAPES]
        shapes = " | ".join(f"{batch}x{length} ms | ratio" for batch, length in SHAPES)
        names = "model | layers | error | held out | top-10 overlap | Kendall's tau | MB"
        print(f"| {names} | {shapes} |\n|{'---|' * (7 + 2 * len(SHAPES))}")
        for place, (label, path, layers, error) in enumerate(rows):
            figures = " | ".join(f"{taken[place]:.1f} | {taken[0] / taken[place]:.2f}" for taken in timed)
            ranking = compare_vectors(embedded[0], embedded[place], "")
            quality = f"{ranking.error:.5f} | {ranking.overlap:.3f} | {ranking.kendall_tau:.3f}"
            cells = f"{label} | {layers} | {error} | {quality}"
            print(f"| {cells} | {path.stat().st_size / 1e6:.0f} | {figures} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
