"""Measure how `onnxtool infer` encodes a corpus: answers and speed beside its peers, memory, and what a kill costs.

Peers live in environments of their own, whose Pythons are `--peers` (`pip install sentence-transformers torch
openvino fastembed`) and `--onnx_peers` (`pip install 'sentence-transformers<6' optimum-onnx`: optimum-onnx 0.1.0 is for
transformers 4, and sentence-transformers 6 is not). Each contender loads its model once and encodes all texts, in
turns; ratios are of the same round. MiniLM has trained weights; the SPLADE-shaped model is `tiny-splade` of
models/recipes.json with its bias moved, so that a text has about two hundred terms, as with trained ones.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from documentation_texts import documentation_texts, write_corpus
from harness.machine import describe_machine
from harness.workers import Worker
from make_models import make_model, trained_model

from onnxtool.encoding import CorpusOptions, encode_corpus
from onnxtool.export import ExportOptions, export_model
from onnxtool.optimize import OptimizeOptions, optimize_model

PEER_SCRIPT = Path(__file__).parent / "infer_peers" / "encode.py"
SECTIONS = ("throughput", "profile", "splade", "memory", "kill")
PEERS = ("sentence-transformers", "openvino", "fastembed")
PRODUCTS = (
    *("MatMul", "FusedMatMul", "Gemm", "Attention", "MultiHeadAttention", "QAttention"),
    *("MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul"),
)
TERMS_OF_A_TEXT = 200
NUM_KILLS = 10


@dataclass
class Contender:
    """Encodes all texts each time it is asked, and remembers wall and processor seconds."""

    name: str
    encode: Callable[[], tuple[float, float]]
    vectors: Callable[[], Any]
    seconds: list[tuple[float, float]] = field(default_factory=list)


def ours(name: str, model: Path, corpus: Path, folder: Path, options: CorpusOptions) -> Contender:
    """Return onnxtool, from the file of texts to files of vectors; loading the model is not counted."""

    def encode() -> tuple[float, float]:
        used = time.process_time()
        shutil.rmtree(folder, ignore_errors=True)
        folder.with_name(f"{folder.name}.manifest.json").unlink(missing_ok=True)
        report = encode_corpus(model, corpus, folder, options)
        print(f"{name}: padding {report.padding_share:.1%}, {report.workers} workers", file=sys.stderr)
        return report.seconds, time.process_time() - used

    return Contender(name, encode, lambda: np.concatenate([np.load(path) for path in sorted(folder.glob("*.npy"))]))


def peer(name: str, python: str, checkpoint: Path, model: Path, corpus: Path, folder: Path) -> Contender:
    """Start a peer in its own environment and wait until its model is loaded."""
    vectors = folder / f"{name}.npy"
    command = [python, str(PEER_SCRIPT), name, str(checkpoint), str(model), str(corpus), str(vectors)]
    worker = Worker.start(name, command, environment={"HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}, quiet=True)

    def encode() -> tuple[float, float]:
        seconds = worker.ask("encode")
        return seconds["wall_s"], seconds["cpu_s"]

    def saved() -> Any:
        worker.ask("save")
        return np.load(vectors)

    return Contender(name, encode, saved)


def cosines(one: Any, other: Any) -> Any:
    """Return the cosine of each pair of rows: float64 [N]."""
    one, other = (vectors.astype(np.float64) for vectors in (one, other))
    return (one * other).sum(axis=1) / np.linalg.norm(one, axis=1) / np.linalg.norm(other, axis=1)


def make_minilm(folder: Path) -> tuple[Path, Path, Path]:
    """Export MiniLM with its trained weights into `folder`, once; return the plain, the fused and the int8 file."""
    checkpoint = folder / "all-MiniLM-L6-v2"
    shutil.copytree(trained_model(), checkpoint, dirs_exist_ok=True)
    plain, fp32, int8 = (folder / f"minilm{suffix}.onnx" for suffix in ("", "-optimized", "-int8"))
    if not int8.exists():
        export_model(ExportOptions(str(checkpoint), output=plain, force=True))
        optimize_model(OptimizeOptions(plain, output=fp32, force=True))
        optimize_model(OptimizeOptions(plain, output=int8, precision="int8", force=True))
    return plain, fp32, int8


def compare_throughput(folder: Path, arguments: argparse.Namespace) -> None:
    """Print texts a second of all contenders, and how far their vectors are from sentence-transformers'."""
    checkpoint, (plain, fp32, int8) = folder / "all-MiniLM-L6-v2", make_minilm(folder)
    texts = documentation_texts(arguments.texts)
    corpus = write_corpus(folder / "throughput.jsonl", texts)
    options = CorpusOptions(
        provider="cpu",
        workers=arguments.workers,
        threads=arguments.threads,
        batch_tokens=arguments.batch_tokens,
        force=True,
    )
    contenders = [
        ours("onnxtool fp32", fp32, corpus, folder / "vectors-fp32", options),
        ours("onnxtool int8", int8, corpus, folder / "vectors-int8", options),
    ]
    if arguments.peers:
        contenders += [peer(name, arguments.peers, checkpoint, plain, corpus, folder) for name in arguments.peer_names]
    if arguments.onnx_peers:
        python = arguments.onnx_peers
        contenders.append(peer("sentence-transformers-onnx", python, checkpoint, plain, corpus, folder))
    for number in range(arguments.rounds):
        for contender in contenders:
            contender.seconds.append(contender.encode())
        print(f"round {number + 1}: load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
    reference = next((entry for entry in contenders if entry.name == "sentence-transformers"), contenders[0])
    print(f"\n{len(texts)} texts of {min(map(len, texts))} to {max(map(len, texts))} characters, ", end="")
    print(f"{arguments.rounds} rounds in turns; {describe_machine(arguments.threads)}\n")
    print(f"| contender | texts/s | CPU s | times {reference.name}: wall | CPU | lowest cosine to it |")
    print("|---|---:|---:|---:|---:|---:|")
    base = reference.vectors()
    for contender in contenders:
        wall, used = (statistics.median(times) for times in zip(*contender.seconds, strict=True))
        ratios = [
            statistics.median(
                theirs[kind] / mine[kind] for theirs, mine in zip(reference.seconds, contender.seconds, strict=True)
            )
            for kind in (0, 1)
        ]
        cells = f"{len(texts) / wall:.0f} | {used:.1f} | {ratios[0]:.2f} | {ratios[1]:.2f}"
        print(f"| {contender.name} | {cells} | {cosines(contender.vectors(), base).min():.6f} |")


def profile_encoding(folder: Path, arguments: argparse.Namespace) -> None:
    """Print what share of the processor time is outside of the model, and of its products.

    One worker of one thread, so that the time of a kernel is processor time; what other threads do meanwhile, to read
    and to write, counts as outside, as does loading. Attention counts as a product: its own are most of it.
    """
    _, fp32, int8 = make_minilm(folder)
    corpus = write_corpus(folder / "profiled.jsonl", documentation_texts(arguments.texts))
    for model in (fp32, int8):
        inside, operators, total = profiled(model, corpus, folder)
        kernels = sum(operators.values())
        products = sum(seconds for name, seconds in operators.items() if name in PRODUCTS)
        print(f"\n{model.name}, {arguments.texts} texts: {total:.1f} s of processor time, {describe_machine(1)}\n")
        print("| of the processor time | share |\n|---|---:|")
        print(f"| outside of the model: to read, tokenize, pool, write | {1 - inside / total:.1%} |")
        print(f"| in the model, not in a product | {(1 - products / kernels) * inside / total:.1%} |")
        for name, seconds in sorted(operators.items(), key=lambda row: -row[1])[:8]:
            print(f"| {name}{'' if name in PRODUCTS else ', no product'} | {seconds / kernels * inside / total:.1%} |")


def profiled(model: Path, corpus: Path, folder: Path) -> tuple[float, dict[str, float], float]:
    """Encode a corpus; return processor seconds of the model's runs, seconds of each operator, and of all."""
    import onnxruntime as ort

    from onnxtool.runtime.session import Session

    def options() -> Any:
        made = plain_options()
        made.enable_profiling = True
        made.profile_file_prefix = str(folder / "profile")
        return made

    def load(*given: Any, **named: Any) -> Any:
        profiles.append(plain_session(*given, **named))
        return profiles[-1]

    def run(session: Session, feeds: Any) -> Any:
        start = time.thread_time()
        result = plain_run(session, feeds)
        inside.append(time.thread_time() - start)
        return result

    plain_options, plain_session, plain_run = ort.SessionOptions, ort.InferenceSession, Session.run_unchecked
    inside: list[float] = []
    profiles: list[Any] = []
    with (
        mock.patch.object(ort, "SessionOptions", options),
        mock.patch.object(ort, "InferenceSession", load),
        mock.patch.object(Session, "run_unchecked", run),
    ):
        start = time.process_time()
        encode_corpus(model, corpus, folder / "profiled", CorpusOptions(provider="cpu", workers=1, force=True))
        total = time.process_time() - start
    events = json.loads(Path(profiles[0].end_profiling()).read_text(encoding="utf-8"))
    operators: dict[str, float] = {}
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            name = event["args"]["op_name"]
            operators[name] = operators.get(name, 0.0) + event["dur"] / 1e6
    return sum(inside), operators, total


def sparse_model(folder: Path) -> tuple[Path, Path]:
    """Return the checkpoint of a SPLADE-shaped model with few terms a text, and its optimized export."""
    import torch
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    checkpoint, exported = folder / "splade-shaped", folder / "splade-shaped.onnx"
    optimized = folder / "splade-shaped-optimized.onnx"
    if optimized.exists():
        return checkpoint, optimized
    source = make_model("tiny-splade", folder)
    shutil.copytree(source, checkpoint, dirs_exist_ok=True)
    model = AutoModelForMaskedLM.from_pretrained(source).eval()
    tokens = AutoTokenizer.from_pretrained(source)(documentation_texts(64), return_tensors="pt", padding=True)
    tokens = {name: tensor[:, :64] for name, tensor in tokens.items()}
    with torch.inference_mode():
        largest = model(**tokens).logits.masked_fill(tokens["attention_mask"][:, :, None] == 0, -1e9).amax(dim=1)
        share = 1 - TERMS_OF_A_TEXT / largest.shape[1]
        model.get_output_embeddings().bias -= largest.float().quantile(share, dim=1).mean()
    model.save_pretrained(checkpoint)
    export_model(ExportOptions(str(checkpoint), output=exported, head="splade", force=True))
    optimize_model(OptimizeOptions(exported, output=optimized, force=True))
    return checkpoint, optimized


def compare_splade(folder: Path, arguments: argparse.Namespace) -> None:
    """Compare integer vectors with those of the formula in PyTorch, one text after the other, and print differences."""
    import torch
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    checkpoint, optimized = sparse_model(folder)
    texts = documentation_texts(arguments.texts)
    corpus = write_corpus(folder / "splade.jsonl", texts)
    options = CorpusOptions(provider="cpu", force=True, contents=False)
    report = encode_corpus(optimized, corpus, folder / "terms", options)
    lines = [json.loads(line) for path in sorted((folder / "terms").glob("*")) for line in path.open(encoding="utf-8")]
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForMaskedLM.from_pretrained(checkpoint).eval()
    vocabulary = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
    dropped = {tokenizer.pad_token_id, tokenizer.cls_token_id, tokenizer.sep_token_id}
    num_terms = num_equal = 0
    distances: list[float] = []
    for text, line in zip(texts, lines, strict=True):
        tokens = tokenizer(text, return_tensors="pt", truncation=True, max_length=128)
        with torch.inference_mode():
            weights = torch.log1p(torch.relu(model(**tokens).logits[0])).amax(dim=0).double().numpy() / 5 * 256
        whole = np.floor(weights + 0.5).astype(int)
        expected = {vocabulary[i]: int(whole[i]) for i in np.flatnonzero(whole) if int(i) not in dropped}
        num_terms += len(expected)
        num_equal += expected == line["vector"]
        for term in expected.keys() | line["vector"].keys():
            step = abs(expected.get(term, 0) - line["vector"].get(term, 0))
            if step:
                place = tokenizer.convert_tokens_to_ids(term)
                distances.append(abs(weights[place] % 1 - 0.5) if step == 1 else float(step))
    print(f"\nSPLADE-shaped: {len(texts)} texts, {num_terms} terms, {report.texts_per_s:.0f} texts/s")
    print(f"texts whose whole numbers are all equal to PyTorch's: {num_equal}")
    worst = f"; the farthest is {max(distances):.1e} of a step from the half where it rounds" if distances else ""
    print(f"terms that differ: {len(distances)}{worst}")


def encode_in_process(model: Path, corpus: Path, output: Path, *extra: str) -> dict[str, Any]:
    """Run the command in a process of its own, and return its report."""
    command = [sys.executable, "-m", "onnxtool", "infer", "--model_path", str(model), "--input", str(corpus)]
    options = ["--output", f"{output}/", "--provider", "cpu", "--quiet", "--format", "json", *extra]
    done = subprocess.run([*command, *options], check=True, capture_output=True, text=True)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def compare_memory(folder: Path, arguments: argparse.Namespace) -> None:
    """Print the peak of a process that encodes ten times as many lines."""
    _, model = sparse_model(folder)
    chance = random.Random(0)  # noqa: S311  no secret
    words = sorted({word for text in documentation_texts(2000) for word in text.lower().split() if word.isalpha()})
    print("\n| short lines | texts/s | peak MB |\n|---:|---:|---:|")
    peaks = []
    for count in (arguments.lines // 10, arguments.lines):
        texts = [" ".join(chance.choices(words, k=chance.randint(2, 6))) for _ in range(count)]
        corpus = write_corpus(folder / "lines.jsonl", texts)
        output = folder / f"lines-{count}"
        shutil.rmtree(output, ignore_errors=True)
        report = encode_in_process(model, corpus, output, "--no_contents", "--force")
        peaks.append(report["peak_rss_bytes"])
        print(f"| {count} | {report['texts_per_s']:.0f} | {peaks[-1] / 1e6:.0f} |", flush=True)
        shutil.rmtree(output)
    print(f"ratio of the peaks: {peaks[1] / peaks[0]:.3f}")


def contents(output: Path) -> dict[str, bytes]:
    """Return name to content of an output, with what lies beside its folder."""
    beside = [path for path in output.parent.iterdir() if path.name.lstrip(".").startswith(f"{output.name}.")]
    return {path.name.replace(output.name, "", 1): path.read_bytes() for path in (*beside, *output.iterdir())}


def compare_kills(folder: Path, arguments: argparse.Namespace) -> None:
    """Kill a run at random moments, let it go on, and compare its files with those of a run that was left alone."""
    _, model = sparse_model(folder)
    corpus = write_corpus(folder / "kill.jsonl", documentation_texts(arguments.texts))
    whole, killed = folder / "whole", folder / "killed"
    extra = ("--shard_size", "100", "--gzip")
    for output in (whole, killed):
        shutil.rmtree(output, ignore_errors=True)
        output.with_name(f"{output.name}.manifest.json").unlink(missing_ok=True)
    start = time.perf_counter()
    encode_in_process(model, corpus, whole, *extra)
    seconds = time.perf_counter() - start
    command = [sys.executable, "-m", "onnxtool", "infer", "--model_path", str(model), "--input", str(corpus)]
    chance = random.Random(arguments.seed)  # noqa: S311  no secret
    written: list[int] = []
    while len(written) < NUM_KILLS:
        process = subprocess.Popen(
            [*command, "--output", f"{killed}/", "--provider", "cpu", "--quiet", *extra], stdout=subprocess.DEVNULL
        )
        # From before anything is written up to half of a run, which is why some kills come after many shards.
        moment_s = chance.uniform(0, seconds / 2)
        try:
            process.wait(timeout=moment_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
        written.append(sum(path.name.startswith("part-") for path in killed.iterdir()) if killed.exists() else 0)
    encode_in_process(model, corpus, killed, *extra)
    same = contents(killed) == contents(whole)
    print(f"\nkilled {NUM_KILLS} times, shards there after each: {', '.join(map(str, written))}")
    print(f"files after the last run: {len(contents(killed))}, all equal to an uninterrupted run's: {same}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the sections that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--peers", help="Python of an environment with sentence-transformers, openvino and fastembed")
    parser.add_argument("--peer_names", nargs="+", choices=PEERS, default=PEERS, help="those of --peers to measure")
    parser.add_argument("--onnx_peers", help="Python of one with sentence-transformers and optimum-onnx")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--texts", type=int, default=5000)
    parser.add_argument("--lines", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    for name in ("workers", "threads", "batch_tokens"):
        parser.add_argument(f"--{name}", type=int, default=0, help="of onnxtool; 0 for its default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where models are kept for the next time; default: nowhere")
    given = parser.parse_args(arguments)
    sections = {
        "throughput": compare_throughput,
        "profile": profile_encoding,
        "splade": compare_splade,
        "memory": compare_memory,
        "kill": compare_kills,
    }
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for name in given.only:
            sections[name](folder, given)
    return 0


if __name__ == "__main__":
    sys.exit(main())
