"""--dry_run: what would be written is said, and nothing is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.entry_point import json_of, run_onnxtool
from tests.infer.tiny_models import VOCABULARY, TinyModel, table, write_checkpoint
from tests.workshop import Workshop

COMMANDS = {
    "optimize": ("optimize", "--model_path", "model.onnx"),
    "artifacts": ("artifacts", "--model_path", "model.onnx", "--loss", "none", "--ort_format"),
    "infer": ("infer", "--model_path", "model.onnx", "--input", "texts.txt", "--output", "answers.jsonl"),
    "corpus": ("infer", "--model_path", "model.onnx", "--input", "texts.txt", "--output", "vectors/"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with an embedder, its tokenizer, and texts."""
    metadata = {"onnxtool.task": "sentence-similarity", "onnxtool.head": "none"}
    TinyModel(table(len(VOCABULARY), 4), "last_hidden_state", metadata=metadata).write(tmp_path / "model.onnx")
    write_checkpoint(tmp_path / "model", modules={"Transformer": {}, "Pooling": {"pooling_mode": "mean"}})
    (tmp_path / "texts.txt").write_text("a cat\na dog\n")
    return tmp_path


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.parametrize("name", COMMANDS)
def test_nothing_is_written(name: str, folder: Path) -> None:
    """The report names the files, and says of each whether it already exists."""
    before = files_of(folder)
    report = json_of(run_onnxtool(folder, *COMMANDS[name], "--dry_run", "--format", "json"))
    assert report["dry_run"]
    assert report["files"]
    assert {file["change"] for file in report["files"]} == {"new"}
    assert "note: nothing was written" in run_onnxtool(folder, *COMMANDS[name], "--dry_run").stdout
    assert files_of(folder) == before


@pytest.mark.parametrize("name", ["optimize", "infer"])
def test_the_files_are_those_that_are_written_then(name: str, folder: Path) -> None:
    """With one that is there, the dry run ends as the run would; with --force it says what would be replaced."""
    planned = json_of(run_onnxtool(folder, *COMMANDS[name], "--dry_run", "--format", "json"))["files"]
    before = files_of(folder)
    assert run_onnxtool(folder, *COMMANDS[name]).returncode == 0
    assert {file["path"] for file in planned} == files_of(folder) - before
    dry, real = (run_onnxtool(folder, *COMMANDS[name], *more, "--quiet") for more in (("--dry_run",), ()))
    assert (dry.returncode, dry.stderr) == (real.returncode, real.stderr)
    forced = json_of(run_onnxtool(folder, *COMMANDS[name], "--dry_run", "--format", "json", "--force"))["files"]
    assert [file["change"] for file in forced] == ["replaced"]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("optimize", "--model_path", "gone.onnx"), 1),
        (("optimize", "--model_path", "model.onnx", "--max_error", "0.1", "--no_verify"), 2),
        (("optimize", "--model_path", "model.onnx", "--precision", "int9"), 2),
        (("infer", "--model_path", "model.onnx", "--input", "gone.txt"), 1),
        (("infer", "--model_path", "model.onnx"), 2),
        (("infer", "--model_path", "model.onnx", "--output", "model/", "--input", "texts.txt"), 1),
        (("artifacts", "--model_path", "gone.onnx"), 1),
        (("export", "--model_name", "./gone"), 1),
    ],
)
def test_what_is_wrong_ends_as_in_the_run(arguments: tuple[str, ...], code: int, folder: Path) -> None:
    """With the same error and the same exit code."""
    dry, real = (run_onnxtool(folder, *arguments, *more, "--quiet") for more in (("--dry_run",), ()))
    assert (dry.returncode, dry.stdout) == (code, "")
    assert dry.stderr == real.stderr


def test_the_files_in_other_precisions_are_named_too(workshop: Workshop, tmp_path: Path) -> None:
    """With the page that states their errors; the run writes the same ones."""
    command = ("export", workshop.checkpoint("tiny-encoder"), "--target", "infinity", "--precisions", "int8")
    options = (*command, "--output", "m", "--format", "json")
    planned = json_of(run_onnxtool(tmp_path, *options, "--dry_run"))["files"]
    assert not (tmp_path / "m").exists()
    report = json_of(run_onnxtool(tmp_path, *options))
    assert [(one["precision"], one["files"]) for one in report["variants"]] == [("int8", ["model_quantized.onnx"])]
    assert {file["path"] for file in planned} == files_of(tmp_path) - {"m"}


def test_an_export_names_the_graph_and_the_files_beside_it(workshop: Workshop, tmp_path: Path) -> None:
    """Without its weights; a file of other content needs --force."""
    options = ("export", "--model_name", workshop.checkpoint("tiny-mlm"), "--optimize", "--output", "m.onnx")
    files = json_of(run_onnxtool(tmp_path, *options, "--dry_run", "--format", "json"))["files"]
    config, tokenizer = (str(Path("m") / name) for name in ("config.json", "tokenizer.json"))
    assert {"m.onnx", "m-optimized.onnx", config, tokenizer} <= {file["path"] for file in files}
    assert files_of(tmp_path) == set()
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text("{}")
    refused = run_onnxtool(tmp_path, *options, "--dry_run")
    assert refused.returncode == 1
    assert f"{config} already exists" in refused.stderr
    forced = run_onnxtool(tmp_path, *options, "--dry_run", "--force", "--format", "json")
    assert {"path": config, "change": "replaced"} in json_of(forced)["files"]
