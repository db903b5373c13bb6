"""Files of this machine, of object stores and of other filesystems, as encoding reads and writes them.

A file is there whole or not at all: in a filesystem it is written under a hidden name and renamed, in a store one
request writes all of it. Nothing is renamed in a store, and no upload is begun that could be left half.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from onnxtool import reading
from onnxtool.encoding import filesystems
from onnxtool.encoding.locations import Location, Uri
from onnxtool.errors import OutputExistsError
from onnxtool.model_file.commits import folder_lock, force_to_disk, remove_own_file

_READ_BYTES = 1 << 20
# Held while hidden files appear in a folder, as by what ends a process that must leave none.
appearing = threading.Lock()
unfinished: set[Path] = set()  # staged shards and temporary folders of this process
_YOUNG_S = 60.0  # a temporary folder that has just been made may not have its lock yet


class Entry(NamedTuple):
    """A file, as a listing has it.

    Attributes:
        modified: seconds since 1970.
    """

    size_bytes: int
    modified: float


def entries(folder: Location) -> dict[str, Entry]:
    """List the files of a folder, by their names; none where there is no such folder."""
    if isinstance(folder, Uri):
        return {name: Entry(size, modified) for name, size, modified in filesystems.listed(folder)}
    found = {}
    with suppress(FileNotFoundError), os.scandir(folder) as inside:
        for item in inside:
            with suppress(FileNotFoundError):  # it is gone since
                if item.is_file():
                    status = item.stat()
                    found[item.name] = Entry(status.st_size, status.st_mtime)
    return found


def entry(location: Location) -> Entry | None:
    """Return what is known of a file without reading it; None where there is none."""
    if isinstance(location, Uri):
        found = filesystems.head(location)
        return None if found is None else Entry(*found[:2])
    with suppress(FileNotFoundError):
        status = location.stat()
        return Entry(status.st_size, status.st_mtime)
    return None


def open_file(location: Location) -> io.BufferedReader:
    """Open a file for reading; one of a store is read by requests of some megabytes.

    Raises:
        OSError: it is not there, or cannot be read.
        StoreError: the store does not answer.
    """
    if isinstance(location, Path):
        return io.BufferedReader(io.FileIO(location, "rb"), _READ_BYTES)
    return io.BufferedReader(filesystems.RangeReader(location), filesystems.RANGE_BYTES)


def read_bytes(location: Location) -> bytes:
    """Read a file.

    Raises:
        OSError: it is not there, cannot be read, or is none: a pipe would wait for a writer.
        StoreError: the store does not answer.
    """
    if isinstance(location, Uri):
        return filesystems.get(location)
    return reading.read_bytes(location)


def write(location: Location, content: bytes, token: str = "") -> None:
    """Write a file as a whole, in place of one that is there; `token` is of one of several writers at once."""
    if isinstance(location, Uri):
        filesystems.put(location, content)
        return
    location.parent.mkdir(exist_ok=True)
    with written(staged(location, token), content):
        publish(location, token)


@contextmanager
def written(path: Path, content: bytes) -> Iterator[None]:
    """Write a file under its hidden name, which it loses in the block or afterwards; no link there is followed."""
    with appearing:
        remove_own_file(path)
        try:
            with path.open("xb") as file:
                file.write(content)
            yield
        finally:
            remove_own_file(path)


def upload(path: Path, uri: Uri, *, named_by_contents: bool = False) -> None:
    """Write the contents of a file of this machine to another place.

    One that is named by its contents stays as it is where it is there: no writer takes it from another, not even for
    the moment in which a filesystem replaces it.
    """
    filesystems.put(uri, path, named_by_contents=named_by_contents)


def create(location: Location, content: bytes, token: str = "") -> bool:
    """Write a file that only one writer may write; return whether it has this content now.

    In a store the request itself is refused where the file is there, in another filesystem its renaming, and on a disk
    its linking. `token` is of one of several writers at once.
    """
    if isinstance(location, Uri):
        return filesystems.put(location, content, only_once=True) or read_bytes(location) == content
    path = staged(location, token)
    path.parent.mkdir(exist_ok=True)
    with written(path, content):
        force_to_disk(path)
        try:
            os.link(path, location)
        except FileExistsError:
            return reading.read_bytes(location) == content
        except OSError:  # a filesystem without links
            path.replace(location)
        force_to_disk(location.parent)
        return True


def remove(locations: Iterable[Location]) -> None:
    """Remove files; those that are gone are no failure, and hidden ones that another user may have put there stay."""
    uris = []
    for location in locations:
        if isinstance(location, Uri):
            uris.append(location)
        elif location.name.startswith("."):
            remove_own_file(location)
        else:
            location.unlink(missing_ok=True)
    if uris:
        filesystems.delete(uris)


def remove_folder(location: Location) -> None:
    """Remove a folder where it is there and empty."""
    if isinstance(location, Uri):
        filesystems.remove_folder(location)
        return
    with suppress(OSError):
        location.rmdir()


@contextmanager
def on_this_machine(location: Location) -> Iterator[Path]:
    """Give a file as one of this machine, for what reads files by their path; one of a store is copied for a while."""
    if isinstance(location, Path):
        yield location
        return
    with scratch_folder("copy") as folder:
        path = folder / location.name
        filesystems.download(location, path)
        yield path


def staged(path: Path, token: str = "") -> Path:
    """Return where a file is written before it gets its name; `token` is of one of several writers."""
    return path.with_name(f".{path.name}{token and f'.{token}'}.partial")


def publish(path: Path, token: str = "") -> None:
    """Force a staged file to the disk and give it its name."""
    force_to_disk(staged(path, token))
    staged(path, token).replace(path)
    force_to_disk(path.parent)


@contextmanager
def scratch_folder(kind: str) -> Iterator[Path]:
    """Give a folder for temporary files; those that killed processes have left of this `kind` are removed first."""
    prefix = f"onnxtool-{kind}-"
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError, OutputExistsError):
            _remove_abandoned(path)
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as name, folder_lock(Path(name)):
        unfinished.add(Path(name))
        yield Path(name)
    unfinished.discard(Path(name))


def remove_unfinished() -> None:
    """Remove what this process still writes: it is about to end without unwinding."""
    for path in list(unfinished):
        shutil.rmtree(path, ignore_errors=True)
        with suppress(OSError):
            path.unlink()


def _remove_abandoned(path: Path) -> None:
    """Remove a folder that nobody has locked: locks end with their process, also in another container."""
    status = path.lstat()
    is_ours = sys.platform != "win32" and status.st_uid == os.geteuid() and not path.is_symlink()
    if is_ours and time.time() - status.st_mtime > _YOUNG_S:
        with folder_lock(path):
            shutil.rmtree(path)
