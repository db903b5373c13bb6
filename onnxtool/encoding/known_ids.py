"""The ids that a corpus had so far, on the disk where they are many."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from onnxtool.encoding.digests import id_digest
from onnxtool.errors import OutputWriteError

MEMORY_BYTES = 1 << 26


class KnownIds:
    """A set of ids that only grows.

    It holds a digest of each. They lie in a database without a name, which SQLite keeps in memory up to `memory_bytes`,
    then in a file that is gone with it.
    """

    def __init__(self, memory_bytes: int | None = None) -> None:
        # Whoever reads the corpus adds ids in a thread of its own; this one may close it.
        self._database = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        self._database.execute(f"PRAGMA cache_size = -{(memory_bytes or MEMORY_BYTES) // 1024}")
        self._database.execute("PRAGMA journal_mode = OFF")
        self._database.execute("CREATE TABLE ids (digest BLOB PRIMARY KEY) WITHOUT ROWID")
        self._database.execute("BEGIN")

    def add(self, ids: Sequence[str]) -> list[bool]:
        """Add `ids` and return for each whether it was there before, or earlier among them.

        Raises:
            OutputWriteError: the folder for temporary files is full.
        """
        digests = [id_digest(name) for name in ids]
        add = self._database.execute
        try:
            return [add("INSERT OR IGNORE INTO ids VALUES (?)", (digest,)).rowcount == 0 for digest in digests]
        except sqlite3.Error as error:
            raise OutputWriteError(
                f"cannot keep the ids of the corpus in a temporary file: {error}",
                "make room, or set SQLITE_TMPDIR to a folder that has some",
            ) from error

    def close(self) -> None:
        """Remove the file."""
        self._database.close()
