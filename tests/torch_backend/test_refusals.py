"""What cannot be done as it was asked for is an error with a way out, and nothing else is done in its place."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed

from onnxtool.errors import OnnxtoolError, OptionError, ProviderError
from onnxtool.runtime.providers import cuda_problem
from onnxtool.torch_backend import OrtBackend, OrtBackendOptions


def refusal(options: OrtBackendOptions) -> OnnxtoolError:
    """Return the error that compiling with these options ends with."""
    with pytest.raises(BackendCompilerFailed) as caught:
        torch.compile(torch.cos, backend=OrtBackend(options))(torch.rand(2))
    error = caught.value.inner_exception
    assert isinstance(error, OnnxtoolError)
    return error


def test_an_unknown_provider_is_refused_with_those_there_are(capfd: pytest.CaptureFixture[str]) -> None:
    """By itself, onnxruntime prints a line and goes on without it."""
    error = refusal(OrtBackendOptions(preferred_execution_providers=["FooExecutionProvider"]))
    assert isinstance(error, ProviderError)
    assert "no provider FooExecutionProvider" in str(error)
    assert "CPUExecutionProvider" in error.hint
    assert capfd.readouterr().out == ""


@pytest.mark.skipif(not cuda_problem(), reason="CUDA runs here")
def test_cuda_is_refused_where_it_cannot_run() -> None:
    """The CPU would be slower without anybody noticing."""
    error = refusal(OrtBackendOptions(preferred_execution_providers=["CUDAExecutionProvider"]))
    assert isinstance(error, ProviderError)
    assert cuda_problem() in str(error)


@pytest.mark.parametrize("name", ["preferred_execution_providers", "default_execution_providers"])
def test_a_name_is_no_list_of_names(name: str) -> None:
    """Its letters would be taken for providers."""
    with pytest.raises(OptionError, match=f"{name}: 'CPUExecutionProvider' is not a list"):
        OrtBackendOptions.from_mapping({name: "CPUExecutionProvider"})


def test_an_empty_name_of_a_folder_is_not_the_current_folder() -> None:
    """An unset variable must not fill the folder one is in."""
    with pytest.raises(OptionError, match="cache_folder: '' is not a path"):
        OrtBackendOptions(cache_folder="")


def test_a_converter_that_returns_no_model_is_refused() -> None:
    """It says what it returned."""
    error = refusal(OrtBackendOptions(converter=lambda _graph: None))
    assert "the converter returned NoneType" in str(error)


def test_an_unknown_transform_is_refused_with_the_names_of_those_there_are() -> None:
    """Among them the passes of `onnxtool optimize`."""
    error = refusal(OrtBackendOptions(pre_ort_model_transforms=["tidyy"]))
    assert "unknown transform 'tidyy'" in str(error)
    assert "use one of tidy, convert_opset, fold_constants" in error.hint


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
