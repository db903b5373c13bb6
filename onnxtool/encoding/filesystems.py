"""Remote files through fsspec: object stores (obstore's filesystem), HDFS, SFTP, and filesystems from other packages.

Files appear whole or not at all. A store writes a file in one request; in other filesystems it is written under a
hidden name and renamed with an atomic operation that does not replace an existing file. Filesystems without a known
operation of this kind are read-only. Tested with fsspec 2026.9, obstore 0.12 and paramiko 5.1.
"""

from __future__ import annotations

import errno
import io
import os
import posixpath
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from onnxtool.encoding.locations import SERVERS, STORES, Uri
from onnxtool.errors import InputError, OutputWriteError, StoreError, shorten
from onnxtool.interruption import check_interrupted

Answer = TypeVar("Answer")
Info = dict[str, Any]

RANGE_BYTES = 8 << 20  # of a request that reads a part of a file
_MOST_BYTES = 5 << 30  # of one request, as stores take it
_RETRIES, _GIVE_UP, _CONNECT = 20, timedelta(minutes=5), timedelta(seconds=10)  # of a store's client
_WAITS = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4)  # seconds
# The query of an address in an error may contain a token or a signature.
_QUERY = re.compile(r"\?\S*")
_PUBLIC = ("host", "port", "protocol")  # options that errors may show; all others are hidden
_SHORTEST_SECRET = 3
# Failures that retrying does not fix.
_FINAL = (PermissionError, IsADirectoryError, NotADirectoryError, NotImplementedError, ValueError, TypeError)
_BROKEN_OFF = re.compile(r"\bbody\b")  # the only failure that a store's client does not retry
_TIMES = {"mtime": 1.0, "modified": 1.0, "last_modified": 1.0, "modification_time": 1e-3, "modificationTime": 1e-3}
_REPLACEMENTS = 8  # of a file that others write as well
_REQUESTS_AT_ONCE = 32


@dataclass(frozen=True)
class _Writing:
    """The way a filesystem names a finished file.

    Attributes:
        rename: renames a file atomically; fails without changes if the name is taken. None for stores, which write a
            file in one request.
        prepare: adjusts a newly opened filesystem.
        takes_threads: whether it is thread-safe; in paramiko's, threads receive each other's answers.
    """

    rename: Callable[[Any, str, str], None] | None
    prepare: Callable[[Any], None] = lambda _filesystem: None
    takes_threads: bool = False


def _move(filesystem: Any, old: str, new: str) -> None:
    """HDFS does not rename to a name that is taken."""
    filesystem.mv(old, new)


def _rename_by_webhdfs(filesystem: Any, old: str, new: str) -> None:
    """Read the answer, which says whether it was done; fsspec's own `mv` does not."""
    answer = filesystem._call("RENAME", method="put", path=old, destination=new)  # noqa: SLF001  nothing public does
    if not answer.json()["boolean"]:
        raise FileExistsError(errno.EEXIST, "not renamed")


def _rename_by_sftp(filesystem: Any, old: str, new: str) -> None:
    """Rename with the protocol's operation, which fails if the name is taken; fsspec's `mv` would replace that file."""
    filesystem.ftp.rename(old, new)


def _copy_in_memory(filesystem: Any, old: str, new: str) -> None:
    filesystem.pipe_file(new, filesystem.cat_file(old), mode="create")
    filesystem.rm_file(old)


def _refuse_failed_answers(filesystem: Any) -> None:
    """Raise error responses of data nodes; fsspec would treat their text as file contents."""

    def check(response: Any, *_: Any, **__: Any) -> None:
        failed = 500 if response.url.startswith(filesystem.url) else 400
        if response.status_code >= failed:
            response.close()  # otherwise its connection stays open with unread data
            response.raise_for_status()

    filesystem.session.hooks["response"].append(check)


_WRITTEN = {
    **dict.fromkeys(STORES, _Writing(None, takes_threads=True)),
    "hdfs": _Writing(_move),
    "viewfs": _Writing(_move),
    "webhdfs": _Writing(_rename_by_webhdfs, _refuse_failed_answers, takes_threads=True),
    "sftp": _Writing(_rename_by_sftp),
    "ssh": _Writing(_rename_by_sftp),
    "memory": _Writing(_copy_in_memory, takes_threads=True),
}
# Packages that fsspec needs for them but does not require.
_PACKAGES = {
    **dict.fromkeys(("hdfs", "viewfs"), "hdfs-native"),
    **dict.fromkeys(("sftp", "ssh"), "paramiko"),
    "smb": "smbprotocol",
}


