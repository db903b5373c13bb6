"""The keys that onnxtool stamps into a model's metadata_props, and the record of steps."""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from onnxtool.model_file.wire import encode_metadata
from onnxtool.reading import parse_json
from onnxtool.reports import Json, from_json

if TYPE_CHECKING:
    from onnxtool.verification import Verification

T = TypeVar("T")

TASK_KEY = "onnxtool.task"
HEAD_KEY = "onnxtool.head"
DTYPE_KEY = "onnxtool.dtype"
FILES_KEY = "onnxtool.files"
MAX_LENGTH_KEY = "onnxtool.max_length"
VERIFIED_LENGTH_KEY = "onnxtool.verified_length"  # longest input compared with the checkpoint, in tokens
INPUTS_KEY = "onnxtool.input_recipes"  # the content of each input, and the sizes that were verified
WEIGHTS_KEY = "onnxtool.weights_sha256"  # digest of the checkpoint: files that belong together share it
TOKENIZER_KEY = "onnxtool.tokenizer_sha256"  # digest of a tokenizer.json that tokenizes as transformers does
VOCABULARY_KEY = "onnxtool.vocabulary_sha256"  # digest of the tokenizer.json of a file whose vocabulary was cut
# The side on which texts are padded; NO_PADDING if texts of different lengths must not share a batch.
PADDING_KEY = "onnxtool.padding"
NO_PADDING = "none"
# For a checkpoint with a Router: the route whose modules the graph computes, and the texts that it is for (query,
# document). Other texts are for the partner, the file of another route, next to it. Both share one digest, of all their
# weights.
ROUTE_KEY = "onnxtool.route"
READS_KEY = "onnxtool.reads"
PARTNER_KEY = "onnxtool.partner"
PAIR_KEY = "onnxtool.pair_sha256"
# For the two graphs of an encoder-decoder: the other file, and the maximum number of decoder tokens.
ENCODER_KEY = "onnxtool.encoder"
DECODER_KEY = "onnxtool.decoder"
MAX_DECODER_LENGTH_KEY = "onnxtool.max_decoder_length"
PRUNE_KEY = "onnxtool.prune"  # the rule by which its graph leaves out terms of sparse vectors
# For a graph that encodes page images: the processor whose inputs it takes, the id that stands for pixels, and the
# number of these ids for each tile or patch.
PROCESSOR_KEY = "onnxtool.processor"
PLACEHOLDER_KEY = "onnxtool.image_token_id"
PLACEHOLDERS_KEY = "onnxtool.image_tokens"
STEPS_KEY = "onnxtool.steps"
# For a graph with its tokenizer in it: what is known of that (`TextInput`), and the tokenizer.json that it was compared
# with, compressed.
TEXT_KEY = "onnxtool.text_input"
EMBEDDED_KEY = "onnxtool.tokenizer_json"
SIZES_KEY = "onnxtool.sizes"  # of a file with others next to it that are the same model at fixed sizes (`SizedFile`)
ADAPTERS_KEY = "onnxtool.adapters"  # of a file with adapters next to it (`AdapterFile`)
COMPILED_KEY = "onnxtool.compiled"  # of a file that one provider has compiled (`Compiled`)
LONGEST = 2**31 - 1  # tokens, for no limit
DISABLED_OPTIMIZERS_KEY = "onnxtool.session.disabled_optimizers"
EXACT_PRODUCTS_KEY = "onnxtool.session.exact_products"  # REQUIRED if int8 products must not saturate
REQUIRED = "required"

_MOST_UNPACKED = 256 << 20  # bytes
_BLOCK = 1 << 20  # bytes read at a time
_LARGE_BLOCK = 1 << 22
# Of a verification, recorded with the step.
FIGURES = (
    *("reference", "max_abs_error", "atol", "rtol", "cosine_min", "cosine_required"),
    *("mask_effect", "padding_effect", "batch_effect"),
)


class TextInput(NamedTuple):
    """A record of how a graph reads texts.

    Attributes:
        names: its inputs: string [N] each, two for pairs.
        former: the inputs that it had for ids, which are values in it.
        prompt: the text that it puts before each text, or before the first of a pair.
        most_tokens: the number of tokens to which it cuts; LONGEST for none.
        texts: the number of texts whose ids were compared with the tokenizer's.
        differences: what of these it reads otherwise than the tokenizer, and how many.
    """

    names: tuple[str, ...]
    former: tuple[str, ...]
    prompt: str
    most_tokens: int
    texts: int
    differences: dict[str, int]

    @property
    def notes(self) -> tuple[str, ...]:
        """A sentence on what it reads, and how far that is proved."""
        unit = "texts" if len(self.names) == 1 else "pairs of texts"
        cut = f", and cuts them to {self.most_tokens:,} tokens" if self.most_tokens < LONGEST else ""
        reads = f"the graph reads {unit} by onnxruntime-extensions{cut}"
        if not self.texts:
            return (reads, "its tokenizer was not compared with the checkpoint's")
        same = f"{self.texts - sum(self.differences.values()):,} of {self.texts:,} {unit}"
        exceptions = (f"others: {count:,} {kind}" for kind, count in self.differences.items())
        return (reads, f"its tokenizer gives the ids, masks and types of the checkpoint's on {same}", *exceptions)

    @property
    def entry(self) -> dict[str, str]:
        """The metadata that records it."""
        return {TEXT_KEY: json.dumps(self._asdict(), sort_keys=True)}


