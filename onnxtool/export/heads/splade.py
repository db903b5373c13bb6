"""Tell that a masked language model is a SPLADE from its name, its model card and what its training wrote down.

SPLADE is trained by scripts that save a plain BertForMaskedLM: nothing in the weights or in config.json tells it from
a model that fills in masks. Pickles, such as training_args.bin, are never read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress

from onnxtool.checkpoint.folder import path_parts
from onnxtool.checkpoint.sentence_modules import ENCODER_NAME
from onnxtool.checkpoint.tasks import SPARSE_TAGS
from onnxtool.errors import CheckpointError
from onnxtool.export.source import Source
from onnxtool.reports import Json

# Words that turn the next one round: `not-splade`, `pretrained-for-splade`, `vs_splade`. `distilsplade` is a SPLADE.
_SAYS_SPLADE = re.compile(
    r"(?<![a-z])(?:not?|non|never|without|anti|pre|before|for|to|vs|versus|than)[\W_]*(?:an?[\W_]+)?splade"
    r"|splade[\W_]*(?:free|less|negatives|tokenizer)(?![a-z])"
    r"|(?P<named>splade)",
    re.IGNORECASE,
)
# Folders are often called after a step of the training, or after nothing, and their parent after the model.
_NO_NAME = re.compile(
    r"(?:checkpoint|step|epoch|global_step)?[-_]?\d+|checkpoint|final|best|last|model|output|(?:final|best|last)[-_]"
    r"(?:model|checkpoint)|(?:model|checkpoint)[-_](?:final|best|last)|hf|pytorch|0_(?:MLM)?Transformer",
    re.IGNORECASE,
)
# Of the card's front matter. Not `datasets`, which may be what a SPLADE has mined, and no prose.
_CARD_KEYS = ("tags", "pipeline_tag", "library_name", "model_name", "base_model")
# What trainers write beside a checkpoint, and in config.json where the weights came from.
_TRAINING_FILES = ("training_args.json", "trainer_state.json", "train_args.json", "args.json", "training_config.json")
_CONFIG_KEYS = ("_name_or_path", "name_or_path")
_OF_OTHERS = re.compile(r"teacher|negative|data|corpus|min(?:er|ed|ing)|retriever|rerank|baseline", re.IGNORECASE)
# Keys of sentence-transformers' SpladeLoss in the log of a training.
_LOGGED = frozenset({"document_regularizer_loss", "query_regularizer_loss"})


def splade_evidence(source: Source) -> str:
    """Return what says that a masked language model without modules is a SPLADE, in words; empty where nothing does."""
    if source.sentence_modules.encoder_class == "SparseEncoder":
        return f"{ENCODER_NAME} names SparseEncoder"
    if tags := [tag for tag in SPARSE_TAGS if tag in source.card_tags]:
        return f"the model card's tags name {' and '.join(tags)}"
    if name := _named(path_parts(source.model_name)) or _named(source.origin.split("/")):
        return f"it is called {name}"
    for key in _CARD_KEYS:
        if found := _found(source.card.get(key)):
            return f"the model card's {key} says {found}"
    config = source.read("config.json")
    for key in _CONFIG_KEYS:
        if found := _found(config.get(key)):
            return f"{key} of config.json says {found}"
    for file in _TRAINING_FILES:
        with suppress(CheckpointError):  # no part of the model: one that cannot be parsed says nothing of it
            if found := _found(source.read_json(file)):
                return f"{file} says {found}"
    return ""


def says_splade(text: str) -> bool:
    """Whether a name says that something is a SPLADE, rather than that it is none."""
    return any(match["named"] for match in _SAYS_SPLADE.finditer(text))


def _named(parts: Sequence[str]) -> str:
    """Return the name at the end of a path, above folders that have none, where it says so; else nothing."""
    name = next((part for part in reversed(parts) if _NO_NAME.fullmatch(part) is None), "")
    return name if says_splade(name) else ""


def _found(value: Json) -> str:
    """Return the first text in a JSON value that says so; empty where there is none."""
    return next((text for text in _texts(value) if text in _LOGGED or _named(text.rstrip("/").split("/"))), "")[:200]


def _texts(value: Json) -> Iterator[str]:
    """Yield the texts in a JSON value, and the keys of its objects; not what is said of other models and of data."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            own = {key: inner for key, inner in item.items() if _OF_OTHERS.search(key) is None}
            waiting += [*reversed(own.values()), *reversed(own)]
        elif isinstance(item, list):
            waiting += reversed(item)
