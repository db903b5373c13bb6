"""Build a graph's inputs from a tokenizer's output.

Shape letters: B batch, S sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxtool.checkpoint.module_forms import POOLING_MASK
from onnxtool.errors import InputError
from onnxtool.model_file import ModelFile
from onnxtool.reports import TensorInfo
from onnxtool.runtime.signature import MASK, TOKEN_TYPES, has_past, names_are_exchanged

_INPUT_DTYPES = frozenset({"int64", "int32", "float32", "float16", "bool"})
_PAST, _BATCH_AXIS = "past_key_values", "batch_size"
# Inputs that models take in addition to texts, by name prefix.
_OTHER_INPUTS = {
    "decoder_": "the tokens of a decoder, which an encoder-decoder makes one after the other",
    "encoder_": "the states of an encoder, which another graph gives",
    "pixel_values": "an image",
    "input_features": "sound",
    "input_values": "sound",
    "inputs_embeds": "embeddings in place of tokens",
    "image_": "what belongs to an image",
    "bbox": "the places of words on a page",
}
_WITHOUT = "for texts (--task feature-extraction keeps an encoder)"


def text_feeds(model: ModelFile, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Select the graph's inputs from `arrays`, each int64 [B, S], in the graph's dtypes.

    Positions are counted from the mask, as in transformers' `generate`, and a cache of earlier tokens is empty. A graph
    that excludes prompts pools all tokens if `arrays` contain no prompt.

    Raises:
        InputError: the graph has an input that no tokenizer produces.
    """
    inputs = model.structure.inputs
    with_past = has_past(inputs) or any(info.name.startswith(_PAST) for info in inputs)
    feeds: dict[str, NDArray[Any]] = {}
    for info in inputs:
        if info.name in arrays and arrays[info.name].dtype.kind == "O":  # texts
            feeds[info.name] = arrays[info.name]
        elif info.name in arrays or info.name in ("position_ids", POOLING_MASK):
            _require_dtype(info)
            feeds[info.name] = _tokens(info.name, arrays).astype(info.dtype, copy=False)
        elif with_past and len(info.shape) > 2 and info.dtype.startswith("float"):
            feeds[info.name] = empty_state(info, len(arrays["input_ids"]))
        else:
            raise _unknown(info, arrays)
    return feeds


def require_named_inputs(model: ModelFile) -> None:
    """Refuse a graph whose input names are swapped; see `names_are_exchanged`.

    Raises:
        InputError: the names of its mask and token types are swapped.
    """
    if names_are_exchanged(model):
        raise InputError(
            f"{model.path} takes its mask as {TOKEN_TYPES} and its token types as {MASK}: the two were exported under "
            "each other's names",
            "export the checkpoint again with onnxtool export",
        )


def _tokens(name: str, arrays: Mapping[str, NDArray[Any]]) -> NDArray[np.int64]:
    if name in arrays:
        return arrays[name]
    if name == POOLING_MASK:
        return arrays["attention_mask"]
    positions: NDArray[np.int64] = np.maximum(arrays["attention_mask"].cumsum(axis=1) - 1, 0)
    return positions


def empty_state(info: TensorInfo, batch_size: int) -> NDArray[Any]:
    """Make an initial input of a cache: empty keys or values, or zero states."""
    shape = [
        size if isinstance(size, int) else batch_size if axis == 0 or size == _BATCH_AXIS else 0
        for axis, size in enumerate(info.shape)
    ]
    return np.zeros(shape, info.dtype)


def _require_dtype(info: TensorInfo) -> None:
    if info.dtype not in _INPUT_DTYPES:
        raise InputError(
            f"the input {info.name} is of dtype {info.dtype}, which no ids or masks have",
            "export the model for token ids",
        )


def _unknown(info: TensorInfo, arrays: Mapping[str, NDArray[Any]]) -> InputError:
    is_writer = info.name.startswith("decoder_")
    task = "to write (--task text2text-generation-with-past)" if is_writer else _WITHOUT
    content = next((content for start, content in _OTHER_INPUTS.items() if info.name.startswith(start)), "")
    return InputError(
        f"the model has the input {info.name}, which no tokenizer gives ({', '.join(arrays)})"
        + (f": {content}" if content else ""),
        f"export the model {task}, or run it with onnxtool.open_session and inputs of your own",
    )
