"""Run an ONNX file instead of PyTorch inside sentence-transformers, from a folder written by the target of that name.

    import onnxtool.sentence_transformers
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer("models/NAME")

SparseEncoder, CrossEncoder and MultiVectorEncoder load such folders too. sentence-transformers still does everything
around the transformer, including the modules after it. It imports classes from other packages only with
`trust_remote_code=True`; importing this module registers its class, so that the folder loads without it.

Written for sentence-transformers 6.2. Shape letters: B batch, S sequence.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, Self

import torch
from sentence_transformers.base import modules
from sentence_transformers.base.model import BaseModel

from onnxtool.checkpoint.limits import verified_limit
from onnxtool.checkpoint.sentence_modules import ENCODER_NAME
from onnxtool.errors import InputError, OptionError, OutputExistsError, TrainingError
from onnxtool.model_file import disk_failures, staged
from onnxtool.model_file.wire import read_structure
from onnxtool.reading import read_json
from onnxtool.runtime.providers import MAX_THREADS, PROVIDERS, parse_provider
from onnxtool.runtime.running import Session
from onnxtool.runtime.session import open_session
from onnxtool.runtime.text_feeds import require_named_inputs, text_feeds

CLASS = f"{__name__}.Transformer"  # as modules.json names it

_FOLDER, _FILE = "onnx", "model.onnx"
_CAUSAL = "text-generation"  # class of a transformer whose causal logits are scored
# The model_kwargs for an ONNX file; `file_name`, `provider` and `export` as in sentence-transformers' own ONNX backend.
_ARGUMENTS = ("file_name", "provider", "threads", "export")
# sentence-transformers' arguments for locating a file; `model_kwargs` has the cache folder under transformers' name.
_WHERE = ("subfolder", "token", "cache_folder", "revision", "local_files_only")
_PROVIDER_NAMES = {
    "auto": "auto",
    **{name: name for name in PROVIDERS},
    **{full: name for name, full in PROVIDERS.items()},
}


class _MissingFileError(InputError, OSError):
    """No such ONNX file; also an OSError, which transformers raises and callers of sentence-transformers catch."""


class OnnxModel(torch.nn.Module):  # type: ignore[misc]  # PyTorch has no types here
    """An ONNX file with its session, in the role of sentence-transformers' PreTrainedModel. It has no parameters.

    A decoder reranker returns its score instead of the last token's logits: [B, 1, 1].

    Attributes:
        config: the PretrainedConfig of the checkpoint.
        path: the ONNX file.
        provider: `auto`, or a provider as of `ExecutionProvider.parse`, as requested.
        threads: intra-op threads; 0 for one per core.
        is_causal: whether it is a decoder reranker.
    """

    def __init__(
        self, path: Path, config: Any, *, provider: str = "auto", threads: int = 0, is_causal: bool = False
    ) -> None:
        """Open the session.

        Raises:
            OnnxtoolError: the file cannot be used, or the provider cannot run here.
        """
        super().__init__()
        self.path, self.config, self.provider, self.threads = path, config, provider, threads
        self.is_causal = is_causal
        self._files = {file: _state_of(file) for file in [path, *(path.parent / name for name in _locations(path))]}
        self._session: Session = open_session(path, provider=provider, threads=threads)
        require_named_inputs(self._session.model)

    @property
    def device(self) -> torch.device:
        """The device of inputs and outputs: always the CPU, whatever the provider."""
        return torch.device("cpu")

    @property
    def session(self) -> Session:
        """The session that runs the file."""
        return self._session

    def forward(self, **features: Any) -> dict[str, torch.Tensor]:
        """Run the graph on int64 tensors [B, S] and return its outputs by name, as float32 on the device of the ids.

        Raises:
            InputError: the features lack an input of the graph, or texts are longer than its export has verified.
            SessionError: onnxruntime fails on them.
        """
        ids = features["input_ids"]
        limit = verified_limit(self._session.model)
        if limit is not None and ids.shape[1] > limit.tokens:
            raise InputError(
                f"{self.path} is for texts of up to {limit.tokens} tokens ({limit.source}), and one has {ids.shape[1]}",
                f"set max_seq_length to {limit.tokens}, or export the model with --max_length",
            )
        names = {*self._session.input_names}
        arrays = {name: tensor.cpu().numpy() for name, tensor in features.items() if name in names}
        if "token_type_ids" in names:  # PyTorch assumes zeros if the tokenizer returns none
            arrays.setdefault("token_type_ids", torch.zeros_like(ids, device="cpu").numpy())
        outputs = self._session.run(text_feeds(self._session.model, arrays))
        tensors = {name: torch.from_numpy(array).float().to(ids.device) for name, array in outputs.items()}
        return {name: value.unsqueeze(1) if self.is_causal else value for name, value in tensors.items()}

    def train(self, mode: bool = True) -> Self:
        """Refuse to train.

        Raises:
            TrainingError: `mode` is set.
        """
        if mode:
            raise TrainingError(
                f"{self.path} is an ONNX file, which sentence-transformers cannot train",
                "train the checkpoint that it was exported from, and export it again",
            )
        super().train(mode)
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Accept any device, which has no effect here, and refuse another precision."""
        dtype = fn(torch.zeros(1)).dtype
        if dtype != torch.float32:
            raise InputError(
                f"{self.path} is an ONNX file, whose precision is its own and does not become {dtype}",
                "make one with `onnxtool optimize --precision fp16` or int8, and load it with "
                'model_kwargs={"file_name": "NAME.onnx"}',
            )
        super()._apply(fn, recurse)
        return self

    def save_pretrained(self, folder: str, **_arguments: Any) -> None:
        """Copy the ONNX file with its external data, as onnx/model.onnx, and write config.json into `folder`.

        Raises:
            OutputExistsError: the file was loaded from there under another name, and would replace the one next to it.
            InputError: it was replaced since it was loaded.
            OutputWriteError: it cannot be written, or the file is gone.
        """
        self._require_same()
        target = Path(folder) / _FOLDER
        with disk_failures(target / _FILE):
            target.mkdir(parents=True, exist_ok=True)
            if self.path.parent.samefile(target) and self.path.name != _FILE:
                raise OutputExistsError(
                    f"{target / _FILE} is beside the {self.path.name} that is loaded, which would replace it",
                    "save to another folder",
                )
            self.config.save_pretrained(folder)
            data_files = self._session.model.files[1:]
            copies = {path.relative_to(self.path.parent).as_posix(): path for path in data_files}
            copies[_FILE] = self.path  # last, because it refers to the others
            for name, source in copies.items():
                copy = target / name
                if not (copy.exists() and copy.samefile(source)):
                    with staged(copy, force=True) as staging:
                        shutil.copyfile(source, staging.model_path)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state that another process needs to reopen the file: a session cannot be pickled."""
        return {name: value for name, value in self.__dict__.items() if name != "_session"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Open the file again, if it is still the same."""
        super().__setstate__(state)
        self._require_same()
        self._session = open_session(self.path, provider=self.provider, threads=self.threads)

    def _require_same(self) -> None:
        for path, state in self._files.items():
            if _state_of(path) != state:
                raise InputError(f"{path} was replaced or removed since it was loaded", "load the model again")


