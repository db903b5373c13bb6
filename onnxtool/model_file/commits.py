"""Move a set of files into place as a whole, even if the process is stopped at any point.

A run writes its files into a hidden folder next to their destination, `.NAME.XXXXXXXX.partial`, and holds a lock in it
while it runs. The files are flushed to disk, then a journal of the moves to make. Renaming the journal to its final
name is the commit: before it, the old set is valid; after it, the new one is, and any run that finds a killed run's
folder completes the journal.

A clone, an archive or a download may contain such a folder too. A seal tells them apart: an empty file that is never
modified, whose inode and change time are written into the lock. The file system sets both, so a copy cannot reproduce
them. They also differ after a restore from a backup, and may differ on file systems without stable inodes; such a
folder is reported, and kept.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

from onnxtool.errors import OutputExistsError, OutputWriteError
from onnxtool.interruption import tell_staged
from onnxtool.reading import MOST_CONFIG_BYTES, read_json

State = Literal["running", "elsewhere", "half", "unfinished", "unproven"]

_FOLDER = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{8}\.partial", re.DOTALL)
# Files that an encoding run writes before renaming them: shards in its folder, and the records next to it.
_SHARD = re.compile(
    r"\.part-[0-9]{5,}(_[0-9]{5,})?\.(jsonl|jsonl\.gz|parquet|npy|indptr\.npy|ids\.jsonl)(\.[0-9a-f]{8})?\.partial"
)
_RECORD = re.compile(r"\.(?P<folder>.+)\.(manifest\.json|rejects\.jsonl)\.partial", re.DOTALL)
_LOCK, _SEAL, _JOURNAL, _FILES = "lock", "seal", "journal.json", "files"
_NOT_OURS_TO_SETTLE = ("running", "elsewhere", "unproven")
_LOCKED_BYTE = 1 << 20  # after the content: Windows does not let others read a locked byte
_WAIT_S, _POLL_S = 30.0, 0.02
_RESERVED = 3  # to open a folder, one inside it, and to list that
_MOST_FILES, _MOST_JOURNAL_BYTES = 1 << 14, 1 << 22  # of a set, and of its journal
_DEPTH = 3  # maximum depth of a graph file below the folder in which its set is staged
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.EBADF}


class Leftover(NamedTuple):
    """Files that a run left behind, or is still writing.

    Attributes:
        path: the hidden folder or file.
        state: `half` is an incomplete set, of no use; `unfinished` is a complete set in which some files still lack
            their final names; `elsewhere` belongs to a run on another machine, which may still be running; `unproven`
            may have come with a clone, an archive or a download.
        size_bytes: the total size of its files.
    """

    path: Path
    state: State
    size_bytes: int


class CommitFolder:
    """The staging folder of a set of files.

    Attributes:
        root: the destination folder of the set.
        path: the hidden folder in it.
        files: where to write; its layout mirrors `root`.
    """

    def __init__(self, root: Path, name: str) -> None:
        import secrets  # imported here, because commands that only read a model must start fast

        self.root = root
        self.path = root / f".{name}.{secrets.token_hex(4)}.partial"
        self.files = self.path / _FILES
        self._descriptor: int | None = None
        self._reserved: list[int] = []  # for `close`, if no other descriptors are left

    def make(self) -> None:
        """Make the folder and its lock."""
        tell_staged(self.path)
        with exclusive(self.root):  # it is never visible without its lock
            self.path.mkdir()
            try:
                (self.path / _SEAL).touch(0o600, exist_ok=False)
                descriptor = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
                self._descriptor = descriptor
                for _ in range(_RESERVED):
                    self._reserved.append(os.open(os.devnull, os.O_RDONLY))
            except OSError:  # no disk space, or no descriptor
                self._release()
                self._unlock()
                _remove(self.path)
                raise
            os.write(
                descriptor, json.dumps({**_machine(), "process": os.getpid(), "seal": _seal_of(self.path)}).encode()
            )
            while _try_lock(descriptor) is False:  # another process is briefly testing the lock
                time.sleep(_POLL_S)
        self.files.mkdir()

    def commit(self, files: Sequence[Path], obsolete: Sequence[Path]) -> None:
        """Move `files`, relative to `root`, into place in this order, and remove `obsolete` files."""
        for file in files:
            force_to_disk(self.files / file)
        kept = [file for file in dict.fromkeys(obsolete) if file not in files and os.path.lexists(self.root / file)]
        if len(files) == 1 and not kept:
            _move(self.files / files[0], self.root / files[0])
            force_to_disk((self.root / files[0]).parent)
            return
        for folder in {self.files / file.parent for file in files}:
            force_to_disk(folder)
        journal = {"files": [file.as_posix() for file in files], "obsolete": [file.as_posix() for file in kept]}
        text = json.dumps(journal)
        if max(len(files), len(kept)) > _MOST_FILES or len(text) > _MOST_JOURNAL_BYTES:
            raise OutputWriteError(
                f"{self.root} would get {len(files)} files and lose {len(kept)}, and a set has at most {_MOST_FILES}",
                "pass another --output, or keep weights in fewer files",
            )
        written = self.path / f"{_JOURNAL}.partial"
        written.write_text(text, encoding="utf-8")
        force_to_disk(written)
        force_to_disk(self.root)
        os.replace(written, self.path / _JOURNAL)  # noqa: PTH105  this decides
        force_to_disk(self.path)
        try:
            _finish(self.path, files, kept)
        except OSError:  # the commit is irreversible, and a disk error may be temporary
            _settle(self.path)

    def close(self) -> None:
        """Remove the folder; if the set was committed but its moves were interrupted, finish them first.

        Raises:
            OutputWriteError: it cannot be finished; the folder stays, for the next run to finish.
        """
        self._release()
        if sys.platform == "win32":
            self._unlock()  # open files cannot be removed there
        try:
            if _read_journal(self.path) is not None:
                with exclusive(self.root):
                    _settle(self.path)
            else:
                _remove(self.path)
        except OSError as error:
            raise OutputWriteError(
                f"cannot write all files of {self.root}: {error.strerror} ({error.filename})",
                f"they are whole in {self.path}; `onnxtool clean {self.root}`, or the same command again, moves them "
                "to their places once the folder can be written",
            ) from error
        finally:
            self._unlock()

    def _release(self) -> None:
        while self._reserved:
            os.close(self._reserved.pop())

    def _unlock(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def recover(output: Path) -> None:
    """Finish or remove leftovers of killed runs that wrote `output`, and log it.

    Raises:
        OSError: a committed set cannot be finished.
    """
    for root in list(output.parents)[:_DEPTH]:
        for path in _folders_in(root, output.name):
            settle(path)


def settle(path: Path) -> bool:
    """Finish or remove the folder or file of a killed run; return False if its run may still be going.

    Raises:
        OSError: it cannot be written.
    """
    import logging

    # An encoding run locks its folder; if this process held that lock, the run would seem to be active.
    with exclusive(path.parent) if _is_folder(path) else nullcontext():
        state = _state(path)
        if state in _NOT_OURS_TO_SETTLE:
            if state == "unproven":
                _warn_of(path)
            return False
        if path.is_dir() and not path.is_symlink():
            _settle(path)
        else:
            path.unlink(missing_ok=True)
    verb = "finished" if state == "unfinished" else "removed"
    logging.getLogger(__name__).warning("%s what a killed run left: %s", verb, ascii(str(path))[1:-1])
    return True


def remove_own_file(path: Path) -> None:
    """Remove a file if it exists; one that may belong to another user is reported and kept."""
    if _is_foreign(path):
        _warn_of(path)
    else:
        path.unlink(missing_ok=True)


@cache
def _warn_of(path: Path) -> None:
    import logging

    text = "left %s alone: nothing proves that a run of yours on this file system made it"
    logging.getLogger(__name__).warning(text, ascii(str(path))[1:-1])


def _is_foreign(path: Path) -> bool:
    """Whether something is there that no run of this user wrote: a link, no regular file, or another user's."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    return not stat.S_ISREG(status.st_mode) or (sys.platform != "win32" and status.st_uid != os.geteuid())


