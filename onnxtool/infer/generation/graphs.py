"""Graphs of a generative model: the decoder's cache, and the matching encoder."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxtool.checkpoint.tasks import TASK_WITH_CACHE, TEXT_TO_TEXT_WITH_CACHE
from onnxtool.errors import InputError
from onnxtool.model_file import ModelFile
from onnxtool.model_file.metadata import DECODER_KEY, ENCODER_KEY, WEIGHTS_KEY
from onnxtool.reports import TensorInfo

IDS, MASK, ENCODER_MASK, LOGITS = "input_ids", "attention_mask", "encoder_attention_mask", "logits"
POSITIONS = "position_ids"
_BATCH_AXIS = "batch_size"
_CACHE = "past"
_TEXT_INPUTS = (IDS, MASK, "token_type_ids")


def find_encoder(decoder: ModelFile) -> ModelFile | None:
    """Open the encoder that a decoder names; None for a graph without one.

    Raises:
        InputError: it is missing, belongs to another model, or `decoder` is itself an encoder.
        ModelFileError: the decoder names a file that is not next to it, or the file cannot be used.
    """
    stated = decoder.metadata.get(DECODER_KEY)
    if stated is not None and not any(info.name == LOGITS for info in decoder.structure.outputs):
        raise InputError(
            f"{decoder.path} is the encoder of {stated!r}, and writes nothing by itself", f"pass {stated} as the model"
        )
    if not any(info.name == ENCODER_MASK for info in decoder.structure.inputs):
        return None
    path = decoder.path.with_name(decoder.plain_name(ENCODER_KEY) or f"{decoder.path.stem}-encoder.onnx")
    if not path.is_file():
        raise InputError(
            f"the encoder of {decoder.path} is not there: {path}",
            "keep both files of an encoder-decoder in one folder, under the names that they were exported with",
        )
    encoder = ModelFile.open(path)
    _require_own(encoder, decoder)
    return encoder


def cache_of(model: ModelFile) -> dict[str, str]:
    """Return the cache inputs, and the outputs that feed them in the next step.

    Raises:
        InputError: the graph has no cache, or its outputs do not match its inputs.
    """
    outputs = {info.name: info for info in model.structure.outputs}
    found = {info.name: info for info in model.structure.inputs if info.name.startswith(_CACHE)}
    if LOGITS not in outputs or not any(".encoder." not in name for name in found):
        raise InputError(
            f"{model.path} writes no text: it has {'no cache' if LOGITS in outputs else 'no logits'}",
            f"export it with --task {TASK_WITH_CACHE}, or {TEXT_TO_TEXT_WITH_CACHE} for an encoder-decoder",
        )
    carried = {name: _present(name) for name in found if ".encoder." not in name}
    for name, output in carried.items():
        if output not in outputs or not _fits(found[name], outputs[output]):
            raise InputError(
                f"the cache of {model.path} does not go from step to step: it takes {_shown(found[name])} and gives "
                + (_shown(outputs[output]) if output in outputs else f"no {output}"),
                "export the model again",
            )
    return carried


def empty_cache(model: ModelFile, names: Iterable[str], batch: int) -> dict[str, NDArray[Any]]:
    """Return the initial cache: empty keys and values, zero states."""
    wanted = frozenset(names)
    return {
        info.name: np.zeros([_size(size, axis, batch) for axis, size in enumerate(info.shape)], info.dtype)
        for info in model.structure.inputs
        if info.name in wanted
    }


def past_name(present: str) -> str:
    """Name the input for an output: `past_key_values.0.encoder.key` for `present.0.encoder.key`."""
    return re.sub(r"^present", "past_key_values", present)


def _fits(taken: TensorInfo, given: TensorInfo) -> bool:
    """Whether one tensor can feed another: the same dtype and, where both are fixed, the same sizes."""
    return (
        taken.dtype == given.dtype
        and len(taken.shape) == len(given.shape)
        and all(
            first == second or not (isinstance(first, int) and isinstance(second, int))
            for first, second in zip(taken.shape, given.shape, strict=True)
        )
    )


def _shown(info: TensorInfo) -> str:
    """Format a tensor for errors."""
    return f"{info.name} {info.dtype} {list(info.shape)}"


def _require_own(encoder: ModelFile, decoder: ModelFile) -> None:
    """Refuse an encoder with other weights, with other outputs, or with inputs beyond text."""
    given = {past_name(info.name): info for info in encoder.structure.outputs}
    for info in decoder.structure.inputs:
        if ".encoder." in info.name and not (info.name in given and _fits(info, given[info.name])):
            found = _shown(given[info.name]) if info.name in given else "nothing of that name"
            raise InputError(
                f"{encoder.path} is not the encoder of {decoder.path}: the decoder takes {_shown(info)}, "
                f"and this file gives {found}",
                "pass the file that was exported with it",
            )
    if encoder.metadata.get(WEIGHTS_KEY) != decoder.metadata.get(WEIGHTS_KEY):
        raise InputError(
            f"{encoder.path} is not the encoder of {decoder.path}: they were written by two runs, of other weights",
            "run the export again, which writes both",
        )
    unknown = [info.name for info in encoder.structure.inputs if info.name not in _TEXT_INPUTS]
    if unknown:
        raise InputError(f"{encoder.path} reads {', '.join(unknown)}, which no tokenizer gives", "export it for texts")


def _present(name: str) -> str:
    return re.sub(r"^past(_key_values)?", "present", name)


def _size(size: int | str | None, axis: int, batch: int) -> int:
    if isinstance(size, int):
        return size
    return batch if axis == 0 or size == _BATCH_AXIS else 0
