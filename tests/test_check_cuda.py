"""scripts/check_cuda.py: its dry run on the CPU, and the steps that it is made of."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from tests.cli.entry_point import json_of, run_onnxtool
from tests.workshop import SCRIPTS, load_script, make_shallow

check_cuda, cuda_steps = load_script("check_cuda"), load_script("cuda_steps")
isolation, steps = load_script("harness.isolation"), load_script("harness.steps")
pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there are no groups of processes to kill")
# Steps a, b and c, of which c needs b; each writes a line to runs.txt, and does what its argument says.
SCRIPT = """
import os, sys, time
from functools import partial
from pathlib import Path

from harness.steps import Result, Step, print_tables, problems_of, run_steps

work, words = Path(sys.argv[1]), sys.argv[2:5]


def act(name, word):
    with (work / "runs.txt").open("a") as runs:
        runs.write(name)
    if word == "sleep":
        time.sleep(60)
    if word == "crash":
        print("what it says", flush=True)
        os._exit(7)
    result = Result()
    result.row(name)
    result.check("error", float(word), 0.5)
    return result


a, b, c = (partial(act, name, word) for name, word in zip("abc", words))
steps = [Step("a", "t", a), Step("b", "t", b), Step("c", "t", c, needs=("b",))]
if __name__ == "__main__":
    outcomes = run_steps(steps, work, minutes=float(sys.argv[5]))
    print_tables(outcomes)
    print(*problems_of(outcomes), sep="\\n")
"""


def run_script(work: Path, *words: str, minutes: str = "1") -> str:
    """Run steps that act like this; return what is printed, and before it the steps that ran."""
    script = work / "script.py"
    script.write_text(SCRIPT, "utf-8")
    runs = work / "runs.txt"
    runs.write_text("", "utf-8")
    command = [sys.executable, "-S", str(script), str(work), *words, minutes]
    variables = {**os.environ, "PYTHONPATH": str(SCRIPTS)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=variables)
    return f"{runs.read_text('utf-8')}: {done.stdout}"


def test_a_number_beyond_its_bound_is_named(tmp_path: Path) -> None:
    """So is NaN; steps that need a wrong one run."""
    printed = run_script(tmp_path, "0.25", "0.75", "nan")
    assert printed.startswith("abc: ")
    assert "\nb: b: error is 0.75, at most 0.5 is allowed\n" in printed
    assert "\nc: c: error is nan, at most 0.5 is allowed\n" in printed
    assert "| b | 0.75 (≤ 0.5) |" in printed


def test_a_crash_leaves_no_result(tmp_path: Path) -> None:
    """The others run, except what needs its files."""
    printed = run_script(tmp_path, "0", "crash", "0")
    assert printed.startswith("ab: ")
    assert "b: failed with exit code 7" in printed
    assert "what it says" in printed
    assert "c: not run: it needs b" in printed


def test_the_time_is_over(tmp_path: Path) -> None:
    """The step that runs is killed, and later ones are listed."""
    printed = run_script(tmp_path, "sleep", "0", "0", minutes="0.01")
    assert printed.startswith("a: ")
    assert "a: cut off after 1 s" in printed
    assert "b: not run: the time is over" in printed


def test_a_missing_gpu_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says what is missing, and nothing is written."""
    monkeypatch.setattr(check_cuda, "cuda_problem", lambda: "no NVIDIA driver")
    assert check_cuda.main(["--work", str(tmp_path / "work")]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines() == [
        "error: no GPU to check: no NVIDIA driver",
        "hint: --device cpu runs the steps without one",
    ]
    assert not (tmp_path / "work").exists()


@pytest.fixture
def one_process(tmp_path: Path, minilm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each step, and its commands, in this process: one of their own imports PyTorch. MiniLM has fewer words."""

    class Here:
        def run(self, step: Callable[..., Any], _log: Path, _time_s: float, *arguments: Any) -> Any:
            return isolation.Outcome(0, step(*arguments), "", "", 0.0)

    def run_command(*words: object) -> dict[str, Any]:
        given = [*map(str, words)]
        if "--duration" in given:  # no latency is compared here
            given[given.index("--duration") + 1] = "0.1"
        return json_of(run_onnxtool(tmp_path, *given, "--format", "json", "--quiet"))

    small = make_shallow(minilm, tmp_path / "small", layers=1, words=4_000)
    monkeypatch.setattr(cuda_steps, "trained_model", lambda: small)
    monkeypatch.setattr(steps, "Isolation", Here)
    monkeypatch.setattr(cuda_steps, "onnxtool", run_command)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")


@pytest.mark.slow
@pytest.mark.usefixtures("one_process")
@pytest.mark.filterwarnings("ignore")  # of PyTorch and transformers, as the script does
def test_the_dry_run_passes_and_finds_a_damaged_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The damaged file is found by comparing its vectors with PyTorch's."""
    assert check_cuda.main(["--work", str(tmp_path), "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "\n10 steps, 0 problems" in printed
    for table in ("pytorch", "export", "optimize", "infer", "benchmark", "corpus", "compiled", "trainer", "artifacts"):
        assert f"### {table}\n" in printed
    assert "- bf16: left out, CPUs compute in float32" in printed

    damage(tmp_path / "optimized-fp32.onnx")
    result = cuda_steps.infer(cuda_steps.Run(tmp_path, "cpu"), "fp32")
    assert [problem.partition(" is ")[0] for problem in result.wrong] == [
        "optimized-fp32: 1 - cosine",
        "optimized-fp32: max error",
    ]


def damage(file: Path) -> None:
    """Change one weight matrix by a hundredth."""
    model = onnx.load(file)
    weight = next(one for one in model.graph.initializer if list(one.dims) == [384, 1536])
    array = numpy_helper.to_array(weight)
    noise = np.random.default_rng(0).normal(0, 0.01 * array.std(), array.shape)
    weight.CopyFrom(numpy_helper.from_array((array + noise).astype(array.dtype), weight.name))
    onnx.save(model, file)
