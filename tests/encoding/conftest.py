"""Fixtures of the tests of encoding."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from onnxtool.encoding import fetched_model, worker
from onnxtool.encoding.parts import ShardEncoder


class WorkerHere:
    """Does what a worker process is ordered to do in this process."""

    def __init__(self, module: str, start: dict[str, Any]) -> None:
        assert module == worker.__name__
        fetched_model._fetch.cache_clear()  # a process would fetch the model by itself
        self._start = start
        self._encoder: ShardEncoder | None = None

    def ask(self, order: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the answers, which cross as JSON like those of a process."""
        if self._encoder is None:
            self._encoder = worker._open(self._start)
        answers: list[dict[str, Any]] = []
        worker._encode(self._encoder, json.loads(json.dumps(order)), answers.append)
        yield from json.loads(json.dumps(answers))

    def stop(self) -> None:
        """Do nothing: it has ended."""

    close = stop


@pytest.fixture
def workers_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start no worker processes, each of which takes a second, where a test is of something else."""
    monkeypatch.setattr("onnxtool.encoding.workers.WorkerProcess", WorkerHere)
