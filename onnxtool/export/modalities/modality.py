"""The modality interface: named axes, random inputs of any size along them, and cases to verify a file on.

Also what modalities share: running a tokenizer or processor, and scaling inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from onnxtool.checkpoint.tokenizer_guard import panics_as_exceptions
from onnxtool.errors import CheckpointError, ExportError
from onnxtool.export.source import reason
from onnxtool.runtime.comparison import Case
from onnxtool.runtime.recipes import Recipe

BATCH, SEQUENCE, DECODER_SEQUENCE = "batch_size", "sequence", "decoder_sequence"
HEIGHT, WIDTH = "height", "width"
NUM_SAMPLES, NUM_FRAMES = "num_samples", "num_frames"

Feeds = dict[str, "NDArray[Any]"]
Sizes = Mapping[str, int]
DescribedInputs = tuple[Mapping[str, Recipe], Sequence[Case]]
"""Descriptions of a file's inputs, and the cases that it runs on."""


@dataclass(frozen=True)
class Axis:
    """An input axis that may be dynamic.

    Attributes:
        name: its name in the exported file.
        usual: its size in the model's first run, at least 2: dynamo treats an axis of size 1 as fixed.
        other: another size; if the model runs on it, the axis is dynamic.
        may_fail: whether the model may refuse other sizes, which fixes the axis; refusing another batch size is an
            error.
        is_covered: whether the cases reach its largest possible size, or so many sizes that a graph with a hard-coded
            decision about one of them would fail.
        when_fixed: its size in a file where it cannot be dynamic; 0 for `usual`.
    """

    name: str
    usual: int
    other: int
    may_fail: bool = True
    is_covered: bool = False
    when_fixed: int = 0

    @property
    def fixed_size(self) -> int:
        """Its size in a file where it cannot be dynamic."""
        return self.when_fixed or self.usual


class Modality(Protocol):
    """The inputs of a model: text, images, audio, or several of them.

    `fixed` holds the sizes of axes that the exported file does not leave open.
    """

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The input axes; no two modalities of a model share a name unless the axes are equal."""
        ...

    def feeds(self, sizes: Sizes, *, seed: int = 0) -> Feeds:
        """Make random inputs, input name to array, without padding. `sizes` has a size for every axis."""
        ...

    def sample(self, fixed: Sizes) -> Feeds:
        """Return the inputs to trace the model on."""
        ...

    def cases(self, fixed: Sizes) -> list[Case]:
        """Return the cases to verify the file on: several sizes and masks, and real content."""
        ...

    @property
    def recipes(self) -> Mapping[str, Recipe]:
        """Descriptions of each input, for anyone who prepares inputs for the file."""
        ...


def text_case(modality: Modality, fixed: Sizes, length: int) -> Case:
    """Return a case with one text of `length` tokens, without padding."""
    ones = {axis.name: 1 for axis in modality.axes if not axis.may_fail}
    sizes = {**usual_sizes(modality), **ones, **fixed, SEQUENCE: length}
    return Case(f"a text of {length} tokens", modality.feeds(sizes, seed=length), None)


def usual_sizes(modality: Modality) -> dict[str, int]:
    """Return the usual size of every axis."""
    return {axis.name: axis.usual for axis in modality.axes}


def size_notes(architecture: str, model_sizes: Sizes, file_sizes: Sizes, files: str) -> Iterator[str]:
    """Yield notes for the user about axes of one size, which the model fixes, or only its `files`."""
    for sizes, note in (
        (model_sizes, f"{architecture} itself takes one size only"),
        (file_sizes, f"fixed in {files}, though {architecture} takes other sizes"),
    ):
        if sizes:
            yield f"{note}: {', '.join(f'{axis} {size}' for axis, size in sizes.items())}"


PROCESSOR_FILE = "preprocessor_config.json"
TOKENIZER_FILE = "tokenizer_config.json"


def run(call: Callable[[], Mapping[str, Any]], kind: str, file: str) -> Mapping[str, Any]:
    """Return the result of `call`, which runs only a processor.

    Args:
        call: runs it.
        kind: its kind, e.g. `image processor`.
        file: the file with its settings.

    Raises:
        CheckpointError: it fails, for example because its settings load but make no sense.
    """
    try:
        with panics_as_exceptions():
            return call()
    except Exception as error:  # settings are not validated, and fail where they are first used
        raise CheckpointError(
            f"the checkpoint's {kind} does not run: {reason(error)}", f"check its settings in {file}, or save it again"
        ) from error


def prepare(call: Callable[[], Mapping[str, Any]], kind: str) -> Feeds:
    """Return the tensors from an image processor or feature extractor, integers as int64.

    Raises:
        CheckpointError: it fails.
    """
    import torch

    prepared = run(call, kind, PROCESSOR_FILE)
    arrays = {name: value.numpy() for name, value in prepared.items() if isinstance(value, torch.Tensor)}
    return {name: array.astype(np.int64) if array.dtype == np.int32 else array for name, array in arrays.items()}


def disagreement(model: Any, accepted: Sequence[str], kind: str, offered: Iterable[str]) -> ExportError:
    """Make the error for a model that has no input in common with its tokenizer or processor."""
    return ExportError(
        f"{type(model).__name__} takes {', '.join(accepted)}, and its {kind} gives {', '.join(offered)}",
        "the folder may mix two models; or this model takes something that onnxtool does not know",
    )


def scaled(feeds: Feeds, factor: float) -> Feeds:
    """Multiply the floating-point `feeds`, leaving masks and sizes unchanged."""
    return {
        name: (array * factor).astype(array.dtype) if np.issubdtype(array.dtype, np.floating) else array
        for name, array in feeds.items()
    }
