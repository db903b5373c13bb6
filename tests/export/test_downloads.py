"""Weights that come from the hub are told of while they come."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from onnxtool.export.downloads import fetch
from onnxtool.progress import Stage, listening

CONTENT = bytes(12_000_000)


class Hub(BaseHTTPRequestHandler):
    """Has one file of one checkpoint."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        found = self.path.endswith("/org/name/resolve/main/model.safetensors")
        self.send_response(200 if found else 404)
        self.send_header("ETag", '"1234"')
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("X-Error-Code", "" if found else "EntryNotFound")
        self.send_header("Content-Length", str(len(CONTENT)) if found else "0")
        self.end_headers()
        if found and self.command == "GET":
            self.wfile.write(CONTENT)

    def log_message(self, *_arguments: object) -> None:
        """Stay quiet."""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Serve it on this machine, and give the folder of the cache."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield tmp_path
    server.shutdown()
    server.server_close()


def test_a_download_tells_how_far_it_is(hub: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """In megabytes, once; what is in the cache is not fetched again, and the hub's own bar is not shown."""
    heard: list[str] = []
    with listening(heard.append):
        fetch("org/name", "model.safetensors", None)
    (stored,) = hub.rglob("snapshots/*/model.safetensors")
    assert stored.stat().st_size == len(CONTENT)
    stages = [(one.name, one.done, one.total) for one in heard if isinstance(one, Stage)]
    assert (stages[0], stages[-1]) == (
        ("downloading model.safetensors, MB", 0, 12),
        ("downloading model.safetensors, MB", 12, 12),
    )
    heard.clear()
    with listening(heard.append):
        fetch("org/name", "model.safetensors", None)
    assert heard == []
    assert capfd.readouterr() == ("", "")


def test_a_file_that_is_not_there_is_for_the_reader_to_miss(hub: Path) -> None:
    """Checkpoints of several shards have no single file."""
    fetch("org/name", "pytorch_model.bin", None)
    assert not list(hub.rglob("snapshots/*/pytorch_model.bin"))
