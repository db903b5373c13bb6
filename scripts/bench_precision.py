"""Time one BERT in every precision, by onnxtool and by its peers, in turns on the same inputs.

`python scripts/bench_precision.py --openvino DIR` prints a table as Markdown: milliseconds of a run, ratio to the plain
export in onnxruntime, 1 - cosine to it, and size. Every contender is a process of its own that waits while the others
run, and then runs for a while before the run that counts: its threads and caches are those of a server that is asked.
PyTorch is that of this environment; OpenVINO needs a virtual environment with `openvino` and `nncf`, which makes its
int8. The last lines say what the fastest int8 file reaches of the machine's int8 products, MatMulInteger of
1024x3072x3072 in the same turns; how long the shortest text takes beside the limit of memory, the weights of its
products over the bandwidth that a copy reaches in the same turns; which operators that time is spent in; and how busy
the machine was. With `--threads 1`, milliseconds are those of the processor, which hold on a machine that does other
things as well.
"""

from __future__ import annotations

import argparse
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
from harness.processes import run
from harness.workers import Worker, serve

VOCABULARY = 30522
PEAK = (1024, 3072, 3072)
SHAPES = ((8, 128), (1, 128), (1, 16))
CALIBRATION = 64  # inputs for OpenVINO's int8
WARM_UP_MS = 150.0  # of runs in front of the one that counts
COPIED_BYTES = 2**28
PROFILED_RUNS = 20
Run = Callable[[Mapping[str, Any]], Any]


# --- The contenders. What follows also runs in OpenVINO's environment, which has neither onnxtool nor torch. ---


