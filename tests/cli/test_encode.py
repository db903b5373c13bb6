"""`onnxtool encode` as users and schedulers run it."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.cli.entry_point import json_of, run_onnxtool
from tests.docs.documents import blocks
from tests.encoding.corpora import dense_model, make_texts, write_corpus

RECIPE = Path(__file__).resolve().parents[2] / "docs" / "recipes" / "cluster.md"
STATUS = ("encode", "status", "--plan", "vectors.plan.json", "--format", "json")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a plan of three shards."""
    model, corpus = dense_model(tmp_path), write_corpus(tmp_path / "corpus.jsonl", make_texts(100))
    planned = ("--input", corpus, "--output", "vectors/", "--shard_size", "40", "--provider", "cpu")
    report = json_of(run_onnxtool(tmp_path, "encode", "plan", "--model_path", model, *planned, "--format", "json"))
    assert (report["num_shards"], report["num_texts"], report["plan"]) == (3, 100, "vectors.plan.json")
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
    assert run_onnxtool(folder, "encode", "merge", "--plan", "vectors.plan.json").returncode == 0
    assert json_of(run_onnxtool(folder, *STATUS))["merged"]


def test_the_pods_of_an_indexed_job_do_all(folder: Path) -> None:
    """There may be more of them than shards."""
    for pod in range(5):
        variables = {"JOB_COMPLETION_INDEX": str(pod), "JOB_COMPLETIONS": "5"}
        assert run_onnxtool(folder, *recipe_command("kubernetes"), **variables).returncode == 0
    assert json_of(run_onnxtool(folder, *STATUS))["num_done"] == 3


def test_missing_shards_and_variables_are_errors_with_a_way_out(folder: Path) -> None:
    """The shards are named as --shards takes them."""
    merged = run_onnxtool(folder, "encode", "merge", "--plan", "vectors.plan.json", "--quiet")
    assert (merged.returncode, merged.stderr) == (1, "shards to do: 0-2\n")
    part = ("encode", "part", "--plan", "vectors.plan.json")
    alone = run_onnxtool(folder, *part, "--part", "slurm")
    assert alone.returncode == 1
    assert "SLURM_ARRAY_TASK_ID is not set" in alone.stderr
    assert run_onnxtool(folder, *part, "--shards", "0-9").returncode == 1
    assert run_onnxtool(folder, *part, "--part", "1/2", "--shards", "0").returncode == 1
    again = run_onnxtool(folder, *part, "--shards", "0, 1-2", "--output", "report.json", "--format", "json", "--quiet")
    assert (again.returncode, again.stdout) == (0, "")
    assert run_onnxtool(folder, *part, "--output", "report.json").returncode == 1


def test_a_part_is_configured_as_every_command(folder: Path) -> None:
    """By a table of its own, or its variables."""
    (folder / ".onnxtool.toml").write_text("[encode_part]\nshards = '1'\n")
    part = ("encode", "part", "--plan", "vectors.plan.json", "--format", "json")
    assert json_of(run_onnxtool(folder, *part))["shards"] == "1"
    assert json_of(run_onnxtool(folder, *part, ONNXTOOL_ENCODE_PART_SHARDS="2"))["shards"] == "2"
