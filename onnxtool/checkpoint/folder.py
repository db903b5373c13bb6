"""Locate and read the folder with a model's tokenizer and configuration."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import warnings
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from onnxtool.checkpoint.files import CheckpointFiles
from onnxtool.checkpoint.late_interaction import METADATA_NAME, as_multi_vector
from onnxtool.checkpoint.sentence_modules import (
    ENCODER_NAME,
    MODULES_NAME,
    ROUTER_NAME,
    STATIC,
    SentenceModules,
    transformer_folder,
)
from onnxtool.errors import CheckpointError, InputError, first_line
from onnxtool.model_file import ModelFile
from onnxtool.model_file.metadata import FILES_KEY, PADDING_KEY, ROUTE_KEY, TOKENIZER_KEY, VOCABULARY_KEY
from onnxtool.options import StrPath
from onnxtool.reading import note_input, read_bytes, require_inside
from onnxtool.reports import short_repr

_URL = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(?P<rest>.*)", re.IGNORECASE)
_PAGE = re.compile(r"(?P<id>[^/]+/[^/]+)(?:/(?:tree|blob|resolve|commit)/(?P<revision>[^/]+)(?:/.*)?)?/?")
# On Windows, paths contain a drive or a backslash, and ids never do.
_WINDOWS_PATH = re.compile(r"[A-Za-z]:[\\/]|.*\\")


@dataclass(frozen=True)
class Snapshot:
    """The origin of a folder in the hub's cache: `models--ORG--NAME/snapshots/COMMIT`.

    Attributes:
        model_id: the hub id.
        commit: the commit of the repository.
    """

    model_id: str
    commit: str

    @classmethod
    def of(cls, folder: Path) -> Snapshot | None:
        """Parse an absolute path; None for a folder that is not a snapshot."""
        repository, *names = folder.parent.parent.name.split("--")
        if folder.parent.name != "snapshots" or repository != "models" or not all(names) or not 1 <= len(names) <= 2:
            return None
        return cls("/".join(names), folder.name)


def path_parts(model_name: str) -> tuple[str, ...]:
    """Return the parts of an id or folder path; the last is the name. A snapshot yields the parts of its id."""
    if not Path(model_name).is_dir():
        return tuple(model_name.split("/"))
    path = Path(os.path.abspath(model_name))  # noqa: PTH100  resolve() would follow links to other names
    snapshot = Snapshot.of(path)
    return path.parts if snapshot is None else tuple(snapshot.model_id.split("/"))


def hub_id(model_name: str, revision: str | None = None) -> tuple[str, str | None]:
    """Return the id and revision in the URL of a hub page; other names are returned unchanged.

    Raises:
        CheckpointError: the URL does not lead to a model, or its revision differs from `revision`.
    """
    url = _URL.fullmatch(model_name.strip())
    if url is None:
        if "://" in model_name:
            raise CheckpointError(
                f"{model_name} is not a model's address on huggingface.co", "pass a folder, or an id such as org/name"
            )
        return model_name, revision
    page = _PAGE.fullmatch(re.split("[?#]", url["rest"])[0])
    if page is None or page["id"].split("/")[0] in ("datasets", "spaces", "docs", "papers"):
        raise CheckpointError(f"{model_name} is not the page of a model", "pass an id such as org/name")
    if revision is not None and page["revision"] not in (None, revision):
        raise CheckpointError(
            f"{model_name} names the revision {page['revision']}, and --revision is {revision}", "pass one of them"
        )
    return page["id"], revision or page["revision"]


def require_cached_commit(name: str, revision: str | None) -> None:
    """Refuse a hub cache whose commit reference is not a regular file: huggingface_hub would block on a pipe.

    Raises:
        CheckpointError: there is a pipe, a socket, a device or a folder.
    """
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE, "--".join(("models", *name.split("/"))), "refs")
    path = folder / (revision or constants.DEFAULT_REVISION)
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path} is not a regular file", "the hub's cache is damaged: remove it, and fetch again")


@contextmanager
def quiet_hub() -> Iterator[None]:
    """Hide huggingface_hub's progress bars, which would collide with onnxtool's, and its deprecation warnings."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    had_bars = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            yield
    finally:
        if had_bars:
            enable_progress_bars()


