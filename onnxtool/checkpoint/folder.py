"""The folder with a model's tokenizer and configuration: where it is, and what its small files say."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from onnxtool.checkpoint.files import CheckpointFiles
from onnxtool.checkpoint.hub_names import hub_id, is_path, require_cached_commit
from onnxtool.checkpoint.late_interaction import METADATA_NAME, as_multi_vector
from onnxtool.checkpoint.sentence_modules import ENCODER_NAME, SentenceModules
from onnxtool.errors import InputError, ModelFileError
from onnxtool.model_file import ModelFile
from onnxtool.model_file.metadata import FILES_KEY
from onnxtool.options import StrPath

TOKENIZER_NAME = "tokenizer.json"

# What is fetched from the hub: everything that decides how a text is read and an output is understood.
_LOGGER = logging.getLogger(__name__)
_HUB_PATTERNS = (
    TOKENIZER_NAME,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "modules.json",
    "sentence_*_config.json",
    ENCODER_NAME,
    METADATA_NAME,
    "[0-9]*_*/config.json",
    # Small ones; those of the transformer may lie in a folder as well.
    "*_Dense/model.safetensors",
    "*_LayerNorm/model.safetensors",
)
# Written beside `optimize`'s outputs: they share the folder of the model they came from.
_OPTIMIZED_SUFFIX = "-optimized"


@dataclass(frozen=True)
class CheckpointFolder(CheckpointFiles):
    """A folder that holds tokenizer.json and, where the checkpoint has them, its other small files."""

    path: Path

    @property
    def label(self) -> str:
        """Its path."""
        return str(self.path)

    @cached_property
    def sentence_modules(self) -> SentenceModules:
        """What sentence-transformers computes with the checkpoint.

        Raises:
            InputError: a file of it is malformed.
        """
        return as_multi_vector(SentenceModules.of(self), self)

    def locate(self, name: str) -> Path | None:
        """Return the path of a file in the folder; None where there is none."""
        path = self.path / name
        return path if path.is_file() else None

    def malformed(self, name: str, reason: str) -> InputError:
        """Make the error for a file of the checkpoint that is not what it should be."""
        return InputError(f"{self.path / name} is malformed: {reason}", "export the model again, or pass --model_name")

    def refuse(self, message: str, hint: str = "") -> InputError:
        """Make the error for a checkpoint that asks for what onnxtool does not compute."""
        return InputError(
            message, hint or "use sentence-transformers for this checkpoint, or pass --model_name with the right one"
        )


def find_checkpoint_folder(
    model: ModelFile, model_name: StrPath | None = None, *, needs: Sequence[str] = (TOKENIZER_NAME,)
) -> CheckpointFolder:
    """Find the tokenizer and configuration of `model`; of a model of pictures, its image processor.

    A folder has one of the files that it `needs`. `model_name`, a folder or an id on the hub, decides where it is
    given. Else the folder that the model's metadata names, folders named after the model, and the model's own folder
    are tried; for a symbolic link, then those beside its target.

    Raises:
        InputError: there is no tokenizer, or it cannot be fetched.
        ModelFileError: the model's metadata names a folder that is not beside it.
    """
    if model_name is not None:
        return _named_folder(os.fspath(model_name), needs)
    tried = list(dict.fromkeys(_candidates(model, model.path)))
    if model.path.is_symlink():  # a model in a cache or a store has its files beside the target, or beside the link
        tried = list(dict.fromkeys((*tried, *_candidates(model, model.path.resolve()))))
    for path in tried:
        if any((path / name).is_file() for name in needs):
            return CheckpointFolder(path)
    raise InputError(
        f"no {' or '.join(needs)} for {model.path}; looked in {', '.join(str(path) for path in tried)}",
        "pass --model_name with the checkpoint's folder or its id on the hub",
    )


def _candidates(model: ModelFile, path: Path) -> Iterator[Path]:
    beside = path.parent
    if stamped := model.metadata.get(FILES_KEY):
        yield beside / _plain_name(model, stamped)
    yield beside / path.stem
    yield beside / path.stem.removesuffix(_OPTIMIZED_SUFFIX)
    # The layouts of the hub: everything in one folder, or the graph in a folder `onnx` inside it.
    yield beside
    if beside.name == "onnx":
        yield beside.parent


def _plain_name(model: ModelFile, name: str) -> str:
    """Return `name` where it can only be a folder beside the model: metadata is untrusted."""
    if name in (".", "..") or any(character in name for character in "/\\:\0"):
        raise ModelFileError(
            f"the metadata {FILES_KEY} of {model.path} is {name!r}, which is not the name of a folder beside it",
            "do not trust this file, or pass --model_name",
        )
    return name


def _named_folder(model_name: str, needs: Sequence[str]) -> CheckpointFolder:
    folder = Path(model_name).expanduser()
    if not folder.is_dir():
        model_name, revision = hub_id(model_name)
        if is_path(model_name):
            raise InputError(f"no such folder: {model_name}", "check the path, or pass an id such as org/name")
        require_cached_commit(model_name, revision)
        folder = _fetch(model_name, revision)
    if not any((folder / name).is_file() for name in needs):
        raise InputError(
            f"{model_name} has no {' or '.join(needs)}",
            "onnxtool reads the file that save_pretrained() of transformers writes; save it there",
        )
    return CheckpointFolder(folder)


def _fetch(model_name: str, revision: str | None) -> Path:
    """Fetch the small files of a checkpoint from the hub, or take them from the local cache where it is offline."""
    from huggingface_hub import snapshot_download

    _LOGGER.info("fetching %s from the hub or its cache", model_name)
    try:
        return Path(snapshot_download(model_name, revision=revision, allow_patterns=_HUB_PATTERNS))
    except (OSError, ValueError) as error:  # the roots of everything that huggingface_hub raises for its users
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"{model_name!r} is neither a folder here nor a checkpoint that can be fetched from the hub: {reason}",
            f"without a network, pass --model_name with a folder that holds {TOKENIZER_NAME}",
        ) from error
