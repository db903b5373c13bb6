"""`onnxtool encode` as users and schedulers run it."""

from __future__ import annotations

import os
import subprocess
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


@pytest.mark.parametrize(
    ("kind", "variable", "count"), [("sh", "SLURM_ARRAY_TASK_ID", 2), ("yaml", "JOB_COMPLETION_INDEX", 16)]
)
def test_the_jobs_of_an_array_do_all(folder: Path, kind: str, variable: str, count: int) -> None:
    """By the recipe's commands, which may be run twice, and there may be more jobs than splits; then all is merged."""
    (command,) = [
        line.split("sh, -c, ")[-1].strip('"[] ')
        for block in blocks(RECIPE, kind)
        for line in block.text.splitlines()
        if variable in line
    ]
    for job in (*range(1, count), 0, 1):
        variables = {**os.environ, variable: str(job), "SLURM_ARRAY_TASK_COUNT": str(count)}
        part = subprocess.check_output(["sh", "-c", f"echo {command}"], env=variables, text=True).split()
        done = run_onnxtool(folder, *part[1:])
        assert done.returncode == 0, done.stderr
    assert json_of(run_onnxtool(folder, *STATUS))["to_do"] == ""
    assert run_onnxtool(folder, "encode", "merge", "--output", "vectors/").returncode == 0
    assert json_of(run_onnxtool(folder, *STATUS))["merged"]


def test_missing_splits_and_variables_are_errors_with_a_way_out(folder: Path) -> None:
    """The splits are named as --splits takes them; a part is configured as every command, by a table or variables."""
    part = ("encode", "part", *WHAT, "--format", "json")
    assert json_of(run_onnxtool(folder, *part, ONNXTOOL_ENCODE_PART_SPLITS="2"))["splits"] == "2"
    merged = run_onnxtool(folder, "encode", "merge", "--output", "vectors/", "--quiet")
    assert (merged.returncode, merged.stderr) == (1, "splits to do: 0-1\n")
    for arguments, code, reason in (
        (("--part", "17/16"), 2, "is not a part"),
        (("--splits", "0-9"), 1, "there is no split 9"),
    ):
        failed = run_onnxtool(folder, *part, *arguments)
        assert (failed.returncode, reason in failed.stderr) == (code, True), failed.stderr
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
