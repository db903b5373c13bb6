"""List, read and remove files, on this machine or anywhere else."""

from __future__ import annotations

import atexit
import io
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache
from pathlib import Path

from onnxtool import reading
from onnxtool.encoding import filesystems
from onnxtool.encoding.filesystems import Entry as Entry
from onnxtool.encoding.locations import Location, Uri
from onnxtool.errors import InputError, OutputExistsError
from onnxtool.interruption import temporary_folder
from onnxtool.model_file import ModelFile
from onnxtool.model_file.commits import folder_lock
from onnxtool.model_file.metadata import PARTNER_KEY, READS_KEY
from onnxtool.model_file.wire import read_structure

START_AGAIN = "pass another --output, or start again with --force, which infer and encode run have"
_READ_BYTES = 1 << 20
_YOUNG_S = 60.0  # a newly created temporary folder may not have its lock yet
# Files of tokenizers, configurations and pooling modules; weights in other formats are not needed.
_FOLDERS = r"([^/]+/)?([^/]+_)?[0-9]+_[A-Za-z]+/"
_BESIDE = re.compile(rf"([^/]+/|{_FOLDERS})?[^/]+\.(json|txt|model|jinja)|{_FOLDERS}model\.safetensors")
_MOST_BYTES = 1 << 28  # of a file next to the model


def entries(folder: Location) -> dict[str, Entry]:
    """List the files of a folder by name; empty if the folder does not exist."""
    if isinstance(folder, Uri):
        return filesystems.listed(folder)
    found = {}
    with suppress(FileNotFoundError), os.scandir(folder) as inside:
        for item in inside:
            with suppress(FileNotFoundError):  # it is gone since
                if item.is_file():
                    status = item.stat()
                    found[item.name] = Entry(status.st_size, status.st_mtime)
    return found


def entry(location: Location) -> Entry | None:
    """Return a file's size and time without reading it; None if it does not exist."""
    if isinstance(location, Uri):
        return filesystems.head(location)
    with suppress(FileNotFoundError):
        status = location.stat()
        return Entry(status.st_size, status.st_mtime)
    return None


def open_file(location: Location) -> io.BufferedReader:
    """Open a file for reading; files in a store are read in requests of a few megabytes.

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
        OSError: it is missing, cannot be read, or is not a regular file: a pipe would wait for a writer.
        StoreError: the store does not answer.
    """
    if isinstance(location, Uri):
        return filesystems.get(location)
    return reading.read_bytes(location)


def remove(locations: Iterable[Location]) -> None:
    """Remove files; missing ones are ignored."""
    uris = []
    for location in locations:
        if isinstance(location, Uri):
            uris.append(location)
        else:
            location.unlink(missing_ok=True)
    if uris:
        filesystems.delete(uris)


@contextmanager
def on_this_machine(location: Location) -> Iterator[Path]:
    """Provide a local path to a file; a file in a store is copied temporarily."""
    if isinstance(location, Path):
        yield location
        return
    with scratch_folder("copy") as folder:
        path = folder / location.name
        filesystems.download(location, path)
        yield path


@contextmanager
def scratch_folder(kind: str) -> Iterator[Path]:
    """Provide a folder for temporary files, after removing folders of this `kind` left by killed processes."""
    prefix = f"onnxtool-{kind}-"
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError, OutputExistsError):
            _remove_abandoned(path)
    with temporary_folder(prefix) as folder, folder_lock(folder):
        yield folder


def _remove_abandoned(path: Path) -> None:
    """Remove an unlocked folder: locks end with their process, even in another container."""
    status = path.lstat()
    is_ours = sys.platform != "win32" and status.st_uid == os.geteuid() and not path.is_symlink()
    if is_ours and time.time() - status.st_mtime > _YOUNG_S:
        with folder_lock(path) as is_ended:
            if is_ended:
                shutil.rmtree(path)


def model_on_this_machine(location: Location, task: str | None = None) -> Path:
    """Return the path of a model; from a store, it is fetched with its external data and its checkpoint's files.

    Its partner is fetched too if that encodes texts of the task, `query` or `document`.

    Raises:
        InputError: there is none.
        ModelFileError: it is malformed, or its external data is missing or lies elsewhere.
        StoreError: the store does not answer.
    """
    return location if isinstance(location, Path) else _fetch(location, task)


@lru_cache(maxsize=1)
def _fetch(model: Uri, task: str | None) -> Path:
    # Folders for other tools have the graph in `onnx/`, and the checkpoint's files above it.
    base = model.parent.parent if model.parent.name == "onnx" else model.parent
    place = _UNTIL_THE_END.enter_context(scratch_folder("model"))
    path = place / model.key.removeprefix(f"{base.key}/")
    path.parent.mkdir(exist_ok=True)
    try:
        filesystems.download(model, path)
    except FileNotFoundError:
        raise InputError(f"no such model: {model}", "check --model_path") from None
    structures = [read_structure(path)]
    partner = ModelFile(path, structures[0]).plain_name(PARTNER_KEY)
    if partner is not None and task not in (None, *structures[0].metadata.get(READS_KEY, "").split(", ")):
        with suppress(FileNotFoundError):  # reported by the reader that needs it
            filesystems.download(model.parent / partner, path.with_name(partner))
            structures.append(read_structure(path.with_name(partner)))
    external = {(path.parent / data.location).resolve() for one in structures for data in one.external}
    for name, size in filesystems.below(base):
        target = (place / name).resolve()
        is_wanted = target in external or (_BESIDE.fullmatch(name) is not None and size <= _MOST_BYTES)
        if is_wanted and place.resolve() in target.parents:
            target.parent.mkdir(parents=True, exist_ok=True)
            filesystems.download(base / name, target)
    ModelFile.open(path)
    return path


_UNTIL_THE_END = ExitStack()
atexit.register(_UNTIL_THE_END.close)
