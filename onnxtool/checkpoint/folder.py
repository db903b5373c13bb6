"""The folder with a model's tokenizer and configuration: where it is, and what its small files say."""

from __future__ import annotations

import logging
import os
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from onnxtool.checkpoint.files import CheckpointFiles
from onnxtool.checkpoint.hub_names import hub_id, is_path, require_cached_commit
from onnxtool.checkpoint.late_interaction import METADATA_NAME, as_multi_vector
from onnxtool.checkpoint.sentence_modules import (
    ENCODER_NAME,
    MODULES_NAME,
    ROUTER_NAME,
    SentenceModules,
    transformer_folder,
)
from onnxtool.errors import InputError
from onnxtool.model_file import ModelFile
from onnxtool.model_file.metadata import FILES_KEY, ROUTE_KEY, TOKENIZER_KEY
from onnxtool.options import StrPath

TOKENIZER_NAME = "tokenizer.json"

# What is fetched from the hub: everything that decides how a text is read and an output is understood.
_LOGGER = logging.getLogger(__name__)
_HUB_PATTERNS = (
    TOKENIZER_NAME,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "config.json",
    "preprocessor_config.json",
    "processor_config.json",
    MODULES_NAME,
    ROUTER_NAME,
    "sentence_*_config.json",
    ENCODER_NAME,
    METADATA_NAME,
    # Folders of modules. The transformer may lie in one as well, and then the tokenizer does; its weights are large.
    "*_*/config.json",
    f"*_*/{ROUTER_NAME}",
    "*Transformer/*.json",
    "*Transformer/*.jinja",
    "*StaticEmbedding/*.json",
    "*_Dense/model.safetensors",
    "*_LayerNorm/model.safetensors",
    "*_SparseStaticEmbedding/model.safetensors",
)
# What describes the checkpoint as a whole.
AT_THE_TOP = (MODULES_NAME, ROUTER_NAME, ENCODER_NAME, METADATA_NAME, "README.md")
# Written beside `optimize`'s outputs: they share the folder of the model they came from.
_OPTIMIZED_SUFFIX = "-optimized"


class ModuleFiles(CheckpointFiles):
    """A checkpoint whose transformer may lie in the folder of a module, or in that of a Router's route.

    Attributes:
        route: the one of a Router that is meant; None for a checkpoint without routes.
    """

    route: str | None

    @abstractmethod
    def file_at(self, name: str) -> Path | None:
        """Return the path of the file at `name` exactly, relative to the checkpoint; None where there is none."""

    def locate(self, name: str) -> Path | None:
        """Return the path of a file of the checkpoint; None where it has none.

        A file of the transformer, such as config.json, is looked for in the transformer's folder first.
        """
        if "/" not in name and name not in AT_THE_TOP and self.transformer_folder:
            found = self.file_at(f"{self.transformer_folder}/{name}")
            if found is not None:
                return found
        return self.file_at(name)

    @cached_property
    def transformer_folder(self) -> str:
        """The folder of the checkpoint with the model of transformers; empty for its top, where most have it."""
        return transformer_folder(self, self.route)

    @cached_property
    def sentence_modules(self) -> SentenceModules:
        """What sentence-transformers computes with the checkpoint.

        Raises:
            OnnxtoolError: a file of it is malformed, or modules.json names a path outside the checkpoint.
        """
        return as_multi_vector(SentenceModules.of(self, self.route), self)


@dataclass(frozen=True)
class CheckpointFolder(ModuleFiles):
    """A folder that holds tokenizer.json and, where the checkpoint has them, its other small files.

    Attributes:
        path: where it is.
        tokenizer_sha256: of a tokenizer.json that reads texts as transformers does, by the stamp of the model; empty
            where there is none.
        described: what a user says in place of its modules.json; None for nothing.
    """

    path: Path
    route: str | None = None
    tokenizer_sha256: str = ""
    described: SentenceModules | None = field(default=None, repr=False)

    @cached_property
    def sentence_modules(self) -> SentenceModules:
        """What sentence-transformers computes with the checkpoint, or what a user says of it."""
        return super().sentence_modules if self.described is None else self.described

    @property
    def label(self) -> str:
        """Its path."""
        return str(self.path)

    def file_at(self, name: str) -> Path | None:
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
        return replace(
            _named_folder(model, os.fspath(model_name), needs), tokenizer_sha256=model.metadata.get(TOKENIZER_KEY, "")
        )
    tried = list(dict.fromkeys(_candidates(model, model.path)))
    if model.path.is_symlink():  # a model in a cache or a store has its files beside the target, or beside the link
        tried = list(dict.fromkeys((*tried, *_candidates(model, model.path.resolve()))))
    for path in tried:
        folder = CheckpointFolder(path, tokenizer_sha256=model.metadata.get(TOKENIZER_KEY, ""))
        if any(folder.locate(name) for name in needs):
            return folder
    raise InputError(
        f"no {' or '.join(needs)} for {model.path}; looked in {', '.join(str(path) for path in tried)}",
        "pass --model_name with the checkpoint's folder or its id on the hub",
    )


def _candidates(model: ModelFile, path: Path) -> Iterator[Path]:
    beside = path.parent
    if stamped := model.plain_name(FILES_KEY, "folder"):
        yield beside / stamped
    yield beside / path.stem
    yield beside / path.stem.removesuffix(_OPTIMIZED_SUFFIX)
    # The layouts of the hub: everything in one folder, or the graph in a folder `onnx` inside it.
    yield beside
    if beside.name == "onnx":
        yield beside.parent


def _named_folder(model: ModelFile, model_name: str, needs: Sequence[str]) -> CheckpointFolder:
    folder = Path(model_name).expanduser()
    if not folder.is_dir():
        model_name, revision = hub_id(model_name)
        if is_path(model_name):
            raise InputError(f"no such folder: {model_name}", "check the path, or pass an id such as org/name")
        require_cached_commit(model_name, revision)
        folder = _fetch(model_name, revision)
    checkpoint = CheckpointFolder(folder)
    if routes := checkpoint.sentence_modules.routes:
        route = model.metadata.get(ROUTE_KEY)
        if route is None:
            raise InputError(
                f"{model_name} has the routes {', '.join(routes)} (Router), and {model.path} does not say whose it is",
                "pass --model_name with the folder of one route's transformer; an export by onnxtool says its route",
            )
        checkpoint = CheckpointFolder(folder, route)
    if not any(checkpoint.locate(name) for name in needs):
        place = Path(model_name) / checkpoint.transformer_folder if checkpoint.transformer_folder else model_name
        raise InputError(
            f"{place} has no {' or '.join(needs)}",
            "onnxtool reads the file that save_pretrained() of transformers writes; save it there",
        )
    return checkpoint


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
