"""scripts/check_cuda.py: its dry run on the CPU, and the steps that it is made of."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
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

work, stamp, words = Path(sys.argv[1]), {"version": sys.argv[2]}, sys.argv[3:6]


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
    outcomes = run_steps(steps, work, stamp, again=sys.argv[7:], minutes=float(sys.argv[6]))
    print_tables(outcomes)
    print(*problems_of(outcomes), sep="\\n")
"""


def run_script(work: Path, *words: str, version: str = "1", minutes: str = "1", again: Sequence[str] = ()) -> str:
    """Run steps that act like this; return what is printed, and before it the steps that ran."""
    script = work / "script.py"
    script.write_text(SCRIPT, "utf-8")
    runs = work / "runs.txt"
    runs.write_text("", "utf-8")
    command = [sys.executable, "-S", str(script), str(work), version, *words, minutes, *again]
    variables = {**os.environ, "PYTHONPATH": str(SCRIPTS)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=variables)
    return f"{runs.read_text('utf-8')}: {done.stdout}"


def test_finished_steps_are_kept(tmp_path: Path) -> None:
    """Until a stamp differs, or one is asked for again, with those that need it."""
    assert run_script(tmp_path, "0", "0", "0").startswith("abc: ")
    assert run_script(tmp_path, "0", "0", "0").startswith(": ")
    assert run_script(tmp_path, "0", "0", "0", again=["b"]).startswith("bc: ")
    assert run_script(tmp_path, "0", "0", "0", again=["t"]).startswith("abc: ")
    assert run_script(tmp_path, "0", "0", "0", version="2").startswith("abc: ")


def test_a_number_beyond_its_bound_is_named_until_it_is_computed_again(tmp_path: Path) -> None:
    """So is NaN; steps that need a wrong one run."""
    for _ in range(2):
        printed = run_script(tmp_path, "0.25", "0.75", "nan")
        assert "\nb: b: error is 0.75, at most 0.5 is allowed\n" in printed
        assert "\nc: c: error is nan, at most 0.5 is allowed\n" in printed
    assert "| b | 0.75 (≤ 0.5) |" in printed
    assert printed.startswith(": ")


def test_a_crash_leaves_no_result(tmp_path: Path) -> None:
    """The others run, except what needs its files; the next run repeats it."""
    printed = run_script(tmp_path, "0", "crash", "0")
    assert printed.startswith("ab: ")
    assert "b: failed with exit code 7" in printed
    assert "what it says" in printed
    assert "c: not run: it needs b" in printed
    assert run_script(tmp_path, "0", "0", "0").startswith("bc: ")


def test_an_interrupted_run_leaves_no_result_from_replaced_files(tmp_path: Path) -> None:
    """Here c read the files of an earlier b than the one that ran last."""
    run_script(tmp_path, "0", "0", "0")
    run_script(tmp_path, "0", "0", "sleep", minutes="0.01", again=["b"])
    assert run_script(tmp_path, "0", "0", "0").startswith("c: ")


def test_the_time_is_over(tmp_path: Path) -> None:
    """The step that runs is killed, and later ones are listed."""
    printed = run_script(tmp_path, "sleep", "0", "0", minutes="0.01")
    assert printed.startswith("a: ")
    assert "a: cut off after 1 s" in printed
    assert "b: not run: the time is over" in printed
    assert not list(tmp_path.glob("*.json"))
    assert not list(tmp_path.glob("*.partial"))


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
        return json_of(run_onnxtool(tmp_path, *map(str, words), "--format", "json", "--quiet"))

    small = make_shallow(minilm, tmp_path / "small", layers=1, words=4_000)
    monkeypatch.setattr(cuda_steps, "trained_model", lambda: small)
    monkeypatch.setattr(steps, "Isolation", Here)
    monkeypatch.setattr(cuda_steps, "onnxtool", run_command)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")


@pytest.mark.slow
@pytest.mark.usefixtures("one_process")
@pytest.mark.filterwarnings("ignore")  # of PyTorch and transformers, as the script does
def test_the_dry_run_passes_and_continues_and_finds_a_damaged_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The damaged file is found by comparing its vectors with PyTorch's, and by nothing else: no other step runs."""
    words = ["--work", str(tmp_path), "--device", "cpu"]
    assert check_cuda.main(words) == 0
    printed = capsys.readouterr().out
    assert "\n11 steps, 0 problems" in printed
    for table in ("pytorch", "export", "optimize", "infer", "benchmark", "corpus", "compiled", "trainer", "artifacts"):
        assert f"### {table}\n" in printed
    assert "- bf16: left out, CPUs compute in float32" in printed

    results = {path: path.read_bytes() for path in (tmp_path / "results").glob("*.json")}
    damaged = tmp_path / "results" / "infer-fp32.json"
    assert len(results) == 11
    damage(tmp_path / "optimized-fp32.onnx")
    # In this process as well: results depend on the packages that a process finds, which other tests add to.
    assert check_cuda.main([*words, "--again", "infer-fp32"]) == 1
    wrong = capsys.readouterr()
    assert "WRONG infer-fp32: optimized-fp32: 1 - cosine is" in wrong.out
    assert "at most 1e-06 is allowed" in wrong.out
    assert wrong.err.count(": ok, kept\n") == 10
    assert json.loads(damaged.read_text("utf-8"))["result"]["wrong"]
    assert all(path.read_bytes() == result for path, result in results.items() if path != damaged)


def damage(file: Path) -> None:
    """Change one weight matrix by a hundredth."""
    model = onnx.load(file)
    weight = next(one for one in model.graph.initializer if list(one.dims) == [384, 1536])
    array = numpy_helper.to_array(weight)
    noise = np.random.default_rng(0).normal(0, 0.01 * array.std(), array.shape)
    weight.CopyFrom(numpy_helper.from_array((array + noise).astype(array.dtype), weight.name))
    onnx.save(model, file)