def find_leftovers(folder: Path) -> list[Leftover]:
    """Return leftovers and active files of runs in `folder` and its subfolders, sorted."""
    found = []
    for place, folders, files in os.walk(folder):
        ours = [name for name in folders if _is_folder(Path(place, name))]
        folders[:] = [name for name in folders if name not in ours]
        named = [name for name in files if _SHARD.fullmatch(name) or _RECORD.fullmatch(name)]
        found += [Path(place, name) for name in (*ours, *named)]
    return [Leftover(path, _state(path), _size_of(path)) for path in sorted(found)]


def unfinished_set_of(path: Path) -> Path | None:
    """Return the folder of a killed run that was renaming the set that contains `path`; None if there is none."""
    for root in list(path.parents)[:_DEPTH]:
        for folder in _folders_in(root):
            journal = _read_journal(folder)
            if journal is not None and path.relative_to(root) in (*journal[0], *journal[1]):
                return folder if _state(folder) == "unfinished" else None
    return None


def force_to_disk(path: Path) -> None:
    """Flush a file, or the entries of a folder, so that they survive a power failure."""
    is_folder = path.is_dir()
    if is_folder and sys.platform == "win32":  # folders cannot be opened there
        return
    try:
        descriptor = os.open(path, os.O_RDONLY if sys.platform != "win32" else os.O_RDWR)
    except PermissionError:
        if is_folder:  # it may be writable but not readable
            return
        raise
    try:
        os.fsync(descriptor)
    except OSError as error:
        if not (is_folder and error.errno in _NO_LOCKS):  # some file systems support this only for files
            raise
    finally:
        os.close(descriptor)


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Keep other runs out of a folder, if the system can lock folders; the lock ends with this process.

    Raises:
        OutputExistsError: another run holds the lock.
    """
    if sys.platform == "win32":
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if _try_lock(descriptor) is False:
            raise OutputExistsError(f"another run is writing into {folder}", "wait for it, or pass another --output")
        yield
    finally:
        with suppress(OSError):
            os.close(descriptor)


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Keep other runs out of a folder during an inspection or a commit.

    This does nothing on systems that cannot lock folders.

    Raises:
        OutputWriteError: another run has held the lock for too long.
    """
    try:
        if sys.platform == "win32":
            raise PermissionError
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:
        yield
        return
    try:
        end = time.monotonic() + _WAIT_S
        while _try_lock(descriptor) is False:
            if time.monotonic() > end:
                raise OutputWriteError(
                    f"another run has been writing into {folder} for {_WAIT_S:.0f} s",
                    "wait for it, or pass another --output",
                )
            time.sleep(_POLL_S)
        yield
    finally:
        os.close(descriptor)


