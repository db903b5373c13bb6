"""What is wrong with an installation is found, and what is not wrong is left alone."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

from onnxtool.runtime import environment
from onnxtool.runtime.environment import describe_environment

# A sound installation: name to version, and what onnxtool requires of it.
SOUND = {"onnxtool-cli": "0.1.0", "onnxruntime-gpu": "1.31.0", "numpy": "2.4.6", "transformers": "5.23.0"}
REQUIRES = [
    "numpy>=2.1",
    "transformers>=5.23; extra == 'export'",
    "onnxruntime-gpu>=1.30; sys_platform != 'nowhere'",
    "onnxruntime>=1.30; sys_platform == 'nowhere'",
    "pytest>=9.0; extra == 'dev'",
]


@pytest.fixture(autouse=True)
def _sound(monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, SOUND)
    monkeypatch.setattr(environment, "cuda_device_problem", lambda: "no NVIDIA driver")
    monkeypatch.setattr(environment, "cuda_problem", lambda: "no NVIDIA driver")


def _install(monkeypatch: pytest.MonkeyPatch, packages: dict[str, str], requires: list[str] | None = None) -> None:
    """Let exactly these packages be installed."""

    def version(name: str) -> str:
        if name not in packages:
            raise importlib.metadata.PackageNotFoundError(name)
        return packages[name]

    def requirements(name: str) -> list[str]:
        version(name)
        return REQUIRES if requires is None else requires

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib.metadata, "requires", requirements)


def test_a_sound_installation_has_no_problems() -> None:
    """Requirements of other platforms and of extras are none of this one; a missing GPU is information."""
    report = describe_environment()
    assert report.problems == ()
    assert report.packages == {
        "onnxtool": "0.1.0",
        "numpy": "2.4.6",
        "onnxruntime": "not installed",
        "onnxruntime-gpu": "1.31.0",
        "transformers": "5.23.0",
    }
    assert report.providers["cpu"] == "ok"
    assert report.providers["cuda"] == "no NVIDIA driver"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"onnxruntime": "1.31.0"}, "onnxruntime and onnxruntime-gpu are both installed"),
        ({"onnxruntime-gpu": None}, "neither onnxruntime nor onnxruntime-gpu is installed"),
        ({"onnxruntime-gpu": "1.29.0"}, "onnxruntime-gpu is 1.29.0, and onnxtool requires >=1.30"),
        ({"numpy": "2.0.9"}, "numpy is 2.0.9, and onnxtool requires >=2.1; pip install 'numpy>=2.1'"),
        ({"numpy": None}, "numpy is not installed; pip install 'numpy>=2.1'"),
        ({"onnxtool-cli": None}, "onnxtool runs from its source folder"),
    ],
)
def test_each_problem_is_said_with_its_way_out(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, str | None], problem: str
) -> None:
    """One at a time, and once."""
    packages = {name: version for name, version in {**SOUND, **changes}.items() if version is not None}
    _install(monkeypatch, packages)
    (said,) = describe_environment().problems
    assert said.startswith(problem)


@pytest.mark.parametrize("version", ["2.5.0.dev1", "2.4+local", "built by hand"])
def test_a_build_of_ones_own_is_no_problem(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Pre-releases and local versions above the bound count, and what is no version is not judged."""
    _install(monkeypatch, {**SOUND, "numpy": version})
    assert describe_environment().problems == ()


def test_either_runtime_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user who chose the plain wheel where the other one is asked for has made no mistake."""
    packages = {name: version for name, version in SOUND.items() if name != "onnxruntime-gpu"}
    _install(monkeypatch, {**packages, "onnxruntime": "1.31.0"})
    assert describe_environment().problems == ()


def test_without_pytorch_nothing_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is exported runs; an export says what it needs."""
    _install(monkeypatch, {name: version for name, version in SOUND.items() if name != "transformers"})
    report = describe_environment()
    assert (report.problems, report.packages["transformers"]) == ((), "not installed")


def test_transformers_without_exporters_is_a_problem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Found by the files, without importing transformers."""
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: spec)
    (said,) = describe_environment().problems
    assert "transformers 5.23.0 has no transformers.exporters" in said
    (tmp_path / "exporters").mkdir()
    (tmp_path / "exporters" / "__init__.py").touch()
    assert describe_environment().problems == ()


def test_a_device_that_cannot_be_used_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """An absent GPU is not; one whose libraries are missing is."""
    monkeypatch.setattr(environment, "cuda_device_problem", lambda: "")
    monkeypatch.setattr(environment, "cuda_problem", lambda: "a session does not start")
    report = describe_environment()
    assert report.problems == ("a CUDA device is here, but a session does not start",)
    assert report.providers["cuda"] == "a session does not start"
    monkeypatch.setattr(environment, "cuda_problem", lambda: "")
    assert describe_environment().problems == ()


def test_an_onnxruntime_that_cannot_be_imported_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken installation is what the command is for: it must not fail on one."""
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    report = describe_environment()
    assert set(report.providers.values()) == {"onnxruntime cannot be imported"}
    (said,) = report.problems
    assert said.startswith("onnxruntime cannot be imported: ")
