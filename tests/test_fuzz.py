"""The fuzzer of the commands finds what it is for, and a small part of it runs here; `make fuzz` runs all of it."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import onnx
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
from fuzzing.documents import TOKENIZER_PIECES, damage_document
from fuzzing.gadgets import GADGETS, splice
from fuzzing.mutations import MUTATIONS, Damage, damaged
from fuzzing.running import Ended
from fuzzing.seeds import by_hand

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "fuzz_models.py"


def choices(number: int) -> random.Random:
    """Return the choices of one case."""
    return random.Random(number)  # noqa: S311  a case, not a secret


def test_every_hostile_piece_and_every_damage_makes_a_file(tmp_path: Path) -> None:
    """Those that nobody could write would test nothing."""
    for name in GADGETS:
        model = by_hand()["mlp"]
        size = model.ByteSize()
        splice(model, name, "x", "h_")
        assert model.ByteSize() > size, name
    for name, damage in MUTATIONS.items():
        for number in range(3):
            model = by_hand()["function"]
            onnx.save(model, tmp_path / "seed.onnx")
            damage(Damage(model, choices(number), tmp_path, [tmp_path / "seed.onnx"]))
            assert model.SerializeToString(), name


def test_a_case_is_the_same_every_time(tmp_path: Path) -> None:
    """So that one which failed can be looked at."""
    onnx.save(by_hand()["if"], tmp_path / "seed.onnx")
    seeds = [tmp_path / "seed.onnx"]
    assert damaged(seeds, choices(7), tmp_path) == damaged(seeds, choices(7), tmp_path)
    assert damaged(seeds, choices(7), tmp_path) != damaged(seeds, choices(8), tmp_path)


def test_documents_are_damaged(tmp_path: Path) -> None:
    """A piece of a hostile tokenizer among them."""
    said = set()
    for number in range(40):
        (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}, "truncation": null}')
        said.add(damage_document(tmp_path, choices(number)))
    assert any(name in text for text in said for name in TOKENIZER_PIECES)
    assert "tokenizer.json: gone" in said


@pytest.mark.parametrize(
    ("code", "stderr", "fault"),
    [
        (0, "", ""),
        (1, "loading …\nerror: no\nhint: yes", ""),
        (-11, "", "ended with -11"),
        (1, "Traceback (most recent call last):\nValueError", "printed a traceback"),
        (1, "", "ended with 1 and 0 errors"),
        (0, "error: none", "ended with 0 and 1 errors"),
        (1, "error: a\nerror: b", "ended with 1 and 2 errors"),
    ],
)
def test_what_nobody_could_accept_is_a_fault(code: int, stderr: str, fault: str) -> None:
    """A signal, a traceback, a failure without a word, a success with one."""
    assert Ended(code, 0.1, stderr).fault == fault


@pytest.mark.skipif(sys.platform != "linux", reason="the fuzzer is for Linux")
def test_commands_end_with_one_error_on_a_few_damaged_models(tmp_path: Path) -> None:
    """Other ones than those of `make fuzz`, which begin with 0."""
    command = [sys.executable, str(SCRIPT), "--by_hand", "--work_dir", str(tmp_path)]
    counts = ["--models", "12", "--documents", "0", "--exports", "0", "--first", "100000", "--jobs", "1"]
    done = subprocess.run([*command, *counts], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| `optimize` | 12 |" in done.stdout
