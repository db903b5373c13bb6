"""Run graphs that read texts, and compare them with the graphs that read their ids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxtool.checkpoint.limits import Text
from onnxtool.errors import InputError
from onnxtool.model_file import ModelFile, Staging, save_model
from onnxtool.model_file.domains import STRINGS
from onnxtool.model_file.metadata import TEXT_KEY, TextInput
from onnxtool.runtime.providers import register_operators
from onnxtool.runtime.session import open_session
from onnxtool.runtime.tokens import HARD_TEXTS

_GROUPS = (slice(0, 1), slice(5, 6), slice(20, 23), slice(30, 62))  # of hard texts
_WAY = "export the model without --tokenizer in_graph, and report this"


def text_arrays(names: Sequence[str], texts: Sequence[Text]) -> dict[str, NDArray[Any]]:
    """Return the inputs of a graph that reads texts, or pairs of them if it has two names: string [N] each."""
    rows = ((text,) if isinstance(text, str) else text for text in texts)
    columns = zip(*rows, strict=True) if texts else [()] * len(names)
    # One extra element keeps numpy from inspecting the strings; it is cut off again.
    return {name: np.array([*column, None], dtype=object)[:-1] for name, column in zip(names, columns, strict=True)}


class TextGraph:
    """A small graph that reads texts, as it is in memory."""

    def __init__(self, content: bytes) -> None:
        """Load a serialized model."""
        import onnxruntime as ort

        options = ort.SessionOptions()
        options.log_severity_level = 4
        register_operators(options, (STRINGS,))
        self._session = ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        self.names = [graph_input.name for graph_input in self._session.get_inputs()]

    def run(self, texts: Sequence[Text]) -> dict[str, NDArray[Any]]:
        """Return the outputs of N texts, or pairs, by name."""
        names = [output.name for output in self._session.get_outputs()]
        return dict(zip(names, self._session.run(names, text_arrays(self.names, texts)), strict=True))


def take_tokenizer_off(file: ModelFile, text_input: TextInput, folder: Path) -> tuple[ModelFile, Any]:
    """Write the part that reads ids of a graph that reads texts to `folder`; return it, and the graph before it.

    Raises:
        ModelFileError: the graph was changed since its tokenizer was put into it.
    """
    from onnxtool.graph.text_input import take_off
    from onnxtool.model_file.weights import load_model

    core, front = take_off(load_model(file.path), text_input.former)
    del core.metadata_props[TEXT_KEY]
    return ModelFile.open(save_model(core, Staging(folder, folder / file.path.name, folder))), front


def check_same_outputs(file: ModelFile, core: ModelFile, front: bytes) -> None:
    """Compare the outputs of a graph that reads texts with those of the graph that reads ids, bit by bit.

    Args:
        file: the graph that reads texts, or pairs.
        core: the graph that reads ids.
        front: the model between them: from texts to the inputs of `core`.

    Raises:
        InputError: they differ.
    """
    before, reads, runs = TextGraph(front), open_session(file, provider="cpu"), open_session(core, provider="cpu")
    hard = [text for text in HARD_TEXTS if "\0" not in text]
    texts: Sequence[Text] = hard
    if len(before.names) > 1:
        texts = list(zip(hard, [*hard[3:], *hard[:3]], strict=True))
    for name, array in reads.run(text_arrays(before.names, [])).items():
        if len(array):
            raise InputError(f"{name} of no texts has {len(array)} rows", _WAY)
    for group in _GROUPS:
        inputs = before.run(texts[group])
        expected = runs.run({name: inputs[name] for name in core.input_names})
        for name, array in reads.run(text_arrays(before.names, texts[group])).items():
            if not np.array_equal(array, expected[name], equal_nan=array.dtype.kind == "f"):
                raise InputError(
                    f"{name} of {len(texts[group])} texts differs from that of the graph which reads their ids", _WAY
                )
