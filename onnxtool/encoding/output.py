"""The folder of vectors: one run writes into it at a time, and files appear in it whole.

A file is written under a hidden name, forced to the disk, and renamed. If anything fails before the manifest names it,
the next run writes it again with the same bytes.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from onnxtool.encoding.manifest import FileRecord, Manifest, ShardRecord, difference, file_sha256, read_manifest
from onnxtool.encoding.pipeline import EncodedWindow
from onnxtool.encoding.shards import ShardFormat, ShardWriter
from onnxtool.encoding.sources import Reject
from onnxtool.errors import OutputExistsError, OutputWriteError
from onnxtool.model_file.commits import folder_lock, force_to_disk

# All names that shards ever have: nothing else in the folder is ours to remove.
_OWN_FILE = re.compile(
    r"\.?part-[0-9]{5,}\.(jsonl|jsonl\.gz|parquet|npy|indptr\.npy|ids\.jsonl)((\.[0-9a-f]{8})?\.partial)?"
)
_OWN_RECORD = re.compile(r"\.?part-[0-9]{5,}\.json(\.[0-9a-f]{8}\.partial)?")


class OutputFolder:
    """A folder of shards, and beside it its manifest and the lines that were rejected."""

    def __init__(self, path: Path) -> None:
        # Of `.` and `..` the name shows only when they are resolved; the files beside are called after it.
        self.path = path if path.name not in ("", "..") else path.resolve()
        self.manifest_path = self.beside("manifest.json")
        self.rejects_path = self.beside("rejects.jsonl")
        self.records_path = self.beside("parts")

    def beside(self, suffix: str) -> Path:
        """Return where a file of this folder lies that is not in it."""
        return self.path.with_name(f"{self.path.name}.{suffix}")

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make the folder, and keep other runs out of it; the lock ends with this process, however it ends.

        Raises:
            OutputExistsError: another run is writing into it.
            OutputWriteError: the folder cannot be made or written, or the disk is full.
        """
        with self.writing(), folder_lock(self.path):
            yield

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Make the folder; others may write into it as well.

        Raises:
            OutputWriteError: the folder cannot be made or written, or the disk is full.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            yield
        except OSError as error:
            if error.errno is None:  # no failure of the disk: other libraries derive theirs from OSError as well
                raise
            raise OutputWriteError(
                f"cannot write {self.path}: {error.strerror}",
                "what is written so far stays; make room or pass another --output, and run the same command again",
            ) from error

    def begin(self, wanted: Manifest, *, force: bool) -> Manifest:
        """Return the record to go on from: that of an earlier run of the same command, else `wanted`, which is empty.

        Args:
            wanted: the record of a new run.
            force: whether to remove the files of an earlier run, also one with other options.

        Raises:
            InputError: the manifest cannot be read.
            OutputExistsError: the folder has files of others, or of another command and `force` is not set, or a
                shard is missing or changed.
        """
        for path in (self.manifest_path, self.rejects_path):  # of a killed run, whichever it was
            staged(path).unlink(missing_ok=True)
        earlier = None if force else read_manifest(self.manifest_path)
        self.require_names(is_known=force or earlier is not None)
        other = "" if earlier is None else difference(earlier.identity, wanted.identity)
        if earlier is None or (other and not earlier.shards):
            # Before any shard comes or goes: what a killed run leaves half is then known to be its own.
            self.write_manifest(wanted)
            self.remove_others(wanted)
            self.rejects_path.unlink(missing_ok=True)
            return wanted
        if other:
            raise OutputExistsError(
                f"{self.path} was written by another command ({other})",
                "pass --force to remove it and start again, or another --output",
            )
        self._require_whole(earlier)
        self.remove_others(earlier)
        return earlier

    def require_own(self, *, force: bool) -> bool:
        """Refuse a folder that `begin` would refuse by its files alone; return whether an earlier run wrote it.

        Raises:
            InputError: the manifest cannot be read.
            OutputExistsError: the folder has files of others.
        """
        is_known = read_manifest(self.manifest_path) is not None
        if self.path.is_dir():
            self.require_names(is_known=force or is_known)
        elif self.path.exists():
            raise OutputWriteError(f"{self.path} is no folder", "pass another --output")
        return is_known

    def require_names(self, *, is_known: bool = True) -> None:
        """Refuse a folder with files that are not called as shards are, or of which no manifest tells."""
        names = sorted(path.name for path in self.path.iterdir())
        foreign = [name for name in names if not _OWN_FILE.fullmatch(name)]
        if foreign or (names and not is_known):
            raise OutputExistsError(
                f"{self.path} has files that no run into it wrote, such as {(foreign or names)[0]}",
                "pass an --output folder that is empty or not there yet",
            )

    def _require_whole(self, manifest: Manifest) -> None:
        for record in (file for shard in manifest.shards for file in shard.files):
            path = self.path / record.name
            if not path.is_file() or path.stat().st_size != record.size_bytes:
                raise OutputExistsError(
                    f"{path} is missing or has another size than when it was written",
                    "put it back, or pass --force to start again",
                )

    def remove_others(self, manifest: Manifest) -> None:
        """Remove what a killed run left half or unnamed."""
        kept = {file.name for shard in manifest.shards for file in shard.files}
        for path in self.path.iterdir():
            if path.name not in kept:
                path.unlink()

    def remove_records(self) -> None:
        """Remove the records of shards that were made by a plan."""
        if self.records_path.is_dir():
            for path in self.records_path.iterdir():
                if _OWN_RECORD.fullmatch(path.name):
                    path.unlink(missing_ok=True)
            with suppress(OSError):  # somebody put a file there
                self.records_path.rmdir()

    def commit_shard(self, files: Mapping[str, Path]) -> tuple[FileRecord, ...]:
        """Give staged files of the folder their names, and return what they are."""
        records = []
        for name, path in files.items():
            force_to_disk(path)
            records.append(FileRecord(name, path.stat().st_size, file_sha256(path)))
            path.replace(self.path / name)
        force_to_disk(self.path)
        return tuple(records)

    def write_manifest(self, manifest: Manifest) -> None:
        """Replace the record."""
        staged(self.manifest_path).write_text(manifest.to_json(), encoding="utf-8")
        publish(self.manifest_path)


