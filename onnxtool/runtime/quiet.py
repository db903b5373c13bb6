"""Keep output of torch, transformers and onnxruntime off our streams, which carry results and progress."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def quiet() -> Iterator[io.StringIO]:
    """Collect prints, logs below critical and progress bars of the block, and drop its warnings.

    Only exceptions matter here: each caller checks the outcome itself.
    """
    output = io.StringIO()
    previous = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            warnings.simplefilter("ignore")
            yield output
    finally:
        logging.disable(previous)


@contextlib.contextmanager
def quiet_stdout_descriptor() -> Iterator[None]:
    """Drop what C++ writes to the process's standard output in the block, past Python's own stream.

    torch prints the graph that it could not convert there, where a report in JSON is to stand alone.
    """
    sys.stdout.flush()
    with tempfile.TemporaryFile() as nowhere:
        try:
            kept = os.dup(1)
        except OSError:  # a process without standard output has none to keep clean
            yield
            return
        try:
            os.dup2(nowhere.fileno(), 1)
            yield
        finally:
            os.dup2(kept, 1)
            os.close(kept)
