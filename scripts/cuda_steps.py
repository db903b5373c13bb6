"""The steps of check_cuda.py: each computes something and compares it with PyTorch or the CPU, within stated bounds."""

from __future__ import annotations

import itertools
import json
import random
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from harness.processes import run as run_command
from harness.steps import Result
from make_models import trained_model

from onnxtool.export.options import DTYPES

EXPORTED = {precision: dtype for dtype, precision in DTYPES.items()}
TORCH_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Bounds:
    """The largest errors: 1 - cosine and a number of vectors of length 1, and the relative error of training."""

    cosine: float
    absolute: float
    relative: float


# For vectors, six times PyTorch's own errors: 1.6e-6 and 3.5e-4 in fp16, 8.9e-5 and 3.0e-3 in bf16 (MiniLM, 64 texts,
# on a CPU).
BOUNDS = {
    "fp32": Bounds(1e-6, 1e-5, 1e-4),
    "fp16": Bounds(1e-5, 2e-3, 1e-2),
    "bf16": Bounds(6e-4, 2e-2, 5e-2),
}


@dataclass(frozen=True)
class Sizes:
    """The amount of work. `threads` are those of timings; 0 means one per core."""

    batch_sizes: str
    lengths: str
    num_texts: int
    num_steps: int
    threads: int


# Timings of the dry run mean nothing; with one thread, they do not wait for busy cores.
SIZES = {"cuda": Sizes("1,32", "16,128", 4096, 12, 0), "cpu": Sizes("1,4", "16", 64, 4, 1)}


@dataclass(frozen=True)
class Run:
    """The folder and the device of a run."""

    work: Path
    device: str

    @property
    def checkpoint(self) -> Path:
        """The sentence encoder."""
        return self.work / "checkpoint"

    @property
    def sizes(self) -> Sizes:
        """The amount of work."""
        return SIZES[self.device]

    def files(self, precision: str) -> list[Path]:
        """Return the ONNX files in this precision, the optimized one last."""
        files = [self.work / f"{kind}-{precision}.onnx" for kind in ("exported", "optimized")]
        return [file for file in files if file.exists()]


def compare(result: Result, vectors: Any, expected: Any, bounds: Bounds) -> None:
    """Check vectors of length 1 against others, both float [N, H]."""
    vectors, expected = np.asarray(vectors, np.float64), np.asarray(expected, np.float64)
    if vectors.shape != expected.shape:
        result.fail(f"shape {vectors.shape} instead of {expected.shape}")
        return
    lengths = np.linalg.norm(vectors, axis=1) * np.linalg.norm(expected, axis=1)
    result.check("1 - cosine", float((1 - (vectors * expected).sum(1) / lengths).max()), bounds.cosine)
    result.check("max error", float(np.abs(vectors - expected).max()), bounds.absolute)


def compare_losses(result: Result, losses: Any, expected: Any, bounds: Bounds) -> None:
    """Check the losses of all steps against PyTorch's."""
    result.rows[-1] |= {"first loss": float(losses[0]), "last loss": float(losses[-1])}
    result.check("relative difference", float(np.abs(np.array(losses) / np.array(expected) - 1).max()), bounds.relative)


def require_onnxruntime(result: Result, backend: Any) -> None:
    """Add the share of operators that are in onnxruntime; none is wrong."""
    graphs = backend.explain().graphs
    total = sum(graph.num_nodes for graph in graphs)
    inside = total - sum(len(graph.eager) for graph in graphs)
    result.rows[-1]["in onnxruntime"] = f"{inside} of {total}"
    if not inside or not backend.execution_count:
        result.fail("nothing ran in onnxruntime")


def onnxtool(*words: object) -> Any:
    """Run a command of onnxtool and return its JSON."""
    return json.loads(run_command(sys.executable, "-m", "onnxtool", *map(str, words), "--format", "json", "--quiet"))


def make_texts(count: int, seed: int) -> list[str]:
    """Return texts of 3 to 24 words of the checkpoint's vocabulary."""
    draw = random.Random(seed)  # noqa: S311 - no secret
    words = [word for word in (trained_model() / "vocab.txt").read_text("utf-8").split() if word.isalpha()]
    return [" ".join(draw.choices(words, k=draw.randint(3, 24))) for _ in range(count)]


