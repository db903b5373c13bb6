"""The sidecar files of an exported graph: tokenizer, configuration, pooling.

They are the checkpoint's own, byte for byte. Files that a consumer needs and the checkpoint lacks are added, and so is
a tokenizer.json if transformers tokenizes differently from the checkpoint's.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxtool.checkpoint.chat_templates import TEMPLATE_NAME
from onnxtool.checkpoint.files import MODULE_WEIGHTS
from onnxtool.checkpoint.folder import TOKENIZER_NAME, CheckpointFolder
from onnxtool.checkpoint.late_interaction import METADATA_NAME
from onnxtool.checkpoint.pooling_modules import INSTRUCTORS, Pooling
from onnxtool.checkpoint.sentence_modules import (
    ENCODER_NAME,
    MODULES_NAME,
    ROUTER_NAME,
    STATIC,
    TRANSFORMER_NAMES,
    TRANSFORMERS,
    positive,
)
from onnxtool.checkpoint.static_embeddings import IDF_NAME, TOKENIZER_CONFIG, SparseStaticEmbedding, table_files
from onnxtool.checkpoint.tokenizer_library import EffectiveTokenizer
from onnxtool.errors import CheckpointError, TargetError
from onnxtool.export.source import Source, all_files, files_of, own_files
from onnxtool.reading import read_json, read_text
from onnxtool.reports import Json

_VOCABULARY = "vocab.txt"  # for WordPiece
# Files that consumers may need in addition to the graph and the files named by the tokenizer's class. Only files that a
# checkpoint has are copied.
SIDECAR_FILES = (
    "config.json",
    TOKENIZER_NAME,
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    TEMPLATE_NAME,
    "preprocessor_config.json",
    "processor_config.json",
    "generation_config.json",
    MODULES_NAME,
    ROUTER_NAME,
    ENCODER_NAME,
    IDF_NAME,
    METADATA_NAME,
    *TRANSFORMER_NAMES,
)


CARD = "README.md"
_BEGIN, _END = "<!-- onnxtool: files -->", "<!-- /onnxtool -->"


def with_section(card: str, section: str) -> str:
    """Return the card with the section between our two marks, which is replaced if it is there; removed if empty."""
    head, begin, after_begin = card.partition(_BEGIN)
    tail = after_begin.partition(_END)[2] if begin else ""
    marked = f"{_BEGIN}\n{section}\n{_END}\n" if section else ""
    return f"{head.rstrip()}\n\n{marked}{tail.lstrip()}".rstrip() + "\n"


def without_section(card: Path, output: Path) -> list[Path]:
    """Write a card without our section to `output`, or return the card if it had nothing else."""
    text = read_text(card) if card.is_file() else ""
    if _BEGIN not in text:
        return []
    remaining = with_section(text, "")
    if remaining.strip() in ("", f"# {card.parent.name}"):
        return [card]
    output.write_text(remaining, encoding="utf-8")
    return []


def write_sidecar_files(
    source: Source, tokenizer: Any, folder: Path, existing: Path, *, module_weights: bool = False
) -> None:
    """Write the sidecar files of `source` to `folder`, a staging folder that will become `existing`.

    With `module_weights`, weights of modules such as Dense are included, for a consumer that computes them itself.

    A tokenizer.json, for the tokenizers library, and a vocab.txt for WordPiece are written if the checkpoint lacks them
    or transformers would generate others. A checkpoint exported into its own folder (`existing`) keeps its files.

    Raises:
        CheckpointError: a checkpoint exported into its own folder cannot keep its files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    modules, derived = source.sentence_modules, dict[str, Json]()
    is_part = source.route is not None and modules.query is None
    is_beside_itself = source.is_local and existing.is_dir() and existing.samefile(source.model_name)
    if is_beside_itself and (is_part or source.base is not None):
        raise CheckpointError(
            f"{MODULES_NAME if is_part else 'config.json'} would be written into the checkpoint, {existing}, "
            "and change what it is",
            "pass --output with another folder",
        )
    if is_part:
        derived[MODULES_NAME] = _modules_of_route(source)
    elif modules.query is not None and source.locate(IDF_NAME) is None:
        derived[IDF_NAME] = dict(SparseStaticEmbedding.read(modules.query).named_weights(modules.query))
    if source.label in INSTRUCTORS:  # sentence-transformers recognizes these by name, but not copies of them
        pooling = [module for module in modules.modules if module.kind == Pooling.__name__]
        derived |= {module.file("config.json"): {**module.settings, "include_prompt": False} for module in pooling}
    names = (*SIDECAR_FILES, *_tokenizer_files(source, tokenizer), *module_files(source, weights=module_weights))
    for name in dict.fromkeys(names):
        path = source.locate(name)
        is_of_route = name in derived or (name == ROUTER_NAME and MODULES_NAME in derived)
        if path is not None and not is_of_route and not _is_same_file(path, existing / name):
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    for name, content in derived.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_json(folder / name, content)
    if modules.kinds[:1] != (STATIC,):  # sentence-transformers reads its tokenizer.json unchanged
        _write_effective(source, tokenizer, folder, existing)
    path = source.locate(_VOCABULARY)
    keeps_vocabulary = path is not None and _is_same_file(path, existing / _VOCABULARY)
    if is_wordpiece(tokenizer) and not keeps_vocabulary and not _is_vocabulary(path, tokenizer):
        (folder / _VOCABULARY).write_text(wordpiece_vocabulary(tokenizer), encoding="utf-8")


