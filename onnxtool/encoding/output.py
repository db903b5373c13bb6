"""The folder of vectors: files appear in it whole, and failed writes are repeated with the same bytes.

On a disk, files are staged in a hidden folder next to it, flushed and renamed, and one run at a time owns the folder.
In a store, a single request writes a file: nothing is renamed, and no multipart upload could be left incomplete. A
shard's name includes a digest of its contents there, so that no writer can replace a file that another one recorded.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from onnxtool.encoding.files import (
    START_AGAIN,
    Entry,
    entries,
    put,
    read_bytes,
    remove,
    require_writable,
    scratch_folder,
)
from onnxtool.encoding.locations import AnyLocation, Location, Uri, parse_location
from onnxtool.encoding.manifest import FileRecord, Manifest, ShardRecord, file_sha256, read_manifest
from onnxtool.encoding.pipeline import EncodedWindow
from onnxtool.encoding.shards import ShardFormat, ShardWriter
from onnxtool.encoding.sources import Document, Reject
from onnxtool.encoding.splits import ShardName
from onnxtool.errors import NO_SPACE, InputError, OutputExistsError, OutputWriteError
from onnxtool.infer.vectors import SparseVectors
from onnxtool.model_file import check_not_input
from onnxtool.model_file.commits import PARTIAL, folder_lock, force_to_disk, hidden_folder, remove_stages
from onnxtool.reports import Json

# Pattern of all shard names: nothing else in the folder may be removed.
_DIGITS = 16  # of a digest in a name
_OWN_FILE = re.compile(
    rf"part-[0-9]{{5,}}(_[0-9]{{5,}})?(\.[0-9a-f]{{{_DIGITS}}})?\.(jsonl|parquet|npy|indptr\.npy|ids\.jsonl)"
)


def is_name_of(name: str, shard: ShardName) -> bool:
    """Whether a name matches the pattern of shard files."""
    return re.fullmatch(rf"{shard.stem}(\.[0-9a-f]{{{_DIGITS}}})?\.[a-z.]+", name) is not None


class OutputFolder:
    """A folder of shards, with its manifest and the rejected lines next to it.

    Attributes:
        path: the folder.
    """

    def __init__(self, path: AnyLocation) -> None:
        path = parse_location(path)
        # `.` and `..` have to be resolved for their name, which the files next to the folder use.
        self.path = path if isinstance(path, Uri) or path.name not in ("", "..") else path.resolve()
        if not self.path.name:
            raise InputError(f"{path} is the whole of a store", f"pass a folder in it, such as {path}vectors/")
        # Next to the folder.
        self.manifest_path, self.rejects_path, self.records_path = (
            self.path.with_name(f"{self.path.name}.{suffix}") for suffix in ("manifest.json", "rejects.jsonl", "parts")
        )
        for place in (self.path, self.manifest_path, self.rejects_path, self.records_path):
            if isinstance(place, Path):
                check_not_input(place, lies_in=False)
        self._stage: Path | None = None  # while it is written

    @contextmanager
    def locked(self, *, waits: bool = False) -> Iterator[None]:
        """Create the folder, and keep other runs out of it; the lock ends with this process in any case.

        With `waits`, another run has half a minute to end: one that publishes the same vectors takes no longer.

        Stores have no locks: two runs of one command write the same files there, and two runs of different commands are
        kept apart by the file that is created first.

        Raises:
            OutputExistsError: another run is writing into it.
            OutputWriteError: the folder cannot be made or written, or the disk is full.
        """
        with self.writing(), nullcontext() if isinstance(self.path, Uri) else folder_lock(self.path, waits=waits):
            yield

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Make the folder and a stage for its files; others may write into it as well. Leftovers of others are removed.

        Raises:
            OutputWriteError: the folder cannot be made or written, or the disk is full.
        """
        if self._stage is not None:  # within another block
            yield
            return
        try:
            with self._staging() as self._stage:
                yield
        except OSError as error:
            if error.errno is None:  # not a disk failure: other libraries derive their errors from OSError too
                raise
            if isinstance(error, FileExistsError | NotADirectoryError):
                raise OutputWriteError(
                    f"cannot write {self.path}: {error.filename or self.path} is a file",
                    "vectors go to a folder: pass --output NAME/",
                ) from error
            remedy = "make room" if error.errno in NO_SPACE else "check its permissions"
            raise OutputWriteError(
                f"cannot write {self.path}: {error.strerror}",
                f"everything written so far is kept; {remedy} or pass another --output, and run the same command again",
            ) from error
        finally:
            self._stage = None

    @contextmanager
    def _staging(self) -> Iterator[Path]:
        if isinstance(self.path, Uri):
            require_writable(self.path)
            with scratch_folder("shards") as folder:
                yield folder
            return
        self.path.mkdir(parents=True, exist_ok=True)
        remove_stages(self.path)
        with hidden_folder(self.path.parent, self.path.name) as hidden:
            yield hidden / "files"

    def staged(self, name: str, content: bytes | None = None) -> Path:
        """Return the path at which a file is written before it gets its place; with its content, if given."""
        assert self._stage is not None  # noqa: S101  callers are within `writing`
        path = self._stage / name
        if content is not None:
            path.write_bytes(content)
            force_to_disk(path)
        return path

    def write(self, location: Location, content: bytes) -> None:
        """Write a whole file next to the folder, replacing an existing one."""
        if isinstance(location, Uri):
            put(location, content)
            return
        location.parent.mkdir(exist_ok=True)
        self.staged(location.name, content).replace(location)
        force_to_disk(location.parent)

    def create(self, location: Location, content: bytes) -> bool:
        """Write a file that only one writer may create; return whether it has this content now.

        If the file exists, a store refuses the request, and a disk refuses the link.
        """
        if isinstance(location, Uri):
            return put(location, content, only_once=True) or read_bytes(location) == content
        location.parent.mkdir(exist_ok=True)
        path = self.staged(location.name, content)
        try:
            os.link(path, location)
        except FileExistsError:
            return read_bytes(location) == content
        except OSError:  # a filesystem without links
            path.replace(location)
        force_to_disk(location.parent)
        return True

    def require_own(self, *, force: bool) -> bool:
        """Refuse a folder with foreign files; return whether an earlier run wrote it.

        Raises:
            InputError: the manifest cannot be read.
            OutputExistsError: the folder has foreign files.
            OutputWriteError: nothing can be written there.
        """
        if isinstance(self.path, Uri):
            require_writable(self.path)
        is_known = read_manifest(self.manifest_path) is not None or bool(entries(self.records_path))
        if isinstance(self.path, Uri) or self.path.is_dir():
            self.require_names(is_known=force or is_known)
        elif self.path.exists():
            raise OutputWriteError(f"{self.path} is not a folder", "pass another --output")
        return is_known

    def require_names(self, *, is_known: bool = True) -> dict[str, Entry]:
        """Return the files of the folder.

        Raises:
            OutputExistsError: some do not match the names of shards, or are not recorded.
        """
        files = entries(self.path)
        # On a disk, folders count too. Others may write shards meanwhile, so each listing is checked separately.
        names = [path.name for path in self.path.iterdir()] if isinstance(self.path, Path) else files
        foreign = [name for name in names if not _OWN_FILE.fullmatch(name)]
        if foreign or (files and not is_known):
            raise OutputExistsError(
                f"{self.path} has files that no earlier run wrote, such as {min(foreign or files)}",
                "pass an --output folder that is empty or not there yet",
            )
        return files

    def half_written(self) -> tuple[str, ...]:
        """Return the stages of active or killed workers. Stores have none."""
        if isinstance(self.path, Uri):
            return ()
        return tuple(sorted(path.name for path in self.path.parent.glob(f".{glob.escape(self.path.name)}.*{PARTIAL}")))

    def require_alone(self) -> None:
        """Refuse to discard what another run writes, within `writing`. Stores do not tell.

        Raises:
            OutputExistsError: another run is writing into it.
        """
        assert self._stage is not None  # noqa: S101  callers are within `writing`
        for name in {*self.half_written()} - {self._stage.parent.name}:
            try:
                with suppress(FileNotFoundError), folder_lock(self._stage.parent.with_name(name)):
                    pass
            except OutputExistsError as error:
                raise OutputExistsError(
                    f"another run is writing into {self.path}", "wait for it, or pass another --output"
                ) from error

    def require_whole(self, manifest: Manifest) -> None:
        """Refuse a folder that lacks a file listed in its manifest.

        Raises:
            OutputExistsError: a file is missing, or has another size.
        """
        files = entries(self.path)
        for record in (file for shard in manifest.shards for file in shard.files):
            if record.name not in files or files[record.name].size_bytes != record.size_bytes:
                raise OutputExistsError(
                    f"{self.path / record.name} is missing, or its size has changed",
                    f"put it back, or {START_AGAIN}",
                )

    def remove_others(self, manifest: Manifest, names: Iterable[str] | None = None) -> int:
        """Remove files that killed runs left, among all files or those `names`.

        Returns: how many there were.
        """
        kept = {file.name for shard in manifest.shards for file in shard.files}
        unlisted = [name for name in (entries(self.path) if names is None else names) if name not in kept]
        remove(self.path / name for name in unlisted)
        return len(unlisted)

    def plain_name(self, name: str) -> str:
        """Return the name of a shard's file without the digest used in stores."""
        stem, _, suffixes = name.partition(".")
        return name if isinstance(self.path, Path) else f"{stem}.{suffixes.partition('.')[2]}"

    def commit_shard(self, files: Mapping[str, Path]) -> tuple[FileRecord, ...]:
        """Rename staged files into the folder, and return their records."""
        records = []
        for name, path in files.items():
            size, digest = path.stat().st_size, file_sha256(path)
            if isinstance(self.path, Path):
                force_to_disk(path)
                path.replace(self.path / name)
            else:
                stem, _, suffixes = name.partition(".")
                name = f"{stem}.{digest[:_DIGITS]}.{suffixes}"
                put(self.path / name, path)
                path.unlink()
            records.append(FileRecord(name, size, digest))
        if isinstance(self.path, Path):
            force_to_disk(self.path)
        return tuple(records)

    def publish(self, manifest: Manifest, names: Iterable[str] | None = None) -> int:
        """Write the manifest that marks a corpus as complete; remove files that it does not name.

        Args:
            manifest: the manifest.
            names: the folder's files, if already listed; in a store, listing takes a while.

        Returns:
            how many files were removed, which killed workers had left.

        Raises:
            OutputExistsError: another run has published a different one in the meantime.
        """
        is_alone = isinstance(self.path, Path)
        num_removed = self.remove_others(manifest) if is_alone else 0
        if not self.create(self.manifest_path, manifest.to_json().encode()):
            raise OutputExistsError(f"another run has published {self.manifest_path} meanwhile", START_AGAIN)
        if not is_alone:  # until now, another run of the same command may need the files that it has just written
            num_removed = self.remove_others(manifest, names)
        return num_removed