def tokens_of(texts: Sequence[str], run: Run, device: str, length: int = 0) -> dict[str, Any]:
    """Return the inputs of the model as tensors; `length` pads all texts to it, or truncates them."""
    from transformers import AutoTokenizer

    padding: dict[str, Any] = {"padding": "max_length", "truncation": True, "max_length": length} if length else {}
    tokenizer = AutoTokenizer.from_pretrained(run.checkpoint)
    return dict(tokenizer(list(texts), return_tensors="pt", **{"padding": True, **padding}).to(device))


def load(run: Run, precision: str, device: str, kind: str = "AutoModel", **settings: Any) -> Any:
    """Return the checkpoint in PyTorch."""
    import torch
    import transformers

    torch.manual_seed(0)  # of a head that the checkpoint lacks
    dtype = getattr(torch, TORCH_DTYPES[precision])
    return getattr(transformers, kind).from_pretrained(run.checkpoint, dtype=dtype, **settings).to(device).eval()


def embed(model: Any, tokens: dict[str, Any]) -> Any:
    """Return the mean of a text's token states, scaled to length 1, float32 [N, H]."""
    from torch.nn.functional import normalize

    hidden, mask = model(**tokens).last_hidden_state.float(), tokens["attention_mask"][..., None]
    return normalize((hidden * mask).sum(1) / mask.sum(1))


def median_ms(step: Callable[[], object], count: int, device: str) -> float:
    """Return the median time of a step, after two that are not counted."""
    import torch

    times = []
    for _ in range(count + 2):
        start = time.perf_counter()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[2:])


def pytorch(run: Run, _: str) -> Result:
    """Write the checkpoint, the texts, and PyTorch's float32 vectors; measure PyTorch's own errors and times."""
    import torch
    import transformers

    result = Result()
    shutil.copytree(trained_model(), run.checkpoint, dirs_exist_ok=True)
    if run.device == "cpu":  # one layer keeps the dry run short
        transformers.AutoModel.from_pretrained(trained_model(), num_hidden_layers=1).save_pretrained(run.checkpoint)
    texts = make_texts(16, seed=0)
    (run.work / "texts.txt").write_text("\n".join(texts), "utf-8")
    (run.work / "corpus.txt").write_text("\n".join(make_texts(run.sizes.num_texts, seed=1)), "utf-8")
    tokens = tokens_of(texts, run, "cpu")
    with torch.inference_mode():
        expected = embed(load(run, "fp32", "cpu"), tokens).numpy()
        np.save(run.work / "expected.npy", expected)
        for precision in TORCH_DTYPES if run.device == "cuda" else ("fp32",):
            model = load(run, precision, run.device)
            vectors = embed(model, {name: value.to(run.device) for name, value in tokens.items()})
            result.row(precision)
            compare(result, vectors.cpu(), expected, BOUNDS[precision])
            for batch, length in itertools.product(run.sizes.batch_sizes.split(","), run.sizes.lengths.split(",")):
                ids = torch.full((int(batch), int(length)), 2000, device=run.device)
                step = lambda: model(input_ids=ids, attention_mask=torch.ones_like(ids))  # noqa: B023, E731
                result.rows[-1][f"{batch}x{length} ms"] = median_ms(step, 5 * run.sizes.num_steps, run.device)
    return result


def export(run: Run, precision: str) -> Result:
    """Export on the device, which onnxtool verifies."""
    output = run.work / f"exported-{precision}.onnx"
    output.unlink(missing_ok=True)
    words = ("--dtype", EXPORTED[precision], "--device", run.device, "--output", output, "--force")
    verification = onnxtool("export", run.checkpoint, *words)["verification"]
    allowed = Bounds(1 - verification["cosine_required"], verification["atol"] + verification["rtol"], 0)
    return _verified(output, verification, allowed)


def optimize(run: Run, precision: str) -> Result:
    """Optimize the fp32 export for the provider, which onnxtool verifies against the export."""
    source, output = run.work / "exported-fp32.onnx", run.work / f"optimized-{precision}.onnx"
    output.unlink(missing_ok=True)
    words = ("--provider", run.device, "--precision", precision, "--output", output, "--force", "--no_timing")
    return _verified(output, onnxtool("optimize", source, *words)["verification"], BOUNDS[precision])


