"""A pool of worker processes that are none."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any

from onnxtool.encoding import files, workers


class PoolHere:
    """Does in this process what a pool of one process would do."""

    def __init__(self, _count: int, *, initargs: tuple[Any, ...], **_: Any) -> None:
        files._fetch.cache_clear()  # a process would fetch the model by itself
        task, tell = initargs
        self._tell = Connection(os.dup(tell.fileno()))
        self._here = workers._Here(task, self._tell)

    def submit(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Future[Any]:
        """Call the function now."""
        workers._here[:] = [self._here]
        future: Future[Any] = Future()
        try:
            future.set_result(function(*arguments, **named))
        except Exception as error:  # noqa: BLE001  it is raised by who asks for the result
            future.set_exception(error)
        return future

    def shutdown(self, *, wait: bool) -> None:
        """Say nothing more."""
        self._tell.close()
