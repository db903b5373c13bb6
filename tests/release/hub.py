"""A stand-in for the hub: endpoints by which huggingface_hub commits files to a repository, or fetches a dataset."""

from __future__ import annotations

import base64
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

TOKEN = "hf_" + "secret" * 4
COMMIT = "0" * 40


class Hub:
    """One repository, and datasets.

    Attributes:
        files: path to content, of what is committed.
        datasets: id to the files of a dataset, path to content.
        private: None for no repository.
        stored: large files by the digest under which they were sent.
        refusals: path of a request, or a part of it, to the status that it gets.
        requests: what was asked for, with its authorization.
    """

    def __init__(self, token: str) -> None:
        self.token = token
        self.files: dict[str, bytes] = {".gitattributes": b"*.onnx filter=lfs\n"}
        self.datasets: dict[str, dict[str, bytes]] = {}
        self.private: bool | None = None
        self.stored: dict[str, bytes] = {}
        self.refusals: dict[str, int] = {}
        self.requests: list[tuple[str, str]] = []
        self.messages: list[str] = []
        self.url = ""

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        """Return status and JSON, or bytes, of a request."""
        for part, status in self.refusals.items():
            if part in path:
                return status, {"error": f"refused, and the token was {self.token}"}
        if found := _DATASET.match(path):
            return self._dataset(found[1], path[found.end() :])
        if path == "/api/repos/create":
            asked = json.loads(body)
            exists = self.private is not None
            if not exists:
                self.private = bool(asked.get("private")) or asked.get("visibility") == "private"
            name = f"{asked['organization']}/{asked['name']}"
            return (409 if exists else 200), {"url": f"{self.url}/{name}", "name": name, "error": "exists"}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if "/preupload/" in path:
            return 200, {"files": [self._mode(one) for one in json.loads(body)["files"]]}
        if path.endswith("/info/lfs/objects/batch"):
            return 200, {"objects": [self._target(one) for one in json.loads(body)["objects"]]}
        if method == "PUT":
            self.stored[path.rpartition("/")[2]] = body
            return 200, b""
        if "/commit/" in path:
            return self._commit([json.loads(line) for line in body.splitlines()])
        if "/tree/" in path:
            return 200, _tree(self.files)
        if "/resolve/main/" in path:
            name = path.partition("/resolve/main/")[2]
            return (200, self.files[name]) if name in self.files else (404, None)
        return 200, {"id": path.removeprefix("/api/models/"), "private": self.private, "sha": COMMIT, "siblings": []}

    def _dataset(self, name: str, rest: str) -> tuple[int, Any]:
        files = self.datasets.get(name)
        if files is None:
            return 404, {"error": "Repository not found"}
        if rest.startswith("/tree/"):
            return 200, _tree(files)
        if rest.startswith(f"/resolve/{COMMIT}/"):
            return 200, files[rest.removeprefix(f"/resolve/{COMMIT}/")]
        return (200 if rest in ("", "/revision/main", "/revision/v1") else 404), {"id": name, "sha": COMMIT}

    def _mode(self, file: dict[str, Any]) -> dict[str, Any]:
        is_large = file["path"].endswith(".onnx")
        return {"path": file["path"], "uploadMode": "lfs" if is_large else "regular", "shouldIgnore": False}

    def _target(self, one: dict[str, Any]) -> dict[str, Any]:
        return {**one, "actions": {"upload": {"href": f"{self.url}/storage/{one['oid']}"}}}

    def _commit(self, lines: list[dict[str, Any]]) -> tuple[int, Any]:
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.messages.append(value["summary"])
            elif line["key"] == "file":
                self.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.files[value["path"]] = self.stored[value["oid"]]
            elif line["key"] == "deletedFile":
                del self.files[value["path"]]
        return 200, {"success": True, "commitOid": "1" * 40, "commitUrl": f"{self.url}/org/name/commit/{'1' * 40}"}


_DATASET = re.compile(r"(?:/api)?/datasets/([^/]+/[^/]+)")


def _tree(files: dict[str, bytes]) -> list[dict[str, Any]]:
    return [{"type": "file", "path": path, "size": len(c), "oid": _digest(c)} for path, c in files.items()]


def _digest(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()


@contextmanager
def running(hub: Hub) -> Iterator[None]:
    """Serve it on a free port."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = urlsplit(self.path).path
            hub.requests.append((f"{self.command} {path}", self.headers.get("Authorization", "")))
            status, answer = hub.answer(self.command, path, body)
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

        do_GET = do_POST = do_PUT = do_HEAD = handle_any  # noqa: N815  as http.server calls them

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
        # As HF_ENDPOINT, HF_HUB_DISABLE_XET and HF_TOKEN would, which are read when the library is imported.
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, hub.url)
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(folder / "none"))
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub
