"""The small files of a checkpoint, each found and parsed once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from onnxtool.errors import OnnxtoolError
from onnxtool.reading import read_bytes, read_json, read_text
from onnxtool.reports import Json

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_Array = TypeVar("_Array")
_Content = TypeVar("_Content")
_MAX_MODULE_BYTES = 1 << 32  # weights of a module; token embedding tables are the largest

# The file that marks a PEFT adapter, alone or next to a model.
ADAPTER_NAME = "adapter_config.json"
MODULE_WEIGHTS = "model.safetensors"
# The extra layers of an M3 embedder: token weights and token vectors.
M3_FILES = ("sparse_linear.pt", "colbert_linear.pt")
MODULE_PICKLE = "pytorch_model.bin"


class CheckpointFiles(ABC):
    """A checkpoint as a set of files. Subclasses define where they are, and which error a malformed one raises.

    Attributes:
        allow_pickle: whether weights may come from a pickle if there are no others.
    """

    allow_pickle: bool = False

    @property
    @abstractmethod
    def label(self) -> str:
        """The checkpoint's name in errors: its folder or hub id."""

    @abstractmethod
    def locate(self, name: str) -> Path | None:
        """Return the path of the file `name`, relative to the checkpoint; None if it does not exist."""

    @abstractmethod
    def malformed(self, name: str, reason: str) -> OnnxtoolError:
        """Make the error for a malformed file."""

    @abstractmethod
    def refuse(self, message: str, hint: str = "") -> OnnxtoolError:
        """Make the error for a checkpoint with unsupported features."""

    def unpickle(self, path: Path) -> bytes:
        """Return the tensors of a pickle as a safetensors file.

        Raises:
            OnnxtoolError: pickles are not read here.
        """
        raise self.refuse(f"{path} is a pickle, which can run code")

    def read_json(self, name: str) -> Json:
        """Return the content of the JSON file `name`; None if it does not exist.

        Raises:
            OnnxtoolError: it is not JSON, or cannot be read.
        """
        if name not in self._parsed:
            self._parsed[name] = self._content(name, read_json, "JSON")
        return self._parsed[name]

    def read_text(self, name: str) -> str | None:
        """Return the content of the file `name`; None if it does not exist.

        Raises:
            OnnxtoolError: it is not UTF-8, or cannot be read.
        """
        return self._content(name, read_text, "UTF-8")

    def _content(self, name: str, parse: Callable[[Path], _Content], form: str) -> _Content | None:
        path = self.locate(name)
        try:
            return None if path is None else parse(path)
        except OSError as error:
            raise self.refuse(f"cannot read {path}: {error.strerror}", "check its permissions") from error
        except ValueError as error:
            raise self.malformed(name, f"not {form}: {error}") from None

    def read_object(self, name: str) -> dict[str, Json]:
        """Return the JSON object in the file `name`, or an empty one if it does not exist.

        Raises:
            OnnxtoolError: it is not a JSON object, or cannot be read.
        """
        content = self.read_json(name)
        if content is None:
            return {}
        if not isinstance(content, dict):
            raise self.malformed(name, "not a JSON object")
        return content

    def read_tensors(self, folder: str, names: Collection[str] | None = None) -> dict[str, NDArray[np.float32]]:
        """Return the weights of the module in `folder` as float32; from a pickle only if that is allowed.

        Integer and boolean tensors are skipped: they are counters of training steps.

        Args:
            folder: the module's folder; empty for the checkpoint's own.
            names: the tensors to read; None for all.

        Raises:
            OnnxtoolError: there are none, or they cannot be read.
        """

        def convert(name: str, entry: dict[str, Any]) -> NDArray[np.float32] | None:
            is_weight = not entry["dtype"].startswith(_NO_WEIGHTS)
            return _array(entry).astype("f4") if is_weight and (names is None or name in names) else None

        return self._read_module(folder, convert)

    def read_integers(self, folder: str) -> dict[str, NDArray[np.int64]]:
        """Return the integer tensors of the module in `folder`, such as row indices, as int64; see read_tensors.

        Raises:
            OnnxtoolError: there is no file, or it cannot be read.
        """
        return self._read_module(
            folder, lambda _name, entry: _array(entry).astype("i8") if entry["dtype"] in _INTEGERS else None
        )

    def _read_module(self, folder: str, convert: Callable[[str, dict[str, Any]], _Array | None]) -> dict[str, _Array]:
        """Return a module's tensors after `convert`, dropping those for which it returns nothing."""
        from safetensors import SafetensorError, deserialize

        prefix = f"{folder}/" if folder else ""
        path = self.locate(f"{prefix}{MODULE_WEIGHTS}")
        folder = folder or "the folder"
        if path is None and (pickle := self.locate(f"{prefix}{MODULE_PICKLE}")) is not None:
            if not self.allow_pickle:
                raise self.refuse(
                    f"{folder} of {self.label} has its weights only in a pickle ({MODULE_PICKLE}), which can run code",
                    "if you trust it, export it with --allow_pickle; or convert it: save_pretrained(...) of "
                    "sentence-transformers writes safetensors",
                )
            path = pickle
        if path is None:
            raise self.refuse(
                f"{folder} of {self.label} has no weights ({MODULE_WEIGHTS}); without them vectors are others than the "
                "checkpoint's",
                "the folder may be incomplete; fetch the whole checkpoint, or pass --model_name with it",
            )
        entries: list[tuple[str, Any]]
        try:
            content = read_bytes(path, _MAX_MODULE_BYTES) if path.suffix != ".bin" else self.unpickle(path)
            entries = deserialize(content)  # type: ignore[no-untyped-call]  # a Rust extension without types
            converted = ((name, convert(name, entry)) for name, entry in entries)
            return {name: array for name, array in converted if array is not None}
        except (SafetensorError, OSError, KeyError, ValueError, RuntimeError) as error:
            raise self.refuse(f"cannot read {path}: {error}", "fetch the checkpoint again") from error

    @cached_property
    def _parsed(self) -> dict[str, Json]:
        return {}


_INTEGERS = {"I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U8": "u1"}
_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", **_INTEGERS}
_NO_WEIGHTS = ("I", "U", "BOOL")  # prefixes of integer and boolean dtypes in safetensors


def _array(entry: dict[str, Any]) -> NDArray[Any]:
    """Return a tensor from a safetensors file. NumPy lacks bfloat16, which is the upper half of a float32."""
    import numpy as np

    array: NDArray[Any] = np.frombuffer(entry["data"], _DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return (array.astype("<u4") << 16).view("<f4") if entry["dtype"] == "BF16" else array


# Token roles, as named in tokenizer_config.json; the first five frame a text.
ROLES = ("pad_token", "cls_token", "sep_token", "bos_token", "eos_token", "unk_token", "mask_token")
FRAMING_ROLES = ROLES[:5]


def stated_token(name: str, *configs: Mapping[str, Json]) -> str | None:
    """Return the token for a role from the first of `configs` that names one; None if none does."""
    for config in configs:
        value = config.get(name)
        if isinstance(value, dict):  # an added token with its flags
            value = value.get("content")
        if isinstance(value, str):
            return value
    return None
