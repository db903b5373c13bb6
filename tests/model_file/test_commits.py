"""Files of two runs never lie side by side: killed at any call that changes a name, a set is old, new or incomplete."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from onnxtool.errors import ModelFileError, OutputExistsError, OutputWriteError
from onnxtool.model_file import ModelFile, check_writable, scratch_folder, staged, write_text
from tests.graphs import make_addition, save_external, weight_of

_CALLS = ("replace", "rename", "link", "symlink", "unlink", "remove", "mkdir", "rmdir")
OLD = {"model.onnx": 1.0, "model/config.json": "old", "model/vocab.txt": "old"}
NEW = {"model.onnx": 2.0, "model/config.json": "new", "model/words.txt": "new"}


class Killed(BaseException):
    """The process is gone."""


@contextmanager
def stopped_at(number: int, monkeypatch: pytest.MonkeyPatch, fault: OSError | None = None) -> Iterator[list[str]]:
    """Kill this process at the call of this number that changes a name, or let that call and all later ones fail."""
    calls: list[str] = []

    def counting(name: str) -> Callable[..., Any]:
        call = getattr(os, name)

        def counted(*arguments: Any, **keywords: Any) -> Any:
            calls.append(name)
            if len(calls) > number:
                raise Killed if fault is None else OSError(fault.errno, fault.strerror, str(arguments[0]))
            return call(*arguments, **keywords)

        return counted

    with monkeypatch.context() as patch:
        for name in _CALLS:
            patch.setattr(os, name, counting(name))
        yield calls


def write_set(folder: Path, content: dict[str, Any], *, force: bool = True, manifest: str = "") -> None:
    """Write a set with one command; a file that the new set lacks is obsolete."""
    check_writable(folder / "model.onnx", force=force)
    with staged(folder / "model.onnx", force=force) as staging:
        staging.manifest = staging.folder / manifest
        for name, text in content.items():
            file = staging.folder / name
            file.parent.mkdir(exist_ok=True)
            if isinstance(text, str):
                file.write_text(text)
            else:
                file.write_bytes(make_addition(text).SerializeToString())
        staging.obsolete.extend(folder / name for name in OLD if name not in content)


def set_in(folder: Path) -> dict[str, Any]:
    """Return what a user sees."""
    files = [file for file in folder.rglob("*") if file.is_file() and ".partial" not in str(file.relative_to(folder))]
    return {
        str(file.relative_to(folder)): weight_of(file) if file.suffix == ".onnx" else file.read_text() for file in files
    }


def hidden_in(folder: Path) -> list[str]:
    return [file.name for file in folder.rglob(".*")]


def is_of_one_run(found: dict[str, Any]) -> bool:
    """Whether a set is whole, or lacks its graph and has nothing that is not from one run."""
    return any(found == one or (found.items() <= one.items() and "model.onnx" not in found) for one in (OLD, NEW))


@pytest.mark.parametrize("before", [{}, OLD], ids=["new", "replaced"])
def test_a_kill_at_any_call_leaves_files_of_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: dict[str, Any]
) -> None:
    """A graph is there only in a whole set, and the next run writes the new set and leaves nothing hidden."""
    for number in range(100):
        folder = tmp_path / str(number)
        folder.mkdir()
        if before:
            write_set(folder, before)
        with stopped_at(number, monkeypatch) as calls, suppress(Killed):
            write_set(folder, NEW)
        assert is_of_one_run(set_in(folder))
        write_set(folder, NEW)
        assert set_in(folder) == NEW
        assert hidden_in(folder) == []
        if len(calls) <= number:
            break
    assert number > 10


def test_a_kill_leaves_no_file_without_its_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A release is known by the file that states all digests."""
    for number in range(100):
        write_set(tmp_path, OLD, manifest="model/config.json")
        with stopped_at(number, monkeypatch) as calls, suppress(Killed):
            write_set(tmp_path, NEW, manifest="model/config.json")
        found = set_in(tmp_path)
        assert not found or "model/config.json" in found
        assert any(found.items() <= one.items() for one in (OLD, NEW))
        if len(calls) <= number:
            break
    assert number > 10


