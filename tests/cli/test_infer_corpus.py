"""`onnxtool infer` into a folder, from its entry point: exit codes, stdout, stderr and files."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.cli.entry_point import run_onnxtool
from tests.encoding.corpora import expected_terms, lines_of, make_texts, sparse_model, write_corpus

TEXTS = make_texts(50)


def _run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    options = ("--model_path", "model.onnx", "--provider", "cpu", *arguments)
    return run_onnxtool(folder, "infer", *options, HF_HUB_OFFLINE="1", PYTHONWARNINGS="error")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a sparse encoder and a corpus."""
    sparse_model(tmp_path)
    write_corpus(tmp_path / "corpus.jsonl.gz", TEXTS)
    return tmp_path


def test_an_output_with_a_separator_at_its_end_gets_vectors(folder: Path) -> None:
    """The report is on stdout, progress on stderr."""
    process = _run(folder, "--input", "corpus.jsonl.gz", "--output", "vectors/")
    assert process.returncode == 0, process.stderr
    assert [line["vector"] for line in lines_of(folder / "vectors")] == [expected_terms(text) for text in TEXTS]
    lines = process.stdout.splitlines()
    assert lines[:3] == ["Model: model.onnx", "Task: sparse-encoding", "Provider: cpu"]
    assert "Texts: 50" in lines
    assert "Manifest: vectors.manifest.json" in lines
    assert re.search(r"^encoding: [0-9]+ texts, [0-9.]+ texts/s \([0-9]+%\) …$", process.stderr, re.MULTILINE)


def test_an_output_that_is_a_folder_gets_vectors(folder: Path) -> None:
    """Also written without a separator, as when a run goes on; JSON is one document."""
    (folder / "vectors").mkdir()
    options = ("--input", "corpus.jsonl.gz", "--output", "vectors", "--format", "json", "--quiet")
    first, again = (_run(folder, *options) for _ in range(2))
    assert first.stderr == again.stderr == ""
    assert (json.loads(first.stdout)["num_encoded"], json.loads(again.stdout)["num_encoded"]) == (50, 0)
    assert json.loads(again.stdout)["resumed"]


def test_an_output_that_is_a_file_gets_answers_as_ever(folder: Path) -> None:
    """Its name needs no suffix."""
    write_corpus(folder / "corpus.jsonl", TEXTS[:3])
    process = _run(folder, "--input", "corpus.jsonl", "--output", "answers")
    assert process.returncode == 0, process.stderr
    assert (folder / "answers").read_text().startswith("Model: model.onnx\nTask: sparse-encoding")


@pytest.mark.usefixtures("workers_here")
def test_the_folder_of_a_test_collection_means_its_documents(folder: Path) -> None:
    """For vectors, in parts of them, in a dry run and for answers; its queries are no documents."""
    data = folder / "data"
    (data / "qrels").mkdir(parents=True)
    write_corpus(data / "corpus.jsonl", TEXTS[:3])
    write_corpus(data / "queries.jsonl", TEXTS[3:5])
    (data / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\nd0\td1\t1\n")
    note = "2 files or folders in the collection's folder are not read, such as queries.jsonl: it is a test collection"
    part = ("encode", "part", "--model_path", "model.onnx", "--input", "data", "--output", "parts/")
    for process in (
        _run(folder, "--input", "data", "--output", "vectors/", "--dry_run"),
        _run(folder, "--input", "data", "--output", "vectors/"),
        run_onnxtool(folder, *part, "--provider", "cpu"),
    ):
        assert process.returncode == 0, process.stderr
        assert note in process.stdout
    assert run_onnxtool(folder, "encode", "merge", "--output", "parts/").returncode == 0
    for name in ("vectors", "parts"):
        assert [line["vector"] for line in lines_of(folder / name)] == [expected_terms(text) for text in TEXTS[:3]]
    answers = _run(folder, "--input", "data", "--format", "json")
    assert [answer["id"] for answer in json.loads(answers.stdout)["answers"]] == ["d0", "d1", "d2"]


def test_options_reach_the_run(folder: Path) -> None:
    """Each by what it changes."""
    options = ("--weights", "float", "--no_contents", "--shard_size", "20", "--workers", "1")
    extra = ("--keep_special", "--batch_tokens", "64", "--quiet", "--format", "markdown")
    process = _run(folder, "--input", "corpus.jsonl.gz", "--output", "v/", *options, *extra)
    assert process.returncode == 0, process.stderr
    assert sorted(path.name for path in (folder / "v").iterdir()) == [
        f"part-00000{shard}.jsonl" for shard in ("", "_00001", "_00002")
    ]
    chosen = json.loads((folder / "v.manifest.json").read_text())["identity"]["options"]
    assert chosen["weights"] == "float"
    assert (chosen["contents"], chosen["keep_special"]) == (False, True)
    assert (chosen["shard_size"], chosen["batch_tokens"]) == (20, 64)
    assert "- Workers: 1 of 1 threads each" in process.stdout


def test_rejected_lines_are_counted_and_do_not_fail_the_run(folder: Path) -> None:
    """They are in a table and in a file; with --strict the first one fails it."""
    (folder / "corpus.jsonl").write_text('{"id": "1", "contents": "a cat"}\n{"id": "1", "contents": "again"}\n{\n')
    process = _run(folder, "--input", "corpus.jsonl", "--output", "vectors/")
    assert process.returncode == 0
    assert "Rejected lines, in vectors.rejects.jsonl:" in process.stdout
    assert len((folder / "vectors.rejects.jsonl").read_text().splitlines()) == 2
    strict = _run(folder, "--input", "corpus.jsonl", "--output", "other/", "--strict")
    assert strict.returncode == 1
    assert "error: corpus.jsonl:3 is not JSON" in strict.stderr
    assert strict.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--output", "v/"), "pass the corpus with --input"),
        (("--output", "v/", "--input", "corpus.jsonl.gz", "--text", "a cat"), "leave out --text"),
        (("--output", "v/", "--input", "corpus.jsonl.gz", "--benchmark"), "leave out --benchmark"),
        (("--input", "corpus.jsonl.gz", "--no_contents"), "no folder to encode into: pass --output NAME/"),
        (("--input", "corpus.jsonl.gz", "--output", "v.json", "--strict"), "no folder to encode into"),
    ],
)
def test_options_that_do_not_go_together_are_usage_errors(
    folder: Path, arguments: tuple[str, ...], reason: str
) -> None:
    """Exit code 2, and the option to leave out."""
    process = _run(folder, *arguments)
    assert process.returncode == 2
    assert reason in process.stderr
    assert not (folder / "v").exists()