class _Client(NamedTuple):
    """A filesystem that is open.

    Attributes:
        base: the path of its root address.
        turn: the lock that a calling thread has to hold.
    """

    filesystem: Any
    base: str
    turn: AbstractContextManager[Any]


@lru_cache(maxsize=16)
def _client(root: str, _process: int) -> _Client:
    """Open a filesystem; connections belong to one process."""
    scheme, _, bucket = root.partition("://")
    if scheme in (*STORES, *SERVERS):
        return _Client(_open_store(scheme, bucket), bucket if scheme in STORES else root, nullcontext())
    from fsspec.core import url_to_fs

    filesystem, path = url_to_fs(f"{root}/", skip_instance_cache=True)
    writing = _WRITTEN.get(scheme, _Writing(None))
    writing.prepare(filesystem)
    return _Client(filesystem, str(path).rstrip("/"), nullcontext() if writing.takes_threads else threading.Lock())


def _open_store(scheme: str, bucket: str) -> Any:
    """Open obstore's filesystem, with missing features added.

    It writes in several requests and replaces existing files, reads whole files into memory, lists files without times,
    and lists a folder instead of a missing file.
    """
    try:
        from obstore.fsspec import FsspecStore
    except ImportError as error:
        raise InputError(
            f"{scheme}://{bucket} needs obstore and fsspec, and they cannot be imported: {error}",
            "pip install 'onnxtool-cli[stores]'",
        ) from error

    class Store(FsspecStore):
        async def _pipe_file(self, path: str, value: Any, mode: str = "overwrite", **_: Any) -> None:
            bucket, key = self._split_path(path)
            asked: Any = mode
            await self._construct_store(bucket).put_async(key, value, mode=asked, use_multipart=False)

        async def _get_file(self, rpath: str, lpath: str, **_: Any) -> None:
            bucket, key = self._split_path(rpath)
            answer = await self._construct_store(bucket).get_async(key)
            with Path(lpath).open("wb") as file:  # not through memory, as models are large
                async for chunk in answer.stream(RANGE_BYTES):
                    file.write(chunk)

        async def _info(self, path: str, **_: Any) -> Any:
            bucket, key = self._split_path(path)
            found = await self._construct_store(bucket).head_async(key)
            return {**found, "name": found["path"], "type": "file"}

        async def _ls(self, path: str, detail: bool = False, **_: Any) -> Any:
            bucket, prefix = self._split_path(path)
            found = await self._construct_store(bucket).list_with_delimiter_async(prefix or None)
            files: list[Info] = [
                {"name": each["path"], "size": each["size"], "type": "file", "last_modified": each["last_modified"]}
                for each in found["objects"]
            ]
            files += [{"name": each, "size": 0, "type": "directory"} for each in found["common_prefixes"]]
            return files if detail else [each["name"] for each in files]

    options: Any = {
        "retry_config": {"max_retries": _RETRIES, "retry_timeout": _GIVE_UP},
        "client_options": {"timeout": _GIVE_UP, "connect_timeout": _CONNECT, "allow_http": _allows_http()},
    }
    open_store: Any = Store  # whose type only accepts some schemes
    store = open_store(scheme, skip_instance_cache=True, **options)
    store._construct_store(bucket)  # noqa: SLF001  what is wrong with the address shows here, and not in every request
    return store


def _allows_http() -> bool:
    """Whether the environment allows access to a store without TLS, read like obstore does."""
    return any(os.environ.get(f"{name}_ALLOW_HTTP", "").lower() in ("1", "true") for name in ("AWS", "GOOGLE", "AZURE"))


