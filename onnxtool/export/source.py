"""The location of a checkpoint, a folder or a hub id, and its files, including the tokenizer's.

Everything is read through transformers, so that its cache, mirrors and authentication apply. The files of a tokenizer
are listed by its class in `vocab_files_names`, use to name; tested with transformers 5.23.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import socket
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from onnxtool.checkpoint.files import ADAPTER_NAME, M3_FILES
from onnxtool.checkpoint.folder import (
    AT_THE_TOP,
    COPY_LINKED,
    ModuleFiles,
    Snapshot,
    hub_id,
    is_path,
    path_parts,
    require_cached_commit,
)
from onnxtool.checkpoint.module_settings import require_no_routes
from onnxtool.checkpoint.sentence_modules import TRANSFORMERS, stays_inside
from onnxtool.errors import CheckpointError, first_line
from onnxtool.export.pickles import load_pickle
from onnxtool.model_file.metadata import License
from onnxtool.progress import Stage, listener
from onnxtool.reading import read_text, require_small_settings
from onnxtool.reports import Json
from onnxtool.version import DISTRIBUTION

_LARGE = (".safetensors", ".bin")  # suffixes of weight files


@dataclass(frozen=True)
class Source(ModuleFiles):
    """The location of a checkpoint. Each file is looked up once, because each look-up on the hub is a request.

    Attributes:
        model_name: a folder or a hub id.
        revision: branch, tag or commit on the hub; None for its default branch.
        trust_remote_code: whether code in the checkpoint may run.
        local_only: read hub files from the cache because the hub is unreachable.
        route: the exported route of a Router; None for a checkpoint without routes.
        allow_pickle: whether weights may come from a pickle if there are no others.
    """

    model_name: str
    revision: str | None
    trust_remote_code: bool
    local_only: bool
    route: str | None = None
    allow_pickle: bool = False

    @classmethod
    def find(
        cls,
        model_name: str,
        *,
        revision: str | None = None,
        trust_remote_code: bool = False,
        route: str | None = None,
        allow_pickle: bool = False,
    ) -> Source:
        """Find the checkpoint.

        Raises:
            CheckpointError: `model_name` is a path at which there is nothing, or PyTorch is not installed.
        """
        for package in ("torch", "transformers"):
            if not _is_installed(package):
                raise CheckpointError(
                    f"checkpoints are read with {package}, which is not installed",
                    f"pip install '{DISTRIBUTION}[export]'",
                )
        path = Path(model_name)
        if not path.exists():
            model_name, revision = hub_id(model_name, revision)
        if path.is_dir():
            if revision is not None:
                raise CheckpointError(
                    f"--revision {revision} means nothing for the folder {model_name}",
                    "leave it out, or pass the id of a model on the hub",
                )
            return cls(model_name, None, trust_remote_code, local_only=True, route=route, allow_pickle=allow_pickle)
        if path.exists():
            if path.suffix == ".onnx":
                raise CheckpointError(
                    f"{model_name} is an ONNX file, which is already exported",
                    f"continue with onnxtool optimize --model_path {model_name}",
                )
            raise CheckpointError(f"{model_name} is a file", "pass the folder that it is in")
        if is_path(model_name):
            raise CheckpointError(f"no such folder: {model_name}", "check the path, or pass an id such as org/name")
        require_cached_commit(model_name, revision)
        offline = not _hub_resolves()
        return cls(model_name, revision, trust_remote_code, local_only=offline, route=route, allow_pickle=allow_pickle)

    def require_transformer(self) -> None:
        """Refuse a checkpoint that is not a transformers model, or has it elsewhere.

        Raises:
            CheckpointError: there is no config.json with a model_type; modules.json may say what there is instead.
        """
        modules = self.sentence_modules.modules
        if modules and modules[0].kind not in TRANSFORMERS:
            require_no_routes(self.sentence_modules, self)
        if self.trust_remote_code or "model_type" in self.read_object("config.json"):
            return
        if modules and modules[0].kind not in TRANSFORMERS:
            kinds = ", ".join(module.kind for module in modules)
            raise CheckpointError(
                f"{self.model_name} consists of {kinds}, which onnxtool does not compute (its modules.json)",
                "use sentence-transformers for this checkpoint",
            )
        if self.is_local and self.locate("config.json") is None:
            folder = Path(self.model_name) / self.transformer_folder
            raise CheckpointError(
                f"the folder {folder} has no config.json",
                "pass the folder that save_pretrained wrote: config.json, tokenizer files, model.safetensors",
            )

    @property
    def is_local(self) -> bool:
        """Whether the checkpoint is a folder on this machine."""
        return Path(self.model_name).is_dir()

    @property
    def name(self) -> str:
        """The last part of the id or folder, used to name the output; for a snapshot, the last part of its id."""
        return path_parts(self.model_name)[-1]

    @cached_property
    def snapshot(self) -> Snapshot | None:
        """The snapshot that a folder of the hub's cache holds, also through a link; None for other folders."""
        return Snapshot.of(Path(self.model_name).resolve()) if self.is_local else None

    @property
    def origin(self) -> str:
        """The model's name elsewhere: its hub id, or the name of its folder without the path."""
        if not self.is_local:
            return self.model_name
        return self.name if self.snapshot is None else self.snapshot.model_id

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments for every from_pretrained call in transformers.

        Raises:
            OSError: a file that it would read in the folder is too large, or not a regular file.
        """
        if self.is_local:
            require_small_settings(Path(self.model_name, self.transformer_folder), Path(self.model_name))
        arguments = {
            "revision": self.revision or "main",
            "trust_remote_code": self.trust_remote_code,
            "local_files_only": self.local_only,
        }
        return {**arguments, "subfolder": self.transformer_folder} if self.transformer_folder else arguments

    @cached_property
    def adapter(self) -> dict[str, Json]:
        """The settings of a PEFT adapter with or without a transformer; empty if there is none."""
        return self.read_object(ADAPTER_NAME)

    @cached_property
    def base(self) -> Source | None:
        """The checkpoint that this one's adapter is for; None if the model is included, or none is needed.

        Raises:
            CheckpointError: the adapter does not name it, or it cannot be found.
        """
        folder = f"{self.transformer_folder}/" if self.transformer_folder else ""
        if not self.adapter or any(self.file_at(name) for name in (f"{folder}config.json", "config.json")):
            return None
        name, revision = self.adapter.get("base_model_name_or_path"), self.adapter.get("revision")
        if not isinstance(name, str) or not name:
            raise CheckpointError(
                f"{self.model_name} is a PEFT adapter that does not name the model it is for",
                f'write "base_model_name_or_path": "org/name" into its {ADAPTER_NAME}',
            )
        try:
            base = Source.find(
                name,
                revision=revision if isinstance(revision, str) and revision else None,
                trust_remote_code=self.trust_remote_code,
                allow_pickle=self.allow_pickle,
            )
        except CheckpointError as error:
            raise CheckpointError(
                f"{self.model_name} is a PEFT adapter for {name}, which cannot be found: {error.message}",
                f"write where the model is into base_model_name_or_path of its {ADAPTER_NAME}",
            ) from error
        if base.adapter:
            raise CheckpointError(
                f"{self.model_name} is a PEFT adapter for {name}, which is an adapter itself",
                "merge that one first: merge_and_unload(), then save_pretrained(...)",
            )
        return base

    @property
    def weights(self) -> Source:
        """The location of config.json and the transformer's weights: here, or in an adapter's base."""
        return self.base or self

    @property
    def tokenizer(self) -> Source:
        """The location of the tokenizer: here, or in the base of an adapter that was saved without one."""
        return self if self.base is None or super().locate("tokenizer_config.json") is not None else self.base

    @property
    def label(self) -> str:
        """The folder or id as written by the user."""
        return self.model_name

    @property
    def is_static(self) -> bool:
        """Whether the checkpoint begins with a table instead of a transformer."""
        return self.sentence_modules.is_static

    @property
    def is_m3(self) -> bool:
        """Whether the checkpoint has the layers of M3."""
        return all(self.locate(name) is not None for name in M3_FILES)

    @cached_property
    def card(self) -> dict[str, Any]:
        """The front matter of the model card; empty if there is none, or it cannot be read."""
        import yaml
        from huggingface_hub.repocard import REGEX_YAML_BLOCK

        path = self.locate("README.md")
        try:
            text = "" if path is None else read_text(path, errors="replace").removeprefix("\ufeff")
            front_matter = REGEX_YAML_BLOCK.search(text)
            card = None if front_matter is None else yaml.safe_load(front_matter[2])
        except (yaml.YAMLError, OSError, ValueError, RecursionError):
            return {}  # a card is prose for people; one that cannot be parsed says nothing about the weights
        return card if isinstance(card, dict) else {}

    @property
    def card_tags(self) -> tuple[str, ...]:
        """The tags in the model card's front matter, plus the pipeline it names."""
        tags, pipeline = self.card.get("tags"), self.card.get("pipeline_tag")
        named = [*(tags if isinstance(tags, list) else ()), *([pipeline] if pipeline else ())]
        return tuple(str(tag) for tag in named)

    @property
    def license(self) -> License:
        """The license named in the model card, or else in config.json."""
        return License.of_checkpoint(self.card, self.read_object("config.json"))

    def locate(self, name: str) -> Path | None:
        """Return the path of a checkpoint file, from the folder or the hub's cache; None if there is none.

        A file of the transformer, such as config.json, is looked up in the transformer's folder first, and a file of an
        adapter in its base's folder last.
        """
        path = super().locate(name)
        if path is not None or "/" in name or name in (*AT_THE_TOP, ADAPTER_NAME) or self.base is None:
            return path
        return self.base.locate(name)

    def file_at(self, name: str) -> Path | None:
        """Return the path of a file in the folder or the hub's cache; None if there is none."""
        from transformers.utils import cached_file

        if name in self._located:
            return self._located[name]
        if name.endswith(_LARGE) and not self.is_local and not self.local_only:
            fetch(self.model_name, name, self.revision)
        try:
            cached = cached_file(
                self.model_name,
                name,
                revision=self.revision or "main",
                local_files_only=self.local_only,
                _raise_exceptions_for_missing_entries=False,
                # Offline, files missing from the cache count as absent; online, a failed request must not.
                _raise_exceptions_for_connection_errors=not self.local_only,
            )
        except (OSError, ValueError) as error:
            raise self.unreadable(error) from error
        path = None if cached is None else Path(cached)
        self._located[name] = self.inside(path, Path(self.model_name)) if path and self.is_local else path
        return self._located[name]

    @property
    def files_read(self) -> dict[str, Path]:
        """The files looked up and found so far, including a base's, by their names in the checkpoint."""
        base = {} if self.base is None else {f"base/{name}": path for name, path in self.base.files_read.items()}
        return {**base, **{name: path for name, path in self._located.items() if path is not None}}

    @cached_property
    def _located(self) -> dict[str, Path | None]:
        return {}

    def unpickle(self, path: Path) -> bytes:
        """Convert the tensors of a pickle to safetensors; nothing but tensors is unpickled."""
        import torch
        from safetensors.torch import save

        loaded = load_pickle(path, lambda reason: self.malformed(path.name, f"it {reason}"))
        if not all(isinstance(value, torch.Tensor) for value in loaded.values()):
            raise ValueError("it holds more than tensors")
        if any(value.nbytes > path.stat().st_size for value in loaded.values()):  # a view, with a step of 0
            raise ValueError("it names more numbers than it holds")
        return bytes(save({str(name): value.contiguous().clone() for name, value in loaded.items()}))

    def malformed(self, name: str, reason: str) -> CheckpointError:
        """Make the error for a malformed file in the checkpoint."""
        return CheckpointError(
            f"{name} of {self.model_name} is malformed: {reason}",
            "the checkpoint is damaged or malicious; fetch it again from where you trust it",
        )

    def refuse(self, message: str, hint: str = "") -> CheckpointError:
        """Make the error for a checkpoint that needs something onnxtool does not compute."""
        return CheckpointError(
            message, hint or "pass --head none, and pool after the model as sentence-transformers does"
        )

    def unreadable(self, error: Exception) -> CheckpointError:
        """Convert an error from transformers or the hub to a CheckpointError."""
        if not self.is_local and self.local_only and isinstance(error, OSError):
            return CheckpointError(
                f"cannot reach the hub for {self.model_name}: it is not a folder here, and not in the hub's cache",
                "check the path; without a network, pass the folder of a checkpoint",
            )
        if isinstance(error, OSError) and error.errno == errno.ELOOP:
            return CheckpointError(f"cannot read {error.filename}: {error.strerror}", COPY_LINKED)
        hint = (
            "the folder may be incomplete or damaged"
            if self.is_local
            else ("check the id and --revision; for a gated or private model, log in with `hf auth login`")
        )
        return CheckpointError(f"cannot load {self.model_name}: {reason(error)}", hint)


