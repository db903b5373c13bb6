"""What says that a shard is written, until all are: a record for each, `NAME.parts/part-NNNNN.RUN.json`.

It is written after the files of its shard: what has no record is not done. `RUN` are digits of the digest of what the
shards belong to, a plan or the command of one run, so that a listing tells which are done.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from onnxtool.encoding.files import Entry, create, entries, read_bytes, remove, remove_folder, write
from onnxtool.encoding.locations import Location
from onnxtool.encoding.manifest import (
    Identity,
    Manifest,
    ShardRecord,
    difference,
    file_sha256,
    json_text,
    parse_rejects,
    parse_shard,
)
from onnxtool.encoding.output import OutputFolder, is_name_of
from onnxtool.encoding.sources import Reject
from onnxtool.errors import OutputExistsError

_FORMAT = 1
_DIGITS = 12
_RUN = "run.json"
_OWN = re.compile(r"\.?(run|part-[0-9]{5,}(\.[0-9a-f]{12})?)\.json((\.[0-9a-f]{8})?\.partial)?")


class PartRecord(NamedTuple):
    """A shard that is written, and the lines among its own that gave no text."""

    shard: ShardRecord
    rejects: tuple[Reject, ...] = ()


class Records:
    """The records of shards that belong together.

    Attributes:
        path: of the folder that they are in.
    """

    def __init__(self, folder: OutputFolder, run: str) -> None:
        self._folder = folder
        self._run = run
        self.path = folder.records_path

    def file(self, number: int) -> Location:
        """Return where the record of a shard lies."""
        return self.path / f"part-{number:05d}.{self._run[:_DIGITS]}.json"

    def listed(self) -> dict[str, Entry]:
        """List the records."""
        return entries(self.path)

    def done(self, count: int, found: Mapping[str, Entry] | None = None) -> dict[int, Entry]:
        """Return which of `count` shards have a record, and when it was written; by one listing, else by `found`."""
        found = self.listed() if found is None else found
        names = {number: self.file(number).name for number in range(count)}
        return {number: found[name] for number, name in names.items() if name in found}

    def write(self, number: int, record: PartRecord) -> None:
        """Write the record of a shard whose files are in place."""
        content = {
            "format": _FORMAT,
            "run": self._run,
            "shard": asdict(record.shard),
            "rejects": [asdict(reject) for reject in record.rejects],
        }
        if isinstance(self.path, Path):
            self.path.mkdir(exist_ok=True)
        # Machines that make the same shard write the same record, each under a name of its own.
        write(self.file(number), f"{json.dumps(content)}\n".encode(), secrets.token_hex(4))

    def read(self, number: int) -> PartRecord | str:
        """Return the record of a shard, else why there is none; of its files nothing is known yet."""
        try:
            content = json.loads(read_bytes(self.file(number)))
            if content["format"] != _FORMAT or content["run"] != self._run:
                return "has a record of another run"
            record = PartRecord(parse_shard(content["shard"]), parse_rejects(content["rejects"]))
        except FileNotFoundError:
            return "is missing"
        except (OSError, ValueError, KeyError, TypeError, RecursionError, AttributeError) as error:
            return f"has a record that cannot be read: {error}"
        return record

    def checked(self, number: int, record: PartRecord, files: Mapping[str, Entry]) -> PartRecord | str:
        """Return a record whose files are among those of the folder, else what is wrong with them."""
        if bool(record.shard.files) != bool(record.shard.num_texts):
            return f"has a record of {record.shard.num_texts} texts and {len(record.shard.files)} files"
        for file in record.shard.files:
            # A name of the record is compared before anything is read: it may lead elsewhere.
            if not is_name_of(file.name, number):
                return f"has a record of a file {file.name!r}"
            if file.name not in files:
                return f"lacks {file.name}"
            if files[file.name].size_bytes != file.size_bytes:
                return f"has {file.name} of another size"
        return record

    def altered(self, record: PartRecord) -> str:
        """Read the files of a shard; return what is wrong with them, else an empty string."""
        for file in record.shard.files:
            if file_sha256(self._folder.path / file.name) != file.sha256:
                return f"has {file.name} with other contents than were written"
        return ""


def remove_records(folder: OutputFolder, found: Iterable[str] | None = None) -> None:
    """Remove all records, of whichever run, or those that were `found`."""
    path = folder.records_path
    # Sorted, what tells whose they are goes last.
    remove(path / name for name in sorted(entries(path) if found is None else found) if _OWN.fullmatch(name))
    remove_folder(path)  # unless somebody put a file into it


def begin_run(folder: OutputFolder, identity: Identity) -> tuple[Records, tuple[ShardRecord, ...]]:
    """Return where a run over a whole corpus records its shards, and those of an earlier run of the same command.

    Raises:
        OutputExistsError: the folder belongs to another command, or to a plan.
    """
    content = f"{json_text({'format': _FORMAT, 'identity': identity})}\n".encode()
    records = Records(folder, hashlib.sha256(content).hexdigest())
    marker = records.path / _RUN
    found = entries(records.path)
    shards = [name for name in found if name.startswith("part-")]
    if shards and _RUN not in found:
        raise OutputExistsError(
            f"{folder.path} has shards of a plan",
            "go on with onnxtool encode, or pass --force to start again, or another --output",
        )
    earlier = _read_identity(marker) if _RUN in found else None
    if earlier is not None and shards and (other := difference(earlier, identity)):
        raise written_by_another(folder, other)
    if isinstance(records.path, Path):
        records.path.mkdir(exist_ok=True)
    if earlier is None or earlier != identity:
        # Before any shard comes: what a killed run leaves half is then known to be its own.
        remove([marker] if _RUN in found else [])
        if not create(marker, content):
            raise written_by_another(folder, "at the same time")
    return records, _first_ones(records, found, folder.require_names())


def _first_ones(records: Records, found: Iterable[str], files: Mapping[str, Entry]) -> tuple[ShardRecord, ...]:
    """Read the records from the first shard on, up to one that is not done."""
    names = set(found)
    shards: list[ShardRecord] = []
    while records.file(len(shards)).name in names:
        record = records.read(len(shards))
        if isinstance(record, str) or isinstance(records.checked(len(shards), record, files), str):
            break
        shards.append(record.shard)
    return tuple(shards)


def _read_identity(marker: Location) -> Identity | None:
    try:
        content: Any = json.loads(read_bytes(marker))
        return dict(content["identity"]) if content["format"] == _FORMAT else None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def written_by_another(folder: OutputFolder, other: str) -> OutputExistsError:
    """Say that a folder is of another command, and how they differ."""
    return OutputExistsError(
        f"{folder.path} was written by another command ({other})",
        "pass --force to remove it and start again, or another --output",
    )


def require_same(folder: OutputFolder, manifest: Manifest, identity: Identity) -> None:
    """Refuse a folder that is whole, and of another command.

    Raises:
        OutputExistsError: it is.
    """
    if other := difference(manifest.identity, identity):
        raise written_by_another(folder, other)
