"""Where a corpus, its plan and its vectors lie: on this machine, or in an object store.

A file is there whole or not at all: on a disk it is written under a hidden name and renamed, in a store one request
writes all of it. Nothing is renamed in a store, and no upload is begun that could be left half.
"""

from __future__ import annotations

import io
import os
import posixpath
import re
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from onnxtool.errors import InputError
from onnxtool.model_file.commits import force_to_disk

_READ_BYTES = 1 << 20
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://", re.ASCII)
# What object stores are called by; of the others, containers of Azure are written before an @.
STORES = ("s3", "s3a", "gs", "az", "adl", "abfs", "abfss")
_WITH_CONTAINERS = ("abfs", "abfss")
READ_ONLY = ("http", "https")


@dataclass(frozen=True, slots=True)
class Uri:
    """A file or a folder in an object store.

    Attributes:
        root: the store, `s3://bucket`.
        key: of the object, or what the keys of all objects of the folder begin with; without / at its ends.
    """

    root: str
    key: str

    @property
    def name(self) -> str:
        """The last part of the key."""
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> Uri:
        """The folder that it lies in."""
        return Uri(self.root, self.key.rpartition("/")[0])

    def with_name(self, name: str) -> Uri:
        """Return another file of the same folder."""
        return self.parent / name

    def __truediv__(self, name: str) -> Uri:
        return Uri(self.root, f"{self.key}/{name}" if self.key else name)

    def __str__(self) -> str:
        return f"{self.root}/{self.key}"


Location = Path | Uri


def is_uri(text: str) -> bool:
    """Whether `text` is written as an address, and not as a path."""
    return _SCHEME.match(text) is not None


def parse_location(value: Location | str) -> Location:
    """Return the file or folder that is meant by `value`, a path or an address such as `s3://bucket/name`.

    Raises:
        InputError: there is no such kind of address, or it holds credentials, which would be written into manifests.
    """
    if not isinstance(value, str):
        return value
    match = _SCHEME.match(value)
    if match is None:
        return Path(value)
    scheme = match[1].lower()
    parts = urlsplit(value)
    address = f"{scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"  # what may be shown
    if scheme == "file":
        if parts.netloc not in ("", "localhost"):
            raise InputError(f"{address} is a file of another machine", "pass a path, or file:///PATH")
        return Path(unquote(parts.path))
    if scheme not in (*STORES, *READ_ONLY):
        raise InputError(
            f"{address} cannot be read: there is no store of the kind {scheme}://",
            f"use {', '.join(f'{name}://' for name in (*STORES, *READ_ONLY))}, or a path that is mounted",
        )
    user, separator, _ = parts.netloc.rpartition("@")
    if (separator and (scheme not in _WITH_CONTAINERS or ":" in user)) or parts.query or parts.fragment:
        raise InputError(
            f"the address {address} has credentials or a query beside it, which manifests and logs would show",
            "leave them out; credentials are read from the environment, such as AWS_ACCESS_KEY_ID",
        )
    key = parts.path.removeprefix("/").removesuffix("/")
    if not parts.netloc or any(part in ("", ".", "..") for part in key.split("/") if key):
        raise InputError(f"{address} is no address of an object", f"write {scheme}://BUCKET/FOLDER/NAME")
    return Uri(f"{scheme}://{parts.netloc}", key)


def relative(target: Location, folder: Location) -> str:
    """Write where `target` lies, as seen from `folder`; an address where they have no store in common."""
    if isinstance(target, Uri) or isinstance(folder, Uri):
        if isinstance(target, Uri) and isinstance(folder, Uri) and target.root == folder.root:
            return posixpath.relpath(f"/{target.key}", f"/{folder.key}")
        return str(target) if isinstance(target, Uri) else target.resolve().as_posix()
    try:
        return Path(os.path.relpath(target.resolve(), folder.resolve())).as_posix()
    except ValueError:  # another drive of Windows
        return target.resolve().as_posix()


def joined(folder: Location, text: str) -> Location:
    """Return what `relative` has written.

    Raises:
        InputError: it is no address.
    """
    if is_uri(text):
        return parse_location(text)
    if isinstance(folder, Path):
        return folder / text
    if text.startswith("/"):
        return Path(text)
    return Uri(folder.root, posixpath.normpath(f"/{folder.key}/{text}").strip("/"))


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
        from onnxtool.encoding import object_store

        return {name: Entry(size, modified) for name, size, modified in object_store.listed(folder)}
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
        from onnxtool.encoding import object_store

        found = object_store.head(location)
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
    from onnxtool.encoding import object_store

    return io.BufferedReader(object_store.RangeReader(location), object_store.RANGE_BYTES)


def read_bytes(location: Location) -> bytes:
    """Read a file.

    Raises:
        OSError: it is not there, cannot be read, or is none: a pipe would wait for a writer.
        StoreError: the store does not answer.
    """
    if isinstance(location, Uri):
        from onnxtool.encoding import object_store

        return object_store.get(location)
    if location.exists() and not location.is_file():
        raise IsADirectoryError(0, "it is no regular file")
    return location.read_bytes()


def write(location: Location, content: bytes, token: str = "") -> None:
    """Write a file as a whole, in place of one that is there; `token` is of one of several writers at once."""
    if isinstance(location, Uri):
        from onnxtool.encoding import object_store

        object_store.put(location, content)
        return
    staged(location, token).write_bytes(content)
    publish(location, token)


def upload(path: Path, uri: Uri) -> None:
    """Write the contents of a file into a store."""
    from onnxtool.encoding import object_store

    object_store.put(uri, path)


def create(location: Location, content: bytes) -> bool:
    """Write a file that only one writer may write; return whether it has this content now.

    In a store the request itself is refused where the file is there. On a disk who writes holds the folder's lock.
    """
    if isinstance(location, Uri):
        from onnxtool.encoding import object_store

        return object_store.put(location, content, only_once=True) or object_store.get(location) == content
    write(location, content)
    return True


def remove(locations: Iterable[Location]) -> None:
    """Remove files; those that are gone are no failure."""
    uris = []
    for location in locations:
        if isinstance(location, Uri):
            uris.append(location)
        else:
            location.unlink(missing_ok=True)
    if uris:
        from onnxtool.encoding import object_store

        object_store.delete(uris)


@contextmanager
def on_this_machine(location: Location) -> Iterator[Path]:
    """Give a file as one of this machine, for what reads files by their path; one of a store is copied for a while."""
    if isinstance(location, Path):
        yield location
        return
    from onnxtool.encoding import object_store

    with tempfile.TemporaryDirectory(prefix="onnxtool-") as folder:
        path = Path(folder) / location.name
        object_store.download(location, path)
        yield path


def staged(path: Path, token: str = "") -> Path:
    """Return where a file is written before it gets its name; `token` is of one of several writers."""
    return path.with_name(f".{path.name}{token and f'.{token}'}.partial")


def publish(path: Path, token: str = "") -> None:
    """Force a staged file to the disk and give it its name."""
    force_to_disk(staged(path, token))
    staged(path, token).replace(path)
    force_to_disk(path.parent)