class StagedShard:
    """The files of a shard under hidden names, until it is whole. One without any vector has no files."""

    def __init__(self, folder: OutputFolder, shard_format: ShardFormat, number: int) -> None:
        self._folder = folder
        self._format = shard_format
        # Two machines may make the same shard at once: each under names of its own.
        token = secrets.token_hex(4)
        self._files = {name: staged(folder.path / name, token) for name in shard_format.names(number)}
        self._writer: ShardWriter | None = None
        self._num_texts = self._num_tokens = self._num_padding = self._num_truncated = self._num_passages = 0
        self._rejects: list[Reject] = []

    def append(self, encoded: EncodedWindow) -> None:
        """Write the vectors of a window."""
        if encoded.vectors is not None:
            if self._writer is None:
                self._writer = self._format.open([*self._files.values()])
            self._writer.append(encoded.rows, encoded.vectors)
        self._num_texts += len(encoded.window.documents)
        self._num_passages += sum(row.span is not None for row in encoded.rows)
        self._num_tokens += encoded.num_tokens
        self._num_padding += encoded.num_padding
        self._num_truncated += encoded.num_truncated
        self._rejects += encoded.rejects

    def commit(self, digest: str) -> ShardRecord:
        """Give the files their names, and return the record of a shard made from texts of this digest."""
        if self._writer is not None:
            self._writer.close()
        return ShardRecord(
            files=() if self._writer is None else self._folder.commit_shard(self._files),
            digest=digest,
            num_texts=self._num_texts,
            num_tokens=self._num_tokens,
            num_padding=self._num_padding,
            num_truncated=self._num_truncated,
            rejects=tuple(self._rejects),
            num_passages=self._num_passages,
        )

    def abandon(self) -> None:
        """Remove what is written, unless it was committed."""
        if self._writer is not None:
            with suppress(OSError):  # on a full disk closing fails as writing did
                self._writer.close()
            for path in self._files.values():
                path.unlink(missing_ok=True)


def staged(path: Path, token: str = "") -> Path:
    """Return where a file is written before it gets its name; `token` is of one of several writers."""
    return path.with_name(f".{path.name}{token and f'.{token}'}.partial")


def publish(path: Path, token: str = "") -> None:
    """Force a staged file to the disk and give it its name."""
    force_to_disk(staged(path, token))
    staged(path, token).replace(path)
    force_to_disk(path.parent)
