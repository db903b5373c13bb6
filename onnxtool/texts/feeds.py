"""The inputs of a graph from what a tokenizer gives.

Letters of shapes: B batch, S sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from onnxtool.errors import InputError
from onnxtool.model_file import ModelFile

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_INPUT_DTYPES = frozenset({"int64", "int32", "float32", "float16", "bool"})


def text_feeds(model: ModelFile, arrays: Mapping[str, NDArray[np.int64]]) -> dict[str, NDArray[Any]]:
    """Take the inputs that the graph has from `arrays`, each int64 [B, S], in the graph's dtypes.

    Raises:
        InputError: the graph has an input that no tokenizer gives.
    """
    feeds = {}
    for info in model.structure.inputs:
        if info.name not in arrays:
            raise InputError(
                f"the model has the input {info.name}, which no tokenizer gives ({', '.join(arrays)})",
                "export the model for texts, or run it with onnxtool.open_session and inputs of your own",
            )
        if info.dtype not in _INPUT_DTYPES:
            raise InputError(
                f"the input {info.name} is of dtype {info.dtype}, which no ids or masks have",
                "export the model for token ids",
            )
        feeds[info.name] = arrays[info.name].astype(info.dtype, copy=False)
    return feeds