class StagedShard:
    """The staged files of a shard until it is complete. A shard without vectors has no files.

    Attributes:
        documents: the documents with vectors, without their contents.
    """

    def __init__(
        self,
        folder: OutputFolder,
        shard_format: ShardFormat,
        name: ShardName,
        description: Mapping[str, Json] = MappingProxyType({}),
    ) -> None:
        """Begin a shard; `description` describes its vectors."""
        self._folder = folder
        self._format = shard_format
        self._description = description
        self._files = {file: folder.staged(file) for file in shard_format.names(name.stem)}
        self._writer: ShardWriter | None = None
        self._num_tokens = self._num_padding = self._num_truncated = self._num_passages = self._num_empty = 0
        self._rejects: list[Reject] = []
        self.documents: list[Document] = []

    def append(self, encoded: EncodedWindow) -> None:
        """Write the vectors of a window."""
        if encoded.vectors is not None:
            if self._writer is None:
                self._writer = self._format.open([*self._files.values()], self._description)
            self._writer.append(encoded.rows, encoded.vectors)
        # Keep only what the record needs of each, not its contents.
        self.documents += [replace(document, contents="") for document in encoded.window.documents]
        self._num_passages += sum(row.span is not None for row in encoded.rows)
        self._num_tokens += encoded.num_tokens
        self._num_padding += encoded.num_padding
        self._num_truncated += encoded.num_truncated
        if isinstance(encoded.vectors, SparseVectors):
            self._num_empty += encoded.vectors.num_empty
        self._rejects += encoded.rejects

    def commit(self, digest: str) -> ShardRecord:
        """Rename the files, and return the record of a shard made from texts with this digest."""
        files = self._folder.commit_shard(self._files) if self._close() else ()
        return ShardRecord(
            files=files,
            digest=digest,
            num_texts=len(self.documents),
            num_tokens=self._num_tokens,
            num_padding=self._num_padding,
            num_truncated=self._num_truncated,
            rejects=tuple(self._rejects),
            num_passages=self._num_passages,
            num_empty=self._num_empty,
        )

    def abandon(self) -> None:
        """Close the files, unless committed; they are removed with the stage."""
        with suppress(OSError):  # on a full disk, closing fails like writing
            self._close()

    def _close(self) -> bool:
        """Close the files, once; return whether there were any."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
        return writer is not None