def open_onnxruntime(threads: int, path: str) -> Run:
    """Open a file as everybody does."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda feeds: session.run(None, dict(feeds))[0]


def open_onnxtool(threads: int, path: str) -> Run:
    """Open a file with the settings that it was tuned for."""
    from onnxtool.runtime.session import open_session

    session = open_session(Path(path), provider="cpu", threads=threads)
    return lambda feeds: session.run_unchecked(dict(feeds))[0]


def open_torch(threads: int, path: str, dtype: str) -> Run:
    """Load a checkpoint in a dtype."""
    import torch
    from transformers import AutoModelForMaskedLM

    if threads:
        torch.set_num_threads(threads)
    model = AutoModelForMaskedLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()

    def run(feeds: Mapping[str, Any]) -> Any:
        with torch.inference_mode():
            return model(**{name: torch.from_numpy(value) for name, value in feeds.items()}).logits.float().numpy()

    return run


def open_openvino(threads: int, path: str, dtype: str) -> Run:
    """Compile a file for speed, with float arithmetic in `dtype`."""
    import openvino as ov

    settings = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": dtype}
    if threads:
        settings["INFERENCE_NUM_THREADS"] = str(threads)
    compiled = ov.Core().compile_model(path, "CPU", settings)
    return lambda feeds: compiled(dict(feeds))[0]


def quantize_with_nncf(source: str, output: str) -> None:
    """Write an int8 model for OpenVINO, with scales from random texts."""
    import nncf
    import openvino as ov

    texts = [make_feeds(1, 128, seed=seed) for seed in range(CALIBRATION)]
    model = nncf.quantize(
        ov.Core().read_model(source),
        nncf.Dataset(texts),
        model_type=nncf.ModelType.TRANSFORMER,
        subset_size=CALIBRATION,
    )
    ov.save_model(model, output, compress_to_fp16=False)


def open_peak(threads: int) -> Run:
    """Make one product of uint8 and int8, the largest that BERT-base has, and nothing around it."""
    import onnxruntime as ort
    from onnx import TensorProto, helper, numpy_helper

    rows, depth, columns = PEAK
    weight = np.random.default_rng(0).integers(-127, 128, (depth, columns)).astype(np.int8)
    graph = helper.make_graph(
        [helper.make_node("MatMulInteger", ["a", "b"], ["y"])],
        "peak",
        [helper.make_tensor_value_info("a", TensorProto.UINT8, [rows, depth])],
        [helper.make_tensor_value_info("y", TensorProto.INT32, [rows, columns])],
        [numpy_helper.from_array(weight, "b")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    given = {"a": np.random.default_rng(1).integers(0, 256, (rows, depth)).astype(np.uint8)}
    return lambda _feeds: session.run(None, given)[0]


def open_copy(threads: int) -> Run:
    """Copy memory that no cache holds, a part for each thread."""
    import os
    from concurrent.futures import ThreadPoolExecutor

    count = threads or os.cpu_count() or 1
    parts = [np.ones(COPIED_BYTES // count // 4, np.float32) for _ in range(count)]
    targets = [np.empty_like(part) for part in parts]
    pool = ThreadPoolExecutor(count)
    return lambda _feeds: [*pool.map(np.copyto, targets, parts)] and targets[0]


OPENERS: dict[str, Callable[..., Run]] = {
    "onnxruntime": open_onnxruntime,
    "onnxtool": open_onnxtool,
    "torch": open_torch,
    "openvino": open_openvino,
    "peak": open_peak,
    "copy": open_copy,
}


def make_feeds(batch: int, length: int, seed: int = 0) -> dict[str, Any]:
    """Return random texts, int64 [batch, length], the second half of them a third shorter."""
    ids = np.random.default_rng(seed).integers(1000, VOCABULARY, (batch, length))
    mask = np.ones_like(ids)
    mask[batch // 2 :, length * 2 // 3 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}


def be_contender(threads: int, kind: str, arguments: Sequence[str]) -> None:
    """Open, then answer each request [batch, length, file or ""] with the milliseconds of one run."""
    clock = time.process_time if threads == 1 else time.perf_counter
    infer = OPENERS[kind](threads, *arguments)

    def answer(request: tuple[int, int, str]) -> float:
        batch, length, file = request
        feeds = make_feeds(batch, length)
        start = clock()
        output = infer(feeds)
        elapsed_ms = (clock() - start) * 1e3
        if file:
            np.save(file, np.asarray(output, dtype=np.float32))
        return elapsed_ms

    serve(answer)


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
        for one in contenders:
            python, *rest = one.command
            worker = Worker.start(one.name, [python, __file__, "--contender", str(threads), *rest], quiet=True)
            stack.callback(worker.stop)
            workers.append(worker)
        medians: list[list[float]] = [[] for _ in contenders]
        for batch, length in shapes:
            times: list[list[float]] = [[] for _ in contenders]
            for turn in range(rounds + 1):
                for number, worker in enumerate(workers):
                    file = str(folder / f"{number}.npy") if not turn and (batch, length) == shapes[0] else ""
                    spent = worker.ask([batch, length, file])  # what the others did to caches and cores is not its time
                    while spent < WARM_UP_MS:
                        spent += worker.ask([batch, length, ""])
                    elapsed = worker.ask([batch, length, ""])
                    if turn:  # the first turn allocates
                        times[number].append(elapsed)
            for number, found in enumerate(times):
                medians[number].append(statistics.median(found))
    return medians


def prepare(arguments: argparse.Namespace, folder: Path) -> list[Contender]:
    """Make the files, and return all contenders, the plain export first, the peak and the copy last."""
    from harness.peers import EXPORT_WITH_TORCH
    from make_models import ROOT

    here = sys.executable
    checkpoint = ROOT / "models" / "checkpoints" / arguments.model
    source = folder / "plain.onnx"
    run(here, str(ROOT / "scripts" / "make_models.py"), arguments.model)
    if not source.exists():
        run(here, "-c", EXPORT_WITH_TORCH, str(checkpoint), "dynamo", "sdpa", str(source))
    contenders = [Contender("onnxruntime, plain export", (here, "onnxruntime", str(source)), source)]
    for precision in arguments.precisions:
        output = folder / f"{precision.replace(' ', '-')}.onnx"
        if not output.exists():
            options = PRECISIONS[precision]
            run(here, "-m", "onnxtool", "optimize", "--model_path", str(source), "--output", str(output), *options)
        contenders.append(Contender(f"onnxtool {precision}", (here, "onnxtool", str(output)), output))
    dtypes = () if arguments.no_torch else ("float32", "bfloat16")
    contenders += [Contender(f"PyTorch {dtype}", (here, "torch", str(checkpoint), dtype)) for dtype in dtypes]
    if arguments.openvino is not None:
        python = str(arguments.openvino / "bin" / "python")
        int8 = folder / "openvino-int8.xml"
        if not int8.exists():
            run(python, __file__, "--quantize", str(source), str(int8))
        contenders += [
            *(Contender(f"OpenVINO {name}", (python, "openvino", str(source), name)) for name in ("f32", "bf16")),
            *(
                Contender(f"OpenVINO int8, {name}", (python, "openvino", str(int8), name), int8.with_suffix(".bin"))
                for name in ("f32", "bf16")
            ),
        ]
    return [*contenders, Contender("MatMulInteger", (here, "peak")), Contender("a copy", (here, "copy"))]


# The error is free: weights are random, and layers that it would keep are of no meaning for the time.
PRECISIONS: dict[str, tuple[str, ...]] = {
    "fp32": (),
    "int8": ("--precision", "int8", "--max_error", "1"),
    "int8 static": ("--precision", "int8", "--activations", "static", "--max_error", "1"),
    "int4": ("--precision", "int4", "--max_error", "1"),
}


def distance(one: Path, other: Path) -> float:
    """Return 1 - cosine of two answers, over real tokens."""
    mask = make_feeds(*np.load(one, mmap_mode="r").shape[:2])["attention_mask"].astype(bool)
    first, second = (np.load(path)[mask].astype(np.float64).ravel() for path in (one, other))
    return float(1 - first @ second / np.sqrt((first @ first) * (second @ second)))


def weights(path: Path) -> list[Any]:
    """Return the weights of a model's products, those of its output layer included."""
    from onnxtool.model_file.weights import load_model

    products = ("MatMul", "FusedMatMul", "Gemm", "MatMulIntegerToFloat", "DynamicQuantizeMatMul", "Attention")
    values = [node.inputs[1] for node in load_model(path).graph if node.op_type in products]
    # Behind a Transpose lies the weight of an output layer that is tied to the embedding.
    above = [value.producer() if value is not None else None for value in values]
    held = [
        node.inputs[0] if node is not None and node.op_type == "Transpose" else value
        for node, value in zip(above, values, strict=True)
    ]
    return [value.const_value for value in held if value is not None and value.const_value is not None]