def is_path(model_name: str) -> bool:
    """Whether a name can only be a path, because no id has that form."""
    return (
        model_name.startswith(("/", "./", "../", "~", "."))
        or model_name.count("/") > 1
        or model_name.endswith("/")
        or _WINDOWS_PATH.match(model_name) is not None
    )


TOKENIZER_NAME = "tokenizer.json"
COPY_LINKED = "if you trust it, replace the link by a copy of the file"

# Files fetched from the hub: everything that determines how texts are read and outputs interpreted.
_LOGGER = logging.getLogger(__name__)
SMALL_FILES = (
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
    # Module folders. One may hold the transformer and its tokenizer; the transformer's weights are large.
    "*_*/config.json",
    f"*_*/{ROUTER_NAME}",
    "*Transformer/*.json",
    "*Transformer/*.jinja",
    "*StaticEmbedding/*.json",
    "*_Dense/model.safetensors",
    "*_LayerNorm/model.safetensors",
    "*_SparseStaticEmbedding/model.safetensors",
)
# Files that describe the checkpoint as a whole.
AT_THE_TOP = (MODULES_NAME, ROUTER_NAME, ENCODER_NAME, METADATA_NAME, "README.md")
# Suffixes of `optimize` outputs, which share the folder of their source model.
_OPTIMIZED = re.compile(r"-(optimized|fp16|int8|int4)$")


def _read_modules(files: CheckpointFiles, route: str | None = None) -> SentenceModules:
    modules = SentenceModules.of(files, route)
    return as_multi_vector(modules, files) if modules.describes_late_interaction(files) else modules


class ModuleFiles(CheckpointFiles):
    """A checkpoint whose transformer may lie in a module's folder, or in the folder of a Router's route.

    Attributes:
        route: the selected route of a Router; None for a checkpoint without routes.
    """

    route: str | None

    @abstractmethod
    def file_at(self, name: str) -> Path | None:
        """Return the path of the file at exactly `name`, relative to the checkpoint; None if it does not exist."""

    def locate(self, name: str) -> Path | None:
        """Return the path of a file of the checkpoint; None if it does not exist.

        Files of the transformer, such as config.json, are looked up in the transformer's folder first.

        Raises:
            OnnxtoolError: it is a link out of the checkpoint's folder.
        """
        if "/" not in name and name not in AT_THE_TOP and self.transformer_folder:
            path = self.file_at(f"{self.transformer_folder}/{name}")
            if path is not None:
                return path
        return self.file_at(name)

    def inside(self, path: Path, folder: Path) -> Path:
        """Return the path of a file in the checkpoint's folder.

        Raises:
            OnnxtoolError: it is a link out of there.
        """
        try:
            require_inside(path, folder)
        except OSError as error:
            raise self.refuse(f"cannot read {path}: {error.strerror}", COPY_LINKED) from None
        return path

    @cached_property
    def transformer_folder(self) -> str:
        """The checkpoint's folder with the transformers model; empty for the top level, the usual case."""
        return transformer_folder(self, self.route)

    @cached_property
    def sentence_modules(self) -> SentenceModules:
        """The checkpoint's sentence-transformers modules.

        Raises:
            OnnxtoolError: a file is malformed, or modules.json names a path outside the checkpoint.
        """
        return _read_modules(self, self.route)


