"""Time one BERT in every precision, by onnxtool and by its peers, in turns on the same inputs.

`python scripts/bench_precision.py --provider openvino --openvino DIR` prints a table as Markdown: milliseconds of a
run, ratio to the plain export in onnxruntime, 1 - cosine to it, and size. Every contender is a process that waits
while the others run, and then runs for a while before the run that counts: its threads and caches are those of a server
that is asked. PyTorch is that of this environment; OpenVINO without onnxruntime needs a virtual environment with
`openvino` and `nncf`, which makes its int8. With `--threads 1`, milliseconds are those of the processor, which hold on
a machine that does other things as well.

`python scripts/bench_precision.py --conversion models/all-MiniLM-L6-v2.onnx --nncf DIR` compares what it takes to write
int8 instead, and its error on 200 texts: onnxtool, onnxruntime's quantize_dynamic, and NNCF on the same calibration
texts, from a virtual environment with `nncf`, `onnx` and `onnxruntime`. With `--data models/collection`, every file
searches that collection as well, and its nDCG@10 is compared with the source's.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from harness.machine import describe_machine
from harness.pages import print_head, print_row
from harness.processes import measure, run
from harness.workers import Worker, serve

VOCABULARY = 30522
MODEL = "splade-bert-base"  # of models/recipes.json
SHAPES = ((8, 128), (1, 128), (1, 16))
CALIBRATION = 64  # inputs for OpenVINO's int8
WARM_UP_MS = 150.0  # of runs in front of the one that counts
Run = Callable[[Mapping[str, Any]], Any]


# --- The contenders. What follows also runs in OpenVINO's environment, which has neither onnxtool nor torch. ---


def open_onnxruntime(threads: int, path: str) -> Run:
    """Open a file with the default settings."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda feeds: session.run(None, dict(feeds))[0]


def open_onnxtool(threads: int, path: str, provider: str = "cpu") -> Run:
    """Open a file with the settings that it was tuned for, on a provider that has verified it."""
    from onnxtool.runtime.session import open_session

    session = open_session(Path(path), provider=provider, threads=threads)
    return lambda feeds: session.run_unchecked(dict(feeds))[0]


def open_torch(threads: int, path: str, dtype: str, kind: str = "AutoModelForMaskedLM") -> Run:
    """Load a checkpoint in a dtype with a class of transformers."""
    import torch
    import transformers

    if threads:
        torch.set_num_threads(threads)
    model = getattr(transformers, kind).from_pretrained(path, dtype=getattr(torch, dtype)).eval()

    def run(feeds: Mapping[str, Any]) -> Any:
        with torch.inference_mode():
            return model(**{name: torch.from_numpy(value) for name, value in feeds.items()})[0].float().numpy()

    return run


def open_openvino(threads: int, path: str, dtype: str) -> Run:
    """Compile a file for speed, with float arithmetic in `dtype`."""
    import openvino as ov

    settings = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": dtype}
    if threads:
        settings["INFERENCE_NUM_THREADS"] = str(threads)
    compiled = ov.Core().compile_model(path, "CPU", settings)
    return lambda feeds: compiled(dict(feeds))[0]


def quantize_with_nncf(model: Any, feeds: Sequence[Any]) -> Any:
    """Return a model in int8, with ranges from these inputs."""
    import nncf

    transformer = nncf.ModelType.TRANSFORMER
    return nncf.quantize(model, nncf.Dataset(feeds), model_type=transformer, subset_size=len(feeds))


def quantize_for_openvino(source: str, output: str) -> None:
    """Write an int8 model for OpenVINO, with ranges from random texts."""
    import openvino as ov

    texts = [make_feeds(1, 128, seed=seed) for seed in range(CALIBRATION)]
    ov.save_model(quantize_with_nncf(ov.Core().read_model(source), texts), output, compress_to_fp16=False)


