"""Record the inputs of linear layers on calibration inputs, with a session that returns them as outputs.

Shape letters: F calibration inputs, T sampled rows, K width of a layer's input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from onnxtool.errors import PassError
from onnxtool.graph.shapes import fill_types, find_shapes
from onnxtool.model_file import scratch_file
from onnxtool.optimize.quantization.arithmetic import Floats
from onnxtool.optimize.quantization.error import padding_mask
from onnxtool.optimize.quantization.linear_layers import find_linear_layers, unfuse_linear_layers
from onnxtool.progress import counted
from onnxtool.runtime.machine import release_freed_memory
from onnxtool.runtime.running import Arrays, Session
from onnxtool.runtime.session import open_own

Feeds = Mapping[str, "NDArray[Any]"]

# Of real tokens, drawn at random, over all calibration inputs: for a layer of 3072 channels these are 19 MB.
_MOST_ROWS = 1536


@dataclass(frozen=True)
class Activations:
    """The input of a layer on calibration inputs.

    Attributes:
        lows: the minimum of each channel for each calibration input, including padding, each float32 [K]; inputs
            without rows are skipped.
        highs: the maxima, likewise.
        rows: rows of real tokens of every other text of each calibration input, each float32 [T, K].
    """

    lows: list[Floats] = field(default_factory=list)
    highs: list[Floats] = field(default_factory=list)
    rows: list[Floats] = field(default_factory=list)

    def add(
        self, values: Floats, wanted: NDArray[np.bool_] | None, most_rows: int, generator: np.random.Generator
    ) -> None:
        """Add the input of a layer in one run, float32 [..., K].

        Args:
            values: the input.
            wanted: bool [B, S], the positions eligible as rows; None for all.
            most_rows: the number of rows to draw.
            generator: the random generator.
        """
        flat = values.reshape(-1, values.shape[-1])
        if not len(flat):  # the past before the first token has no rows
            return
        self.lows.append(flat.min(axis=0))
        self.highs.append(flat.max(axis=0))
        if wanted is not None and values.shape[: wanted.ndim] == wanted.shape:
            flat = flat[wanted.reshape(-1)] if values.ndim == wanted.ndim + 1 else flat
        chosen = generator.choice(len(flat), min(most_rows, len(flat)), replace=False)
        self.rows.append(flat[np.sort(chosen)])

    @classmethod
    def joined(cls, parts: Sequence[Activations]) -> Activations:
        """Merge the activations of all `parts`, as inputs of one layer."""
        return cls(
            *(
                list(chain(*lists))
                for lists in zip(*((part.lows, part.highs, part.rows) for part in parts), strict=True)
            )
        )


@dataclass(frozen=True)
class Recording:
    """The outputs of a model, and the inputs of its layers, on calibration inputs.

    Attributes:
        outputs: the model's outputs, one per calibration input.
        activations: the input of each layer, by value name.
        inputs: these value names by the name of a layer's weight; several for a shared weight.
    """

    outputs: tuple[Arrays, ...]
    activations: Mapping[str, Activations]
    inputs: Mapping[str, tuple[str, ...]]


def record(model: ir.Model, feeds: Sequence[Feeds], folder: Path) -> Recording:
    """Run `model`, written to `folder`, on each of `feeds`, and record the inputs of its layers."""
    model = model.clone()
    names = tuple(str(value.name) for value in model.graph.outputs)
    unfuse_linear_layers(model, frozenset(), find_shapes(model))
    layers, _ = find_linear_layers(model)
    fill_types(model)
    values = {str(layer.value.name): layer.value for layer in layers}
    known = {*model.graph.inputs, *model.graph.outputs}
    model.graph.outputs.extend(value for value in values.values() if value not in known)
    session = open_written(model, folder)
    generator, most_rows = np.random.default_rng(0), max(1, _MOST_ROWS // len(feeds))
    activations = {name: Activations() for name in values}
    outputs = []
    for feed in counted(feeds, "recording activations of batch"):
        results, wanted = session.run(feed), _fitted(padding_mask(feed))
        outputs.append({name: results[name] for name in names})
        for name, layer_input in activations.items():
            layer_input.add(feed[name] if name in feed else results[name], wanted, most_rows, generator)
    del session, results
    release_freed_memory()
    for name, layer_input in activations.items():
        if not all(np.isfinite(rows).all() for rows in layer_input.rows):
            raise PassError(
                f"{name}, the input of a layer, is not finite on the calibration inputs",
                "pass inputs like those that the model will get, with --sample_inputs FILE.npz or, for texts, "
                "--calibration FILE; if it is not finite on these either, look at the weights",
            )
    inputs: dict[str, tuple[str, ...]] = {}
    for layer in layers:
        inputs[layer.name] = (*inputs.get(layer.name, ()), str(layer.value.name))
    return Recording(tuple(outputs), activations, inputs)


def _fitted(valid: NDArray[np.bool_] | None) -> NDArray[np.bool_] | None:
    """Return the positions used for rounding weights, given the real tokens, both bool [B, S].

    Half of the texts are held out, so the reported error is measured on unseen text.
    """
    if valid is None or len(valid) < 2:
        return valid
    fitted = valid.copy()
    fitted[1::2] = False
    return fitted


def open_written(model: ir.Model, folder: Path) -> Session:
    """Write `model` to `folder`, open a session on it on the CPU, and remove the file."""
    with scratch_file(model, folder) as path:
        return open_own(path)