def _parse(kind: type[T], text: str) -> T | None:
    """Parse a record in the metadata; None if it is malformed."""
    try:
        record: T = from_json(kind, parse_json(text))
    except ValueError:
        return None
    return record


def parse_text_input(text: str) -> TextInput | None:
    """Parse the value of the metadata `onnxtool.text_input`; None if it is malformed."""
    text_input = _parse(TextInput, text)
    return text_input if text_input is not None and text_input.names and text_input.former else None


class SizedFile(NamedTuple):
    """A file next to another one: the same model with the axes of its inputs at fixed sizes.

    Attributes:
        file: its name.
        sizes: by name of the axis.
        sha256: the digest of its graph file.
    """

    file: str
    sizes: dict[str, int]
    sha256: str


def sizes_entry(files: Sequence[SizedFile]) -> dict[str, str]:
    """Return the metadata that names the files of fixed sizes."""
    return {SIZES_KEY: json.dumps([file._asdict() for file in files], separators=(",", ":"))}


def parse_sizes(text: str) -> tuple[SizedFile, ...] | None:
    """Parse the value of the metadata `onnxtool.sizes`; None if it is malformed."""
    files = _parse(tuple[SizedFile, ...], text)
    if files is None or len({frozenset(file.sizes) for file in files}) > 1:
        return None
    is_valid = all(is_plain_name(file.file) and min(file.sizes.values(), default=0) > 0 for file in files)
    return files if is_valid else None


class AdapterFile(NamedTuple):
    """A file next to the graph with values for some of its inputs, which are empty initializers without it.

    Attributes:
        name: the name by which a user chooses it.
        file: its file name.
        sha256: its digest, of blocks.
    """

    name: str
    file: str
    sha256: str


def adapters_entry(files: Sequence[AdapterFile]) -> dict[str, str]:
    """Return the metadata that names the adapters."""
    return {ADAPTERS_KEY: json.dumps([file._asdict() for file in files], separators=(",", ":"))}


def parse_adapters(text: str) -> tuple[AdapterFile, ...] | None:
    """Parse the value of the metadata `onnxtool.adapters`; None if it is malformed."""
    adapters = _parse(tuple[AdapterFile, ...], text)
    if adapters is None or len({adapter.name for adapter in adapters}) < len(adapters):
        return None
    return adapters if all(adapter.name and is_plain_name(adapter.file) for adapter in adapters) else None


class Compiled(NamedTuple):
    """A record of what a provider has compiled, and where that runs.

    Attributes:
        provider: the provider and its device.
        version: of the provider.
        runtime: the version of onnxruntime.
        hardware: that it is for.
        context: the file next to the graph that has the compiled part.
        context_sha256: its digest, of blocks.
        graph_bytes: the bytes of the graph file before the stamp.
        graph_sha256: their digest.
    """

    provider: str
    version: str
    runtime: str
    hardware: str
    context: str
    context_sha256: str
    graph_bytes: int
    graph_sha256: str

    @property
    def entry(self) -> dict[str, str]:
        """The metadata that records it."""
        return {COMPILED_KEY: json.dumps(self._asdict(), sort_keys=True)}


def parse_compiled(text: str) -> Compiled | None:
    """Parse the value of the metadata `onnxtool.compiled`; None if it is malformed."""
    compiled = _parse(Compiled, text)
    return compiled if compiled is not None and is_plain_name(compiled.context) else None


def is_plain_name(name: str) -> bool:
    """Whether a name in untrusted metadata is that of a file in the same folder."""
    return bool(name) and name not in (".", "..") and not any(character in name for character in "/\\:\0")


def pack(text: str) -> str:
    """Compress a file for the metadata."""
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def unpack(packed: str) -> str | None:
    """Return a compressed file; None if it is malformed, or larger than any tokenizer."""
    unpacker = zlib.decompressobj()
    try:
        content = unpacker.decompress(base64.b64decode(packed, validate=True), _MOST_UNPACKED)
        return content.decode() if unpacker.eof else None
    except (ValueError, zlib.error):
        return None


def stamp(path: Path, entries: Mapping[str, str]) -> None:
    """Add metadata to the ONNX file at `path` by appending to it; the file must not have any of these keys."""
    with path.open("ab") as file:
        file.write(encode_metadata(dict(entries)))


