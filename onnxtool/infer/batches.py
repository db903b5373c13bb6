"""Which texts run together, and what a model was given and gave at once.

Letters of shapes: B batch, S sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxtool.checkpoint.limits import EncodedText, fixed_shape
from onnxtool.checkpoint.pooling_module import behind_prompts
from onnxtool.errors import InputError
from onnxtool.model_file import ModelFile
from onnxtool.runtime.feeds import is_mask

_MAX_BATCH_SIZE = 32
# Bounds the memory of logits: 256 MB of float32, which is 2200 tokens of BERT's vocabulary.
_MAX_OUTPUT_ELEMENTS = 1 << 26


@dataclass(frozen=True)
class Batch:
    """What a model was given at once, and what it gave.

    Attributes:
        texts: B texts.
        ids: int64 [B, S].
        mask: bool [B, S], false on padding.
        outputs: name to array.
    """

    texts: Sequence[EncodedText]
    ids: NDArray[np.int64]
    mask: NDArray[np.bool_]
    outputs: Mapping[str, NDArray[Any]]

    @property
    def pooled(self) -> NDArray[np.bool_]:
        """True for tokens that are pooled over, bool [B, S]: not for padding, nor for a prompt that is left out."""
        return behind_prompts(self.mask, [text.num_prompt for text in self.texts])

    def output(self, rank: int, *names: str) -> NDArray[Any]:
        """Return the output of `rank` axes with one of `names`, else the first of that rank.

        Raises:
            InputError: there is none.
        """
        found = {name: array for name, array in self.outputs.items() if array.ndim == rank}
        for name in (*names, *found):
            if name in found:
                return found[name]
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in self.outputs.items())
        raise InputError(
            f"the model has no output {' or '.join(names)} of {rank} axes; it has {shapes}",
            "its metadata onnxtool.task, or --task, does not fit its graph; pass another one, or export it again",
        )


@dataclass(frozen=True)
class BatchRules:
    """What a graph takes at once.

    Attributes:
        batch_size: the number of texts that the graph is fixed to; None where it takes any.
        sequence_length: the number of tokens that the graph is fixed to; None where it takes any.
        max_texts: how many texts may run at once.
        max_tokens: how many tokens may run at once, padding included; bounds the memory of the outputs.
        has_mask: whether the graph is told which tokens are padding.
    """

    batch_size: int | None
    sequence_length: int | None
    max_texts: int
    max_tokens: int
    has_mask: bool

    @classmethod
    def of(cls, model: ModelFile) -> BatchRules:
        """Read them from the graph of `model`."""
        batch_size, sequence_length = fixed_shape(model)
        names = {info.name for info in model.structure.outputs}
        # Anserini's outputs have no batch axis.
        max_texts = batch_size or (1 if "output_idx" in names else _MAX_BATCH_SIZE)
        widths = [info.shape[2] for info in model.structure.outputs if len(info.shape) == 3]
        widest = max((width for width in widths if isinstance(width, int)), default=1)
        has_mask = any(is_mask(info) for info in model.structure.inputs)
        max_tokens = max(1, _MAX_OUTPUT_ELEMENTS // max(1, widest))
        return cls(batch_size, sequence_length, max_texts, max_tokens, has_mask)

    @property
    def may_pad(self) -> bool:
        """Whether texts of different lengths may run together: padding is masked, or the same for all."""
        return self.has_mask or self.sequence_length is not None

    def batches(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Yield the indices of texts that run together, the shortest first; of equal length unless padding is allowed.

        Args:
            lengths: how many tokens each text has.
        """
        batch: list[int] = []
        for position in sorted(range(len(lengths)), key=lambda position: lengths[position]):
            # The text about to be added is the longest so far, and the others will be padded to it.
            is_full = len(batch) == self.max_texts or (len(batch) + 1) * lengths[position] > self.max_tokens
            if batch and (is_full or (not self.may_pad and lengths[position] != lengths[batch[0]])):
                yield batch
                batch = []
            batch.append(position)
        if batch:
            yield batch
