"""A set of files appears as a whole: killed at any call that changes a name, it is the old one or the new one."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from onnxtool.encoding.files import remove, written
from onnxtool.errors import ModelFileError, OutputExistsError, OutputWriteError
from onnxtool.model_file import ModelFile, check_writable, commits, scratch_folder, staged, write_text
from onnxtool.model_file.commits import CommitFolder, find_leftovers, recover, settle, unfinished_set_of
from tests.cli.entry_point import run_onnxtool
from tests.graphs import make_addition, weight_of

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


def write_set(folder: Path, content: dict[str, Any], *, force: bool = True) -> None:
    """Write a set with one command; a file that the new set lacks is obsolete."""
    with staged(folder / "model.onnx", force=force) as staging:
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


def is_old_or_new(folder: Path) -> bool:
    """Whether a user sees a whole set, or is told that it is not yet one."""
    return set_in(folder) in ({}, OLD, NEW) or unfinished_set_of(folder / "model.onnx") is not None


@pytest.mark.parametrize("before", [{}, OLD], ids=["new", "replaced"])
def test_a_kill_at_any_call_leaves_the_old_set_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: dict[str, Any]
) -> None:
    """What the next run finds becomes a whole set, old or new, and nothing hidden is left."""
    ends = []
    for number in range(100):
        folder = tmp_path / str(number)
        folder.mkdir()
        if before:
            write_set(folder, before)
        with stopped_at(number, monkeypatch) as calls, suppress(Killed):
            write_set(folder, NEW)
        assert is_old_or_new(folder)
        recover(folder / "model.onnx")
        assert set_in(folder) in (before, NEW)
        assert hidden_in(folder) == []
        ends.append(set_in(folder) == NEW)
        if len(calls) <= number:
            break
    assert ends == sorted(ends)
    assert len(ends) > 10
    assert set(ends) == {False, True}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS], ids=errno.errorcode.get)
def test_a_disk_that_fails_at_any_call_leaves_the_old_set_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """It is one error with a hint; once the disk works, the next run leaves nothing but a whole set."""
    for number in range(100):
        folder = tmp_path / str(number)
        folder.mkdir()
        write_set(folder, OLD)
        failure = None
        with stopped_at(number, monkeypatch, OSError(code, os.strerror(code))) as calls:
            try:
                write_set(folder, NEW)
            except OutputWriteError as error:
                failure = error
        assert is_old_or_new(folder)
        assert failure is None or failure.hint
        assert failure is not None or unfinished_set_of(folder / "model.onnx") is None
        recover(folder / "model.onnx")
        assert set_in(folder) in (OLD, NEW)
        assert hidden_in(folder) == []
        if len(calls) <= number:
            break
    assert number > 10


def test_a_set_outlives_a_power_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are forced to the disk before the journal gets its name, and the names before it goes."""
    done: list[str] = []
    replace = os.replace

    def fsync(descriptor: int) -> None:
        name = Path(f"/proc/self/fd/{descriptor}").readlink().name
        done.append(f"force {'hidden' if name.startswith('.') else name}")

    def renaming(source: Path, target: Path) -> None:
        done.append(f"rename {target.name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", renaming)
    write_set(tmp_path, NEW)
    decided = done.index("rename journal.json")
    forced = {"config.json", "words.txt", "model.onnx", "journal.json.partial"}
    assert {f"force {name}" for name in forced} <= {*done[:decided]}
    assert done[decided + 1] == "force hidden"
    assert done[decided + 2 : decided + 5] == [f"rename {name}" for name in ("config.json", "words.txt", "model.onnx")]
    assert {f"force {tmp_path.name}", "force model"} <= {*done[decided + 5 :]}


