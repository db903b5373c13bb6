"""List, read and remove files, on this machine, in an object store or on a web server.

Stores and servers are reached through obstore. A store writes a file in one request, so that it appears whole or not at
all. Tested with obstore 0.12.
"""

from __future__ import annotations

import atexit
import errno
import io
import os
import posixpath
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from onnxtool import reading
from onnxtool.encoding.locations import SERVERS, STORES, Location, Uri
from onnxtool.errors import InputError, OutputExistsError, OutputWriteError, StoreError, imported, shorten
from onnxtool.interruption import check_interrupted, temporary_folder
from onnxtool.model_file import ModelFile
from onnxtool.model_file.commits import folder_lock
from onnxtool.model_file.metadata import PARTNER_KEY, READS_KEY
from onnxtool.model_file.wire import read_structure

Answer = TypeVar("Answer")

RANGE_BYTES = 8 << 20  # of a request that reads a part of a file
_MOST_BYTES = 5 << 30  # of one request, as stores take it
_RETRIES, _GIVE_UP, _CONNECT = 20, timedelta(minutes=5), timedelta(seconds=10)  # of a store's client
_WAITS = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4)  # seconds
_BROKEN_OFF = re.compile(r"\bbody\b")
_REQUESTS_AT_ONCE = 32


class Entry(NamedTuple):
    """A file in a listing.

    Attributes:
        modified: seconds since 1970; 0 if unknown.
        tag: distinguishes it from another file of the same name; empty for a file of this machine.
    """

    size_bytes: int
    modified: float
    tag: str = ""


class _Inside(NamedTuple):
    """The contents of a folder: files and subfolders by name."""

    files: dict[str, Entry]
    folders: list[str]


