"""Modules of late-interaction encoders: from token states to a vector for each token that counts.

MultiVectorEncoder of sentence-transformers 6.2. Shape letters: B batch, S sequence, W width of a vector.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxtool.checkpoint.late_interaction import QueryExpansion
from onnxtool.checkpoint.module_forms import Builder, PoolingModule, Value, require_known_keys
from onnxtool.checkpoint.module_settings import require_known_settings
from onnxtool.checkpoint.pooling_modules import Dense, Normalize, works_on_tokens
from onnxtool.checkpoint.sentence_modules import TRANSFORMERS, SentenceModules, StoredModule
from onnxtool.errors import InputError
from onnxtool.reports import Json

TOKEN_WEIGHTS = "token_weights"  # noqa: S105  of an output
_DOCUMENT = "document"


@dataclass(frozen=True)
class MultiVectorMask(PoolingModule):
    """Select the tokens that count. Their vectors are unchanged: [B, S, W].

    The selection depends on the text's task, which a graph does not know: the reader of the text decides, and drops the
    other vectors.

    Attributes:
        skipped: tokens that do not count, such as punctuation.
        tasks: the texts in which they do not count: `query`, `document` or both. A text without a task is a document.
        kept_ids: if not empty, only these count in documents.
    """

    keys = frozenset(("skiplist_words", "skiplist_tasks", "keep_only_token_ids"))
    on_tokens = True

    skipped: tuple[str, ...] = ()
    tasks: tuple[str, ...] = (_DOCUMENT,)
    kept_ids: frozenset[int] = frozenset()

    @classmethod
    def read(cls, stored: StoredModule) -> MultiVectorMask:
        """Read the lists."""
        tasks = stored.settings.get("skiplist_tasks")
        if isinstance(tasks, str):
            tasks = [tasks]
        return cls(
            _listed(stored, "skiplist_words", stored.settings.get("skiplist_words"), str),
            (_DOCUMENT,) if tasks is None else _listed(stored, "skiplist_tasks", tasks, str),
            frozenset(_listed(stored, "keep_only_token_ids", stored.settings.get("keep_only_token_ids"), int)),
        )

    def counted(self, ids: Sequence[int], task: str | None, skipped_ids: Set[int]) -> tuple[bool, ...]:
        """Return for each token of a text whether it counts.

        Args:
            ids: the token ids.
            task: the text's task.
            skipped_ids: ids of the tokens that do not count, as far as the tokenizer knows them.
        """
        counted = [True] * len(ids)
        if (task or _DOCUMENT) in self.tasks:
            counted = [token_id not in skipped_ids for token_id in ids]
        if task != "query" and self.kept_ids:
            counted = [counts and token_id in self.kept_ids for counts, token_id in zip(counted, ids, strict=True)]
        return tuple(counted)

    def build(self, build: Builder, value: Value, mask: Value) -> Value:
        """Append nothing."""
        return value

    def reference(self, torch: Any, value: Any, mask: Any) -> Any:
        """Return it as it is."""
        return value

    @property
    def description(self) -> str:
        """Describe the excluded tokens."""
        return f"{len(self.skipped)} tokens that do not count in a {' or a '.join(self.tasks)}"


@dataclass(frozen=True)
class ZeroPadding(PoolingModule):
    """Set the vectors of padding to 0: [B, S, W]."""

    on_tokens = True

    def build(self, build: Builder, value: Value, mask: Value) -> Value:
        """Append it."""
        return build.op("Mul", value, build.as_weights(build.cast(mask)))

    def reference(self, torch: Any, value: Any, mask: Any) -> Any:
        """Multiply by the mask."""
        return value * mask.unsqueeze(-1).to(value.dtype)


@dataclass(frozen=True, eq=False)
class LexicalWeights(PoolingModule):
    """Weigh each token: relu of a projection to one number, 0 for padding, [B, S, W] to [B, S].

    A term weighs as much as the heaviest of its tokens (Chen et al., 2024, arXiv:2402.03216).

    Attributes:
        weight: float32 [1, W].
        bias: float32 [1].
    """

    on_tokens = True
    name = "sparse_linear"

    weight: NDArray[np.float32]
    bias: NDArray[np.float32]

    def build(self, build: Builder, value: Value, mask: Value) -> Value:
        """Append it."""
        weight = build.weight(self.weight[0], "sparse_linear.weight")
        projected = build.op("MatMul", build.cast(value), weight)
        weights = build.op("Relu", build.op("Add", projected, build.weight(self.bias, "sparse_linear.bias")))
        return build.op("Mul", weights, build.cast(mask))

    def reference(self, torch: Any, value: Any, mask: Any) -> Any:
        """Apply torch's own linear layer."""
        weight, bias = (torch.from_numpy(array).to(value) for array in (self.weight, self.bias))
        return torch.relu(torch.nn.functional.linear(value, weight, bias)).squeeze(-1) * mask

    def width(self, before: int) -> int:
        """Return one number per token, without an axis."""
        super().width(before)
        return 0


_CLASSES: dict[str, type[PoolingModule]] = {cls.__name__: cls for cls in (Dense, Normalize, MultiVectorMask)}


def read_token_modules(modules: SentenceModules) -> tuple[PoolingModule, ...]:
    """Read the modules after the transformer of a late-interaction encoder, in order.

    Raises:
        OnnxtoolError: it has unsupported modules or settings.
    """
    if not modules.modules:
        raise InputError("a late-interaction encoder has no modules (modules.json)", "save the checkpoint again")
    files = modules.modules[0].files
    require_known_settings(modules, files)
    QueryExpansion.of(modules, files)
    if modules.kinds[0] not in TRANSFORMERS or not _CLASSES.keys() >= {*modules.kinds[1:]}:
        raise files.refuse(
            f"{files.label} has the modules {', '.join(modules.kinds)}, and onnxtool computes late interaction of a "
            f"transformer, with {', '.join(_CLASSES)} after it"
        )
    computed = []
    for module in modules.modules[1:]:
        require_known_keys(module, _CLASSES[module.kind].keys)
        if module.kind == Normalize.__name__ and not works_on_tokens(module):
            continue  # there is no text vector to scale
        if module.kind == Dense.__name__ and not works_on_tokens(module):
            raise files.refuse(f"{module.folder} of {files.label} projects a text's vector, but there is none")
        computed.append(_CLASSES[module.kind].read(module))
    return tuple(computed)


def read_mask(modules: SentenceModules) -> MultiVectorMask | None:
    """Return the module that selects the tokens that count; None if all do.

    Raises:
        OnnxtoolError: its settings are malformed.
    """
    stored = [module for module in modules.modules if module.kind == MultiVectorMask.__name__]
    # A second one would only see what the first left; sentence-transformers never writes two.
    if len(stored) > 1:
        raise stored[0].files.refuse(f"{stored[0].files.label} has {len(stored)} modules MultiVectorMask")
    return MultiVectorMask.read(stored[0]) if stored else None


def _listed(stored: StoredModule, key: str, value: Json, kind: type) -> tuple[Any, ...]:
    """Return a list of texts or numbers; empty if missing."""
    entries = [] if value is None else value
    if not isinstance(entries, list) or not all(
        isinstance(entry, kind) and not isinstance(entry, bool) for entry in entries
    ):
        raise stored.files.refuse(
            f"{key} of {stored.file('config.json')} of {stored.files.label} is {value!r}, which is not a list of "
            f"{'tokens' if kind is str else 'ids'}"
        )
    return tuple(entries)
