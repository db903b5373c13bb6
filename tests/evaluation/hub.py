"""A stand-in for the hub: endpoints by which huggingface_hub fetches a dataset."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

import pytest
from huggingface_hub import constants

COMMIT = "0" * 40


class Hub:
    """Datasets.

    Attributes:
        datasets: id to the files of a dataset, path to content.
        requests: what was asked for.
    """

    def __init__(self) -> None:
        self.datasets: dict[str, dict[str, bytes]] = {}
        self.requests: list[str] = []
        self.url = ""

    def answer(self, path: str) -> tuple[int, Any]:
        """Return status and JSON, or bytes, of a request."""
        found = _DATASET.match(path)
        files = self.datasets.get(found[1]) if found else None
        if found is None or files is None:
            return 404, {"error": "Repository not found"}
        rest = path[found.end() :]
        if rest.startswith("/tree/"):
            return 200, [{"type": "file", "path": path, "size": len(c), "oid": _digest(c)} for path, c in files.items()]
        if rest.startswith(f"/resolve/{COMMIT}/"):
            return 200, files[rest.removeprefix(f"/resolve/{COMMIT}/")]
        return (200 if rest in ("", "/revision/main", "/revision/v1") else 404), {"id": found[1], "sha": COMMIT}


_DATASET = re.compile(r"(?:/api)?/datasets/([^/]+/[^/]+)")


def _digest(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()


@contextmanager
def running(hub: Hub) -> Iterator[None]:
    """Serve it on a free port."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            path = urlsplit(self.path).path
            hub.requests.append(f"{self.command} {path}")
            status, answer = hub.answer(path)
            content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("ETag", f'"{_digest(content)}"')
            self.send_header("X-Repo-Commit", COMMIT)
            if status == 404:
                code = "EntryNotFound" if "/resolve/" in path else "RepoNotFound"
                self.send_header("X-Error-Code", "RevisionNotFound" if "sha" in (answer or ()) else code)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        do_GET = do_HEAD = handle_any  # noqa: N815  as http.server calls them

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def reached(hub: Hub, monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[Hub]:
    """Serve it, and let huggingface_hub ask it instead of the hub, with its cache in `folder`."""
    with running(hub):
        # As HF_ENDPOINT and HF_HUB_DISABLE_XET would, which are read when the library is imported.
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, hub.url)
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(folder / "none"))
        yield hub
