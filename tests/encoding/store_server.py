"""An S3 server of moto on this machine, and faults between it and its clients."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

BUCKET = "corpora"
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "the-secret-of-the-test",
    "AWS_REGION": "us-east-1",
    "AWS_ALLOW_HTTP": "true",
}
_ERROR = "<Error><Code>{0}</Code><Message>a fault of the test</Message></Error>"


@dataclass
class Faults:
    """What goes wrong with requests, by chance and with a seed; a share of them each.

    Attributes:
        error: answered with 500, or 503 as a store that asks for less, before anything is done.
        after: answered with 500 after it was done, as when an answer is lost.
        dropped: not answered at all: the connection is closed in the middle of the answer.
        delay_s: before each answer.
        seen: requests by their method.
    """

    error: float = 0.0
    after: float = 0.0
    dropped: float = 0.0
    delay_s: float = 0.0
    seen: list[tuple[str, str]] = field(default_factory=list)
    chance: random.Random = field(default_factory=lambda: random.Random(0))  # noqa: S311  no secret

    def around(self, application: Callable[..., Any]) -> Callable[..., Any]:
        """Return the application with these faults."""

        def call(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
            time.sleep(self.delay_s)
            self.seen.append((environ["REQUEST_METHOD"], environ["PATH_INFO"]))
            if self.chance.random() < self.error:
                environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
                return self._refused(start_response)
            is_lost = self.chance.random() < self.after
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


@contextmanager
def store_server() -> Iterator[tuple[str, Faults]]:
    """Run a server with an empty bucket, and yield its address and its faults."""
    import threading

    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        def log(self, type: str, message: str, *args: Any) -> None:  # noqa: A002  its name there
            del type, message, args

    faults = Faults()
    application = faults.around(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=Quiet)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", faults
    finally:
        server.shutdown()
        thread.join()


def environment(address: str) -> dict[str, str]:
    """Return the variables by which a client finds the server."""
    return {**ENVIRONMENT, "AWS_ENDPOINT_URL": address}


def client(address: str) -> Any:
    """Return a client of boto3."""
    import boto3

    return boto3.client(
        "s3",
        endpoint_url=address,
        region_name="us-east-1",
        aws_access_key_id=ENVIRONMENT["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=ENVIRONMENT["AWS_SECRET_ACCESS_KEY"],
    )


def objects(address: str, prefix: str = "") -> dict[str, bytes]:
    """Return all objects of the bucket whose keys begin so, also while the server fails."""
    s3 = client(address)
    pages = s3.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
    keys = _again(lambda: [item["Key"] for page in pages for item in page.get("Contents", ())])

    def read(key: str) -> Any:
        return _again(lambda: s3.get_object(Bucket=BUCKET, Key=key)["Body"].read())

    return {key: read(key) for key in keys}


def _again(call: Callable[[], Any]) -> Any:
    """Call until it does not fail."""
    from botocore.exceptions import BotoCoreError, ClientError

    for _ in range(50):
        try:
            return call()
        except (BotoCoreError, ClientError):
            continue
    raise AssertionError("the server fails each time")