def kill_between_names(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Leave a set of which a part has its names; return the hidden folder."""
    write_set(folder, OLD)
    for number in range(100):
        with stopped_at(number, monkeypatch), suppress(Killed):
            write_set(folder, NEW)
        found = unfinished_set_of(folder / "model.onnx")
        if found is not None and set_in(folder) != OLD:
            return found
        recover(folder / "model.onnx")
    raise AssertionError("no kill was between two names")


def test_a_model_of_which_a_part_was_replaced_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader says what to do; `onnxtool clean` does it, and --dry_run only says so."""
    kill_between_names(tmp_path, monkeypatch)
    with pytest.raises(ModelFileError, match="a run was killed while it put") as caught:
        ModelFile.open(tmp_path / "model.onnx")
    assert "onnxtool clean" in caught.value.hint
    before = set_in(tmp_path)
    dry = run_onnxtool(tmp_path, "clean", "--dry_run", "--format", "json")
    assert [entry["action"] for entry in json.loads(dry.stdout)["leftovers"]] == ["to finish"]
    assert set_in(tmp_path) == before
    assert "finished" in run_onnxtool(tmp_path, "clean", tmp_path).stdout
    assert set_in(tmp_path) == NEW
    assert "nothing" in run_onnxtool(tmp_path, "clean", tmp_path).stdout


def test_the_next_run_says_what_it_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before anything else it finishes the set, which then needs --force to be replaced."""
    found = kill_between_names(tmp_path, monkeypatch)
    caplog.clear()
    with pytest.raises(OutputExistsError):
        check_writable(tmp_path / "model.onnx", force=False)
    assert [record.message for record in caplog.records] == [f"finished what a killed run left: {found}"]
    assert set_in(tmp_path) == NEW


def test_a_run_that_is_still_going_is_left_alone(tmp_path: Path) -> None:
    """Its lock tells; that of a run on another machine does not, so it is left alone as well."""
    output = tmp_path / "model.onnx"
    with scratch_folder(output) as folder:
        (folder / "half").write_text("half")
        recover(output)
        (leftover,) = find_leftovers(tmp_path)
        assert leftover.state == "running"
        assert not settle(leftover.path)
    assert hidden_in(tmp_path) == []
    elsewhere = tmp_path / ".model.onnx.0123abcd.partial"
    elsewhere.mkdir()
    (elsewhere / "lock").write_text(json.dumps({"host": "another", "boot": "another", "process": 1}))
    assert "of a run on another machine" in run_onnxtool(tmp_path, "clean").stdout
    assert elsewhere.is_dir()


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


def test_a_copy_of_a_folder_is_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was cloned, unpacked or restored is named and left: its seal has another inode and another time."""
    found = kill_between_names(tmp_path, monkeypatch)
    copied = tmp_path.with_name("copied")
    shutil.copytree(found, copied / found.name)
    before = {str(path) for path in copied.rglob("*")}
    recover(copied / "model.onnx")
    shown = run_onnxtool(copied, "clean", "--format", "json").stdout
    assert [(one["state"], one["action"]) for one in json.loads(shown)["leftovers"]] == [("unproven", "left alone")]
    assert {str(path) for path in copied.rglob("*")} == before
    assert unfinished_set_of(copied / "model.onnx") is None
    recover(tmp_path / "model.onnx")
    assert set_in(tmp_path) == NEW
    assert not found.exists()


@pytest.mark.parametrize(
    "lock", ["none", "empty", "machine", "guessed", "linked seal", "linked files", "pipe", "folder"]
)
def test_a_journal_of_somebody_else_does_nothing(tmp_path: Path, lock: str, caplog: pytest.LogCaptureFixture) -> None:
    """With any lock that can be written without this file system: no file is named, and none is removed."""
    (tmp_path / "mine.txt").write_text("mine")
    hidden = tmp_path / ".o.onnx.aaaaaaaa.partial"
    (hidden / "theirs").mkdir(parents=True)
    (hidden / "theirs" / "o.onnx").write_text("theirs")
    (hidden / "journal.json").write_text(json.dumps({"files": ["o.onnx"], "obsolete": ["mine.txt"]}))
    owner: dict[str, Any] = {**commits._machine(), "process": 1, "seal": [1, 1]}
    if lock == "linked files":
        (hidden / "files").symlink_to("theirs")
    else:
        (hidden / "theirs").rename(hidden / "files")
    if lock == "linked seal":
        (hidden / "seal").symlink_to("journal.json")
    elif lock in ("guessed", "linked files"):
        (hidden / "seal").touch()
    if lock in ("linked seal", "linked files"):
        owner["seal"] = commits._seal_of(hidden)
    if lock == "pipe":
        os.mkfifo(hidden / "lock", 0o400)
    elif lock == "folder":
        (hidden / "lock").mkdir()
    elif lock != "none":
        (hidden / "lock").write_text("" if lock == "empty" else json.dumps(owner))
    recover(tmp_path / "o.onnx")
    assert not settle(hidden)
    assert f"left {hidden} alone" in caplog.text
    assert {path.name for path in tmp_path.iterdir()} == {"mine.txt", hidden.name}


def test_a_link_leads_no_journal_out_of_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a file of ours that it names nor one that it removes; it is an error that says which."""
    folder, elsewhere = tmp_path / "ours", tmp_path / "elsewhere"
    folder.mkdir()
    found = kill_between_names(folder, monkeypatch)
    (folder / "model").rename(elsewhere)
    before = set_in(elsewhere)
    (folder / "model").symlink_to(elsewhere)
    with pytest.raises(OutputWriteError, match=r"wants to change model/\w+\.\w+, which a link leads out of"):
        recover(folder / "model.onnx")
    assert set_in(elsewhere) == before
    assert found.is_dir()


def test_a_folder_that_gets_no_lock_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where there is no descriptor left to look into it."""
    real, is_full = os.open, False

    def opened(path: Any, *arguments: Any, **named: Any) -> int:
        nonlocal is_full
        is_full = is_full or (os.fspath(path).endswith("lock") and ".partial" in os.fspath(path))
        if is_full:
            raise OSError(errno.EMFILE, "Too many open files")
        return real(path, *arguments, **named)

    monkeypatch.setattr(os, "open", opened)
    with pytest.raises(OSError, match="Too many open files"):
        CommitFolder(tmp_path, "m.onnx").make()
    assert is_full
    assert not list(tmp_path.glob(".*.partial"))


@pytest.mark.skipif(sys.platform == "win32", reason="limits of POSIX")
def test_a_folder_is_removed_where_no_descriptor_is_left(tmp_path: Path) -> None:
    """Looking into a folder needs some, which it keeps for that."""
    import resource

    folder = CommitFolder(tmp_path, "m.onnx")
    folder.make()
    (folder.files / "set").mkdir()
    (folder.files / "set" / "m.onnx").write_text("new")
    limits, taken = resource.getrlimit(resource.RLIMIT_NOFILE), [os.dup(0)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken[0] + 40, limits[1]))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.dup(0))
        folder.close()
    finally:
        for descriptor in taken:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert not list(tmp_path.iterdir())