def _write_effective(source: Source, tokenizer: Any, folder: Path, existing: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json settings if transformers' tokenizer differs from them."""
    stored = source.locate(TOKENIZER_NAME)
    effective = EffectiveTokenizer.of(tokenizer, stored)
    if effective is None:
        return
    keeps_files = stored is not None and _is_same_file(stored, existing / TOKENIZER_NAME)
    if effective.content is not None:
        if keeps_files:
            raise CheckpointError(
                f"{type(tokenizer).__name__} of {source.model_name} reads texts differently from its {TOKENIZER_NAME}; "
                f"a new one would replace the checkpoint's own, {existing}",
                "pass --output with another folder",
            )
        (folder / TOKENIZER_NAME).write_text(effective.content, encoding="utf-8")
    if not keeps_files:
        config = source.read_object(TOKENIZER_CONFIG)
        missing = effective.missing(config, source.read_object("special_tokens_map.json"))
        if missing:
            write_json(folder / TOKENIZER_CONFIG, {**config, **missing})


def _is_vocabulary(path: Path | None, tokenizer: Any) -> bool:
    """Return whether vocab.txt has a tokenizer's tokens with the same ids; added tokens may be missing."""
    if path is None:
        return False
    try:
        lines = read_text(path, errors="replace").split("\n")
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}", "fetch the checkpoint again") from error
    stored = {token: token_id for token_id, token in enumerate(lines)}
    vocabulary, added = tokenizer.get_vocab(), tokenizer.get_added_vocab()
    return all(stored.get(token, added.get(token)) == token_id for token, token_id in vocabulary.items())


def state_length(folder: Path, longest: int) -> None:
    """Lower the maximum text length in the sidecar files in `folder` to `longest` tokens, if they state more."""
    for name in (TOKENIZER_CONFIG, *TRANSFORMER_NAMES):
        path = folder / name
        if not path.is_file():  # the checkpoint has none, or is exported into its own folder
            continue
        key = "model_max_length" if name == TOKENIZER_CONFIG else "max_seq_length"
        content = read_json(path)
        stated = content.get(key)
        if (positive(stated) or longest + 1) > longest and (stated is not None or name == TOKENIZER_CONFIG):
            write_json(path, {**content, key: longest})


def obsolete_sidecar_files(source: Source, folder: Path, existing: Path) -> list[Path]:
    """Return sidecar files in `existing` left by a replaced model that `folder` does not replace.

    Empty if `existing` is the checkpoint itself.
    """
    if not existing.is_dir() or (source.is_local and existing.samefile(source.model_name)):
        return []
    before = Source(str(existing), None, trust_remote_code=False, local_only=True)
    names = dict.fromkeys((*SIDECAR_FILES, *all_files(), *module_files(before, weights=True)))
    return [existing / name for name in names if (existing / name).is_file() and not (folder / name).exists()]