def operations(path: Path, shape: tuple[int, int]) -> float:
    """Return the multiplications and additions of a model's products with weights, for tokens [batch, length]."""
    return 2.0 * shape[0] * shape[1] * float(sum(weight.size for weight in weights(path)))


def profile(path: Path, shape: tuple[int, int], threads: int) -> dict[str, float]:
    """Return the milliseconds that each operator of a file takes in a run, the longest first."""
    import json

    import onnxruntime as ort

    from onnxtool.model_file import ModelFile
    from onnxtool.model_file.metadata import DISABLED_OPTIMIZERS_KEY

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    options.enable_profiling = True
    disabled = ModelFile.open(path).metadata.get(DISABLED_OPTIMIZERS_KEY, "").split()
    with tempfile.TemporaryDirectory() as folder:
        options.profile_file_prefix = str(Path(folder) / "profile")
        session = ort.InferenceSession(
            path, options, providers=["CPUExecutionProvider"], disabled_optimizers=disabled or None
        )
        feeds = make_feeds(*shape)
        for _ in range(PROFILED_RUNS):
            session.run(None, feeds)
        events = json.loads(Path(session.end_profiling()).read_text(encoding="utf-8"))
    runs: dict[str, list[float]] = {}
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            runs.setdefault(f"{event['name']} {event['args']['op_name']}", []).append(event["dur"] / 1e3)
    total: dict[str, float] = {}
    for name, times in runs.items():
        operator = name.split()[-1]
        total[operator] = total.get(operator, 0.0) + statistics.median(times)  # the first run allocates
    return dict(sorted(total.items(), key=lambda row: -row[1]))


