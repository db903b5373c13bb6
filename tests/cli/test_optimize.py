"""`onnxtool optimize` through its entry point."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import onnxtool.optimize
from onnxtool import OptimizeOptions, optimize_model
from onnxtool.optimize.quantization import candidates
from onnxtool.optimize.quantization.candidates import CANDIDATES
from onnxtool.optimize.report import OptimizeReport
from tests.cli.entry_point import run_onnxtool
from tests.workshop import Workshop


@pytest.fixture
def exported(workshop: Workshop, tmp_path: Path) -> Path:
    """A file to optimize in a folder of its own."""
    return Path(shutil.copy(workshop.exported("tiny-splade", exporter="torchscript"), tmp_path / "splade.onnx"))


@pytest.fixture
def run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let further commands print the report of the first, in other formats."""
    reports: list[OptimizeReport] = []

    def run(options: OptimizeOptions, **more: Any) -> OptimizeReport:
        reports[:] = reports or [optimize_model(options, **more)]
        return reports[0]

    monkeypatch.setattr(onnxtool.optimize.run, "optimize_model", run)


@pytest.mark.usefixtures("run_once")
def test_every_format_has_the_report(exported: Path) -> None:
    """Text with --stats the four lines of both summaries, JSON the agreed keys, Markdown tables for reviews."""
    command = ("optimize", "--model_path", exported)
    done = run_onnxtool(Path(), *command, "--stats")
    assert done.returncode == 0, done.stderr
    for line in ("Number of nodes", "Number of inputs", "Number of outputs", "Initializers"):
        assert len(re.findall(rf"^{line}: \d+$", done.stdout, re.MULTILINE)) == 2, line
    before, after = (int(number) for number in re.findall(r"^Number of nodes: (\d+)$", done.stdout, re.MULTILINE))
    assert after < before
    assert done.stdout.index("Original ONNX model summary") < done.stdout.index("Optimized ONNX model summary")
    assert exported.with_name("splade-optimized.onnx").is_file()
    report = json.loads(run_onnxtool(Path(), *command, "--format", "json").stdout)
    assert report.keys() >= {"output", "before", "after", "passes", "fusions", "verification"}
    assert all(step.keys() >= {"name", "num_changes", "duration_ms"} for step in report["passes"])
    assert {"kind": "attention", "expected": 2, "found": 2} in report["fusions"]
    stats = json.loads(run_onnxtool(Path(), "stats", report["output"], "--format", "json").stdout)
    assert report["after"] == stats  # what `onnxtool stats` gives
    markdown = run_onnxtool(Path(), *command, "--format", "markdown", "--quiet").stdout
    assert "| pass | changes | time |" in markdown
    assert "|---|---:|---:|" in markdown


@pytest.fixture
def encoder(workshop: Workshop, tmp_path: Path) -> Path:
    """A file to quantize, with its tokenizer beside it."""
    source = workshop.exported("tiny-encoder", exporter="torchscript")
    shutil.copytree(source.with_suffix(""), tmp_path / "tiny-encoder")
    return Path(shutil.copy(source, tmp_path))


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A few texts to calibrate on."""
    path = tmp_path / "texts.txt"
    path.write_text("a first text\nanother one, a little longer\nand a third\n", encoding="utf-8")
    return path


def optimize(model: Path, texts: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Quantize, with as much error as a model of random weights has in four bits."""
    common = ("optimize", "--model_path", model, "--calibration", texts, "--max_error", "0.3", "--quiet")
    return run_onnxtool(Path(), *common, *arguments)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["--precision", "int8"],
            r"In int8: \d+ of \d+ layers with mixed activations, for any CPU, \d+ embeddings( in int8)?",
        ),
        (
            ["--precision", "int8", "--activations", "static", "--cpu", "vnni"],
            r"In int8: \d+ of \d+ layers with static activations, for vnni CPU, \d+ embeddings( in int8)?",
        ),
        (["--precision", "int4"], r"In int4: \d+ of \d+ layers, \d+ embeddings( in int8)?"),
    ],
)
def test_the_report_counts_quantized_layers_and_states_the_error(
    encoder: Path, texts: Path, arguments: list[str], line: str
) -> None:
    """With its error on the texts."""
    done = optimize(encoder, texts, *arguments)
    assert done.returncode == 0, done.stderr
    assert re.search(f"^{line}$", done.stdout, re.MULTILINE), done.stdout
    assert re.search(r"^Error: 1 - cosine \S+ at most, \S+ on average, 3 texts$", done.stdout, re.MULTILINE)
    assert "Candidates on this machine" not in done.stdout