def reason(error: Exception) -> str:
    """Return the first line of an error message, with its type if the message alone says nothing, as in a KeyError."""
    kind = type(error).__name__
    text = first_line(error)
    if text == kind:
        return kind
    return f"{kind}: {text}" if isinstance(error, LookupError) or " " not in text else text


def plain_name(name: str) -> str:
    """Return a path inside the checkpoint; refuse one that leaves it."""
    if not stays_inside(name):
        raise CheckpointError(f"the checkpoint refers to {name!r}, outside its folder", "do not trust this checkpoint")
    return name


def _hub_resolves() -> bool:
    """Return whether the hub's host name resolves; if it does not, every file would be retried for half a minute."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    host = urlsplit(constants.ENDPOINT)
    try:
        socket.getaddrinfo(host.hostname, host.port or 443)
    except OSError:
        return bool(urllib.request.getproxies())  # a proxy resolves names for us
    return True


_MB = 1_000_000


def fetch(model_name: str, name: str, revision: str | None) -> None:
    """Fetch a checkpoint file into the hub's cache, unless it is there; failures are left to the later reader.

    transformers would also fetch it, with a progress bar that would interfere with the command line's.
    """
    from huggingface_hub import hf_hub_download

    with suppress(OSError, ValueError), open(os.devnull, "w", encoding="utf-8") as nowhere:  # noqa: PTH123  no path
        hf_hub_download(model_name, name, revision=revision or "main", tqdm_class=_bar(name, nowhere))


def _bar(name: str, nowhere: IO[str]) -> Any:
    """Return a class of invisible progress bars, the first of which reports its progress."""
    from huggingface_hub.utils import tqdm

    report = listener()  # for this thread; the hub may call from its own threads
    bars: list[Any] = []

    class Told(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **more: Any) -> None:
            bars.append(self)
            super().__init__(*args, **{**more, "file": nowhere, "disable": False})
            self._tell()

        def update(self, n: float | None = 1) -> bool | None:
            shown: bool | None = super().update(n)
            self._tell()
            return shown

        def _tell(self) -> None:
            if self is bars[0] and self.total and self.total >= _MB:
                report(Stage(f"downloading {name}, MB", int(self.n) // _MB, int(self.total) // _MB))

    return Told


# Files that transformers reads for any tokenizer class.
_ANY_CLASS = "tokenizer.json"
# From Marian's and BARTpho's classes, which transformers can only import with sentencepiece.
_SENTENCEPIECE_FILES = ("source.spm", "target.spm", "vocab.json", "target_vocab.json", "dict.txt")
# Class names for files that accompany a vocabulary and hold no tokens.
_NO_VOCABULARY = ("tokenizer_config_file", "merges_file", "normalizer_file", "emoji_file")
_PACKAGES = {"sentencepiece": "sentencepiece", "google.protobuf": "protobuf"}


def own_files(source: Source, model_type: str) -> tuple[str, ...]:
    """Return the files of the tokenizer class that the checkpoint names, or else of the one for its `model_type`."""
    return files_of(_own_class(source, model_type))


def all_files(*, vocabularies: bool = False) -> Iterator[str]:
    """Yield the files of all tokenizer classes that transformers can import here; names may repeat."""
    import transformers
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    yield _ANY_CLASS
    for name in dict.fromkeys(filter(None, TOKENIZER_MAPPING_NAMES.values())):
        yield from files_of(getattr(transformers, name, None), vocabularies=vocabularies)
    yield from _SENTENCEPIECE_FILES


def files_of(tokenizer: Any, *, vocabularies: bool = False) -> tuple[str, ...]:
    """Return the files that a tokenizer, or a tokenizer class, is read from; empty if it names none.

    Raises:
        CheckpointError: the checkpoint's own class names a path outside its folder.
    """
    names = _stated(tokenizer)
    return tuple(
        plain_name(name)
        for role, name in (names if isinstance(names, dict) else {}).items()
        if isinstance(name, str) and not (vocabularies and role in _NO_VOCABULARY)
    )


def has_vocabulary(source: Source, model_type: str) -> bool:
    """Return whether there is a vocabulary, or a character or byte tokenizer, which needs none (CANINE, ByT5)."""
    own = _own_class(source, model_type)
    if isinstance(own, type) and _stated(own) == {}:
        return True
    names = iter((_ANY_CLASS, *files_of(own, vocabularies=True)))
    return _any(source, names) or _any(source, all_files(vocabularies=True))


def missing_packages(source: Source, model_type: str) -> tuple[str, ...]:
    """Return the missing packages needed to read the tokenizer, by their PyPI names.

    If it cannot read a SentencePiece model, transformers names another package (tiktoken), or none.
    """
    missing = tuple(package for module, package in _PACKAGES.items() if not _is_installed(module))
    pieces = (name for name in (*own_files(source, model_type), *all_files()) if name.endswith((".model", ".spm")))
    needed = missing and source.locate(_ANY_CLASS) is None and _any(source, pieces)
    return missing if needed else ()


def _own_class(source: Source, model_type: str) -> Any:
    import transformers
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    named = source.read_object("tokenizer_config.json").get("tokenizer_class")
    return getattr(transformers, str(named or TOKENIZER_MAPPING_NAMES.get(model_type)), None)


def _stated(tokenizer: Any) -> Any:
    try:
        return getattr(tokenizer, "vocab_files_names", None)
    except ImportError:  # transformers substitutes a class that raises if its library is not installed
        return None


def _any(source: Source, names: Iterator[str]) -> bool:
    return any(source.locate(name) is not None for name in names)


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package does not exist either
        return False
