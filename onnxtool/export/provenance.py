"""What an exported file says of itself: the model's figures, and everything that went into it."""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from onnxtool.errors import ExportError
from onnxtool.export.checkpoint import Checkpoint
from onnxtool.export.strategies import ExportStrategy
from onnxtool.model_file.metadata import (
    DTYPE_KEY,
    FILES_KEY,
    HEAD_KEY,
    MAX_LENGTH_KEY,
    READS_KEY,
    ROUTE_KEY,
    TASK_KEY,
    WEIGHTS_KEY,
)
from onnxtool.reports import Json

_PACKAGES = ("onnxtool", "torch", "transformers", "onnx", "onnx-ir", "onnxscript")

# The names that onnxruntime's optimizer and the tutorials go by, and transformers' common names for them.
_FIGURES = {
    "num_heads": "num_attention_heads",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
}


def describe(
    checkpoint: Checkpoint,
    *,
    task: str,
    head: str,
    strategy: ExportStrategy,
    files: str,
    dtype: str,
    max_length: int | None,
    choices: Mapping[str, Json],
) -> dict[str, str]:
    """Return the metadata of an export. The same export with the same packages has the same, whenever and wherever.

    Args:
        checkpoint: what is exported; a folder is named without its path, which is of no use elsewhere.
        task: what the model is for.
        head: what the graph computes on top of the model.
        strategy: how it was traced.
        files: the folder beside the graph that holds tokenizer and configuration.
        dtype: that of the weights.
        max_length: the most tokens a text may have; None where the model does not bound it.
        choices: what a user chose otherwise than by default.
    """
    config = checkpoint.config
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    figures = {key: _figure(text_config, name) for key, name in _FIGURES.items()}
    source = checkpoint.source
    metadata = {
        "model_type": str(config.model_type),
        **{key: str(value) for key, value in figures.items() if isinstance(value, int)},
        "onnxtool.source": source.origin,
        "onnxtool.revision": checkpoint.revision,
        WEIGHTS_KEY: checkpoint.weights_sha256,
        "onnxtool.checkpoint_sha256": checkpoint.checkpoint_sha256,
        "onnxtool.adapter_base": "" if source.base is None else source.base.name,
        ROUTE_KEY: source.route or "",
        READS_KEY: ", ".join(
            task for task, route in source.sentence_modules.route_of.items() if task and route == source.route
        ),
        "onnxtool.architecture": checkpoint.architecture,
        "onnxtool.random_weights": ", ".join(checkpoint.initialized),
        **source.license.stamps,
        TASK_KEY: task,
        HEAD_KEY: head,
        "onnxtool.exporter": strategy.exporter.name,
        "onnxtool.attention": strategy.attention or "",
        "onnxtool.prompts": strategy.prompts,
        "onnxtool.fixed_axes": ", ".join(f"{axis} {size}" for axis, size in strategy.fixed.items()),
        DTYPE_KEY: dtype,
        FILES_KEY: files,
        MAX_LENGTH_KEY: "" if max_length is None else str(max_length),
        "onnxtool.options": json.dumps(choices, sort_keys=True) if choices else "",
        "onnxtool.versions": ", ".join(f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES),
        "onnxtool.date": _date(),
    }
    return {key: value for key, value in metadata.items() if value}


def _figure(config: Any, name: str) -> Any:
    """Return a figure of an architecture; None where it has none, or not the same one in all layers."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # of transformers, for a figure that its layers do not share
        return None


def _date() -> str:
    """Return the day of SOURCE_DATE_EPOCH, or nothing: the day of an export would make every export another file.

    Raises:
        ExportError: the variable is set to something else than seconds.
    """
    epoch: Any = os.environ.get("SOURCE_DATE_EPOCH", "")
    if not epoch:
        return ""
    try:
        return datetime.fromtimestamp(int(epoch), tz=UTC).strftime("%Y-%m-%d")
    except (ValueError, OverflowError, OSError):
        raise ExportError(
            f"SOURCE_DATE_EPOCH is {epoch!r}, not a number of seconds", "unset it, or set it to e.g. $(date +%s)"
        ) from None
