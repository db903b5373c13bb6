"""Records of encoded splits and their shards, in `NAME.parts/`, until all splits are done.

`run.json` identifies the run. `part-NNNNN.RUN.json` is written after the files of a shard, and
`split-NNNNN.RUN.json` after all of its shards: what has no record is not done. `RUN` are digits of the digest of
`run.json`, so that a listing shows which splits are done, and records of another command are ignored.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from onnxtool.encoding.files import START_AGAIN, Entry, entries, entry, read_bytes, remove
from onnxtool.encoding.locations import Location
from onnxtool.encoding.manifest import (
    Identity,
    ShardRecord,
    difference,
    file_sha256,
    json_text,
    read_manifest,
)
from onnxtool.encoding.output import OutputFolder, is_name_of
from onnxtool.encoding.sources import DIGEST_BYTES, Document, id_digest
from onnxtool.encoding.splits import MOST_SPLITS, ShardName, SplitRecord
from onnxtool.errors import InputError, OutputExistsError
from onnxtool.reading import parse_json
from onnxtool.reports import from_json

_FORMAT = 2
_DIGITS = 12
RUN_FILE = "run.json"
_OWN = re.compile(r"(run|(part|split)-[0-9]{5,}(_[0-9]{5,})?(\.[0-9a-f]{12})?)\.json")
_FAULTS = (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, zlib.error)
_PLACE = np.dtype([("file", "<u4"), ("line", "<u8")])


@dataclass(frozen=True)
class ShardTexts:
    """The texts of a shard: a digest of each id, for finding duplicates, and its location in the input.

    Attributes:
        digests: V16 [N].
        places: of _PLACE [N]; `file` is the place of its name in `files`.
        files: names.
    """

    digests: NDArray[np.void]
    places: NDArray[np.void]
    files: tuple[str, ...]

    @classmethod
    def of(cls, documents: Sequence[Document]) -> ShardTexts:
        """Return the stored details of N texts."""
        files = {name: place for place, name in enumerate(dict.fromkeys(document.file for document in documents))}
        digests = b"".join(id_digest(document.id) for document in documents)
        places = np.array([(files[document.file], document.line) for document in documents], _PLACE)
        return cls(np.frombuffer(digests, f"V{DIGEST_BYTES}"), places, tuple(files))

    def without(self, dropped: Sequence[int]) -> ShardTexts:
        """Return the texts except those at `dropped`."""
        return ShardTexts(np.delete(self.digests, dropped), np.delete(self.places, dropped), self.files)

    def to_json(self) -> dict[str, Any]:
        """Write it as a part of a record."""
        columns = b"".join(column.tobytes() for column in (self.digests, self.places["file"], self.places["line"]))
        return {"files": self.files, "packed": base64.b64encode(zlib.compress(columns)).decode()}

    @classmethod
    def from_json(cls, content: dict[str, Any], count: int) -> ShardTexts:
        """Return what `to_json` has written of `count` texts.

        Raises:
            ValueError, KeyError, TypeError, zlib.error: it has another form.
        """
        files = tuple(content["files"])
        size = count * (DIGEST_BYTES + 12)
        columns = zlib.decompressobj().decompress(base64.b64decode(content["packed"]), size + 1)
        is_named = isinstance(content["files"], list) and all(isinstance(name, str) for name in files)
        if len(columns) != size or not is_named:
            raise ValueError(f"its texts are not those of {count}")
        digests = np.frombuffer(columns, f"V{DIGEST_BYTES}", count)
        places = np.empty(count, _PLACE)
        places["file"] = np.frombuffer(columns, "<u4", count, count * DIGEST_BYTES)
        places["line"] = np.frombuffer(columns, "<u8", count, count * (DIGEST_BYTES + 4))
        if count and int(places["file"].max()) >= len(files):
            raise ValueError("its texts are of files without a name")
        return cls(digests, places, files)


class ShardEntry(NamedTuple):
    """A written shard, and its texts."""

    shard: ShardRecord
    texts: ShardTexts


class Run(NamedTuple):
    """The run that the records in a folder belong to.

    Attributes:
        sha256: the digest of `run.json`.
    """

    sha256: str
    identity: Identity

    @property
    def num_splits(self) -> int:
        """The number of splits in the corpus."""
        count: int = self.identity["num_splits"]
        return count

    @classmethod
    def of(cls, identity: Identity) -> Run:
        """Return the run of a command."""
        return cls(hashlib.sha256(_content(identity)).hexdigest(), identity)


class Records:
    """The records of the shards and splits of one run.

    Attributes:
        folder: the folder of vectors.
        path: the folder of records.
    """

    def __init__(self, folder: OutputFolder, run: Run) -> None:
        self.run = run
        self.path = folder.records_path
        self.folder = folder

    def _file(self, stem: str) -> Location:
        return self.path / f"{stem}.{self.run.sha256[:_DIGITS]}.json"

    def done(self) -> dict[int, Entry]:
        """Return the splits with a record, and the time of each, from one listing."""
        files = entries(self.path)
        names = {number: self._file(f"split-{number:05d}").name for number in range(self.run.num_splits)}
        return {number: files[name] for number, name in names.items() if name in files}

    def write_shard(self, name: ShardName, entry: ShardEntry) -> None:
        """Write the record of a shard whose files are in place."""
        self._write_record(name.stem, {"shard": asdict(entry.shard), "texts": entry.texts.to_json()})

    def write_split(self, number: int, record: SplitRecord) -> None:
        """Write the record of a split whose shards are recorded."""
        rejects = [asdict(reject) for reject in record.rejects]
        self._write_record(f"split-{number:05d}", {**record._asdict(), "rejects": rejects})

    def _write_record(self, stem: str, content: dict[str, Any]) -> None:
        text = json.dumps({"format": _FORMAT, "run": self.run.sha256, **content})
        self.folder.write(self._file(stem), f"{text}\n".encode())

    def read_split(self, number: int) -> SplitRecord | str:
        """Return the record of a split, or why there is none."""
        try:
            split: SplitRecord | str = from_json(SplitRecord, self._read_record(f"split-{number:05d}"))
        except FileNotFoundError:
            return "is missing"
        except _FAULTS as error:
            return f"has a record that cannot be read: {error}"
        return split

    def read_shard(self, name: ShardName) -> ShardEntry | str:
        """Return the record of a shard, or why there is none; its files are not checked yet."""
        try:
            content = self._read_record(name.stem)
            shard = from_json(ShardRecord, content["shard"])
            if not re.fullmatch(r"[0-9a-f]{32}", shard.digest):
                raise ValueError(f"its digest is {shard.digest[:40]!r}")
            return ShardEntry(shard, ShardTexts.from_json(content["texts"], shard.num_texts))
        except FileNotFoundError:
            return "lacks a shard"
        except _FAULTS as error:
            return f"has a record that cannot be read: {error}"

    def _read_record(self, stem: str) -> dict[str, Any]:
        content: dict[str, Any] = parse_json(read_bytes(self._file(stem)))
        if content.pop("format") != _FORMAT or content.pop("run") != self.run.sha256:
            raise ValueError("it belongs to another run")
        return content

    def fault(self, name: ShardName, shard: ShardRecord, files: Mapping[str, Entry | None], *, verify: bool) -> str:
        """Return a problem with the files of a shard, or an empty string; with `verify`, they are read."""
        if bool(shard.files) != bool(shard.num_texts):
            return f"has a record of {shard.num_texts} texts and {len(shard.files)} files"
        for file in shard.files:
            # Names in the record are checked before anything is read: they may point elsewhere.
            if not is_name_of(file.name, name):
                return f"has a record of a file {file.name!r}"
            details = files.get(file.name)
            if details is None:
                return f"lacks {file.name}"
            if details.size_bytes != file.size_bytes:
                return f"has {file.name} of another size"
            if verify and file_sha256(self.folder.path / file.name) != file.sha256:
                return f"has {file.name} with other contents than were written"
        return ""

    def begun(self, number: int) -> list[ShardRecord]:
        """Return the leading shards of a split that are written."""
        shards: list[ShardRecord] = []
        while True:
            name = ShardName(number, len(shards))
            written = self.read_shard(name)
            if isinstance(written, str) or self._is_lost(name, written.shard):
                return shards
            shards.append(written.shard)

    def _is_lost(self, name: ShardName, shard: ShardRecord) -> bool:
        if not all(is_name_of(file.name, name) for file in shard.files):
            return True
        files = {file.name: entry(self.folder.path / file.name) for file in shard.files}
        return bool(self.fault(name, shard, files, verify=False))

    def forget(self, number: int, shards: Iterable[ShardName]) -> None:
        """Remove the records of a split and some of its shards, so that they are made again."""
        remove([self._file(f"split-{number:05d}"), *(self._file(name.stem) for name in shards)])


def remove_records(folder: OutputFolder) -> None:
    """Remove all records of any run."""
    path = folder.records_path
    # In reverse order, the file that identifies their owner is removed last.
    names = sorted(entries(path), key=lambda name: (name == RUN_FILE, name))
    remove(path / name for name in names if _OWN.fullmatch(name))
    if isinstance(path, Path):  # a store has only names
        with suppress(OSError):  # someone put a file into it
            path.rmdir()


def read_run(folder: OutputFolder) -> Run | None:
    """Return the run that a folder's records belong to; None if there are none.

    Raises:
        InputError: the file was not written by a run.
    """
    path = folder.records_path / RUN_FILE
    try:
        content = read_bytes(path)
        data = parse_json(content)
        run = Run(hashlib.sha256(content).hexdigest(), dict(data["identity"]))
        if data["format"] != _FORMAT or type(run.num_splits) is not int or not 0 < run.num_splits <= MOST_SPLITS:
            raise ValueError("its format or its number of splits does not match this onnxtool")
        return run
    except FileNotFoundError:
        return None
    except _FAULTS as error:
        raise InputError(f"{path} cannot be read: {error}", START_AGAIN) from error


def _content(identity: Identity) -> bytes:
    return f"{json_text({'format': _FORMAT, 'identity': identity})}\n".encode()


def begin_run(folder: OutputFolder, identity: Identity, *, force: bool = False) -> Records | None:
    """Claim a folder, and return its records; None if everything is already published.

    With `force`, existing contents are discarded, unless they are foreign.

    Raises:
        OutputExistsError: the folder belongs to another command, has foreign files, or would be taken from another run.
    """
    run = Run.of(identity)
    if force:
        folder.require_alone()
        remove_records(folder)
    manifest = None if force else read_manifest(folder.manifest_path)
    earlier = None if force else read_run(folder)
    folder.require_names(is_known=force or manifest is not None or earlier is not None)
    is_begun = earlier is not None and earlier.sha256 == run.sha256
    if manifest is not None and (other := difference(manifest.identity, identity)):
        if not is_begun:
            if earlier is None:
                remove_records(folder)  # of a run that was killed while it wrote the first one
            raise written_by_another(folder, other)
        force = True  # as the run that was killed between its records and the earlier manifest
    elif manifest is not None:
        remove_records(folder)  # of a run that was killed when it had published them
        folder.require_whole(manifest)
        return None
    if earlier is not None and not is_begun:
        raise written_by_another(folder, difference(earlier.identity, identity) or "another one")
    # Before any shard, so that incomplete files of a killed run can be attributed to it.
    if earlier is None and not folder.create(folder.records_path / RUN_FILE, _content(identity)):
        raise written_by_another(folder, "at the same time")
    if force:  # now that the records identify the files' owner
        remove([folder.manifest_path, folder.rejects_path])
    return Records(folder, run)


def written_by_another(folder: OutputFolder, other: str) -> OutputExistsError:
    """Return the error for a folder of another command; `other` says what differs."""
    return OutputExistsError(
        f"{folder.path} was written by another command ({other})",
        START_AGAIN,
    )
