"""Keep what torch, transformers and onnxruntime print off our streams, which carry our result and our progress."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def quiet() -> Iterator[io.StringIO]:
    """Collect prints, logs below critical and progress bars of the block, and drop its warnings.

    Only what raises counts here: each of our callers checks the outcome itself.
    """
    said = io.StringIO()
    previous = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            warnings.simplefilter("ignore")
            yield said
    finally:
        logging.disable(previous)
