"""`onnxtool optimize` through its entry point."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from onnxtool.weights import write_inline
from tests.cli.entry_point import run_onnxtool
from tests.optimize.passes.exports import CAPPED, export
from tests.workshop import Workshop


@pytest.fixture
def exported(workshop: Workshop, tmp_path: Path) -> Path:
    """A file to optimize in a folder of its own."""
    return Path(shutil.copy(workshop.exported("tiny-splade", exporter="torchscript"), tmp_path / "splade.onnx"))


def test_both_summaries_are_printed(exported: Path) -> None:
    """The four lines of each, and fewer nodes after."""
    done = run_onnxtool(Path(), "optimize", "--model_path", exported, "--stats")
    assert done.returncode == 0, done.stderr
    for line in ("Number of nodes", "Number of inputs", "Number of outputs", "Initializers"):
        assert len(re.findall(rf"^{line}: \d+$", done.stdout, re.MULTILINE)) == 2, line
    before, after = (int(number) for number in re.findall(r"^Number of nodes: (\d+)$", done.stdout, re.MULTILINE))
    assert after < before
    assert done.stdout.index("Original ONNX model summary") < done.stdout.index("Optimized ONNX model summary")
    assert exported.with_name("splade-optimized.onnx").is_file()


def test_json_is_one_document_with_the_agreed_keys(exported: Path) -> None:
    """Before and after are what `onnxtool stats` gives."""
    done = run_onnxtool(Path(), "optimize", "--model_path", exported, "--format", "json")
    report = json.loads(done.stdout)
    assert report.keys() >= {"output", "before", "after", "passes", "fusions", "verification"}
    assert all(step.keys() >= {"name", "num_changes", "duration_ms"} for step in report["passes"])
    assert {"kind": "attention", "expected": 2, "found": 2} in report["fusions"]
    stats = json.loads(run_onnxtool(Path(), "stats", report["output"], "--format", "json").stdout)
    assert report["after"] == stats


def test_markdown_is_for_reviews(exported: Path) -> None:
    """Tables, not columns."""
    done = run_onnxtool(Path(), "optimize", "--model_path", exported, "--format", "markdown", "--quiet")
    assert "| pass | changes | time |" in done.stdout
    assert "|---|---:|---:|" in done.stdout


def test_unfused_attention_fails_where_it_is_required(workshop: Workshop, tmp_path: Path) -> None:
    """Exit 1, the figure, and a way out; no file."""
    path = tmp_path / "capped.onnx"
    write_inline(export(workshop, CAPPED, "torchscript", "eager"), path)
    done = run_onnxtool(Path(), "optimize", "--model_path", path, "--require_fusion", "--output", tmp_path / "o.onnx")
    assert done.returncode == 1
    assert "0 of 2 attentions are fused" in done.stderr
    assert "capped by a Tanh" in done.stderr
    assert "another way (--exporter)" in done.stderr
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("content", [b"", b"not a model", b"\x08\x07\x3a\xff\xff\x03"])
def test_a_file_that_is_no_model_is_an_error_of_one_line(tmp_path: Path, content: bytes) -> None:
    """Empty, of another format, cut off."""
    (tmp_path / "m.onnx").write_bytes(content)
    done = run_onnxtool(Path(), "optimize", "--model_path", tmp_path / "m.onnx", "--quiet")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.onnx"]


def test_a_truncated_model_is_an_error(exported: Path) -> None:
    """A copy that broke off in the middle of the weights."""
    exported.write_bytes(exported.read_bytes()[: exported.stat().st_size // 2])
    done = run_onnxtool(Path(), "optimize", "--model_path", exported, "--quiet")
    assert done.returncode == 1
    assert "is not a complete ONNX model" in done.stderr
