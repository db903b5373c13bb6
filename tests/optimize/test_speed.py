"""A result is timed next to its input, and one that is slower is not handed out without a word."""

from __future__ import annotations

import json
import time
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from numpy.typing import NDArray

from onnxtool import OptimizeOptions, optimize_model
from onnxtool.errors import SessionError
from onnxtool.model_file import ModelFile
from onnxtool.optimize import speed
from onnxtool.runtime import session
from onnxtool.runtime.providers import ExecutionProvider
from onnxtool.runtime.running import Session
from tests.cli.entry_point import run_onnxtool
from tests.workshop import Workshop


@pytest.fixture
def model(workshop: Workshop) -> Path:
    return workshop.exported("tiny-encoder")


def slow(monkeypatch: pytest.MonkeyPatch, milliseconds: Mapping[str, float]) -> list[str]:
    """Let a run take so many milliseconds by the name of the file; the names that run are put into the list."""
    order: list[str] = []

    def time(session: Session, feeds: Mapping[str, NDArray[Any]], _clock: Callable[[], int]) -> float:
        order.append(session.model.path.name)
        session.run_unchecked(feeds)
        return milliseconds[session.model.path.name] * (1 + len(order) % 3 / 1000)

    monkeypatch.setattr(speed, "_time", time)
    return order


def test_both_files_run_in_turns_on_one_shape(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ratio lies in its interval, and what is faster is no warning."""
    order = slow(monkeypatch, {model.name: 20.0, "o.onnx": 10.0})
    report = optimize_model(OptimizeOptions(model, output=tmp_path / "o.onnx", verify=False))
    found = report.speed
    assert found is not None
    assert order == [model.name, "o.onnx"] * found.turns
    assert found.interval[0] <= found.ratio <= found.interval[1]
    assert found.ratio == pytest.approx(2.0, rel=0.01)
    assert [found.before_ms, found.after_ms] == pytest.approx([20.0, 10.0], rel=0.01)
    assert not found.slower
    assert (report.warning, report.not_timed) == ("", "")
    assert report.duration_ms["timing"] > 0


def test_of_large_files_one_session_is_closed_before_the_other_is_opened(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each holds its weights; the weights of both are mapped from their files."""
    monkeypatch.setattr(speed, "_LARGE_BYTES", 0)
    order = slow(monkeypatch, {model.name: 20.0, "o.onnx": 10.0})
    opened: list[weakref.ref[Session]] = []
    plain = session.open_plain

    def open_plain(path: ModelFile, provider: ExecutionProvider) -> Session:
        assert all(reference() is None for reference in opened)
        found = plain(path, provider)
        opened.append(weakref.ref(found))
        return found

    monkeypatch.setattr(speed, "open_plain", open_plain)
    found = optimize_model(OptimizeOptions(model, output=tmp_path / "o.onnx", verify=False)).speed
    assert found is not None
    assert order == [model.name] * found.turns + ["o.onnx"] * found.turns
    assert len(opened) == 2
    assert found.ratio == pytest.approx(2.0, rel=0.01)


@pytest.mark.parametrize(("milliseconds", "warned"), [(10.4, True), (10.1, False)], ids=["slower", "noise"])
def test_a_slower_result_is_kept_with_a_warning(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, milliseconds: float, warned: bool
) -> None:
    """On stderr as well, in every format; a difference of less than 2 % is noise."""
    slow(monkeypatch, {model.name: 10.0, "o.onnx": milliseconds})
    options = ("--output", tmp_path / "o.onnx", "--no_verify", "--quiet")
    done = run_onnxtool(tmp_path, "optimize", "--model_path", model, *options, "--format", "json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["speed"]["slower"] is warned
    assert ("warning: the result is slower than its input here: 0.96 times as fast" in done.stderr) is warned
    assert (tmp_path / "o.onnx").exists()
    text = run_onnxtool(tmp_path, "optimize", "--model_path", model, *options, "--force").stdout
    assert "\nSpeed: 0.9" in text
    assert ("note: the result is slower than its input here" in text) is warned


@pytest.mark.parametrize(("provider", "alike"), [("openvino", True), ("openvino:GPU", False)])
def test_the_same_clock_times_both_files(
    model: Path, monkeypatch: pytest.MonkeyPatch, provider: str, alike: bool
) -> None:
    """CPU time of one beside wall time of the other would make a busy machine slow down the other alone."""
    plain = session.open_plain

    def open_waiting(path: Path, asked: ExecutionProvider) -> Session:
        opened = plain(path, ExecutionProvider.parse("cpu"))
        run, waits = opened.run_unchecked, not asked.row.is_reference

        def run_unchecked(feeds: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
            time.sleep(0.05 * waits)  # what a process does that another one keeps from the cores
            return run(feeds)

        return cast("Session", SimpleNamespace(run_unchecked=run_unchecked))

    monkeypatch.setattr(speed, "open_plain", open_waiting)
    found = speed.compare_speed(ModelFile.open(model), ModelFile.open(model), ExecutionProvider.parse(provider))
    assert (found.after_ms < 50) is alike


def test_a_file_that_cannot_be_timed_is_no_error(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report says why; with --no_timing nothing is timed, and nothing said."""

    def refuse(*_: object) -> float:
        raise SessionError("no memory", "close something")

    monkeypatch.setattr(speed, "_time", refuse)
    options = OptimizeOptions(model, output=tmp_path / "o.onnx", verify=False, force=True)
    report = optimize_model(options)
    assert (report.speed, report.not_timed, report.warning) == (None, "no memory", "")
    command = ("optimize", "--model_path", model, "--output", "o.onnx", "--no_verify", "--force", "--quiet")
    assert "\nnote: not timed: no memory\n" in run_onnxtool(tmp_path, *command).stdout
    left_out = run_onnxtool(tmp_path, *command, "--no_timing").stdout
    assert "timed" not in left_out
    assert "Speed" not in left_out