def _try_lock(descriptor: int) -> bool | None:
    """Lock an open file; return False if another process holds the lock, and None if the file system has no locks."""
    try:
        if sys.platform == "win32":
            import msvcrt

            os.lseek(descriptor, _LOCKED_BYTE, os.SEEK_SET)
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return None if error.errno in _NO_LOCKS else False
    return True


def _machine() -> dict[str, str]:
    """Return what identifies this machine; containers may share locks, but not names."""
    import platform

    boot = ""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return {"host": platform.node(), "boot": boot}


def _state(path: Path) -> State:
    if not _is_folder(path):
        if _is_foreign(path):
            return "unproven"
        shards = path.parent
        if (record := _RECORD.fullmatch(path.name)) is not None and not _SHARD.fullmatch(path.name):
            shards = path.with_name(record["folder"])
        return "running" if _is_locked(shards) else "half"
    owner = _read_owner(path)
    lock = _is_locked(path / _LOCK)
    if lock or (lock is None and owner is not None and _is_alive(owner)):
        return "running"
    if owner is not None and not any(owner.get(key) == value for key, value in _machine().items() if value):
        return "elsewhere"
    if not _is_ours(path, owner):
        return "unproven"
    return "unfinished" if _is_pending(path) else "half"


def _is_locked(path: Path) -> bool | None:
    """Whether another process holds the lock; None if the file system cannot tell."""
    try:
        # Some network file systems only lock writable files.
        writes = os.access(path, os.W_OK) and not path.is_dir()
        waits_not = getattr(os, "O_NONBLOCK", 0)  # an untrusted lock may be a pipe
        descriptor = os.open(path, (os.O_RDWR if writes else os.O_RDONLY) | waits_not)
    except OSError as error:
        return isinstance(error, PermissionError)
    try:
        taken = _try_lock(descriptor)
        return None if taken is None else not taken
    finally:
        os.close(descriptor)


def _read_owner(folder: Path) -> dict[str, object] | None:
    try:
        owner = read_json(folder / _LOCK, MOST_CONFIG_BYTES)
    except (OSError, ValueError):  # the run was killed before writing it
        return None
    return owner if isinstance(owner, dict) else None


def _seal_of(folder: Path) -> list[int]:
    """Return the properties of a seal that a copy cannot reproduce: its inode and change time."""
    seal = (folder / _SEAL).lstat()
    return [seal.st_ino, seal.st_ctime_ns]


