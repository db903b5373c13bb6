"""Graphs of a generative model: the decoder's cache, and the matching encoder."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from numpy.typing import NDArray

from onnxtool.errors import InputError
from onnxtool.model_file import ModelFile
from onnxtool.model_file.metadata import DECODER_KEY, ENCODER_KEY, WEIGHTS_KEY
from onnxtool.runtime.decoding import LOGITS, fits, shown
from onnxtool.runtime.signature import IDS, MASK, TOKEN_TYPES
from onnxtool.runtime.text_feeds import empty_state

ENCODER_MASK = "encoder_attention_mask"
_TEXT_INPUTS = (IDS, MASK, TOKEN_TYPES)


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


def empty_cache(model: ModelFile, names: Iterable[str], batch: int) -> dict[str, NDArray[Any]]:
    """Return the initial cache: empty keys and values, zero states."""
    wanted = frozenset(names)
    return {info.name: empty_state(info, batch) for info in model.structure.inputs if info.name in wanted}


def past_name(present: str) -> str:
    """Name the input for an output: `past_key_values.0.encoder.key` for `present.0.encoder.key`."""
    return re.sub(r"^present", "past_key_values", present)


def _require_own(encoder: ModelFile, decoder: ModelFile) -> None:
    """Refuse an encoder with other weights, with other outputs, or with inputs beyond text."""
    outputs = {past_name(info.name): info for info in encoder.structure.outputs}
    for info in decoder.structure.inputs:
        if ".encoder." in info.name and not (info.name in outputs and fits(info, outputs[info.name])):
            actual = shown(outputs[info.name]) if info.name in outputs else "nothing of that name"
            raise InputError(
                f"{encoder.path} is not the encoder of {decoder.path}: the decoder takes {shown(info)}, "
                f"and this file gives {actual}",
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
