"""The modules of late-interaction encoders: from states of tokens to a vector for each token that counts.

MultiVectorEncoder of sentence-transformers 6.2. Letters of shapes: B batch, S sequence, W width of a vector.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from onnxtool.checkpoint.activations import Builder, Floats, Value
from onnxtool.checkpoint.late_interaction import QueryExpansion
from onnxtool.checkpoint.module_settings import require_known_settings
from onnxtool.checkpoint.pooling_modes import Mask
from onnxtool.checkpoint.pooling_modules import Dense, Normalize, PoolingModule, require_known_keys, works_on_tokens
from onnxtool.checkpoint.sentence_modules import TRANSFORMERS, SentenceModules, StoredModule
from onnxtool.reports import Json

_DOCUMENT = "document"


@dataclass(frozen=True)
class MultiVectorMask(PoolingModule):
    """Say which tokens count. Their vectors stay as they are: [B, S, W].

    Which ones count depends on what a text is for, which a graph does not know: whoever reads the text decides it, and
    leaves out the vectors of the others.

    Attributes:
        skipped: tokens that do not count, such as punctuation.
        tasks: the texts of which they do not count: `query`, `document` or both. A text of no task is a document.
        kept_ids: where it is not empty, no others count in documents.
    """

    keys = frozenset(("skiplist_words", "skiplist_tasks", "keep_only_token_ids"))
    on_tokens = True

    skipped: tuple[str, ...] = ()
    tasks: tuple[str, ...] = (_DOCUMENT,)
    kept_ids: tuple[int, ...] = ()

    @classmethod
    def read(cls, stored: StoredModule) -> MultiVectorMask:
        """Read the lists."""
        tasks = stored.settings.get("skiplist_tasks")
        if isinstance(tasks, str):
            tasks = [tasks]
        return cls(
            _listed(stored, "skiplist_words", stored.settings.get("skiplist_words"), str),
            (_DOCUMENT,) if tasks is None else _listed(stored, "skiplist_tasks", tasks, str),
            _listed(stored, "keep_only_token_ids", stored.settings.get("keep_only_token_ids"), int),
        )

    def counted(self, ids: Sequence[int], task: str | None, find: Callable[[str], int | None]) -> tuple[bool, ...]:
        """Tell for each token of a text whether it counts.

        Args:
            ids: of the tokens.
            task: what the text is for.
            find: returns the id of a token; None for an unknown one, which skips nothing.
        """
        counted = [True] * len(ids)
        if (task or _DOCUMENT) in self.tasks:
            skipped = {find(token) for token in self.skipped}
            counted = [token_id not in skipped for token_id in ids]
        if task != "query" and self.kept_ids:
            counted = [one and token_id in self.kept_ids for one, token_id in zip(counted, ids, strict=True)]
        return tuple(counted)

    def apply(self, values: Floats, mask: Mask | None = None) -> Floats:
        """Return them as they are."""
        return values

    def build(self, build: Builder, value: Value, mask: Value) -> Value:
        """Append nothing."""
        return value

    def reference(self, torch: Any, value: Any, mask: Any) -> Any:
        """Return it as it is."""
        return value

    @property
    def description(self) -> str:
        """Say what is left out."""
        return f"{len(self.skipped)} tokens that do not count in a {' or a '.join(self.tasks)}"


_CLASSES: dict[str, type[PoolingModule]] = {cls.__name__: cls for cls in (Dense, Normalize, MultiVectorMask)}


def read_token_modules(modules: SentenceModules) -> tuple[PoolingModule, ...]:
    """Read what follows the transformer of a late-interaction encoder, in order.

    Raises:
        OnnxtoolError: it has modules or settings that are not computed here.
    """
    files = modules.modules[0].files
    require_known_settings(modules, files)
    QueryExpansion.of(modules, files)
    if modules.modules[0].kind not in TRANSFORMERS:
        raise files.refuse(
            f"{files.label} has the modules {', '.join(modules.kinds)}, and onnxtool computes late interaction of a "
            f"transformer, with {', '.join(_CLASSES)} behind it"
        )
    stored = modules.modules[1:]
    unknown = sorted({module.kind for module in stored} - set(_CLASSES))
    if unknown:
        raise files.refuse(
            f"{files.label} has the modules {', '.join(unknown)} in a late-interaction encoder, which onnxtool does "
            f"not compute there; it computes {', '.join(_CLASSES)}"
        )
    read = []
    for module in stored:
        require_known_keys(module, _CLASSES[module.kind].keys)
        if module.kind == Normalize.__name__ and not works_on_tokens(module):
            continue  # there is no vector of a text that it could scale
        if module.kind == Dense.__name__ and not works_on_tokens(module):
            raise files.refuse(f"{module.folder} of {files.label} projects a vector of a text, and there is none")
        read.append(_CLASSES[module.kind].read(module))
    return tuple(read)


def read_mask(modules: SentenceModules) -> MultiVectorMask | None:
    """Return what says which tokens count; None where all do.

    Raises:
        OnnxtoolError: its settings are malformed.
    """
    stored = [module for module in modules.modules if module.kind == MultiVectorMask.__name__]
    # A second one only sees what the first has left; sentence-transformers never writes two.
    if len(stored) > 1:
        raise stored[0].files.refuse(f"{stored[0].files.label} has {len(stored)} modules MultiVectorMask")
    return MultiVectorMask.read(stored[0]) if stored else None


def _listed(stored: StoredModule, key: str, value: Json, kind: type) -> tuple[Any, ...]:
    """Return a list of texts or of numbers; an empty one where there is none."""
    entries = [] if value is None else value
    if not isinstance(entries, list) or not all(isinstance(one, kind) and not isinstance(one, bool) for one in entries):
        raise stored.files.refuse(
            f"{key} of {stored.file('config.json')} of {stored.files.label} is {value!r}, which is no list of "
            f"{'tokens' if kind is str else 'ids'}"
        )
    return tuple(entries)
