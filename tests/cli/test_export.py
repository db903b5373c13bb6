"""`onnxtool export` through its entry point."""

from __future__ import annotations

import json
from pathlib import Path

from onnxtool import ExportOptions
from tests.cli.entry_point import run_onnxtool
from tests.workshop import WORDS, Workshop

KEYS = {
    "output",
    "model_type",
    "task",
    "head",
    "exporter",
    "opset",
    "inputs",
    "outputs",
    "metadata",
    "verification",
}
VERIFICATION_KEYS = {"passed", "atol", "rtol", "max_abs_error", "cosine_min", "cases"}


def test_a_name_is_all_it_takes(workshop: Workshop, tmp_path: Path) -> None:
    """The file is models/NAME.onnx, its tokenizer models/NAME/, and stdout one JSON document."""
    done = run_onnxtool(tmp_path, "export", "--model_name", workshop.checkpoint("tiny-splade"), "--format", "json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report.keys() >= KEYS
    assert report["verification"].keys() >= VERIFICATION_KEYS
    assert report["verification"]["cases"][0].keys() >= {"inputs", "max_abs_error", "passed"}
    assert report["outputs"] == [{"name": "sparse", "dtype": "float32", "shape": ["batch_size", WORDS]}]
    assert (tmp_path / "models" / "tiny-splade.onnx").is_file()
    assert (tmp_path / "models" / "tiny-splade" / "tokenizer.json").is_file()
    assert sorted(path.name for path in (tmp_path / "models").iterdir()) == ["tiny-splade", "tiny-splade.onnx"]
    assert "tracing BertForMaskedLM by torchscript" in done.stderr


def test_export_and_optimize_in_one_go(workshop: Workshop, tmp_path: Path) -> None:
    """Text names both files; --quiet leaves stderr empty."""
    done = run_onnxtool(
        tmp_path, "export", "--model_name", workshop.checkpoint("tiny-mlm"), "--exporter", "torchscript", "--optimize",
        "--stats", "--quiet", "--output", tmp_path / "m.onnx",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "Fused: attention 2 of 2" in done.stdout
    assert done.stdout.count("Number of nodes: ") == 3  # the export's own summary, and before and after
    assert (tmp_path / "m-optimized.onnx").is_file()


def test_a_failed_verification_exits_with_1_and_leaves_nothing(workshop: Workshop, tmp_path: Path) -> None:
    """The worst case is on stderr, with its figures and a way out; rounding alone keeps a cosine from 1."""
    done = run_onnxtool(
        tmp_path, "export", "--model_name", workshop.checkpoint("tiny-encoder"), "--exporter", "torchscript",
        "--atol", "0", "--rtol", "0", "--min_cosine", "1", "--output", tmp_path / "m.onnx",
    )  # fmt: skip
    assert done.returncode == 1
    assert "error: the result differs from PyTorch" in done.stderr
    assert "max_abs_error" in done.stderr
    assert "x largest value, cosine 1)" in done.stderr
    assert "hint: " in done.stderr
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_the_least_cosine_can_be_below_that_of_the_dtype() -> None:
    """And the file is stamped with the choice."""
    options = ExportOptions("m", min_cosine=0.9)
    assert options.tolerance.cosine == 0.9
    assert options.choices == {"min_cosine": 0.9}


def test_an_output_that_exists_is_refused_at_once(workshop: Workshop, tmp_path: Path) -> None:
    """Before torch is even imported."""
    (tmp_path / "m.onnx").write_text("precious")
    done = run_onnxtool(
        tmp_path, "export", "--model_name", workshop.checkpoint("tiny-mlm"), "--output", tmp_path / "m.onnx"
    )
    assert done.returncode == 1
    assert "exists already" in done.stderr
    assert "--force" in done.stderr
    assert (tmp_path / "m.onnx").read_text() == "precious"
