"""Inputs to run a file on: as its export has stamped them, else made up from the graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from numpy.typing import NDArray

from onnxtool.model_file import ModelFile
from onnxtool.model_file.metadata import MAX_LENGTH_KEY
from onnxtool.reports import TensorInfo
from onnxtool.runtime.comparison import Case
from onnxtool.runtime.feeds import (
    MASK,
    TOKEN_TYPES,
    FeedShape,
    has_past,
    index_bounds,
    is_mask,
    names_are_exchanged,
    padding_alone,
    past_shapes,
    random_feeds,
    verification_shapes,
)
from onnxtool.runtime.input_stamp import IDS, InputKind, InputStamp, StampedCase

_SAMPLES_IN_A_STEP = 640  # twice the samples in a step of wav2vec2, and enough for its first step
_LONGEST = 64  # for a model without a maximum length


def input_cases(model: ModelFile, *, longest: int | None = None) -> list[Case]:
    """Return inputs of many shapes and masks: those of the stamp, else what the axes of the graph suggest.

    Args:
        model: the file.
        longest: no text is to have more tokens, unless the file takes no shorter one; None for as many as it takes.

    Raises:
        ModelFileError: the stamp cannot be used.
        InputError: the graph has an input for which none can be made.
    """
    inputs = model.structure.inputs
    stamp = InputStamp.read(model)
    if stamp is not None and stamp.cases:
        short = tuple(case for case in stamp.cases if longest is None or _num_tokens(case, stamp.kinds) <= longest)
        stamp = replace(stamp, cases=short or stamp.cases)
        return (stamp if has_past(inputs) else stamp.with_padding_alone()).make_cases(inputs)
    kinds = None if stamp is None else stamp.kinds
    bounds = index_bounds(model)
    length = model.metadata_number(MAX_LENGTH_KEY) or _LONGEST
    length = min(length, longest or length)
    samples = any(_holds_samples(info) for info in inputs)
    exchanged = names_are_exchanged(model)
    masked = any(is_mask(info) for info in inputs) and not exchanged
    more = past_shapes(length) if has_past(inputs) else (padding_alone(length),) * masked
    cases = []
    for seed, shape in enumerate((*verification_shapes(length), *more)):
        if samples:
            shape = _in_samples(shape)
        feeds = random_feeds(inputs, shape, bounds, seed=seed, kinds=kinds)
        if exchanged:  # a row of which all is masked has no meaning
            feeds[MASK], feeds[TOKEN_TYPES] = feeds[TOKEN_TYPES], feeds[MASK]
        cases.append(Case(shape.description, feeds, shape.mask if masked else None))
    return cases


def sized_feeds(model: ModelFile, shape: FeedShape, *, seed: int = 0) -> dict[str, NDArray[Any]]:
    """Make random inputs of B rows of S tokens, none of it padding: as the stamp says, else from the graph.

    Raises:
        ModelFileError: the stamp cannot be used.
        InputError: the graph is fixed to other sizes, or has an input for which none can be made.
    """
    inputs, stamp = model.structure.inputs, InputStamp.read(model)
    if stamp is not None and stamp.cases and stamp.fixed_length(inputs) in (None, shape.sequence_length):
        return stamp.make_sized(inputs, shape.batch_size, shape.sequence_length, seed=seed)
    kinds = None if stamp is None else stamp.kinds
    return random_feeds(inputs, shape, index_bounds(model), seed=seed, kinds=kinds)


def _num_tokens(case: StampedCase, kinds: Mapping[str, InputKind]) -> int:
    """Return how long the longest text of a case is; 0 without any."""
    texts = (case.shapes[name] for name, kind in kinds.items() if kind.kind == IDS)
    return max((shape[1] for shape in texts if len(shape) > 1), default=0)


def _holds_samples(info: TensorInfo) -> bool:
    """Whether an input is a row of audio samples, hundreds of which are one step of the model."""
    return info.dtype.startswith("float") and len(info.shape) == 2 and not isinstance(info.shape[1], int)


def _in_samples(shape: FeedShape) -> FeedShape:
    lengths = tuple(length * _SAMPLES_IN_A_STEP for length in shape.lengths)
    return replace(shape, lengths=lengths, sequence_length=shape.sequence_length * _SAMPLES_IN_A_STEP)
