"""Run a tokenizer or processor, and scale the inputs that it makes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from onnxtool.checkpoint.tokenizer_library import panics_as_exceptions
from onnxtool.errors import CheckpointError, ExportError
from onnxtool.export.modalities.sizes import Feeds
from onnxtool.export.source import reason

PROCESSOR_FILE = "preprocessor_config.json"
TOKENIZER_FILE = "tokenizer_config.json"


def run(call: Callable[[], Mapping[str, Any]], kind: str, file: str) -> Mapping[str, Any]:
    """Return what `call`, which runs a processor alone, gives.

    Args:
        call: runs it.
        kind: what it is, e.g. `image processor`.
        file: where its settings are.

    Raises:
        CheckpointError: it fails, as one does whose settings load and make no sense.
    """
    try:
        with panics_as_exceptions():
            return call()
    except Exception as error:  # settings are checked nowhere, and fail wherever one is first used
        raise CheckpointError(
            f"the checkpoint's {kind} does not run: {reason(error)}", f"check its settings in {file}, or save it again"
        ) from error


def prepare(call: Callable[[], Mapping[str, Any]], kind: str) -> Feeds:
    """Return the tensors that an image processor or feature extractor gives, integers as int64.

    Raises:
        CheckpointError: it fails.
    """
    import torch

    prepared = run(call, kind, PROCESSOR_FILE)
    arrays = {name: value.numpy() for name, value in prepared.items() if isinstance(value, torch.Tensor)}
    return {name: array.astype(np.int64) if array.dtype == np.int32 else array for name, array in arrays.items()}


def disagreement(model: Any, accepted: Sequence[str], kind: str, offered: Iterable[str]) -> ExportError:
    """Make the error for a model and a tokenizer or processor that agree on no input."""
    return ExportError(
        f"{type(model).__name__} takes {', '.join(accepted)}, and its {kind} gives {', '.join(offered)}",
        "the folder may mix two models; or this model takes something that onnxtool does not know",
    )


def scaled(feeds: Feeds, factor: float) -> Feeds:
    """Multiply the real numbers among `feeds`, and leave masks and sizes."""
    return {
        name: (array * factor).astype(array.dtype) if np.issubdtype(array.dtype, np.floating) else array
        for name, array in feeds.items()
    }
