"""Move a set of files into place so that files of two runs never lie side by side.

A run writes into a hidden folder next to their destination, `.NAME.XXXXXXXX.partial`, and holds a lock on it. When all
files are on the disk, a single file replaces the old one by a rename. Of a set, the old files are moved out first and
then the new ones in, in the opposite order: a graph is there only with all other files of its run, and cannot be opened
before its external data follows. A process that is killed in between leaves no usable graph, and the same command
writes the set again. That run also removes the hidden folder, whose lock is free.
"""

from __future__ import annotations

import errno
import os
import re
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from onnxtool.errors import NO_SPACE, OnnxtoolError, OutputExistsError, OutputWriteError
from onnxtool.interruption import critical, unfinished

_WAIT_S, _POLL_S = 30.0, 0.02  # for other runs that move files into the same folder
PARTIAL = ".partial"  # what names of hidden folders end in
_DEPTH = 3  # maximum depth of a graph file below the folder in which its set is staged
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.EBADF}


@contextmanager
def hidden_folder(root: Path, name: str) -> Iterator[Path]:
    """Make the hidden folder of a set, and remove it, with parent folders that were created for it and stay empty.

    Its subfolder `files`, with the layout of `root`, is where to write.
    """
    import secrets  # imported here, because commands that only read a model must start fast
    import shutil

    path = root / f".{name}.{secrets.token_hex(4)}{PARTIAL}"
    missing = [folder for folder in (root, *root.parents) if not folder.exists()]
    unfinished.add(path)
    try:
        root.mkdir(parents=True, exist_ok=True)
        with ExitStack() as locks:
            with folder_lock(root, waits=True):  # it is never visible without its lock
                (path / "files").mkdir(parents=True)
                locks.enter_context(folder_lock(path))
            yield path
    finally:
        with critical():
            shutil.rmtree(path, ignore_errors=True)
            for folder in missing:
                with suppress(OSError):  # it is not empty
                    folder.rmdir()
            unfinished.discard(path)


def commit(hidden: Path, files: Sequence[Path], obsolete: Sequence[Path], obsolete_data: Sequence[Path]) -> None:
    """Move `files`, given by their final paths, into place in this order, and old ones out in the opposite order.

    If the disk fails in between, the old files are moved back.
    """
    staged = {file: hidden / "files" / file.relative_to(hidden.parent) for file in files}
    for file in staged.values():
        force_to_disk(file)
    known = [*obsolete_data, *files[::-1]]
    known[(place := max(1, len(known) - 1)) : place] = obsolete
    old = [file for file in dict.fromkeys(known) if os.path.lexists(file) and not file.is_dir()]
    if len(files) == 1 and old in ([], [*files]):  # a rename alone is enough
        old = []
    moves = [(file, hidden / "replaced" / file.relative_to(hidden.parent)) for file in old]
    moves += [(source, file) for file, source in staged.items()]
    moved: list[tuple[Path, Path]] = []
    with critical():
        try:
            for source, target in moves:
                if len(moved) == len(old) > 0:
                    _force_names(old)
                target.parent.mkdir(parents=True, exist_ok=True)
                source.replace(target)
                moved.append((source, target))
        except OSError:
            for source, target in moved[::-1]:
                target.replace(source)
            raise
        _force_names((*old, *files))


def _force_names(files: Sequence[Path]) -> None:
    for folder in {file.parent for file in files}:
        force_to_disk(folder)


def remove_stages(output: Path) -> None:
    """Remove the hidden folders that killed runs left for `output`, and log it; a run that is going on has its lock."""
    import logging
    import shutil

    name = re.compile(rf"\.{re.escape(output.name)}\.[0-9a-f]{{8}}{re.escape(PARTIAL)}", re.DOTALL)
    for root in list(output.parents)[:_DEPTH]:
        with suppress(OSError):
            leftovers = [path for path in root.iterdir() if name.fullmatch(path.name) and not path.is_symlink()]
            for path in leftovers:
                with suppress(OutputExistsError), folder_lock(root, waits=True), folder_lock(path) as is_ended:
                    if is_ended:
                        shutil.rmtree(path)
                        logging.getLogger(__name__).warning(
                            "removed what a killed run left: %s", ascii(str(path))[1:-1]
                        )


