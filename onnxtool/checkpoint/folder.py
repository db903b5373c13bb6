"""The folder with a model's tokenizer and configuration: where it is, and what its small files say."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from onnxtool.checkpoint.sentence_modules import ENCODER_NAME, Module, max_sequence_length, read_modules, read_settings
from onnxtool.errors import InputError, ModelFileError
from onnxtool.model_file import ModelFile
from onnxtool.model_file.metadata import FILES_KEY
from onnxtool.reports import Json

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

TOKENIZER_NAME = "tokenizer.json"
MODULE_WEIGHTS = "model.safetensors"

# What is fetched from the hub: everything that decides how a text is read and an output is understood.
_HUB_PATTERNS = (
    TOKENIZER_NAME,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "config.json",
    "modules.json",
    "sentence_*_config.json",
    ENCODER_NAME,
    "[0-9]*_*/config.json",
    # Small ones; those of the transformer may lie in a folder as well.
    "*_Dense/model.safetensors",
    "*_LayerNorm/model.safetensors",
)
# Written beside `optimize`'s outputs: they share the folder of the model they came from.
_OPTIMIZED_SUFFIX = "-optimized"


@dataclass(frozen=True)
class CheckpointFolder:
    """A folder that holds tokenizer.json and, where the checkpoint has them, its other small files."""

    path: Path

    def read(self, name: str) -> dict[str, Json]:
        """Return the JSON object in the file `name`, or an empty one where there is no such file.

        Raises:
            InputError: the file is not a JSON object.
        """
        content = self._load(name)
        if content is None:
            return {}
        if not isinstance(content, dict):
            raise self.malformed(name, "not a JSON object")
        return content

    @cached_property
    def modules(self) -> tuple[Module, ...]:
        """Modules of a sentence-transformers checkpoint, in order; empty for any other.

        Raises:
            InputError: modules.json is malformed.
        """
        return read_modules(self._load, self.malformed)

    @cached_property
    def max_sequence_length(self) -> tuple[int, str] | None:
        """How many tokens sentence-transformers cuts a text to, and the file that says so; None where none does."""
        return max_sequence_length(self._load, self.malformed)

    def module_config(self, kind: str) -> dict[str, Json] | None:
        """Return the configuration of the first module of type `kind`, or None where there is no such module."""
        module = next((module for module in self.modules if module.kind == kind), None)
        return None if module is None else self.settings(module)

    def settings(self, module: Module) -> dict[str, Json]:
        """Return the configuration of one of `modules`; empty where it has no file."""
        return read_settings(module, self._load, self.malformed)

    def module_weights(self, name: str) -> dict[str, NDArray[np.float32]]:
        """Return the tensors of the module in the folder `name`, from safetensors only: a pickle can run code.

        Raises:
            InputError: there is no such file, or it cannot be read.
        """
        import numpy as np
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        path = self.path / name / MODULE_WEIGHTS
        if not path.is_file():
            raise InputError(
                f"there is no {path}, and without it embeddings are others than the checkpoint's",
                "pass --model_name with the whole checkpoint; pytorch_model.bin is not read, it can run code",
            )
        try:
            return {key: tensor.astype(np.float32) for key, tensor in load_file(path).items()}
        except (SafetensorError, OSError, KeyError, TypeError) as error:  # the last two for dtypes that numpy lacks
            raise InputError(f"cannot read {path}: {error}", "fetch the checkpoint again") from error

    def _load(self, name: str) -> Json:
        try:
            content: Json = json.loads((self.path / name).read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise InputError(f"cannot read {self.path / name}: {error.strerror}", "check its permissions") from error
        except ValueError as error:
            raise self.malformed(name, f"not JSON: {error}") from None
        return content

    def malformed(self, name: str, reason: str) -> InputError:
        """Make the error for a file of the checkpoint that is not what it should be."""
        return InputError(f"{self.path / name} is malformed: {reason}", "export the model again, or pass --model_name")


def find_checkpoint_folder(model: ModelFile, model_name: str | None = None) -> CheckpointFolder:
    """Find the tokenizer and configuration of `model`.

    `model_name`, a folder or an id on the hub, decides where it is given. Else the folder that the model's metadata
    names, folders named after the model, and the model's own folder are tried.

    Raises:
        InputError: there is no tokenizer, or it cannot be fetched.
        ModelFileError: the model's metadata names a folder that is not beside it.
    """
    if model_name is not None:
        return _named_folder(model_name)
    tried = list(dict.fromkeys(_candidates(model)))
    for path in tried:
        if (path / TOKENIZER_NAME).is_file():
            return CheckpointFolder(path)
    raise InputError(
        f"no {TOKENIZER_NAME} for {model.path}; looked in {', '.join(str(path) for path in tried)}",
        "pass --model_name with the checkpoint's folder or its id on the hub",
    )


def _candidates(model: ModelFile) -> Iterator[Path]:
    beside = model.path.parent
    if stamped := model.metadata.get(FILES_KEY):
        yield beside / _plain_name(model, stamped)
    yield beside / model.path.stem
    yield beside / model.path.stem.removesuffix(_OPTIMIZED_SUFFIX)
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


def _named_folder(model_name: str) -> CheckpointFolder:
    folder = Path(model_name).expanduser()
    if not folder.is_dir():
        folder = _fetch(model_name)
    if not (folder / TOKENIZER_NAME).is_file():
        raise InputError(
            f"{model_name} has no {TOKENIZER_NAME}",
            "onnxtool reads the file that tokenizer.save_pretrained() of transformers writes; save it there",
        )
    return CheckpointFolder(folder)


def _fetch(model_name: str) -> Path:
    """Fetch the small files of a checkpoint from the hub, or take them from the local cache where it is offline."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model_name, allow_patterns=_HUB_PATTERNS))
    except (OSError, ValueError) as error:  # the roots of everything that huggingface_hub raises for its users
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"{model_name!r} is neither a folder here nor a checkpoint that can be fetched from the hub: {reason}",
            f"without a network, pass --model_name with a folder that holds {TOKENIZER_NAME}",
        ) from error
