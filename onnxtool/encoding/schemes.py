"""What addresses begin with, and which of these kinds can be read."""

from __future__ import annotations

from onnxtool.errors import InputError

STORES = ("s3", "s3a", "gs", "az", "adl", "abfs", "abfss")
SERVERS = ("http", "https")
# What fsspec itself reaches of other machines; the rest of its own are archives, caches, and this machine's files.
FILESYSTEMS = ("hdfs", "viewfs", "webhdfs", "sftp", "ssh", "ftp", "smb", "memory")


def require_known(scheme: str, address: str) -> None:
    """Refuse an address that neither obstore nor fsspec reads; packages may add kinds to fsspec.

    Raises:
        InputError: there is no such kind, or fsspec is not there.
    """
    if scheme in (*STORES, *SERVERS):
        return
    try:
        from fsspec.registry import known_implementations
    except ImportError as error:
        if scheme in FILESYSTEMS:
            raise InputError(
                f"{address} needs fsspec, and it cannot be imported: {error}", "pip install 'onnxtool[fsspec]'"
            ) from error
        known_implementations = {}
    found = known_implementations.get(scheme, {"class": "fsspec."})["class"]
    if scheme not in FILESYSTEMS and found.startswith("fsspec."):
        known = ", ".join(f"{name}://" for name in (*STORES, *SERVERS, *FILESYSTEMS))
        raise InputError(
            f"{address} cannot be read: there is no store of the kind {scheme}://",
            f"use {known}, a path that is mounted, or install the package that adds {scheme}:// to fsspec",
        )