def test_layers_that_get_more_bits_are_named(encoder: Path, texts: Path) -> None:
    """With what they are kept in and why; random weights of this size are at the edge of what verification allows."""
    int4 = ("--precision", "int4", "--no_verify", "--force")
    report = json.loads(optimize(encoder, texts, *int4, "--format", "json").stdout)
    done = optimize(encoder, texts, *int4, "--max_error", str(report["quantization"]["error"] / 4))
    assert done.returncode == 0, done.stderr
    assert re.search(r"^layer +is kept in +its error in int4$", done.stdout, re.MULTILINE)
    assert re.search(r"^\S+ +int8 +[\d.e-]+$", done.stdout, re.MULTILINE)


@pytest.mark.usefixtures("run_once", "brief_timings")
def test_auto_tells_of_all_candidates(encoder: Path, texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a table, one a line and one of them chosen, and in JSON, both from one run; each takes a second to make."""
    monkeypatch.setitem(CANDIDATES, "cpu", (("fp32", ""), ("int8", "mixed")))
    monkeypatch.setattr(candidates, "_DRAFT_MARGIN", 0.0)  # a draft that is slower on this machine is made all the same
    done = optimize(encoder, texts, "--precision", "auto")
    assert done.returncode == 0, done.stderr
    report = json.loads(optimize(encoder, texts, "--precision", "auto", "--format", "json").stdout)
    assert re.search(r"^precision +1x16 +8x64 +size +error +verdict$", done.stdout, re.MULTILINE)
    for name in ("fp32", "int8 mixed"):
        assert re.search(rf"^{name} +\S+ ms +\S+ ms +\S+ [kM]B +\S+( +chosen)?$", done.stdout, re.MULTILINE), (
            done.stdout
        )
    assert done.stdout.count(" chosen") == 1
    keys = {
        *("provider", "precision", "activations", "latency_ms", "size_bytes", "error"),
        *("chosen", "reason", "quality", "not_judged"),
    }
    assert [one.keys() for one in report["candidates"]] == [keys] * 2
    (chosen,) = [one for one in report["candidates"] if one["chosen"]]
    assert chosen["precision"] == report["precision"]


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (["--activations", "static"], "--activations is for int8, and the precision is fp32", "--precision int8"),
        (["--activations", "dynamic", "--precision", "int4"], "--activations is for int8", "--precision int8"),
        (["--activations", "static", "--precision", "auto"], "--activations is for int8", "auto tries all"),
        (["--embeddings", "int8", "--precision", "int8"], "--embeddings is for int4", "--precision int4"),
        (["--calibration", "t.txt", "--precision", "fp16"], "--calibration is for int8, int4 and auto", "int8"),
        (["--precision", "int8", "--provider", "cuda"], "int8 is not for cuda", "use one of fp32"),
    ],
)
def test_what_does_not_go_together_is_refused(exported: Path, arguments: list[str], message: str, hint: str) -> None:
    """With a way out, and before any work."""
    done = run_onnxtool(Path(), "optimize", "--model_path", exported, "--quiet", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert hint in done.stderr
    assert not exported.with_name("splade-optimized.onnx").exists()


@pytest.mark.parametrize(("content", "message"), [(b"", "has no texts"), (b"caf\xe9\n", "is not UTF-8")])
def test_calibration_texts_are_read_before_the_model_runs(exported: Path, content: bytes, message: str) -> None:
    """A mistake in them takes no minutes of conversion to find."""
    texts = exported.with_name("texts.txt")
    texts.write_bytes(content)
    done = run_onnxtool(Path(), "optimize", exported, "--precision", "int8", "--calibration", texts)
    assert done.returncode == 1
    assert message in done.stderr
    assert "running" not in done.stderr


def test_a_file_without_anything_to_change_has_no_empty_table(exported: Path) -> None:
    """A note says instead that the passes found nothing."""
    once = optimize_model(OptimizeOptions(exported, verify=False, timing=False)).output
    done = run_onnxtool(Path(), "optimize", once, "--no_verify", "--no_timing", "--quiet")
    assert "note: none of " in done.stdout
    assert "pass  changes" not in done.stdout


@pytest.mark.parametrize("content", [b"", b"not a model", b"\x08\x07\x3a\xff\xff\x03"])
def test_a_file_that_is_no_model_is_an_error_of_one_line(tmp_path: Path, content: bytes) -> None:
    """Empty, of another format, cut off."""
    (tmp_path / "m.onnx").write_bytes(content)
    done = run_onnxtool(Path(), "optimize", "--model_path", tmp_path / "m.onnx", "--quiet")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.onnx"]