def main() -> int:
    """Race, and print the table as Markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="splade-bert-base", help="a recipe of models/recipes.json: a BERT")
    parser.add_argument("--openvino", type=Path, metavar="DIR", help="a virtual environment with openvino and nncf")
    parser.add_argument("--no_torch", action="store_true", help="leave PyTorch out")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--shapes", nargs="+", type=_shape, default=SHAPES, metavar="BATCHxLENGTH")
    parser.add_argument("--rounds", type=int, default=15, help="runs of each contender and shape")
    parser.add_argument("--threads", type=int, default=0, help="of each contender; default: its own choice")
    parser.add_argument("--work_dir", type=Path, help="where the files go, and stay; default: a temporary folder")
    parser.add_argument("--contender", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.add_argument("--quantize", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.contender:
        threads, kind, *rest = arguments.contender
        be_contender(int(threads), kind, rest)
        return 0
    if arguments.quantize:
        quantize_with_nncf(*arguments.quantize)
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.work_dir or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        contenders = prepare(arguments, folder)
        medians = race(contenders, arguments.shapes, arguments.rounds, arguments.threads, Path(temporary))
        print_table(contenders, medians, arguments.shapes, Path(temporary))
        print_share(contenders, medians, arguments.shapes, folder / "plain.onnx")
        print_limits(contenders, medians, arguments.shapes, arguments.threads)
        print(describe_machine(arguments.threads))
    return 0


def print_table(
    contenders: Sequence[Contender],
    medians: Sequence[Sequence[float]],
    shapes: Sequence[tuple[int, int]],
    answers: Path,
) -> None:
    """Print a row for each contender but the last two, beside the first."""
    print("| contender | " + " | ".join(f"{batch}x{length} ms" for batch, length in shapes) + " | 1 - cosine | MB |")
    print("|---|" + "---:|" * (len(shapes) + 2))
    for number, contender in enumerate(contenders[:-2]):
        cells = [f"{own:.1f} ({base / own:.2f}x)" for own, base in zip(medians[number], medians[0], strict=True)]
        error = distance(answers / "0.npy", answers / f"{number}.npy")
        size = "" if contender.file is None else f"{contender.file.stat().st_size / 1e6:.0f}"
        print(f"| {contender.name} | " + " | ".join([*cells, f"{error:.1g}", size]) + " |")


def print_share(
    contenders: Sequence[Contender],
    medians: Sequence[Sequence[float]],
    shapes: Sequence[tuple[int, int]],
    plain: Path,
) -> None:
    """Print what the fastest int8 of onnxtool reaches at the largest shape of what the product alone does."""
    index = max(range(len(shapes)), key=lambda number: shapes[number][0] * shapes[number][1])
    times = [own[index] for own, one in zip(medians, contenders, strict=True) if "onnxtool int8" in one.name]
    if not times:
        return
    rate = operations(plain, shapes[index]) / min(times) / 1e6
    peak = 2.0 * float(np.prod(PEAK, dtype=np.float64)) / medians[-2][0] / 1e6
    print(f"\nint8 of onnxtool: {rate:.0f} GOP/s, {rate / peak:.0%} of MatMulInteger's {peak:.0f}")


def print_limits(
    contenders: Sequence[Contender],
    medians: Sequence[Sequence[float]],
    shapes: Sequence[tuple[int, int]],
    threads: int,
) -> None:
    """Print how far the smallest shape is from what memory allows, and what the time is spent in."""
    index = min(range(len(shapes)), key=lambda number: shapes[number][0] * shapes[number][1])
    bandwidth = 2 * COPIED_BYTES / min(medians[-1]) / 1e6  # read and written
    for own, one in zip(medians, contenders, strict=True):
        if one.name not in ("onnxtool fp32", "onnxtool int8") or one.file is None:
            continue
        size = sum(weight.nbytes for weight in weights(one.file)) / 1e6
        batch, length = shapes[index]
        print(
            f"{one.name}, {batch}x{length}: {own[index]:.1f} ms, {own[index] * bandwidth / size:.1f} times the "
            f"{size / bandwidth:.1f} ms that its {size:.0f} MB of weights take at the {bandwidth:.1f} GB/s of a copy"
        )
        spent = profile(one.file, shapes[index], threads)
        whole = sum(spent.values())
        shares = [f"{name} {spent[name] / whole:.0%}" for name in spent if spent[name] > whole / 100]
        print(f"of {whole:.1f} ms under the profiler: {', '.join(shares)}")


def _shape(text: str) -> tuple[int, int]:
    batch, length = text.split("x")
    return int(batch), int(length)


if __name__ == "__main__":
    sys.exit(main())
