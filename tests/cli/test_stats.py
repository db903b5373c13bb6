"""`onnxtool stats` through its entry point: exit codes, stdout, stderr and files."""

from __future__ import annotations

import html
import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from onnxtool.model_file.metadata import STEPS_KEY, License, stamp
from tests.cli.entry_point import run_onnxtool, run_process
from tests.graphs import save_operators, value

SUMMARY = """\
model.onnx:
Number of nodes: 3
Number of inputs: 1
Number of outputs: 1
Initializers: 2
Parameters: 2,000
Size: {size} kB ({size_bytes:,} bytes)
Duplicates: 4.0 kB
Fused attentions: 0
Opsets: ai.onnx 20, com.microsoft 1
IR version: 10
Least onnxruntime: 1.18
Producer: maker 1.2
License: unknown
Subgraphs: 0
Functions: 0
Nodes by domain: ai.onnx 2, com.microsoft 1

Verification, as the model records it:
Figure         1. export
Result         passed
max_abs_error  1.23e-06

Inputs:
Name  Dtype    Shape
x     float32  [batch, 3]

Outputs:
Name  Dtype    Shape
y     float32  [batch, ?]

Operators:
Operator             Nodes
MatMul                   2
com.microsoft::Gelu      1

Weights by dtype:
Dtype    Parameters   Bytes
float32       2,000  8.0 kB

Largest initializers:
Name  Dtype    Shape     Size
tied  float32  [1000]  4.0 kB
w     float32  [1000]  4.0 kB

Stored more than once:
Names    Wasted
w, tied  4.0 kB

Metadata:
Key     Value
author  somebody

What onnxtool did:
Step         Details
1. export    opset 20
2. optimize  passes (fuse 3)
"""

DIFFERENCE_TOP = """\
model.onnx against base.onnx:
Number of nodes: 3, was 5 (-2, -40.0%)
Number of inputs: 1, was 2 (-1, -50.0%)
Number of outputs: 1, unchanged
Initializers: 2, unchanged
Changed edges: 4, was 0
Parameters: 2,000, unchanged
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with model.onnx and base.onnx."""
    save_operators(tmp_path / "model.onnx", ["MatMul", "com.microsoft::Gelu", "MatMul"])
    steps = [
        {"step": "export", "opset": 20, "verified": True, "max_abs_error": 1.234e-6},
        {"step": "optimize", "passes": {"fuse": 3}},
    ]
    stamp(tmp_path / "model.onnx", {"author": "somebody", STEPS_KEY: json.dumps(steps)})
    ops = ["MatMul", "Erf", "MatMul", "Mul", "Mul"]
    save_operators(tmp_path / "base.onnx", ops, [value("x", ["batch", 3]), value("mask", [1])])
    return tmp_path


def test_the_summary_is_plain_text(folder: Path) -> None:
    """Without a terminal the summary is this text, and stderr is empty."""
    result = run_onnxtool(folder, "stats", "model.onnx")
    size_bytes = (folder / "model.onnx").stat().st_size
    assert result.stdout == SUMMARY.format(size=f"{size_bytes / 1e3:.1f}", size_bytes=size_bytes)
    assert (result.returncode, result.stderr) == (0, "")


def test_json_is_one_document_with_the_keys_of_the_contract(folder: Path) -> None:
    """The JSON form starts with the keys that users rely on, and has the path as it was given."""
    result = run_onnxtool(folder, "stats", "model.onnx", "--format", "json")
    report = json.loads(result.stdout)
    wanted = (
        "path size_bytes ir_version producer opsets num_nodes num_inputs num_outputs num_initializers num_parameters"
        " inputs outputs ops metadata initializer_bytes duplicate_bytes num_functions num_subgraphs"
    )
    assert wanted.split() == list(report)[: len(wanted.split())]
    assert report["path"] == "model.onnx"
    assert report["inputs"] == [{"name": "x", "dtype": "float32", "shape": ["batch", 3]}]
    assert report["outputs"] == [{"name": "y", "dtype": "float32", "shape": ["batch", None]}]
    assert report["ops"] == {"MatMul": 2, "com.microsoft::Gelu": 1}


def test_the_difference_starts_with_what_a_reviewer_needs(folder: Path) -> None:
    """Figures come first, then a note where the interface differs, then each change."""
    lines = run_onnxtool(folder, "stats", "model.onnx", "base.onnx").stdout.splitlines()
    assert "\n".join(lines[:7]) + "\n" == DIFFERENCE_TOP
    assert (
        "note: the inputs differ (0 added, 1 removed, 0 changed); what feeds or reads the base may not fit this model"
        in lines
    )
    operators = lines.index("Operators:")
    assert lines[operators + 1 : operators + 5] == [
        "Operator             Base  Model  Change",
        "Mul                     2      0      -2",
        "Erf                     1      0      -1",
        "com.microsoft::Gelu     0      1      +1",
    ]
    assert "mask  float32 [1]  absent" in lines
    assert f"{STEPS_KEY}  absent  export, optimize" in lines


