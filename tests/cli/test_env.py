"""`onnxtool env` from its entry point: what is installed, what runs, what is wrong."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import subprocess
from pathlib import Path

import onnx
import pytest

from onnxtool.runtime.providers import cuda_problem
from onnxtool.version import DISTRIBUTION, commit
from tests.cli.entry_point import run_onnxtool, run_process
from tests.graphs import of_text, save_text


def _run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_onnxtool(folder, "env", *arguments, PYTHONWARNINGS="error")


def test_json_tells_versions_and_providers(tmp_path: Path) -> None:
    """Versions are those of the installed packages; a machine without a GPU is no problem of the installation."""
    process = _run(tmp_path, "--format", "json")
    assert (process.returncode, process.stderr) == (0, "")
    report = json.loads(process.stdout)
    assert set(report) == {
        *("commit", "python", "platform", "packages", "providers", "problems"),
        *("configuration", "precedence"),
    }
    assert report["commit"] == commit()
    assert report["python"] == platform.python_version()
    for name, version in report["packages"].items():
        package = DISTRIBUTION if name == "onnxtool" else name
        assert version == "not installed" or version == importlib.metadata.version(package)
    assert report["providers"]["cpu"] == "ok"
    assert report["providers"]["cuda"] == (cuda_problem() or "ok")
    assert not any("CUDA" in problem or "NVIDIA" in problem for problem in report["problems"])


def test_text_lists_packages_providers_and_problems(tmp_path: Path) -> None:
    """In plain columns where stdout is no terminal."""
    process = _run(tmp_path)
    assert process.returncode == 0
    for heading in ("Packages:", "Execution providers:", "Problems:"):
        assert heading in process.stdout.splitlines()
    assert f"Python: {platform.python_version()}" in process.stdout


def test_torch_and_transformers_are_not_imported(tmp_path: Path) -> None:
    """Their versions are in the packages' metadata; importing them takes seconds."""
    process = run_process(tmp_path, "env", "-v", PYTHONPROFILEIMPORTTIME="1")
    assert process.returncode == 0
    names = {line.rpartition("|")[2].strip().partition(".")[0] for line in process.stderr.splitlines()}
    assert "onnxruntime" in names
    assert not {"torch", "transformers"} & names


def _saved(folder: Path, operator: str = "Erf", shape: str = "2, 6") -> Path:
    model = of_text(f"g (float[{shape}] x) => (float[{shape}] y) {{ y = {operator}(x) }}", {}, 18)
    model.graph.node[0].name = f"/layer.3/mlp/{operator}"
    onnx.save(model, folder / "m.onnx")
    return folder / "m.onnx"


def test_the_cpu_takes_a_file_that_it_can_load(tmp_path: Path) -> None:
    """By default it is asked; an operator without a kernel is a reason, and the exit code is 1."""
    process = _run(tmp_path, "--model", str(_saved(tmp_path)))
    assert process.returncode == 0
    assert "Answer: asked of the provider: CPUExecutionProvider" in process.stdout
    assert "Nodes: 1 of 1 on the provider" in process.stdout
    process = _run(tmp_path, "--model", str(_saved(tmp_path, "NoSuchOperator")), "--format", "json")
    assert process.returncode == 1
    report = json.loads(process.stdout)
    assert (report["whole"], report["opens"], len(report["reasons"])) == (False, False, 1)


@pytest.mark.parametrize(
    ("provider", "shape", "refused", "reason"),
    [("qnn", "2, 6", ["Erf"], ""), ("coreml", "b, 6", [], ""), ("webnn", "b, 6", [], "dynamic axes")],
)
def test_a_provider_that_is_not_here_is_looked_up(
    tmp_path: Path, provider: str, shape: str, refused: list[str], reason: str
) -> None:
    """The report says so, with the version of the documentation, and names nodes with their layer."""
    process = _run(tmp_path, "--model", str(_saved(tmp_path, shape=shape)), "--provider", provider, "--format", "json")
    report = json.loads(process.stdout)
    assert (report["asked"], report["opens"]) == (False, None)
    assert "commit" in report["source"]
    assert [(node["operator"], node["layer"]) for node in report["refused"]] == [(op, "layer.3") for op in refused]
    assert [one for one in report["reasons"] if reason in one] == report["reasons"]
    assert process.returncode == (1 if refused or reason else 0)


@pytest.mark.parametrize(("provider", "code"), [("none", 2), ("migraphx", 1)])
def test_what_nothing_is_known_of_is_an_error(tmp_path: Path, provider: str, code: int) -> None:
    """An unknown provider is a usage error; one that is neither here nor documented cannot be asked."""
    process = _run(tmp_path, "--model", str(_saved(tmp_path)), "--provider", provider)
    assert process.returncode == code
    assert provider in process.stderr


def test_a_provider_needs_a_file(tmp_path: Path) -> None:
    """Without one, all providers are listed."""
    assert _run(tmp_path, "--provider", "cpu").returncode == 2


def test_a_provider_that_ends_the_process_is_a_reason(tmp_path: Path) -> None:
    """Another process opens the file: onnxruntime divides these constants while it loads it."""
    body = "a = Constant<value_int = -9223372036854775808>() b = Constant<value_int = -1>() y = Div(a, b)"
    path = save_text(tmp_path / "m.onnx", f"g (float[1] x) => (int64 y, float[1] z) {{ {body} z = Neg(x) }}", {}, 18)
    process = _run(tmp_path, "--model", str(path))
    assert process.returncode == 1
    assert "ends the process that tries it" in process.stdout
