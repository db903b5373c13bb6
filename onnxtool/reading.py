"""Bounded readers: all external data is read here, so that no file can fill memory or block.

The running call's inputs are noted too: nothing that it writes may replace or remove one. Calls name theirs with
`reading`; whatever opens a model, a checkpoint's file or a configuration adds it.

Failures are standard exceptions: `OSError` for a file that is too large or not a regular file, `ValueError` for content
that cannot be parsed. Callers turn them into an error that names the file and the remedy.
"""

from __future__ import annotations

import errno
import gzip
import io
import json
import os
import stat
import sys
import zlib
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from numpy.typing import NDArray

Lines: TypeAlias = IO[bytes] | gzip.GzipFile

MOST_BYTES = 1 << 28  # records and reports of the largest corpora
MOST_CONFIG_BYTES = 1 << 20  # a configuration that people write has a few lines
MOST_LINE_BYTES = 1 << 24
_MOST_WRITTEN_BYTES = 8 * MOST_LINE_BYTES
MOST_DEPTH = 128
MOST_DIGITS = 4300  # Python's limit for converting a number
STDIN = Path("-")
GZIP_ERRORS = (EOFError, gzip.BadGzipFile, zlib.error)
_READ_BYTES = 1 << 20
_SETTINGS = (".json", ".txt", ".model", ".jinja", ".vocab", ".bpe", ".tiktoken", ".yaml", ".py")
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
    inputs = list(filter(os.path.exists, _inputs.get() or ())) if os.path.exists(path) else []  # noqa: PTH110  never fails
    return next(
        (own for own in inputs if path.samefile(own) or _holds(path, own) or (lies_in and _is_read_in(own, path))), None
    )


def _is_read_in(folder: Path, path: Path) -> bool:
    # No command reads the graphs in a checkpoint, next to which they are exported.
    return path.is_file() and ".onnx" not in path.suffixes and _holds(folder, path)


def _holds(folder: Path, path: Path) -> bool:
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def open_regular(path: Path) -> io.BufferedReader:
    """Open a regular file for reading; a pipe could block, and a device may have no end.

    Raises:
        OSError: it is not a regular file, or cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes:
    """Read a regular file of at most `most` bytes.

    Raises:
        OSError: it is larger, is not a regular file, or cannot be read.
    """
    with open_regular(path) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        require_size(size_bytes, path, most)
        return file.read(size_bytes)  # at most its size at opening: anything appended since is ignored


def require_inside(path: Path, folder: Path) -> None:
    """Refuse a file of a checkpoint that a link leads out of its folder: its content would be copied and published.

    Links of the hub's cache lead from `snapshots/COMMIT` into the `blobs` next to it.

    Raises:
        OSError: it leads elsewhere.
    """
    root, target = folder.resolve(), path.resolve()
    snapshots = [commit for commit in (root, *root.parents) if commit.parent.name == "snapshots"]
    caches = [commit.parents[1] / "blobs" for commit in snapshots]
    if not any(target.is_relative_to(allowed) for allowed in (root, *caches)):
        raise OSError(errno.ELOOP, f"it is a link to {target}, outside the checkpoint", str(path))


def require_small_settings(folder: Path, root: Path | None = None) -> None:
    """Check the settings and vocabularies in a folder of the checkpoint in `root` before a library reads them.

    Raises:
        OSError: one is larger than MOST_BYTES, is not a regular file, which could block a library, or is linked from
            outside.
    """
    for path in folder.iterdir():
        if path.suffix in _SETTINGS and path.exists() and not path.is_dir():
            require_inside(path, root or folder)
            if not path.is_file():
                raise OSError(errno.EINVAL, "it is no regular file", str(path))
            require_size(path.stat().st_size, path)


def load_array(path: Path) -> NDArray[Any]:
    """Read an array written by numpy.save, without allocating memory for a header that promises more than the file has.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not such a file, or holds objects.
    """
    import numpy as np

    with open_regular(path):
        try:
            mapped = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError):
            raise
        except Exception as error:  # numpy parses the header as a Python literal, and allocates the size that it states
            raise ValueError(f"{type(error).__name__} {error}") from error
    if not isinstance(mapped, np.ndarray):
        mapped.close()
        raise ValueError("it is an archive of arrays")
    return np.array(mapped)


def require_size(size_bytes: int, path: object, most: int = MOST_BYTES) -> None:
    """Raise OSError if a file has more than `most` bytes."""
    if size_bytes > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes", str(path))


def read_text(path: Path, most: int = MOST_BYTES, *, errors: str = "strict") -> str:
    """Read a regular file as UTF-8; see `read_bytes`."""
    return read_bytes(path, most).decode("utf-8", errors)


def parse_json(content: str | bytes) -> Any:
    """Parse JSON that is nested at most MOST_DEPTH deep, with numbers of at most MOST_DIGITS digits.

    Raises:
        ValueError: it is none.
    """
    try:
        value = json.loads(content)
    except RecursionError:
        raise _too_deep() from None
    except (json.JSONDecodeError, UnicodeDecodeError):
        raise
    except ValueError:
        raise _too_long() from None
    if isinstance(content, bytes):
        num_brackets = content.count(b"[") + content.count(b"{")
    else:
        num_brackets = content.count("[") + content.count("{")
    if num_brackets > MOST_DEPTH:
        _require_shallow(value)
    return value


def read_json(path: Path, most: int = MOST_BYTES) -> Any:
    """Read a regular file as JSON; see `read_bytes` and `parse_json`."""
    return parse_json(read_bytes(path, most))


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML.

    Raises:
        ValueError: it is not TOML, is nested too deep, or has a number with too many digits.
    """
    import tomllib

    try:
        return tomllib.loads(text)
    except RecursionError:
        raise _too_deep() from None
    except tomllib.TOMLDecodeError:
        raise
    except ValueError:
        raise _too_long() from None


def open_lines(path: Path) -> AbstractContextManager[Lines]:
    """Open a text file, compressed with gzip if its name ends in `.gz`; `-` is stdin.

    Raises:
        OSError: it cannot be read.
    """
    if path == STDIN:
        return nullcontext(sys.stdin.buffer)
    return gzip.GzipFile(path) if path.name.lower().endswith(".gz") else path.open("rb")


def lines_of(file: Lines, *, skips: bool = False) -> Iterator[tuple[bytes | None, int]]:
    """Yield the lines of `file` with their sizes; None for one longer than MOST_LINE_BYTES, never held in full.

    Such a line may never end, so reading stops after its beginning, unless it `skips` these lines.
    """
    while line := file.readline(MOST_LINE_BYTES + 1):
        size = len(line)
        if size <= MOST_LINE_BYTES:
            yield line, size
            continue
        while skips and not line.endswith(b"\n") and (line := file.readline(_READ_BYTES)):
            size += len(line)
        yield None, size
        if not skips:
            return


def written_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file that onnxtool wrote: one has a text of up to MOST_LINE_BYTES, escaped, and its vector.

    Raises:
        OSError: it cannot be read, or has a longer line.
    """
    with open_lines(path) as file:
        while line := file.readline(_MOST_WRITTEN_BYTES + 1):
            require_size(len(line), path, _MOST_WRITTEN_BYTES)
            yield line


def _require_shallow(value: Any) -> None:
    level = [value]
    for _ in range(MOST_DEPTH):
        inside = (item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list))
        level = [item for several in inside for item in several if isinstance(item, dict | list)]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> ValueError:
    return ValueError(f"it is nested more than {MOST_DEPTH} deep")


def _too_long() -> ValueError:
    return ValueError(f"a number has more than {MOST_DIGITS} digits")
