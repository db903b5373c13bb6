"""Which files a tokenizer is read from, by the names that transformers' tokenizer classes give them.

Tested with transformers 5.23, whose classes say them in `vocab_files_names`: use to name.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

from onnxtool.export.source import Source, plain_name

# What transformers reads for any tokenizer, whatever its class.
_ANY_CLASS = "tokenizer.json"
# Of Marian's and BARTpho's classes, which transformers can only import with sentencepiece.
_BEHIND_SENTENCEPIECE = ("source.spm", "target.spm", "vocab.json", "target_vocab.json", "dict.txt")
# What a class calls the files that lie beside a vocabulary and hold no tokens.
_NO_VOCABULARY = ("tokenizer_config_file", "merges_file", "normalizer_file", "emoji_file")
_PACKAGES = {"sentencepiece": "sentencepiece", "google.protobuf": "protobuf"}


def own_files(source: Source, model_type: str) -> tuple[str, ...]:
    """Return the files of the tokenizer class that the checkpoint names, or else of the one of its `model_type`."""
    return files_of(_own_class(source, model_type))


def all_files(*, vocabularies: bool = False) -> Iterator[str]:
    """Yield the files of all tokenizer classes that transformers can import here; a name may come twice."""
    import transformers
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    yield _ANY_CLASS
    for name in dict.fromkeys(filter(None, TOKENIZER_MAPPING_NAMES.values())):
        yield from files_of(getattr(transformers, name, None), vocabularies=vocabularies)
    yield from _BEHIND_SENTENCEPIECE


def files_of(tokenizer: Any, *, vocabularies: bool = False) -> tuple[str, ...]:
    """Return the files that a tokenizer, or a class of them, is read from; empty where it says none.

    Raises:
        CheckpointError: a class of the checkpoint's own names a path outside its folder.
    """
    names = _stated(tokenizer)
    return tuple(
        plain_name(name)
        for use, name in (names if isinstance(names, dict) else {}).items()
        if isinstance(name, str) and not (vocabularies and use in _NO_VOCABULARY)
    )


def has_vocabulary(source: Source, model_type: str) -> bool:
    """Whether the checkpoint has a vocabulary, or a tokenizer of characters or bytes (CANINE, ByT5), which has none."""
    own = _own_class(source, model_type)
    if isinstance(own, type) and _stated(own) == {}:
        return True
    names = iter((_ANY_CLASS, *files_of(own, vocabularies=True)))
    return _any(source, names) or _any(source, all_files(vocabularies=True))


def missing_packages(source: Source, model_type: str) -> tuple[str, ...]:
    """Return the packages that reading the tokenizer takes and that are not installed, by their names on PyPI.

    Where it cannot read a SentencePiece model, transformers names another one (tiktoken), or none.
    """
    missing = tuple(package for module, package in _PACKAGES.items() if not _is_installed(module))
    pieces = (name for name in (*own_files(source, model_type), *all_files()) if name.endswith((".model", ".spm")))
    needed = missing and source.locate(_ANY_CLASS) is None and _any(source, pieces)
    return missing if needed else ()


def _own_class(source: Source, model_type: str) -> Any:
    import transformers
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    named = source.read("tokenizer_config.json").get("tokenizer_class")
    return getattr(transformers, str(named or TOKENIZER_MAPPING_NAMES.get(model_type)), None)


def _stated(tokenizer: Any) -> Any:
    try:
        return getattr(tokenizer, "vocab_files_names", None)
    except ImportError:  # transformers puts a class that raises in place of one whose library is not installed
        return None


def _any(source: Source, names: Iterator[str]) -> bool:
    return any(source.locate(name) is not None for name in names)


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package that it lies in is not there either
        return False