@dataclass(frozen=True)
class CheckpointFolder(ModuleFiles):
    """A folder that holds tokenizer.json and, if present in the checkpoint, its other small files.

    Attributes:
        path: the folder.
        tokenizer_sha256: hash, from the model's stamp, of a tokenizer.json that reads texts as transformers does; empty
            if there is none.
        padding: the side on which texts are padded, from the model's stamp; empty for the tokenizer's own.
        described: modules described by the user instead of modules.json; None for no description.
        embedded: the tokenizer.json in a graph that reads texts, which replaces that in the folder; empty for none.
    """

    path: Path
    route: str | None = None
    tokenizer_sha256: str = ""
    padding: str = ""
    described: SentenceModules | None = field(default=None, repr=False)
    embedded: str = field(default="", repr=False)

    @property
    def has_settled_tokenizer(self) -> bool:
        """Whether its tokenizer.json reads texts as transformers does, by its stamp or because nothing else does."""
        path = self.locate(TOKENIZER_NAME)
        if path is None or self.embedded or self.sentence_modules.kinds[:1] == (STATIC,):
            return True  # static embeddings: sentence-transformers reads it as it is
        return hashlib.sha256(read_bytes(path)).hexdigest() == self.tokenizer_sha256

    @cached_property
    def sentence_modules(self) -> SentenceModules:
        """The checkpoint's sentence-transformers modules, or the user's description of them."""
        return super().sentence_modules if self.described is None else self.described

    @property
    def label(self) -> str:
        """Its path."""
        return str(self.path)

    def file_at(self, name: str) -> Path | None:
        """Return the path of a file in the folder; None if it does not exist."""
        path = self.path / name
        note_input(path)
        return self.inside(path, self.path) if path.is_file() else None

    def malformed(self, name: str, reason: str) -> InputError:
        """Make the error for a malformed file of the checkpoint."""
        return InputError(f"{self.path / name} is malformed: {reason}", "export the model again, or pass --model_name")

    def refuse(self, message: str, hint: str = "") -> InputError:
        """Make the error for a checkpoint with unsupported features."""
        return InputError(
            message, hint or "use sentence-transformers for this checkpoint, or pass --model_name with the right one"
        )


def find_checkpoint_folder(
    model: ModelFile, model_name: StrPath | None = None, *, needs: Sequence[str] = (TOKENIZER_NAME,)
) -> CheckpointFolder:
    """Find the tokenizer and configuration of `model`, or the image processor of an image model.

    A folder must contain one of the files in `needs`. If `model_name`, a folder or hub id, is given, it decides.
    Otherwise the folder named in the model's metadata, folders named after the model, and the model's own folder are
    tried; for a symbolic link, then those next to its target.

    Raises:
        InputError: there is no tokenizer, or it cannot be fetched.
        ModelFileError: the model's metadata names a folder that is not next to it.
    """
    sha256, padding = (model.metadata.get(key, "") for key in (TOKENIZER_KEY, PADDING_KEY))
    embedded = model.embedded_tokenizer or ""
    if model_name is not None:
        named = _named_folder(model, os.fspath(model_name), needs)
        if not _is_own(named, model):
            raise InputError(
                f"the vocabulary of {model.path} was cut, and {TOKENIZER_NAME} in {model_name} is not the one that was "
                "written with it: its ids stand for other tokens",
                "leave --model_name out, or pass the folder that onnxtool optimize --vocabulary wrote",
            )
        return replace(named, tokenizer_sha256=sha256, padding=padding, embedded=embedded)
    folders = list(dict.fromkeys(_candidates(model, model.path)))
    if model.path.is_symlink():  # a model in a cache or store has its files next to the target, or next to the link
        folders = list(dict.fromkeys((*folders, *_candidates(model, model.path.resolve()))))
    for path in folders:
        folder = CheckpointFolder(path, tokenizer_sha256=sha256, padding=padding, embedded=embedded)
        if any(folder.locate(name) for name in needs) and _is_own(folder, model):
            return folder
    if embedded:
        return CheckpointFolder(model.path.with_suffix(""), padding=padding, embedded=embedded)
    missing = " that was written with its vocabulary" if VOCABULARY_KEY in model.metadata else ""
    raise InputError(
        f"no {' or '.join(needs)}{missing} for {model.path}; looked in {', '.join(str(path) for path in folders)}",
        "pass --model_name with the checkpoint's folder or its id on the hub",
    )


