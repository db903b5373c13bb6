"""Worker processes that are threads of this process."""

from __future__ import annotations

import os
import threading
from multiprocessing.connection import Connection
from typing import Any

from onnxtool.encoding import files, workers


def start_here(task: Any, connection: Connection) -> threading.Thread:
    """Do in a thread what a process would do."""
    files._fetch.cache_clear()  # a process would fetch the model by itself
    own = Connection(os.dup(connection.fileno()))
    thread = threading.Thread(target=workers.serve, args=(task, own, lambda: None))
    thread.start()
    return thread
