"""What a module of sentence-transformers is that follows a transformer: one computation, written in three forms.

`apply` computes it in NumPy, for graphs that end before it. `build` appends it to a graph. `reference` is a few lines
of PyTorch from the module's definition, by which exports are verified; the caller passes PyTorch in, because this
package does not load it.

Letters of shapes: B batch, S sequence, W width of a vector.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from onnxtool.checkpoint.activations import Builder, Floats, Value
from onnxtool.checkpoint.pooling_modes import Mask
from onnxtool.checkpoint.sentence_modules import ENCODER_NAME, StoredModule, positive
from onnxtool.reports import Json

_ALL = 2**31 - 1  # more than any vector has


class PoolingModule(ABC):
    """One module with its settings and weights.

    Attributes:
        pools_tokens: whether it takes [B, S, N] and gives one vector for each text; others take and give vectors.
        reads: what sentence-transformers calls the output of the transformer that a module that pools tokens reads.
        keys: those of its config.json that are followed, or change nothing; None where sentence-transformers passes
            over others.
    """

    pools_tokens: ClassVar[bool] = False
    reads: ClassVar[str] = "token_embeddings"
    keys: ClassVar[frozenset[str] | None] = None

    @classmethod
    @abstractmethod
    def read(cls, stored: StoredModule) -> PoolingModule:
        """Read settings and weights.

        Raises:
            OnnxtoolError: they ask for what is not computed here, or do not fit each other.
        """

    @abstractmethod
    def apply(self, values: Floats, mask: Mask | None = None) -> Floats:
        """Compute the module in NumPy; `mask`: bool [B, S], which a module that pools tokens takes alone."""

    @abstractmethod
    def build(self, build: Builder, value: Value, mask: Value) -> Value:
        """Append the module to a graph: `value` is what came before, `mask` int64 [B, S]."""

    @abstractmethod
    def reference(self, torch: Any, value: Any, mask: Any) -> Any:
        """Compute the module in PyTorch, on tensors of the same shapes."""

    def width(self, before: int) -> int:
        """Return the width of a vector after the module, of one that had `before`.

        Raises:
            ValueError: the module takes vectors of another width.
        """
        return before

    @property
    def on_tokens(self) -> bool:
        """Whether it takes and gives a vector for each token, [B, S, W]."""
        return False

    @property
    def description(self) -> str:
        """What it does, in a few words."""
        return type(self).__name__


def count_setting(stored: StoredModule, key: str) -> int:
    """Return a setting of the encoder that is a number above zero: of what there is, so many at most.

    Raises:
        OnnxtoolError: it is not.
    """
    value = stored.settings.get(key)
    count = positive(value)
    if count is None:
        raise stored.files.malformed(ENCODER_NAME, f"{key} is {value!r}, which is no number above zero")
    return min(count, _ALL)


def stored_tensor(
    stored: StoredModule, tensors: Mapping[str, NDArray[np.float32]], name: str, shape: tuple[Json, ...]
) -> NDArray[np.float32]:
    """Return a weight of a module.

    Raises:
        OnnxtoolError: there is none, or it has another shape than the settings say.
    """
    tensor = tensors.get(name)
    if tensor is None or tensor.shape != shape:
        found = "missing" if tensor is None else f"of shape {list(tensor.shape)}"
        raise stored.files.refuse(
            f"{name} in {stored.folder} of {stored.files.label} is {found}, and its config.json says {list(shape)}",
            "the folder mixes two models; take both from one",
        )
    return tensor


def require_no_others(stored: StoredModule, tensors: Mapping[str, NDArray[np.float32]], known: Collection[str]) -> None:
    """Refuse weights of a module that it does not use.

    Raises:
        OnnxtoolError: there are some.
    """
    others = sorted(tensors.keys() - set(known))
    if others:
        raise stored.files.refuse(
            f"{stored.folder} of {stored.files.label} has weights that {stored.kind} does not use: {', '.join(others)}",
            "the folder mixes two models, or its config.json was edited; take both from one",
        )


def projected_width(name: str, weight: NDArray[np.float32], before: int) -> int:
    """Return the rows of the weight of a module that takes vectors of its columns.

    Raises:
        ValueError: the vectors have another width.
    """
    rows, columns = weight.shape
    if columns != before:
        raise ValueError(f"{name} takes vectors of {columns} numbers, and is given {before}")
    return int(rows)
