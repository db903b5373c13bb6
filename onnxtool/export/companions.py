"""The files that lie beside an exported graph: tokenizer, configuration, pooling.

They are the checkpoint's own, byte for byte; what a consumer needs and the checkpoint lacks is written anew.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnxtool.errors import CheckpointError
from onnxtool.export.source import Source, plain_name
from onnxtool.reports import Json

# What a consumer may need beside the graph. Only those that a checkpoint has are copied.
COMPANIONS = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tokenizer.model",
    "preprocessor_config.json",
    "processor_config.json",
    "generation_config.json",
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
)


@dataclass(frozen=True)
class Pooling:
    """How a sentence encoder turns hidden states into one vector.

    Attributes:
        mode: `mean` over real tokens, or `cls`, the first token.
        normalize: whether the vector is scaled to length 1.
    """

    mode: str = "mean"
    normalize: bool = False


def read_pooling(source: Source) -> Pooling:
    """Read the pooling of a sentence-transformers checkpoint.

    Raises:
        CheckpointError: it does not say how it pools, or pools or projects as no head does.
    """
    kinds = [str(entry.get("type", "")).rsplit(".", 1)[-1] for entry in _entries(source)]
    unknown = sorted(set(kinds) - {"Transformer", "Pooling", "Normalize"})
    configs = [
        config for path in module_folders(source) if isinstance(config := source.read_json(f"{path}/config.json"), dict)
    ]
    modes = [
        key for config in configs for key, value in config.items() if key.startswith("pooling_mode_") and value is True
    ]
    modes += [f"pooling_mode_{value}" for config in configs if isinstance(value := config.get("pooling_mode"), str)]
    names = {
        "pooling_mode_mean_tokens": "mean",
        "pooling_mode_mean": "mean",
        "pooling_mode_cls_token": "cls",
        "pooling_mode_cls": "cls",
    }
    if unknown or len(modes) > 1 or any(mode not in names for mode in modes):
        raise CheckpointError(
            f"{source.model_name} pools with {', '.join([*unknown, *modes])}, which the head embedding does not do",
            "pass --head none and pool after the model",
        )
    if "Pooling" not in kinds:
        raise CheckpointError(
            f"{source.model_name} does not say how it pools: it has no modules.json with a Pooling",
            "pass --head none and pool after the model; a hub model needs the network once for this file",
        )
    return Pooling(names[modes[0]] if modes else "mean", "Normalize" in kinds)


def check_splade(source: Source) -> None:
    """Refuse a sparse encoder that weighs its terms otherwise than SPLADE's log(1 + relu(max)).

    Raises:
        CheckpointError: its SpladePooling says so.
    """
    for path in module_folders(source):
        config = source.read_json(f"{path}/config.json")
        if not isinstance(config, dict):
            continue
        strategy, activation = config.get("pooling_strategy", "max"), config.get("activation_function", "relu")
        if (strategy, activation) != ("max", "relu"):
            raise CheckpointError(
                f"{source.model_name} weighs terms by {strategy} of {activation}, which the head splade does not do",
                "pass --head logits; onnxtool infer weighs them as the checkpoint says",
            )


def write_companions(source: Source, tokenizer: Any, folder: Path, existing: Path) -> None:
    """Write the companion files of `source` to `folder`, which is staged to become `existing`.

    A tokenizer.json, which the tokenizers library reads, and a vocab.txt for WordPiece are written where the
    checkpoint has none. A checkpoint that is exported beside itself (`existing` is its own folder) keeps its files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in (*COMPANIONS, *(f"{path}/config.json" for path in module_folders(source))):
        found = source.fetch(name)
        if found is not None and not _is_same_file(found, existing / name):
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(found, target)
    if source.fetch("tokenizer.json") is None and getattr(tokenizer, "backend_tokenizer", None) is not None:
        # A copy without the settings of the last call, which every consumer of the file would follow.
        backend = type(tokenizer.backend_tokenizer).from_str(tokenizer.backend_tokenizer.to_str())
        backend.no_truncation()
        backend.no_padding()
        backend.save(str(folder / "tokenizer.json"))
    if source.fetch("vocab.txt") is None and _is_wordpiece(tokenizer):
        vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
        (folder / "vocab.txt").write_text("".join(f"{token}\n" for token, _ in vocabulary), encoding="utf-8")


def obsolete_companions(source: Source, folder: Path, existing: Path) -> list[Path]:
    """Return the companions in `existing` that a replaced model left and that `folder` does not replace.

    None where `existing` is the checkpoint itself.
    """
    if not existing.is_dir() or (source.is_local and existing.samefile(source.model_name)):
        return []
    before = Source(str(existing), None, trust_remote_code=False, local_only=True)
    names = [*COMPANIONS, *(f"{path}/config.json" for path in module_folders(before))]
    return [existing / name for name in names if (existing / name).is_file() and not (folder / name).exists()]


def _entries(source: Source) -> Iterator[dict[str, Json]]:
    modules = source.read_json("modules.json")
    if isinstance(modules, list):
        yield from (module for module in modules if isinstance(module, dict))


def module_types(source: Source) -> tuple[str, ...]:
    """Return the types in sentence-transformers' modules.json; empty for other checkpoints."""
    return tuple(str(module.get("type", "")) for module in _entries(source))


def card_tags(source: Source) -> tuple[str, ...]:
    """Return the tags in the model card's front matter."""
    import yaml

    path = source.fetch("README.md")
    if path is None:
        return ()
    text = path.read_text(encoding="utf-8", errors="replace")
    if not text.startswith("---"):
        return ()
    try:
        card = yaml.safe_load(text.split("---", 2)[1])
    except yaml.YAMLError:
        return ()  # a card is prose for people; one that does not parse tells nothing about the weights
    tags = card.get("tags") if isinstance(card, dict) else None
    return tuple(str(tag) for tag in tags) if isinstance(tags, list) else ()


def module_folders(source: Source) -> tuple[str, ...]:
    """Return the folders that modules.json names, e.g. `1_Pooling`; empty for other checkpoints."""
    return tuple(
        plain_name(str(module["path"]))
        for module in _entries(source)
        if isinstance(module.get("path"), str) and module["path"]
    )


def _is_same_file(first: Path, second: Path) -> bool:
    return second.exists() and first.samefile(second)


def _is_wordpiece(tokenizer: Any) -> bool:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return backend is not None and type(backend.model).__name__ == "WordPiece"