def _verified(file: Path, verification: dict[str, Any], bounds: Bounds) -> Result:
    result = Result()
    result.row(file.stem, MB=file.stat().st_size / 1e6, cases=len(verification["cases"]))
    result.check("1 - cosine", 1 - verification["cosine_min"], bounds.cosine)
    result.check("max error", verification["max_abs_error"], bounds.absolute)
    return result


def infer(run: Run, precision: str) -> Result:
    """Compare the vectors of each file with PyTorch's in float32 on the CPU."""
    result, expected = Result(), np.load(run.work / "expected.npy")
    for file in run.files(precision):
        words = ("--model_name", run.checkpoint, "--input", run.work / "texts.txt", "--provider", run.device)
        answers = onnxtool("infer", file, *words, "--vectors")["answers"]
        result.row(file.stem)
        compare(result, [answer["vector"] for answer in answers], expected, BOUNDS[precision])
    return result


def benchmark(run: Run, precision: str) -> Result:
    """Time the last file in turns with PyTorch in float32, and compare their outputs."""
    result, file, sizes = Result(), run.files(precision)[-1], run.sizes
    words = ("--provider", run.device, "--compare", run.checkpoint, "--runs", 10 * sizes.num_steps, "--duration", 2)
    shapes = ("--batch_size", sizes.batch_sizes, "--sequence_length", sizes.lengths, "--threads", sizes.threads)
    report = onnxtool("infer", file, "--benchmark", *words, *shapes)
    for ours, theirs in zip(report["results"], report["comparison"]["results"], strict=True):
        milliseconds, other = (result["latency_ms"]["p50"] for result in (ours, theirs))
        shape = f"{ours['batch_size']}x{ours['sequence_length']}"
        result.row(f"{file.stem} {shape}", ms=milliseconds, **{"PyTorch ms": other, "PyTorch / this": theirs["ratio"]})
        result.check("1 - cosine", 1 - theirs["cosine_min"], BOUNDS[precision].cosine)
    return result


def corpus(run: Run, precision: str) -> Result:
    """Encode the corpus on the device, or with fp32 on the CPU if no precision is given, and compare both."""
    result, on_cpu = Result(), run.work / "corpus-cpu"
    words = ("--model_name", run.checkpoint, "--input", run.work / "corpus.txt", "--force")
    if not precision:
        report = onnxtool("encode", "run", run.files("fp32")[0], "--output", on_cpu, "--provider", "cpu", *words)
        result.row("fp32 on the CPU", **{"texts/s": report["texts_per_s"]})
        return result
    file, folder = run.files(precision)[-1], run.work / f"corpus-{precision}"
    report = onnxtool("infer", file, "--output", f"{folder}/", "--provider", run.device, *words)
    result.row(file.stem, **{"texts/s": report["texts_per_s"]})
    vectors, expected = (
        np.concatenate([np.load(part) for part in sorted(at.glob("*.npy"))]) for at in (folder, on_cpu)
    )
    compare(result, vectors, expected, BOUNDS[precision])
    return result


def compiled(run: Run, precision: str) -> Result:
    """Run forward and backward through onnxtool's backend and eagerly; compare with float32 on the CPU."""
    import torch

    from onnxtool.torch_backend import OrtBackend

    texts, backend = make_texts(8, seed=2), OrtBackend()

    def forward_backward(model: Any, tokens: dict[str, Any]) -> Any:
        model.zero_grad()
        outputs = model(**tokens).last_hidden_state.float()
        outputs.square().mean().backward()
        return outputs

    exact, eager = load(run, "fp32", "cpu"), load(run, precision, run.device)
    result, results = Result(), []
    result.row(f"torch.compile {precision}")
    for name, model in (("exact", exact), ("eager", eager), ("compiled", torch.compile(eager, backend=backend))):
        device = "cpu" if model is exact else run.device
        tokens = tokens_of(texts, run, device, length=32)
        outputs = forward_backward(model, tokens).detach().cpu().clone()
        # The compiled pooler, which the loss does not read, has zeros where the eager one has none.
        gradients = [
            torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            for parameter in model.parameters()
        ]
        results.append((outputs, torch.cat([value.float().flatten() for value in gradients]).cpu()))
        if model is not exact:
            step = partial(forward_backward, model, tokens)
            result.rows[-1][f"{name} ms"] = median_ms(step, run.sizes.num_steps, run.device)
    for name, right, theirs, ours in zip(("outputs", "gradients"), *results, strict=True):
        result.rows[-1][f"{name}, eager"] = own = float((theirs - right).norm() / right.norm())
        # No more is asked of half precision than twice what PyTorch achieves.
        bound = max(BOUNDS[precision].relative, 2 * own)
        result.check(f"{name}, compiled", float((ours - right).norm() / right.norm()), bound)
    require_onnxruntime(result, backend)
    return result


