"""Files that are not on this machine: what is asked of them, by obstore where they are in stores, else by fsspec."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from onnxtool.encoding import filesystems, object_store
from onnxtool.encoding.locations import Uri
from onnxtool.encoding.schemes import SERVERS, STORES

RANGE_BYTES = 8 << 20


class Remote(Protocol):
    """A library that reads and writes files of other machines.

    A file is there whole or not at all; of what each call raises see `object_store`.
    """

    def listed(self, folder: Uri, marks: Sequence[str] = ()) -> Iterator[tuple[str, int, float]]:
        """Yield name, size and time of the files of a folder; none where there is no such folder."""

    def below(self, folder: Uri) -> Iterator[tuple[str, int]]:
        """Yield name and size of the files of a folder and of those in it."""

    def head(self, uri: Uri) -> tuple[int, float, str | None] | None:
        """Return size, time and tag of a file; None where there is none."""

    def get(self, uri: Uri, begin: int = 0, end: int | None = None, tag: str | None = None) -> bytes:
        """Read a file, or bytes of it; with `tag`, one that has become another file is an error."""

    def download(self, uri: Uri, path: Path) -> None:
        """Copy a file to this machine."""

    def put(self, uri: Uri, content: bytes | Path, *, only_once: bool = False, named_by_contents: bool = False) -> bool:
        """Write a file; return whether it was written.

        Args:
            uri: where.
            content: what, or a file of this machine.
            only_once: whether one that is there is left as it is.
            named_by_contents: whether one of the same size need not be replaced.
        """

    def delete(self, uris: Sequence[Uri]) -> None:
        """Remove files; those that are gone are no failure."""

    def remove_folder(self, uri: Uri) -> None:
        """Remove a folder where it is empty."""


def remote(uri: Uri) -> Remote:
    """Return what reads and writes a file."""
    return object_store if uri.scheme in (*STORES, *SERVERS) else filesystems


class RangeReader(io.RawIOBase):
    """A file of another machine as a file: each read is a request of its own, so that one that is lost is repeated.

    Raises:
        FileNotFoundError: there is no such file.
    """

    def __init__(self, uri: Uri) -> None:
        found = remote(uri).head(uri)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, "there is no such object", str(uri))
        self._uri = uri
        self._size, _, self._tag = found
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

    def tell(self) -> int:
        """Return the next byte."""
        return self._place

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer by one request, which fails where the file is another one by now."""
        view = memoryview(buffer).cast("B")
        end = min(self._size, self._place + len(view))
        if end <= self._place:
            return 0
        content = remote(self._uri).get(self._uri, self._place, end, self._tag)
        view[: len(content)] = content
        self._place += len(content)
        return len(content)