def _ask(uri: Uri, request: Callable[[Any, str], Answer]) -> Answer:
    """Call a filesystem, retrying over a new connection after temporary failures.

    Raises:
        FileNotFoundError: there is no such file.
        InputError: a package that fsspec needs is missing.
        StoreError: the request was refused or never answered; the error does not reveal credentials.
    """
    for wait in (*_WAITS, None):
        is_open = False
        try:
            client = _client(uri.root, os.getpid())
            is_open = True
            with client.turn:
                return request(client.filesystem, f"{client.base}/{uri.key}")
        except FileNotFoundError:
            raise FileNotFoundError(errno.ENOENT, "there is no such file", str(uri)) from None
        except ImportError as error:
            package = _PACKAGES.get(uri.scheme, "")
            raise InputError(
                f"{uri} cannot be reached: {_reason(error)}",
                f"pip install {package}" if package else "install the package that fsspec reaches it with",
            ) from None
        except (InputError, OutputWriteError, StoreError):
            raise
        except Exception as error:  # noqa: BLE001  each library has its own errors
            if wait is None or not _is_passing(uri, error, is_open=is_open):
                raise StoreError(f"{uri}: {_reason(error)}", _hint(uri)) from None
        if uri.scheme not in (*STORES, *SERVERS):
            _client.cache_clear()
        check_interrupted()
        time.sleep(wait)
    raise AssertionError("the last wait is None")


def _is_passing(uri: Uri, error: Exception, *, is_open: bool) -> bool:
    """Whether a failure may be temporary; a refused password is not retried."""
    if uri.scheme in (*STORES, *SERVERS):
        return _BROKEN_OFF.search(_reason(error)) is not None
    status = getattr(getattr(error, "response", None), "status_code", 0)
    # A hidden file is gone if another run of the same command has published everything in the meantime.
    is_refused = 400 <= status < 500 and status not in (404, 429)
    return (is_open or isinstance(error, OSError)) and not isinstance(error, _FINAL) and not is_refused


def _hint(uri: Uri) -> str:
    if uri.scheme in (*STORES, *SERVERS):
        return "check the address, the network, and the credentials of the environment, such as AWS_ACCESS_KEY_ID"
    return (
        "check the address, the network, and what fsspec is configured with, such as the variable "
        f"FSSPEC_{uri.scheme.upper()}_USERNAME"
    )


def _reason(error: Exception) -> str:
    """Return a library's message without credentials."""
    from fsspec.config import conf

    said = str(error).partition("\n\nDebug source")[0]
    message = _QUERY.sub("", " ".join(said.split())) or type(error).__name__
    # A filesystem with two names uses the configuration of either.
    for secret in sorted(_texts(conf), key=len, reverse=True):
        message = message.replace(secret, "…")
    return shorten(message, 1000)  # with the store's own code in the middle


def _texts(value: Any, name: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _texts(inner, str(key))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner, name)
    elif name not in _PUBLIC and len(str(value)) >= _SHORTEST_SECRET and not isinstance(value, bool):
        yield str(value)


def _info(filesystem: Any, path: str) -> Info | None:
    """Return a file's details; fsspec's `exists` treats every failure as a no."""
    try:
        filesystem.invalidate_cache()
        found: Info = filesystem.info(path)
    except FileNotFoundError:
        return None
    return found if found["type"] == "file" else None


def _modified(info: Info) -> float:
    """Return the modification time in seconds since 1970, under any of its names; 0 if unknown."""
    for name, unit in (*_TIMES.items(), ("created", 1.0)):
        if (value := info.get(name)) is not None:
            return value.timestamp() if isinstance(value, datetime) else float(value) * unit
    return 0.0


def _inside(filesystem: Any, path: str) -> list[Info]:
    """List a folder, with links, which a listing does not follow, replaced by their targets."""
    found = []
    for info in filesystem.ls(path, detail=True):
        if info["type"] in ("file", "directory"):
            found.append(info)
            continue
        try:
            found.append({**filesystem.info(info["name"]), "name": info["name"]})
        except FileNotFoundError:
            raise InputError(f"{info['name']} is a link to nothing", "put the file there, or remove it") from None
    return found


class Entry(NamedTuple):
    """A file in a listing.

    Attributes:
        modified: seconds since 1970; 0 if unknown.
        tag: distinguishes it from another file of the same name; empty for a file of this machine.
    """

    size_bytes: int
    modified: float
    tag: str = ""


def _entry(info: Info) -> Entry:
    size, modified = info["size"], _modified(info)
    return Entry(size, modified, info.get("e_tag") or f"{size} bytes of {modified}")


