"""Files that the running call reads, which nothing that it writes may replace or remove.

Calls name theirs with `reading`; whatever opens a model, a checkpoint's file or a configuration adds it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

_inputs: ContextVar[dict[Path, None] | None] = ContextVar("inputs", default=None)


@contextmanager
def reading(paths: Iterable[Path] = ()) -> Iterator[None]:
    """Protect `paths`, files and folders, and what `note_input` adds, until the outermost block ends."""
    outer = _inputs.get()
    token = _inputs.set({} if outer is None else outer)
    note_input(*paths)
    try:
        yield
    finally:
        _inputs.reset(token)


def note_input(*paths: Path) -> None:
    """Add files to the inputs of the running call."""
    if (known := _inputs.get()) is not None:
        known.update(dict.fromkeys(paths))


def input_at(path: Path, *, lies_in: bool = True) -> Path | None:
    """Return the input that replacing `path` would change: itself by any name, in it, or a folder that it `lies_in`."""
    known = list(filter(os.path.exists, _inputs.get() or ())) if os.path.exists(path) else []  # noqa: PTH110  never fails
    return next(
        (one for one in known if path.samefile(one) or _holds(path, one) or (lies_in and _is_read_in(one, path))), None
    )


def _is_read_in(folder: Path, path: Path) -> bool:
    # No command reads the graphs in a checkpoint, next to which they are exported.
    return path.is_file() and ".onnx" not in path.suffixes and _holds(folder, path)


def _holds(folder: Path, path: Path) -> bool:
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))