def digest_of_start(path: Path, num_bytes: int) -> str:
    """Return the SHA-256 of the first bytes of a file: what was there before a stamp was appended."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while num_bytes > 0 and (block := file.read(min(num_bytes, _BLOCK))):
            digest.update(block)
            num_bytes -= len(block)
    return digest.hexdigest()


def digest_of_blocks(path: Path) -> str:
    """Return the SHA-256 of the SHA-256 of each block of a large file, which two threads compute."""
    from concurrent.futures import ThreadPoolExecutor

    def digest_from(start: int) -> bytes:
        with path.open("rb") as file:
            file.seek(start)
            return hashlib.sha256(file.read(_LARGE_BLOCK)).digest()

    with ThreadPoolExecutor(2) as threads:
        blocks = threads.map(digest_from, range(0, path.stat().st_size, _LARGE_BLOCK))
        return hashlib.sha256(b"".join(blocks)).hexdigest()


def step_entry(
    step: str,
    verification: Verification | None,
    *,
    previous: tuple[dict[str, Json], ...] = (),
    **details: Json,
) -> dict[str, str]:
    """Return the metadata that records the steps that made a model: `previous` ones, and this one with its figures."""
    figures: dict[str, Json] = {"verified": verification is not None}
    if verification is not None:
        figures |= {name: getattr(verification, name) for name in FIGURES}
        figures |= {"cases": len(verification.cases), "verified_on": verification.provider}
    steps = [*previous, {"step": step, **details, **figures}]
    return {STEPS_KEY: json.dumps(steps, sort_keys=True, separators=(",", ":"))}


def parse_steps(text: str) -> tuple[dict[str, Json], ...] | None:
    """Parse the value of the metadata `onnxtool.steps`; None if it is not a list of steps."""
    return _parse(tuple[dict[str, Any], ...], text)


LICENSE_KEY = "onnxtool.license"
LICENSE_NAME_KEY = "onnxtool.license_name"
LICENSE_LINK_KEY = "onnxtool.license_link"
UNKNOWN = "unknown"
OTHER = "other"

_MAX_CHARACTERS = 200


class License(NamedTuple):
    """A license as named in the front matter of a model card.

    Attributes:
        id: an SPDX id, in lower case as on the hub; `other`, for a license named in `name`; or `unknown`.
        name: the name of a license that is `other`.
        link: a link to the text of a license that is `other`.
    """

    id: str = UNKNOWN
    name: str = ""
    link: str = ""

    @classmethod
    def of_checkpoint(cls, card: Mapping[str, Any], config: Mapping[str, Any]) -> License:
        """Read the license from the card, or else from the configuration.

        Several licenses become one `other` license with their names, because the card does not state whether all of
        them apply or one may be chosen.
        """
        for source in (card, config):
            stated = source.get("license")
            names = [_plain(name) for name in (stated if isinstance(stated, list) else [stated])]
            ids = [name.lower() for name in names if name]
            if len(ids) > 1:
                return cls(OTHER, ", ".join(ids), _plain(source.get("license_link")))
            if ids and ids[0] != UNKNOWN:
                return cls(ids[0], *(_plain(source.get(key)) for key in ("license_name", "license_link")))
        return cls()

    @classmethod
    def of_file(cls, metadata: Mapping[str, str]) -> License:
        """Read the stamp."""
        return cls(
            _plain(metadata.get(LICENSE_KEY)).lower() or UNKNOWN,
            _plain(metadata.get(LICENSE_NAME_KEY)),
            _plain(metadata.get(LICENSE_LINK_KEY)),
        )

    @property
    def stamps(self) -> dict[str, str]:
        """Metadata of a file; empty if nothing is known."""
        entries = {LICENSE_KEY: self.id, LICENSE_NAME_KEY: self.name, LICENSE_LINK_KEY: self.link}
        return {key: value for key, value in entries.items() if value} if self.is_known else {}

    @property
    def is_known(self) -> bool:
        """Whether anything is known about it."""
        return self.id != UNKNOWN

    def is_among(self, allowed: Iterable[str]) -> bool:
        """Whether an allow-list has it, by its id, or another license by its name; case does not matter.

        An unknown license, or `other` without a name, is in no list.
        """
        stated = self.name if self.id == OTHER else "" if self.id == UNKNOWN else self.id
        names = {name.strip().casefold() for entry in allowed for name in (entry, *entry.split(","))}
        return bool(stated) and stated.casefold() in names

    def __str__(self) -> str:
        return f"{self.id} ({self.name})" if self.name else self.id


def _plain(value: Any) -> str:
    """Return a text on one line, without control characters; empty if it is not a text."""
    words = " ".join(value.split()) if isinstance(value, str) else ""
    return "".join(letter for letter in words if letter.isprintable())[:_MAX_CHARACTERS]
