"""A provider either can run or what it lacks is said; a GPU machine's driver is played by a stand-in."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import onnxruntime
import pytest

from onnxtool.errors import OptionError, ProviderError
from onnxtool.runtime import providers
from onnxtool.runtime.providers import PROVIDERS, cuda_device_problem, cuda_problem, resolve_provider
from tests.runtime.stand_in_driver import Driver, nothing_known


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Nothing of this machine is known, before and after."""
    with nothing_known():
        yield


def _play(monkeypatch: pytest.MonkeyPatch, driver: Driver | None, *, available: bool = True) -> None:
    """Let this machine have an onnxruntime with CUDA, and this driver."""
    names = [PROVIDERS["cuda"]] * available + [PROVIDERS["cpu"]]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: names)

    def load(name: str) -> Driver:
        if driver is None:
            raise OSError(f"{name}: cannot open shared object file")
        return driver

    monkeypatch.setattr(ctypes, "CDLL", load)


def _sessions(monkeypatch: pytest.MonkeyPatch, started: str | Exception, printed: str = "") -> None:
    """Let onnxruntime's sessions start on the provider `started`, or fail, whatever is asked for."""

    class Session:
        def __init__(self, *_arguments: object, **_options: object) -> None:
            if isinstance(started, Exception):
                raise started

        def get_providers(self) -> list[str]:
            return [str(started), PROVIDERS["cpu"]]

    monkeypatch.setattr(onnxruntime, "InferenceSession", Session)
    monkeypatch.setattr(onnxruntime, "preload_dlls", lambda: print(printed), raising=False)  # noqa: T201


def test_the_cpu_always_runs() -> None:
    """Whatever else is there."""
    assert resolve_provider("cpu") == "cpu"


def test_an_unknown_provider_is_refused_with_those_that_are_known() -> None:
    """As users type them."""
    with pytest.raises(OptionError, match=r"'openvin' is not one of .* Did you mean 'openvino'\?"):
        resolve_provider("openvin")


@pytest.mark.parametrize(
    ("driver", "available", "reason"),
    [
        (Driver(0, 1), False, "was built without CUDA"),
        (None, True, "no NVIDIA driver"),
        (Driver(100, 1), True, "reports no device"),
        (Driver(0, 0), True, "reports no device"),
    ],
)
def test_what_cuda_lacks_is_said(
    monkeypatch: pytest.MonkeyPatch, driver: Driver | None, available: bool, reason: str
) -> None:
    """The wheel, the driver or the device; auto takes the CPU then, and cuda is an error."""
    _play(monkeypatch, driver, available=available)
    assert reason in cuda_problem()
    assert resolve_provider("auto") == "cpu"
    with pytest.raises(ProviderError, match=reason) as caught:
        resolve_provider("cuda")
    assert "--provider cpu" in caught.value.hint


def test_cuda_runs_where_a_session_starts_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """And auto takes it then; what onnxruntime prints on the way is not passed on."""
    _play(monkeypatch, Driver(0, 1))
    _sessions(monkeypatch, PROVIDERS["cuda"], printed="Failed to load libcufft.so")
    assert cuda_problem() == ""
    assert resolve_provider("auto") == resolve_provider("cuda") == "cuda"


@pytest.mark.parametrize(
    ("started", "printed", "reason"),
    [
        (PROVIDERS["cpu"], "hello\nFailed to load libcublas.so.13: no such file", "Failed to load libcublas.so.13"),
        (PROVIDERS["cpu"], "", "CUDA or cuDNN is missing, or of another version"),
        (RuntimeError("out of memory"), "", "does not start: out of memory"),
    ],
)
def test_a_device_without_its_libraries_does_not_stop_auto(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    started: str | Exception,
    printed: str,
    reason: str,
) -> None:
    """A session falls back in silence there (onnxruntime#23372); the library that is missing is named."""
    _play(monkeypatch, Driver(0, 1))
    _sessions(monkeypatch, started, printed)
    assert cuda_device_problem() == ""
    assert reason in cuda_problem()
    assert resolve_provider("auto") == "cpu"
    with pytest.raises(ProviderError, match="does not start"):
        resolve_provider("cuda")
    assert capsys.readouterr().out == ""


def test_every_provider_has_onnxruntimes_name() -> None:
    """The table is what options offer and sessions are given."""
    assert set(PROVIDERS.values()) - {"MLXExecutionProvider"} <= set(onnxruntime.get_all_providers())  # a plugin alone
    assert providers.PROVIDERS["cpu"] in onnxruntime.get_available_providers()
