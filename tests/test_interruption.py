"""Whatever stops a command, what was there stays whole and no half file remains."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from onnxtool import interruption
from onnxtool.model_file import staged
from tests.workshop import Workshop

if sys.platform == "win32":
    pytest.skip("signals of POSIX", allow_module_level=True)


def optimize(path: Path) -> subprocess.Popen[str]:
    """Start `onnxtool optimize --force`."""
    command = [sys.executable, "-m", "onnxtool", "optimize", "--model_path", str(path), "--force"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def exported(workshop: Workshop, tmp_path: Path) -> Path:
    """A file to optimize, and an earlier result beside it."""
    (tmp_path / "m-optimized.onnx").write_text("the earlier result")
    return Path(shutil.copy(workshop.exported("tiny-splade", exporter="torchscript"), tmp_path / "m.onnx"))


def assert_untouched(exported: Path) -> None:
    assert sorted(path.name for path in exported.parent.iterdir()) == ["m-optimized.onnx", "m.onnx"]
    assert exported.with_name("m-optimized.onnx").read_text() == "the earlier result"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "terminate"])
def test_an_interrupted_command_leaves_the_earlier_result(exported: Path, number: signal.Signals, code: int) -> None:
    """The signal arrives while the staged file is there."""
    process = optimize(exported)
    deadline = time.monotonic() + 60
    while not any(".partial" in path.name for path in exported.parent.iterdir()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.001)
    os.kill(process.pid, number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == code
    assert "Traceback" not in stderr
    assert_untouched(exported)


def test_an_interruption_that_a_library_swallows_is_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Destructors print exceptions and go on; the earlier result stays all the same."""
    monkeypatch.setattr(interruption, "_asked", [])
    output = tmp_path / "m.onnx"
    output.write_text("the earlier result")

    def write() -> None:
        with staged(output, force=True) as staging:
            with contextlib.suppress(KeyboardInterrupt):
                interruption.stop(KeyboardInterrupt())
            staging.model_path.write_text("a later one")

    with pytest.raises(KeyboardInterrupt):
        write()
    assert output.read_text() == "the earlier result"
    assert list(tmp_path.iterdir()) == [output]


@pytest.mark.skipif(sys.platform != "linux", reason="commands are supervised on Linux")
def test_what_is_told_of_staged_files_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A corpus stages files as long as it runs; those that are there still are not forgotten."""
    monkeypatch.setattr(interruption, "_staged", [])
    interruption.share_staged()
    (descriptor,) = interruption._staged
    (tmp_path / "kept").mkdir()
    interruption.tell_staged(tmp_path / "kept")
    for number in range(3_000):
        interruption.tell_staged(tmp_path / f"gone-{number}")
    assert os.fstat(descriptor).st_size < 1 << 17
    assert {tmp_path / "kept", tmp_path / "gone-2999"} <= interruption.told_staged()
    os.close(descriptor)