def _state_of(path: Path) -> tuple[int, int] | None:
    """Return what changes with a file's contents; None if it does not exist."""
    status = path.stat() if path.exists() else None
    return None if status is None else (status.st_size, status.st_mtime_ns)


def _locations(path: Path) -> set[str]:
    return {data.location for data in read_structure(path).external}


class Transformer(modules.Transformer):
    """sentence-transformers' Transformer with an ONNX file instead of the PyTorch model."""

    saved_for = ""  # the class of sentence-transformers that the folder names; empty for none

    def __init__(self, model_name_or_path: str, **arguments: Any) -> None:
        """Load configuration, tokenizer and ONNX file.

        Raises:
            OptionError: the backend is neither `onnx` nor `torch`, which is sentence-transformers' default.
            InputError: the file is missing, or requested with options that no ONNX file supports.
        """
        if (backend := arguments.pop("backend", "onnx")) not in ("onnx", "torch"):
            raise OptionError(
                f"{model_name_or_path} has an ONNX file, and the backend {backend} was asked for", "leave `backend` out"
            )
        super().__init__(model_name_or_path, backend="onnx", **arguments)
        limit = verified_limit(self.model.session.model)
        if limit is not None and (self.max_seq_length or limit.tokens + 1) > limit.tokens:
            self.max_seq_length = limit.tokens

    @classmethod
    def load(cls, model_name_or_path: str, *arguments: Any, **named: Any) -> Self:
        """Load the module from a folder or the hub, with the same arguments as sentence-transformers' own.

        An exported model has the transformer's files at the top level, wherever the checkpoint had them.

        Raises:
            OptionError: `model_kwargs` has entries that do not apply to an ONNX file.
        """
        model_arguments = named.get("model_kwargs") or {}
        where = {name: named[name] for name in _WHERE if name in named}
        unknown = sorted({*model_arguments} - {*_ARGUMENTS, *_WHERE, "trust_remote_code"})
        if unknown or model_arguments.get("export"):
            raise OptionError(
                f"model_kwargs has {', '.join(unknown) or 'export'}, which means nothing for the ONNX file of "
                f"{model_name_or_path}",
                f"pass only {', '.join(_ARGUMENTS[:-1])}; the rest was decided when the file was made",
            )
        if cls.load_file_path(model_name_or_path, "config.json", **where) is None:
            named["subfolder"] = ""
        loaded = super().load(model_name_or_path, *arguments, **named)
        path = cls.load_file_path(model_name_or_path, ENCODER_NAME, **where)
        loaded.saved_for = "" if path is None else read_json(Path(path)).get("model_type", "SentenceTransformer")
        return loaded

    def _load_model(
        self,
        model_name_or_path: str,
        transformer_task: str,
        config: Any,
        backend: str,
        is_peft_model: bool,  # already refused by the onnx backend
        **arguments: Any,
    ) -> OnnxModel:
        provider, threads = arguments.get("provider", "auto"), arguments.get("threads", 0)
        if not isinstance(provider, str):
            raise OptionError(f"there is no provider {provider!r} here", f"pass one of {', '.join(_PROVIDER_NAMES)}")
        provider = parse_provider(_PROVIDER_NAMES.get(provider, provider))
        if not isinstance(threads, int) or not 0 <= threads <= MAX_THREADS:
            raise OptionError(f"threads is {threads!r}", f"pass 0, for one a core, to {MAX_THREADS}")
        path = _find_file(model_name_or_path, arguments)
        is_causal = transformer_task == _CAUSAL
        return OnnxModel(path, config, provider=provider, threads=threads, is_causal=is_causal)

    def on_model_ready(self, model: BaseModel) -> None:
        """Report the ONNX backend.

        Raises:
            InputError: the folder was saved for another class, and modules that were never trained were added.
        """
        super().on_model_ready(model)
        kinds = {kind.model_type for kind in BaseModel.__subclasses__()}  # a library's own class says nothing of these
        if self.saved_for in kinds - {model.model_type}:
            raise InputError(
                f"the ONNX file {self.model.path} is for {self.saved_for}, and {model.model_type} would add modules "
                "that were never trained",
                f"load the folder with {self.saved_for}",
            )
        model.backend = "onnx"