def quantize_onnx(source: str, inputs: str, output: str) -> None:
    """Write an int8 ONNX file with ranges from the inputs in a file of NumPy."""
    import onnx

    arrays = np.load(inputs)
    names = sorted({name.partition("/")[2] for name in arrays})
    feeds = [{name: arrays[f"{place}/{name}"] for name in names} for place in range(len(arrays) // len(names))]
    onnx.save(quantize_with_nncf(onnx.load(source), feeds), output)


QUANTIZE_DYNAMIC = """
import sys
from onnxruntime.quantization import QuantType, quantize_dynamic
quantize_dynamic(sys.argv[1], sys.argv[2], per_channel=True, weight_type=QuantType.QInt8)
"""


OPENERS: dict[str, Callable[..., Run]] = {
    "onnxruntime": open_onnxruntime,
    "onnxtool": open_onnxtool,
    "torch": open_torch,
    "openvino": open_openvino,
}


def make_feeds(batch: int, length: int, seed: int = 0) -> dict[str, Any]:
    """Return random texts, int64 [batch, length], the second half of them a third shorter."""
    ids = np.random.default_rng(seed).integers(1000, VOCABULARY, (batch, length))
    mask = np.ones_like(ids)
    mask[batch // 2 :, length * 2 // 3 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}


def be_contender(threads: str, kind: str, *arguments: str) -> None:
    """Open, then answer each request [batch, length, file or ""] with the milliseconds of one run.

    It runs for a while in front of it: what the others did to caches and cores is not its time.
    """
    clock = time.process_time if threads == "1" else time.perf_counter
    infer = OPENERS[kind](int(threads), *arguments)

    def answer(request: tuple[int, int, str]) -> float:
        batch, length, file = request
        feeds, spent_ms = make_feeds(batch, length), 0.0
        while True:
            start = clock()
            output = infer(feeds)
            elapsed_ms = (clock() - start) * 1e3
            if spent_ms >= WARM_UP_MS:
                break
            spent_ms += elapsed_ms
        if file:
            np.save(file, np.asarray(output, dtype=np.float32))
        return elapsed_ms

    serve(answer)


HELPERS: dict[str, Callable[..., None]] = {
    "contender": be_contender,
    "quantize": quantize_for_openvino,
    "quantize_onnx": quantize_onnx,
}


# --- The race. ---


@dataclass(frozen=True)
class Contender:
    """One row of the table.

    Attributes:
        command: the interpreter, the opener and its arguments.
        file: what it reads, for its size.
    """

    name: str
    command: tuple[str, ...]
    file: Path | None = None


def race(
    contenders: Sequence[Contender], shapes: Sequence[tuple[int, int]], rounds: int, threads: int, folder: Path
) -> list[list[float]]:
    """Return the median milliseconds of each contender and shape, run in turns; the first answers go to `folder`."""
    with ExitStack() as stack:
        workers = []
        for contender in contenders:
            python, *arguments = contender.command
            worker = Worker.start(contender.name, [python, __file__, "contender", str(threads), *arguments], quiet=True)
            stack.callback(worker.stop)
            workers.append(worker)
        medians: list[list[float]] = [[] for _ in contenders]
        for batch, length in shapes:
            times: list[list[float]] = [[] for _ in contenders]
            for turn in range(rounds + 1):
                for number, worker in enumerate(workers):
                    file = str(folder / f"{number}.npy") if not turn and (batch, length) == shapes[0] else ""
                    elapsed = worker.ask([batch, length, file])
                    if turn:  # the first turn allocates
                        times[number].append(elapsed)
            for number, milliseconds in enumerate(times):
                medians[number].append(statistics.median(milliseconds))
    return medians


def prepare(arguments: argparse.Namespace, folder: Path) -> list[Contender]:
    """Make the files, and return all contenders, the plain export first."""
    from harness.peers import EXPORT_WITH_TORCH
    from make_models import ROOT

    here = sys.executable
    checkpoint = ROOT / "models" / "checkpoints" / MODEL
    source = folder / "plain.onnx"
    run(here, str(ROOT / "scripts" / "make_models.py"), MODEL)
    run(here, "-c", EXPORT_WITH_TORCH, str(checkpoint), "dynamo", "sdpa", str(source))
    contenders = [Contender("onnxruntime, plain export", (here, "onnxruntime", str(source)), source)]
    jobs = [(precision, "", PRECISIONS[precision]) for precision in arguments.precisions]
    if arguments.provider:
        jobs += [
            (precision, arguments.provider, PRECISIONS.get(precision, ("--precision", precision)))
            for precision in ("fp32", "bf16", "int8")
        ]
    for precision, provider, options in jobs:
        name = f"{precision} on {provider.partition('?')[0]}" if provider else precision
        output = folder / f"{re.sub('[ :]', '-', name)}.onnx"
        there = ("--provider", provider) if provider else ()
        optimize = (here, "-m", "onnxtool", "optimize", "--model_path", str(source), "--output", str(output))
        run(*optimize, *there, *options)
        command = (here, "onnxtool", str(output), *there[1:])
        contenders.append(Contender(f"onnxtool {name}", command, output))
    dtypes = ("float32", "bfloat16")
    contenders += [Contender(f"PyTorch {dtype}", (here, "torch", str(checkpoint), dtype)) for dtype in dtypes]
    if arguments.openvino is not None:
        python = str(arguments.openvino / "bin" / "python")
        int8 = folder / "openvino-int8.xml"
        run(python, __file__, "quantize", str(source), str(int8))
        contenders += [
            Contender(title + name, (python, "openvino", str(path), name), file)
            for title, path, file in (("OpenVINO ", source, None), ("OpenVINO int8, ", int8, int8.with_suffix(".bin")))
            for name in ("f32", "bf16")
        ]
    return contenders


def compare_conversions(source: Path, nncf: Path | None, data: Path | None, folder: Path) -> None:
    """Write int8 files of a model with vectors of texts, one after another; print time, memory and error of each."""
    from onnxtool.model_file import ModelFile
    from onnxtool.optimize.quantization.calibration import OWN_TEXTS, make_calibration
    from onnxtool.optimize.quantization.ranking import measure_ranking

    inputs = folder / "inputs.npz"
    feeds = make_calibration(source).feeds
    arrays: Any = {f"{place}/{name}": array for place, case in enumerate(feeds) for name, array in case.items()}
    np.savez(inputs, **arrays)
    optimize = (sys.executable, "-m", "onnxtool", "optimize", "--model_path", str(source), "--precision", "int8")
    commands = {
        "onnxtool": (*optimize, "--output"),
        "onnxtool, not verified or timed": (*optimize, "--no_verify", "--no_timing", "--output"),
        "quantize_dynamic, per channel": (sys.executable, "-c", QUANTIZE_DYNAMIC, str(source)),
    }
    if nncf is not None:
        python = str(nncf / "bin" / "python")
        commands["NNCF"] = (python, __file__, "quantize_onnx", str(source), str(inputs))
    print(f"int8 of {source.name}, calibrated on {OWN_TEXTS.name}; errors on other texts\n")
    columns = ["", "wall s", "CPU s", "peak MB", "MB", "1 - cosine at most", "of 10 neighbours", "Kendall's tau"]
    print_head([*columns, *([] if data is None else ["nDCG@10", "difference, 95 % interval"])])
    for number, (name, command) in enumerate(commands.items()):
        output = folder / f"{number}.onnx"
        figures = [f"{figure:.1f}" for figure in measure((*command, str(output)))]
        ranking = measure_ranking(source, output, ModelFile.open(source))
        if ranking is None or ranking.overlap is None:
            sys.exit(f"{source} has no vectors of texts, or no tokenizer")
        errors = f"{ranking.error:.4f}", f"{ranking.overlap:.1%}", f"{ranking.kendall_tau:.3f}"
        quality = () if data is None else measure_quality(source, output, data, folder)
        print_row(name, *figures, f"{output.stat().st_size / 1e6:.1f}", *errors, *quality)


def measure_quality(source: Path, output: Path, data: Path, folder: Path) -> tuple[str, str]:
    """Search a collection with both files; return the nDCG@10 of `output` and its difference from that of `source`."""
    from onnxtool import EvaluateOptions, evaluate_model
    from onnxtool.checkpoint.folder import find_checkpoint_folder
    from onnxtool.model_file import ModelFile

    files = str(find_checkpoint_folder(ModelFile.open(source)).path)
    options = EvaluateOptions(
        measures=("nDCG@10",), against=str(source), model_name=files, provider="cpu", cache=folder / "vectors"
    )
    report = evaluate_model(output, data, options)
    if report.against is None:
        raise AssertionError("asked to compare")
    difference = report.against.measures["nDCG@10"]
    interval = f"{difference.low:+.4f} to {difference.high:+.4f}"
    return f"{report.measures['nDCG@10'].mean:.4f}", f"{difference.change:+.4f} ({interval})"


# The error is free: weights are random, and layers that it would keep are of no meaning for the time.
PRECISIONS: dict[str, tuple[str, ...]] = {
    "fp32": (),
    "int8": ("--precision", "int8", "--max_error", "1"),
    "int8 static": ("--precision", "int8", "--activations", "static", "--max_error", "1"),
    "int4": ("--precision", "int4", "--max_error", "1"),
    "auto": ("--precision", "auto", "--max_error", "1"),
}


def distance(one: Path, other: Path) -> float:
    """Return 1 - cosine of two answers, over real tokens."""
    mask = make_feeds(*np.load(one, mmap_mode="r").shape[:2])["attention_mask"].astype(bool)
    first, second = (np.load(path)[mask].astype(np.float64).ravel() for path in (one, other))
    return float(1 - first @ second / np.sqrt((first @ first) * (second @ second)))


def parse_shape(text: str) -> tuple[int, int]:
    """Return batch and length of 8x128."""
    batch, _, length = text.partition("x")
    return int(batch), int(length)


def main() -> int:
    """Race, and print the table as Markdown; or be a helper of the process that does."""
    if sys.argv[1:] and sys.argv[1] in HELPERS:
        HELPERS[sys.argv[1]](*sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--openvino", type=Path, metavar="DIR", help="a virtual environment with openvino and nncf")
    parser.add_argument("--provider", default="", help="time files for this provider as well, such as openvino")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--shapes", nargs="+", type=parse_shape, default=SHAPES, metavar="BxS", help="default: three")
    parser.add_argument("--rounds", type=int, default=15, help="runs of each contender and shape")
    parser.add_argument("--threads", type=int, default=0, help="of each contender; default: its own choice")
    parser.add_argument("--conversion", type=Path, metavar="FILE", help="compare what it takes to write int8 of a file")
    parser.add_argument("--nncf", type=Path, metavar="DIR", help="with --conversion, an environment with nncf and onnx")
    parser.add_argument("--data", type=Path, metavar="DIR", help="with --conversion, a collection in BEIR's layout")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if arguments.conversion is not None:
            compare_conversions(arguments.conversion, arguments.nncf, arguments.data, folder)
            print(describe_machine(0))
            return 0
        contenders = prepare(arguments, folder)
        medians = race(contenders, arguments.shapes, arguments.rounds, arguments.threads, folder)
        print_table(contenders, medians, arguments.shapes, folder)
        print(describe_machine(arguments.threads))
    return 0


def print_table(
    contenders: Sequence[Contender],
    medians: Sequence[Sequence[float]],
    shapes: Sequence[tuple[int, int]],
    answers: Path,
) -> None:
    """Print a row for each contender, compared with the first."""
    print_head(["contender", *(f"{batch}x{length} ms" for batch, length in shapes), "1 - cosine", "MB"])
    for number, contender in enumerate(contenders):
        cells = [f"{own:.1f} ({base / own:.2f}x)" for own, base in zip(medians[number], medians[0], strict=True)]
        error = distance(answers / "0.npy", answers / f"{number}.npy")
        size = "" if contender.file is None else f"{contender.file.stat().st_size / 1e6:.0f}"
        print_row(contender.name, *cells, f"{error:.1g}", size)


if __name__ == "__main__":
    sys.exit(main())