def test_a_set_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A journal with more files or bytes is none, and no run writes one: the old set stays."""
    write_set(tmp_path, OLD)
    names = [f"{number}" for number in range(commits._MOST_FILES + 1)]
    for bound, value in (("_MOST_FILES", 2), ("_MOST_JOURNAL_BYTES", 40)):
        with monkeypatch.context() as patch:
            patch.setattr(commits, bound, value)
            with pytest.raises(OutputWriteError, match="would get 3 files and lose 1"):
                write_set(tmp_path, NEW)
        assert set_in(tmp_path) == OLD
        assert hidden_in(tmp_path) == []
    journal = {"files": [], "obsolete": names}
    for text in (json.dumps(journal), json.dumps({"files": [], "obsolete": []}) + " " * commits._MOST_JOURNAL_BYTES):
        (tmp_path / "journal.json").write_text(text)
        assert commits._read_journal(tmp_path) is None


@pytest.mark.skipif(sys.platform == "win32", reason="files have no owner there")
@pytest.mark.parametrize("kind", ["link", "pipe", "of another user", "own"])
@pytest.mark.parametrize("name", ["vectors/.part-00003.npy.partial", ".vectors.manifest.json.partial"])
def test_half_files_of_a_corpus_count_where_they_are_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str, name: str
) -> None:
    """What another user may have put there is named and left by `clean`, by what removes it, and by what writes it."""
    half, mine = tmp_path / name, tmp_path / "mine.txt"
    half.parent.mkdir(exist_ok=True)
    mine.write_text("mine")
    if kind == "link":
        half.symlink_to(mine)
    elif kind == "pipe":
        os.mkfifo(half)
    else:
        half.write_text("half")
    if kind == "of another user":
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    is_own = kind == "own"
    assert [(one.path, one.state) for one in find_leftovers(tmp_path)] == [(half, "half" if is_own else "unproven")]
    with nullcontext() if is_own else pytest.raises(FileExistsError), written(half, b"new"):
        assert half.read_bytes() == b"new"
    for act in (settle, lambda path: remove([path])):
        if is_own:
            half.write_text("half")
        act(half)
        assert os.path.lexists(half) is not is_own
        assert (f"left {half} alone" in caplog.text) is not is_own
    assert mine.read_text() == "mine"


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
