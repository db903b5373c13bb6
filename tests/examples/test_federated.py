"""Browsers and node train one model on data that stays there, and a server averages what they send."""

from __future__ import annotations

import runpy
import shutil
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import onnx
import pytest

from onnxtool.training.api import CheckpointState
from onnxtool.training.artifacts.preparation import prepare_training
from onnxtool.training.options import PreparationOptions
from tests.docs.documents import ROOT
from tests.training.small_models import load, perceptron
from tests.training.web.javascript import BROWSER, MODULE, NODE, has_package, opened, use_local_runtime, workplace

CLIENTS, ROUNDS = 3, 3


@dataclass(frozen=True)
class Federation:
    """A server that is serving."""

    folder: Path
    address: str
    rounds: Any
    script: dict[str, Any]

    def send(self, content: bytes, **query: int) -> str:
        """Send an update, and return why it was refused, or nothing."""
        text = "&".join(f"{name}={value}" for name, value in {"round": 0, "client": 0, "samples": 1, **query}.items())
        try:
            urllib.request.urlopen(f"{self.address}update?{text}", content, timeout=30).close()  # noqa: S310  our own
        except urllib.error.HTTPError as error:
            with error:
                return error.read().decode()
        return ""

    def announce(self, size_bytes: int) -> str:
        """Send the header of an update of this size, and return the answer."""
        connection = HTTPConnection(urlsplit(self.address).netloc, timeout=30)
        connection.putrequest("POST", "/update?round=0&client=0&samples=1")
        connection.putheader("Content-Length", str(size_bytes))
        connection.endheaders()
        with closing(connection):
            return connection.getresponse().read().decode()


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    example, folder = tmp_path / "federated", tmp_path / "page"
    shutil.copytree(ROOT / "examples" / "federated", example)
    onnx.save(perceptron(), tmp_path / "classifier.onnx")
    prepare_training(PreparationOptions(tmp_path / "classifier.onnx", output=folder, target="web"))
    shutil.copy(MODULE, folder)
    script = runpy.run_path(str(example / "server.py"))
    server, rounds = script["make_server"](folder, CLIENTS, ROUNDS)
    with server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Federation(folder, f"http://127.0.0.1:{server.server_port}/", rounds, script)
        server.shutdown()


def loss_of(folder: Path, checkpoint: str) -> float:
    """Return the loss on points of all classes."""
    _, module, _ = load(folder, checkpoint)
    draw = np.random.default_rng(0)
    labels = draw.integers(0, 3, 60)
    x = 2.0 * (np.arange(5) % 3 == labels[:, None]) + draw.random((60, 5))
    return float(module.eval()(x.astype(np.float32), labels))


@pytest.mark.skipif(NODE is None or not has_package("onnxruntime-node"), reason="no node with onnxruntime-node here")
def test_three_processes_of_node_train_one_model(federation: Federation, tmp_path: Path) -> None:
    """Each has mostly one class; together they learn all."""
    place = workplace(tmp_path / "place")
    for file in ("client.mjs", "client_node.mjs"):
        shutil.copy(ROOT / "examples" / "federated" / file, place)
    clients = [
        subprocess.Popen([str(NODE), "client_node.mjs", federation.address, str(client)], cwd=place)
        for client in range(CLIENTS)
    ]
    assert [client.wait(60) for client in clients] == [0] * CLIENTS
    assert federation.rounds.finished.is_set()
    assert loss_of(federation.folder, "global") < 0.5 * loss_of(federation.folder, "checkpoint")


@pytest.mark.skipif(
    BROWSER is None or not has_package("onnxruntime-web"), reason="no chromium with onnxruntime-web here"
)
def test_three_pages_train_one_model(federation: Federation) -> None:
    """Three frames of a browser, each with the page as it is."""
    page = federation.script["HERE"] / "index.html"
    use_local_runtime(page)
    (page.parent / "node_modules").rename(federation.folder / "node_modules")
    frames = "".join(f'<iframe src="/?client={client}"></iframe>' for client in range(CLIENTS))
    (federation.folder / "three.html").write_text(f"<!doctype html>{frames}", encoding="utf-8")
    with opened(f"{federation.address}three.html"):
        assert federation.rounds.finished.wait(60)
    assert loss_of(federation.folder, "global") < 0.5 * loss_of(federation.folder, "checkpoint")


def test_the_mean_is_weighted_and_hostile_updates_are_refused(federation: Federation, tmp_path: Path) -> None:
    """A refused update changes nothing: the client may send another."""
    state = CheckpointState.load_checkpoint(federation.folder / "checkpoint")
    own = {name: parameter.data for name, parameter in state.parameters}

    def content(number: float) -> bytes:
        for name, data in own.items():
            state.parameters[name].data = np.full_like(data, number)
        CheckpointState.save_checkpoint(state, tmp_path / "update")
        return (tmp_path / "update").read_bytes()

    good = content(1)
    assert "not finite" in federation.send(content(float("nan")))
    assert federation.send(b"pickle")
    for size in (2**40, -1):
        assert "is the most" in federation.announce(size)
    assert "this is round 0" in federation.send(good, round=1)
    assert "client 3 is none of 3" in federation.send(good, client=3)
    assert "0 samples" in federation.send(good, samples=0)
    assert not federation.send(good, client=0, samples=1)
    assert "has sent its update" in federation.send(good, client=0)
    assert not federation.send(content(2), client=1, samples=1)
    assert federation.rounds.round == 0
    assert not federation.send(content(4), client=2, samples=2)
    assert federation.rounds.round == 1
    mean = CheckpointState.load_checkpoint(federation.folder / "global")
    for _, parameter in mean.parameters:
        np.testing.assert_array_equal(parameter.data, (1 + 2 + 2 * 4) / 4)
