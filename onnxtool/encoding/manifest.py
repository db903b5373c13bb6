"""The manifest of a run over a corpus: the request, and the written shards.

It lies next to the folder of vectors, not in it, because Anserini reads every file in there. It contains neither times
nor dates, so that a resumed run leaves the same manifest as an uninterrupted one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from onnxtool.checkpoint.folder import CheckpointFolder
from onnxtool.encoding.files import open_file, read_bytes
from onnxtool.encoding.locations import Location
from onnxtool.encoding.sources import DIGEST_VERSION, CorpusFile, Reject
from onnxtool.errors import InputError, shorten, some
from onnxtool.model_file import ModelFile
from onnxtool.reading import parse_json
from onnxtool.reports import Json, from_json
from onnxtool.version import __version__, versions_of

_FORMAT = 1
# Files that determine how texts are read and outputs interpreted.
_CHECKPOINT_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_*_config.json",
    "router_config.json",
    "*[0-9]_*/config.json",
    "[0-9]_*/model.safetensors",
)
_VERSIONED = ("onnxruntime", "tokenizers", "numpy", "pillow")

Identity = dict[str, Any]


@dataclass(frozen=True)
class FileRecord:
    """A file of the output."""

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class ShardRecord:
    """A written shard.

    Attributes:
        digest: digest of the ids and texts it was made from.
        num_texts: number of texts with vectors.
        num_tokens: number of tokens read by the model, including special ones.
        num_padding: number of padding tokens in addition.
        num_truncated: number of texts beyond the model's limit.
        rejects: texts without any token, which shows only after tokenization.
        num_passages: number of passages with a vector, if texts are read as passages; otherwise 0.
        num_empty: number of texts, or passages, without any term.
    """

    files: tuple[FileRecord, ...]
    digest: str
    num_texts: int
    num_tokens: int
    num_padding: int
    num_truncated: int
    rejects: tuple[Reject, ...]
    num_passages: int = 0
    num_empty: int = 0


@dataclass(frozen=True)
class Manifest:
    """The written corpus. The manifest exists only when everything is written.

    Attributes:
        identity: everything that determines the vectors; a run resumes only if it is the same.
        shards: the shards, whose files are in place.
        num_rejects: number of lines without a text.
    """

    identity: Identity
    shards: tuple[ShardRecord, ...]
    num_rejects: int

    @property
    def num_texts(self) -> int:
        """The number of texts with a vector."""
        return sum(shard.num_texts for shard in self.shards)

    @property
    def num_passages(self) -> int:
        """The number of passages with a vector, if texts are read as passages; otherwise 0."""
        return sum(shard.num_passages for shard in self.shards)

    def to_json(self) -> str:
        """Convert it to a document."""
        return json_text({"format": _FORMAT, **asdict(self)}, indent=1) + "\n"


def json_text(content: Any, indent: int | None = None) -> str:
    """Write a document as UTF-8, escaping file names that are not valid UTF-8."""
    return json.dumps(content, indent=indent, ensure_ascii=False).encode(errors="backslashreplace").decode()


def read_manifest(path: Location) -> Manifest | None:
    """Return the record at `path`, or None where there is none.

    Raises:
        InputError: the file is not a manifest.
    """
    try:
        content = parse_json(read_bytes(path))
        version = content.pop("format", None) if isinstance(content, dict) else None
        if version != _FORMAT:
            raise ValueError(f"its format is {version}, and this onnxtool writes {_FORMAT}")
        manifest: Manifest = from_json(Manifest, content)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}", "check what it is, and its permissions") from error
    except ValueError as error:
        raise InputError(
            f"{path} is not a manifest of an encoded corpus: {error}", "pass another --output, or remove that file"
        ) from error
    return manifest


def make_identity(
    model: ModelFile,
    folder: CheckpointFolder,
    sources: Iterable[CorpusFile],
    options: dict[str, Any],
    vectors: dict[str, Json],
) -> Identity:
    """Collect what determines the vectors: model, tokenizer, input, `options`, versions; and describe the vectors."""
    versions = {"onnxtool": __version__, "shard_digest": DIGEST_VERSION} | versions_of(_VERSIONED)
    model_files = model.files
    places = {folder.path, folder.path / folder.transformer_folder}
    present = sorted({path for place in places for pattern in _CHECKPOINT_FILES for path in place.glob(pattern)})
    return {
        "model": [file_sha256(path) for path in model_files],
        "checkpoint": {path.relative_to(folder.path).as_posix(): file_sha256(path) for path in present},
        "input": _described(tuple(sources)),
        "options": options,
        "vectors": vectors,
        "versions": versions,
    }


def _described(sources: Sequence[CorpusFile]) -> list[Json]:
    """Name the input files; images, which are numerous, are only counted."""
    if any(source.is_picture for source in sources):
        size = sum(source.size_bytes for source in sources)
        return [{"name": f"{len(sources)} images", "size_bytes": size}]
    return [{"name": source.name, "size_bytes": source.size_bytes} for source in sources]


# The options that set parts of an identity under another name; the parts that follow from others have none.
_OPTIONS = {"kind": "output_format", "reading": "task", "as": "vectors_as", "description": "head, --pooling or others"}
_DERIVED = ("task", "of", "dtype", "code", "by_token")


def difference(stored: Identity, expected: Identity) -> str:
    """Describe how the identities differ, by option and value; an empty string where they are equal."""
    names = [name for name in expected if stored.get(name) != expected[name]]
    parts: list[str] = []
    for name in names:
        then, now = (_settings(one.get(name)) for one in (stored, expected))
        keys = [key for key in {**then, **now} if then.get(key) != now.get(key) and key not in _DERIVED]
        changes = [f"{_OPTIONS.get(key, key)}: {_change(then.get(key), now.get(key))}" for key in keys]
        if name in ("options", "vectors"):
            parts += [f"--{change}" for change in changes]
        elif name == "input":
            parts.append(f"--input, in bytes: {some(changes)}")
        elif name == "checkpoint":
            parts.append(f"other files beside the model: {some(keys)}")
        else:
            parts += ["--model_path: another model"] if name == "model" else changes
    return "; ".join(parts) or "; ".join(f"another {name}" for name in names)


def _settings(part: Any) -> dict[str, Any]:
    """Return a part of an identity by name; files of the input with their size."""
    if isinstance(part, list):
        return {str(one.get("name")): one.get("size_bytes") for one in part if isinstance(one, dict)}
    return part if isinstance(part, dict) else {}


def _change(before: Any, after: Any) -> str:
    """Describe how a setting has changed; of numbers for each dimension, only that they have."""
    if any(isinstance(value, list) and not all(isinstance(part, str) for part in value) for value in (before, after)):
        return "others than before"
    return f"{_said(before)}, now {_said(after)}"


def _said(value: Any) -> str:
    """Return a setting as the user would write it."""
    if value in (None, "", []):
        return "none"
    if isinstance(value, list):
        return " ".join(value)
    text = {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
    return shorten(text if text == text.strip() else repr(text))


def file_sha256(path: Location) -> str:
    """Return the hash of the bytes of a file."""
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
