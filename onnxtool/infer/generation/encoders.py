"""The encoder of an encoder-decoder: which file it is, and whether it belongs to the decoder."""

from __future__ import annotations

import re
from pathlib import Path

from onnxtool.errors import InputError
from onnxtool.model_file import ModelFile
from onnxtool.model_file.metadata import DECODER_KEY, ENCODER_KEY, WEIGHTS_KEY
from onnxtool.reports import TensorInfo

IDS, MASK, ENCODER_MASK, LOGITS = "input_ids", "attention_mask", "encoder_attention_mask", "logits"
_TEXT_INPUTS = (IDS, MASK, "token_type_ids")


def find_encoder(decoder: ModelFile, path: Path | None = None) -> ModelFile | None:
    """Open the encoder of `decoder`, at `path` or where the decoder says; None for a graph that has none.

    Raises:
        InputError: it is not there, it is the encoder of another model, or `decoder` is an encoder itself.
        ModelFileError: the decoder names a file that is not beside it, or the file cannot be used.
    """
    stated = decoder.metadata.get(DECODER_KEY)
    if stated is not None and not any(info.name == LOGITS for info in decoder.structure.outputs):
        raise InputError(
            f"{decoder.path} is the encoder of {stated!r}, and writes nothing by itself", f"pass {stated} as the model"
        )
    if not any(info.name == ENCODER_MASK for info in decoder.structure.inputs):
        return None
    path = _beside(decoder) if path is None else path
    if not path.is_file():
        raise InputError(
            f"the encoder of {decoder.path} is not there: {path}",
            "keep both files of an encoder-decoder in one folder, or pass --encoder_path",
        )
    encoder = ModelFile.open(path)
    _require_own(encoder, decoder)
    return encoder


def past_name(present: str) -> str:
    """Name the input that an output becomes: `past_key_values.0.encoder.key` of `present.0.encoder.key`."""
    return re.sub(r"^present", "past_key_values", present)


def fits(taken: TensorInfo, given: TensorInfo) -> bool:
    """Whether one tensor can become another: the same dtype and, where both are fixed, the same sizes."""
    return (
        taken.dtype == given.dtype
        and len(taken.shape) == len(given.shape)
        and all(
            first == second or not (isinstance(first, int) and isinstance(second, int))
            for first, second in zip(taken.shape, given.shape, strict=True)
        )
    )


def shown(info: TensorInfo) -> str:
    """Return a tensor as errors show it."""
    return f"{info.name} {info.dtype} {list(info.shape)}"


def _beside(decoder: ModelFile) -> Path:
    return decoder.path.with_name(decoder.plain_name(ENCODER_KEY) or f"{decoder.path.stem}-encoder.onnx")


def _require_own(encoder: ModelFile, decoder: ModelFile) -> None:
    """Refuse an encoder of other weights, one that gives something else, and one that reads more than texts."""
    given = {past_name(info.name): info for info in encoder.structure.outputs}
    for info in decoder.structure.inputs:
        if ".encoder." in info.name and not (info.name in given and fits(info, given[info.name])):
            found = shown(given[info.name]) if info.name in given else "nothing of that name"
            raise InputError(
                f"{encoder.path} is not the encoder of {decoder.path}: the decoder takes {shown(info)}, "
                f"and this file gives {found}",
                "pass the file that was exported with it",
            )
    if encoder.metadata.get(WEIGHTS_KEY) != decoder.metadata.get(WEIGHTS_KEY):
        raise InputError(
            f"{encoder.path} is not the encoder of {decoder.path}: they come from different weights",
            "export both again from one checkpoint",
        )
    unknown = [info.name for info in encoder.structure.inputs if info.name not in _TEXT_INPUTS]
    if unknown:
        raise InputError(f"{encoder.path} reads {', '.join(unknown)}, which no tokenizer gives", "export it for texts")