def test_the_difference_as_json_has_both_models_and_the_delta(folder: Path) -> None:
    """Base, model and delta, with what was added, removed and changed by name."""
    report = json.loads(run_onnxtool(folder, "stats", "model.onnx", "base.onnx", "--format", "json").stdout)
    assert list(report) == ["base", "model", "delta"]
    assert report["base"]["path"] == "base.onnx"
    assert report["delta"]["num_nodes"] == -2
    assert report["delta"]["ops"] == {
        "added": {"com.microsoft::Gelu": 1},
        "removed": {"Erf": 1, "Mul": 2},
        "changed": {},
    }
    assert report["delta"]["inputs"]["removed"] == {"mask": {"dtype": "float32", "shape": [1]}}


def test_a_model_does_not_differ_from_itself(folder: Path) -> None:
    """Every figure is unchanged, and no table of changes follows."""
    result = run_onnxtool(folder, "stats", "model.onnx", "model.onnx")
    top, *others = result.stdout.split("\n\n")
    lines = top.splitlines()
    assert all(line.endswith(", unchanged") for line in lines[1:])
    assert [other.splitlines()[0] for other in others] == ["Verification, as the model records it:"]


def test_inputs_in_another_order_are_noted(folder: Path) -> None:
    """Callers that feed by position must learn of it."""
    save_operators(folder / "ab.onnx", ["Add"], [value("a", [1]), value("b", [1])])
    save_operators(folder / "ba.onnx", ["Add"], [value("b", [1]), value("a", [1])])
    assert "note: the inputs are in another order" in run_onnxtool(folder, "stats", "ab.onnx", "ba.onnx").stdout


def test_met_gates_are_named_and_exit_with_1(folder: Path) -> None:
    """The result is printed all the same; each met gate is a line on stderr with its figure."""
    options = ["--fail_if", "num_nodes>2", "--fail-if", "ops.MatMul!=2", "--fail_if", "num_nodes<-30%"]
    result = run_onnxtool(folder, "stats", "model.onnx", "base.onnx", *options)
    assert result.returncode == 1
    assert result.stdout.startswith(DIFFERENCE_TOP)
    assert result.stderr.splitlines() == [
        "gate failed: num_nodes is 3, fails if num_nodes>2",
        "gate failed: num_nodes is 3, 5 in the base, fails if num_nodes<-30%: a threshold of 3.5",
    ]


@pytest.mark.parametrize(
    ("stamped", "options", "met"),
    [
        ("mit", ["--fail_if", "license!=apache-2.0"], "gate failed: license is mit, fails if license!=apache-2.0"),
        ("mit", ["--fail_if", "license!=MIT", "--allowed_licenses", "Apache-2.0", "--allowed-licenses", "MIT"], ""),
        (
            "mit",
            ["--allowed_licenses", "apache-2.0"],
            "gate failed: the license is mit, and allowed_licenses are apache-2.0",
        ),
        ("", ["--fail_if", "license==unknown"], "gate failed: license is unknown, fails if license==unknown"),
        (
            "",
            ["--allowed_licenses", "unknown", "base.onnx"],
            "gate failed: the license is unknown, and allowed_licenses are unknown",
        ),
    ],
)
def test_the_license_is_gated(folder: Path, stamped: str, options: list[str], met: str) -> None:
    """By one text, or by a list of those that are allowed, among which an unknown one never is."""
    stamp(folder / "model.onnx", License(stamped).stamps if stamped else {})
    result = run_onnxtool(folder, "stats", "model.onnx", *options)
    assert (result.returncode, result.stderr) == ((1, f"{met}\n") if met else (0, ""))
    assert re.search(rf"^License: (?:was )?{stamped or 'unknown'}", result.stdout, re.MULTILINE)


