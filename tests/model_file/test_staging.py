"""Outputs are whole or not there: staged, moved by renames, never half."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from safetensors.numpy import save_file

from onnxtool.errors import ModelFileError, OutputExistsError, OutputWriteError
from onnxtool.model_file import (
    ModelFile,
    check_writable,
    save_beside,
    save_model,
    staged,
    write_text,
)
from tests.graphs import NUM_BYTES, make_addition, refer_to, run, save_external, weight_of


def names_in(folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*"))


def weight_or_none(path: Path) -> float | None:
    """Return the weight of a model; None if it cannot be opened."""
    try:
        return weight_of(ModelFile.open(path).path)
    except ModelFileError:
        return None


def test_an_output_appears_with_its_sidecar_files(tmp_path: Path) -> None:
    """What is staged lies in the output's folder after the block, in the folders it was staged in, and nothing else."""
    output = tmp_path / "new" / "model.onnx"
    with staged(output, force=False) as staging:
        staging.model_path.write_bytes(b"model")
        (staging.folder / "model").mkdir()
        (staging.folder / "model" / "config.json").write_text("{}")
        assert names_in(tmp_path / "new") != []
        assert not output.exists()
    assert names_in(tmp_path / "new") == ["model", "model.onnx", "model/config.json"]
    assert output.read_bytes() == b"model"


@pytest.mark.parametrize("failure", [RuntimeError("bug"), KeyboardInterrupt(), SystemExit(143)], ids=repr)
def test_nothing_remains_of_an_interrupted_output(tmp_path: Path, failure: BaseException) -> None:
    """A bug, Ctrl-C or SIGTERM in the middle of writing leaves the old file, and no staged one."""
    output = tmp_path / "model.onnx"
    output.write_bytes(b"old")

    def write() -> None:
        with staged(output, force=True) as staging:
            staging.model_path.write_bytes(b"half")
            (staging.folder / "sidecar").write_bytes(b"half")
            raise failure

    with pytest.raises(type(failure)):
        write()
    assert names_in(tmp_path) == ["model.onnx"]
    assert output.read_bytes() == b"old"


@pytest.mark.parametrize(
    ("code", "words"),
    [(errno.ENOSPC, "no space to write"), (errno.EFBIG, "no space to write"), (errno.EACCES, "cannot write")],
    ids=errno.errorcode.get,
)
def test_a_disk_that_fails_is_an_error_with_a_hint(tmp_path: Path, code: int, words: str) -> None:
    """A full disk while writing leaves the old file, and says so without a traceback."""
    output = tmp_path / "model.onnx"
    output.write_bytes(b"old")

    def write() -> None:
        with staged(output, force=True) as staging:
            staging.model_path.write_bytes(b"half")
            raise OSError(code, os.strerror(code), str(staging.model_path))

    with pytest.raises(OutputWriteError, match=words) as caught:
        write()
    assert caught.value.hint
    assert names_in(tmp_path) == ["model.onnx"]
    assert output.read_bytes() == b"old"


def test_a_failure_that_is_not_of_the_disk_stays_what_it_is(tmp_path: Path) -> None:
    """An OSError without a number, as network libraries raise, is not reported as a disk that fails."""

    def write() -> None:
        with staged(tmp_path / "model.onnx", force=False):
            raise OSError("connection lost")

    with pytest.raises(OSError, match="connection lost"):
        write()
    assert names_in(tmp_path) == []


def test_an_output_that_exists_needs_force(tmp_path: Path) -> None:
    """Without force an output is refused before anything is written; with it, it is replaced."""
    output = tmp_path / "report.json"
    write_text(output, "old", force=False)
    with pytest.raises(OutputExistsError, match="exists already") as caught:
        check_writable(output, force=False)
    assert "--force" in caught.value.hint
    with pytest.raises(OutputExistsError):
        write_text(output, "new", force=False)
    assert output.read_text() == "old"
    write_text(output, "new", force=True)
    assert output.read_text() == "new"


