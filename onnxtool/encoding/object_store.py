"""Requests to object stores, by obstore: Amazon S3 and what speaks its protocol, Google Cloud Storage, Azure, HTTP.

Requests that fail for a while are repeated: answers of 5xx and 429, lost connections, time-outs.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from onnxtool.encoding.locations import Uri
from onnxtool.encoding.schemes import SERVERS
from onnxtool.errors import InputError, OutputWriteError, StoreError
from onnxtool.interruption import check_interrupted

if TYPE_CHECKING:
    from obstore.store import ObjectStore

Answer = TypeVar("Answer")

_CHUNK_BYTES = 8 << 20
_MOST_BYTES = 5 << 30  # of one request
_LONGEST_REASON = 300
_LISTED_FROM = ("s3://", "s3a://", "gs://")  # a name on: of the others all would be listed for each piece
PIECES_AT_ONCE = 32
_RETRIES = 20
_GIVE_UP = timedelta(minutes=5)
_REQUEST = timedelta(minutes=5)
_CONNECT = timedelta(seconds=10)
_WAITS = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4)  # seconds
_BROKEN_OFF = re.compile(r"\bbody\b")
# A query of an address that an error shows may be a signature.
_QUERY = re.compile(r"\?\S*")


def _store(uri: Uri) -> ObjectStore:
    """Return the client of a store, which this process keeps; one of a parent process would wait for its threads."""
    return _client(uri.root, os.getpid())


@lru_cache(maxsize=16)
def _client(root: str, _process: int) -> ObjectStore:
    try:
        from obstore.exceptions import BaseError
        from obstore.store import HTTPStore, from_url
    except ImportError as error:
        raise InputError(
            f"{root} is an object store, which needs obstore, and it cannot be imported: {error}",
            "pip install 'onnxtool[stores]'",
        ) from error
    retries: Any = {"max_retries": _RETRIES, "retry_timeout": _GIVE_UP}
    limits: Any = {"timeout": _REQUEST, "connect_timeout": _CONNECT, "allow_http": _allows_http()}
    if root.partition("://")[0] in SERVERS:
        return HTTPStore.from_url(root, retry_config=retries, client_options=limits)
    try:
        return from_url(root, retry_config=retries, client_options=limits)
    except (BaseError, ValueError) as error:
        raise StoreError(f"{root} cannot be used: {_reason(error)}", _HINT) from None


def _allows_http() -> bool:
    """Whether the environment lets a store be asked without TLS, as obstore itself would read it."""
    return any(os.environ.get(f"{name}_ALLOW_HTTP", "").lower() in ("1", "true") for name in ("AWS", "GOOGLE", "AZURE"))


_HINT = "check the address, the network, and the credentials of the environment, such as AWS_ACCESS_KEY_ID"


def _ask(uri: Uri, request: Callable[[ObjectStore], Answer]) -> Answer:
    """Make a request, and make it again where its answer breaks off, which obstore does for some of them alone.

    Raises:
        FileNotFoundError: there is no such object.
        StoreError: the request was refused, or never answered; of how it was signed nothing is said.
    """
    store = _store(uri)
    from obstore.exceptions import BaseError

    for wait in (*_WAITS, None):
        try:
            return request(store)
        except FileNotFoundError:
            raise FileNotFoundError(errno.ENOENT, "there is no such object", str(uri)) from None
        except (BaseError, NotImplementedError, ValueError) as error:  # a key that no store takes is the last
            if wait is None or not _BROKEN_OFF.search(_reason(error)):
                raise StoreError(f"{uri}: {_reason(error)}", _HINT) from None
        check_interrupted()
        time.sleep(wait)
    raise AssertionError("the last wait is None")


def _reason(error: Exception) -> str:
    message = " ".join(str(error).partition("\n\nDebug source")[0].split())
    return _QUERY.sub("", message)[:_LONGEST_REASON]


def listed(folder: Uri, marks: Sequence[str] = ()) -> Iterator[tuple[str, int, float]]:
    """Yield name, size and time of the objects of a folder, without those of folders in it.

    Args:
        folder: what is listed.
        marks: names, ascending, at which a long listing is split, and its pieces asked for at once.
    """
    pieces = list(itertools.pairwise((None, *marks, None)))
    if len(pieces) == 1 or not folder.root.startswith(_LISTED_FROM):
        found = iter([_below(folder)])
    else:
        with ThreadPoolExecutor(PIECES_AT_ONCE, "listing") as workers:
            found = iter(list(workers.map(lambda piece: _below(folder, *piece), pieces)))
    for name, size, modified in itertools.chain.from_iterable(found):
        if "/" not in name:
            yield name, size, modified


def below(folder: Uri) -> Iterator[tuple[str, int]]:
    """Yield name and size of the objects of a folder and of those in it."""
    for name, size, _ in _below(folder):
        yield name, size


def _below(folder: Uri, begin: str | None = None, end: str | None = None) -> list[tuple[str, int, float]]:
    """List what comes after `begin`, up to `end`, by one chain of requests of 1,000 names each.

    What lies in folders below comes as well: it is little, or nothing.
    """
    if _is_server(folder):
        raise InputError(f"{folder} is of a server, which lists no folders", "pass the address of one file, or a store")
    prefix = f"{folder.key}/" if folder.key else ""

    def request(store: ObjectStore) -> list[tuple[str, int, float]]:
        import obstore

        offset = None if begin is None else prefix + begin
        names: list[tuple[str, int, float]] = []
        for found in itertools.chain.from_iterable(obstore.list(store, prefix=prefix or None, offset=offset)):
            name = found["path"].removeprefix(prefix)
            if end is not None and name > end:
                break
            names.append((name, found["size"], found["last_modified"].timestamp()))
        return names

    return _ask(folder, request)


def head(uri: Uri) -> tuple[int, float, str | None] | None:
    """Return size, time and tag of an object; None where there is none."""

    def request(store: ObjectStore) -> tuple[int, float, str | None]:
        import obstore

        found = obstore.head(store, uri.key)
        return found["size"], found["last_modified"].timestamp(), found["e_tag"]

    try:
        return _ask(uri, request)
    except FileNotFoundError:
        return None


def get(uri: Uri, begin: int = 0, end: int | None = None, tag: str | None = None) -> bytes:
    """Read an object, or bytes of it; with `tag`, one that has become another object is an error."""
    options: Any = {} if end is None else {"range": (begin, end)}
    options |= {"if_match": tag} if tag else {}

    def request(store: ObjectStore) -> bytes:
        import obstore

        return bytes(obstore.get(store, uri.key, options=options).bytes())

    return _ask(uri, request)


def download(uri: Uri, path: Path) -> None:
    """Copy an object into a file."""

    def request(store: ObjectStore) -> None:
        import obstore

        with path.open("wb") as file:
            for chunk in obstore.get(store, uri.key).stream(_CHUNK_BYTES):
                file.write(chunk)

    _ask(uri, request)


def put(uri: Uri, content: bytes | Path, *, only_once: bool = False, named_by_contents: bool = False) -> bool:
    """Write an object by one request, which a store does as a whole or not at all; return whether it was written.

    With `only_once`, one that is there is left as it is. One that is `named_by_contents` is written again: it is never
    gone meanwhile.
    """
    del named_by_contents
    _require_writable(uri)
    size = len(content) if isinstance(content, bytes) else content.stat().st_size
    if size > _MOST_BYTES:
        raise OutputWriteError(
            f"cannot write {uri} by one request: it has {size} bytes, and stores take {_MOST_BYTES}",
            "plan smaller shards: --shard_size",
        )

    asked: Literal["create", "overwrite"] = "create" if only_once else "overwrite"

    def request(store: ObjectStore) -> bool:
        import obstore
        from obstore.exceptions import AlreadyExistsError

        try:
            obstore.put(store, uri.key, content, mode=asked, use_multipart=False)
        except AlreadyExistsError:
            return False
        return True

    return _ask(uri, request)


def delete(uris: Sequence[Uri]) -> None:
    """Remove objects of one store; those that are gone are no failure."""
    _require_writable(uris[0])

    def request(store: ObjectStore) -> None:
        import obstore

        obstore.delete(store, [uri.key for uri in uris])

    try:
        _ask(uris[0], request)
    except FileNotFoundError:  # of stores that say so
        if len(uris) > 1:
            for uri in uris:
                delete([uri])


def remove_folder(uri: Uri) -> None:
    """Do nothing: a store has no folders, but names."""


def _is_server(uri: Uri) -> bool:
    return uri.scheme in SERVERS


def _require_writable(uri: Uri) -> None:
    if _is_server(uri):
        raise OutputWriteError(f"{uri} is of a server that is only read from", "write into a folder or a store")
