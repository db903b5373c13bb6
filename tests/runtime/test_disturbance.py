"""What other processes take is read from the system's accounts, and not made up where there are none."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import onnxtool.runtime.disturbance as disturbance
from onnxtool.runtime.device_memory import device_memory
from onnxtool.runtime.disturbance import (
    count_preemptions,
    load_average,
    processor_times,
    stolen_share,
    throttlings,
    waiting_clock,
)
from onnxtool.runtime.kernel import ReferenceKernel
from onnxtool.runtime.machine import installed_versions, processor_name

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="Linux keeps these accounts")


def _spin(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def _crowd(core: int, seconds: float) -> None:
    os.sched_setaffinity(0, {core})
    _spin(seconds)


@linux_only
def test_waiting_for_a_core_that_another_process_has_is_counted() -> None:
    """Two processes on one core: while one computes, the other waits, and it is made to leave the core."""
    cores = os.sched_getaffinity(0)
    other = multiprocessing.get_context("spawn").Process(target=_crowd, args=(min(cores), 20.0))
    other.start()
    try:
        os.sched_setaffinity(0, {min(cores)})
        with waiting_clock() as waited_ns:
            assert waited_ns is not None
            before, leaves = waited_ns(), count_preemptions()
            end = time.perf_counter() + 15.0
            while waited_ns() - before < 50e6 and time.perf_counter() < end:
                _spin(0.05)
            assert waited_ns() - before >= 50e6
            assert count_preemptions() > leaves
    finally:
        os.sched_setaffinity(0, cores)
        other.kill()
        other.join()


def test_a_system_without_the_account_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """None is not zero."""
    monkeypatch.setattr(disturbance, "_THREADS", tmp_path / "missing")
    with waiting_clock() as waited_ns:
        assert waited_ns is None
    monkeypatch.delattr(os, "getloadavg")
    assert load_average() is None


def test_throttling_is_read_where_the_system_counts_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A container's quota and the cores' heat; nothing where there are no such files, or other ones."""
    monkeypatch.setattr(disturbance, "_CONTROL_GROUP", tmp_path / "cpu.stat")
    monkeypatch.setattr(disturbance, "_PROCESSORS", tmp_path)
    assert throttlings() == {}
    assert disturbance.clock_share() is None
    (tmp_path / "cpu.stat").write_text("usage_usec 5\nnr_periods 9\nnr_throttled 7\n")
    for core, count in (("cpu0", 2), ("cpu1", 3)):
        (tmp_path / core / "thermal_throttle").mkdir(parents=True)
        (tmp_path / core / "thermal_throttle" / "core_throttle_count").write_text(f"{count}\n")
        (tmp_path / core / "cpufreq").mkdir()
        (tmp_path / core / "cpufreq" / "scaling_cur_freq").write_text("1500000\n")
        (tmp_path / core / "cpufreq" / "cpuinfo_max_freq").write_text("3000000\n")
    assert throttlings() == {"quota": 7, "heat": 5}
    assert disturbance.clock_share() == pytest.approx(0.5)
    (tmp_path / "cpu.stat").write_text("nr_throttled many\n")
    assert throttlings() == {"heat": 5}


def test_the_stolen_share_is_a_part_of_all_ticks() -> None:
    """Between two readings; of none, nothing was stolen."""
    assert stolen_share((10, 1000), (60, 2000)) == pytest.approx(0.05)
    assert stolen_share((0, 0), (0, 0)) == 0.0
    stolen, total = processor_times()
    assert 0 <= stolen <= total


def test_the_kernel_takes_longer_for_more_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten times the products are at least three times the processor time."""
    few = np.median([ReferenceKernel().time_ms() for _ in range(5)])
    monkeypatch.setattr("onnxtool.runtime.kernel._PRODUCTS", 1280)
    monkeypatch.setattr("onnxtool.runtime.kernel._FUNCTIONS", 300)
    many = np.median([ReferenceKernel().time_ms() for _ in range(3)])
    assert 0 < 3 * few < many


def test_the_machine_has_a_name_and_versions() -> None:
    """They stand in every report, so that two can be told to be of one machine."""
    assert processor_name()
    assert installed_versions()["numpy"] == np.__version__
    assert "onnxtool" in installed_versions()


def test_without_nvml_there_is_no_device_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is invented where no device is."""

    def missing(_name: str) -> None:
        raise OSError("no such library")

    monkeypatch.setattr("ctypes.CDLL", missing)
    assert device_memory() is None