def force_to_disk(path: Path) -> None:
    """Flush a file, or the entries of a folder, so that they survive a power failure."""
    is_folder = path.is_dir()
    try:
        descriptor = os.open(path, os.O_RDONLY if sys.platform != "win32" else os.O_RDWR)
    except PermissionError:
        if is_folder:  # it may be writable but not readable, and Windows opens no folder
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
def folder_lock(folder: Path, *, waits: bool = False) -> Iterator[bool]:
    """Keep other runs out of a folder; the lock ends with this process.

    Yields whether it is locked: Windows and some file systems have no locks on folders.

    Raises:
        OutputExistsError: another run holds the lock; with `waits`, for more than half a minute.
    """
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:  # it may be writable but not readable, and Windows opens no folder
        yield False
        return
    end = time.monotonic() + waits * _WAIT_S
    try:
        while (is_locked := _try_lock(descriptor)) is False:
            if time.monotonic() >= end:
                raise OutputExistsError(
                    f"another run is writing into {folder}", "wait for it, or pass another --output"
                )
            time.sleep(_POLL_S)
        yield is_locked is not None
    finally:
        with suppress(OSError):
            os.close(descriptor)


def _try_lock(descriptor: int) -> bool | None:
    """Lock an open folder; return False if another run holds the lock, and None if the system has no such locks."""
    if sys.platform == "win32":
        return None
    import fcntl

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return None if error.errno in _NO_LOCKS else False
    return True


# Libraries in Rust have errors of their own that quote the system's number; numpy's OSError has no number.
_QUOTED = re.compile(r"\(os error (\d+)\)|\d+ requested and \d+ written")


@contextmanager
def disk_failures(output: Path) -> Iterator[None]:
    """Convert failures of the disk in the block to one error, also those that libraries report in their own way."""
    try:
        yield
    except OnnxtoolError:
        raise
    except Exception as error:
        failure, quoted = error, _QUOTED.search(str(error))
        if quoted and (number := int(quoted[1] or errno.ENOSPC)) in NO_SPACE:
            failure = OSError(number, os.strerror(number))
        if not isinstance(failure, OSError) or failure.errno is None:  # libraries derive other errors from OSError, too
            raise
        raise output_write_error(output, failure) from error


def output_write_error(output: Path, error: OSError) -> OutputWriteError:
    """Return the error for a failure of the disk, with its way out."""
    import shutil

    if error.errno in NO_SPACE:
        folder = next(parent for parent in output.absolute().parents if parent.is_dir())
        free = shutil.disk_usage(folder).free
        return OutputWriteError(
            f"no space to write {output}: {error.strerror} ({free / 1e6:.0f} MB free)",
            "free some space or pass a path on another disk; nothing was changed",
        )
    place = os.fspath(error.filename) if error.filename else str(output)
    gone = error.errno == errno.ENOENT
    return OutputWriteError(
        f"cannot write {output}: {error.strerror} ({place})",
        "it was removed meanwhile; run this again" if gone else "pass a path in a folder that you can write to",
    )


def check_free_names(targets: Sequence[tuple[Path, Path]]) -> None:
    """Refuse files whose path is taken by a file with different content.

    Args:
        targets: each file with the path that it is to get.

    Raises:
        OutputExistsError: one is.
    """
    import filecmp

    for file, target in targets:
        if target.exists() and not filecmp.cmp(file, target, shallow=False):
            raise output_exists(target)


def output_exists(output: Path) -> OutputExistsError:
    """Return the error for a path that is taken."""
    return OutputExistsError(f"{output} exists already", "pass --force to replace it, or another path")