def trainer(run: Run, precision: str) -> Result:
    """Train a classifier with OrtTrainer and with transformers' Trainer, with the same dropout; compare all losses."""
    import torch
    import transformers

    from onnxtool.training import OrtTrainer

    count = run.sizes.num_steps
    tokens = tokens_of(make_texts(8 * count, seed=3), run, "cpu", length=32)
    tokens["labels"] = torch.arange(8 * count) % 2
    rows = [dict(zip(tokens, values, strict=True)) for values in zip(*tokens.values(), strict=True)]
    arguments = transformers.TrainingArguments(
        run.work / "trainer", max_steps=count, logging_steps=1, learning_rate=LEARNING_RATE, report_to=[],
        save_strategy="no", disable_tqdm=True, use_cpu=run.device == "cpu", bf16=precision == "bf16",
        fp16=precision == "fp16",
    )  # fmt: skip
    losses, times, result = [], {}, Result()
    kinds: tuple[Any, ...] = (transformers.Trainer, partial(OrtTrainer, placement="onnxruntime"))
    for name, kind in zip(("Trainer", "OrtTrainer"), kinds, strict=True):
        model = load(run, "fp32", "cpu", "AutoModelForSequenceClassification", num_labels=2)
        library_trainer = kind(model=model, args=arguments, train_dataset=rows)
        start = time.perf_counter()
        library_trainer.train()
        times[f"{name} s"] = time.perf_counter() - start
        losses.append([entry["loss"] for entry in library_trainer.state.log_history if "loss" in entry])
    result.row(f"Trainer {precision}", steps=count, **times)
    compare_losses(result, losses[1], losses[0], BOUNDS[precision])
    require_onnxruntime(result, library_trainer.ort_backend)
    return result


def artifacts(run: Run, precision: str) -> Result:
    """Train the vectors of the fp32 export with training artifacts and with PyTorch; compare all losses."""
    import torch

    from onnxtool.training.api import CheckpointState, Module, Optimizer

    folder, model = run.work / "artifacts", load(run, precision, run.device)
    onnxtool("artifacts", run.work / "exported-fp32.onnx", "--loss", "MSELoss", "--output", folder, "--force")
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, device=run.device)
    optimizer = Optimizer(folder / "optimizer_model.onnx", module)
    optimizer.set_learning_rate(LEARNING_RATE)
    # The default of onnxruntime-training for eps, which the artifacts have.
    theirs = torch.optim.AdamW(model.parameters(), LEARNING_RATE, eps=1e-6, weight_decay=0.0)
    tokens = tokens_of(make_texts(8, seed=4), run, run.device, length=32)
    target = embed(model, tokens).detach().flip(0)  # those of the other texts
    feeds = {name: value.cpu().numpy() for name, value in {**tokens, "target": target}.items()}
    losses: tuple[list[float], list[float]] = [], []
    for _ in range(run.sizes.num_steps):
        losses[0].append(float(module(*(feeds[name] for name in module.input_names()))))
        optimizer.step()
        module.lazy_reset_grad()
        loss = torch.nn.functional.mse_loss(embed(model, tokens), target)
        theirs.zero_grad()
        loss.backward()
        theirs.step()
        losses[1].append(loss.item())
    result = Result()
    result.row(f"artifacts {precision}", steps=run.sizes.num_steps)
    compare_losses(result, *losses, BOUNDS[precision])
    return result
