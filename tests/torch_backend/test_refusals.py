"""What cannot be done as it was asked for is an error with a way out, and nothing else is done in its place."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

from onnxtool.errors import CompilationError, OnnxtoolError, OptionError, ProviderError
from onnxtool.runtime.providers import cuda_problem
from onnxtool.torch_backend import OrtBackend, OrtBackendOptions
from onnxtool.torch_backend.lower.torch_onnx import translate


def rename(model: onnx.ModelProto) -> None:
    model.graph.node[-1].output[0] = model.graph.output[0].name = "other"


def forgetful(graph_module: torch.fx.GraphModule) -> object:
    translated = translate(graph_module)
    translated.graph.outputs.clear()
    return translated


REFUSED: dict[str, tuple[dict[str, Any], type[OnnxtoolError], str]] = {
    # By itself, onnxruntime prints a line and goes on without it.
    "unknown provider": (
        {"preferred_execution_providers": ["FooExecutionProvider"]}, ProviderError,
        "no provider FooExecutionProvider.*CPUExecutionProvider",
    ),
    "no model": ({"converter": lambda _graph: None}, CompilationError, "the converter returned NoneType"),
    "lost outputs": ({"converter": forgetful}, CompilationError, "1 inputs and 0 outputs of 1 and 1"),
    "unknown converter": ({"converter": "fxx"}, CompilationError, "unknown converter 'fxx'.*use one of fx, export"),
    "unknown transform": (
        {"pre_ort_model_transforms": ["tidyy"]}, OnnxtoolError,
        "unknown transform 'tidyy'.*use one of tidy, convert_opset, fold_constants",
    ),
    "renamed output": ({"pre_ort_model_transforms": [rename]}, OnnxtoolError, "changed the inputs or outputs"),
}  # fmt: skip
if problem := cuda_problem():  # the CPU would be slower without anybody noticing
    REFUSED["CUDA"] = ({"preferred_execution_providers": ["CUDAExecutionProvider"]}, ProviderError, re.escape(problem))


def refusal(options: OrtBackendOptions) -> OnnxtoolError:
    """Return the error that compiling with these options ends with."""
    with pytest.raises(BackendCompilerFailed) as caught:
        torch.compile(torch.cos, backend=OrtBackend(options))(torch.rand(2))
    error = caught.value.inner_exception
    assert isinstance(error, OnnxtoolError)
    return error


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_is_refused_with_what_can(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    """By name, with those there are, and with nothing on the terminal."""
    options, kind, message = REFUSED[name]
    error = refusal(OrtBackendOptions(**options))
    assert isinstance(error, kind)
    assert re.search(message, f"{error}\n{error.hint}", re.DOTALL)
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("name", ["preferred_execution_providers", "default_execution_providers"])
def test_a_name_is_no_list_of_names(name: str) -> None:
    """Its letters would be taken for providers."""
    with pytest.raises(OptionError, match=f"{name}: 'CPUExecutionProvider' is not a list"):
        OrtBackendOptions.from_mapping({name: "CPUExecutionProvider"})


def test_an_empty_name_of_a_folder_is_not_the_current_folder() -> None:
    """An unset variable must not fill the folder one is in."""
    with pytest.raises(OptionError, match="cache_folder: '' is not a path"):
        OrtBackendOptions(cache_folder="")


def test_a_mode_of_inductor_is_refused() -> None:
    """Ignoring it would promise a tuning that does not happen."""
    with pytest.raises(BackendCompilerFailed, match="no mode 'max-autotune'"):
        torch.compile(torch.cos, backend="onnxtool", mode="max-autotune")(torch.rand(2))


def test_a_dump_that_cannot_be_written_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever sets the variable looks for files."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ONNXRT_DUMP_PATH", str(tmp_path / "file" / "graph"))
    assert "cannot dump a graph" in str(refusal(OrtBackendOptions()))


def test_the_folder_of_a_dump_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `dump_onnx` does."""
    monkeypatch.setenv("ONNXRT_DUMP_PATH", f"{tmp_path}/dumps/")
    torch.compile(torch.cos, backend=OrtBackend())(torch.rand(2))
    assert sorted(path.name for path in (tmp_path / "dumps").iterdir()) == ["0.onnx", "0.txt"]


def test_after_an_error_of_the_caller_the_model_goes_on_working() -> None:
    """A tensor of a wrong shape is PyTorch's error, and an index out of range as well."""
    compiled = torch.compile(lambda table, index: table[index] * 2, backend=OrtBackend())
    table = torch.rand(3, 4)
    for _ in range(2):
        torch.testing.assert_close(compiled(table, torch.tensor([1])), table[[1]] * 2, atol=0, rtol=0)
        with pytest.raises(IndexError):
            compiled(table, torch.tensor([7]))