def test_the_license_is_in_every_format(folder: Path) -> None:
    """With the name and the link of another one."""
    stamp(folder / "model.onnx", License("other", "Mine", "https://example.org/mine").stamps)
    shown = "other (Mine), "
    (folder / ".onnxtool.toml").write_text('[stats]\nallowed_licenses = ["mit", "mine"]\n')
    for options in (["--format", "text"], ["--format", "markdown"], ["--format", "html"]):
        result = run_onnxtool(folder, "stats", "model.onnx", *options)
        assert (result.returncode, shown in html.unescape(result.stdout)) == (0, True), options
    report = json.loads(run_onnxtool(folder, "stats", "model.onnx", "--format", "json").stdout)
    assert [report[key] for key in ("license", "license_name")] == ["other", "Mine"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["model.onnx", "--fail_if", "num_node>3"], 2, "did you mean 'num_nodes'?"),
        (
            ["model.onnx", "--fail_if", "num_nodes"],
            2,
            "no comparison after 'num_nodes', at character 10 of the gate 'num_nodes'",
        ),
        (["model.onnx", "--fail_if", "num_nodes>+3"], 2, "there is no base"),
        (["model.onnx", "--fail_if", "licence!=mit"], 2, "did you mean 'license'?"),
        (["model.onnx", "--fail_if", "license>mit"], 2, "'mit' is not a threshold"),
        (["model.onnx", "--fail_if", "license!=3"], 2, "license is a text"),
        (["model.onnx", "--fail_if", "num_nodes==many"], 2, "'many' is not a threshold"),
        (["missing.onnx"], 1, "no such model file: missing.onnx"),
        (["model.onnx", "missing.onnx"], 1, "no such model file: missing.onnx"),
        (["text.onnx"], 1, "text.onnx is a text file, and no ONNX model\nhint: pass the .onnx file"),
        (["."], 1, ". is a folder\nhint: pass one of its files: base.onnx, "),
        (["checkpoint"], 1, "checkpoint is a folder\nhint: export it first, if it is a checkpoint"),
        (["model.onnx", "--output", "model.onnx"], 1, "model.onnx is an input of this command"),
        ([], 2, "Missing argument 'MODEL'"),
        (["model.onnx", "base.onnx", "third.onnx"], 2, "unexpected extra argument"),
        (["model.onnx", "--format", "xml"], 2, "'xml' is not one of"),
        (["model.onnx", "--weights"], 2, "there is no BASE to compare weights with; leave out --weights"),
        (["model.onnx", "--output", "report.csv"], 2, "report.csv is named as csv, and this result is written as text"),
    ],
)
def test_errors_have_a_hint_and_leave_stdout_empty(folder: Path, arguments: list[str], code: int, message: str) -> None:
    """What fails says what and how to go on, on stderr: 1 for failures, 2 for usage."""
    (folder / "text.onnx").write_text("not a model\n" * 100)
    (folder / "checkpoint").mkdir(exist_ok=True)
    result = run_onnxtool(folder, "stats", *arguments)
    assert (result.returncode, result.stdout) == (code, "")
    assert message in result.stderr
    assert result.stderr.startswith("error: ")
    assert "\nhint: " in result.stderr
    assert "Traceback" not in result.stderr


def test_a_report_is_written_to_a_file(folder: Path) -> None:
    """With --output stdout is empty, a file that exists needs --force, and a met gate does not hinder the file."""
    arguments = ["model.onnx", "--format", "json", "--output", "report.json"]
    assert run_onnxtool(folder, "stats", *arguments).stdout == ""
    first = (folder / "report.json").read_text()
    assert json.loads(first)["num_nodes"] == 3
    assert run_onnxtool(folder, "stats", *arguments).returncode == 1
    result = run_onnxtool(folder, "stats", "base.onnx", *arguments[1:], "--force", "--fail_if", "num_nodes>4")
    assert result.returncode == 1
    assert json.loads((folder / "report.json").read_text())["num_nodes"] == 5
    assert json.loads(run_onnxtool(folder, "stats", *arguments[:-1], "-").stdout)["num_nodes"] == 3
    assert sorted(file.name for file in folder.iterdir()) == ["base.onnx", "model.onnx", "report.json"]


@pytest.mark.parametrize("format_name", ["markdown", "html"])  # which share their parts with text and JSON
def test_the_result_is_the_same_on_every_run(folder: Path, format_name: str) -> None:
    """Neither hashing nor time changes a byte."""
    results = [
        run(folder, "stats", "model.onnx", "base.onnx", "--format", format_name)
        for run in (run_onnxtool, partial(run_process, PYTHONHASHSEED="1"))
    ]
    assert results[0].stdout == results[1].stdout != ""


def test_a_broken_record_of_steps_is_shown_as_it_is(folder: Path) -> None:
    """Metadata that is no list of steps is metadata, and long values are cut with their length."""
    save_operators(folder / "odd.onnx", ["Relu"])
    stamp(folder / "odd.onnx", {STEPS_KEY: "{", "long": "x" * 1000})
    lines = run_onnxtool(folder, "stats", "odd.onnx").stdout.splitlines()
    assert f"{STEPS_KEY}  {{" in lines
    assert f"long            {'x' * 80}…{'x' * 40} (1000 characters)" in lines


def test_nothing_heavy_is_imported(folder: Path) -> None:
    """A summary, a difference and gates need none of the libraries that take longer to load than to answer."""
    program = (
        "import sys; from onnxtool.cli import main;"
        "main.main(['stats', 'model.onnx', 'base.onnx', '--fail_if', 'num_nodes>+5%'], standalone_mode=False);"
        "heavy = {'torch', 'transformers', 'onnx', 'onnx_ir', 'onnxruntime', 'numpy', 'rich', 'ml_dtypes', 'tempfile'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "[]"
