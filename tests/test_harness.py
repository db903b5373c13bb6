"""The harness of the benchmarks: processes that are measured, and workers that take turns."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

from harness.machine import CLASSES, cpu_class, describe_machine
from harness.processes import Usage, measure, measure_in_turns, median
from harness.workers import Worker, median_step_ms, take_turns

SERVE = "from harness.workers import serve; print('a library says hello'); serve(lambda number: number + 1, [7])"
STEPS = "from harness.workers import serve_steps; serve_steps(lambda: print('noise'))"


def worker(code: str, name: str = "one") -> Worker:
    return Worker.start(name, [sys.executable, "-c", code], quiet=True)


def test_a_worker_answers_requests_past_what_libraries_print() -> None:
    """Only the greeting and the answers count."""
    one = worker(SERVE)
    assert one.greeting == [7]
    assert [one.ask(1), one.ask(5, keep=True)] == [2, 6]
    assert one.answers == [6]
    one.stop()
    assert one.process.returncode == 0


def test_workers_take_turns_and_drop_the_first_step_of_a_block() -> None:
    """It finds the caches as another worker left them."""
    found = take_turns([partial(worker, STEPS, name) for name in ("one", "other")], blocks=2, steps=3)
    assert [len(block) for one in found for block in one.answers] == [3, 3, 3, 3]
    wall, processor = median_step_ms(found[0])
    assert wall > 0
    assert processor >= 0


def test_a_worker_that_ends_is_named() -> None:
    """Its own words are on standard error."""
    with pytest.raises(SystemExit, match="the process of broken ended"):
        worker("raise SystemExit(3)", "broken")


def test_processes_are_measured_in_turns() -> None:
    """Wall and processor seconds, and the peak of memory in MB."""
    busy = [sys.executable, "-c", "x = bytearray(60_000_000); sum(range(300_000))"]
    usages = measure_in_turns({"busy": busy, "idle": [sys.executable, "-S", "-c", ""]}, rounds=2)
    assert {name: len(found) for name, found in usages.items()} == {"busy": 2, "idle": 2}
    assert median(usages["busy"]).peak_mb > median(usages["idle"]).peak_mb + 40
    assert median([Usage(1, 2, 3), Usage(5, 6, 7), Usage(9, 10, 11)]) == Usage(5, 6, 7)


def test_a_command_that_fails_is_not_measured() -> None:
    """Its error is printed."""
    with pytest.raises(SystemExit, match="no such thing"):
        measure([sys.executable, "-c", "raise RuntimeError('no such thing')"])


def test_the_best_class_of_a_processor_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor with AMX has AVX2 as well."""
    listed = "flags\t: fpu avx2 avx512f avx512_vnni amx_int8\n"
    monkeypatch.setattr(Path, "read_text", lambda *_arguments, **_options: listed)
    assert cpu_class() == "AMX"
    assert list(CLASSES.values()).index("AMX") == 0
    assert describe_machine(2).startswith("AMX, ")
    assert ", 2 threads each" in describe_machine(2)
