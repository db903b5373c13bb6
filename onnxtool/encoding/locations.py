"""Locations of a corpus and its vectors: on this machine, in an object store, or on a server that is only read."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import unquote, urlsplit

from onnxtool.errors import InputError
from onnxtool.options import Address, Option, StrPath

STORES = ("s3", "s3a", "gs", "az", "adl", "abfs", "abfss")
SERVERS = ("http", "https")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://", re.ASCII)
# Azure containers are written before an @.
_WITH_CONTAINERS = ("abfs", "abfss")


@dataclass(frozen=True, slots=True)
class Uri(Address):
    """A file or a folder in an object store, or a file on a server.

    Attributes:
        root: the store, `s3://bucket`, or the server, `https://host`.
        key: the object's key, or the key prefix of a folder; without / at either end.
    """

    root: str
    key: str

    @classmethod
    def parse(cls, text: str) -> Location:
        """Parse `text` as a file or folder; see `parse_location`."""
        return parse_location(text)

    @property
    def scheme(self) -> str:
        """The scheme of the address."""
        return self.root.partition("://")[0]

    @property
    def name(self) -> str:
        """The last part of the key."""
        return self.key.rpartition("/")[2]

    @property
    def parent(self) -> Uri:
        """The parent folder."""
        return Uri(self.root, self.key.rpartition("/")[0])

    def with_name(self, name: str) -> Uri:
        """Return another file of the same folder."""
        return self.parent / name

    def __truediv__(self, name: str) -> Uri:
        return Uri(self.root, f"{self.key}/{name}" if self.key else name)

    def __str__(self) -> str:
        return f"{self.root}/{self.key}"


Location = Path | Uri
AnyLocation = Location | StrPath
"""Accepted argument types for a location."""
OutputLocation = Annotated[AnyLocation, Option(writes="folder")]

if TYPE_CHECKING:
    from onnxtool.options import Converted

    OptionalLocation = Converted[Location | None, AnyLocation | None]
else:
    OptionalLocation = Location | None


def is_uri(text: str) -> bool:
    """Whether `text` is an address rather than a path."""
    return _SCHEME.match(text) is not None


def parse_location(value: AnyLocation) -> Location:
    """Parse `value`, a path or an address such as `s3://bucket/name`, as a file or folder.

    Raises:
        InputError: the kind of address is unknown, or it contains credentials, which would end up in manifests.
    """
    if isinstance(value, Uri):
        return value
    if not isinstance(value, str):
        return Path(value)
    match = _SCHEME.match(value)
    if match is None:
        return Path(value)
    scheme = match[1].lower()
    parts = urlsplit(value)
    address = f"{scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"  # the part that may be shown
    if scheme == "file":
        if parts.netloc not in ("", "localhost"):
            raise InputError(f"{address} is a file on another machine", "pass a path, or file:///PATH")
        return Path(unquote(parts.path))
    user, separator, _ = parts.netloc.rpartition("@")
    if (separator and (scheme not in _WITH_CONTAINERS or ":" in user)) or parts.query or parts.fragment:
        raise InputError(
            f"the address {address} contains credentials or a query, which manifests and logs would show",
            "leave them out; credentials are read from the environment, such as AWS_ACCESS_KEY_ID, and files whose "
            "names have ? or # are read by the address of their folder",
        )
    if scheme not in (*STORES, *SERVERS):
        known = ", ".join(f"{name}://" for name in (*STORES, *SERVERS))
        raise InputError(
            f"{address} cannot be read: there is no store of the kind {scheme}://",
            f"use {known}, or a path: mount the filesystem, or copy the files",
        )
    key = parts.path.removeprefix("/").removesuffix("/")
    if not parts.netloc or any(part in ("", ".", "..") for part in key.split("/") if key):
        raise InputError(f"{address} is not the address of an object", f"write {scheme}://BUCKET/FOLDER/NAME")
    return Uri(f"{scheme}://{parts.netloc}", key)