def listed(folder: Uri) -> dict[str, Entry]:
    """Return a folder's files by name, from one listing; empty if the folder does not exist."""
    _require_lists(folder)

    def request(filesystem: Any, path: str) -> list[Info]:
        filesystem.invalidate_cache()
        return _inside(filesystem, path.rstrip("/") or "/")

    try:
        found = _ask(folder, request)
    except FileNotFoundError:
        return {}
    return {posixpath.basename(info["name"]): _entry(info) for info in found if info["type"] == "file"}


def below(folder: Uri) -> Iterator[tuple[str, int]]:
    """Yield name and size of the files in a folder and its subfolders; fsspec's `find` skips failures."""
    _require_lists(folder)

    def request(filesystem: Any, path: str) -> list[tuple[str, int]]:
        filesystem.invalidate_cache()
        found, folders = [], [""]
        while folders:
            inside = folders.pop()
            for info in _inside(filesystem, f"{path.rstrip('/')}/{inside}".rstrip("/") or "/"):
                name = f"{inside}{posixpath.basename(info['name'].rstrip('/'))}"
                if info["type"] == "directory":
                    folders.append(f"{name}/")
                elif info["type"] == "file":
                    found.append((name, info["size"]))
        return found

    yield from _ask(folder, request)


def _require_lists(folder: Uri) -> None:
    if folder.scheme in SERVERS:
        raise InputError(f"{folder} is of a server, which lists no folders", "pass the address of one file, or a store")


def head(uri: Uri) -> Entry | None:
    """Return a file's details without reading it; None if it does not exist."""
    found = _ask(uri, _info)
    return None if found is None else _entry(found)


def get(uri: Uri, begin: int = 0, end: int | None = None, tag: str | None = None) -> bytes:
    """Read a file, or a range of it; with `tag`, a replaced file is an error."""

    def request(filesystem: Any, path: str) -> bytes:
        info = _require(filesystem, path)
        if tag is not None and tag != _entry(info).tag:
            raise StoreError(f"{uri} has changed while it was read", "run the same command again")
        last = info["size"] if end is None else end
        content = bytes(filesystem.cat_file(path, start=begin, end=last)) if last > begin else b""
        _require_size(len(content), last - begin)
        return content

    return _ask(uri, request)


def download(uri: Uri, path: Path) -> None:
    """Copy a file to this machine."""

    def request(filesystem: Any, source: str) -> None:
        info = _require(filesystem, source)
        filesystem.get_file(source, str(path))
        _require_size(path.stat().st_size, info["size"])

    _ask(uri, request)


def _require(filesystem: Any, path: str) -> Info:
    info = _info(filesystem, path)
    if info is None:
        raise FileNotFoundError
    return info


def _require_size(found: int, expected: int) -> None:
    if found != expected:
        raise EOFError(f"{found} bytes arrived instead of {expected}")


def put(uri: Uri, content: bytes | Path, *, only_once: bool = False, named_by_contents: bool = False) -> bool:
    """Write a file; return whether it was written or already exists.

    With `only_once`, an existing file is kept.

    Outside stores, a replaced file is missing for a moment, because renaming does not replace: a file with the same
    contents is kept, or with the same size if it is `named_by_contents`. A killed writer leaves `.NAME.TOKEN.partial`.
    """
    writing = _require_writable(uri)
    size = len(content) if isinstance(content, bytes) else content.stat().st_size
    if writing.rename is None:
        if size > _MOST_BYTES:
            raise OutputWriteError(
                f"cannot write {uri} in one request: it has {size} bytes, and stores take {_MOST_BYTES}",
                "make smaller shards: --shard_size",
            )
        return _ask(uri, lambda filesystem, path: _put_by_one_request(filesystem, path, content, only_once=only_once))
    rename = writing.rename

    def request(filesystem: Any, path: str) -> bool:
        folder, _, name = path.rpartition("/")
        hidden = f"{folder}/.{name}.{secrets.token_hex(4)}.partial"
        try:
            _write(filesystem, hidden, content, size)
            for _ in range(_REPLACEMENTS):
                if _is_renamed(rename, filesystem, hidden, path):
                    return True
                if only_once:
                    return False
                with suppress(FileNotFoundError):  # it is gone since
                    is_as_long = _require(filesystem, path)["size"] == size
                    if is_as_long and (named_by_contents or _has(filesystem, path, content)):
                        return True
                _remove(filesystem, path)
            raise EOFError("others write it at the same time")
        finally:
            with suppress(Exception):  # it has been renamed, or is removed when shards are merged
                _remove(filesystem, hidden)

    return _ask(uri, request)