class _Store:
    """An object store or a web server."""

    def __init__(self, root: str) -> None:
        why = f"{root} needs obstore", "pip install 'onnxtool-cli[stores]'"
        allows_http = any(
            os.environ.get(f"{name}_ALLOW_HTTP", "").lower() in ("1", "true") for name in ("AWS", "GOOGLE", "AZURE")
        )
        self._store = imported("obstore.store", *why).from_url(
            root,
            retry_config={"max_retries": _RETRIES, "retry_timeout": _GIVE_UP},
            client_options={"timeout": _GIVE_UP, "connect_timeout": _CONNECT, "allow_http": allows_http},
        )

    def entry(self, path: str) -> Entry:
        return _entry(self._store.head(path))

    def inside(self, path: str) -> _Inside:
        listing = self._store.list_with_delimiter(path or None)
        return _Inside(
            {posixpath.basename(entry["path"]): _entry(entry) for entry in listing["objects"]},
            [posixpath.basename(entry.rstrip("/")) for entry in listing["common_prefixes"]],
        )

    def read(self, path: str, begin: int, end: int | None) -> tuple[Entry, bytes]:
        answer = self._store.get(path, options={} if end is None else {"range": (begin, end)})
        return _entry(answer.meta), answer.bytes().to_bytes()

    def fetch(self, path: str, target: Path) -> Entry:
        answer = self._store.get(path)
        with target.open("wb") as file:  # not through memory, as models are large
            for chunk in answer.stream(RANGE_BYTES):
                file.write(chunk)
        return _entry(answer.meta)

    def write(self, path: str, content: bytes | Path, *, only_once: bool) -> bool:
        from obstore.exceptions import AlreadyExistsError

        try:
            self._store.put(path, content, mode="create" if only_once else "overwrite", use_multipart=False)
        except AlreadyExistsError:
            return False
        return True

    def remove(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self._store.delete(path)


def _entry(meta: Mapping[str, Any]) -> Entry:
    """Return a file's details."""
    size, modified = meta["size"], meta["last_modified"].timestamp()
    return Entry(size, modified, meta.get("e_tag") or f"{size} bytes of {modified}")


@lru_cache(maxsize=16)
def _client(root: str, _process: int) -> _Store:
    """Open a store; connections belong to one process."""
    return _Store(root)


def _ask(uri: Uri, request: Callable[[Any, str], Answer]) -> Answer:
    """Call a store, retrying after temporary failures.

    Raises:
        FileNotFoundError: there is no such file.
        InputError: obstore is missing.
        StoreError: the request was refused or never answered.
    """
    for wait in (*_WAITS, None):
        try:
            return request(_client(uri.root, os.getpid()), uri.key)
        except FileNotFoundError:
            raise FileNotFoundError(errno.ENOENT, "there is no such file", str(uri)) from None
        except (InputError, StoreError):
            raise
        except Exception as error:  # noqa: BLE001  obstore and its backends have no common error
            # Its client retries everything but an answer that is broken off.
            is_passing = isinstance(error, EOFError) or _BROKEN_OFF.search(_reason(error)) is not None
            if wait is None or not is_passing:
                raise StoreError(
                    f"{uri}: {_reason(error)}",
                    "check the address, the network, and the credentials of the environment, such as AWS_ACCESS_KEY_ID",
                ) from None
        check_interrupted()
        time.sleep(wait)
    raise AssertionError("the last wait is None")


def _reason(error: Exception) -> str:
    """Return a library's message on one line, without obstore's dump of its source."""
    message = " ".join(str(error).partition("\n\nDebug source")[0].split())
    return shorten(message or type(error).__name__, 1000)  # with the store's own code in the middle


def below(folder: Uri, before: str = "") -> Iterator[tuple[str, int]]:
    """Yield name and size of the files in a folder and its subfolders."""
    files, folders = _inside(folder)
    yield from ((f"{before}{name}", details.size_bytes) for name, details in files.items())
    for name in folders:
        yield from below(folder / name, f"{before}{name}/")


def _inside(folder: Uri) -> _Inside:
    if folder.scheme in SERVERS:
        raise InputError(f"{folder} is of a server, which lists no folders", "pass the address of one file, or a store")
    contents: _Inside = _ask(folder, lambda client, path: client.inside(path))
    return contents


def head(uri: Uri) -> Entry | None:
    """Return a file's details without reading it; None if it does not exist."""
    with suppress(FileNotFoundError):
        details: Entry = _ask(uri, lambda client, path: client.entry(path))
        return details
    return None


def get(uri: Uri, begin: int = 0, end: int | None = None, tag: str | None = None) -> bytes:
    """Read a file, or a range of it; with `tag`, a replaced file is an error."""

    def request(client: _Store, path: str) -> bytes:
        details, content = client.read(path, begin, end)
        if tag is not None and tag != details.tag:
            raise StoreError(f"{uri} has changed while it was read", "run the same command again")
        _require_size(len(content), (details.size_bytes if end is None else end) - begin)
        return content

    return _ask(uri, request)


def download(uri: Uri, path: Path) -> None:
    """Copy a file to this machine."""

    def request(client: _Store, source: str) -> None:
        details = client.fetch(source, path)
        _require_size(path.stat().st_size, details.size_bytes)

    _ask(uri, request)


def _require_size(size: int, expected: int) -> None:
    if size != expected:
        raise EOFError(f"{size} bytes arrived instead of {expected}")


def require_writable(uri: Uri) -> None:
    """Refuse to write anywhere but into a store.

    Raises:
        OutputWriteError: it is on a server.
    """
    if uri.scheme not in STORES:
        raise OutputWriteError(
            f"{uri} is only read from", "write into a folder, which may be mounted, or a store: s3://, gs:// or az://"
        )


def put(uri: Uri, content: bytes | Path, *, only_once: bool = False) -> bool:
    """Write a file in one request; return whether it was written. With `only_once`, an existing file is kept."""
    require_writable(uri)
    size = len(content) if isinstance(content, bytes) else content.stat().st_size
    if size > _MOST_BYTES:
        raise OutputWriteError(
            f"cannot write {uri} in one request: it has {size} bytes, and stores take {_MOST_BYTES}",
            "make smaller shards: --shard_size",
        )
    is_written: bool = _ask(uri, lambda client, path: client.write(path, content, only_once=only_once))
    return is_written


class RangeReader(io.RawIOBase):
    """A remote file as a file object: each read is a separate request, which is retried if lost.

    Raises:
        FileNotFoundError: there is no such file.
    """

    def __init__(self, uri: Uri) -> None:
        details = head(uri)
        if details is None:
            raise FileNotFoundError(errno.ENOENT, "there is no such file", str(uri))
        self._uri = uri
        self._size, self._tag = details.size_bytes, details.tag
        self._place = 0

    def readable(self) -> bool:
        """Return true."""
        return True

    def seekable(self) -> bool:
        """Return true."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a byte, without a request."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._size}[whence]
        self._place = max(0, base + offset)
        return self._place

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer with one request, which fails if the file has been replaced."""
        view = memoryview(buffer).cast("B")
        end = min(self._size, self._place + len(view))
        if end <= self._place:
            return 0
        content = get(self._uri, self._place, end, self._tag)
        view[: len(content)] = content
        self._place += len(content)
        return len(content)


START_AGAIN = "pass another --output, or start again with --force (of infer and encode run)"
_READ_BYTES = 1 << 20
_YOUNG_S = 60.0  # a newly created temporary folder may not have its lock yet
# Files of tokenizers, configurations and pooling modules; weights in other formats are not needed.
_FOLDERS = r"([^/]+/)?([^/]+_)?[0-9]+_[A-Za-z]+/"
_BESIDE = re.compile(rf"([^/]+/|{_FOLDERS})?[^/]+\.(json|txt|model|jinja)|{_FOLDERS}model\.safetensors")
_MOST_BESIDE_BYTES = 1 << 28  # of a file next to the model


def entries(folder: Location) -> dict[str, Entry]:
    """List the files of a folder by name; empty if the folder does not exist."""
    files: dict[str, Entry] = {}
    if isinstance(folder, Uri):
        with suppress(FileNotFoundError):
            files = _inside(folder).files
        return files
    with suppress(FileNotFoundError), os.scandir(folder) as inside:
        for item in inside:
            with suppress(FileNotFoundError):  # it is gone since
                if item.is_file():
                    status = item.stat()
                    files[item.name] = Entry(status.st_size, status.st_mtime)
    return files


def entry(location: Location) -> Entry | None:
    """Return a file's size and time without reading it; None if it does not exist."""
    if isinstance(location, Uri):
        return head(location)
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
    return io.BufferedReader(RangeReader(location), RANGE_BYTES)


def read_bytes(location: Location) -> bytes:
    """Read a file.

    Raises:
        OSError: it is missing, cannot be read, or is not a regular file: a pipe would wait for a writer.
        StoreError: the store does not answer.
    """
    if isinstance(location, Uri):
        return get(location)
    return reading.read_bytes(location)


def remove(locations: Iterable[Location]) -> None:
    """Remove files; missing ones are ignored."""
    uris = []
    for location in locations:
        if isinstance(location, Uri):
            require_writable(location)
            uris.append(location)
        else:
            location.unlink(missing_ok=True)
    if uris:
        with ThreadPoolExecutor(_REQUESTS_AT_ONCE, "removing") as workers:
            list(workers.map(lambda uri: _ask(uri, lambda client, path: client.remove(path)), uris))


@contextmanager
def on_this_machine(location: Location) -> Iterator[Path]:
    """Provide a local path to a file; a file in a store is copied temporarily."""
    if isinstance(location, Path):
        yield location
        return
    with scratch_folder("copy") as folder:
        path = folder / location.name
        download(location, path)
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
        download(model, path)
    except FileNotFoundError:
        raise InputError(f"no such model: {model}", "check --model_path") from None
    structures = [read_structure(path)]
    partner = ModelFile(path, structures[0]).plain_name(PARTNER_KEY)
    if partner is not None and task not in (None, *structures[0].metadata.get(READS_KEY, "").split(", ")):
        with suppress(FileNotFoundError):  # reported by the reader that needs it
            download(model.parent / partner, path.with_name(partner))
            structures.append(read_structure(path.with_name(partner)))
    external = {(path.parent / data.location).resolve() for structure in structures for data in structure.external}
    external |= {(path.parent / adapter.file).resolve() for adapter in ModelFile(path, structures[0]).adapters}
    for name, size in below(base):
        target = (place / name).resolve()
        is_wanted = target in external or (_BESIDE.fullmatch(name) is not None and size <= _MOST_BESIDE_BYTES)
        if is_wanted and place.resolve() in target.parents:
            target.parent.mkdir(parents=True, exist_ok=True)
            download(base / name, target)
    ModelFile.open(path)
    return path


_UNTIL_THE_END = ExitStack()
atexit.register(_UNTIL_THE_END.close)
