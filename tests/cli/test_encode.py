"""`onnxtool encode` as users and schedulers run it."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from onnxtool.cli.encode import _merge_blocks
from onnxtool.cli.render import Facts, Heading, Table
from onnxtool.encoding.report import MergeReport
from tests.cli.entry_point import json_of, run_onnxtool
from tests.docs.documents import blocks
from tests.encoding.corpora import make_texts, sparse_model, write_corpus

pytestmark = pytest.mark.usefixtures("workers_here")
RECIPE = Path(__file__).resolve().parents[2] / "docs" / "recipes" / "cluster.md"
WHAT = ("--model_path", "models/tiny-splade.onnx", "--input", "corpus.jsonl", "--output", "vectors/")
STATUS = ("encode", "status", "--output", "vectors/", "--format", "json")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with what the recipe encodes, in three splits."""
    (tmp_path / "models").mkdir()
    model = sparse_model(tmp_path / "models")
    model.with_suffix("").rename(tmp_path / "models" / "tiny-splade")
    model.rename(tmp_path / "models" / "tiny-splade.onnx")
    corpus = write_corpus(tmp_path / "corpus.jsonl", make_texts(100))
    lines = f"split_bytes = {corpus.stat().st_size // 3 + 1}\nprovider = 'cpu'\n"
    (tmp_path / ".onnxtool.toml").write_text(f"[encode_part]\n{lines}")
    return tmp_path


def recipe_command(name: str) -> list[str]:
    """Return the words of the recipe's command that reads the variables of a scheduler."""
    for kind in ("sh", "yaml"):
        for block in blocks(RECIPE, kind):
            for line in block.text.splitlines():
                words = shlex.split(line.replace(",", " ").replace("[", " ").replace("]", " "), comments=True)
                if words[-1:] == [name] or f"--part {name}" in line:
                    return words[words.index("encode") :]
    raise AssertionError(name)


def test_the_jobs_of_a_slurm_array_do_all(folder: Path) -> None:
    """By the command of the recipe, which may be run twice; then all is merged."""
    array = {"SLURM_ARRAY_TASK_MIN": "1", "SLURM_ARRAY_TASK_COUNT": "2"}
    for task in ("2", "1", "2"):
        done = run_onnxtool(folder, *recipe_command("slurm"), **array, SLURM_ARRAY_TASK_ID=task)
        assert done.returncode == 0, done.stderr
    assert json_of(run_onnxtool(folder, *STATUS))["to_do"] == ""
    assert run_onnxtool(folder, "encode", "merge", "--output", "vectors/").returncode == 0
    assert json_of(run_onnxtool(folder, *STATUS))["merged"]


def test_the_pods_of_an_indexed_job_do_all(folder: Path) -> None:
    """There may be more of them than splits."""
    for pod in range(4):
        variables = {"JOB_COMPLETION_INDEX": str(pod), "JOB_COMPLETIONS": "4"}
        done = run_onnxtool(folder, *recipe_command("kubernetes"), **variables)
        assert done.returncode == 0, done.stderr
    assert json_of(run_onnxtool(folder, *STATUS))["num_done"] == 3


def test_missing_splits_and_variables_are_errors_with_a_way_out(folder: Path) -> None:
    """The splits are named as --splits takes them; a part is configured as every command, by a table or variables."""
    part = ("encode", "part", *WHAT, "--format", "json")
    assert json_of(run_onnxtool(folder, *part, ONNXTOOL_ENCODE_PART_SPLITS="2"))["splits"] == "2"
    merged = run_onnxtool(folder, "encode", "merge", "--output", "vectors/", "--quiet")
    assert (merged.returncode, merged.stderr) == (1, "splits to do: 0-1\n")
    for arguments, reason in (
        (("--part", "slurm"), "SLURM_ARRAY_TASK_ID is not set"),
        (("--splits", "0-9"), "there is no split 9"),
    ):
        failed = run_onnxtool(folder, *part, *arguments)
        assert (failed.returncode, reason in failed.stderr) == (1, True), failed.stderr
    assert json_of(run_onnxtool(folder, *part, "--splits", "0, 1-2"))["num_encoded_splits"] == 2


def test_merge_is_strict_where_that_is_asked(folder: Path) -> None:
    """An id that occurs twice is an error then, and else a rejected line."""
    (folder / "corpus.jsonl").write_text('{"id": "1", "contents": "a cat"}\n' * 2)
    assert run_onnxtool(folder, "encode", "part", *WHAT).returncode == 0
    merge = ("encode", "merge", "--output", "vectors/", "--format", "json")
    failed = run_onnxtool(folder, *merge, "--strict")
    assert (failed.returncode, "corpus.jsonl:2" in failed.stderr) == (1, True)
    assert json_of(run_onnxtool(folder, *merge))["num_rejects"] == 1


def test_merge_says_what_it_removed_and_what_it_cannot_merge() -> None:
    """Rejected lines come first; where splits are missing, their problems are all there is."""
    report = MergeReport("v", "v.manifest.json", 3, num_rejects=2, rejects_path="v.rejects.jsonl", num_removed=4)
    (facts,) = _merge_blocks(report)
    assert isinstance(facts, Facts)
    assert list(facts.rows[-2:]) == [
        ("Rejected lines", "2, in v.rejects.jsonl"),
        ("Removed", "4 files that workers left which were killed"),
    ]
    heading, table = _merge_blocks(replace(report, to_do="1", problems={"is missing": "1"}))
    assert heading == Heading("Splits that cannot be merged")
    assert table == Table(("problem", "splits"), [("is missing", "1")])
