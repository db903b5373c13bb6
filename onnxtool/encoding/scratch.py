"""Folders for temporary files, of which none outlives its process for long."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from onnxtool.errors import OutputExistsError
from onnxtool.model_file.commits import folder_lock

_YOUNG_S = 60.0  # one that has just been made may not have its lock yet


@contextmanager
def scratch_folder(kind: str) -> Iterator[Path]:
    """Give a folder for temporary files; those that killed processes have left of this `kind` are removed first."""
    prefix = f"onnxtool-{kind}-"
    for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError, OutputExistsError):
            _remove_abandoned(path)
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as name, folder_lock(Path(name)):
        yield Path(name)


def _remove_abandoned(path: Path) -> None:
    """Remove a folder that nobody has locked: locks end with their process, also in another container."""
    status = path.lstat()
    is_ours = sys.platform != "win32" and status.st_uid == os.geteuid() and not path.is_symlink()
    if is_ours and time.time() - status.st_mtime > _YOUNG_S:
        with folder_lock(path):
            shutil.rmtree(path)