def test_a_kill_leaves_no_data_that_no_graph_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph cannot be opened without its data, and the next run leaves one file of data."""
    output = tmp_path / "model.onnx"

    def write(weight: float) -> None:
        check_writable(output, force=True)
        with staged(output, force=True) as staging:
            save_external(staging.model_path, weight, staging.data_name)

    for number in range(100):
        write(1.0)
        with stopped_at(number, monkeypatch) as calls, suppress(Killed):
            write(2.0)
        with suppress(ModelFileError):
            assert weight_of(ModelFile.open(output).path) in (1.0, 2.0)
        write(2.0)
        assert {path.name for path in tmp_path.iterdir()} == {"model.onnx", *ModelFile.open(output).external_locations}
        assert weight_of(output) == 2.0
        if len(calls) <= number:
            break
    assert number > 10


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS], ids=errno.errorcode.get)
def test_a_rename_that_fails_leaves_the_old_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """What was moved out is moved back, wherever the first failure is, and it is one error with a hint."""
    replace = Path.replace
    for number in range(7):
        write_set(tmp_path, OLD)
        calls: list[Path] = []

        def failing(self: Path, target: Path, calls: list[Path] = calls, number: int = number) -> Path:
            calls.append(target)
            if len(calls) == number + 1:
                raise OSError(code, os.strerror(code), str(target))
            return replace(self, target)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", failing)
            if number < 6:  # three files go, and three come
                with pytest.raises(OutputWriteError):
                    write_set(tmp_path, NEW)
            else:
                write_set(tmp_path, NEW)
        assert set_in(tmp_path) == (OLD if number < 6 else NEW)
        assert hidden_in(tmp_path) == []


def test_a_set_outlives_a_power_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contents are on the disk before a name changes, and the names of the old set are gone from it before new ones."""
    write_set(tmp_path, OLD)
    done: list[str] = []
    replace = Path.replace

    def fsync(descriptor: int) -> None:
        done.append(f"force {Path(f'/proc/self/fd/{descriptor}').readlink().name}")

    def renaming(self: Path, target: Path) -> Path:
        done.append(f"{'out' if 'replaced' in target.parts else 'in'} {target.name}")
        return replace(self, target)

    with monkeypatch.context() as patch:
        patch.setattr("onnxtool.model_file.commits.os.fsync", fsync)
        patch.setattr(Path, "replace", renaming)
        write_set(tmp_path, NEW)
    folders = {f"force {tmp_path.name}", "force model"}
    assert {*done[:3]} == {f"force {Path(name).name}" for name in NEW}
    assert done[3] == "out model.onnx"
    assert {*done[4:6]} == {"out config.json", "out vocab.txt"}
    assert {*done[6:8]} == folders
    assert done[8:11] == ["in config.json", "in words.txt", "in model.onnx"]
    assert {*done[11:]} == folders


def test_the_next_run_removes_what_a_killed_one_left_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Only of the same output, and not what a run that is still going has locked."""
    output = tmp_path / "model.onnx"
    code = (
        "import os, sys, pathlib\nfrom onnxtool.model_file import scratch_folder\n"
        "with scratch_folder(pathlib.Path(sys.argv[1])) as folder:\n"
        "    (folder / 'half').write_text('half')\n    os.kill(os.getpid(), 9)\n"
    )
    for name in ("model.onnx", "other.onnx"):
        subprocess.run([sys.executable, "-c", code, tmp_path / name], check=False)
    with scratch_folder(output) as running:
        left = [name for name in hidden_in(tmp_path) if name != running.parent.name]
        assert len(left) == 2
        check_writable(output, force=False)
        (removed,) = {*left} - {*hidden_in(tmp_path)}
        assert removed.startswith(".model.onnx.")
        assert running.is_dir()
    assert [record.message for record in caplog.records] == [f"removed what a killed run left: {tmp_path / removed}"]
    assert len(hidden_in(tmp_path)) == 1


def test_a_hidden_folder_is_left_where_no_lock_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some file systems have no locks on folders: the run may be going on."""
    fcntl = pytest.importorskip("fcntl")

    def refusing(_descriptor: int, _operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refusing)
    with scratch_folder(tmp_path / "model.onnx") as running:
        write_set(tmp_path, NEW)
        assert running.is_dir()
    assert set_in(tmp_path) == NEW


def test_a_link_in_place_of_a_hidden_folder_leads_to_no_removal(tmp_path: Path) -> None:
    """Neither of the link, nor of what it leads to or what a folder of that name links to."""
    mine, stage = tmp_path / "mine", tmp_path / ".o.onnx.aaaaaaaa.partial"
    mine.mkdir()
    (mine / "text").write_text("mine")
    stage.symlink_to(mine)
    check_writable(tmp_path / "o.onnx", force=False)
    assert stage.is_symlink()
    stage.unlink()
    stage.mkdir()
    (stage / "files").symlink_to(mine)
    check_writable(tmp_path / "o.onnx", force=False)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    assert (mine / "text").read_text() == "mine"


def test_two_runs_at_once_leave_one_of_their_sets(tmp_path: Path) -> None:
    """Never some files of each."""
    sets = [{**NEW, "model.onnx": float(number), "model/config.json": str(number)} for number in range(4)]
    threads = [Thread(target=write_set, args=(tmp_path, content)) for content in sets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set_in(tmp_path) in sets
    assert hidden_in(tmp_path) == []


@pytest.mark.parametrize("force", [False, True])
def test_a_symbolic_link_stays_one(tmp_path: Path, force: bool) -> None:
    """What it leads to is written; where that is not there, only with --force."""
    target, link = tmp_path / "real" / "report.json", tmp_path / "report.json"
    link.symlink_to(Path("real") / "report.json")
    if not force:
        with pytest.raises(OutputExistsError, match="is a symbolic link to"):
            write_text(link, "text", force=False)
        assert not target.parent.exists()
        return
    for text in ("one", "two"):
        write_text(link, text, force=True)
        assert target.read_text() == text
    assert link.is_symlink()
    assert sorted(path.name for path in target.parent.iterdir()) == ["report.json"]


def test_a_link_to_itself_is_refused(tmp_path: Path) -> None:
    """With force as well."""
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OutputWriteError, match="leads to itself"):
        write_text(tmp_path / "loop", "text", force=True)
