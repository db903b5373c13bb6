"""How far an encoding is, as programs read it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from onnxtool.cli.entry import main
from onnxtool.encoding import CorpusProgress
from onnxtool.encoding.progress import ProgressFiles, ProgressOptions
from onnxtool.errors import OutputWriteError
from tests.encoding.corpora import dense_model, make_texts, write_corpus

_SAMPLE = re.compile(r"onnxtool_encode_[a-z_]+ [0-9.e+-]+")


def _values(path: Path) -> dict[str, float]:
    """Read the format of Prometheus, every line of which is a comment or a sample."""
    lines = path.read_text().splitlines()
    assert all(line.startswith(("# HELP ", "# TYPE ")) or _SAMPLE.fullmatch(line) for line in lines)
    return {name: float(value) for name, value in (line.split() for line in lines if not line.startswith("#"))}


@pytest.mark.usefixtures("workers_here")
def test_a_run_says_how_far_it_is_and_that_it_has_ended(tmp_path: Path) -> None:
    """In both files; the log is appended to, as runs go on behind each other."""
    model, corpus = dense_model(tmp_path), write_corpus(tmp_path / "corpus.jsonl", make_texts(90))
    log, metrics = tmp_path / "log.jsonl", tmp_path / "encode.prom"
    files = ("--progress_log", str(log), "--metrics", str(metrics), "--quiet")
    common = ("--model_path", str(model), "--input", str(corpus))
    for number in (1, 2):
        result = CliRunner().invoke(main, ["infer", *common, "--output", f"{tmp_path}/v{number}/", *files])
        assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["state"] for line in lines if line["state"] != "running"] == ["started", "done"] * 2
    assert (lines[-1]["num_texts"], lines[-1]["share"]) == (90, 1.0)
    assert _values(metrics)["onnxtool_encode_texts"] == 90
    assert _values(metrics)["onnxtool_encode_done"] == 1
    for command in ("part", "run"):
        arguments = ["encode", command, *common, "--output", f"{tmp_path}/w/", *files]
        assert CliRunner().invoke(main, arguments).exit_code == 0


def test_a_run_that_fails_says_so(tmp_path: Path) -> None:
    """A program that watches must not wait for ever."""
    log, metrics = tmp_path / "log.jsonl", tmp_path / "encode.prom"
    model = dense_model(tmp_path)
    given = ["infer", "--model_path", str(model), "--input", "none.jsonl", "--output", f"{tmp_path}/v/", "--quiet"]
    result = CliRunner().invoke(main, [*given, "--progress_log", str(log), "--metrics", str(metrics)])
    assert result.exit_code != 0
    assert json.loads(log.read_text().splitlines()[-1])["state"] == "failed"
    assert _values(metrics)["onnxtool_encode_done"] == 0


def test_what_is_not_known_is_left_out(tmp_path: Path) -> None:
    """Of a rate or a time that nobody knows there is no sample, and null in the log."""
    files = ProgressFiles(ProgressOptions(tmp_path / "log.jsonl", tmp_path / "a.prom"))
    assert "onnxtool_encode_left_seconds" not in _values(tmp_path / "a.prom")
    files._next = 0.0
    files.add(CorpusProgress(7, 0.5, 3.5, 2.0, 70.0, 1))
    found = _values(tmp_path / "a.prom")
    assert (found["onnxtool_encode_left_seconds"], found["onnxtool_encode_rejects"]) == (2.0, 1)
    assert json.loads((tmp_path / "log.jsonl").read_text().splitlines()[0])["seconds_left"] is None
    with pytest.raises(OutputWriteError, match="no such file|No such file"):
        ProgressFiles(ProgressOptions(tmp_path / "no" / "log.jsonl"))


def test_without_a_corpus_they_are_refused(tmp_path: Path) -> None:
    """They would stay empty."""
    arguments = ["infer", "--model_path", str(dense_model(tmp_path)), "--text", "a", "--metrics", "x.prom"]
    result = CliRunner().invoke(main, arguments)
    assert (result.exit_code, "leave out --metrics" in result.output) == (2, True)
