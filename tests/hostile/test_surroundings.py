"""A small part of what scripts/fuzz_models.py runs: files, options, leftovers and environments that are hostile."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from tests.hostile.long_texts import ALL_KINDS as KINDS
from tests.hostile.running import Ended, run_command
from tests.workshop import Workshop

CASES = [
    ("tokenizer", 1),
    *(
        (kind, number)
        for kind in ("options", "leftovers", "environment")
        for number in range(3 - (kind == "leftovers"))
    ),
]


@pytest.mark.parametrize(("kind", "number"), CASES)
def test_what_is_around_a_model_ends_in_one_error_at_most(
    kind: str, number: int, workshop: Workshop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command ends with 0, 1 or 2 in time, with one error where it fails, and changes no file of others."""
    monkeypatch.setenv("ORT_DISABLE_TELEMETRY", "1")  # which writes into the home folder
    exported = workshop.exported("tiny-encoder")
    shutil.copytree(workshop.checkpoint("tiny-encoder"), tmp_path / "checkpoint")
    shutil.copy(exported, tmp_path / "checkpoint" / "model.onnx")
    case = KINDS[kind][0](tmp_path, random.Random(f"{kind} {number}"))  # noqa: S311
    assert not run_command(case, tmp_path).fault, case.damage


@pytest.mark.parametrize(
    ("ended", "fault"),
    [
        (Ended(0, 1.0, ""), ""),
        (Ended(1, 1.0, "2026-01-01 00:00:00 WARNING x: y\nerror: no\nhint: way out"), ""),
        (Ended(1, 1.0, ""), "ended with 1 and 0 errors"),
        (Ended(1, 1.0, "error: a\nerror: b"), "ended with 1 and 2 errors"),
        (Ended(0, 1.0, "error: a"), "ended with 0 and 1 errors"),
        (Ended(-11, 1.0, ""), "ended with -11"),
        (Ended(1, 1.0, "thread panicked\nerror: no"), "printed 'thread panicked' ahead of its error"),
        (Ended(1, 1.0, "error: no", changed="mine.txt"), "wrote or removed mine.txt"),
        (Ended(1, 1.0, "Traceback (most recent call last):"), "printed a traceback"),
        (Ended(1, 99.0, "error: no", is_late=True), "took more than its time: 99 s of the processor, or waited"),
        (Ended(1, 1.0, "", is_mute=True), ""),
        (Ended(1, 1.0, f"error: {'x' * 10_000}"), "wrote 10007 characters to stderr"),
    ],
)
def test_a_fault_is_named(ended: Ended, fault: str) -> None:
    """The judgement tells an end that a user can accept from one that none should see."""
    assert ended.fault == fault
