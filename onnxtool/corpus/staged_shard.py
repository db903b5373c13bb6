"""A shard while it is written."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from onnxtool.corpus.manifest import ShardRecord
from onnxtool.corpus.output import OutputFolder, staged
from onnxtool.corpus.pipeline import EncodedWindow
from onnxtool.corpus.shards import ShardFormat, ShardWriter
from onnxtool.corpus.sources import Reject


class StagedShard:
    """The files of a shard under hidden names, until it is whole. One without any vector has no files."""

    def __init__(self, folder: OutputFolder, shard_format: ShardFormat, number: int) -> None:
        self._folder = folder
        self._format = shard_format
        self._names = shard_format.names(number)
        self._writer: ShardWriter | None = None
        self._num_texts = self._num_tokens = self._num_padding = self._num_truncated = 0
        self._rejects: list[Reject] = []

    @property
    def _paths(self) -> list[Path]:
        return [staged(self._folder.path / name) for name in self._names]

    def append(self, encoded: EncodedWindow) -> None:
        """Write the vectors of a window."""
        if encoded.vectors is not None:
            if self._writer is None:
                self._writer = self._format.open(self._paths)
            self._writer.append(encoded.window.documents, encoded.vectors)
        self._num_texts += len(encoded.window.documents)
        self._num_tokens += encoded.num_tokens
        self._num_padding += encoded.num_padding
        self._num_truncated += encoded.num_truncated
        self._rejects += encoded.rejects

    def commit(self, digest: str) -> ShardRecord:
        """Give the files their names, and return the record of a shard made from texts of this digest."""
        if self._writer is not None:
            self._writer.close()
        return ShardRecord(
            files=() if self._writer is None else self._folder.commit_shard(self._names),
            digest=digest,
            num_texts=self._num_texts,
            num_tokens=self._num_tokens,
            num_padding=self._num_padding,
            num_truncated=self._num_truncated,
            rejects=tuple(self._rejects),
        )

    def abandon(self) -> None:
        """Remove what is written, unless it was committed."""
        if self._writer is not None:
            with suppress(OSError):  # on a full disk closing fails as writing did
                self._writer.close()
            for path in self._paths:
                path.unlink(missing_ok=True)