def _modules_of_route(source: Source) -> Json:
    """Return modules.json for the exported route: only its modules, with the transformer at the top."""
    return [
        {
            "idx": index,
            "name": str(index),
            "path": "" if module.kind in TRANSFORMERS else module.folder,
            "type": module.kind if "." in module.kind else f"sentence_transformers.models.{module.kind}",
        }
        for index, module in enumerate(source.sentence_modules.modules)
    ]


def _tokenizer_files(source: Source, tokenizer: Any) -> tuple[str, ...]:
    """Return the files the loaded tokenizer is read from, plus those of the class that the checkpoint names."""
    if tokenizer is None:
        return ()
    return (*files_of(tokenizer), *own_files(source, str(source.read_object("config.json").get("model_type"))))


def module_files(source: Source, *, weights: bool = False) -> tuple[str, ...]:
    """Return the configurations of modules in their own folders, e.g. `1_Pooling`, optionally with their weights.

    A module that encodes queries without a model always includes its weights: `infer` needs its table.

    Raises:
        CheckpointError: modules.json is malformed, or names a path outside the checkpoint.
    """
    modules = source.sentence_modules
    folders = [module for module in modules.modules if module.folder and module.kind not in TRANSFORMERS]
    names = ("config.json", MODULE_WEIGHTS) if weights else ("config.json",)
    lookup = () if modules.query is None else ("config.json", MODULE_WEIGHTS, TOKENIZER_CONFIG)
    return (
        *(module.file(name) for module in folders for name in names),
        *(modules.query.file(name) for name in lookup if modules.query is not None),
        *(() if modules.query is None else table_files(modules.query)),
    )


def query_weights(folder: Path) -> NDArray[np.float32]:
    """Return the weight of each query token, float32 by id, from the sidecar files of an inference-free encoder.

    Raises:
        OnnxtoolError: the table cannot be read.
    """
    stored = CheckpointFolder(folder).sentence_modules.query
    if stored is None:
        raise ValueError(f"{folder} encodes queries by its model")
    return SparseStaticEmbedding.read(stored).weights


def _is_same_file(first: Path, second: Path) -> bool:
    return second.exists() and first.samefile(second)


def is_wordpiece(tokenizer: Any) -> bool:
    """Return whether the tokenizer is BERT's, whose vocabulary is a list of words and word pieces."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return backend is not None and type(backend.model).__name__ == "WordPiece"


def wordpiece_vocabulary(tokenizer: Any, size: int = 0) -> str:
    """Return the content of vocab.txt: one token per line, in id order, with at least `size` lines.

    Ids without a token, which many models have, get a line of their own, so that line numbers are ids.
    """
    tokens = {token_id: token for token, token_id in tokenizer.get_vocab().items()}
    size = max(size, max(tokens) + 1)
    return "".join(f"{tokens.get(token_id, f'[unused-{token_id}]')}\n" for token_id in range(size))


def read_object(path: Path) -> dict[str, Json]:
    """Return the JSON object in a file; empty if it contains something else.

    Raises:
        TargetError: it is not JSON, or cannot be read.
    """
    try:
        content = read_json(path)
    except OSError as error:
        raise TargetError(f"cannot read {path.name} of the checkpoint: {error.strerror}", "fetch it again") from None
    except ValueError as error:
        raise TargetError(f"{path.name} of the checkpoint is not JSON: {error}", "fetch the checkpoint again") from None
    return content if isinstance(content, dict) else {}


def write_json(path: Path, content: Any) -> None:
    """Write a JSON object or list."""
    path.unlink(missing_ok=True)  # never write through a link into the checkpoint
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_changed(path: Path, values: Mapping[str, Json]) -> None:
    """Set values in a JSON object, and write it only if that changes it."""
    content = read_object(path)
    if {**content, **values} != content:
        write_json(path, {**content, **values})