def _is_own(folder: CheckpointFolder, model: ModelFile) -> bool:
    """Return whether a folder has the tokenizer of a file whose vocabulary was cut; true for other files."""
    digest, path = model.metadata.get(VOCABULARY_KEY), folder.locate(TOKENIZER_NAME)
    return digest is None or (path is not None and hashlib.sha256(read_bytes(path)).hexdigest() == digest)


def _candidates(model: ModelFile, path: Path) -> Iterator[Path]:
    folder = path.parent
    if stamped := model.plain_name(FILES_KEY, "folder"):
        yield folder / stamped
    yield folder / path.stem
    yield folder / _OPTIMIZED.sub("", path.stem)
    # The hub's layouts: everything in one folder, or the graph in a subfolder `onnx`.
    yield folder
    if folder.name == "onnx":
        yield folder.parent


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
                f"{model_name} has the routes {', '.join(routes)} (Router), and {model.path} does not name its route",
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
    """Fetch the small files of a checkpoint from the hub, or from the local cache when offline."""
    from huggingface_hub import snapshot_download

    _LOGGER.info("fetching %s from the hub or its cache", model_name)
    try:
        with quiet_hub():
            return Path(snapshot_download(model_name, revision=revision, allow_patterns=SMALL_FILES))
    except (OSError, ValueError) as error:  # base classes of all of huggingface_hub's user-facing errors
        reason = first_line(error)
        raise InputError(
            f"{model_name!r} is neither a folder here nor a checkpoint that can be fetched from the hub: {reason}",
            f"without a network, pass --model_name with a folder that holds {TOKENIZER_NAME}",
        ) from error


# Looks like a name; a literal prompt has at least a space or a colon.
_NAME = re.compile(r"[\w.-]+")


@short_repr
@dataclass(frozen=True)
class Prompts:
    """Prompts to put before texts.

    Attributes:
        by_name: the texts, such as `query: `, by name.
        default: the name of the default prompt; None for no prompt.
    """

    by_name: Mapping[str, str]
    default: str | None = None

    @classmethod
    def of(cls, folder: CheckpointFiles) -> Prompts:
        """Read prompts from config_sentence_transformers.json, or from an older late-interaction encoder's files.

        Raises:
            InputError: the file is malformed, or its default is not one of its prompts.
        """
        config = _read_modules(folder).encoder
        stated = config.get("prompts") or {}
        if not isinstance(stated, dict) or not all(isinstance(text, str | None) for text in stated.values()):
            raise folder.malformed(ENCODER_NAME, f"its prompts do not map names to texts: {stated}")
        by_name = {name: str(text or "") for name, text in stated.items()}
        default = config.get("default_prompt_name")
        if default is not None and (not isinstance(default, str) or default not in by_name):
            raise folder.malformed(ENCODER_NAME, f"its default prompt {default!r} is none of {', '.join(by_name)}")
        return cls(by_name, default)

    def text_of(self, prompt: str | None, task: str | None = None) -> str:
        """Return the text of a prompt.

        Args:
            prompt: a name, or the text itself; empty for none; None for the task's prompt, or the checkpoint's default
                without a task.
            task: `query` or `document`, as for encode_query and encode_document of sentence-transformers. It uses the
                prompt of that name or none: version 6.2 falls back neither to the default nor to one called `passage`.

        Raises:
            InputError: it looks like a name, and the checkpoint has no such prompt.
        """
        if prompt is None and task is not None:
            return self.by_name.get(task, "")
        if prompt is None:
            return "" if self.default is None else self.by_name[self.default]
        if prompt in self.by_name or not _NAME.fullmatch(prompt):
            return self.by_name.get(prompt, prompt)
        known = ", ".join(f"{name} ({text!r})" for name, text in self.by_name.items())
        raise InputError(
            f"the checkpoint has no prompt called {prompt!r}; " + (f"it has {known}" if known else "it has none"),
            f"to write it before each text as it is, end it with a space: '{prompt} '",
        )
