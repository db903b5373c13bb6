"""Measure a plugin beside the CPU provider and its own library: `python scripts/bench_providers.py --openvino DIR`.

One run, in turns: BERT-base in float32, bfloat16 and int8 (`bench_precision.py`), a corpus with MiniLM
(`bench_infer.py`), and the retrieval quality of bfloat16 on a known-item collection. Each ratio is printed beside the
bar for a processor with AMX; exit code 1: one is below. DIR is a virtual environment with `openvino` and `nncf`, and
`--peers PYTHON` an interpreter with sentence-transformers.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import bench_infer
import bench_precision
from documentation_texts import documentation_texts, write_corpus
from harness.machine import describe_machine
from make_collection import make_collection

from onnxtool import EvaluateOptions, evaluate_model

Bar = tuple[str, float, float]  # what, the ratio, and the least it should be


def of_shapes(given: argparse.Namespace, folder: Path) -> Iterator[Bar]:
    """Race BERT-base at three shapes."""
    answers = folder / "answers"
    answers.mkdir(parents=True)
    contenders = bench_precision.prepare(given, folder)
    medians = bench_precision.race(contenders, bench_precision.SHAPES, given.rounds, given.threads, answers)
    bench_precision.print_table(contenders, medians, bench_precision.SHAPES, answers)
    times = {one.name: row for one, row in zip(contenders, medians, strict=True)}
    name = given.provider.partition("?")[0]
    bf16, int8 = times[f"onnxtool bf16 on {name}"], times[f"onnxtool int8 on {name}"]
    for place, (batch, length) in enumerate(bench_precision.SHAPES):
        size, least = f"at {batch}x{length}", 2.0 if length == 16 else 3.0
        yield f"bf16 against fp32 on the CPU provider {size}", times["onnxtool fp32"][place] / bf16[place], least
        yield f"int8 against int8 on the CPU provider {size}", times["onnxtool int8"][place] / int8[place], 1.6
        if given.openvino is not None:
            yield f"bf16 against OpenVINO alone {size}", times["OpenVINO bf16"][place] / bf16[place], 0.97
    if given.openvino is not None:
        theirs = min(times[f"OpenVINO int8, {dtype}"][-1] for dtype in ("f32", "bf16"))
        yield "int8 against NNCF's at 1x16", theirs / int8[-1], 1.0


def of_minilm(given: argparse.Namespace, folder: Path) -> Iterator[Bar]:
    """Encode a corpus in turns, and judge bfloat16 on a collection."""
    folder.mkdir()
    texts = documentation_texts(given.texts)
    contenders = bench_infer.make_contenders(folder, write_corpus(folder / "texts.jsonl", texts), given)
    bench_infer.take_turns(contenders, given.rounds)
    bench_infer.print_table(contenders, len(texts))
    seconds = {one.name: statistics.median(wall for wall, _ in one.seconds) for one in contenders}
    bf16 = seconds[f"onnxtool bf16 on {given.provider.partition('?')[0]}"]
    yield "a corpus in bf16 against fp32 on the CPU provider", seconds["onnxtool fp32"] / bf16, 2.5
    if given.peers:
        yield "a corpus in bf16 against sentence-transformers", seconds[bench_infer.PEERS[0]] / bf16, 5.0
    data = folder / "collection"
    make_collection(data, num_documents=1500, num_queries=500)
    plain, file = folder / "minilm.onnx", folder / f"{given.provider.partition('?')[0]}-bf16.onnx"
    options = EvaluateOptions(against=str(plain), provider=given.provider, cache=folder / "cache")
    compared = evaluate_model(file, data, options).against
    assert compared is not None  # noqa: S101  it was asked for
    found = next(iter(compared.measures.values()))
    print(f"\nnDCG@10 of fp32 {found.base:.4f}, change in bf16 {found.low:+.5f} to {found.high:+.5f}")
    widest = max(abs(found.low), abs(found.high)) / found.base
    yield "0.2% against the change of nDCG@10, of its 95% interval", 0.002 / widest, 1.0
    yield "overlap of neighbours in bf16 and fp32", compared.overlap_at_10, 0.99


def main() -> int:
    """Print the tables, and each ratio with its bar."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--provider", default="openvino")
    parser.add_argument("--openvino", type=Path, metavar="DIR", help="a virtual environment with openvino and nncf")
    parser.add_argument("--peers", help="Python of an environment with sentence-transformers")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--texts", type=int, default=5000)
    parser.set_defaults(
        model="splade-bert-base", precisions=["fp32", "int8"], workers=0, onnx_peers=None,
        peer_names=bench_infer.PEERS[:2],
    )  # fmt: skip
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        bars = [*of_shapes(given, Path(name) / "bert"), *of_minilm(given, Path(name) / "minilm")]
    print(f"\n{describe_machine(given.threads)}\n\n| ratio | found | at least |\n|---|---:|---:|")
    for what, found, least in bars:
        print(f"| {what} | {found:.2f} | {least:.2f} |")
    return int(any(found < least for _, found, least in bars))


if __name__ == "__main__":
    sys.exit(main())