def _require_writable(uri: Uri) -> _Writing:
    writing = _WRITTEN.get(uri.scheme)
    if writing is None:
        what = "of a server that is only read from" if uri.scheme in SERVERS else "only read from"
        raise OutputWriteError(
            f"{uri} is {what}: how {uri.scheme}:// renames a file is not known",
            f"write into a folder, a store, or {', '.join(f'{name}://' for name in _WRITTEN if name not in STORES)}",
        )
    return writing


def _put_by_one_request(filesystem: Any, path: str, content: bytes | Path, *, only_once: bool) -> bool:
    from obstore.exceptions import AlreadyExistsError

    try:
        filesystem.pipe_file(path, content, mode="create" if only_once else "overwrite")
    except AlreadyExistsError:
        return False
    return True


def _write(filesystem: Any, path: str, content: bytes | Path, size: int) -> None:
    """Write a file, creating its folder if necessary, and compare its size."""
    for is_second in (False, True):
        try:
            if isinstance(content, bytes):
                filesystem.pipe_file(path, content)
            else:
                filesystem.put_file(str(content), path)
            break
        except FileNotFoundError:
            if is_second:
                raise
            filesystem.makedirs(posixpath.dirname(path), exist_ok=True)
    _require_size((_info(filesystem, path) or {"size": 0})["size"], size)


def _is_renamed(rename: Callable[[Any, str, str], None], filesystem: Any, old: str, new: str) -> bool:
    """Rename a file; return False if the name is taken.

    Raises:
        Exception: it failed for another reason.
        EOFError: the outcome is unknown.
    """
    try:
        rename(filesystem, old, new)
    except Exception as error:
        if _info(filesystem, old) is None:
            raise EOFError("the answer was lost") from error
        if _info(filesystem, new) is None:
            raise
        return False
    return True


def _has(filesystem: Any, path: str, content: bytes | Path) -> bool:
    """Compare a file with bytes; a large local file is sent again rather than read back."""
    return isinstance(content, bytes) and filesystem.cat_file(path) == content


def _remove(filesystem: Any, path: str) -> None:
    with suppress(FileNotFoundError):
        filesystem.rm_file(path)


def delete(uris: Sequence[Uri]) -> None:
    """Remove files from one filesystem; missing ones are ignored."""
    writing = _require_writable(uris[0])

    def remove(uri: Uri) -> None:
        with suppress(FileNotFoundError):
            _ask(uri, _remove)

    if not writing.takes_threads:
        for uri in uris:
            remove(uri)
        return
    with ThreadPoolExecutor(min(len(uris), _REQUESTS_AT_ONCE), "removing") as workers:
        list(workers.map(remove, uris))


def remove_folder(uri: Uri) -> None:
    """Remove a folder if it is empty; a store has only names, no folders."""
    if uri.scheme in STORES:
        return

    def request(filesystem: Any, path: str) -> None:
        filesystem.invalidate_cache()
        if not filesystem.ls(path, detail=False):
            with suppress(Exception):  # it is not empty any more
                filesystem.rmdir(path)

    with suppress(FileNotFoundError):
        _ask(uri, request)


class RangeReader(io.RawIOBase):
    """A remote file as a file object: each read is a separate request, which is retried if lost.

    Raises:
        FileNotFoundError: there is no such file.
    """

    def __init__(self, uri: Uri) -> None:
        found = head(uri)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, "there is no such file", str(uri))
        self._uri = uri
        self._size, self._tag = found.size_bytes, found.tag
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
        """Fill a buffer with one request, which fails if the file has been replaced."""
        view = memoryview(buffer).cast("B")
        end = min(self._size, self._place + len(view))
        if end <= self._place:
            return 0
        content = get(self._uri, self._place, end, self._tag)
        view[: len(content)] = content
        self._place += len(content)
        return len(content)
