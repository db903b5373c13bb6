"""Writes every compiled graph as an ONNX file, and its FX graph as a text file beside it."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from onnxtool.errors import OutputWriteError
from onnxtool.options import checked

VARIABLE = "ONNXRT_DUMP_PATH"


def is_dumping() -> bool:
    """Whether the environment asks for dumps."""
    return bool(os.environ.get(VARIABLE))


def dump(model: bytes, text: str) -> None:
    """Write `{prefix}{N}.onnx` and `.txt` where the environment variable ONNXRT_DUMP_PATH gives a prefix.

    Raises:
        OutputWriteError: the files cannot be written.
    """
    prefix = os.environ.get(VARIABLE, "")
    if not prefix:
        return
    try:
        Path(f"{prefix}0").parent.mkdir(parents=True, exist_ok=True)
        for number in itertools.count():
            with contextlib.suppress(FileExistsError), Path(f"{prefix}{number}.onnx").open("xb") as file:
                file.write(model)
                Path(f"{prefix}{number}.txt").write_text(text, encoding="utf-8")
                break
    except OSError as error:
        raise OutputWriteError(
            f"cannot dump a graph to {prefix}*.onnx: {error.strerror}", f"check {VARIABLE}"
        ) from error


@contextmanager
@checked
def dump_onnx(prefix: str, folder: str | Path | None = None, clean: bool = False) -> Iterator[None]:
    """Dump what is compiled inside of the block to `{folder}/{prefix}{N}.onnx` and `.txt`.

    Args:
        prefix: the start of all file names.
        folder: the folder of the files, which is made if needed; by default the current one.
        clean: whether earlier dumps, `{prefix}*.onnx` and `.txt`, are removed from the folder first.

    Raises:
        OutputWriteError: the folder cannot be made or cleaned.
    """
    target = Path(folder or ".")
    try:
        target.mkdir(parents=True, exist_ok=True)
        if clean:
            for path in target.iterdir():
                if path.name.startswith(prefix) and path.suffix in (".onnx", ".txt"):
                    path.unlink()
    except OSError as error:
        raise OutputWriteError(f"cannot use {target} for dumps: {error.strerror}", "pass another folder") from error
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = str(target / prefix)
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before