def _find_file(model_name_or_path: str, arguments: Mapping[str, Any]) -> Path:
    """Find the ONNX file in the folder `onnx` of a checkpoint, or next to its other files."""
    file_name = str(arguments.get("file_name", _FILE))
    names = [file_name] if "/" in file_name else [f"{_FOLDER}/{file_name}", file_name]
    named = {**arguments, "cache_folder": arguments.get("cache_dir")}
    where = {name: named[name] for name in _WHERE if name in named}
    for name in names:
        located = modules.Transformer.load_file_path(model_name_or_path, name, **where)
        if located is not None:
            break
    else:
        raise _MissingFileError(
            f"{model_name_or_path} has no {' and no '.join(names)}",
            'name the file with model_kwargs={"file_name": ...}, or export the checkpoint with '
            "`onnxtool export --target sentence-transformers`",
        )
    path = Path(located).absolute()
    if not Path(model_name_or_path).is_dir():  # the hub downloads one file at a time
        for location in _locations(path):
            with suppress(ValueError):  # a link to elsewhere, which the session refuses by name
                modules.Transformer.load_file_path(
                    model_name_or_path, (PurePosixPath(name).parent / location).as_posix(), **where
                )
    return path


# Used instead of trust_remote_code, which would run the code of any package named in a folder. It is private; without
# it sentence-transformers requires that flag.
if hasattr(BaseModel, "_module_classes"):
    BaseModel._module_classes = {**BaseModel._module_classes, CLASS: Transformer}  # noqa: SLF001 - as said above
