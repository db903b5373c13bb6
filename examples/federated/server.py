"""Train one model on the data of several browsers, which never leaves them: federated averaging (McMahan et al. 2017).

`python server.py ARTIFACTS --clients 3 --rounds 5` serves a folder that `onnxtool artifacts --target web` wrote, and
the page next to this file. In each round, every client trains a copy of the checkpoint and sends it back; the mean of
these, weighted by their numbers of samples, is the next round's checkpoint.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import threading
from collections.abc import Sequence
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np

from onnxtool.errors import OnnxtoolError
from onnxtool.training.api import CheckpointState

HERE = Path(__file__).resolve().parent
# The example's own files take precedence over the artifacts, which include an index.html too.
OWN = {"/": "index.html", "/index.html": "index.html", "/client.mjs": "client.mjs"}
GLOBAL = "global"
MAX_SAMPLES = 10**9


class UpdateError(Exception):
    """A client's update is refused."""


class Rounds:
    """The rounds of a training run; clients call it from several threads.

    Args:
        folder: the artifacts; the checkpoint of each round is written there as `global`.
        clients: the number of clients, 0 to clients - 1, that a round waits for.
        rounds: the number of rounds.
    """

    def __init__(self, folder: Path, clients: int, rounds: int) -> None:
        self.folder, self.clients, self.rounds = folder, clients, rounds
        self.round = 0
        self.finished = threading.Event()
        self._updates: dict[int, tuple[CheckpointState, int]] = {}
        self._lock = threading.Lock()
        self._state = CheckpointState.load_checkpoint(folder / "checkpoint")
        self._save()

    def add(self, round_number: int, client: int, samples: int, content: bytes) -> None:
        """Accept a client's checkpoint; the last one of a round ends it.

        Raises:
            UpdateError: it is of another round, client or model, or has numbers that are not finite.
        """
        state = self._read(content)
        with self._lock:
            if round_number != self.round or self.round == self.rounds:
                raise UpdateError(f"the update is of round {round_number}, and this is round {self.round}")
            if client not in range(self.clients) or client in self._updates:
                raise UpdateError(f"client {client} is none of {self.clients}, or has sent its update")
            if not 0 < samples <= MAX_SAMPLES:
                raise UpdateError(f"an update of {samples} samples")
            self._updates[client] = (state, samples)
            if len(self._updates) == self.clients:
                self._end_round()

    def _end_round(self) -> None:
        # Sum in client order, not in order of arrival: rounding depends on it.
        updates = [self._updates[client] for client in range(self.clients)]
        for name, parameter in self._state.parameters:
            arrays = [state.parameters[name].data for state, _ in updates]
            parameter.data = average(arrays, [samples for _, samples in updates])
        self._updates.clear()
        self.round += 1
        self._save()
        if self.round == self.rounds:
            self.finished.set()

    def _save(self) -> None:
        CheckpointState.save_checkpoint(self._state, self.folder / GLOBAL)

    def _read(self, content: bytes) -> CheckpointState:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "update"
            path.write_bytes(content)
            try:
                state = CheckpointState.load_checkpoint(path)
            except OnnxtoolError as error:
                raise UpdateError(str(error)) from error
        found, own = dict(iter(state.parameters)), dict(iter(self._state.parameters))
        if found.keys() != own.keys() or state.checkpoint.is_nominal:
            raise UpdateError("the update has other parameters than the model")
        for name, parameter in own.items():
            data = found[name].data
            if (data.shape, data.dtype) != (parameter.data.shape, parameter.data.dtype):
                raise UpdateError(f"{name} is {data.dtype} {list(data.shape)}")
            if data.dtype.kind == "f" and not np.isfinite(data).all():
                raise UpdateError(f"{name} has numbers that are not finite")
        return state


def average(arrays: Sequence[Any], weights: Sequence[int]) -> Any:
    """Return the weighted mean of equally shaped arrays, in their dtype; for integers (not trained), the first."""
    if arrays[0].dtype.kind != "f":
        return arrays[0]
    return np.average(np.stack(arrays), axis=0, weights=weights).astype(arrays[0].dtype)


class Handler(SimpleHTTPRequestHandler):
    """Serve the artifacts, the page and the state of the rounds, and accept updates."""

    extensions_map = {**SimpleHTTPRequestHandler.extensions_map, ".mjs": "text/javascript"}  # noqa: RUF012

    def __init__(self, *arguments: Any, rounds: Rounds, max_bytes: int) -> None:
        self.rounds, self.max_bytes = rounds, max_bytes
        super().__init__(*arguments, directory=str(rounds.folder))

    def do_GET(self) -> None:
        """Return the state of the round, or a file."""
        path = urlsplit(self.path).path
        if path == "/round":
            self._answer(
                200, json.dumps({"round": self.rounds.round, "rounds": self.rounds.rounds}), "application/json"
            )
        elif path in OWN:
            name = OWN[path]
            kind = "text/html" if name.endswith(".html") else "text/javascript"
            self._answer(200, (HERE / name).read_text(encoding="utf-8"), kind)
        else:
            super().do_GET()

    def do_POST(self) -> None:
        """Accept /update?round=R&client=C&samples=N with a checkpoint."""
        try:
            query = parse_qs(urlsplit(self.path).query)
            round_number, client, samples = (int(query[name][0]) for name in ("round", "client", "samples"))
            size = int(self.headers["Content-Length"])
            if not 0 <= size <= self.max_bytes:
                raise UpdateError(f"an update of {size} bytes, and {self.max_bytes} is the most")
            self.rounds.add(round_number, client, samples, self.rfile.read(size))
        except (UpdateError, KeyError, TypeError, ValueError) as error:
            self._answer(400, str(error), "text/plain")
        else:
            self._answer(200, "{}", "application/json")

    def log_message(self, *_arguments: Any) -> None:
        """Do not log requests."""

    def _answer(self, status: int, text: str, kind: str) -> None:
        content = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def make_server(folder: Path, clients: int, rounds: int, port: int = 0) -> tuple[ThreadingHTTPServer, Rounds]:
    """Return a server that listens only on this machine and has not been started, and its rounds."""
    state = Rounds(folder, clients, rounds)
    # The optimizer's moments are twice as large as the parameters.
    max_bytes = 4 * (folder / "checkpoint").stat().st_size + 2**20
    return ThreadingHTTPServer(("127.0.0.1", port), partial(Handler, rounds=state, max_bytes=max_bytes)), state


def main() -> None:
    """Serve until the last round has ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="ARTIFACTS")
    parser.add_argument("--clients", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    server, rounds = make_server(arguments.folder, arguments.clients, arguments.rounds, arguments.port)
    with server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for client in range(arguments.clients):
            print(f"http://127.0.0.1:{server.server_port}/?client={client}")
        rounds.finished.wait()
        print(f"{arguments.folder / GLOBAL} is the checkpoint after {arguments.rounds} rounds")
        threading.Event().wait(2)  # pages poll once more for the end


if __name__ == "__main__":
    main()