def test_an_output_in_a_folder_without_permission_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rather than after an hour of it."""
    monkeypatch.setattr(os, "access", lambda path, mode: (Path(path), mode) != (tmp_path, os.W_OK))
    for output in (tmp_path / "report.json", tmp_path / "new" / "report.json"):
        with pytest.raises(OutputWriteError, match="Permission denied"):
            check_writable(output, force=True)


def test_a_sidecar_file_of_other_content_needs_force(tmp_path: Path) -> None:
    """A sidecar file that is there with the same content is no conflict, one with other content is."""

    def write(content: str, *, force: bool) -> None:
        with staged(tmp_path / "model.onnx", force=force) as staging:
            staging.model_path.write_bytes(b"model")
            (staging.folder / "vocab.txt").write_text(content)

    (tmp_path / "vocab.txt").write_text("a")
    with pytest.raises(OutputExistsError, match=r"vocab\.txt"):
        write("b", force=False)
    assert names_in(tmp_path) == ["vocab.txt"]
    write("a", force=False)
    write("b", force=True)
    assert (tmp_path / "vocab.txt").read_text() == "b"


@pytest.mark.parametrize("force", [False, True])
def test_a_folder_is_never_replaced(tmp_path: Path, force: bool) -> None:
    """An output that names a folder is refused, with force as well."""
    (tmp_path / "models").mkdir()
    with pytest.raises(OutputWriteError, match="not a regular file"):
        write_text(tmp_path / "models", "text", force=force)
    assert names_in(tmp_path) == ["models"]


def test_a_name_that_no_file_can_have_is_refused(tmp_path: Path) -> None:
    """A name longer than file systems allow is an error with a hint."""
    with pytest.raises(OutputWriteError, match="cannot write") as caught:
        write_text(tmp_path / ("n" * 300), "text", force=False)
    assert caught.value.hint


@pytest.mark.parametrize("suffix", ["", "_data"])
def test_the_old_graph_never_points_to_new_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    """At every rename of a commit, the model at the output is old or new, with its own data, or cannot be opened.

    Also where a consumer looks for the data under one name.
    """
    output = tmp_path / "model.onnx"
    save_external(output, 1.0, f"model.onnx{suffix or '.data'}")
    seen = []
    replace = Path.replace

    def watched_replace(self: Path, target: Path) -> Path:
        result = replace(self, target)
        seen.append(weight_or_none(output))
        return result

    monkeypatch.setattr(Path, "replace", watched_replace)
    for weight in (2.0, 3.0):
        with staged(output, force=True) as staging:
            staging.data_suffix = suffix
            save_external(staging.model_path, weight, staging.data_name)
    assert seen == [None, None, None, 2.0, None, None, None, 3.0]
    assert weight_of(output) == run(output) == 3.0
    assert not suffix or names_in(tmp_path) == ["model.onnx", "model.onnx_data"]
    assert len(names_in(tmp_path)) == 2
    with staged(output, force=True) as staging:
        save_model(ir.from_proto(make_addition(4.0)), staging)
    assert names_in(tmp_path) == ["model.onnx"]


def test_a_crash_before_the_last_rename_leaves_the_old_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the graph file cannot be moved into place, the old one comes back with its data."""
    output = tmp_path / "model.onnx"
    save_external(output, 1.0, "model.onnx.data")
    replace = Path.replace

    def failing_replace(self: Path, target: Path) -> Path:
        if self.name == "model.onnx" and self.parent.name == "files":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(target))
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", failing_replace)

    def write() -> None:
        with staged(output, force=True) as staging:
            save_external(staging.model_path, 2.0, staging.data_name)

    with pytest.raises(OutputWriteError, match="cannot write"):
        write()
    assert weight_of(output) == 1.0


def test_an_old_graph_cannot_name_files_to_delete(tmp_path: Path) -> None:
    """Data of the old graph is dropped only under the names that onnxtool gives."""
    folder = tmp_path / "models"
    (folder / "model.onnx.data").mkdir(parents=True)
    (tmp_path / "precious").write_text("data")
    (folder / "shared.bin").write_text("data")
    for location in ("model.onnx.data/../../precious", "shared.bin", "model.onnx.data"):
        refer_to(folder / "model.onnx", location)
        with staged(folder / "model.onnx", force=True) as staging:
            staging.model_path.write_bytes(make_addition(1.0).SerializeToString())
    assert names_in(tmp_path) == [
        "models",
        "models/model.onnx",
        "models/model.onnx.data",
        "models/shared.bin",
        "precious",
    ]


@pytest.mark.parametrize("max_inline_bytes", [0, NUM_BYTES - 1, NUM_BYTES])
def test_weights_beyond_the_limit_go_to_a_file_of_their_own(tmp_path: Path, max_inline_bytes: int) -> None:
    """Above the limit weights are external and the model runs the same; up to it there is one file."""
    source, output = tmp_path / "source.onnx", tmp_path / "out" / "model.onnx"
    onnx.save(make_addition(7.0), source)
    for _ in range(3):
        with staged(output, force=True) as staging:
            assert save_model(ir.load(source), staging, max_inline_bytes=max_inline_bytes) == staging.model_path
        assert len(names_in(output.parent)) == (1 if max_inline_bytes == NUM_BYTES else 2)
        assert len(ModelFile.open(output).external_locations) == (0 if max_inline_bytes == NUM_BYTES else 1)
        assert weight_of(output) == run(output) == 7.0


def test_a_graph_beside_the_first_is_replaced_together_with_its_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every rename of a commit it is old, new or cannot be opened, and afterwards nothing is left of the old one."""
    output, beside = tmp_path / "model.onnx", tmp_path / "model-encoder.onnx"
    seen = []
    replace = Path.replace

    def watched_replace(self: Path, target: Path) -> Path:
        result = replace(self, target)
        seen.append(weight_or_none(beside))
        return result

    monkeypatch.setattr(Path, "replace", watched_replace)
    for weight in (1.0, 2.0):
        with staged(output, force=True) as staging:
            model = ir.from_proto(make_addition(weight))
            save_model(model, staging)
            assert save_beside(model, staging, beside.name, max_inline_bytes=0).parent == staging.folder
    assert seen == [None, None, 1.0, None, None, None, None, None, 2.0]
    assert names_in(tmp_path) == ["model-encoder.onnx", "model-encoder.onnx.data.2", "model.onnx"]


def save_tokenizer(path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {f"word{number}": number for number in range(2000)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary)).save(str(path))


WRITERS = {
    "text": lambda path: path.write_text("x" * 100_000),
    "numpy": lambda path: np.ones(100_000).tofile(path),
    "safetensors": lambda path: save_file({"w": np.ones(100_000)}, path),
    "tokenizers": save_tokenizer,
}


@pytest.mark.skipif(sys.platform == "win32", reason="files there have no such limit")
@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_is_one_error_whichever_library_finds_it(tmp_path: Path, name: str) -> None:
    """Each reports it in its own way."""
    import resource

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with (
            pytest.raises(OutputWriteError, match="no space to write .*file"),
            staged(tmp_path / "file", force=False) as to,
        ):
            WRITERS[name](to.model_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert names_in(tmp_path) == []