def _is_ours(folder: Path, owner: dict[str, object] | None) -> bool:
    """Whether this user made the folder here, by its seal; a seal that is still empty is harmless."""
    try:
        files = [one for one in folder.iterdir() if one.name != _FILES or one.is_symlink() or any(one.iterdir())]
        if all(one.name in (_LOCK, _SEAL) and one.lstat().st_size == 0 and not one.is_dir() for one in files):
            return True
        stated = [folder, *(folder / name for name in (_LOCK, _SEAL, _JOURNAL) if os.path.lexists(folder / name))]
        mine = sys.platform == "win32" or all(one.lstat().st_uid == os.geteuid() for one in stated)
        linked = any(one.is_symlink() for one in (*stated, folder / _FILES))
        return mine and not linked and owner is not None and owner.get("seal") == _seal_of(folder)
    except OSError:
        return False


def _is_alive(owner: dict[str, object]) -> bool:
    """Whether the process is running, where locks cannot tell; on other machines it is assumed to be."""
    process = owner.get("process")
    if sys.platform == "win32" or not isinstance(process, int) or owner.get("host") != _machine()["host"]:
        return True
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True


def _is_folder(path: Path) -> bool:
    return _FOLDER.fullmatch(path.name) is not None and path.is_dir() and not path.is_symlink()


def _folders_in(root: Path, name: str | None = None) -> list[Path]:
    """Return the folders that runs made in `root` for the output `name`."""
    try:
        with os.scandir(root) as entries:
            names = [entry.name for entry in entries if entry.name.endswith(".partial")]
    except OSError:
        return []
    matches = ((text, _FOLDER.fullmatch(text)) for text in sorted(names))
    return [
        root / text for text, match in matches if match and name in (None, match["name"]) and _is_folder(root / text)
    ]


def _read_journal(folder: Path) -> tuple[list[Path], list[Path]] | None:
    """Return the files to move and the files to remove, relative to the folder's parent; None before the commit.

    A downloaded folder may contain a foreign journal: one with paths outside the folder is ignored.
    """
    path = folder / _JOURNAL
    try:
        journal = read_json(path, _MOST_JOURNAL_BYTES)
        files, obsolete = ([Path(text) for text in journal[key]] for key in ("files", "obsolete"))
    except (OSError, ValueError, TypeError, KeyError):
        return None
    if max(len(files), len(obsolete)) > _MOST_FILES:
        return None
    if any(file.is_absolute() or file.drive or ".." in file.parts for file in (*files, *obsolete)):
        return None
    return files, obsolete


def _is_pending(folder: Path) -> bool:
    """Whether a set was committed, but some of its moves are still to be made."""
    journal = _read_journal(folder)
    return journal is not None and (
        any(os.path.lexists(folder / _FILES / file) for file in journal[0])
        or any(os.path.lexists(folder.parent / file) and not (folder.parent / file).is_dir() for file in journal[1])
    )


def _settle(folder: Path) -> None:
    """Complete the folder's journal, if it has one, and remove the folder."""
    journal = _read_journal(folder)
    if journal is not None:
        root = folder.parent.resolve()
        files = [file for file in journal[0] if os.path.lexists(folder / _FILES / file)]
        for file in (*files, *journal[1]):
            if not (root / file).parent.resolve().is_relative_to(root):
                raise OutputWriteError(
                    f"{folder} wants to change {file}, which a link leads out of {root}",
                    f"look at it, and remove {folder}",
                )
        _finish(folder, files, journal[1])
    _remove(folder)


def _finish(folder: Path, files: Sequence[Path], obsolete: Sequence[Path]) -> None:
    """Carry out a journal; completed steps may be repeated."""
    root = folder.parent
    for file in files:
        _move(folder / _FILES / file, root / file)
    for file in obsolete:
        if not (root / file).is_dir():
            (root / file).unlink(missing_ok=True)
    for place in {(root / file).parent for file in (*files, *obsolete)}:
        if place.is_dir():
            force_to_disk(place)


def _move(file: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    file.replace(target)


def _remove(folder: Path) -> None:
    import shutil

    for name in (_FILES, _JOURNAL, f"{_JOURNAL}.partial", _LOCK, _SEAL):  # the proof that it is ours is removed last
        shutil.rmtree(folder / name, ignore_errors=True)
        with suppress(OSError):
            (folder / name).unlink()
    with suppress(OSError):  # for which rmtree needs a descriptor
        folder.rmdir()
    shutil.rmtree(folder, ignore_errors=True)


def _size_of(path: Path) -> int:
    if not path.is_dir():
        return path.lstat().st_size
    return sum(Path(place, name).lstat().st_size for place, _, names in os.walk(path) for name in names)
