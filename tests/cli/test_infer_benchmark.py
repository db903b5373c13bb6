"""`onnxtool infer --benchmark` from its entry point: what it prints, writes and exits with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.entry_point import json_of, run_infer
from tests.infer.tiny_models import VOCABULARY, TinyModel, table, write_checkpoint

V = len(VOCABULARY)
MODEL = ("--model_path", "models/splade.onnx")
SMALL = (*MODEL, "--benchmark", "--provider", "cpu", "--threads", "1", "--batch_size", "2", "--sequence_length", "4")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a sparse encoder and its tokenizer."""
    sparse = {"onnxtool.task": "sparse-encoding", "onnxtool.head": "logits", "onnxtool.files": "splade"}
    TinyModel(table(V, V), "logits", positions=32, metadata=sparse).write(tmp_path / "models" / "splade.onnx")
    write_checkpoint(tmp_path / "models" / "splade", config={"max_position_embeddings": 32})
    return tmp_path


def test_a_benchmark_prints_the_grid(folder: Path) -> None:
    """One row a shape, with percentiles and throughput, and what it was measured on."""
    grid = ("--batch_size", "1,2", "--sequence_length", "4,8", "--runs", "3", "--warmup", "1")
    process = run_infer(folder, *MODEL, "--benchmark", *grid, "--provider", "cpu", "--quiet")
    assert process.returncode == 0
    lines = process.stdout.splitlines()
    assert {"Provider: cpu", "Warm-up: 1 runs of each shape, not counted"} <= set(lines)
    start = lines.index("Latency and throughput:")
    rows = [line.split() for line in lines[start + 1 : start + 6]]
    assert " ".join(rows[0]) == "batch sequence runs p50 ms p95 ms p99 ms mean ms samples/s tokens/s"
    assert [row[:3] for row in rows[1:]] == [["1", "4", "3"], ["1", "8", "3"], ["2", "4", "3"], ["2", "8", "3"]]
    assert all(row[7] == "±" for row in rows[1:])
    assert lines[start + 6].startswith("note: 1x4 is unreliable: 3 runs are few")
    assert any(line.startswith("Processor: ") for line in lines)
    assert any(line.startswith("Versions: onnxtool ") for line in lines)


def test_a_benchmark_in_json_has_the_keys_that_reviews_rely_on(folder: Path) -> None:
    """They are the contract of the command; a report may have more."""
    report = json_of(run_infer(folder, *SMALL, "--duration", "0.05", "--format", "json"))
    top = {"model", "provider", "threads", "load_ms", "first_run_ms", "peak_rss_bytes", "results"}
    assert top | {"trusted", "warnings", "environment"} <= set(report)
    assert report["threads"] == 1
    (result,) = report["results"]
    keys = {"batch_size", "sequence_length", "runs", "latency_ms"}
    assert keys | {"throughput_samples_per_s", "throughput_tokens_per_s", "latencies_ms", "trusted"} <= set(result)
    assert set(result["latency_ms"]) == {"min", "p50", "p90", "p95", "p99", "max", "mean", "stdev"}
    assert result["throughput_tokens_per_s"] == pytest.approx(4 * result["throughput_samples_per_s"])
    assert report["peak_vram_bytes"] is None


def test_texts_are_timed_with_their_tokenizer(folder: Path) -> None:
    """The distribution of lengths, the padding, and the stages beside the model's."""
    (folder / "texts.txt").write_text("a cat\nthe red cat sat on the mat\ndog\n", encoding="utf-8")
    options = ("--batch_size", "2", "--runs", "4", "--quiet")
    process = run_infer(folder, *MODEL, "--benchmark", "--input", "texts.txt", "--text", "house", *options)
    assert process.returncode == 0, process.stderr
    assert "Texts: 4\n" in process.stdout
    assert "Tokens of a text: 3 to 9, median 3.5, mean 4.75, p95 8.25\n" in process.stdout.replace(
        "mean 4.8", "mean 4.75"
    )
    assert "tokenize p50 ms  model p50 ms  pool p50 ms  total p50 ms  total p95 ms" in process.stdout


def test_a_comparison_prints_ratios_and_errors(folder: Path) -> None:
    """In Markdown as well; progress says what is loaded."""
    other = TinyModel(table(V, V), "logits").write(folder / "other.onnx")
    process = run_infer(folder, *SMALL, "--runs", "30", "--compare", other.name, "--format", "markdown")
    assert process.returncode == 0, process.stderr
    assert "### In turns with other.onnx" in process.stdout
    row = next(line for line in process.stdout.splitlines() if line.startswith("| 2 | 4 | 6 |"))
    assert row.endswith("| 0 | 1.000000 |")
    assert "loading other.onnx …" in process.stderr


def test_a_gate_that_is_met_exits_1_with_shape_and_figures(folder: Path) -> None:
    """The report is printed all the same; a gate that is not met says nothing on stderr."""
    options = (*SMALL, "--runs", "30", "--compare", "models/splade.onnx", "--quiet", "--fail_if")
    met = run_infer(folder, *options, "ratio>0")
    assert met.returncode == 1
    assert met.stderr.startswith("gate failed: ratio is ")
    assert "Latency and throughput:" in met.stdout
    assert "Gates:" in met.stdout
    passed = run_infer(folder, *options, "2x4.ratio<0")
    assert (passed.returncode, passed.stderr) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--fail_if", "p50>+10%"), "the gate 'p50>+10%' is relative, and a benchmark has no base"),
        (("--fail_if", "p50!"), "no operator !, at character 4"),
        (("--fail_if", "p77>3"), "a benchmark has no figure 'p77'"),
        (("--top_k", "3"), "gives no answers; leave out --top_k"),
        (("--model_name", "models"), "--benchmark times generated inputs; leave out --model_name"),
        (("--text", "cat"), "lengths of their own; leave out --sequence_length"),
    ],
)
def test_usage_errors_exit_2(folder: Path, arguments: tuple[str, ...], message: str) -> None:
    """A gate that cannot be used is one of them."""
    process = run_infer(folder, *SMALL, *arguments, "--quiet")
    assert (process.returncode, process.stdout) == (2, "")
    assert message in process.stderr
    assert process.stderr.endswith("see onnxtool infer --help\n")
